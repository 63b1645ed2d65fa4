"""One sequence in a cache, extended by running tokens through a network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.calibration.residual import most_unpacked
from kvcache.core.memory import total
from kvcache.engine.windows import Pages, Windows
from kvcache.errors import KvCacheError, OutOfMemoryError
from kvcache.networks.protocols import Attend, Float32, Logits, Model, layer_attention
from kvcache.paged.cache import PagedKvCache

__all__ = ["LiveSequence", "ModelSequence", "Share"]

Share = Callable[[PagedKvCache, int], int]


class ModelSequence(ABC):
    """The sequence of an engine: the interface that engines with and without eviction share.

    Args:
        model: the network.
        cache: the cache of keys and values.
        chunk: maximum number of tokens that run through the network in one piece.

    Attributes:
        num_tokens: the number of tokens of the text, evicted ones included: the position of the next token.
        version: increases with every change, so that an iterator can detect changes by other calls.
        reclaim: see `InferenceEngine`.
        regime: of the tokens that run next, see `Model`.
        several_regimes: whether the network has more than one.
    """

    def __init__(self, model: Model, cache: PagedKvCache, chunk: int) -> None:
        self.model = model
        self.cache = cache
        self.chunk = chunk
        self.num_tokens = 0
        self.version = 0
        self.reclaim: Callable[[OutOfMemoryError], bool] | None = None
        self.regime = 0
        self.several_regimes = self.regime_of(1) != self.regime_of(model.config.max_position_embeddings)

    def regime_of(self, num_tokens: int) -> int:
        """The regime of a text of `num_tokens`; 0 for a network that does not say."""
        regime: Callable[[int], int] | None = getattr(self.model, "regime", None)
        return 0 if regime is None else regime(num_tokens)

    @property
    @abstractmethod
    def seq_id(self) -> int:
        """The sequence's id in the cache. Raises InvalidOperationError if each layer has its own sequence."""

    def memory(self) -> dict[str, int]:
        """Bytes of K and V, "kv", of "bookkeeping" and of "scratch": of the cache and of the products."""
        products = {"scratch": getattr(getattr(self.model, "weights", None), "scratch_bytes", 0)}
        return total(self.cache.memory(), products)

    @abstractmethod
    def check(self) -> None:
        """Verify that the cache has this sequence and no temporary ones; AssertionError names the fault."""

    @abstractmethod
    def mend(self) -> None:
        """Restore the state after the last completed call; runs after an interrupt between any two lines."""

    @abstractmethod
    def clear(self) -> None:
        """Become an empty sequence. Cannot run out of blocks: an empty sequence has none."""

    @abstractmethod
    def move(self, cache: PagedKvCache, more_blocks: int) -> None:
        """Become an empty sequence in another cache, which has so many blocks more."""

    @abstractmethod
    def replace(self, share: Share, pages: Sequence[Pages] = ()) -> None:
        """Become the sequence that `share(cache, id)` creates; `share` returns its number of tokens.

        The old sequence is freed afterwards. Raises what `share` raises, and ValueError if its result is wrong.

        Args:
            pages: the newest tokens of each group of layers with a window. InvalidOperationError: too few of them.
        """

    @abstractmethod
    def extend(self, tokens: NDArray[np.uint32], pos: int, logits: Logits = "last") -> Float32:
        """Cut the sequence to `pos` tokens, then run new ones at positions `pos`, `pos + 1`, ...

        Args:
            tokens: at least one.
            pos: at most `num_tokens`.
            logits: "last", or "all" for at most `chunk` tokens.

        Returns:
            float32 `(1 or len(tokens), vocab_size)`.
        """

    @abstractmethod
    def positions(self, layer: int) -> NDArray[np.int64]:
        """The text positions of the tokens whose K and V this layer has, ascending, `(n,)`."""

    def _run_in_chunks(self, seq_id: int, tokens: NDArray[np.uint32], pos: int, logits: Logits) -> Float32:
        # Pieces end at multiples of `chunk` wherever they begin: after a cached prefix they are those of a cold run.
        first, end = pos, pos + len(tokens)
        while logits != "all" and (stop := first + self.chunk - first % self.chunk) < end:
            self._run(seq_id, tokens[first - pos : stop - pos], first, "none")
            first = stop
        return self._run(seq_id, tokens[first - pos :], first, logits)

    @abstractmethod
    def _run(self, seq_id: int, tokens: NDArray[np.uint32], pos: int, logits: Logits) -> Float32:
        """Append tokens to a sequence that holds `pos` of them and run them through the network."""

    def _forward(
        self, tokens: NDArray[np.uint32], pos: int, attend: Attend, logits: Logits, **places: Any
    ) -> Float32:
        """Call the network and check the shape of its logits; `places` are keyword arguments of `StreamingModel`."""
        count = len(tokens)
        if self.several_regimes:
            places["regime"] = self.regime
        rows = self.model.forward(tokens, np.arange(pos, pos + count), attend, logits, **places)
        expected = ({"last": 1, "all": count, "none": 0}[logits], self.model.config.vocab_size)
        if rows.shape != expected:
            raise ValueError(f"model.forward: expected logits of shape {expected}, got {rows.shape}")
        return rows

    def _append(self, seq_id: int, count: int) -> None:
        self._with_room(partial(self.cache.append, seq_id, count))

    def _append_to(self, seq_ids: NDArray[np.uint64], counts: NDArray[np.int64]) -> None:
        self._with_room(partial(self.cache.append_batch, seq_ids, counts))

    def _with_room(self, append: Callable[[], None]) -> None:
        while True:
            try:
                append()
                return
            except OutOfMemoryError as error:
                if self.reclaim is None or not self.reclaim(error):
                    raise

    def _expect_free(self, blocks: int) -> None:
        """Free blocks until there are so many; OutOfMemoryError: that is not possible."""
        while (free := self.cache.free_block_count) < blocks:
            error = OutOfMemoryError(blocks, free)
            if self.reclaim is None or not self.reclaim(error):
                raise error


class LiveSequence(ModelSequence):
    """A sequence that keeps every token. A failing call leaves it and the cache unchanged.

    It uses the ids 0 and 1 of the cache: one is the current sequence, the other is free for its replacement.
    Arguments and attributes are those of `ModelSequence`, and:

    Args:
        cache: K and V of the layers that no group of `windows` has, in their order. With windows it has no residual.
        windows: the layers that keep a window alone.
    """

    def __init__(self, model: Model, cache: PagedKvCache, chunk: int, windows: Windows) -> None:
        super().__init__(model, cache, chunk)
        self._seq_id = 0
        self.windows, self.places = windows, windows.working
        whole = [layer for layer in range(model.config.num_layers) if layer not in windows]
        attention = layer_attention(model)
        self._options = {layer: (own, attention[layer].options()) for own, layer in enumerate(whole)}
        self._begin(cache)

    def _begin(self, cache: PagedKvCache) -> None:
        """Start the empty sequence in a cache, with the memory that its unpacked tokens take at most."""
        if cache.residual_length or cache.first_tokens:
            most = min(self.chunk, self.model.config.max_position_embeddings)  # a piece is not longer than a text
            cache.reserve_unpacked(most_unpacked(cache.residual_length, most, cache.first_tokens))
        cache.allocate(self._seq_id, 0)

    @property
    def seq_id(self) -> int:
        """0 or 1; changes when the sequence is replaced."""
        return self._seq_id

    def check(self) -> None:
        held = self.cache.get_sequence(self.seq_id)
        assert held is not None, f"sequence {self.seq_id} is gone from the cache"
        assert held.num_tokens == self.num_tokens, (
            f"expected {self.num_tokens} tokens in the cache, got {held.num_tokens}"
        )
        assert self.cache.get_sequence(1 - self.seq_id) is None, "a replaced sequence was not freed"
        self.windows.check(self.places, self.num_tokens)

    def memory(self) -> dict[str, int]:
        return total(super().memory(), self.windows.memory())

    def mend(self) -> None:
        # `seq_id`, `places` and `num_tokens` are valid: they change in one step, after everything that can fail.
        if self.cache.get_sequence(1 - self.seq_id) is not None:
            self.cache.free(1 - self.seq_id)
        held = self.cache.get_sequence(self.seq_id)
        if held is not None and held.num_tokens > self.num_tokens:
            self.cache.truncate(self.seq_id, self.num_tokens)
        self.windows.restore(self.places, self.num_tokens)

    def clear(self) -> None:
        self.replace(_allocate_empty)

    def move(self, cache: PagedKvCache, more_blocks: int) -> None:
        windows = self.windows.enlarged(more_blocks)
        self._begin(cache)
        self.__dict__.update(cache=cache, num_tokens=0, windows=windows, places=windows.working)  # in one step
        self.version += 1

    def replace(self, share: Share, pages: Sequence[Pages] = ()) -> None:
        fresh = 1 - self.seq_id
        try:
            num_tokens = share(self.cache, fresh)
            made = self.cache.get_sequence(fresh)
            if made is None or made.num_tokens != num_tokens:
                held = "no sequence" if made is None else f"{made.num_tokens} tokens"
                raise ValueError(f"share: expected sequence {fresh} of {num_tokens!r} tokens, got {held}")
            if self.cache.residual_length or self.cache.first_tokens:
                self.cache.unpack(fresh)  # what it shares is read packed
            self.windows.adopt(self.places, pages, num_tokens)
        except Exception:
            self.windows.restore(self.places, self.num_tokens)
            with suppress(KvCacheError):  # `share` may have failed before it created the sequence
                self.cache.free(fresh)
            raise
        self._become(fresh, num_tokens)

    def extend(self, tokens: NDArray[np.uint32], pos: int, logits: Logits = "last") -> Float32:
        self.windows.expect(self.places, pos)
        if pos < self.num_tokens:
            self._make_room(pos, len(tokens))
        with self._cut(pos, pos + len(tokens)) as seq_id:
            if len(tokens) > self.chunk:
                # Find out now whether all tokens fit, rather than after most of the work.
                self._expect_free(self._blocks_behind(seq_id, pos, len(tokens)))
            rows = self._run_in_chunks(seq_id, tokens, pos, logits)
        return rows

    def _run(self, seq_id: int, tokens: NDArray[np.uint32], pos: int, logits: Logits) -> Float32:
        cache, count = self.cache, len(tokens)
        self._append(seq_id, count)
        self.windows.extend(self.places, pos, count)
        seq_ids, query_lens = np.array([seq_id], np.uint64), np.array([count])  # made once, not in every layer
        windowed = self.windows.piece(count)

        def attend(
            layer: int, queries: Float32, keys: Float32, values: Float32, sink_queries: Float32 | None = None, /
        ) -> Float32:
            if layer in windowed:
                return windowed[layer](layer, queries, keys, values)
            own, options = self._options[layer]
            cache.write(own, seq_id, keys, values)
            mixed: Float32 = cache.attention(own, queries, seq_ids, query_lens=query_lens, **options)
            return mixed

        rows = self._forward(tokens, pos, attend, logits)
        if (length := cache.residual_length) and pos // length < (pos + count - 1) // length:
            cache.pack(seq_id, (pos + count - 1) // length * length)  # only the last group stays unpacked
        return rows

    def positions(self, layer: int) -> NDArray[np.int64]:
        return np.arange(self.windows.first(self.places, layer), self.num_tokens)

    def _make_room(self, pos: int, count: int) -> None:
        """Make sure that `count` tokens fit from `pos` on; drop the old tokens from `pos` on if only that makes room.

        Raises:
            OutOfMemoryError: they do not fit even then; the sequence is unchanged.
        """
        size = self.cache.block_size
        try:
            return self._expect_free(-(-(pos + count) // size) - pos // size)  # a block that is cut is copied
        except OutOfMemoryError:
            if not self._fits_in_place(pos, count):
                raise
        self.cache.truncate(self.seq_id, pos)
        self.windows.begin(self.places, self.num_tokens, pos)
        self._become(self.seq_id, pos)

    def _fits_in_place(self, pos: int, count: int) -> bool:
        """Whether there are blocks for `count` tokens from `pos` on once the old ones there are dropped."""
        kept = -(-pos // self.cache.block_size)
        holders = self.cache.reference_counts(self.cache.block_table([self.seq_id]).block_ids)
        available = self.cache.free_block_count + int((holders[kept:] == 1).sum())
        return self._blocks_behind(self.seq_id, pos, count) <= available

    def _blocks_behind(self, seq_id: int, pos: int, count: int) -> int:
        """The blocks that `count` tokens behind the first `pos` of a sequence take, with the copy of a shared one."""
        size = self.cache.block_size
        kept = -(-pos // size)
        last = self.cache.block_table([seq_id]).block_ids[kept - 1 : kept] if pos % size else ()
        return -(-(pos + count) // size) - kept + int((self.cache.reference_counts(last) > 1).sum())

    def _fits_beside(self, pos: int, end: int) -> bool:
        """Whether there are blocks for the tokens up to `end` of a fork that is cut to `pos`."""
        size = self.cache.block_size
        return -(-end // size) - pos // size <= self.cache.free_block_count

    def _drops(self, pos: int, end: int) -> bool:
        """Whether unpacked tokens before `pos` leave while the tokens up to `end` run: one group or piece ends."""
        length = self.cache.residual_length
        return length > 0 and (pos % length == 0 or pos // self.chunk < (end - 1) // self.chunk)

    @contextmanager
    def _cut(self, pos: int, end: int) -> Iterator[int]:
        """Yield the id of a sequence of `pos` tokens to extend to `end`; a failure leaves this sequence unchanged.

        If `pos` is the end, it is this sequence, which a failure truncates to `pos`. Otherwise, and where unpacked
        tokens would be missing then, it is a fork, cut to `pos` and sharing the blocks, which replaces this sequence
        on success. Where there is no block for a fork, a failure leaves those tokens packed.
        """
        if pos == self.num_tokens and not (self._drops(pos, end) and self._fits_beside(pos, end)):
            try:
                self.windows.begin(self.places, pos, pos)
                yield self.seq_id
            except Exception:
                self.cache.truncate(self.seq_id, pos)
                self.windows.restore(self.places, pos)
                raise
            self._become(self.seq_id, end)
            return
        fork = 1 - self.seq_id
        self.cache.fork(self.seq_id, fork)
        try:
            self.cache.truncate(fork, pos)
            self.windows.begin(self.places, self.num_tokens, pos)
            yield fork
        except Exception:
            self.cache.free(fork)
            self.windows.restore(self.places, self.num_tokens)
            raise
        self._become(fork, end)

    def _become(self, seq_id: int, num_tokens: int) -> None:
        old = self._seq_id
        self.version += 1
        # In one step, for `mend`.
        self.__dict__.update(_seq_id=seq_id, num_tokens=num_tokens, places=self.windows.working)
        if old != seq_id:
            self.cache.free(old)
        self.windows.restore(self.places, num_tokens)


def _allocate_empty(cache: PagedKvCache, seq_id: int) -> int:
    cache.allocate(seq_id, 0)
    return 0
