"""`PrefixCache` over a `PagedKvCache` against naive twins: sequences, sessions, lookups and handles that come and go.

K and V are functions of namespace and text (contents.py), and everything that somebody can read is read after every
step: a block that is served to the wrong text, freed under a reader, or written by somebody who only shares it, is
seen at once. Memory is short, so that every second call needs room that others hold.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from contents import LAYERS, rows
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracles.trie import NaiveTrie, Tokens

from kvcache import OutOfMemoryError, PagedKvCache, PrefixAwarePrefill, PrefixCache
from kvcache.core.runs import RUN
from kvcache.errors import InvalidOperationError
from kvcache.paged.handle import PagedKvCacheHandle
from kvcache.prefix.cache_block import CacheBlock
from kvcache.prefix.cache_session import CacheSession

HEADS, DIM = 2, 8
NAMES = (None, "a", ("a",))  # a root of the naive trie is an index into these
ROOTS = st.integers(0, len(NAMES) - 1)
TEXT = st.lists(st.integers(0, 1), max_size=12).map(tuple)
MORE = st.lists(st.integers(0, 1), max_size=5).map(tuple)
PICK = st.integers(0, 11)


@functools.lru_cache(1 << 14)
def text_rows(root: int, tokens: Tokens) -> tuple[Any, Any]:
    """`(keys, values)`, each per layer `(len(tokens), heads, dim)`."""
    sides = rows(NAMES[root], tokens, HEADS * DIM)
    return tuple([layer.reshape(-1, HEADS, DIM) for layer in side] for side in sides)  # type: ignore[return-value]


@dataclass
class Sequence:
    root: int
    tokens: Tokens
    handles: list[PagedKvCacheHandle] = field(default_factory=list)


@dataclass
class Held:
    """A session, or a block of a lookup, that a caller holds."""

    root: int
    tokens: Tokens
    blocks: list[int]  # referenced, in the order of the text; a session's tail block is the last
    pin: tuple[int, Tokens] | None
    session: CacheSession | None = None
    block: CacheBlock | None = None


class SharedBlocksMachine(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 4), blocks=st.integers(1, 22), share=st.floats(0, 1))
    def start(self, size: int, blocks: int, share: float) -> None:
        self.size = size
        self.paged = PagedKvCache(blocks, size, HEADS, DIM, num_layers=LAYERS, dtype="f32")
        self.prefill = PrefixAwarePrefill(PrefixCache.over(self.paged, round(share * blocks)))
        self.cache = self.prefill.cache
        self.naive = NaiveTrie(size)
        self.naive.roots = {root: {} for root in range(len(NAMES))}
        self.sequences: dict[int, Sequence] = {}
        self.held: list[Held] = []
        self.stale: list[PagedKvCacheHandle] = []
        self.counts = Counter[str]()

    # -- the twins ---------------------------------------------------------------------------------

    def cached(self) -> list[int]:
        return [value for pages in self.naive.roots.values() for value, _ in pages.values()]

    def blocks_of(self, seq: int) -> list[int]:
        info = self.paged.get_sequence(seq)
        assert info is not None
        return list(info.block_ids)

    def references(self) -> Counter[int]:
        """The blocks that the trie, sessions, lookups and sequences hold."""
        counts = Counter(self.cached())
        for held in self.held:
            counts.update(held.blocks)
        for seq in self.sequences:
            counts.update(self.blocks_of(seq))
        return counts

    def num_free(self) -> int:
        return self.paged.total_blocks - len(self.references())

    def matched(self, root: int, tokens: Tokens) -> list[int]:
        """The full blocks of a lookup, which counts."""
        blocks = self.naive.values(root, tokens)
        self.counts["hits"] += len(blocks)
        self.counts["hit_tokens"] += len(blocks) * self.size
        self.counts["lookup_tokens"] += len(tokens)
        self.counts["misses"] += len(blocks) < len(tokens) // self.size
        if blocks:
            self.naive.touch(root, tokens[: len(blocks) * self.size])
        return blocks

    def pick(self, choice: int) -> int:
        return sorted(self.sequences)[choice % len(self.sequences)]

    def fails(self, needed: int) -> bool:
        return needed > self.num_free()

    # -- sessions and lookups -------------------------------------------------------------------------------

    @rule(root=ROOTS, tokens=TEXT)
    def prepare(self, root: int, tokens: Tokens) -> None:
        length, donors = self.naive.match(root, tokens), self.naive.donors(root, tokens)
        blocks = self.matched(root, tokens)
        session, start = self.prefill.prepare(tokens, NAMES[root])
        whole = len(blocks) * self.size
        self.counts["hit_tokens"] += length - whole
        assert (session.block_indices, session.matched_prefix_len, start) == (blocks, whole, whole)
        assert (session.num_tokens, session.is_empty) == (length, not blocks)
        assert session.tail_block in donors
        pin = (root, tokens[:whole]) if blocks else None
        if pin:
            self.naive.pins.append(pin)
        self.held.append(Held(root, tokens[:length], session.shared_blocks, pin, session=session))

    @rule(root=ROOTS, tokens=TEXT)
    def lookup(self, root: int, tokens: Tokens) -> None:
        blocks = self.matched(root, tokens)
        length, found = self.cache.lookup(tokens, NAMES[root])
        assert ([block.index for block in found], length) == (blocks, len(blocks) * self.size)
        for i, block in enumerate(found):
            head = tokens[: (i + 1) * self.size]
            self.naive.pins.append((root, head))
            self.held.append(Held(root, head, [block.index], (root, head), block=block))

    @rule(root=ROOTS, tokens=TEXT)
    def lookup_inside_with(self, root: int, tokens: Tokens) -> None:
        blocks = self.matched(root, tokens)
        with self.cache.lookup(tokens, NAMES[root]) as found:
            assert [block.index for block in found] == blocks
            counts = self.cache._slots.counts()[blocks]
        np.testing.assert_array_equal(self.cache._slots.counts()[blocks], counts - 1)

    @precondition(lambda self: self.held)
    @rule(choice=PICK, drop=st.booleans())
    def let_go(self, choice: int, drop: bool) -> None:
        held = self.held[choice % len(self.held)]
        if held.block is not None:
            # Of several lookups that hold one block, the last one is released; they are interchangeable.
            index = held.block.index
            held = next(x for x in reversed(self.held) if x.block is not None and x.block.index == index)
            self.cache.release(index)
        elif not drop:
            assert held.session is not None
            self.prefill.release_session(held.session)
        self.held = [other for other in self.held if other is not held]
        if held.pin is not None:
            self.naive.pins.remove(held.pin)

    # -- sequences ------------------------------------------------------------------------------------------

    @rule(seq=st.integers(0, 4), choice=PICK, more=MORE)
    def begin(self, seq: int, choice: int, more: Tokens) -> None:
        """Start a sequence on the blocks of a session, or empty, as a request does."""
        if seq in self.sequences:
            return
        sessions = [held for held in self.held if held.session is not None]
        held = sessions[choice % len(sessions)] if sessions else Held(choice % len(NAMES), (), [], None)
        self.paged.adopt(seq, held.blocks, len(held.tokens))
        self.sequences[seq] = Sequence(held.root, held.tokens)
        self.extend(seq, more)

    @precondition(lambda self: self.sequences)
    @rule(choice=PICK, more=MORE)
    def go_on(self, choice: int, more: Tokens) -> None:
        self.extend(self.pick(choice), more)

    def extend(self, seq: int, more: Tokens) -> None:
        """Append and write; when blocks are missing, once more after the prefix cache has made room."""
        sequence = self.sequences[seq]
        old, blocks = len(sequence.tokens), self.blocks_of(seq)
        text = sequence.tokens + more
        copied = bool(more) and old % self.size > 0 and self.references()[blocks[-1]] > 1
        needed = -(-len(text) // self.size) - len(blocks) + copied
        if self.fails(needed):
            with pytest.raises(OutOfMemoryError) as error:
                self.paged.append(seq, len(more))
            assert error.value.args[:2] == (needed, self.num_free())
            del error  # its traceback keeps the callers' frames alive, and so their sessions
            self.evict(needed - self.num_free())
            copied = bool(more) and old % self.size > 0 and self.references()[blocks[-1]] > 1
            needed = -(-len(text) // self.size) - len(blocks) + copied
            if self.fails(needed):
                return
        self.paged.append(seq, len(more))
        for layer in range(LAYERS):
            for side in self.paged.read(layer, seq, old):
                assert not side.any(), "unwritten tokens read as zeros"
            self.paged.write(layer, seq, *(side[layer][old:] for side in text_rows(sequence.root, text)))
        sequence.tokens = text

    @precondition(lambda self: self.sequences)
    @rule(choice=PICK, at=st.floats(0, 1))
    def write_again(self, choice: int, at: float) -> None:
        """Write the same rows again; a shared block is copied first."""
        seq = self.pick(choice)
        sequence, references = self.sequences[seq], self.references()
        start = round(at * len(sequence.tokens))
        touched = self.blocks_of(seq)[start // self.size :] if start < len(sequence.tokens) else []
        needed = sum(references[block] > 1 for block in touched)
        keys, values = (side[0][start:] for side in text_rows(sequence.root, sequence.tokens))
        if self.fails(needed):
            with pytest.raises(OutOfMemoryError):
                self.paged.write(0, seq, keys, values, start=start)
        else:
            self.paged.write(0, seq, keys, values, start=start)

    @precondition(lambda self: self.sequences)
    @rule(choice=PICK, share=st.floats(0, 1), by_handle=st.booleans())
    def truncate(self, choice: int, share: float, by_handle: bool) -> None:
        seq = self.pick(choice)
        sequence = self.sequences[seq]
        count = round(share * len(sequence.tokens))
        if by_handle and sequence.handles:
            sequence.handles[0].block_table_mut().sequence_length = count
        else:
            self.paged.truncate(seq, count)
        sequence.tokens = sequence.tokens[:count]

    @precondition(lambda self: self.sequences)
    @rule(choice=PICK, seq=st.integers(0, 4))
    def fork(self, choice: int, seq: int) -> None:
        source = self.pick(choice)
        if seq not in self.sequences:
            self.paged.fork(source, seq)
            self.sequences[seq] = Sequence(self.sequences[source].root, self.sequences[source].tokens)

    @precondition(lambda self: self.sequences)
    @rule(choice=PICK)
    def free(self, choice: int) -> None:
        seq = self.pick(choice)
        self.paged.free(seq)
        self.stale += self.sequences.pop(seq).handles

    # -- handles --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.sequences)
    @rule(choice=PICK, clone=st.booleans())
    def take_handle(self, choice: int, clone: bool) -> None:
        seq = self.pick(choice)
        handle = self.paged.handle(seq)
        self.sequences[seq].handles.append(handle.clone_handle() if clone else handle)

    @rule(choice=PICK)
    def drop_handles(self, choice: int) -> None:
        del self.stale[choice:]
        for sequence in self.sequences.values():
            del sequence.handles[choice:]

    # -- the trie -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.sequences)
    @rule(choice=PICK)
    def store(self, choice: int) -> None:
        """Cache the full blocks of a running sequence, as many as there is room for."""
        seq = self.pick(choice)
        sequence = self.sequences[seq]
        root, text = sequence.root, sequence.tokens[: len(sequence.tokens) // self.size * self.size]
        blocks = self.blocks_of(seq)
        old = text[: len(self.naive.values(root, text)) * self.size]
        if old:
            self.naive.touch(root, old)
        wanted = (len(text) - len(old)) // self.size
        self.naive.pins.append((root, old))
        while (room := self.cache.capacity - len(self.cached())) < wanted:
            if not self.forget_one():
                break
        self.naive.pins.pop()
        now = len(old) // self.size + min(max(room, 0), wanted)
        assert self.cache.adopt(sequence.tokens, blocks, NAMES[root]) == now
        if now * self.size > len(old):
            self.naive.insert(root, text[: now * self.size], blocks[:now])

    def forget_one(self) -> bool:
        gone = self.naive.evict(1)
        self.counts["evictions"] += len(gone)
        return bool(gone)

    @rule(count=st.integers(0, 6))
    def make_room(self, count: int) -> None:
        self.evict(count)

    def evict(self, count: int) -> None:
        before = self.num_free()
        while self.num_free() < before + count and self.forget_one():
            pass
        assert self.cache.evict(count) == self.num_free() - before

    @precondition(lambda self: len(self.cached()) > 4)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.naive.roots = {root: {} for root in range(len(NAMES))}
        self.naive.pins.clear()
        for held in self.held:
            held.pin = None

    # -- reading everything ----------------------------------------------------------------

    def same_block(self, block: CacheBlock, root: int, head: Tokens, count: int) -> None:
        """The first `count` tokens of a block whose text ends at most `size - count` tokens after `head`."""
        assert tuple(block.token_ids[:count]) == head[len(head) - count :]
        for got, want in zip((block.keys, block.values), text_rows(root, head), strict=True):
            for layer in range(LAYERS):
                own = got[layer].reshape(HEADS, self.size, DIM).swapaxes(0, 1)
                np.testing.assert_array_equal(own[:count], want[layer][len(head) - count :])

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.paged.check()
        self.cache.check()
        references = self.references()
        counts = self.paged._pool.ref_counts()
        assert dict(references) == {block: count for block, count in enumerate(counts.tolist()) if count}
        assert self.paged.free_block_count == self.num_free()
        assert self.cache.block_ids() == sorted(self.cached())
        stats = self.prefill.stats()
        assert (stats.total_hits, stats.total_misses) == (self.counts["hits"], self.counts["misses"])
        assert (stats.hit_tokens, stats.lookup_tokens) == (self.counts["hit_tokens"], self.counts["lookup_tokens"])
        assert stats.hit_rate == self.cache.hit_rate == stats.hit_tokens / max(stats.lookup_tokens, 1)
        assert (stats.total_evictions, stats.cached_blocks) == (self.counts["evictions"], len(self.cached()))

    @invariant()
    def nobody_reads_what_is_not_theirs(self) -> None:
        if not hasattr(self, "cache"):
            return
        for root, pages in self.naive.roots.items():
            for head, (index, _) in pages.items():
                block = self.cache.get_block(index)
                assert block is not None
                self.same_block(block, root, head, self.size)
        for held in self.held:
            if held.block is not None:
                self.same_block(held.block, held.root, held.tokens, self.size)
            if held.session is not None:
                for i, index in enumerate(held.blocks):
                    head = held.tokens[: (i + 1) * self.size]
                    got = self.paged._store.read(0, np.array([(index, 0, self.size)], RUN))
                    for side, want in zip(got, text_rows(held.root, head), strict=True):
                        np.testing.assert_array_equal(side[: len(head) - i * self.size], want[0][i * self.size :])
        for seq, sequence in self.sequences.items():
            wants = text_rows(sequence.root, sequence.tokens)
            for layer in range(LAYERS):
                for got, want in zip(self.paged.read(layer, seq), wants, strict=True):
                    np.testing.assert_array_equal(got, want[layer])
            for handle in sequence.handles:
                assert handle.is_valid
                assert (handle.num_tokens, handle.block_table.physical_blocks) == (
                    len(sequence.tokens),
                    self.blocks_of(seq),
                )
                np.testing.assert_array_equal(handle.key_cache(1), wants[0][1])
                np.testing.assert_array_equal(handle.value_cache(0), wants[1][0])
        for handle in self.stale:
            assert not handle.is_valid
            for access in (handle.clone_handle, handle.stats, handle.block_table_mut):
                with pytest.raises(InvalidOperationError, match="freed or evicted"):
                    access()
            with pytest.raises(InvalidOperationError, match="freed or evicted"):
                handle.key_cache(0)

    def teardown(self) -> None:
        """After everything is released, every block is free."""
        if not hasattr(self, "cache"):
            return
        for index in [held.block.index for held in self.held if held.block is not None]:
            self.cache.release(index)
        self.held.clear()  # the sessions are dropped
        for seq in self.sequences:
            self.paged.free(seq)
        assert self.cache.pinned_blocks == 0
        assert self.paged.used_block_count == len(self.cache)
        self.cache.clear()
        assert self.paged.used_block_count == 0
        self.paged.check()
        self.cache.check()


TestSharedBlocks = SharedBlocksMachine.TestCase
TestSharedBlocks.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
