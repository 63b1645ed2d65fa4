"""KIVI's residual: the newest tokens of a sequence, unpacked, beside the cache that packs all of them.

As `kvcache.paged.residual` has them for many sequences: a text is divided into groups of `length` tokens, and a query
reads its own group unpacked and all earlier groups packed, but for the first tokens of a calibrated text, which stand
before those of the group in one sequence. Groups of a piece that are over are held for one layer at a time, and a
failure restores the group before.

Whether a query reads a token packed depends on their positions alone, not on how the text entered the cache: in
pieces, token by token, or as a cached prefix of whole groups. The result is the same in each case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from kvcache.core.arguments import as_count
from kvcache.core.kernels import FORMATS
from kvcache.core.layer_formats import Formats, names_of, unpacked
from kvcache.core.memory import total
from kvcache.core.store import BlockStore
from kvcache.networks.protocols import Float32, LayerAttention, NetworkConfig
from kvcache.paged.cache import PagedKvCache
from kvcache.paged.merging import Parts

__all__ = [
    "FIRSTS", "LENGTHS", "AttendPiece", "Residual", "as_length", "default_length", "num_firsts", "residual_bytes",
    "unpacked_cache",
]  # fmt: skip

# Tokens of a group if K or V has this format, chosen by `python -m bench quality --only formats`. Fitted formats round
# coarsely enough for a residual to pay.
LENGTHS = {format.name: 64 if format.bits > 2 else 128 for format in FORMATS.values() if format.fitted}

_IDS = range(6)  # ids of groups and of first tokens: at most so many exist at once
_NONE = -1  # in the place of an id

FIRSTS = 16  # first tokens that are read unpacked beside centred keys

AttendPiece = Callable[[int, Float32, Float32, Float32], Float32]


def default_length(key_dtype: Formats, value_dtype: Formats) -> int:
    """The default length of a group; 0 if the rounding of both K and V is too fine for a residual to pay."""
    return max([0, *(LENGTHS.get(name, 0) for dtype in (key_dtype, value_dtype) for name in names_of(dtype))])


def as_length(
    length: int | None, key_dtype: Formats, value_dtype: Formats, *, without: str = "", calibrated: bool = False
) -> int:
    """An engine's `residual_length`, or its default.

    Args:
        calibrated: keys have a calibration: any quantised format has a residual by default.
        without: what excludes a residual; empty: nothing does.

    Raises:
        ValueError: not 0 to 256; not 0 where it is excluded.
    """
    if length is None:
        return 0 if without else default_length(key_dtype, value_dtype) or 64 * calibrated
    length = as_count(length, "residual_length", 0, 256)
    if without and length:
        raise ValueError(f"residual_length: expected 0 or none with {without}, got {length}")
    return length


def num_firsts(measured: bool, length: int) -> int:
    """The first tokens that are kept unpacked beside a residual of this length: some beside a measured calibration."""
    return min(FIRSTS, length or FIRSTS) if measured else 0


def residual_bytes(
    config: NetworkConfig, dtypes: tuple[Formats, Formats], length: int, chunk: int, firsts: int = 0
) -> int:  # fmt: skip
    """Bytes of K and V of a `Residual`, or of `FirstTokens` alone, beside a cache of these formats; 0 without them."""
    if not length and not firsts:
        return 0
    size, groups, piece_groups = _blocks(length, chunk, firsts) if length else (firsts, 2, 0)
    key, value = map(unpacked, dtypes)
    block = BlockStore(1, 0, size, config.num_kv_heads, config.head_dim, key, value).block_bytes
    return block * (groups * config.num_layers + piece_groups)


def unpacked_cache(
    config: NetworkConfig, dtypes: tuple[Formats, Formats], num_blocks: int, block_size: int, num_layers: int
) -> PagedKvCache:  # fmt: skip
    """A cache for the unpacked tokens beside one of these formats."""
    key_dtype, value_dtype = map(unpacked, dtypes)
    return PagedKvCache(
        num_blocks, block_size, config.num_kv_heads, config.head_dim, num_layers=num_layers, key_dtype=key_dtype,
        value_dtype=value_dtype,
    )  # fmt: skip


def _blocks(length: int, chunk: int, firsts: int) -> tuple[int, int, int]:
    """The size of blocks; how many hold the groups, and how many those of a piece.

    Groups: the one that a failure restores, the current one, the next, each with the first tokens before it; and twice
    the first tokens alone.
    """
    size = length if not firsts or length % FIRSTS else FIRSTS
    group, alone = -(-(firsts + length) // size), -(-firsts // size)
    return size, 3 * group + 2 * alone, (-(-chunk // length) + 1) * group


class Residual:
    """The tokens [first, stop) of one sequence in f16 (in f32 if `cache` stores f32), all in one group.

    The cache also has these tokens, packed. After a shared prefix or a cut the residual is empty (`first == stop`): the
    tokens are then read packed, unless `resume` provides them unpacked.

    Args:
        config: sizes of the network.
        cache: the cache of the sequence.
        length: tokens of a group, 1 to 256.
        chunk: maximum number of tokens of one piece.
        attention: how each layer attends; none of them has a window.
        firsts: so many first tokens of the text are read unpacked by every query; at most `length`.
    """

    def __init__(
        self, config: NetworkConfig, cache: PagedKvCache, length: int, chunk: int,
        attention: Sequence[LayerAttention] = (), firsts: int = 0,
    ) -> None:  # fmt: skip
        self.length, self.firsts = length, firsts
        self.first = self.stop = 0
        self._config = config
        self._options = [each.options() for each in attention or [LayerAttention()] * config.num_layers]
        dtypes = (cache.key_dtype, cache.value_dtype)
        self._dtypes = dtypes
        size, groups, piece_groups = _blocks(length, chunk, firsts)
        self._groups = self.empty_cache(groups, size)
        # The groups of a piece, one layer at a time: only the last of them is needed after the piece.
        self._piece_groups = self.empty_cache(piece_groups, size, num_layers=1)
        self._id = 0  # of the current group's sequence in `_groups`
        self._firsts_id = _NONE  # of the first tokens, once the text has all of them and a second group
        # During a change: id, first, stop and id of the first tokens that a failure restores.
        self._saved: tuple[int, int, int, int] | None = None
        self._groups.allocate(0, 0)

    def empty_cache(self, num_blocks: int, block_size: int, num_layers: int | None = None) -> PagedKvCache:
        """A cache for unpacked tokens, with the network's dimensions and by default all its layers."""
        layers = self._config.num_layers if num_layers is None else num_layers
        return unpacked_cache(self._config, self._dtypes, num_blocks, block_size, layers)

    def read(self, layer: int) -> tuple[Float32, Float32]:
        """K and V of the tokens [first, stop), `(stop - first, num_kv_heads, head_dim)` each."""
        return self._groups.read(layer, self._id, self._ahead)

    def read_firsts(self, layer: int) -> tuple[Float32, Float32]:
        """K and V of the first tokens, `(firsts, num_kv_heads, head_dim)` each; of fewer where they are not held."""
        if self._firsts_id != _NONE:
            return self._groups.read(layer, self._firsts_id)
        held = min(self.firsts, self.stop - self.first) if self.first == 0 else 0
        return self._groups.read(layer, self._id, 0, held)

    @property
    def _ahead(self) -> int:
        """The first tokens that stand before those of the current group."""
        return self.firsts if self.first and self._firsts_id != _NONE else 0

    def memory(self) -> dict[str, int]:
        """Bytes of K and V, "kv", of "bookkeeping" and of "scratch"."""
        return total(self._groups.memory(), self._piece_groups.memory())

    def check(self) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        self._groups.check()
        expected = sorted({self._id, self._firsts_id} - {_NONE})
        assert sorted(self._groups.sequence_ids()) == expected, f"groups left over: {self._groups.sequence_ids()}"
        held = self._groups.get_sequence(self._id)
        assert held is not None, f"group {self._id} is gone"
        count = self._ahead + self.stop - self.first
        assert held.num_tokens == count, f"not {self.first} to {self.stop}: {held.num_tokens} tokens"
        assert self._firsts_id == _NONE or self.stop >= self.firsts, f"first tokens of a text of {self.stop}"
        assert self.first == self.stop or self.first // self.length == (self.stop - 1) // self.length, (
            f"tokens {self.first} to {self.stop} are of more than one group"
        )
        assert self._piece_groups.num_sequences == 0, "the groups of a piece were not freed"

    def restart(self, pos: int) -> None:
        """Become empty in a sequence of `pos` packed tokens. Allocates no memory."""
        self._saved, self._firsts_id = None, _NONE
        self._free_all_but(self._id)
        self._groups.truncate(self._id, 0)
        self.first = self.stop = pos

    def resume(
        self, rows: Sequence[tuple[Float32, Float32]], firsts: Sequence[tuple[Float32, Float32]] = ()
    ) -> None:  # fmt: skip
        """Fill the empty residual with the newest tokens of the sequence, all of one group.

        After a failure the residual is still empty.

        Args:
            rows: K and V for each layer, as `read` returns them; empty: no token of the current group.
            firsts: those of the first tokens, as `read_firsts` returns them, where the group is not the first.
        """
        count, before = len(rows[0][0]) if len(rows) else 0, self._id
        try:
            if len(firsts):
                held = self._free_id()
                self._groups.allocate(held, 0)
                self._fill(held, self.firsts, firsts)
                self._firsts_id = held
            fresh = self._free_id()
            self._begin(fresh, self.stop - count)
            self._fill(fresh, count, rows)
        except Exception:
            self._firsts_id = _NONE
            self._free_all_but(before)
            raise
        self._switch_to(fresh, self.stop - count)

    def _fill(self, seq_id: int, count: int, rows: Sequence[tuple[Float32, Float32]]) -> None:
        self._groups.append(seq_id, count)
        for layer, (keys, values) in enumerate(rows):
            self._groups.write(layer, seq_id, keys, values)

    def _begin(self, fresh: int, pos: int) -> None:
        """Start a sequence for a group that begins at `pos`: the first tokens, where it is not the first group."""
        if pos and self._firsts_id != _NONE:
            self._groups.fork(self._firsts_id, fresh)
        else:
            self._groups.allocate(fresh, 0)

    def mend(self, pos: int) -> None:
        """Restore a consistent state after an interrupt, for a sequence of `pos` tokens; may be called at any time."""
        self._free_piece_groups()
        if self._saved is not None:
            self._roll_back()
        else:
            self._free_all_but(self._id)
        held = self._groups.get_sequence(self._id)
        if self.stop != pos or held is None or held.num_tokens != self._ahead + pos - self.first:
            if held is None:
                self._groups.allocate(self._id, 0)
            self.restart(pos)

    @contextmanager
    def changing(self, pos: int) -> Iterator[None]:
        """Cut the sequence to `pos` tokens; pieces may follow inside. An exception restores the state before."""
        self._saved = self._id, self.first, self.stop, self._firsts_id
        try:
            if self.first < pos < self.stop:
                self._cut(self._id, self._ahead + pos - self.first, self.first, pos)
            elif pos < self.firsts and pos < self.stop and self._firsts_id != _NONE:
                self._cut(self._firsts_id, pos, 0, pos)
            elif pos != self.stop:
                self._start_group(pos)
            if pos < self.firsts:
                self._firsts_id = _NONE  # `_saved` has it
            yield
        except Exception:
            self._roll_back()
            raise
        self._saved = None
        self._free_all_but(self._id)

    @contextmanager
    def piece(self, cache: PagedKvCache, seq_id: int, pos: int, count: int) -> Iterator[AttendPiece]:
        """Run `count` tokens from `pos` on, for which `cache` has room; yields the `attend` of the piece."""
        if pos % self.length == 0:
            if self.firsts and self._firsts_id == _NONE and pos and self.first == 0:
                held = self._free_id()
                self._groups.fork(self._id, held)
                self._groups.truncate(held, self.firsts)
                self._firsts_id = held
            self._start_group(pos)
        starts = np.arange(pos - pos % self.length, pos + count, self.length)
        stops = np.minimum(starts + self.length, pos + count)
        starts[0] = self.first
        if len(starts) == 1:
            self._groups.append(self._id, count)
            parts = Parts([self._id], [seq_id], [count], [self.first], self._ahead)

            def attend(layer: int, queries: Float32, keys: Float32, values: Float32) -> Float32:
                self._groups.write(layer, self._id, keys, values)
                near, far = partial(self._groups.attention, layer), partial(cache.attention, layer)
                return parts.attend(near, far, queries, self._options[layer])[0]

            yield attend
        else:
            # All groups but the first of the text have the first tokens ahead, if the text begins here or has them.
            ahead = np.full(len(starts), self.firsts if self.first == 0 or self._firsts_id != _NONE else 0)
            ahead[starts == 0] = 0
            held = self._firsts_id
            if held == _NONE and ahead.any():
                held = self._free_id()
                self._groups.allocate(held, self.firsts)
            following = self._free_id()
            self._groups.allocate(following, int(ahead[-1] + stops[-1] - starts[-1]))
            begun, groups = self._ahead, np.arange(len(starts))  # each group is a sequence
            self._piece_groups.allocate_batch(groups, ahead + stops - starts)
            parts = Parts(groups, [seq_id] * len(starts), np.diff(stops, prepend=pos), starts, int(ahead[-1]))

            def attend_all(layer: int, queries: Float32, keys: Float32, values: Float32) -> Float32:
                old = self._groups.read(layer, self._id) if begun or self.stop > self.first else (keys[:0], values[:0])
                if len(old[0]):
                    self._piece_groups.write(0, 0, *old, start=0)
                for group, (start, stop) in enumerate(zip(np.maximum(starts, pos) - pos, stops - pos, strict=True)):
                    self._piece_groups.write(0, group, keys[start:stop], values[start:stop])
                self._groups.write(layer, following, keys[start:stop], values[start:stop])
                if ahead[-1]:
                    more = max(0, self.firsts - len(old[0]))  # 0 unless the text begins here, or did just before
                    both = zip(old, (keys, values), strict=True)
                    k, v = (np.concatenate([a[: self.firsts], b[:more]]) for a, b in both)
                    if not begun:
                        self._groups.write(layer, held, k, v)
                    for later in groups[ahead > 0][begun > 0 :]:
                        self._piece_groups.write(0, int(later), k, v, start=0)
                    self._groups.write(layer, following, k, v, start=0)
                near, far = partial(self._piece_groups.attention, 0), partial(cache.attention, layer)
                return parts.attend(near, far, queries, self._options[layer])[0]

            try:
                yield attend_all
            finally:
                self._free_piece_groups()
            self._firsts_id = held
            self._switch_to(following, int(starts[-1]))
        self.stop = pos + count

    def _start_group(self, pos: int) -> None:
        """Switch to an empty group that begins at `pos`."""
        fresh = self._free_id()
        self._begin(fresh, pos)
        self._switch_to(fresh, pos)
        self.stop = pos

    def _cut(self, source: int, count: int, first: int, pos: int) -> None:
        """Continue at `pos` with the `count` first tokens of a sequence, which is kept; the group begins at `first`."""
        shorter = self._free_id()
        self._groups.fork(source, shorter)
        self._groups.truncate(shorter, count)
        self._id, self.first, self.stop = shorter, first, pos

    def _switch_to(self, seq_id: int, first: int) -> None:
        """Make another group the current one and free the old one, unless a failure would restore it."""
        old, self._id, self.first = self._id, seq_id, first
        if self._saved is None or old != self._saved[0]:
            self._groups.free(old)

    def _free_id(self) -> int:
        return next(seq_id for seq_id in _IDS if seq_id not in self._groups)

    def _roll_back(self) -> None:
        if self._saved is not None:
            self._id, self.first, self.stop, self._firsts_id = self._saved
            self._free_all_but(self._id)
            self._groups.truncate(self._id, self._ahead + self.stop - self.first)
            self._saved = None

    # Recovery from a failure allocates no memory.

    def _free_piece_groups(self) -> None:
        for seq_id in range(self._piece_groups.total_blocks):
            if seq_id in self._piece_groups:
                self._piece_groups.free(seq_id)

    def _free_all_but(self, kept: int) -> None:
        for seq_id in _IDS:
            if seq_id not in (kept, self._firsts_id) and seq_id in self._groups:
                self._groups.free(seq_id)
