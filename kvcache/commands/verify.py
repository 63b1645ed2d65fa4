"""`verify`: whether prompts have the same bits in every way, on this machine, on another one, or behind a server."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable, Sequence

from kvcache.certificates.certificate import Certificate, Row
from kvcache.certificates.levels import Level
from kvcache.certificates.rounds import MOST_PROMPTS, Bounds, verified
from kvcache.certificates.server_client import ServerClient
from kvcache.certificates.server_rounds import WarmComparison, compared
from kvcache.certificates.subject import Subject
from kvcache.commands.answer_view import note
from kvcache.commands.message_reader import visible
from kvcache.commands.options import MODEL, add_network, check_network, check_output, network_defaults, open_network
from kvcache.engine import InferenceEngine
from kvcache.kernels.kernels import simd_level, simd_levels
from kvcache.kernels.threads import get_num_threads
from kvcache.support.arguments import as_count, as_finite

__all__ = ["add_verify", "verify"]

EQUAL, DIFFERENT, INCOMPLETE = 0, 1, 3  # exit statuses; 2 is an error, as of all commands
_SECONDS, _REQUESTS, _LENGTH = 60.0, 8, 120
# Options of `add_network` and the model, which processes of other levels get too; what is None is left out.
_OF_A_NETWORK = ("model", "dtype", "calibrate", "weights", "activations", "sparse_tokens", "threads")
_OF_A_SERVER = ("requests", "words", "api_key")
_WITHOUT_A_SERVER = ("seconds", "prompts", "way", "json", "against")


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--model", metavar="PATH", help=f"{MODEL} (the demo's); with --server the name of a model there (its first)")
    add_network(parser)
    add("--seconds", type=float, metavar="S", help=f"after which nothing new begins ({_SECONDS:g})")
    add("--prompts", type=int, metavar="N", help="at most (as many as there is time for)")
    add("--way", action="append", metavar="NAME",
        help="the beginning of a name in the table, such as hit, level or cold; may be repeated (all)")
    add("--json", metavar="FILE", help="write the certificate: the network, its formats, this machine, and all digests")
    add("--against", metavar="FILE", help="compare with a certificate, of another machine or an earlier version")
    add("--server", metavar="URL", help="ask this server, of any engine with OpenAI's interface, cold and warm")
    add("--requests", type=int, metavar="N", help=f"prompts for a server ({_REQUESTS})")
    add("--words", type=int, metavar="N", help=f"of the beginning that prompts for a server share ({_LENGTH})")
    add("--api-key", metavar="KEY", help="of the server")


def verify(options: argparse.Namespace, default: Callable[[], str], version: str) -> int:
    """Print what is equal and what differs; returns the exit status: `EQUAL`, `DIFFERENT` or `INCOMPLETE`.

    Args:
        options: of the command.
        default: called for the model where the options name none.
        version: of the library.
    """
    asks = options.server is not None
    unsaid = dict.fromkeys(_WITHOUT_A_SERVER) | network_defaults() if asks else dict.fromkeys(_OF_A_SERVER)
    for name, value in unsaid.items():
        if getattr(options, name) != value:
            expected = "none with --server" if asks else "--server beside it"
            raise ValueError(f"{name}: expected {expected}, got {getattr(options, name)}")
    return _verify_server(options) if asks else _verify_network(options, default, version)


# -- a network ------------------------------------------------------------------------------------------------


def _verify_network(options: argparse.Namespace, default: Callable[[], str], version: str) -> int:
    options.model = options.model or default()
    most_threads = get_num_threads()
    seconds = as_finite(_SECONDS if options.seconds is None else options.seconds, "seconds", 0.0, above=True)
    prompts = MOST_PROMPTS if options.prompts is None else as_count(options.prompts, "prompts", 1, MOST_PROMPTS)
    check_network(options)
    if options.json is not None:
        check_output(options.json, "json")
    against = None if options.against is None else Certificate.read(options.against)
    levels = [Level(name, _arguments(options)) for name in simd_levels() if name != simd_level()]
    bounds, ways = Bounds(seconds, prompts), options.way or ()
    found = verified(_subject(options), bounds, version, most_threads, ways, levels, against)
    _print_network(found)
    if options.json is not None:
        found.write(options.json)
    different = bool(found.different)
    if against is not None:
        different |= _print_against(found, against)
    if found.missing:
        print(f"\nnot compared: {', '.join(found.missing)}; more --seconds or --prompts may compare them")
    return DIFFERENT if different else INCOMPLETE if found.missing else EQUAL


def _subject(options: argparse.Namespace) -> Callable[[], Subject]:
    """Makes the network of the options, with the layers that propose draft tokens."""
    return lambda: Subject(open_network(options, InferenceEngine.from_pretrained, num_blocks=2, draft="auto"))


def _arguments(options: argparse.Namespace) -> list[str]:
    """The command of a process that computes the same network."""
    found = ["verify"]
    for name in _OF_A_NETWORK:
        if (value := getattr(options, name)) is not None:
            found.append(f"--{name.replace('_', '-')}={value}")
    return found


def _print_network(found: Certificate) -> None:
    identity, machine = found.identity, found.machine
    kv = identity["kv"]
    formats = f"{kv['keys']}" if kv["keys"] == kv["values"] else f"{kv['keys']} and {kv['values']}"
    print(f"{identity['network']}, weights {identity['weights']}, K and V {formats}, bits {identity['bits']}")
    print(f"{machine['cpu']}, {machine['level']}, {machine['threads']} threads, kvcache {machine['kvcache']}\n")
    lines = [("cold", f"{len(found.records)}", f"{sum(each.prompt + len(each.tokens) for each in found.records)}", "")]
    lines += [(row.way, str(row.prompts), str(row.tokens), _verdict(row)) for row in found.rows]
    _print_table(("way", "prompts", "tokens", ""), lines)
    print(f"\ndigest {found.digest} of {len(found.records)} prompts")


def _verdict(row: Row) -> str:
    if row.different:
        return f"{row.different} differ: {row.first}"
    if not row.prompts:
        return f"not compared; {row.note}"
    return f"equal; {row.note}" if row.note else "equal"


def _print_against(found: Certificate, other: Certificate) -> bool:
    """Print the comparison with a certificate of another machine; whether something differs."""
    count, machine = min(len(found.records), len(other.records)), other.machine
    told = f"{machine.get('cpu')}, {machine.get('level')}, kvcache {machine.get('kvcache')}"
    print(f"\nagainst {visible(told)}:")
    different = list(found.differences(other))
    for line in different:
        print(f"different: {line}")
    if not different:
        print(f"equal: {count} prompts, of {len(found.records)} here and {len(other.records)} there")
    return bool(different)


def _print_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print columns; the numbers between the first and the last one stand at the right."""
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    for line in (head, *lines):
        numbers = [cell.rjust(width) for cell, width in zip(line[1:-1], widths[1:-1], strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *numbers, line[-1]]).rstrip())


# -- a server -------------------------------------------------------------------------------------------------


def _verify_server(options: argparse.Namespace) -> int:
    count = as_count(_REQUESTS if options.requests is None else options.requests, "requests", 1, 1000)
    length = as_count(_LENGTH if options.words is None else options.words, "words", 1, 100_000)
    client = ServerClient(options.server, options.api_key, options.model)
    seed = secrets.token_hex(8)
    note(f"{client.url}: {client.model}, {client.choose(f'{seed} Once upon a time')}, {count} prompts of seed {seed}")
    found = compared(client, seed, count, length)
    head = ("way", "answers", "flipped", "moved", "largest difference", "first token", "cached", "")
    _print_table(head, [_cells(each) for each in found])
    print("\nflipped: other tokens than the cold answer; moved: other tokens or log-probabilities")
    if any(each.moved for each in found):
        return DIFFERENT
    return INCOMPLETE if any(each.is_missing for each in found) else EQUAL


def _cells(each: WarmComparison) -> tuple[str, ...]:
    largest = "unknown" if each.largest is None else f"{each.largest:.3g}"
    first, cached = ("-" if value is None else str(value) for value in (each.first, each.cached))
    verdict = "different" if each.moved else "not compared; no hit" if each.is_missing else "equal"
    return each.way, str(each.answers), str(each.flipped), str(each.moved), largest, first, cached, verdict
