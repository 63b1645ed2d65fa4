"""The newest tokens of a sequence in full beside the cache that packs them: KIVI's residual.

Source: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (arXiv 2402.02750), section 3.3.
Attention falls off with distance, so what rounding costs is lost mostly on the last few tokens. Here the text is
divided into groups of `length` tokens, and a query sees its own group in full and all groups before it packed:

    text      0 ........ 63 | 64 ...... 127 | 128 .. 140
    query 140 packed        | packed        | in full
    query 100 packed        | in full

Which tokens are packed for whom depends on positions alone, never on how a text came into the cache: in pieces, token
by token, or by a cached prefix of whole groups. The answer is the same each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvcache.core.kernels import FORMATS
from kvcache.engine.protocols import Float32, NetworkConfig
from kvcache.paged.cache import PagedKvCache
from kvcache.paged.merging import blend

__all__ = ["LENGTHS", "Residual", "default_length"]

# Tokens of a group where K or V have this format, by measurement: `python -m bench quality --only formats`. Fitted
# formats are those that round coarsely enough for a residual to pay.
LENGTHS = {format.name: 64 if format.bits > 2 else 128 for format in FORMATS.values() if format.fitted}

_IDS = range(4)  # of groups: as many as can be there at once

AttendPiece = Callable[[int, Float32, Float32, Float32], Float32]


def default_length(key_dtype: str, value_dtype: str) -> int:
    """How long a group is unless the caller says it: 0 where neither K nor V are rounded so coarsely that it pays."""
    return max(LENGTHS.get(key_dtype, 0), LENGTHS.get(value_dtype, 0))


class Residual:
    """The tokens `first` to `stop` of one sequence in f16 (f32 where `cache` keeps that), all in one group.

    The cache has every token, also these. If it got them in another way (a shared prefix, a cut), nothing of them is
    here, `first == stop`, and they are read packed, unless `resume` brings them.

    Args:
        config: sizes of the network.
        cache: the sequence's own.
        length: tokens of a group, 1 to 256.
        chunk: most tokens of one piece.
    """

    def __init__(self, config: NetworkConfig, cache: PagedKvCache, length: int, chunk: int) -> None:
        self.length = length
        self.first = self.stop = 0
        self._config = config
        dtypes = (cache.key_dtype, cache.value_dtype)
        self._dtypes = tuple("f16" if FORMATS[dtype].quantised else dtype for dtype in dtypes)
        # A block is a group. Three: the one that a failing call goes back to, the one that it fills, and the next.
        self._groups = self.empty_cache(3, length)
        # The groups of a piece, one layer at a time: only the last of them is needed afterwards.
        self._passing = self.empty_cache(-(-chunk // length) + 1, length, num_layers=1)
        self._id = 0  # of the sequence in `_groups`
        self._kept: tuple[int, int, int] | None = None  # id, first, stop: what a failure brings back
        self._groups.allocate(0, 0)

    def empty_cache(self, num_blocks: int, block_size: int, num_layers: int | None = None) -> PagedKvCache:
        """For tokens in full: of the network's dimensions, and by default of all its layers."""
        config, (key_dtype, value_dtype) = self._config, self._dtypes
        return PagedKvCache(
            num_blocks, block_size, config.num_kv_heads, config.head_dim,
            num_layers=config.num_layers if num_layers is None else num_layers,
            key_dtype=key_dtype, value_dtype=value_dtype,
        )  # fmt: skip

    def read(self, layer: int) -> tuple[Float32, Float32]:
        """K and V of the tokens that are here, `(stop - first, num_kv_heads, head_dim)` each."""
        return self._groups.read(layer, self._id)

    def check(self) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        self._groups.check()
        assert self._groups.sequence_ids() == [self._id], f"groups left over: {self._groups.sequence_ids()}"
        held = self._groups.get_sequence(self._id)
        assert held is not None, f"group {self._id} is gone"
        assert held.num_tokens == self.stop - self.first, f"not {self.first} to {self.stop}: {held.num_tokens} tokens"
        assert self.first == self.stop or self.first // self.length == (self.stop - 1) // self.length, (
            f"tokens {self.first} to {self.stop} are of more than one group"
        )
        assert self._passing.num_sequences == 0, "a piece was not cleared away"

    def restart(self, pos: int) -> None:
        """The sequence has `pos` tokens, all of them packed. Takes no memory."""
        self._kept = None
        self._free_all_but(self._id)
        self._groups.truncate(self._id, 0)
        self.first = self.stop = pos

    def resume(self, rows: Sequence[tuple[Float32, Float32]]) -> None:
        """Have the newest tokens of the sequence, none of which is here, in full: per layer K and V as of `read`.

        As many as there are rows, all of one group. If it fails, none of them is here.
        """
        count, fresh = len(rows[0][0]), self._free_id()
        self._groups.allocate(fresh, count)
        try:
            for layer, (keys, values) in enumerate(rows):
                self._groups.write(layer, fresh, keys, values)
        except Exception:
            self._groups.free(fresh)
            raise
        self._take(fresh, self.stop - count)

    def mend(self, pos: int) -> None:
        """Put right what an interrupt has torn, in a sequence of `pos` tokens; good at any time."""
        self._clear_passing()
        if self._kept is not None:
            self._roll_back()
        else:
            self._free_all_but(self._id)
        held = self._groups.get_sequence(self._id)
        if self.stop != pos or held is None or held.num_tokens != pos - self.first:
            if held is None:
                self._groups.allocate(self._id, 0)
            self.restart(pos)

    @contextmanager
    def changing(self, pos: int) -> Iterator[None]:
        """Within, the sequence is cut to `pos` tokens and pieces follow; a failure leaves all as it was."""
        self._kept = self._id, self.first, self.stop
        try:
            if self.first < pos < self.stop:
                shorter = self._free_id()
                self._groups.fork(self._id, shorter)
                self._groups.truncate(shorter, pos - self.first)
                self._id, self.stop = shorter, pos
            elif pos != self.stop:
                self._open(pos)
            yield
        except Exception:
            self._roll_back()
            raise
        self._kept = None
        self._free_all_but(self._id)

    @contextmanager
    def piece(self, cache: PagedKvCache, seq_id: int, pos: int, count: int) -> Iterator[AttendPiece]:
        """Run `count` tokens from `pos` on, which `cache` has room for; gives what is called once per layer."""
        if pos % self.length == 0:
            self._open(pos)
        starts = np.arange(pos - pos % self.length, pos + count, self.length)
        stops = np.minimum(starts + self.length, pos + count)
        starts[0] = self.first
        if len(starts) == 1:
            self._groups.append(self._id, count)
            yield self._within(cache, seq_id, count)
        else:
            following = self._free_id()
            self._groups.allocate(following, int(stops[-1] - starts[-1]))
            self._passing.allocate_batch(np.arange(len(starts)), stops - starts)
            try:
                yield self._across(cache, seq_id, pos, starts, stops, following)
            finally:
                self._clear_passing()
            self._take(following, int(starts[-1]))
        self.stop = pos + count

    def _within(self, cache: PagedKvCache, seq_id: int, count: int) -> AttendPiece:
        """Of a piece that stays in the group."""
        query_lens, context_lens = np.array([count]), np.array([self.first])
        here, there = np.array([self._id], np.uint64), np.array([seq_id], np.uint64)

        def attend(layer: int, queries: Float32, keys: Float32, values: Float32) -> Float32:
            self._groups.write(layer, self._id, keys, values)
            near = self._groups.attention(layer, queries, here, query_lens=query_lens, return_lse=True)
            far = cache.attention(
                layer, queries, there, query_lens=query_lens, context_lens=context_lens, return_lse=True
            )
            return _merged(far, near)

        return attend

    def _across(
        self, cache: PagedKvCache, seq_id: int, pos: int,
        starts: NDArray[np.int64], stops: NDArray[np.int64], following: int,
    ) -> AttendPiece:  # fmt: skip
        """Of a piece that goes through several groups: each is a sequence, as far as it is in full."""
        query_lens = np.diff(stops, prepend=pos)
        groups, there = np.arange(len(starts)), np.full(len(starts), seq_id, np.uint64)

        def attend(layer: int, queries: Float32, keys: Float32, values: Float32) -> Float32:
            if self.stop > self.first:
                self._passing.write(0, 0, *self._groups.read(layer, self._id), start=0)
            for group, (start, stop) in enumerate(zip(np.maximum(starts, pos) - pos, stops - pos, strict=True)):
                self._passing.write(0, group, keys[start:stop], values[start:stop])
            self._groups.write(layer, following, keys[start:stop], values[start:stop])
            near = self._passing.attention(0, queries, groups, query_lens=query_lens, return_lse=True)
            far = cache.attention(layer, queries, there, query_lens=query_lens, context_lens=starts, return_lse=True)
            return _merged(far, near)

        return attend

    def _open(self, pos: int) -> None:
        """An empty group that begins at `pos`."""
        fresh = self._free_id()
        self._groups.allocate(fresh, 0)
        self._take(fresh, pos)
        self.stop = pos

    def _take(self, seq_id: int, first: int) -> None:
        """Go on in another group; the old one goes, unless a failure would bring it back."""
        old, self._id, self.first = self._id, seq_id, first
        if self._kept is None or old != self._kept[0]:
            self._groups.free(old)

    def _free_id(self) -> int:
        return next(seq_id for seq_id in _IDS if seq_id not in self._groups)

    def _roll_back(self) -> None:
        if self._kept is not None:
            self._id, self.first, self.stop = self._kept
            self._free_all_but(self._id)
            self._groups.truncate(self._id, self.stop - self.first)
            self._kept = None

    # What puts things right after a failure takes no memory.

    def _clear_passing(self) -> None:
        for seq_id in range(self._passing.total_blocks):
            if seq_id in self._passing:
                self._passing.free(seq_id)

    def _free_all_but(self, kept: int) -> None:
        for seq_id in _IDS:
            if seq_id != kept and seq_id in self._groups:
                self._groups.free(seq_id)


def _merged(far: tuple[Float32, Float32], near: tuple[Float32, Float32]) -> Float32:
    """Attention over what lies packed and over the group, which has at least the token itself."""
    return blend(far[0], near[0], far[1] - near[1])
