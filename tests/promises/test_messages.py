"""Every message about bad input reads `name: expected X, got Y`; checked in the source, for all of them."""

import ast
import re

import numpy as np
import pytest
from places import PROJECT

from kvcache import CacheManager, EvictionPolicy, KVCacheConfig, SamplingParams, set_num_threads
from kvcache.support import arguments

pytestmark = pytest.mark.one_build

RAISE = re.compile(r"^( *)raise (ValueError|TypeError|IndexError|SnapshotError|CheckpointError|error)\(", re.MULTILINE)
NAME = r"[\w{}./]+(?:, \w+)?(?:: [\w{}.]+)*: "
EXPECTED = r"expected .+, got .+"
# A message that puts a name before another message, and one about a saved cache, before which `Snapshot` puts the path.
NAMED = re.compile(rf"{NAME}(?:{EXPECTED}|\{{\}})", re.DOTALL)
IN_A_FILE = re.compile(rf"{EXPECTED}|{NAMED.pattern}", re.DOTALL)


def template(node):
    """A message with {} for each value that is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    assert isinstance(node, ast.JoinedStr), f"expected a message in one piece, got {ast.unparse(node)}"
    return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)


def call_at(source, start):
    """The call that begins at `start`, up to the parenthesis that closes it: Cython's files are not Python's."""
    stop = start
    while True:
        stop = source.index(")", stop) + 1
        try:
            return ast.parse(re.sub(r"<\w+>", "", source[start:stop]), mode="eval").body  # without casts
        except SyntaxError:
            continue


def messages():
    """`(room, place, exception, message)` of everything that raises an exception for bad input."""
    for path in sorted((PROJECT / "kvcache").rglob("*.py*")):
        if path.suffix not in {".py", ".pyx"}:
            continue
        source = path.read_text(encoding="utf-8")
        inside = path.relative_to(PROJECT / "kvcache")
        room = inside.parts[0] if len(inside.parts) > 1 else ""
        for found in RAISE.finditer(source):
            call = call_at(source, found.start(2))
            line = source.count("\n", 0, found.start()) + 1
            yield room, f"{inside}:{line}", found[2], template(call.args[0])


MESSAGES = list(messages())


def test_they_are_found():
    """Messages are found in Python and in Cython, in every room that checks arguments."""
    assert len(MESSAGES) > 150
    assert {place.split(":")[0].rsplit(".")[-1] for _, place, _, _ in MESSAGES} == {"py", "pyx"}
    assert {"core", "trie", "lists", "engine", "saved", ""} <= {room for room, _, _, _ in MESSAGES}


def test_the_grammar():
    """`name: expected X, got Y`."""
    others = []
    for _, place, error, message in MESSAGES:
        of_a_file = place.startswith(("prefix/", "saved/", "states/")) and error == "SnapshotError"
        if not (IN_A_FILE if of_a_file else NAMED).fullmatch(message):
            others.append(f"{place}: {message}")
    assert not others, "\n".join(others)


X = np.zeros((2, 3), np.float32)
CHECKS = {
    "as_count, type": (lambda: arguments.as_count("4", "x"), "expected an int, got str"),
    "as_count, bool": (lambda: arguments.as_count(True, "x"), "expected an int, got bool"),
    "as_count, low": (lambda: arguments.as_count(0, "x", 1), "expected an int >= 1, got 0"),
    "as_count, high": (lambda: arguments.as_count(9, "x", 0, 8), "expected an int <= 8, got 9"),
    "as_count, huge": (lambda: arguments.as_count(10**5000, "x"), f"expected an int <= {2**63 - 1}, got one beyond"),
    "as_integer": (lambda: arguments.as_integer(-(2**64), "x"), f"expected an int >= {-(2**63)}, got {-(2**64)}"),
    "as_index": (lambda: arguments.as_index(3, "x", 3), r"expected an int in \[0, 3\), got 3"),
    "as_index, no end": (lambda: arguments.as_index(-1, "x"), "expected an int >= 0, got -1"),
    "as_number": (lambda: arguments.as_number("1", "x"), "expected a number, got str"),
    "as_finite": (lambda: arguments.as_finite(float("nan"), "x"), "expected a finite number, got nan"),
    "as_finite, low": (lambda: arguments.as_finite(-1, "x", 0), "expected a finite number of at least 0, got -1"),
    "as_finite, both": (
        lambda: arguments.as_finite(0, "x", 0, 1, above=True),
        "expected a finite number above 0 and of at most 1, got 0",
    ),
    "as_instance": (lambda: arguments.as_instance(3, EvictionPolicy, "x"), "expected an EvictionPolicy, got int"),
    "as_floats, dtype": (lambda: arguments.as_floats([1], (1,), "x"), "expected a float dtype, got int64"),
    "as_floats, shape": (lambda: arguments.as_floats(X, (None, 2), "x"), r"expected shape \(any, 2\), got \(2, 3\)"),
    "as_indices": (lambda: arguments.as_indices([0.5], "x"), "expected integers, got float64"),
    "as_integers": (lambda: arguments.as_integers(X, "x"), r"expected one dimension, got shape \(2, 3\)"),
}


@pytest.mark.parametrize("case", CHECKS)
def test_a_check_says(case):
    """The functions that check arguments."""
    call, message = CHECKS[case]
    with pytest.raises((TypeError, ValueError, IndexError), match=f"^x: {message}"):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: KVCacheConfig(8, 2, 600), "head_dim: expected an int <= 512, got 600"),
        (lambda: KVCacheConfig(8, 2, 8, 5), "quantization_bits: expected one of 2, 3, 4, 8, got 5"),
        (lambda: CacheManager(3), "config: expected a KVCacheConfig, got int"),
        (lambda: CacheManager(KVCacheConfig(8, 1, 8)).get([1]), r"positions: expected ints in \[0, 0\), got 1"),
        (lambda: SamplingParams(top_p=2), "top_p: expected a finite number of at least 0 and of at most 1, got 2"),
        (lambda: EvictionPolicy.H2O(2.0), "recent_fraction: expected a finite number of at least 0 and of at most 1"),
        (lambda: set_num_threads(0), "n: expected an int >= 1, got 0"),
    ],
)
def test_a_public_call_says(call, message):
    """The argument by the name that the caller gave it."""
    with pytest.raises((TypeError, ValueError, IndexError), match=f"^{message}"):
        call()
