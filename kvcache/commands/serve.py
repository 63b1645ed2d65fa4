"""`serve`: a server in front of a model, and the keys of its clients."""

from __future__ import annotations

import argparse
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from kvcache.commands.answer_view import note
from kvcache.commands.chat import MAX_TOKENS
from kvcache.commands.options import (
    SHARE,
    add_chat_template,
    add_options,
    chat_template_of,
    checked,
    expect_adapter,
    expected_bytes,
    name_of,
    open_engine,
)
from kvcache.commands.shared_tiers import add_tiers, check_tiers, open_tiers
from kvcache.engine.template_sandbox import compiled
from kvcache.prefix.events.kv_events import KvEvents
from kvcache.sampling.dialects.dialect_table import DIALECTS, dialect_of
from kvcache.serving.batch import BatchEngine
from kvcache.support.arguments import as_count, as_finite, short
from kvcache.support.hosts import is_loopback
from kvcache.support.machine_memory import machine_memory, size_text

__all__ = ["add_serve", "keys_of", "serve"]

VARIABLE = "KVCACHE_API_KEYS"
_FLUSH = 60.0  # seconds that cached prefixes of a model have to reach its tiers when it is unloaded


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add_options(parser, model_required=False, max_tokens=MAX_TOKENS)
    add_chat_template(parser)
    parser.set_defaults(parser=parser, tables=[])
    add("--config", metavar="FILE",
        help="options of this command in TOML, such as port = 8080, and a table [[model]] for each of several models; "
        "those given here win")
    add("--name", help="the name by which clients ask for the model (the last part of its path)")
    add("--served-name", action="append", default=[], metavar="NAME", help="another such name; may be repeated")
    add("--adapter", action="append", default=[], metavar="NAME=PATH",
        help="an adapter of the model (LoRA), a folder of peft or a GGUF file, which requests name as their model; may "
        "be repeated")
    add("--adapter-folder", metavar="FOLDER",
        help="let clients load adapters in this folder, by /v1/load_lora_adapter, and unload them, by "
        "/v1/unload_lora_adapter; with keys those of the namespace adapters")
    add("--host", default="127.0.0.1", help="address to listen on; without keys one of this machine (%(default)s)")
    add("--port", type=int, default=8000, help="0 takes a free one (%(default)s)")
    keys = f"a KEY in each line, or KEY NAMESPACE; instead of the lines of the variable {VARIABLE}"
    add("--api-keys", metavar="FILE", help=keys)
    add_tiers(parser)
    add("--max-running", type=int, default=64, metavar="N", help="answers that run at a time (%(default)s)")
    add("--max-queue", type=int, default=256, metavar="N", help="answers that wait; more get status 429 (%(default)s)")
    add("--max-body", type=int, default=4 << 20, metavar="BYTES", help="of a request (%(default)s)")
    add("--max-bodies", type=int, default=64 << 20, metavar="BYTES",
        help="of all requests on their way; more get status 503 (%(default)s)")
    add("--plain-special-tokens", action="store_true",
        help="take special tokens in users' texts as text: no user can end a turn, or begin another one")
    add("--tool-parser", metavar="NAME", choices=sorted(DIALECTS),
        help=f"how the network writes thoughts and calls: {', '.join(sorted(DIALECTS))} (as its chat template says)")
    add("--edit-masks", action="store_true",
        help="clear results of tools by masks where context_management says nothing of it: nothing runs again")
    add("--pooling", metavar="NAME", help="how vectors are made, last or mean, where the checkpoint does not say it")
    add("--reranker", action="store_true",
        help="the model judges documents, where neither its checkpoint nor a name with rerank says so")
    add("--max-vectors", type=int, default=64 << 20, metavar="BYTES",
        help="of the vectors of a body, four for each number; more get status 400 (%(default)s)")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="an answer ends after these (%(default)s)")
    add("--drain", type=int, default=30, metavar="SECONDS",
        help="that answers have to end in when the server is told to end; 0 cancels them, as a second signal does "
        "(%(default)s)")
    add("--drain-delay", type=float, default=0.0, metavar="SECONDS",
        help="before that, in which the server takes requests and is not ready: balancers learn it (%(default)s)")
    add("--kv-events", metavar="ADDRESS",
        help="where routers read which blocks are cached, such as tcp://127.0.0.1:5557: the tokens of all texts; needs "
        "the extra cluster")
    add("--kv-events-replay", metavar="ADDRESS", help="where they ask for events that they have missed")
    add("--kv-events-topic", default="", metavar="TEXT", help="the topic of events (%(default)s: empty)")
    add("--kv-events-medium", default="GPU", metavar="TEXT",
        help="where blocks are, in the words of routers (%(default)s: what they take for the memory of a worker)")
    add("--kv-events-rank", type=int, default=0, metavar="N", help="of this engine in its server (%(default)s)")
    add("--kv-events-unsalted", action="store_true",
        help="tell blocks of namespaces as those of none: vllm-router reads no others")
    add("--preload", action="store_true",
        help="load a model of several at the start, not at the first request for it (a single one always is)")
    add("--pin", action="store_true", help="load a model at the start, and never unload it")
    add("--idle-unload", type=float, metavar="SECONDS",
        help="unload a model for which no request came in this time (it stays until another one needs the memory)")
    add("--max-loaded", type=int, metavar="N", help="models that may be loaded at a time (as many as fit the memory)")
    add("--cors-origin", action="append", default=[], metavar="ORIGIN",
        help="of pages that may ask from browsers, such as https://example.com, or * with keys; may be repeated")
    add("--otel", action="store_true",
        help="send traces and measurements by OpenTelemetry, as the variables OTEL_.. say; needs the extra otel")
    add("--log-format", default="text", metavar="FORMAT",
        help="json writes one line about each request to stdout, without texts (%(default)s: none)")


def serve(
    options: argparse.Namespace, default: Callable[[], str],
    server: Callable[[], tuple[Any, tuple[Any, Any, Any], Any, ModuleType]],
) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status.

    Args:
        options: of the command.
        default: called for the model where the options name none.
        server: returns `make_app`, `ServedModel`, `ModelSlot` and `ServedAdapters`, `exporting` and the module
            `server.process`, or raises ImportError.

    Raises:
        ImportError: without the packages of the extra `serve`, or of `otel` where it is asked for.
        ValueError: an address of other machines without keys; as `keys_of`.
    """
    try:
        make_app, kinds, exporting, process = server()
    except ImportError as error:
        told = f"serve needs starlette, uvicorn and tokenizers: pip install 'kvcache-cpu[serve]' ({error})"
        raise ImportError(told) from None
    host, keys, tables = options.host, None, options.tables or [options]
    if options.api_keys is not None or VARIABLE in os.environ:
        file = options.api_keys
        keys = keys_of((os.environ[VARIABLE] if file is None else Path(file).read_text("utf-8-sig")).splitlines())
    elif not is_loopback(host):
        raise ValueError(f"host: expected a loopback address, or --api-keys beside it, got {host}")
    _check(options, tables)
    try:
        compiled("")
    except ImportError as error:
        note(f"serving completions and no chats: {error}")
    telemetry = exporting() if options.otel else None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    capacity = process.capacity()
    memory = machine_memory().available
    with ExitStack() as opened:
        listening = socket.create_server((host, options.port), family=family, backlog=capacity.backlog)
        opened.enter_context(closing(listening))
        share = SHARE / min(len(tables), options.max_loaded or len(tables))
        room = f"{100 * share:.4f}%" if len(tables) == 1 else int(memory * share)
        slots = [_slot(each, default, kinds, room) for each in tables]
        for slot, table in zip(slots, tables, strict=True):
            opened.callback(slot.close)
            if len(tables) == 1 or table.preload or table.pin:
                slot.load()
        app = make_app(
            slots, keys, max_body=options.max_body, max_bodies=options.max_bodies, timeout=options.timeout,
            log=partial(print, flush=True) if options.log_format == "json" else None, telemetry=telemetry,
            origins=options.cors_origin, adapter_folder=options.adapter_folder, memory=memory,
            most_loaded=options.max_loaded, idle=options.idle_unload,
        )
        address = f"[{host}]" if ":" in host else host
        names = ", ".join(slot.names[0] for slot in slots)
        print(f"{names} at http://{address}:{listening.getsockname()[1]}/v1", flush=True)
        for name, model in ((slot.names[0], slot.model) for slot in slots):
            note(f"{name}: {'loads at its first request' if model is None else _room(model.engine)}")
            if model is not None and (events := model.engine.kv_events) is not None:
                print(f"{name}: block events at {events.address}", flush=True)
        process.run(app, listening, capacity, options.drain, options.drain_delay, app.state.leaving)
    return 0


def _check(options: argparse.Namespace, tables: Sequence[argparse.Namespace]) -> None:
    """Find faults of options before minutes of loading."""
    as_count(options.port, "port", 0, 65535)
    as_finite(options.timeout, "timeout", 0.0, above=True)
    as_finite(options.drain_delay, "drain_delay", 0.0)
    if options.log_format not in ("text", "json"):
        raise ValueError(f"log_format: expected text or json, got {short(options.log_format)}")
    if options.idle_unload is not None:
        as_finite(options.idle_unload, "idle_unload", 0.0, above=True)
    if options.max_loaded is not None:
        as_count(options.max_loaded, "max_loaded", 1)
        for what, count in (
            ("models that load at the start", sum(table.pin or table.preload for table in tables)),
            ("pinned models and one more", min(len(tables), sum(table.pin for table in tables) + 1)),
        ):
            if count > options.max_loaded:
                raise ValueError(f"max_loaded: expected {count} at least, of {what}, got {options.max_loaded}")
    if options.adapter_folder is not None and not Path(options.adapter_folder).is_dir():
        raise ValueError(f"adapter_folder: expected a folder, got none at {options.adapter_folder}")
    for limit, least in (("max_body", 1), ("max_bodies", 1), ("drain", 0)):
        as_count(getattr(options, limit), limit, least)
    for table in tables:
        for limit in ("max_queue", "max_running", "max_vectors"):
            as_count(getattr(table, limit), limit, 1)
        if table.pooling not in (None, "last", "mean"):
            raise ValueError(f"pooling: expected last or mean, got {short(table.pooling)}")
        _events(table)
        _adapters(table)
        chat_template_of(table)
        check_tiers(table)
        checked(table)
        dialect_of("", table.tool_parser)
    ports = Counter(table.kv_events for table in tables if not (table.kv_events or ":0").endswith((":0", ":*")))
    if twice := [address for address, count in ports.items() if count > 1]:
        raise ValueError(f"kv_events: expected an address for each model, got {short(twice[0])} of several")


def _events(options: argparse.Namespace) -> KvEvents | None:
    """The block events that options ask for. ValueError: no address, or options of events without one."""
    told = {name: getattr(options, f"kv_events_{name}") for name in ("replay", "topic", "medium", "rank", "unsalted")}
    if options.kv_events is not None:
        return KvEvents(options.kv_events, **told)
    for name, value in told.items():
        if value != getattr(KvEvents, name):
            raise ValueError(f"kv_events_{name}: expected --kv-events beside it, got {short(value)}")
    return None


def _adapters(options: argparse.Namespace) -> dict[str, str]:
    """The paths of adapters by their names, whose settings are looked at. ValueError: a name twice, or none."""
    found: dict[str, str] = {}
    for each in options.adapter:
        name, _, path = each.partition("=")
        if not name or not path or name in found:
            raise ValueError(f"adapter: expected NAME=PATH, each name once, got {short(each)}")
        expect_adapter(path)
        found[name] = path
    return found


def _slot(options: argparse.Namespace, default: Callable[[], str], kinds: tuple[Any, Any, Any], room: int | str) -> Any:
    """The slot of the model of some options. FileNotFoundError: there is no such model."""
    options.model = options.model or default()
    kind, slot, known = kinds
    names = tuple(dict.fromkeys((options.name or name_of(options.model), *options.served_name)))
    needs = expected_bytes(options) + room if isinstance(room, int) else 0
    adapters = known(_adapters(options))
    if twice := [name for name in names if name in adapters]:
        raise ValueError(f"adapter: expected another name than the model's, got {short(twice[0])}")
    make = partial(_model, options, kind, room, adapters)
    return slot(names, make, needs=needs, is_pinned=options.pin, adapters=adapters)


def _model(options: argparse.Namespace, kind: Any, room: int | str, adapters: Any, opened: ExitStack) -> Any:
    """The model of some options, its engine opened; it is closed with the stack, which a third signal needs."""
    more: dict[str, Any] = {"max_queue": options.max_queue, "max_running": options.max_running}
    if (tiers := open_tiers(options)) is not None:
        opened.callback(tiers.close, _FLUSH)
    more |= {"tiers": tiers, "kv_events": _events(options)}
    engine = open_engine(options, BatchEngine.from_pretrained, room=room, **more)
    opened.callback(engine.close, cancel=True)
    return kind(
        engine, options.name or name_of(options.model), aliases=options.served_name,
        plain_special_tokens=options.plain_special_tokens, tool_parser=options.tool_parser,
        pooling=options.pooling, reranker=options.reranker, max_vectors=options.max_vectors,
        adapters=adapters, edit_masks=options.edit_masks,
    )


def _room(engine: BatchEngine) -> str:
    """How long a text may be, and how many tokens all of them together."""
    longest, tokens, kv = engine.max_prompt, engine.total_tokens, engine.memory()["kv"]
    each = "any number" if longest is None else f"{longest:,}"
    return (
        f"{each} tokens of context at most, {tokens:,} for all texts together, which take {size_text(kv)} of keys and "
        f"values ({size_text(machine_memory().available)} are available); --context or --max-memory changes that"
    )


def keys_of(lines: Iterable[str]) -> dict[str, str | None]:
    """The namespace of each key, of lines `KEY` or `KEY NAMESPACE`; None: the key has one of its own.

    Empty lines and those that begin with # are left out. ValueError: no key, a key twice, a key with characters beyond
    ASCII, which headers do not have, or a line of another form.
    """
    keys: dict[str, str | None] = {}
    for number, line in enumerate(lines, 1):
        if (words := line.split()) and not words[0].startswith("#"):
            if len(words) > 2 or words[0] in keys:
                got = "that key again" if words[0] in keys else f"{len(words)} words"
                raise ValueError(f"api_keys: expected KEY or KEY NAMESPACE, each key once, in line {number}, got {got}")
            if not words[0].isascii():
                raise ValueError(f"api_keys: expected keys of ASCII characters, in line {number}, got another one")
            keys[words[0]] = words[1] if len(words) == 2 else None
    if not keys:
        raise ValueError("api_keys: expected at least one key, got none")
    return keys
