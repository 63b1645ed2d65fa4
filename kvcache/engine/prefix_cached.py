"""`PrefixCachedEngine`: an engine with a prefix cache, which prefills only the tokens that are not cached."""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.core.arguments import as_instance
from kvcache.core.copying import refuse_copies
from kvcache.core.memory import total
from kvcache.engine.cache_options import num_cache_blocks
from kvcache.engine.cached_windows import CachedWindows
from kvcache.engine.chat import Answer
from kvcache.engine.completion import Completion, Request
from kvcache.engine.engine import InferenceEngine
from kvcache.engine.newest import NewestGroups
from kvcache.engine.sampling import SamplingParams
from kvcache.engine.sequence import LiveSequence
from kvcache.engine.tiered import Tiered, as_tiers
from kvcache.engine.turns import Turn
from kvcache.errors import InvalidOperationError
from kvcache.networks.fingerprint import fingerprint
from kvcache.networks.protocols import Float32
from kvcache.paged.cache import PagedKvCache
from kvcache.prefix.blocks import PrefixCache
from kvcache.prefix.prefill import PrefixAwarePrefill
from kvcache.prefix.sessions import CacheSession, PrefixCacheStats
from kvcache.tiers.directory import DirectoryTier
from kvcache.tiers.tiers import Tiers

__all__ = ["PrefixCachedEngine"]

logger = logging.getLogger("kvcache")

Tokens = NDArray[np.uint32]


class PrefixCachedEngine:
    """An `InferenceEngine` with a prefix cache in front.

    Each request resets the sequence, looks up the longest cached prefix, shares its blocks, prefills the rest, inserts
    the new full blocks of prompt and answer into the trie, and unpins the shared blocks. A block that matches in part
    is shared too; the first write copies it.

    If the engine has a residual, unpacked copies of the groups in which texts end or diverge are kept too, so that a
    request runs only its new tokens (`newest.NewestGroups`).

    Args:
        engine: the engine to wrap; its cache is replaced by one with `max_cache_blocks` more blocks. Once it is
            replaced again, by `enlarge` or by another wrapper, the calls of this one raise.
        max_cache_blocks: maximum number of blocks of the prefix cache; may be left out if `max_memory_bytes` is given.
            The unpacked groups take more memory: one token for every 32, or two groups if that is more.
            The pages of windows do too: a quarter as many for each window, or two windows if that is more.
        max_memory_bytes: the most bytes of all K and V, those of the engine and the unpacked groups included: an int or
            a text such as "4GiB". With `max_cache_blocks` the lower limit counts.
        seed: replaces the engine's seed, for requests without their own.
        strict: re-raise internal failures of `generate` instead of logging them.
        tiers: where blocks go beyond this process, and come from, while prompts run: a directory, Redis; see `Tiers`.
        autosave: a directory, or a `DirectoryTier`, in which everything that is computed is kept, so that a later
            process over the same model finds it; a path is bounded to 8 GiB. `close` writes what is left.

    Raises:
        TypeError, ValueError: not an engine, or one that evicts tokens; a negative number of blocks; too few bytes for
            the engine's own K and V and one block.
        OutOfMemoryError: the system refuses the memory.

    Attributes:
        inner: the engine.
        prefix_cache: the trie of blocks, a `PrefixAwarePrefill`.
        windows: the cached windows of layers that keep a window alone, `CachedWindows`.
        newest: the unpacked groups; None: the engine has no residual.
        tiers: see above, those of `autosave` too; None: there are none.
        strict: see above.
    """

    BLOCK_SIZE = 16

    def __init__(
        self,
        engine: InferenceEngine,
        max_cache_blocks: int | None = None,
        *,
        seed: int | None = None,
        strict: bool = False,
        max_memory_bytes: int | str | None = None,
        tiers: Tiers | None = None,
        autosave: str | os.PathLike[str] | DirectoryTier | None = None,
    ) -> None:
        as_instance(engine, InferenceEngine, "engine")
        if engine.eviction_policy is not None:  # a prefix with holes cannot be shared
            raise ValueError(f"engine: expected one without eviction_policy, got {engine.eviction_policy}")
        sequence = engine._sequence
        assert isinstance(sequence, LiveSequence)
        self._sequence = sequence
        self.tiers = as_tiers(tiers, autosave)
        max_cache_blocks = num_cache_blocks(sequence, max_cache_blocks, max_memory_bytes)
        engine.enlarge(max_cache_blocks)
        if seed is not None:
            engine.reseed(seed)
        self.inner, self._cache = engine, engine.cache
        self.prefix_cache = PrefixAwarePrefill(PrefixCache.over(engine.cache, max_cache_blocks))
        self.windows = CachedWindows(sequence.windows.groups, max_cache_blocks)
        pays = NewestGroups.pay(engine.cache, max_cache_blocks)
        self.newest = NewestGroups(engine.cache, max_cache_blocks) if pays else None
        self._tiered: Tiered | None = None
        if self.tiers is not None:
            self._tiered = Tiered(self.tiers, engine, sequence, self.prefix_cache.cache, self.windows)
        self.strict = strict

    def close(self, timeout: float = 5.0) -> bool:
        """Write what waits for the tiers, for so many seconds at most, and go on without them; whether all was written.

        Without tiers it does nothing.
        """
        return self.tiers is None or self.tiers.close(timeout)

    def __enter__(self) -> PrefixCachedEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def generate(
        self, prompt_tokens: Any, params: SamplingParams | None = None, *, namespace: Hashable = None
    ) -> list[int]:
        """Continue a prompt and return the new tokens; `[]` for an empty prompt.

        Any failure that is not listed below is logged as a warning with its traceback, and the result is `[]`; with
        `strict` it is raised.

        Args:
            prompt_tokens: token ids; or a text, if the engine has a tokenizer.
            params: how to sample; by default the engine's `sampling_params`.
            namespace: requests share blocks only within one namespace (a tenant, an adapter).

        Raises:
            TypeError, ValueError: invalid tokens, parameters or length.
            InvalidOperationError: this thread has an open stream of this engine; the engine's cache was replaced.
        """
        request = self._checked(prompt_tokens, params, namespace)
        if not len(request.tokens):
            return []
        turn = self.inner._requests.turns.take(self.inner.version)
        try:
            return list(self._stream(turn, request, namespace, whole=True))
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
        """Do what `generate` does, token by token; arguments are checked now, and every failure is raised.

        The stream has exclusive use of the engine, as with `InferenceEngine.stream`. When it ends, or is closed or
        dropped, the tokens computed so far are cached.
        """
        request = self._checked(prompt_tokens, params, namespace)
        return self._stream_in_turn(request, namespace, whole=False) if len(request.tokens) else iter(())

    def complete(self, prompt: Any, params: SamplingParams | None = None, *, namespace: Hashable = None) -> Completion:
        """Do what `InferenceEngine.complete` does, with the prefix cache; every failure is raised.

        Args:
            prompt, params, namespace: as of `generate`, but the prompt has at least one token.
        """
        request = self._checked(prompt, params, namespace, with_text=True)
        return request.complete(self._stream_in_turn(request, namespace, whole=True))

    def apply_chat_template(
        self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = True, tokenize: bool = False
    ) -> str | list[int]:
        """See `InferenceEngine.apply_chat_template`."""
        return self.inner.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=tokenize
        )

    def chat(
        self, messages: Any, params: SamplingParams | None = None, *, tools: Any = None, namespace: Hashable = None
    ) -> Answer:
        """Do what `InferenceEngine.chat` does, with the prefix cache: only what is new in the conversation runs.

        A template may write earlier messages in another way than before: what is reused goes by tokens.
        """
        prompt = self.inner._chat_prompt(messages, tools)
        request = self._checked(prompt, params, namespace, with_text=True)
        return Answer(request, self._stream_in_turn(request, namespace, whole=False))

    def _checked(
        self, prompt: Any, params: SamplingParams | None, namespace: Hashable, *, with_text: bool = False
    ) -> Request:
        """A new request; its prompt may be empty."""
        self._check_cache()
        hash(namespace)  # raises TypeError here rather than in the middle of the request
        return self.inner._request(prompt, params, with_text=with_text, or_empty=not with_text)

    def _check_cache(self) -> None:
        """InvalidOperationError, once the blocks that are cached are not those of the engine any more."""
        if self.inner.cache is not self._cache:
            raise InvalidOperationError("engine: expected the cache that it got here, got another one since then")

    def cache_stats(self) -> PrefixCacheStats:
        """A snapshot of the prefix cache's counters.

        For a network with windows, `miss_reasons` also counts "window": a prefix was cached, but not the window of its
        last tokens. `hit_tokens` are those that did not run again.
        """
        return self.windows.counted(self.prefix_cache.stats())

    def memory(self) -> dict[str, int]:
        """Bytes of "weights", of K and V, "kv", of "bookkeeping" and of "scratch", those of the engine included.

        "kv" has the cached blocks, which lie in the engine's cache, and the unpacked groups.
        """
        newest = {} if self.newest is None else self.newest.memory()
        return total(self.inner.memory(), self.prefix_cache.cache.memory(), self.windows.memory(), newest)

    def clear_cache(self) -> None:
        """Drop every cached block; counters and the engine's own sequence are kept."""
        self.prefix_cache.cache.clear()
        self.windows.clear()
        if self.newest is not None:
            self.newest.cache.clear()

    def save(self, path: str | os.PathLike[str], model: str | None = None) -> None:
        """Write the prefix cache to a file that an engine over the same model can `load`; see `PrefixCache.save`.

        Args:
            model: the model's name; by default its `fingerprint`.

        Raises:
            TypeError: a namespace that cannot be saved; no name for a model that is not a `Transformer`.
            OSError: an error of the file system; the old file is kept.
        """
        self._check_cache()
        self.prefix_cache.cache.save(path, self._name(model), beside=self._beside())

    def load(self, path: str | os.PathLike[str], model: str | None = None) -> int:
        """Add the blocks of a saved file to the cache and return their number; K and V are read at the first match.

        A file of an engine with another `residual_length` loads too. Its blocks are what that engine computed: with
        them an answer is that engine's, which may differ from a cold run of this one.

        Args:
            model: as in `save`.

        Raises:
            as `PrefixCache.load`: SnapshotError for the file of another model or a damaged one.
        """
        self._check_cache()
        if self.prefix_cache.cache.is_empty:
            for cache in self._beside():  # drop what belongs to texts that are no longer cached
                cache.clear()
        return self.prefix_cache.cache.load(path, self._name(model), beside=self._beside())

    def _beside(self) -> list[PrefixCache]:
        """The caches that are saved in one file with the prefix cache."""
        return self.windows.caches + ([] if self.newest is None else [self.newest.cache])

    def _name(self, model: str | None) -> str:
        return fingerprint(self.inner.model) if model is None else model

    __reduce_ex__ = refuse_copies("`save` writes its cache to a file")

    def __repr__(self) -> str:
        cache = self.prefix_cache.cache
        return f"PrefixCachedEngine({self.inner!r}, {len(cache)} of {cache.capacity} blocks cached)"

    def check(self) -> None:
        """Verify the invariants of the engine and of the prefix cache; AssertionError names the broken one."""
        self.inner.check()
        self.prefix_cache.cache.check()
        self.windows.check()
        if self.newest is not None:
            self.newest.check()

    def _stream_in_turn(self, request: Request, namespace: Hashable, *, whole: bool) -> Iterator[int]:
        turn = self.inner._requests.turns.take(self.inner.version)
        try:
            yield from self._stream(turn, request, namespace, whole=whole)
        finally:
            turn.give_back()

    def _stream(self, turn: Turn, request: Request, namespace: Hashable, *, whole: bool) -> Iterator[int]:
        """Run a request that has its turn. If it fails and is `whole`, the sequence is empty afterwards."""
        engine, requests, tokens = self.inner, self.inner._requests, request.tokens
        text = tokens.tolist()
        key = requests.regimes.key(namespace, requests.regimes.of(len(tokens)))
        self._check_cache()
        with self.prefix_cache.prepare(tokens, key)[0] as session:
            try:
                with requests.lock:
                    before = requests.num_prefilled
                    with self._looking(tokens, session.num_tokens, key):
                        logits = self._prefill(tokens, session, key)
                    request.cached_tokens = len(tokens) - (requests.num_prefilled - before)
                    turn.leave(engine.version)
                    self._store(text, namespace)
                yield from requests.decode(logits, request, turn, text)
            except BaseException:
                if whole:
                    requests.lock.when_free(self._sequence.clear)
                raise
            finally:
                # The computed tokens are valid however the stream ended.
                requests.lock.hand_over(partial(self._store_if_unchanged, turn, text, len(tokens), namespace))

    def _store_if_unchanged(self, turn: Turn, text: list[int], prompt: int, namespace: Hashable) -> None:
        if self.inner.version == turn.version:
            # A stream that is dropped inside a call of the cache cannot store its tokens.
            with suppress(InvalidOperationError):
                self._store(text, namespace)
                self._offer(text, prompt, namespace)

    def _looking(self, tokens: Tokens, start: int, namespace: Hashable) -> AbstractContextManager[None]:
        """Ask the tiers, if any, for what follows token `start`, while the prompt runs inside."""
        return nullcontext() if self._tiered is None else self._tiered.looking(tokens, start, namespace)

    def _prefill(self, tokens: Tokens, session: CacheSession, namespace: Hashable) -> Float32:
        """Start the sequence with the cached blocks and run the rest; returns the logits after the prompt."""
        engine, whole = self.inner, len(tokens)
        # The last token always runs, since logits are not cached.
        start = min(session.num_tokens, len(tokens) - 1)
        count = 0
        rows: list[tuple[Float32, Float32]] = []
        firsts: list[tuple[Float32, Float32]] = []
        length, num_firsts = engine.residual_length, engine.cache.first_tokens
        if num_firsts and start >= (length or num_firsts):
            # Every token reads the first ones unpacked. Without a copy of these, all run again.
            firsts = [] if self.newest is None else self.newest.recall_firsts(tokens, namespace)
            start = start if firsts else 0
        elif num_firsts and not length:
            start = 0  # the first tokens are cached in part
        if begun := start % (length or 1):
            # A token must read its own group unpacked, as in a run without the cache. The unpacked copy provides the
            # first `count` tokens of the group; the other cached ones run again.
            if self.newest is not None:
                count, rows = self.newest.recall(tokens[:start], namespace)
            start += count - begun
        with self.windows.hold(tokens, start, namespace) as (found, pages):
            blocks = session.shared_blocks[: -(-found // engine.cache.block_size)]

            def share(cache: PagedKvCache, seq_id: int) -> int:
                cache.adopt(seq_id, blocks, found)
                return found

            self._sequence.clear()
            self._sequence.replace(share, pages)
            engine._requests.regimes.know(tokens[:found], engine._requests.regimes.of(whole))
        if count or firsts:
            engine.cache.unpack(engine.seq_id, rows, firsts)
        parted, start = start // engine.cache.block_size * engine.cache.block_size, found
        if found < parted < len(tokens):
            # Two texts part here, and the window has left. Keep it for the next such text.
            engine._requests.prefill(tokens[found:parted], found, whole)
            self.windows.keep(tokens[:parted], self._sequence.places, namespace)
            start = parted
        if self.newest is not None and count < begun and (end := start - count + length) < len(tokens):
            # Two texts diverge in this group, as after a shared system prompt. Keep it for the next such text.
            engine._requests.prefill(tokens[start:end], start, whole)
            self.newest.keep(engine.seq_id, tokens[:end], namespace)
            start = end
        if self._tiered is not None:
            start = self._tiered.run(tokens, start, namespace)
        if session.num_tokens == len(tokens) == start + 1:
            return engine._requests.extend(tokens[-1:], start)
        with nullcontext() if self._tiered is None else self._tiered.measured(len(tokens) - start):
            return engine._requests.prefill(tokens[start:], start)

    def _store(self, text: list[int], namespace: Hashable) -> None:
        """Insert the full blocks of the sequence into the trie, by reference."""
        engine, cache = self.inner, self.prefix_cache.cache
        namespace = engine._requests.regimes.key(namespace, engine._requests.regimes.current)
        tokens = np.array(text[: engine.num_tokens], np.uint32)
        full = len(tokens) // cache.block_size
        blocks = engine.cache.block_table([engine.seq_id]).block_ids
        cached = cache.adopt(tokens, blocks[:full], namespace)
        self.windows.keep(tokens, self._sequence.places, namespace)
        if self.newest is not None and cached == full:
            self.newest.keep(engine.seq_id, tokens, namespace)

    def _offer(self, text: list[int], prompt: int, namespace: Hashable) -> None:
        """Offer the text of a request that has ended to the tiers."""
        if self._tiered is not None:
            key = self.inner._requests.regimes.key(namespace, self.inner._requests.regimes.current)
            self._tiered.used(np.array(text[: self.inner.num_tokens], np.uint32), prompt, key)
