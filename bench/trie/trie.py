"""Cases of the token trie: match, insert, evict; compared with memcmp and with rivals."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support.common import Candidate, Case, Table, alternating, at_most, faster, repeat
from bench.trie.rivals import prefix_rivals
from kvcache.trie.trie import TokenTrie

__all__ = ["tables"]

Tokens = npt.NDArray[np.uint32]
VOCABULARY = 150_000
PAGE = 16
LONG, SHORT = 32_768, 2_048  # tokens of a prompt
OURS, FLOOR = "kvcache", "memcmp + a page each"
RUST, PYTHON, VLLM = "SGLang (Rust)", "SGLang (Python)", "vLLM"
HASHES, SCAN, DICT = "chained hashes (as vLLM)", "scan (as LlamaRAMCache)", "dict of prompts"


def prompts(count: int, length: int, seed: int = 0) -> list[Tokens]:
    """Random prompts, each in a separate array."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, length, dtype=np.uint32) for _ in range(count)]


def filled(stored: Iterable[Tokens], page_size: int = PAGE) -> tuple[TokenTrie, int]:
    """A trie with prompts, whose pages are numbered in each, and its root."""
    trie = TokenTrie(page_size)
    root = trie.add_root()
    for prompt in stored:
        trie.insert(root, prompt, np.arange(len(prompt) // page_size, dtype=np.int32))
    return trie, root


def _rival_with(rival: Any, stored: Iterable[Tokens], page_size: int = PAGE) -> tuple[Any, list[Any]]:
    """A rival with prompts, and these as it has them."""
    other = rival(page_size)
    keys = [other.key(prompt) for prompt in stored]
    for key in keys:
        other.insert(key)
    return other, keys


def floor(tokens: Tokens, page_size: int) -> Callable[[Tokens, Tokens], object]:
    """A memcmp of two prompts as long as `tokens`, and a random access in 256 MiB per page, by libc and NumPy."""
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    field = np.zeros(2**26, np.int32)
    pages = len(tokens) // page_size
    wheres = itertools.cycle(np.random.default_rng(1).integers(0, len(field), (64, pages)))
    out = np.empty(pages, np.int32)

    def run(a: Tokens, b: Tokens) -> None:
        compare(a.ctypes.data, b.ctypes.data, a.nbytes)
        field.take(next(wheres), out=out, mode="clip")

    return run


def path_of(tokens: Tokens, num_nodes: int, page_size: int) -> list[Tokens]:
    """Prompts that diverge from `tokens` at page boundaries, so that its path has `num_nodes` nodes."""
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
    trie, root = filled(stored, page_size)
    query = tokens.copy()
    assert trie.match(root, query)[1] == LONG
    yield Candidate(OURS, partial(getattr(trie, verb), root, query))
    # An access per 16 tokens even if a page is one token, which makes the bound stricter.
    yield Candidate(FLOOR, partial(floor(tokens, PAGE), query, tokens))
    for rival in prefix_rivals() if with_rivals else ():
        if num_nodes > 16 and rival.name in (SCAN, DICT):
            continue
        other, _ = _rival_with(rival, stored, page_size)
        yield Candidate(other.name, partial(getattr(other, verb), other.key(query)))


def list_case() -> Iterator[Candidate]:
    """Look up the same prompt as a Python list of ints."""
    (tokens,) = prompts(1, LONG)
    trie, root = filled([tokens])
    ids = tokens.tolist()
    yield Candidate(OURS, partial(trie.lookup, root, ids))
    yield Candidate("np.array(list)", lambda: np.array(ids, dtype=np.uint32))


def insert_case(page_size: int) -> Iterator[Candidate]:
    """Insert `SHORT` new tokens, and match them; before that the oldest are evicted, untimed, as in a full cache."""
    stored = prompts(2 * _Turns.count, SHORT, seed=2)
    values = np.arange(SHORT // page_size, dtype=np.int32)
    trie = TokenTrie(page_size)
    root = trie.add_root()
    ours = _Turns(stored, lambda prompt: trie.insert(root, prompt, values), lambda n: trie.evict(n // page_size))
    yield alternating(OURS, ours.make_room, ours.insert, ours.count)
    yield Candidate("its match", lambda: [trie.lookup(root, prompt) for prompt in ours.last], ours.count)
    yield Candidate("copy of the tokens", lambda: [prompt.copy() for prompt in ours.last], ours.count)
    for rival in prefix_rivals():
        if rival.name == VLLM:
            continue
        other = rival(page_size)
        theirs = _Turns([other.key(prompt) for prompt in stored], other.insert, other.evict)
        yield alternating(other.name, theirs.make_room, theirs.insert, theirs.count)


class _Turns:
    """Two groups of 16 prompts that replace each other: few enough to stay in L2, like new prompts."""

    count = 16

    def __init__(self, keys: list[Any], insert: Callable[[Any], object], evict: Callable[[int], object]) -> None:
        self._insert, self._evict = insert, evict
        self._groups = itertools.cycle([keys[i : i + self.count] for i in range(0, len(keys), self.count)])
        for _ in range(len(keys) // self.count - 1):
            self.last = next(self._groups)
            self.insert()

    def make_room(self) -> None:
        self._evict(self.count * SHORT)
        self.last = next(self._groups)

    def insert(self) -> None:
        for key in self.last:
            self._insert(key)


def evict_case(page_size: int, length: int, count: int) -> Iterator[Candidate]:
    """Evict one prompt of `length` tokens out of `count`; evicted prompts are stored again in between, untimed."""
    stored = prompts(count, length, seed=4)
    values = np.arange(length // page_size, dtype=np.int32)
    batch = min(50, count)
    trie, root = filled(stored, page_size)
    turn, full = itertools.cycle(stored), trie.num_pages

    def refill() -> None:
        while trie.num_pages < full:
            trie.insert(root, next(turn), values)

    yield alternating(OURS, refill, partial(repeat, batch, trie.evict, len(values)), batch)
    for rival in prefix_rivals():
        if rival.name == VLLM:
            continue
        other, keys = _rival_with(rival, stored, page_size)
        put_back = partial(_insert_next, other, batch, itertools.cycle(keys))
        yield alternating(other.name, put_back, partial(repeat, batch, other.evict, length), batch)


def _insert_next(rival: Any, count: int, keys: Iterator[Any]) -> None:
    for key in itertools.islice(keys, count):
        rival.insert(key)


def miss_case() -> Iterator[Candidate]:
    """Look up a prompt whose first token no cached prompt has, compared with a dict lookup."""
    stored = prompts(64, SHORT, seed=5)
    trie, root = filled(stored)
    absent = np.full(SHORT, VOCABULARY, np.uint32)
    firsts = {int(prompt[0]): prompt for prompt in stored}

    def lookup(root: int, tokens: Tokens) -> tuple[int, object]:
        return root, firsts.get(VOCABULARY)

    yield Candidate(OURS, partial(trie.match, root, absent))
    yield Candidate("dict lookup in a call", partial(lookup, root, absent))
    for rival in prefix_rivals():
        if rival.name != SCAN:
            other, _ = _rival_with(rival, stored)
            yield Candidate(other.name, partial(other.match, other.key(absent)))


RIVALS = (faster(2, OURS, RUST), faster(20, OURS, PYTHON))


def tables(sizes: tuple[int, ...]) -> list[Table]:
    """All tables about the trie."""
    matches = []
    for page, bound in ((PAGE, 4), (1, 8)):  # page size 1: twice the bound
        for nodes in (1, 16, 2048) if page == PAGE else (1, 16):
            for verb in ("match", "lookup"):
                what = f"{verb}, page {page}, {nodes} node{'s' * (nodes > 1)}"
                claims = (
                    at_most(bound, OURS, FLOOR),
                    *RIVALS,
                    *(faster(20, OURS, other) for other in (VLLM, HASHES, SCAN)),
                )
                matches.append(Case(what, partial(match_case, nodes, page, verb, True), claims))
    inserts = [
        Case(f"insert, page {p}", partial(insert_case, p), (at_most(3, OURS, "its match"), *RIVALS)) for p in (PAGE, 1)
    ]
    evicts = [
        Case(f"evict a prompt of {n}, page {p}, {count} cached", partial(evict_case, p, n, count), RIVALS)
        for p, n, count in ((PAGE, SHORT, 1_000), (PAGE, PAGE, 1_200), (1, PAGE, 1_200))
    ]
    return [
        Table("Trie: match of 32k cached tokens", tuple(matches)),
        Table("Trie: match of 32k tokens from a list", (Case("lookup, page 16", list_case),)),
        Table("Trie: insert of 2k tokens", tuple(inserts)),
        Table("Trie: evict", tuple(evicts)),
        Table("Trie: miss", (Case("first token", miss_case, (at_most(1, OURS, "dict lookup in a call"),)),)),
    ]
