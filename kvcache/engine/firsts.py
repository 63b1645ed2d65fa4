"""The first tokens of a sequence, unpacked, beside a cache that packs all of them: what a calibration needs at least.

The keys of the first tokens are unlike all others: far from the centre that is subtracted from keys, so they would be
rounded badly, and they get much of the attention. Every query reads them in f16, and all later tokens packed:

    query 140    0 .. 15 unpacked | 16 .. 140 packed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from kvcache.engine.residual import FIRSTS, AttendPiece, unpacked_cache
from kvcache.networks.protocols import Float32, LayerAttention, NetworkConfig
from kvcache.paged.cache import PagedKvCache
from kvcache.paged.merging import Parts

__all__ = ["FirstTokens", "attend_firsts"]


class FirstTokens:
    """The first 16 tokens of one sequence in f16: a `Residual` whose groups after the first one are empty.

    After a shared prefix it is empty: these tokens are then read packed, unless `resume` provides them unpacked.

    Args:
        config: sizes of the network.
        cache: the cache of the sequence.
        attention: how each layer attends; none of them has a window.
    """

    first = 0
    length = firsts = FIRSTS

    def __init__(self, config: NetworkConfig, cache: PagedKvCache, attention: Sequence[LayerAttention]) -> None:
        self.stop = 0
        self._options = [each.options() for each in attention]
        self._config, self._dtypes = config, (cache.key_dtype, cache.value_dtype)
        self._rows = self.empty_cache(2, self.firsts)
        self._id = 0
        self._saved: tuple[int, int, int] | None = None  # during a change: id, its tokens, stop that a failure restores
        self._rows.allocate(0, 0)

    def empty_cache(self, num_blocks: int, block_size: int) -> PagedKvCache:
        """A cache for unpacked tokens, with the network's dimensions."""
        return unpacked_cache(self._config, self._dtypes, num_blocks, block_size, self._config.num_layers)

    def read(self, layer: int) -> tuple[Float32, Float32]:
        """K and V of the tokens that are held, `(n, num_kv_heads, head_dim)` each."""
        return self._rows.read(layer, self._id)

    read_firsts = read

    def memory(self) -> dict[str, int]:
        """Bytes of K and V, "kv", of "bookkeeping" and of "scratch"."""
        return self._rows.memory()

    def check(self) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        self._rows.check()
        assert self._rows.sequence_ids() == [self._id], f"sequences left over: {self._rows.sequence_ids()}"
        held = self._held
        assert held in (0, min(self.stop, self.firsts)), f"{held} first tokens of a text of {self.stop}"

    @property
    def _held(self) -> int:
        found = self._rows.get_sequence(self._id)
        return 0 if found is None else found.num_tokens

    def restart(self, pos: int) -> None:
        """Become empty in a sequence of `pos` packed tokens. Allocates no memory."""
        self._saved = None
        self._free_other()
        self._rows.truncate(self._id, 0)
        self.stop = pos

    def resume(
        self, rows: Sequence[tuple[Float32, Float32]], firsts: Sequence[tuple[Float32, Float32]] = ()
    ) -> None:  # fmt: skip
        """Hold `firsts`, K and V for each layer as `read` returns them; `rows` is empty. A failure leaves it empty."""
        self._rows.append(self._id, self.firsts)
        try:
            for layer, (keys, values) in enumerate(firsts):
                self._rows.write(layer, self._id, keys, values)
        except Exception:
            self._rows.truncate(self._id, 0)
            raise

    def mend(self, pos: int) -> None:
        """Restore a consistent state after an interrupt, for a sequence of `pos` tokens; may be called at any time."""
        if self._saved is not None:
            self._roll_back()
        else:
            self._free_other()
        if self._id not in self._rows:
            self._rows.allocate(self._id, 0)
        if self.stop != pos or self._held not in (0, min(pos, self.firsts)):
            self.restart(pos)

    @contextmanager
    def changing(self, pos: int) -> Iterator[None]:
        """Cut the sequence to `pos` tokens; pieces may follow inside. An exception restores the state before."""
        held = self._held
        self._saved = self._id, held, self.stop
        try:
            if pos < held:
                shorter = 1 - self._id
                self._rows.fork(self._id, shorter)
                self._rows.truncate(shorter, pos)
                self._id = shorter
            self.stop = pos
            yield
        except Exception:
            self._roll_back()
            raise
        self._saved = None
        self._free_other()

    @contextmanager
    def piece(self, cache: PagedKvCache, seq_id: int, pos: int, count: int) -> Iterator[AttendPiece]:
        """Run `count` tokens from `pos` on, for which `cache` has room; yields the `attend` of the piece."""
        held, near = self._held == min(pos, self.firsts), self._id
        head = min(self.firsts - pos, count) if held and pos < self.firsts else 0
        self._rows.append(near, head)
        yield attend_firsts(self._rows, [near], cache, [seq_id], [head], [count - head], self._options, FIRSTS * held)
        self.stop = pos + count

    # Recovery from a failure allocates no memory.

    def _roll_back(self) -> None:
        if self._saved is not None:
            self._id, held, self.stop = self._saved
            self._free_other()
            self._rows.truncate(self._id, held)
            self._saved = None

    def _free_other(self) -> None:
        if 1 - self._id in self._rows:
            self._rows.free(1 - self._id)


def attend_firsts(
    rows: PagedKvCache, firsts: Sequence[int], cache: PagedKvCache, texts: Sequence[int], heads: Sequence[int],
    tails: Sequence[int], options: Sequence[dict[str, Any]], skip: int = FIRSTS,
) -> AttendPiece:  # fmt: skip
    """The `attend` of pieces of many texts, each of first tokens and then of others.

    Args:
        rows, firsts: the cache of first tokens, which has room for those of the pieces, and its sequences.
        cache, texts: the cache of packed tokens and its sequences.
        heads, tails: how many tokens of each piece are first ones, and how many are not.
        options: of attention, for each layer.
        skip: how many first tokens are there behind which others stand.
    """
    ids, head_lens = np.array(firsts, np.uint64), np.array(heads)
    is_head = np.repeat(np.tile([True, False], len(ids)), np.stack([heads, tails], axis=1).ravel())
    own, lens = ids[head_lens > 0], head_lens[head_lens > 0]
    parts = Parts(ids, texts, tails, None, skip, causal=False)

    def attend(layer: int, queries: Float32, keys: Float32, values: Float32) -> Float32:
        near, far = partial(rows.attention, layer), partial(cache.attention, layer)
        if not len(own):
            return parts.attend(near, far, queries, options[layer])[0]
        rows.write_ragged(layer, own, lens, keys[is_head], values[is_head])
        mixed = np.empty_like(queries)
        mixed[is_head] = near(queries[is_head], own, query_lens=lens, **options[layer])
        if any(tails):
            mixed[~is_head] = parts.attend(near, far, queries[~is_head], options[layer])[0]
        return mixed

    return attend
