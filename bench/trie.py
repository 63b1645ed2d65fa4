"""The token trie: match, insert, evict, pin; beside memcmp, beside rivals, and over the number of cached pages."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from bench.common import Candidate, Case, Table, at_most, faster, size_name
from bench.rivals import prefix_rivals
from kvcache._trie import TokenTrie

__all__ = ["tables"]

Tokens = npt.NDArray[np.uint32]
VOCABULARY = 150_000
PAGE = 16
LONG, SHORT = 32_768, 2_048  # tokens of a prompt
OURS, FLOOR = "kvcache", "memcmp + a page each"
RUST, PYTHON = "SGLang (Rust)", "SGLang (Python)"
HASHES, SCAN, DICT = "chained hashes (as vLLM)", "scan (as LlamaRAMCache)", "dict of prompts"


def prompts(count: int, length: int, seed: int = 0) -> list[Tokens]:
    """Random prompts, each an array of its own."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, length, dtype=np.uint32) for _ in range(count)]


def floor(tokens: Tokens, page_size: int) -> Callable[[], object]:
    """One memcmp of the tokens and one random access per page in 256 MiB, as libc and NumPy do them."""
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    other = tokens.copy()
    field = np.zeros(2**26, np.int32)
    pages = len(tokens) // page_size
    wheres = np.random.default_rng(1).integers(0, len(field), (64, pages))
    out = np.empty(pages, np.int32)
    turn = itertools.cycle(wheres)
    a, b, size = tokens.ctypes.data, other.ctypes.data, tokens.nbytes

    def run() -> None:
        compare(a, b, size)
        field.take(next(turn), out=out, mode="clip")
        run.keep = other  # type: ignore[attr-defined]

    return run


def path_of(tokens: Tokens, num_nodes: int, page_size: int) -> list[Tokens]:
    """Prompts that leave `tokens` at as many page boundaries, so that its path has `num_nodes` nodes."""
    pages = len(tokens) // page_size
    leave = np.linspace(0, pages, num_nodes + 1)[1:-1].astype(int) * page_size
    branches = []
    for i, depth in enumerate(leave):
        tail = np.full(page_size, VOCABULARY + i, np.uint32)
        branches.append(np.concatenate([tokens[:depth], tail]))
    return [tokens, *branches]


def match_case(num_nodes: int, page_size: int, verb: str, with_rivals: bool) -> Iterator[Candidate]:
    """Match `LONG` cached tokens on a path of `num_nodes` nodes."""
    tokens = prompts(1, LONG)[0]
    stored = path_of(tokens, num_nodes, page_size)
    trie = TokenTrie(page_size)
    root = trie.add_root()
    for prompt in stored:
        trie.insert(root, prompt, np.arange(len(prompt) // page_size, dtype=np.int32))
    query = tokens.copy()
    assert trie.match(root, query)[1] == LONG
    yield Candidate(OURS, partial(getattr(trie, verb), root, query))
    yield Candidate(FLOOR, floor(tokens, page_size))
    for rival in prefix_rivals() if with_rivals else ():
        if num_nodes > 16 and rival.name in (SCAN, DICT):
            continue
        other = rival(page_size)
        for prompt in stored:
            other.insert(other.key(prompt))
        yield Candidate(other.name, partial(getattr(other, verb), other.key(query)))


def list_case() -> Iterator[Candidate]:
    """The same prompt as a Python list of ints."""
    (tokens,) = prompts(1, LONG)
    trie = TokenTrie(PAGE)
    root = trie.add_root()
    trie.insert(root, tokens, np.arange(LONG // PAGE, dtype=np.int32))
    ids = tokens.tolist()
    yield Candidate(OURS, partial(trie.lookup, root, ids))
    yield Candidate("np.array(list)", lambda: np.array(ids, dtype=np.uint32))


def insert_case(page_size: int) -> Iterator[Candidate]:
    """Insert `SHORT` new tokens, and match them again; evicted before the next time, as a full cache does."""
    fresh = prompts(16, SHORT, seed=2)
    values = np.arange(SHORT // page_size, dtype=np.int32)
    trie = TokenTrie(page_size)
    root = trie.add_root()
    for prompt in prompts(64, SHORT, seed=3):
        trie.insert(root, prompt, values)

    def insert() -> None:
        for prompt in fresh:
            trie.insert(root, prompt, values)

    def match() -> None:
        for prompt in fresh:
            trie.lookup(root, prompt)

    yield Candidate(OURS, insert, len(fresh), partial(trie.evict, len(fresh) * len(values)))
    yield Candidate("its match", match, len(fresh))
    yield Candidate("copy of the tokens", lambda: [prompt.copy() for prompt in fresh], len(fresh))
    for rival in prefix_rivals():
        other = rival(page_size)
        keys = [other.key(prompt) for prompt in fresh]
        for prompt in prompts(64, SHORT, seed=3):
            other.insert(other.key(prompt))
        run = partial(_each, other.insert, keys)
        yield Candidate(other.name, run, len(keys), partial(other.evict, len(keys) * SHORT))


def evict_case(page_size: int, length: int, count: int) -> Iterator[Candidate]:
    """Evict one prompt of `length` tokens out of `count`, again and again; stored anew in between."""
    stored = prompts(count, length, seed=4)
    values = np.arange(length // page_size, dtype=np.int32)
    batch = min(50, count)
    trie = TokenTrie(page_size)
    root = trie.add_root()
    for prompt in stored:
        trie.insert(root, prompt, values)
    turn = itertools.cycle(stored)

    def refill() -> None:
        while trie.num_pages < count * len(values):
            trie.insert(root, next(turn), values)

    yield Candidate(OURS, partial(_times, batch, trie.evict, len(values)), batch, refill)
    for rival in prefix_rivals():
        other = rival(page_size)
        keys = [other.key(prompt) for prompt in stored]
        _each(other.insert, keys)
        again = itertools.cycle(keys)
        put_back = partial(_times_of, batch, other.insert, again)
        yield Candidate(other.name, partial(_times, batch, other.evict, length), batch, put_back)


def _each(call: Callable[[object], object], items: list[object]) -> None:
    for item in items:
        call(item)


def _times(count: int, call: Callable[[object], object], argument: object) -> None:
    for _ in range(count):
        call(argument)


def _times_of(count: int, call: Callable[[object], object], items: Iterator[object]) -> None:
    for _ in range(count):
        call(next(items))


def _filled(num_pages: int, length: int) -> tuple[TokenTrie, int, list[Tokens]]:
    trie = TokenTrie(PAGE)
    root = trie.add_root()
    values = np.arange(length // PAGE, dtype=np.int32)
    stored = prompts(max(num_pages * PAGE // length, 1), length, seed=5)
    for prompt in stored:
        trie.insert(root, prompt, values)
    return trie, root, stored


def growth_case(sizes: tuple[int, ...], operation: str) -> Iterator[Candidate]:
    """One operation on tries of several sizes, all alive at once."""
    for num_pages in sizes:
        trie, root, stored = _filled(num_pages, 256 if operation == "evict a leaf" else SHORT)
        yield _operation(operation, size_name(num_pages), trie, root, stored)


def _operation(operation: str, name: str, trie: TokenTrie, root: int, stored: list[Tokens]) -> Candidate:
    values = np.arange(len(stored[0]) // PAGE, dtype=np.int32)
    order = np.random.default_rng(6).permutation(len(stored))[:4096]
    turn = itertools.cycle([stored[i].copy() for i in order])
    if operation == "match 2k, the same":
        return Candidate(name, partial(trie.lookup, root, stored[0].copy()))
    if operation == "match 2k, another each time":
        return Candidate(name, lambda: trie.lookup(root, next(turn)))
    if operation == "miss at the first token":
        absent = np.full(SHORT, VOCABULARY, np.uint32)
        return Candidate(name, partial(trie.match, root, absent))
    if operation == "pin and unpin a match":
        node = trie.boundary(*trie.match(root, stored[0]))

        def pin() -> None:
            trie.pin(node)
            trie.unpin(node)

        return Candidate(name, pin)
    if operation == "insert 2k":
        fresh = prompts(16, SHORT, seed=7)
        run = partial(_each, lambda prompt: trie.insert(root, prompt, values), fresh)
        return Candidate(name, run, 16, partial(trie.evict, 16 * len(values)))
    count, pages = (32, 1) if operation == "evict a page" else (32, len(values))
    full = trie.num_pages

    def refill() -> None:
        while trie.num_pages < full:
            trie.insert(root, next(turn), values)

    return Candidate(name, partial(_times, count, trie.evict, pages), count, refill)


def miss_case() -> Iterator[Candidate]:
    """A first token that nothing cached begins with, beside the plainest thing that could say so."""
    trie, root, stored = _filled(10_000, SHORT)
    absent = np.full(SHORT, VOCABULARY, np.uint32)
    firsts = {int(prompt[0]): prompt for prompt in stored}

    def lookup(root: int, tokens: Tokens) -> tuple[int, object]:
        return root, firsts.get(VOCABULARY)

    yield Candidate(OURS, partial(trie.match, root, absent))
    yield Candidate("dict lookup in a call", partial(lookup, root, absent))
    for rival in prefix_rivals():
        if rival.name != SCAN:
            other = rival(PAGE)
            for prompt in stored:
                other.insert(other.key(prompt))
            yield Candidate(other.name, partial(other.match, other.key(absent)))


RIVAL_BOUNDS = (faster(2, OURS, RUST), faster(20, OURS, PYTHON), faster(20, OURS, HASHES), faster(20, OURS, SCAN))
GROWTH = (
    "match 2k, the same", "match 2k, another each time", "miss at the first token", "insert 2k",
    "evict a page", "evict a leaf", "pin and unpin a match",
)  # fmt: skip


def tables(sizes: tuple[int, ...]) -> list[Table]:
    """Everything about the trie."""
    matches = []
    for page, bound in ((PAGE, 4), (1, 8)):
        for nodes in (1, 16, 2048) if page == PAGE else (1, 16):
            for verb in ("match", "lookup"):
                what = f"{verb}, page {page}, {nodes} node{'s' * (nodes > 1)}"
                claims = (at_most(bound, OURS, FLOOR), *RIVAL_BOUNDS)
                matches.append(Case(what, partial(match_case, nodes, page, verb, True), claims))
    inserts = [
        Case(f"insert, page {p}", partial(insert_case, p), (at_most(3, OURS, "its match"), *RIVAL_BOUNDS))
        for p in (PAGE, 1)
    ]
    evicts = [
        Case(f"evict a prompt of {n}, page {p}, {count} cached", partial(evict_case, p, n, count), RIVAL_BOUNDS)
        for p, n, count in ((PAGE, SHORT, 1_000), (PAGE, PAGE, 1_200), (1, PAGE, 1_200))
    ]
    low, high = size_name(sizes[0]), size_name(sizes[-1])
    growth = [Case(what, partial(growth_case, sizes, what), (at_most(2, high, low),)) for what in GROWTH]
    return [
        Table("Trie: match of 32k cached tokens", tuple(matches)),
        Table("Trie: match of 32k tokens from a list", (Case("lookup, page 16", list_case),)),
        Table("Trie: insert of 2k tokens", tuple(inserts)),
        Table("Trie: evict", tuple(evicts)),
        Table("Trie: miss", (Case("first token", miss_case, (at_most(1, OURS, "dict lookup in a call"),)),)),
        Table("Trie: growth with cached pages of 16 tokens", tuple(growth), growth=True),
    ]
