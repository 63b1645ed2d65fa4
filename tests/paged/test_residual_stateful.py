"""`PagedKvCache(residual_length=, first_tokens=)` beside a naive twin, which has a flag for each unpacked token."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from oracles import kernels as oracle
from residual_caches import DIM, HEADS, LAYERS, make

from kvcache import Calibration
from kvcache.errors import InvalidOperationError, OutOfMemoryError, SequenceNotFoundError

IDS = st.integers(0, 3)


class Naive:
    """A text: the f16 rows of each token, whether they are still kept, its position, and that of the next token."""

    def __init__(self, tokens=(), kept=(), positions=(), end=0):
        self.tokens, self.kept, self.positions = [dict(each) for each in tokens], list(kept), list(positions)
        self.end = end

    def copy(self):
        return Naive(self.tokens, self.kept, self.positions, self.end)

    @property
    def gone(self):
        return self.end - len(self.tokens)

    @property
    def has_holes(self):
        return self.positions != [*range(len(self.positions))]

    def ahead(self, firsts):
        """The number of first tokens that stay unpacked when others are packed."""
        return firsts if all(self.kept) else self.kept.index(False)

    def pack(self, length, firsts):
        """Pack the groups before that of the next token."""
        stop = len(self.tokens) - self.end % length
        if stop > 0 and not (all(self.kept) and stop < firsts):
            ahead = self.ahead(firsts)
            self.kept[:stop] = [i < ahead for i in range(stop)]

    def append(self, count, length, firsts):
        if not length:
            whole = all(self.kept)
            new = range(len(self.tokens), len(self.tokens) + count)
            self.kept += [whole and i < firsts for i in new]
        elif count:
            self.pack(length, firsts)
            self.kept += [True] * count
        self.tokens += [{} for _ in range(count)]
        self.positions += range(self.end, self.end + count)
        self.end += count

    def truncate(self, count):
        if count < len(self.positions):
            self.end = self.positions[count]
        del self.tokens[count:], self.kept[count:], self.positions[count:]

    def evict(self, indices, length, firsts):
        if len(indices) == len(self.tokens):
            return  # none leaves, so nothing changes
        if length:
            self.pack(length, firsts)
        for part in (self.tokens, self.kept, self.positions):
            part[:] = [part[i] for i in indices]

    def seen(self, pos, packed, layer, length, firsts):
        """K and V that the query at `pos` reads."""
        keys, values = (rows[: pos + 1].copy() for rows in packed)
        whole = all(self.kept)
        group = pos - (pos + self.gone) % length if length else pos + 1
        if whole and group < firsts:
            group = 0
        ahead = self.ahead(firsts) if not whole or group > 0 else 0
        for i in range(pos + 1):
            if (i >= group and self.kept[i]) or i < ahead:
                keys[i], values[i] = self.tokens[i].get(layer, (0, 0))
        return keys, values


class ResidualMachine(RuleBasedStateMachine):
    length, firsts, block_size = 4, 2, 3
    heads, dim, value_dim, latent, calibration = HEADS, DIM, DIM, None, None

    def __init__(self):
        super().__init__()
        self.real = make(
            self.length, self.firsts, block_size=self.block_size, num_blocks=60, latent=self.latent,
            calibration=self.calibration,
        )
        self.naive = {}
        self.rng = np.random.default_rng(0)

    def rows(self, count):
        """K and V."""
        rows = (self.rng.standard_normal((2, count, self.heads, self.dim)) * 3).astype(np.float16).astype(np.float32)
        return rows[0], rows[1]

    def written(self, keys, values):
        """The rows as the cache takes them."""
        return keys, values

    def read(self, layer, seq):
        """Packed rows as attention reads them."""
        return self.real.read(layer, seq)

    def both(self, act, twin):
        """Both change, or, where blocks are missing, neither."""
        try:
            act()
        except OutOfMemoryError:
            return
        twin()

    def write(self, seq, layer, start, count):
        keys, values = self.rows(count)
        self.real.write(layer, seq, *self.written(keys, values), start=start)
        for token, key, value in zip(self.naive[seq].tokens[start : start + count], keys, values, strict=True):
            token[layer] = (key, value)

    def fill(self, seq, start):
        for layer in range(LAYERS):
            self.write(seq, layer, start, len(self.naive[seq].tokens) - start)

    @rule(seq=IDS, count=st.integers(0, 14))
    def allocate(self, seq, count):
        if seq in self.naive:
            with pytest.raises(InvalidOperationError):
                self.real.allocate(seq, count)
            return

        def twin():
            self.naive[seq] = Naive()
            self.naive[seq].append(count, self.length, self.firsts)
            self.fill(seq, 0)

        self.both(lambda: self.real.allocate(seq, count), twin)

    @rule(seq=IDS, count=st.integers(0, 11), fill=st.booleans())
    def append(self, seq, count, fill):
        if seq not in self.naive:
            with pytest.raises(SequenceNotFoundError):
                self.real.append(seq, count)
            return

        def twin():
            self.naive[seq].append(count, self.length, self.firsts)
            if fill:
                self.fill(seq, len(self.naive[seq].tokens) - count)

        self.both(lambda: self.real.append(seq, count), twin)

    @rule(counts=st.lists(st.integers(0, 5), min_size=4, max_size=4), layer=st.integers(0, LAYERS - 1))
    def append_batch(self, counts, layer):
        ids = sorted(self.naive)
        counts = counts[: len(ids)]

        def twin():
            rows = self.rows(sum(counts))
            self.real.write_ragged(layer, ids, counts, *self.written(*rows))
            row = iter(zip(*rows, strict=True))
            for seq, count in zip(ids, counts, strict=True):
                text = self.naive[seq]
                text.append(count, self.length, self.firsts)
                for token in text.tokens[len(text.tokens) - count :]:
                    token[layer] = next(row)

        self.both(lambda: self.real.append_batch(ids, counts), twin)

    @rule(seq=IDS, layer=st.integers(0, LAYERS - 1), at=st.floats(0, 1), share=st.floats(0, 1))
    def write_any(self, seq, layer, at, share):
        if seq in self.naive:
            count = len(self.naive[seq].tokens)
            start = round(at * count)
            self.both(lambda: self.write(seq, layer, start, round(share * (count - start))), lambda: None)

    @rule(seq=IDS, new=IDS)
    def fork(self, seq, new):
        if seq in self.naive and new not in self.naive:
            self.real.fork(seq, new)
            self.naive[new] = self.naive[seq].copy()

    @rule(seq=IDS, share=st.floats(0, 1))
    def truncate(self, seq, share):
        if seq in self.naive:
            count = round(share * len(self.naive[seq].tokens))
            self.real.truncate(seq, count)
            self.naive[seq].truncate(count)

    @rule(seq=IDS, share=st.floats(0, 1.3))
    def resize(self, seq, share):
        if seq in self.naive:
            count, old = round(share * len(self.naive[seq].tokens)), len(self.naive[seq].tokens)

            def act():
                self.real.handle(seq).block_table_mut().sequence_length = count

            def twin():
                self.naive[seq].truncate(count)
                self.naive[seq].append(max(0, count - old), self.length, self.firsts)

            self.both(act, twin)

    @rule(seq=IDS, new=IDS, share=st.floats(0, 1))
    def adopt(self, seq, new, share):
        if seq in self.naive and new not in self.naive and not self.naive[seq].has_holes:
            count = round(share * len(self.naive[seq].tokens))
            blocks = self.real.block_table([seq]).block_ids[: -(-count // self.block_size)]
            self.real.adopt(new, blocks, count)
            self.naive[new] = Naive(self.naive[seq].tokens[:count], [False] * count, range(count), count)

    @rule(seq=IDS, share=st.floats(0, 1))
    def pack(self, seq, share):
        if seq in self.naive:
            text = self.naive[seq]
            count = round(share * len(text.tokens))
            self.real.pack(seq, count)
            if count >= self.firsts or not all(text.kept):
                ahead = text.ahead(self.firsts)
                text.kept[:count] = [i < ahead for i in range(count)]

    @rule(seq=IDS, share=st.floats(0, 1), whole=st.booleans())
    def unpack(self, seq, share, whole):
        if seq in self.naive:
            text = self.naive[seq]
            stop, ahead = len(text.tokens), self.firsts * whole
            group = max(0, stop - 1 - (text.end - 1) % self.length) if self.length and stop else stop
            count = round(share * (stop - group))
            if ahead > stop - count:
                return
            firsts, newest = self.rows(LAYERS * ahead), self.rows(LAYERS * count)
            parts = [[*zip(*(np.split(side, LAYERS) for side in each), strict=True)] for each in (newest, firsts)]
            self.real.unpack(seq, *parts)
            text.kept = [i < ahead or i >= stop - count for i in range(stop)]
            for part, first in zip(parts, (stop - count, 0), strict=True):
                for layer, (keys, values) in enumerate(part):
                    for i, pair in enumerate(zip(keys, values, strict=True)):
                        text.tokens[first + i][layer] = pair

    @rule(seq=IDS, random=st.randoms(use_true_random=False), share=st.floats(0, 1))
    def keep(self, seq, random, share):
        if seq in self.naive:
            kept = [i for i in range(len(self.naive[seq].tokens)) if random.random() < share]
            self.real.keep_tokens(seq, kept)
            self.naive[seq].evict(kept, self.length, self.firsts)

    @rule(seq=IDS, sinks=st.integers(0, 5), window=st.integers(0, 9))
    def stream(self, seq, sinks, window):
        if seq in self.naive:
            count = len(self.naive[seq].tokens)
            kept = [*range(min(sinks, count)), *range(max(sinks, count - window), count)]
            assert self.real.apply_streaming_llm(seq, sinks, window) == count - len(kept)
            self.naive[seq].evict(kept, self.length, self.firsts)

    @rule(seq=IDS)
    def compact(self, seq):
        if seq in self.naive:
            self.both(lambda: self.real.compact(seq), lambda: None)

    @rule(seq=IDS)
    def free(self, seq):
        if seq in self.naive:
            self.real.free(seq)
            del self.naive[seq]

    @rule()
    def evict(self):
        if self.naive:
            del self.naive[self.real.evict()]

    @rule(one=IDS, other=IDS)
    def swap(self, one, other):
        if one in self.naive and other in self.naive:
            self.real.swap(one, other)
            self.naive[one], self.naive[other] = self.naive[other], self.naive[one]

    @rule(random=st.randoms(use_true_random=False))
    def reorder(self, random):
        ids = sorted(self.naive)
        rows = [random.randrange(len(ids)) for _ in ids]
        self.real.reorder(ids, rows)
        self.naive |= {seq: self.naive[ids[row]].copy() for seq, row in zip(ids, rows, strict=True)}

    @rule(
        layer=st.integers(0, LAYERS - 1), shares=st.lists(st.floats(0, 1), min_size=4, max_size=4),
        by=st.sampled_from([False, True, "head"]),
    )
    def attend(self, layer, shares, by=False):
        ids = sorted(self.naive)
        lens = []
        for seq, share in zip(ids, shares, strict=False):
            kept = self.naive[seq].kept[self.firsts :][::-1] if len(self.naive[seq].kept) > self.firsts else []
            own = kept.index(False) if False in kept else len(kept)
            own = own if self.length else len(self.naive[seq].tokens)
            lens.append(round(share * own))
        queries = self.rng.standard_normal((sum(lens), 2 * self.heads, self.dim)).astype(np.float32)
        out, *masses, lse = self.real.attention(
            layer, queries, ids, query_lens=lens, return_lse=True, return_scores=by, scale=0.7
        )
        row, expected_masses = 0, []
        for seq, count in zip(ids, lens, strict=True):
            packed = self.read(layer, seq)
            expected_masses.append(np.zeros((self.heads, len(packed[0]))))
            for pos in range(len(self.naive[seq].tokens) - count, len(self.naive[seq].tokens)):
                rows = self.naive[seq].seen(pos, packed, layer, self.length, self.firsts)
                expected = oracle.attend(queries[row : row + 1], *rows, 0.7)
                np.testing.assert_allclose(out[row], expected[0][0], atol=0.08)
                np.testing.assert_allclose(lse[row], expected[2][0], atol=0.08)
                expected_masses[-1][:, : pos + 1] += expected[1].reshape(self.heads, 2, -1).sum(1)
                row += 1
        if by:
            expected = np.concatenate([np.zeros((self.heads, 0)), *expected_masses], axis=1)
            np.testing.assert_allclose(masses[0], expected if by == "head" else expected.sum(0), atol=0.2)

    @invariant()
    def agree(self):
        self.real.check()
        assert self.real.sequence_ids() == sorted(self.naive)
        for seq, text in self.naive.items():
            held = [token for token, kept in zip(text.tokens, text.kept, strict=True) if kept]
            assert self.real.get_sequence(seq).num_tokens == len(text.tokens)
            firsts, base, stop = self.real.unpacked_tokens(seq)
            assert [i < firsts or i >= base for i in range(stop)] == text.kept
            for layer in range(LAYERS):
                got = self.real.read_unpacked(layer, seq)
                for side, dim in enumerate((self.dim, self.value_dim)):
                    zeros = np.zeros((2, self.heads, dim))
                    expected = np.reshape([token.get(layer, zeros)[side] for token in held], (-1, self.heads, dim))
                    np.testing.assert_array_equal(got[side], expected)


class NoFirsts(ResidualMachine):
    length, firsts, block_size = 3, 0, 4


class AllFirsts(ResidualMachine):
    """Latent rows, which are stored less a centre."""

    length, firsts, block_size = 3, 3, 1
    heads, dim, value_dim = 1, 24, 16
    centre = 3 * np.random.default_rng(1).standard_normal((1, dim)).astype(np.float32)
    latent, calibration = (16, 8), Calibration([centre, 2 * centre])

    def rows(self, count):
        keys, _ = super().rows(count)
        return keys, keys[..., : self.value_dim]

    def written(self, keys, values):
        return keys, None

    def read(self, layer, seq):
        """Packed rows as attention reads them: the centre where nothing was written."""
        keys, _ = self.real.read(layer, seq)
        keys[~keys.any(axis=(1, 2))] = (1 + layer) * self.centre
        return keys, keys[..., : self.value_dim]


class NoGroups(ResidualMachine):
    length, firsts, block_size = 0, 3, 4


TestResidual = ResidualMachine.TestCase
TestResidual.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestNoFirsts = NoFirsts.TestCase
TestAllFirsts = AllFirsts.TestCase
TestNoGroups = NoGroups.TestCase
few = settings(max_examples=15, stateful_step_count=40, deadline=None)
TestNoFirsts.settings = TestAllFirsts.settings = TestNoGroups.settings = few


@pytest.mark.parametrize("count", [1, 5, 9])
@pytest.mark.parametrize("steps", [[3, 9, 2], [1] * 9, [20]])
def test_first_tokens_of_blocks_that_are_adopted_stay_packed(count, steps):
    machine = ResidualMachine()
    machine.allocate(0, count)
    machine.adopt(0, 1, 1.0)
    for step in steps:
        machine.append(1, step, True)
        machine.attend(0, [1.0] * 4)
        machine.agree()
