"""PagedKvCache against its naive twin over random histories, with real data in the blocks."""

import tempfile

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from oracles.paged import RANKS, NaiveOutOfMemoryError, NaivePagedKvCache

from kvcache import EvictionStrategy, PagedKvCache
from kvcache.errors import InvalidOperationError, OutOfMemoryError

LAYERS, HEADS, DIM = 2, 1, 8
STRATEGIES = [
    EvictionStrategy.LRU(),
    EvictionStrategy.LFU(),
    EvictionStrategy.LongestFirst(),
    EvictionStrategy.Priority(3),
    EvictionStrategy.StreamingLLM(2, 5),
]
IDS = st.integers(0, 5)


class PagedMachine(RuleBasedStateMachine):
    """Makes each call on both, and compares outcome, blocks, tokens and victims."""

    num_blocks, block_size, value_dim = 14, 4, DIM

    def __init__(self):
        super().__init__()
        self.real = PagedKvCache(
            self.num_blocks, self.block_size, HEADS, DIM, num_layers=LAYERS, dtype="f32", value_head_dim=self.value_dim
        )
        self.naive = NaivePagedKvCache(self.num_blocks, self.block_size)
        self.handles = []
        self.stamp = 0

    def both(self, real, naive):
        try:
            expected = naive()
        except NaiveOutOfMemoryError as error:
            with pytest.raises(OutOfMemoryError) as caught:
                real()
            assert caught.value.args[:2] == error.args
            return None
        got = real()
        assert got == expected
        return got

    def rows(self, n):
        """K and V that identify their write."""
        self.stamp += 1
        row = self.stamp * 1000 + np.arange(n, dtype=np.float32)
        return row[:, None, None].repeat(DIM, 2), -row[:, None, None].repeat(self.value_dim, 2)

    @rule(seq=IDS, n=st.integers(0, 18))
    def allocate(self, seq, n):
        if seq not in self.naive.sequences:
            self.both(lambda: self.real.allocate(seq, n), lambda: self.naive.allocate(seq, n))

    @rule(seq=IDS, n=st.integers(0, 9))
    def append(self, seq, n):
        if seq in self.naive.sequences:
            self.both(lambda: self.real.append(seq, n), lambda: self.naive.append(seq, n))

    @rule(seqs=st.lists(IDS, unique=True, max_size=6), counts=st.none() | st.lists(st.integers(0, 9), min_size=6))
    def append_batch(self, seqs, counts):
        seqs = [s for s in seqs if s in self.naive.sequences]
        counts = counts and counts[: len(seqs)]
        self.both(lambda: self.real.append_batch(seqs, counts), lambda: self.naive.append_batch(seqs, counts))

    def shares(self, seqs):
        """The sequences that exist of `(id, share of its tokens)`, and these numbers of tokens."""
        alive = self.naive.sequences
        pairs = [(seq, round(share * len(alive[seq].content))) for seq, share in seqs if seq in alive]
        return [seq for seq, _ in pairs], [n for _, n in pairs]

    @rule(seqs=st.lists(st.tuples(IDS, st.floats(0, 1)), unique_by=lambda pair: pair[0], max_size=6))
    def truncate_batch(self, seqs):
        ids, counts = self.shares(seqs)
        self.both(lambda: self.real.truncate_batch(ids, counts), lambda: self.naive.truncate_batch(ids, counts))

    @rule(seqs=st.lists(IDS, unique=True, max_size=6), random=st.randoms(use_true_random=False))
    def reorder(self, seqs, random):
        seqs = [s for s in seqs if s in self.naive.sequences]
        rows = [random.randrange(len(seqs)) for _ in seqs]
        self.both(lambda: self.real.reorder(seqs, rows), lambda: self.naive.reorder(seqs, rows))

    @rule(n=st.integers(0, 3))
    def grow(self, n):
        self.both(lambda: self.real.grow(n), lambda: self.naive.grow(n))

    @rule(
        seqs=st.lists(st.tuples(IDS, st.floats(0, 1)), unique_by=lambda pair: pair[0], max_size=6),
        layer=st.integers(0, LAYERS - 1),
    )
    def write_ragged(self, seqs, layer):
        ids, counts = self.shares(seqs)
        k, v = self.rows(sum(counts))
        self.both(
            lambda: self.real.write_ragged(layer, ids, counts, k, v),
            lambda: self.naive.write_ragged(layer, ids, counts, k, v),
        )

    @rule(seqs=st.lists(st.tuples(IDS, st.integers(0, 9)), unique_by=lambda pair: pair[0], max_size=4))
    def allocate_batch(self, seqs):
        seqs = [(s, n) for s, n in seqs if s not in self.naive.sequences]
        ids, lengths = [s for s, _ in seqs], [n for _, n in seqs]
        self.both(lambda: self.real.allocate_batch(ids, lengths), lambda: self.naive.allocate_batch(ids, lengths))

    @rule(pairs=st.lists(st.tuples(IDS, IDS), unique_by=lambda pair: pair[1], max_size=4))
    def fork_batch(self, pairs):
        pairs = [(s, t) for s, t in pairs if s in self.naive.sequences and t not in self.naive.sequences]
        self.real.fork_batch([s for s, _ in pairs], [t for _, t in pairs])
        for source, target in pairs:
            self.naive.fork(source, target)

    @rule(seqs=st.lists(IDS, unique=True, max_size=4))
    def free_batch(self, seqs):
        seqs = [s for s in seqs if s in self.naive.sequences]
        self.real.free_batch(seqs)
        for seq in seqs:
            self.naive.free(seq)

    @rule(source=IDS, other=IDS)
    def fork(self, source, other):
        if source in self.naive.sequences and other not in self.naive.sequences:
            self.both(lambda: self.real.fork(source, other), lambda: self.naive.fork(source, other))

    @rule(seq=IDS)
    def free(self, seq):
        if seq in self.naive.sequences:
            self.both(lambda: self.real.free(seq), lambda: self.naive.free(seq))

    @rule(seq=IDS, share=st.floats(0, 1))
    def truncate(self, seq, share):
        if seq in self.naive.sequences:
            n = round(share * len(self.naive.sequences[seq].content))
            self.both(lambda: self.real.truncate(seq, n), lambda: self.naive.truncate(seq, n))

    @rule(seq=IDS, random=st.randoms(use_true_random=False), share=st.floats(0, 1))
    def keep_tokens(self, seq, random, share):
        if seq in self.naive.sequences:
            n = len(self.naive.sequences[seq].content)
            kept = sorted(random.sample(range(n), round(share * n)))
            self.both(lambda: self.real.keep_tokens(seq, kept), lambda: self.naive.keep(seq, kept))

    @rule(seq=IDS)
    def compact(self, seq):
        if seq in self.naive.sequences:
            self.both(lambda: self.real.compact(seq), lambda: self.naive.compact(seq))

    @rule(seq=IDS, sink=st.integers(0, 6), window=st.integers(0, 12))
    def stream(self, seq, sink, window):
        if seq in self.naive.sequences:
            self.both(
                lambda: self.real.apply_streaming_llm(seq, sink, window), lambda: self.naive.stream(seq, sink, window)
            )

    @rule(seq=IDS, layer=st.integers(0, LAYERS - 1), at=st.floats(0, 1), share=st.floats(0, 1))
    def write(self, seq, layer, at, share):
        if seq in self.naive.sequences:
            n = len(self.naive.sequences[seq].content)
            start = round(at * n)
            k, v = self.rows(round(share * (n - start)))
            self.both(
                lambda: self.real.write(layer, seq, k, v, start=start),
                lambda: self.naive.write(layer, seq, start, k, v),
            )

    @rule(seq=IDS)
    def pin(self, seq):
        if seq in self.naive.sequences:
            self.real.pin(seq)
            self.naive.sequences[seq].pins += 1

    @rule(seq=IDS)
    def unpin(self, seq):
        if seq in self.naive.sequences and self.naive.sequences[seq].pins:
            self.real.unpin(seq)
            self.naive.sequences[seq].pins -= 1

    @rule(seq=IDS, priority=st.integers(0, 2))
    def set_priority(self, seq, priority):
        if seq in self.naive.sequences:
            self.real.set_priority(seq, priority)
            self.naive.sequences[seq].priority = priority

    @rule(strategy=st.sampled_from(STRATEGIES))
    def choose(self, strategy):
        self.real.with_eviction_strategy(strategy)

    @rule(utilization=st.floats(0, 1))
    def evict_to(self, utilization):
        rank = RANKS[self.real.eviction_strategy.name]
        self.both(lambda: self.real.evict_to_threshold(utilization), lambda: self.naive.evict_to(utilization, rank))

    @rule(seq=IDS)
    def take_handle(self, seq):
        if seq in self.naive.sequences:
            self.handles.append((self.real.handle(seq), self.naive.sequences[seq]))

    @invariant()
    def agree(self):
        self.real.check()
        naive, real = self.naive, self.real
        assert real.sequence_ids() == sorted(naive.sequences)
        assert real.free_block_count == len(naive.free_blocks)
        stats = real.stats()
        assert (stats.total_allocations, stats.total_frees) == (naive.allocations, naive.frees)
        assert real.select_eviction_target() == naive.victim(RANKS[real.eviction_strategy.name])
        for seq_id, seq in naive.sequences.items():
            info = real.get_sequence(seq_id)
            assert list(info.block_ids) == seq.blocks()
            assert (info.num_tokens, info.next_position) == (len(seq.content), seq.next_position)
            assert (info.last_access, info.access_count) == (seq.last_access, seq.accesses)
            assert real._table.info(seq_id)[-1] == seq.sinks
            for layer in range(LAYERS):
                if seq.content:
                    zeros = [np.zeros((HEADS, dim), np.float32) for dim in (DIM, self.value_dim)]
                    keys, values = naive.rows(layer, seq_id, zeros)
                    got = real._store.read(layer, real._table.runs(seq_id))  # no access is counted
                    np.testing.assert_array_equal(got[0], keys)
                    np.testing.assert_array_equal(got[1], values)
        for handle, seq in self.handles:
            assert handle.is_valid == any(seq is alive for alive in naive.sequences.values())


class OneSlotBlocks(PagedMachine):
    num_blocks, block_size, value_dim = 40, 1, 24


class SpillingMachine(PagedMachine):
    """The random histories of all caches, where nothing stays in memory that no call holds."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.real = PagedKvCache(
            self.num_blocks, self.block_size, HEADS, DIM, num_layers=LAYERS, dtype="f32",
            value_head_dim=self.value_dim, spill=self.folder.name, max_memory_bytes=self.limit,
        )

    limit = 1

    @rule()
    def grow(self):
        with pytest.raises(InvalidOperationError, match="spill"):
            self.real.grow(1)

    def teardown(self):
        del self.real
        self.folder.cleanup()


class SomeInMemory(SpillingMachine):
    """Blocks that share pages of the system, of which one or two are in memory."""

    num_blocks, limit, value_dim = 40, 8192, 24


TestPaged = PagedMachine.TestCase
TestPaged.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestOneSlotBlocks = OneSlotBlocks.TestCase
TestOneSlotBlocks.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
TestSpilling = SpillingMachine.TestCase
TestSpilling.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestSomeInMemory = SomeInMemory.TestCase
TestSomeInMemory.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
