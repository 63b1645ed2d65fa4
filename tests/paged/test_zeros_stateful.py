"""A slot that a sequence did not write reads as zero, whatever was in it before, over random histories.

After every step all free blocks are poisoned. Cached texts have rows that say of which text and namespace they are, so
that rows of another prompt show as well.
"""

import zlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from pace import half

from kvcache import PagedKvCache, PrefixAwarePrefill, PrefixCache
from kvcache.core.runs import RUN
from kvcache.errors import InvalidOperationError, OutOfMemoryError

LAYERS, HEADS, DIM, POISON = 2, 1, 8, 2047.0
IDS, NAMES = st.integers(0, 4), st.sampled_from(["a", "b"])
# Texts that part early and late, inside of blocks and between them.
TEXTS = st.builds(
    lambda head, n, tail: [head] * n + tail,
    st.integers(1, 2),
    st.integers(0, 25),
    st.lists(st.integers(3, 4), max_size=12),
)


def value(name, tokens):
    """The value in the row of the last of these tokens: a small integer, which every format stores exactly."""
    return 1.0 + zlib.crc32(repr((name, tokens)).encode()) % 1000


class ZerosMachine(RuleBasedStateMachine):
    """Sequences as lists of the values that they wrote, 0 where they wrote nothing."""

    num_blocks, block_size, dtype = 16, 4, "f32"

    @initialize()
    def start(self):
        # Constant rows of quantised formats are exact as long as they are not rotated.
        self.paged = PagedKvCache(
            self.num_blocks, self.block_size, HEADS, DIM, num_layers=LAYERS, dtype=self.dtype, rotate=False
        )
        self.prefixes = PrefixCache.over(self.paged, 10)
        self.prefill = PrefixAwarePrefill(self.prefixes)
        self.sequences = {}
        self.stamp = 1000

    def rows(self, values):
        return np.broadcast_to(np.array(values, np.float32)[:, None, None], (len(values), HEADS, DIM)).copy()

    def room(self, call):
        """True if there was memory for a call."""
        try:
            call()
        except OutOfMemoryError:
            return False
        return True

    def fresh(self, n):
        self.stamp = 1001 + (self.stamp - 1000) % 1000
        return [float(self.stamp)] * n

    def teardown(self):
        if hasattr(self, "paged"):
            self.paged.check()

    def verify(self):
        free = np.flatnonzero(self.paged.reference_counts(range(self.paged.total_blocks)) == 0)
        if len(free):
            runs = np.array([(block, 0, self.block_size) for block in free], RUN)
            poison = self.rows([POISON] * (len(free) * self.block_size))
            for layer in range(LAYERS):
                self.paged._store.write(layer, runs, poison, poison)
        assert sorted(self.sequences) == self.paged.sequence_ids()
        for seq, values in self.sequences.items():
            for layer in range(LAYERS):
                for got in self.paged.read(layer, seq):
                    np.testing.assert_array_equal(got, self.rows(values))

    @rule(seq=IDS, n=st.integers(0, 30))
    def allocate(self, seq, n):
        if seq not in self.sequences and self.room(lambda: self.paged.allocate(seq, n)):
            self.sequences[seq] = [0.0] * n
        self.verify()

    @rule(n=st.integers(0, 9), m=st.integers(0, 9))
    def allocate_batch(self, n, m):
        new = [seq for seq in (5, 6) if seq not in self.sequences]
        counts = [n, m][: len(new)]
        if self.room(lambda: self.paged.allocate_batch(new, counts)):
            self.sequences |= {seq: [0.0] * count for seq, count in zip(new, counts, strict=True)}
        self.verify()

    @rule(seq=IDS, n=st.integers(0, 9))
    def append(self, seq, n):
        if seq in self.sequences and self.room(lambda: self.paged.append(seq, n)):
            self.sequences[seq] += [0.0] * n
        self.verify()

    @rule()
    def append_batch(self):
        if self.room(lambda: self.paged.append_batch(list(self.sequences))):
            for values in self.sequences.values():
                values.append(0.0)
        self.verify()

    @rule(seq=IDS, at=st.floats(0, 1), n=st.integers(1, 9))
    def write(self, seq, at, n):
        if not self.sequences.get(seq):
            return
        values = self.sequences[seq]
        start = int(at * (len(values) - 1))
        new = self.fresh(min(n, len(values) - start))
        if all(
            self.room(lambda layer=layer: self.paged.write(layer, seq, *[self.rows(new)] * 2, start))
            for layer in range(LAYERS)
        ):
            values[start : start + len(new)] = new
        self.verify()

    @rule(shares=st.lists(st.floats(0, 1), min_size=9))
    def write_ragged(self, shares):
        lens = [round(share * len(self.sequences[seq])) for seq, share in zip(self.sequences, shares, strict=False)]
        ids, new = list(self.sequences), [self.fresh(n) for n in lens]
        rows = self.rows([x for values in new for x in values])
        if all(
            self.room(lambda layer=layer: self.paged.write_ragged(layer, ids, lens, rows, rows))
            for layer in range(LAYERS)
        ):
            for seq, values in zip(ids, new, strict=True):
                self.sequences[seq] = self.sequences[seq][: len(self.sequences[seq]) - len(values)] + values
        self.verify()

    @rule(random=st.randoms(use_true_random=False))
    def reorder(self, random):
        ids = list(self.sequences)
        rows = [random.randrange(len(ids)) for _ in ids]
        self.paged.reorder(ids, rows)
        old = [self.sequences[seq] for seq in ids]
        self.sequences = {seq: list(old[row]) for seq, row in zip(ids, rows, strict=True)}
        self.verify()

    @rule(n=st.integers(0, 2))
    def grow(self, n):
        """The prefix cache keeps its limit; what it has named stays."""
        self.paged.grow(n)
        self.verify()

    @rule(seq=IDS, other=IDS)
    def fork(self, seq, other):
        if seq in self.sequences and other not in self.sequences:
            self.paged.fork(seq, other)
            self.sequences[other] = list(self.sequences[seq])
        self.verify()

    @rule(seq=IDS, share=st.floats(0, 1))
    def truncate(self, seq, share):
        if seq in self.sequences:
            n = int(share * len(self.sequences[seq]))
            self.paged.truncate(seq, n)
            del self.sequences[seq][n:]
        self.verify()

    @rule(seq=IDS, keep=st.integers(1, 2**16))
    def keep_tokens(self, seq, keep):
        if seq in self.sequences:
            kept = [i for i in range(len(self.sequences[seq])) if keep >> i % 17 & 1]
            self.paged.keep_tokens(seq, np.array(kept, np.int64))
            self.sequences[seq] = [self.sequences[seq][i] for i in kept]
        self.verify()

    @rule(seq=IDS)
    def compact(self, seq):
        if seq in self.sequences:
            self.room(lambda: self.paged.compact(seq))
        self.verify()

    @rule(seq=IDS)
    def free(self, seq):
        if seq in self.sequences:
            self.paged.free(seq)
            del self.sequences[seq]
        self.verify()

    @rule(name=NAMES, text=TEXTS)
    def store(self, name, text):
        """Insert blocks, which the prefix cache writes."""
        pairs = []
        for start in range(0, len(text) - self.block_size + 1, self.block_size):
            values = [value(name, text[: i + 1]) for i in range(start, start + self.block_size)]
            flat = np.repeat(np.array(values, np.float32), DIM)  # one head: [position][dim]
            pairs.append(([flat] * LAYERS, [flat] * LAYERS))
        self.prefixes.store(text, 0, pairs, name)
        self.verify()

    @rule(seq=IDS, name=NAMES, text=TEXTS, written=st.booleans())
    def serve(self, seq, name, text, written):
        """A request: it shares what is cached, to the token, and computes and caches the rest, or writes nothing."""
        if seq in self.sequences or not text:
            return
        with self.prefill.prepare(text, name)[0] as session:
            start = session.num_tokens
            self.paged.adopt(seq, session.shared_blocks, start)
            values = [value(name, text[: i + 1]) for i in range(start)]
            self.sequences[seq] = values
            self.verify()
            if not self.room(lambda: self.paged.append(seq, len(text) - start)):
                return
            values += [0.0] * (len(text) - start)
            self.verify()
            if written:
                values[start:] = [value(name, text[: i + 1]) for i in range(start, len(text))]
                for layer in range(LAYERS):
                    self.paged.write(layer, seq, *[self.rows(values[start:])] * 2)
                self.prefixes.adopt(text, self.paged.block_table([seq]).block_ids, name)
        self.verify()

    @rule(seq=IDS, name=NAMES)
    def adopt_elsewhere(self, seq, name):
        """A block that is cached for one text cannot be adopted for another."""
        if seq not in self.sequences:
            return
        blocks = self.paged.block_table([seq]).block_ids
        cached = np.isin(blocks[: len(self.sequences[seq]) // self.block_size], self.prefixes.block_ids())
        other = [9] * len(self.sequences[seq])
        if cached.any():
            with pytest.raises(InvalidOperationError):
                self.prefixes.adopt(other, blocks, name)
        self.verify()

    @rule(n=st.integers(1, 6))
    def evict(self, n):
        self.prefixes.evict(n)
        self.verify()

    @rule()
    def clear(self):
        self.prefixes.clear()
        self.verify()

    @rule(full=st.booleans())
    def save_and_load(self, full):
        path = self.folder / f"{type(self).__name__}.kv"
        self.prefixes.save(path)
        if full:  # as many as fit beside what is in use
            self.prefixes.clear()
            self.prefixes.load(path)
        self.verify()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtype", "block_size"), half([("f32", 4), ("f16", 5), ("q4", 4), ("q8", 20), ("q2", 16)]))
def test_unwritten_slots_read_zero(tmp_path, request, dtype, block_size):
    from hypothesis.stateful import run_state_machine_as_test

    machine = type("Machine", (ZerosMachine,), {"dtype": dtype, "block_size": block_size, "folder": tmp_path})
    most = 900 if request.config.getoption("--long") else 40
    run_state_machine_as_test(machine, settings=settings(max_examples=most, stateful_step_count=30, deadline=None))
