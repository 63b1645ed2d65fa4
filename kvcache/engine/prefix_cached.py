"""`PrefixCachedEngine`: an engine that keeps the KV of what it has seen, and prefills only what is new."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.blocks import CacheSession, PrefixAwarePrefill, PrefixCache, PrefixCacheStats
from kvcache.engine.engine import InferenceEngine
from kvcache.engine.protocols import Float32
from kvcache.engine.sampling import SamplingParams

__all__ = ["PrefixCachedEngine"]

logger = logging.getLogger("kvcache")


class PrefixCachedEngine:
    """An `InferenceEngine` with a prefix cache in front.

    Each request resets the sequence, looks up the longest cached prefix, shares its blocks (a block that the
    prompt leaves half way is shared too, and copied by the first write), prefills the rest, puts the new full
    blocks of prompt and answer into the trie, and releases what it pinned.

    Args:
        engine: to wrap; its cache is replaced by one with `max_cache_blocks` more blocks.
        max_cache_blocks: most blocks that the prefix cache keeps, a hard limit.
        seed: replaces the engine's seed for requests that bring none.
        strict: re-raise internal failures of `generate` instead of logging them.

    Raises:
        TypeError, ValueError: not an engine; a negative number of blocks.
        OutOfMemoryError: the system refuses the memory.

    Attributes:
        inner: the engine.
        prefix_cache: the trie of blocks, a `PrefixAwarePrefill`.
        strict: see above.
    """

    BLOCK_SIZE = 16

    def __init__(
        self, engine: InferenceEngine, max_cache_blocks: int, *, seed: int | None = None, strict: bool = False
    ) -> None:
        if not isinstance(engine, InferenceEngine):
            raise TypeError(f"engine: expected an InferenceEngine, got {type(engine).__name__}")
        if isinstance(max_cache_blocks, bool) or not isinstance(max_cache_blocks, (int, np.integer)):
            raise TypeError(f"max_cache_blocks: expected an int, got {type(max_cache_blocks).__name__}")
        if max_cache_blocks < 0:
            raise ValueError(f"max_cache_blocks: expected at least 0, got {max_cache_blocks}")
        engine.enlarge(max_cache_blocks)
        if seed is not None:
            engine.reseed(seed)
        self.inner = engine
        self.prefix_cache = PrefixAwarePrefill(PrefixCache.over(engine.cache, max_cache_blocks))
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
            TypeError, ValueError: the caller's mistakes: tokens, parameters, length. Any other failure is
                logged as a warning with its traceback and gives `[]`; with `strict` it is raised.
        """
        stream = self.stream(prompt_tokens, params, namespace=namespace)
        try:
            return list(stream)
        except Exception:
            if self.strict:
                raise
            logger.warning("generate failed and returns no tokens", exc_info=True)
            return []

    def stream(
        self, prompt_tokens: Any, params: SamplingParams | None = None, *, namespace: Hashable = None
    ) -> Iterator[int]:
        """`generate`, token by token; arguments are checked now, and failures raise always."""
        tokens, params, rng = self.inner.request(prompt_tokens, params, allow_empty=True)
        return self._stream(tokens, params, rng, namespace) if len(tokens) else iter(())

    def cache_stats(self) -> PrefixCacheStats:
        """A snapshot of the prefix cache's counters."""
        return self.prefix_cache.stats()

    def clear_cache(self) -> None:
        """Forget every cached block; counters and the engine's own sequence stay."""
        self.prefix_cache.cache.clear()

    def check(self) -> None:
        """Verify the invariants of the engine and of the prefix cache; AssertionError names the broken one."""
        self.inner.check()
        self.prefix_cache.cache.check()

    def _stream(
        self,
        tokens: NDArray[np.uint32],
        params: SamplingParams,
        rng: np.random.Generator,
        namespace: Hashable,
    ) -> Iterator[int]:
        engine = self.inner
        text = tokens.tolist()
        with self.prefix_cache.prepare(tokens, namespace)[0] as session:
            try:
                logits, version = self._prefill(tokens, session, namespace)
                for token in engine.continue_from(logits, params, rng, tokens):
                    text.append(token)
                    yield token
                    version = engine.version
            finally:
                # What was computed is good, however the stream ended, as long as nobody else has the engine.
                if engine.version == version:
                    self._store(text, namespace)
