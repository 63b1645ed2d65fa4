"""`PrefixCachedEngine`: an engine that keeps the KV of what it has seen, and prefills only what is new."""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.core.arguments import as_count, as_instance
from kvcache.engine.engine import InferenceEngine
from kvcache.engine.fingerprint import fingerprint
from kvcache.engine.newest import NewestGroups
from kvcache.engine.protocols import Float32
from kvcache.engine.sampling import SamplingParams
from kvcache.engine.tokens import as_tokens
from kvcache.engine.turns import Turn
from kvcache.errors import InvalidOperationError
from kvcache.paged.cache import PagedKvCache
from kvcache.prefix.blocks import PrefixCache
from kvcache.prefix.prefill import PrefixAwarePrefill
from kvcache.prefix.sessions import CacheSession, PrefixCacheStats

__all__ = ["PrefixCachedEngine"]

logger = logging.getLogger("kvcache")

Tokens = NDArray[np.uint32]


class PrefixCachedEngine:
    """An `InferenceEngine` with a prefix cache in front.

    Each request resets the sequence, looks up the longest cached prefix, shares its blocks (a block that the
    prompt leaves half way is shared too, and copied by the first write), prefills the rest, puts the new full
    blocks of prompt and answer into the trie, and releases what it pinned.

    Over an engine with a residual the groups in which texts end or part are also kept in full, so that what runs is
    what is new (`newest.NewestGroups`).

    Args:
        engine: to wrap; its cache is replaced by one with `max_cache_blocks` more blocks.
        max_cache_blocks: most blocks that the prefix cache keeps, a hard limit. Groups in full come on top: a token for
            every 32, or two groups where that is more.
        seed: replaces the engine's seed for requests that bring none.
        strict: re-raise internal failures of `generate` instead of logging them.

    Raises:
        TypeError, ValueError: not an engine, or one that evicts tokens; a negative number of blocks.
        OutOfMemoryError: the system refuses the memory.

    Attributes:
        inner: the engine.
        prefix_cache: the trie of blocks, a `PrefixAwarePrefill`.
        newest: groups of tokens in full; None: the engine has no residual.
        strict: see above.
    """

    BLOCK_SIZE = 16

    def __init__(
        self, engine: InferenceEngine, max_cache_blocks: int, *, seed: int | None = None, strict: bool = False
    ) -> None:
        as_instance(engine, InferenceEngine, "engine")
        max_cache_blocks = as_count(max_cache_blocks, "max_cache_blocks", most=None)
        if engine.eviction_policy is not None:  # a prefix with holes cannot be shared
            raise ValueError(f"engine: expected one without eviction_policy, got {engine.eviction_policy}")
        engine.enlarge(max_cache_blocks)
        if seed is not None:
            engine.reseed(seed)
        self.inner = engine
        self.prefix_cache = PrefixAwarePrefill(PrefixCache.over(engine.cache, max_cache_blocks))
        residual = engine._sequence.residual
        self.newest: NewestGroups | None = None
        if residual is not None and residual.length > 1 and max_cache_blocks:
            self.newest = NewestGroups(residual, engine.cache.block_size, max_cache_blocks)
        self.strict = strict

    def generate(
        self, prompt_tokens: Any, params: SamplingParams | None = None, *, namespace: Hashable = None
    ) -> list[int]:
        """Continue a prompt; the new tokens only, `[]` for an empty prompt.

        Args:
            prompt_tokens: token ids.
            params: how to sample; by default the engine's `sampling_params`.
            namespace: requests share blocks only within one namespace (a tenant, an adapter).

        Raises:
            TypeError, ValueError: the caller's mistakes: tokens, parameters, length.
            InvalidOperationError: a stream of this thread is open. Any other failure is logged as a warning with its
                traceback and gives `[]`; with `strict` it is raised.
        """
        tokens, request = self._checked(prompt_tokens, params, namespace)
        if not len(tokens):
            return []
        turn = self.inner._requests.turns.take(self.inner.version)
        try:
            return list(self._stream(turn, tokens, *request, namespace, whole=True))
        except Exception:
            if self.strict:
                raise
            logger.warning("generate failed and returns no tokens", exc_info=True)
            return []
        finally:
            turn.give_back()

    def stream(
        self, prompt_tokens: Any, params: SamplingParams | None = None, *, namespace: Hashable = None
    ) -> Iterator[int]:
        """`generate`, token by token; arguments are checked now, and failures raise always.

        The stream has the engine until it ends or is closed or dropped, as that of `InferenceEngine.stream`. What it
        has computed by then is cached.
        """
        tokens, request = self._checked(prompt_tokens, params, namespace)
        return self._stream_in_turn(tokens, *request, namespace) if len(tokens) else iter(())

    def _checked(
        self, prompt_tokens: Any, params: SamplingParams | None, namespace: Hashable
    ) -> tuple[Tokens, tuple[SamplingParams, np.random.Generator]]:
        hash(namespace)  # a TypeError now rather than in the middle
        tokens = as_tokens(prompt_tokens, self.inner.config.vocab_size)
        if len(tokens):
            self.inner._requests.check_span(tokens, 0)
        return tokens, self.inner._request(params)

    def cache_stats(self) -> PrefixCacheStats:
        """A snapshot of the prefix cache's counters."""
        return self.prefix_cache.stats()

    def clear_cache(self) -> None:
        """Forget every cached block; counters and the engine's own sequence stay."""
        self.prefix_cache.cache.clear()
        if self.newest is not None:
            self.newest.cache.clear()

    def save(self, path: str | os.PathLike[str], model: str | None = None) -> None:
        """Write the prefix cache to a file, for `load` of an engine over the same model; see `PrefixCache.save`.

        Args:
            model: the model's name; by default its `fingerprint`.

        Raises:
            TypeError: a namespace that cannot be saved, or a model without a fingerprint, which needs a name.
            OSError: of the file system; the old file stays.
        """
        self.prefix_cache.cache.save(path, self._name(model), beside=self._beside())

    def load(self, path: str | os.PathLike[str], model: str | None = None) -> int:
        """Take in what `save` wrote; how many blocks. Their K and V are read when a prompt first matches them.

        Args:
            model: as in `save`.

        Raises:
            as `PrefixCache.load`: SnapshotError for the file of another model, and for one that is damaged.
        """
        if self.newest is not None and self.prefix_cache.cache.is_empty:
            self.newest.cache.clear()  # groups of texts that are not cached
        return self.prefix_cache.cache.load(path, self._name(model), beside=self._beside())

    def _beside(self) -> list[PrefixCache]:
        """What is saved in one file with the prefix cache."""
        return [] if self.newest is None else [self.newest.cache]

    def _name(self, model: str | None) -> str:
        return fingerprint(self.inner.model) if model is None else model

    def check(self) -> None:
        """Verify the invariants of the engine and of the prefix cache; AssertionError names the broken one."""
        self.inner.check()
        self.prefix_cache.cache.check()
        if self.newest is not None:
            self.newest.check()

    def _stream_in_turn(
        self, tokens: Tokens, params: SamplingParams, rng: np.random.Generator, namespace: Hashable
    ) -> Iterator[int]:
        turn = self.inner._requests.turns.take(self.inner.version)
        try:
            yield from self._stream(turn, tokens, params, rng, namespace, whole=False)
        finally:
            turn.give_back()

    def _stream(
        self, turn: Turn, tokens: Tokens, params: SamplingParams, rng: np.random.Generator, namespace: Hashable, *,
        whole: bool,
    ) -> Iterator[int]:  # fmt: skip
        """A request that has its turn; one that is `whole` leaves an empty sequence if it fails."""
        engine, requests, text = self.inner, self.inner._requests, tokens.tolist()
        with self.prefix_cache.prepare(tokens, namespace)[0] as session:
            try:
                with requests.lock:
                    logits = self._prefill(tokens, session, namespace)
                    turn.leave(engine.version)
                    self._store(text, namespace)
                yield from requests.decode(logits, params, rng, tokens, turn, text)
            except BaseException:
                if whole:
                    requests.lock.when_free(engine._sequence.clear)
                raise
            finally:
                # What was computed is good however the stream ended.
                requests.lock.hand_over(partial(self._store_if_unchanged, turn, text, namespace))

    def _store_if_unchanged(self, turn: Turn, text: list[int], namespace: Hashable) -> None:
        if self.inner.version == turn.version:
            with suppress(InvalidOperationError):  # inside a call of the cache, where a stream was dropped: no reuse
                self._store(text, namespace)

    def _prefill(self, tokens: Tokens, session: CacheSession, namespace: Hashable) -> Float32:
        """Start the sequence on the cached blocks and run the rest; the logits after the prompt."""
        engine = self.inner
        # The last token always runs: its logits are not cached.
        start = min(session.num_tokens, len(tokens) - 1)
        count = 0
        rows: list[tuple[Float32, Float32]] = []
        if begun := start % (engine.residual_length or 1):
            # Each token sees the same tokens in full as it would without the cache: those of its own group, which
            # goes on where it is kept in full, and runs again where it is not.
            if self.newest is not None:
                count, rows = self.newest.recall(tokens[:start], namespace)
            start += count - begun
        blocks = session.shared_blocks[: -(-start // engine.cache.block_size)]

        def share(cache: PagedKvCache, seq_id: int) -> int:
            cache.adopt(seq_id, blocks, start)
            return start

        engine._sequence.clear()
        engine._sequence.replace(share)
        if engine._sequence.residual is not None and count:
            engine._sequence.residual.resume(rows)
        if self.newest is not None and count < begun and (end := start - count + engine.residual_length) < len(tokens):
            # Texts part here, as those of one system prompt do: the next one goes on from what is kept of the group.
            engine._requests.prefill(tokens[start:end], start)
            self.newest.keep(tokens[:end], namespace)
            start = end
        if session.num_tokens == len(tokens) == start + 1:
            return engine._requests.extend(tokens[-1:], start)
        return engine._requests.prefill(tokens[start:], start)

    def _store(self, text: list[int], namespace: Hashable) -> None:
        """Give the trie the full blocks of what is in the sequence, by reference."""
        engine, cache = self.inner, self.prefix_cache.cache
        tokens = np.array(text[: engine.num_tokens], np.uint32)
        full = len(tokens) // cache.block_size
        blocks = engine.cache.block_table([engine.seq_id]).block_ids
        cached = cache.adopt(tokens, blocks[:full], namespace)
        if self.newest is not None and cached == full:
            self.newest.keep(tokens, namespace)
