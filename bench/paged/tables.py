"""Cases of block tables and pool: steps of many sequences, with plain Python and vLLM; forks; eviction."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from bench.support.common import Candidate, Case, Table, alternating, at_most, faster, repeat, size_name
from bench.trie.rivals import step_rivals
from kvcache.eviction import EvictionStrategy
from kvcache.paged.cache import PagedKvCache

__all__ = ["PlainTables", "tables"]

BATCH, BLOCK, PROMPT = 256, 16, 512
OURS, LOOP, VLLM = "kvcache", "plain Python loop", "vLLM"
CLEARED = "and slots cleared"  # the whole call, which zeroes slots of earlier sequences (1 head of 8 channels)
POLICIES = {
    "LRU": EvictionStrategy.LRU(), "LFU": EvictionStrategy.LFU(), "LongestFirst": EvictionStrategy.LongestFirst(),
    "Priority": EvictionStrategy.Priority(4), "StreamingLLM": EvictionStrategy.StreamingLLM(4, 64),
}


class PlainTables:
    """The same state in lists and dicts, without checks: blocks, references, lengths, recency, counts."""

    def __init__(self, num_blocks: int) -> None:
        self.free_blocks = deque(range(num_blocks))
        self.references = [0] * num_blocks
        self.blocks: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.last_access: dict[int, int] = {}
        self.access_count: dict[int, int] = {}
        self.clock = 0

    def touch(self, seq_id: int) -> None:
        self.clock += 1
        self.last_access[seq_id] = self.clock
        self.access_count[seq_id] += 1

    def take(self) -> int:
        block = self.free_blocks.popleft()
        self.references[block] = 1
        return block

    def allocate(self, seq_id: int, num_tokens: int) -> None:
        self.blocks[seq_id] = [self.take() for _ in range(-(-num_tokens // BLOCK))]
        self.lengths[seq_id] = num_tokens
        self.access_count[seq_id] = 0
        self.touch(seq_id)

    def append_each(self, seq_ids: list[int]) -> None:
        blocks, lengths, references, free_blocks = self.blocks, self.lengths, self.references, self.free_blocks
        last_access, access_count, clock = self.last_access, self.access_count, self.clock
        for seq_id in seq_ids:
            length = lengths[seq_id]
            if length % BLOCK == 0:
                block = free_blocks.popleft()
                references[block] = 1
                blocks[seq_id].append(block)
            elif references[blocks[seq_id][-1]] > 1:
                references[blocks[seq_id][-1]] -= 1
                blocks[seq_id][-1] = self.take()
            lengths[seq_id] = length + 1
            clock += 1
            last_access[seq_id] = clock
            access_count[seq_id] += 1
        self.clock = clock

    def fork(self, source: int, target: int) -> None:
        self.blocks[target] = self.blocks[source].copy()
        for block in self.blocks[target]:
            self.references[block] += 1
        self.lengths[target] = self.lengths[source]
        self.access_count[target] = 0
        self.touch(target)

    def free(self, seq_id: int) -> None:
        for block in self.blocks.pop(seq_id):
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free_blocks.append(block)
        del self.lengths[seq_id], self.last_access[seq_id], self.access_count[seq_id]


def _cache(num_blocks: int, strategy: EvictionStrategy | None = None) -> PagedKvCache:
    return PagedKvCache(num_blocks, BLOCK, 1, 8, eviction_strategy=strategy)


def append_case() -> Iterator[Candidate]:
    """Append one token to each of `BATCH` sequences; some need a new block, as in decoding."""
    steps = 64
    blocks = BATCH * (PROMPT + 2 * steps) // BLOCK * 2
    seq_ids = np.arange(BATCH, dtype=np.uint64)
    ids = seq_ids.tolist()
    cache, plain = _cache(blocks), PlainTables(blocks)
    # Prompts differ in length, so that about a sixteenth of the sequences need a new block in each step.
    for owner in (cache, plain):
        for i in ids:
            owner.allocate(i, PROMPT + i % BLOCK)  # type: ignore[attr-defined]

    def again() -> None:
        for i in ids:
            cache.truncate(i, PROMPT + i % BLOCK)

    def plain_again() -> None:
        for i in ids:
            plain.free(i)
            plain.allocate(i, PROMPT + i % BLOCK)

    def one_by_one() -> None:
        for _ in range(steps):
            for i in ids:
                cache.append(i, 1)

    yield Candidate(OURS, partial(repeat, steps, cache._table.append_batch, seq_ids), steps, again)
    yield Candidate("from a list", partial(repeat, steps, cache._table.append_batch, ids), steps, again)
    yield Candidate(CLEARED, partial(repeat, steps, cache.append_batch, seq_ids), steps, again)
    yield Candidate("one by one", one_by_one, steps, again)
    yield Candidate(LOOP, partial(repeat, steps, plain.append_each, ids), steps, plain_again)
    for rival in step_rivals():
        other = rival(BATCH, PROMPT, BLOCK)
        yield Candidate(rival.name, partial(repeat, steps, other.step, None), steps, other.rewind)


def life_case(verb: str) -> Iterator[Candidate]:
    """Allocate, fork or free `BATCH` sequences of `PROMPT` tokens; each round is undone, untimed."""
    blocks = BATCH * PROMPT // BLOCK
    ids = list(range(BATCH))
    first, second = np.arange(BATCH, dtype=np.uint64), np.arange(BATCH, 2 * BATCH, dtype=np.uint64)
    lengths = np.full(BATCH, PROMPT)
    cache, plain = _cache(blocks), PlainTables(blocks)

    def each(call: Any, *columns: list[int]) -> None:
        for row in zip(*columns, strict=True):
            call(*row)

    table = cache._table
    batch = {
        "allocate": partial(table.allocate_batch, first, lengths),
        "fork": partial(table.fork_batch, first, second),
        "free": partial(table.free_batch, first),
        "free forks": partial(table.free_batch, second),
    }
    loop = {
        "allocate": partial(each, plain.allocate, ids, lengths.tolist()),
        "fork": partial(each, plain.fork, ids, second.tolist()),
        "free": partial(each, plain.free, ids),
        "free forks": partial(each, plain.free, second.tolist()),
    }
    undo = {"allocate": "free", "fork": "free forks", "free": "allocate"}[verb]
    if verb == "allocate":
        empty = partial(_until, table, 0, batch["free"])
        yield alternating(CLEARED, empty, partial(cache.allocate_batch, first, lengths), 1)
    for name, calls, alive in ((OURS, batch, table), (LOOP, loop, plain.blocks)):
        before = BATCH if verb == "fork" else 0 if verb == "allocate" else BATCH
        if verb != "allocate":
            calls["allocate"]()
        yield alternating(name, partial(_until, alive, before, calls[undo]), calls[verb], 1)


def _until(alive: Any, count: int, undo: Any) -> None:
    if len(alive) != count:
        undo()


def fork_case() -> Iterator[Candidate]:
    """Fork a sequence of 32k tokens: copies the block table and counts a reference to every block."""
    cache = _cache(200_000)
    cache.allocate(0, 32_768)
    forks = range(1, 65)

    def fork() -> None:
        for i in forks:
            cache.fork(0, i)

    def free() -> None:
        if cache.num_sequences > 1:
            for i in forks:
                cache.free(i)

    table = np.arange(2_048, dtype=np.int32)
    ids = table.tolist()
    plain = PlainTables(2_100)
    plain.allocate(0, 32_768)

    def plain_free() -> None:
        if 1 in plain.blocks:
            plain.free(1)

    references = np.zeros(200_000, np.int32)

    def copy_and_count() -> None:
        table.copy()
        references[table] += 1

    yield alternating(OURS, free, fork, len(forks))
    yield Candidate("copy of its table (array)", table.copy)
    yield Candidate("copy and count (arrays)", copy_and_count)
    yield Candidate("copy of its table (list)", lambda: list(ids))
    yield Candidate(LOOP, partial(plain.fork, 0, 1), 1, plain_free)


def evict_case(sizes: tuple[int, ...], policy: str) -> Iterator[Candidate]:
    """Evict one of many sequences of one block each; new ones replace them, untimed."""
    for size in sizes:
        cache = _cache(size, POLICIES[policy])
        seq_ids = itertools.count()
        rng = np.random.default_rng(0)

        def refill(cache: PagedKvCache = cache, seq_ids: Any = seq_ids, rng: Any = rng) -> None:
            while cache.free_block_count:
                seq_id = next(seq_ids)
                cache.allocate(seq_id, int(rng.integers(1, BLOCK)))
                if policy == "Priority":
                    cache.set_priority(seq_id, int(rng.integers(0, 4)))

        refill()
        yield alternating(size_name(size), refill, partial(repeat, 64, cache.evict), 64)


def tables(sizes: tuple[int, ...]) -> list[Table]:
    """All tables about block tables."""
    tenth = at_most(0.1, OURS, LOOP)
    batch = (
        Case("append_batch", append_case, (tenth, faster(20, OURS, VLLM))),
        Case("allocate_batch", partial(life_case, "allocate"), (tenth,)),
        Case("free_batch", partial(life_case, "free"), (tenth,)),
        Case("fork_batch", partial(life_case, "fork"), (tenth,)),
    )
    fork = Case("fork", fork_case, (at_most(3, OURS, "copy of its table (array)"),))
    flat = at_most(2, size_name(sizes[-1]), size_name(sizes[0]))
    evicts = tuple(Case(p, partial(evict_case, sizes, p), (flat,)) for p in POLICIES)
    return [
        Table(f"Tables: {BATCH} sequences in one call", batch),
        Table("Tables: fork of 32k tokens", (fork,)),
        Table("Tables: evict one sequence, by sequences cached", evicts, growth=True),
    ]
