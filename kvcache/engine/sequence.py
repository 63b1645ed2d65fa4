"""One sequence in a cache, extended by running tokens through a network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

import numpy as np
from numpy.typing import NDArray

from kvcache.engine.protocols import Attend, Float32, Logits, Model
from kvcache.engine.residual import Residual
from kvcache.errors import KvCacheError, OutOfMemoryError
from kvcache.paged.cache import PagedKvCache

__all__ = ["LiveSequence", "ModelSequence", "Share"]

Share = Callable[[PagedKvCache, int], int]


class ModelSequence(ABC):
    """The sequence that an engine works on: what it does whether or not its cache evicts tokens.

    Args:
        model: the network.
        cache: where keys and values go.
        chunk: tokens run through the network in pieces of so many.

    Attributes:
        num_tokens: how many tokens the text has; the next one stands at this position.
        version: grows with every change, so that an iterator can notice those of others.
        reclaim: see `InferenceEngine`.
        residual: its newest tokens in full, where it keeps some so.
    """

    def __init__(self, model: Model, cache: PagedKvCache, chunk: int) -> None:
        self.model = model
        self.cache = cache
        self.chunk = chunk
        self.num_tokens = 0
        self.version = 0
        self.reclaim: Callable[[OutOfMemoryError], bool] | None = None
        self.residual: Residual | None = None

    @property
    @abstractmethod
    def seq_id(self) -> int:
        """Its id in the cache. Raises InvalidOperationError where every layer has a sequence of its own."""

    @abstractmethod
    def check(self) -> None:
        """Verify that the cache holds this sequence and no leftover; AssertionError says what is wrong."""

    @abstractmethod
    def mend(self) -> None:
        """After an interrupt between any two lines: be what the last call that was finished has left, and no more."""

    @abstractmethod
    def clear(self) -> None:
        """Become an empty sequence. Cannot fail for want of memory: an empty one needs no block."""

    @abstractmethod
    def move(self, cache: PagedKvCache) -> None:
        """Become an empty sequence in another cache."""

    @abstractmethod
    def replace(self, share: Share) -> None:
        """Become the sequence that `share(cache, id)` makes, which returns how many tokens it holds.

        The old one is freed afterwards. Raises what `share` raises, and ValueError where its answer is wrong.
        """

    @abstractmethod
    def extend(self, tokens: NDArray[np.uint32], pos: int, logits: Logits = "last") -> Float32:
        """Run tokens at positions `pos`, `pos + 1`, ...; what stood there is cut off first.

        Args:
            tokens: at least one.
            pos: at most `num_tokens`.
            logits: "last", or "all" for at most `chunk` tokens.

        Returns:
            float32 `(1 or len(tokens), vocab_size)`.
        """

    @abstractmethod
    def positions(self, layer: int) -> NDArray[np.int64]:
        """The positions of the tokens whose K and V this layer has, ascending, `(n,)`."""

    def _run_in_chunks(self, seq_id: int, tokens: NDArray[np.uint32], pos: int, logits: Logits) -> Float32:
        # Pieces end at multiples of `chunk`, wherever the text is taken up: behind a cached prefix they are those of a
        # cold run.
        first, end = pos, pos + len(tokens)
        while logits != "all" and (stop := first + self.chunk - first % self.chunk) < end:
            self._run(seq_id, tokens[first - pos : stop - pos], first, "none")
            first = stop
        return self._run(seq_id, tokens[first - pos :], first, logits)

    @abstractmethod
    def _run(self, seq_id: int, tokens: NDArray[np.uint32], pos: int, logits: Logits) -> Float32:
        """Append tokens to a sequence that holds `pos` of them and run them through the network."""

    def _forward(
        self, tokens: NDArray[np.uint32], pos: int, attend: Attend, logits: Logits, **places: NDArray[np.int64]
    ) -> Float32:
        """`places` go to a network that knows more of them than where tokens stand (`StreamingModel`)."""
        count = len(tokens)
        rows = self.model.forward(tokens, np.arange(pos, pos + count), attend, logits, **places)
        expected = ({"last": 1, "all": count, "none": 0}[logits], self.model.config.vocab_size)
        if rows.shape != expected:
            raise ValueError(f"model.forward: expected logits of shape {expected}, got {rows.shape}")
        return rows

    def _append(self, seq_id: int, count: int) -> None:
        while True:
            try:
                self.cache.append(seq_id, count)
                return
            except OutOfMemoryError as error:
                if self.reclaim is None or not self.reclaim(error):
                    raise


class LiveSequence(ModelSequence):
    """A sequence of which every token stays. Every failing call leaves it, and the cache, as they were.

    Of the cache the sequences 0 and 1 are taken: one is alive, the other id is free for the one that takes its
    place. Arguments and attributes are those of `ModelSequence`, and:

    Args:
        residual_length: tokens per group of the `Residual`; 0: every token is seen as the cache keeps it.
    """

    def __init__(self, model: Model, cache: PagedKvCache, chunk: int, residual_length: int = 0) -> None:
        super().__init__(model, cache, chunk)
        self._seq_id = 0
        if residual_length:  # no piece is longer than a text
            most = min(chunk, model.config.max_position_embeddings)
            self.residual = Residual(model.config, cache, residual_length, most)
        cache.allocate(0, 0)

    @property
    def seq_id(self) -> int:
        """0 or 1, changing when the sequence is replaced."""
        return self._seq_id

    def check(self) -> None:
        held = self.cache.get_sequence(self.seq_id)
        assert held is not None, f"sequence {self.seq_id} is gone from the cache"
        assert held.num_tokens == self.num_tokens, (
            f"expected {self.num_tokens} tokens in the cache, got {held.num_tokens}"
        )
        assert self.cache.get_sequence(1 - self.seq_id) is None, "a replaced sequence was not freed"
        if self.residual is not None:
            self.residual.check()
            assert self.residual.stop == self.num_tokens, f"the residual ends at {self.residual.stop}"

    def mend(self) -> None:
        # What `seq_id` and `num_tokens` say is true: they change in one line, when all that can fail is done.
        if self.cache.get_sequence(1 - self.seq_id) is not None:
            self.cache.free(1 - self.seq_id)
        held = self.cache.get_sequence(self.seq_id)
        if held is not None and held.num_tokens > self.num_tokens:
            self.cache.truncate(self.seq_id, self.num_tokens)
        if self.residual is not None:
            self.residual.mend(self.num_tokens)

    def clear(self) -> None:
        self.replace(_allocate_empty)

    def move(self, cache: PagedKvCache) -> None:
        cache.allocate(self.seq_id, 0)
        self.cache, self.num_tokens = cache, 0
        self.version += 1
        self._restart_residual()

    def replace(self, share: Share) -> None:
        fresh = 1 - self.seq_id
        try:
            num_tokens = share(self.cache, fresh)
            made = self.cache.get_sequence(fresh)
            if made is None or made.num_tokens != num_tokens:
                held = "no sequence" if made is None else f"{made.num_tokens} tokens"
                raise ValueError(f"share: expected sequence {fresh} of {num_tokens!r} tokens, got {held}")
        except Exception:
            with suppress(KvCacheError):  # it may not have come as far as creating it
                self.cache.free(fresh)
            raise
        self._become(fresh, num_tokens)
        self._restart_residual()

    def extend(self, tokens: NDArray[np.uint32], pos: int, logits: Logits = "last") -> Float32:
        if pos < self.num_tokens:
            self._make_room(pos, len(tokens))
        changing = nullcontext() if self.residual is None else self.residual.changing(pos)
        with self._cut(pos, pos + len(tokens)) as seq_id, changing:
            if len(tokens) > self.chunk:
                # Is there memory for all of them? Better known now than after most of the work.
                self._append(seq_id, len(tokens))
                self.cache.truncate(seq_id, pos)
            rows = self._run_in_chunks(seq_id, tokens, pos, logits)
        return rows

    def _run(self, seq_id: int, tokens: NDArray[np.uint32], pos: int, logits: Logits) -> Float32:
        cache, count = self.cache, len(tokens)
        self._append(seq_id, count)
        if self.residual is not None:
            with self.residual.piece(cache, seq_id, pos, count) as attend_piece:

                def attend_both(
                    layer: int, queries: Float32, keys: Float32, values: Float32, _: Float32 | None = None, /
                ) -> Float32:
                    cache.write(layer, seq_id, keys, values)
                    return attend_piece(layer, queries, keys, values)

                return self._forward(tokens, pos, attend_both, logits)
        seq_ids, query_lens = np.array([seq_id], np.uint64), np.array([count])  # once, not once per layer

        def attend(
            layer: int, queries: Float32, keys: Float32, values: Float32, sink_queries: Float32 | None = None, /
        ) -> Float32:
            cache.write(layer, seq_id, keys, values)
            mixed: Float32 = cache.attention(layer, queries, seq_ids, query_lens=query_lens)
            return mixed

        return self._forward(tokens, pos, attend, logits)

    def positions(self, layer: int) -> NDArray[np.int64]:
        return np.arange(self.num_tokens)

    def _make_room(self, pos: int, count: int) -> None:
        """Where `count` tokens from `pos` on do not fit beside what stands there, give that up if they fit then.

        Raises:
            OutOfMemoryError: they do not; the sequence is as it was.
        """
        fork = 1 - self.seq_id
        self.cache.fork(self.seq_id, fork)
        try:
            try:
                self.cache.truncate(fork, pos)
                self._append(fork, count)
                return
            finally:
                self.cache.free(fork)
        except OutOfMemoryError:
            if not self._fits_in_place(pos, count):
                raise
        self.cache.truncate(self.seq_id, pos)
        self.num_tokens = pos
        self.version += 1
        if self.residual is not None:
            with self.residual.changing(pos):
                pass

    def _fits_in_place(self, pos: int, count: int) -> bool:
        """Whether there are blocks for `count` tokens from `pos` on once what stands there is given up."""
        size = self.cache.block_size
        kept = -(-pos // size)
        holders = self.cache.reference_counts(self.cache.block_table([self.seq_id]).block_ids)
        copied = pos % size > 0 and holders[kept - 1] > 1
        available = self.cache.free_block_count + int((holders[kept:] == 1).sum())
        return -(-(pos + count) // size) - kept + copied <= available

    @contextmanager
    def _cut(self, pos: int, end: int) -> Iterator[int]:
        """The id of a sequence of `pos` tokens to extend to `end`; if that fails, this sequence is untouched.

        At the end of the sequence that is the sequence itself, cut back on failure. Before the end it is a
        fork (which shares the blocks), cut to `pos`, that takes the sequence's place on success.
        """
        if pos == self.num_tokens:
            try:
                yield self.seq_id
            except Exception:
                self.cache.truncate(self.seq_id, pos)
                raise
            self.version += 1
            self.num_tokens = end
            return
        fork = 1 - self.seq_id
        self.cache.fork(self.seq_id, fork)
        try:
            self.cache.truncate(fork, pos)
            yield fork
        except Exception:
            self.cache.free(fork)
            raise
        self._become(fork, end)

    def _restart_residual(self) -> None:
        if self.residual is not None:
            self.residual.restart(self.num_tokens)

    def _become(self, seq_id: int, num_tokens: int) -> None:
        self.version += 1
        self._seq_id, self.num_tokens = seq_id, num_tokens
        self.cache.free(1 - seq_id)


def _allocate_empty(cache: PagedKvCache, seq_id: int) -> int:
    cache.allocate(seq_id, 0)
    return 0
