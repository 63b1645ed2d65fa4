"""`PrefixCachedEngine`: an engine with a prefix cache, which prefills only the tokens that are not cached."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from kvcache.engine.adapters import Adapters
from kvcache.engine.chat import Answer, ChatEngine, ChatPrompt
from kvcache.engine.completion import Completion, Request
from kvcache.engine.documents import LINK, NO_DOCUMENTS, Documents, SegmentUse
from kvcache.engine.edits import Edited
from kvcache.engine.held_texts import HeldTexts
from kvcache.engine.inference import InferenceEngine
from kvcache.engine.partings import prompt_with_partings
from kvcache.engine.text_rows import TextRows
from kvcache.engine.turns import Turn
from kvcache.engine.vectors import Vectors
from kvcache.errors import InvalidOperationError
from kvcache.networks.adapter import Adapter
from kvcache.networks.protocols import Float32, Model
from kvcache.networks.weights import Progress
from kvcache.prefix.prefill import PrefixAwarePrefill
from kvcache.prefix.prefix_stats import PrefixCacheStats
from kvcache.sampling.sampling import SamplingParams
from kvcache.sampling.tokenizer import CheckpointText, GgufText
from kvcache.support.arguments import as_count, as_instance, short
from kvcache.support.copies import refuse_copies
from kvcache.support.exclusions import expect
from kvcache.texts.arrivals import GROUP_TOKENS, Arrivals, as_tiers
from kvcache.texts.behind import Behind
from kvcache.texts.block_index import PartStart
from kvcache.texts.forward import expect_own
from kvcache.texts.hints import Hint, Hinted, demote
from kvcache.texts.kv_settings import Settings
from kvcache.texts.seen_parts import SeenParts
from kvcache.texts.text import Text
from kvcache.tiers.directory import DirectoryTier
from kvcache.tiers.tiers import Tiers

__all__ = ["PrefixCachedEngine"]

logger = logging.getLogger("kvcache")

_AHEAD = 60.0  # seconds that a hint waits for tiers at most


class PrefixCachedEngine(ChatEngine):
    """An `InferenceEngine` with a prefix cache in front.

    Each request resets the sequence, looks up the longest cached prefix, shares its blocks, prefills the rest, inserts
    the new full blocks of prompt and answer into the trie, and unpins the shared blocks. A block that matches in part
    is shared too; the first write copies it.

    If the engine has a residual, unpacked copies of the groups in which texts end or diverge are kept too, so that a
    request runs only its new tokens (`newest.NewestGroups`).

    Args:
        engine: the engine to wrap; its cache is replaced by one with `max_cache_blocks` more blocks. Once it is
            replaced again, by `enlarge` or by another wrapper, the calls of this one raise. With `settings`, a
            network, and the engine is `InferenceEngine(engine, settings=settings)`.
        max_cache_blocks: maximum number of blocks of the prefix cache; may be left out if `max_memory_bytes` is given,
            or with `shared`.
            The unpacked groups take more memory: one token for every 32, or two groups if that is more.
            The pages of windows do too: a quarter as many for each window, or two windows if that is more.
        max_memory_bytes: the most bytes of all K and V, those of the engine and the unpacked groups included: an int or
            a text such as "4GiB" or "50%". With `max_cache_blocks` the lower limit counts.
        shared: the cached blocks are those of the engine: its cache does not grow, and the text that runs takes blocks
            of others where there is no free one. With `max_memory_bytes` it has fewer blocks if all take more.
        max_state_bytes: the most bytes of cached states, an int or a text, for networks whose layers keep one; by
            default as many as the cached blocks have, and at least eight states.
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
        windows: the groups of layers that keep a window or a state, with what is cached of them.
        newest: the unpacked groups; None: the engine has no residual.
        tiers: see above, those of `autosave` too; None: there are none.
        strict: see above.
    """

    BLOCK_SIZE = 16

    def __init__(
        self,
        engine: InferenceEngine | Model,
        max_cache_blocks: int | None = None,
        *,
        settings: Settings | None = None,
        shared: bool = False,
        seed: int | None = None,
        strict: bool = False,
        max_memory_bytes: int | str | None = None,
        max_state_bytes: int | str | None = None,
        tiers: Tiers | None = None,
        autosave: str | os.PathLike[str] | DirectoryTier | None = None,
    ) -> None:
        if settings is not None:
            if isinstance(engine, InferenceEngine):
                raise ValueError(f"settings: expected None with an engine, which has its own, got {short(settings)}")
            engine = InferenceEngine(engine, settings=settings)
        engine = as_instance(engine, InferenceEngine, "engine")
        expect("engine: of a PrefixCachedEngine", engine, engine.requests.sequence.settings.features)
        self.tiers = as_tiers(tiers, autosave)
        self.inner, self._requests, self._sequence = engine, engine.requests, engine.requests.sequence
        checked = replace(self._sequence.settings.with_states(max_state_bytes), cached_limit=max_memory_bytes)
        own = engine.cache.total_blocks
        if shared:
            blocks = checked.shared_blocks(own, max_memory_bytes)
            most = blocks if max_cache_blocks is None else as_count(max_cache_blocks, "max_cache_blocks", most=None)
            more, most = blocks - own, min(blocks, most)
        else:
            more = most = checked.cached_blocks(own, max_cache_blocks, max_memory_bytes)
        self._sequence.settings = checked
        self._requests.enlarge(more, most)
        if seed is not None:
            engine.reseed(seed)
        self._pool = self._sequence.pool
        index = self._pool.block_index
        assert index is not None
        self.prefix_cache, self.newest = PrefixAwarePrefill(index.pages), index.newest
        self.windows = self._pool.with_pages
        self._arrivals = None if self.tiers is None else Arrivals(self.tiers, checked, self._pool)
        self.strict = strict

    def close(self, timeout: float = 5.0) -> bool:
        """Write what waits for the tiers, `timeout` seconds at most, and go on without them; whether all was written.

        Without tiers it does nothing.
        """
        return self.tiers is None or self.tiers.close(timeout)

    def __enter__(self) -> PrefixCachedEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def adapters(self) -> Adapters:
        """The adapters of the engine, by name."""
        return self.inner.adapters

    def load_adapter(self, name: str, adapter: Adapter | str | os.PathLike[str]) -> Adapter:
        """See `InferenceEngine`."""
        return self.inner.load_adapter(name, adapter)

    def unload_adapter(self, name: str) -> None:
        """See `InferenceEngine`."""
        self.inner.unload_adapter(name)

    def generate(
        self, prompt_tokens: Any, params: SamplingParams | None = None, *, namespace: Hashable = None,
        prefix: Behind | None = None, head: Any = None, segments: Iterable[Any] | None = None, link: int = LINK,
        adapter: str | None = None, **sampling: Any,
    ) -> list[int]:
        """Continue a prompt and return the new tokens; `[]` for an empty prompt.

        Any failure that is not listed below is logged as a warning with its traceback, and the result is `[]`; with
        `strict` it is raised.

        Args:
            prompt_tokens: token ids; or a text, if the engine has a tokenizer.
            params: how to sample; by default the engine's `sampling_params`.
            namespace: requests share blocks only within one namespace (a tenant, an adapter).
            prefix: what `InferenceEngine.compress` made of a text before the prompt, whose tokens the prompt does not
                repeat. Requests share blocks only behind the same one.
            adapter: as of `InferenceEngine.complete`. Requests share blocks only with the same one, before the
                invocation of an activated one with those of the network alone.
            head, segments, link: as of `InferenceEngine.complete`; each segment is computed once, and cached behind the
                head.
            sampling: attributes of `SamplingParams`, in place of those of `params`.

        Raises:
            TypeError, ValueError: invalid tokens, parameters or length.
            InvalidOperationError: this thread has an open stream of this engine; the engine's cache was replaced.
        """
        documents = Documents(head, segments, link)
        request = self._checked(prompt_tokens, params, sampling, namespace, prefix, documents, adapter)
        if not len(request.tokens):
            return []
        turn = self._requests.turns.take(self.inner.version)
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
        self, prompt_tokens: Any, params: SamplingParams | None = None, *, namespace: Hashable = None,
        prefix: Behind | None = None, head: Any = None, segments: Iterable[Any] | None = None, link: int = LINK,
        adapter: str | None = None, **sampling: Any,
    ) -> Iterator[int]:
        """Do what `generate` does, token by token; arguments are checked now, and every failure is raised.

        The stream has exclusive use of the engine, as with `InferenceEngine.stream`. When it ends, or is closed or
        dropped, the tokens computed so far are cached.
        """
        documents = Documents(head, segments, link)
        request = self._checked(prompt_tokens, params, sampling, namespace, prefix, documents, adapter)
        return self._stream_in_turn(request, namespace, whole=False) if len(request.tokens) else iter(())

    def complete(
        self, prompt: Any, params: SamplingParams | None = None, *, namespace: Hashable = None,
        prefix: Behind | None = None, head: Any = None, segments: Iterable[Any] | None = None, link: int = LINK,
        adapter: str | None = None, **sampling: Any,
    ) -> Completion:
        """Do what `InferenceEngine.complete` does, with the prefix cache; every failure is raised.

        Args:
            prompt: as of `generate`, but it has at least one token.
            params, namespace, prefix, head, segments, link, adapter, sampling: as of `generate`.
        """
        documents = Documents(head, segments, link)
        request = self._checked(prompt, params, sampling, namespace, prefix, documents, adapter, with_text=True)
        return request.complete(self._stream_in_turn(request, namespace, whole=True))

    def prepare(
        self, segments: Iterable[Any], *, head: Any = None, namespace: Hashable = None
    ) -> list[SegmentUse]:
        """Compute segments behind a head, so that later requests find them cached; what is cached does not run.

        Args:
            segments, head, namespace: as of `generate`.

        Returns:
            The use of each: its tokens, and those that were cached before.

        Raises:
            as `complete`.
        """
        self._check_cache()
        expect_own(namespace)
        placed = self._requests.new.placed([0], None, Documents(head, segments, 0))
        if self._sequence.settings.expect(placed.prefix) is None:
            return []
        with self._requests.call:
            try:
                with HeldTexts(self._pool, None) as held:
                    self._run_seen(placed.prefix, namespace, 0, held)
                    return placed.uses(held.cached) or []
            finally:
                self._sequence.clear()

    def _checkpoint(self) -> CheckpointText | GgufText | None:
        return self._requests.text

    def _limits(self) -> tuple[Collection[str], int | None]:
        return self._sequence.settings.features, self._requests.max_positions

    def vectors(self) -> Vectors:
        """See `ChatEngine`."""
        return self.inner.vectors()

    def _read(self, readings: Sequence[TextRows], progress: Callable[[int, int], object] | None) -> None:
        if not all(each.shares for each in readings):
            self._requests.read(readings, progress)
            return
        self._check_cache()
        with self._requests.call:
            try:
                for number, each in enumerate(readings):
                    text = Text(each.tokens)
                    text.parts_at, text.head = each.parts_at, each.head
                    rows, _ = self._run(text)
                    each.take(rows, len(each.tokens) - 1)
                    if self._arrivals is not None:
                        self._arrivals.ended(text)
                    if progress is not None:
                        progress(number + 1, len(readings))
            finally:
                self._sequence.clear()

    def chat(
        self, messages: Any, params: SamplingParams | None = None, *, tools: Any = None, template: Any = None,
        edits: Any = None, namespace: Hashable = None, progress: Progress | None = None, adapter: str | None = None,
        segments: Iterable[Any] | None = None, link: int = LINK, **sampling: Any,
    ) -> Answer:
        """Do what `InferenceEngine.chat` does, with the prefix cache: only what is new in the conversation runs.

        A template may write earlier messages in another way than before: what is reused goes by tokens.

        Args:
            progress: called after each piece of the prompt with its tokens that are cached or have run, and with all.
                What it raises ends the answer.
        """
        found = self.chat_prompt(messages, edits, tools=tools, template=template, segments=segments, link=link)
        request = self._checked(
            found.tokens, params, sampling, namespace, found.prefix, adapter=adapter, with_text=True
        )
        request.progress, request.parts_at = progress, found.parts_at
        return Answer(request, self._stream_in_turn(request, namespace, whole=False), found)

    def _prompt_of(self, found: Edited, tools: Any, template: Any) -> ChatPrompt:
        if not self._pool.keeps_states:
            return super()._prompt_of(found, tools, template)
        most = self._requests.max_positions
        ids, parts = prompt_with_partings(self._checkpoint(), found.messages, tools, template, most)
        original = found.original_tokens or len(ids)
        return ChatPrompt(ids, None, found.applied, original, found.messages, parts_at=parts)

    def _checked(
        self, prompt: Any, params: SamplingParams | None, sampling: dict[str, Any], namespace: Hashable,
        prefix: Behind | None = None, documents: Documents = NO_DOCUMENTS, adapter: str | None = None, *,
        with_text: bool = False,
    ) -> Request:
        """A new request; its prompt may be empty."""
        self._check_cache()
        expect_own(namespace)
        params = self.inner.sampling_params if params is None else params
        loaded, features = self.adapters.find(adapter), () if adapter is None else ("adapter",)
        placed = self._requests.new.placed(prompt, prefix, documents, features)
        self._sequence.settings.expect(placed.prefix, adapter, self._requests.new.features)
        return self._requests.request(
            placed.prompt, params, sampling, with_text=with_text, or_empty=not with_text, placed=placed, adapter=loaded
        )

    def _check_cache(self) -> None:
        """InvalidOperationError, once the blocks that are cached are not those of the engine any more."""
        if self._sequence.pool is not self._pool:
            raise InvalidOperationError("engine: expected the cache that it got here, got another one since then")

    def hint(
        self, action: str, *prompts: Any, namespace: Hashable = None, after: int | None = None,
        prefix: Behind | None = None, adapter: str | None = None,
    ) -> Hinted:
        """Tell what is known of cached texts while no request has them; see `BatchEngine.hint`.

        "demote", "release", and "prefetch", which waits until the texts are read from the tiers. It pins nothing.

        Raises:
            TypeError, ValueError: as `complete`; another action.
            InvalidOperationError: the engine's cache was replaced.
        """
        self._check_cache()
        expect_own(namespace)
        if action not in ("demote", "prefetch", "release"):
            raise ValueError(f"action: expected demote, prefetch or release of this engine, got {short(action)}")
        prefix, requests = self._sequence.settings.expect(prefix, adapter), self._requests
        found = [requests.new.prompt(each, prefix) for each in prompts]
        loaded = self.adapters.find(adapter)
        hint = Hint.of(self._sequence.forward, action, found, namespace, prefix, after=after, adapter=loaded)
        hinted = hint.found(self._pool)
        for text in hint.texts:
            if action == "prefetch":
                self._read_ahead(text)
                continue
            with requests.lock:
                if action == "demote":
                    demote(self._pool, self._arrivals, text, hint.after)
                else:
                    self._pool.shared.leave(text, hint.after, at_once=True)
        return hinted

    def _read_ahead(self, text: Text) -> None:
        """Cache what tiers have of a text."""
        if self._arrivals is None:
            return
        with self._requests.lock:
            lookup = self._arrivals.ask(text)
        if lookup is None:
            return
        lookup.wait(_AHEAD)
        with self._requests.lock, ExitStack() as held:
            self._pool.shared.hold(text, text.num_tokens, held, self._arrivals.arrived, again=True)
            self._arrivals.end(text)

    def cache_stats(self) -> PrefixCacheStats:
        """A snapshot of the prefix cache's counters.

        For a network with windows, `miss_reasons` also counts "window": a prefix was cached, but not the window of its
        last tokens; for one whose layers keep a state "state" alike. `hit_tokens` are those that did not run again.
        """
        return self._pool.stats()

    def memory(self) -> dict[str, int]:
        """Bytes of "weights", of K and V, "kv", of "bookkeeping" and of "scratch", those of the engine included.

        "kv" has the cached blocks, which lie in the engine's cache, and the unpacked groups.
        """
        return self.inner.memory()

    def clear_cache(self) -> None:
        """Drop every cached block; counters and the engine's own sequence are kept."""
        self._pool.clear()

    def save(self, path: str | os.PathLike[str], model: str | None = None) -> None:
        """Write the prefix cache to a file that an engine over the same model can `load`; see `PrefixCache.save`.

        Args:
            model: the model's name; by default its `fingerprint`.

        Raises:
            TypeError: a namespace that cannot be saved; no name for a model that is not a `Transformer`.
            OSError: an error of the file system; the old file is kept.
        """
        self._check_cache()
        self._pool.save(path, self._sequence.settings.named(model))

    def load(self, path: str | os.PathLike[str], model: str | None = None, *, exact: bool = True) -> int:
        """Add the blocks of a saved file to the cache and return their number; K and V are read at the first match.

        Args:
            model: as in `save`.
            exact: False takes the file of another version of bits too; see `PrefixCache.load`.

        Raises:
            as `PrefixCache.load`: SnapshotError for a damaged file, or one whose K and V this engine would not compute:
                of another model, calibration, `residual_length`, `sparse_tokens` or version of bits. The CPU does not
                matter.
        """
        self._check_cache()
        return self._pool.load(path, self._sequence.settings.named(model), exact=exact)

    __reduce_ex__ = refuse_copies("`save` writes its cache to a file")

    def __repr__(self) -> str:
        cache = self.prefix_cache.cache
        return f"PrefixCachedEngine({self.inner!r}, {len(cache)} of {cache.capacity} blocks cached)"

    def check(self) -> None:
        """Verify the invariants of the engine and of the prefix cache; AssertionError names the broken one."""
        self.inner.check()
        if self._sequence.pool is not self._pool:
            for cache in self._pool.prefixes:
                cache.check()

    def _stream_in_turn(self, request: Request, namespace: Hashable, *, whole: bool) -> Iterator[int]:
        turn = self._requests.turns.take(self.inner.version)
        try:
            yield from self._stream(turn, request, namespace, whole=whole)
        finally:
            turn.give_back()

    def _stream(self, turn: Turn, request: Request, namespace: Hashable, *, whole: bool) -> Iterator[int]:
        """Run a request that has its turn. If it fails and is `whole`, the text is empty afterwards."""
        requests, current = self._requests, self._sequence
        self._check_cache()
        try:
            with requests.lock:
                logits = self._prefill(request, namespace)
                turn.leave(current.version)
            yield from requests.decode(logits, request, turn)
        except BaseException:
            if whole:
                requests.lock.when_free(current.clear)
            raise
        finally:
            # The computed tokens are valid however the stream ended.
            requests.lock.hand_over(partial(self._store_if_unchanged, turn, len(request.tokens)))

    def _store_if_unchanged(self, turn: Turn, prompt: int) -> None:
        if self.inner.version == turn.version:
            # A stream that is dropped inside a call of the cache cannot store its tokens.
            with suppress(InvalidOperationError):
                text = self._sequence.text
                if text.computed > text.num_prompt:  # what the prompt needs was kept when it had run
                    self._pool.keep(text, text.computed, ends=True)
                if self._arrivals is not None:
                    self._arrivals.ended(text)

    def _prefill(self, request: Request, namespace: Hashable) -> Float32:
        """Start the text with the cached blocks of a prompt and run the rest; returns the logits after the prompt."""
        text = Text(request.tokens, namespace, request.prefix, request.adapter)
        text.parts_at = request.parts_at
        if isinstance(request.prefix, SeenParts):
            with HeldTexts(self._pool, request.prefix) as held:
                self._run_seen(request.prefix, namespace, text.reach, held)
                request.cached_texts = held.cached
                rows, ran = self._run(text, request.progress, held.starts(request.prefix))
        else:
            rows, ran = self._run(text, request.progress)
        self._requests.num_prefilled += ran
        request.cached_tokens = len(request.tokens) - ran
        logits: Float32 = rows[0]
        return logits

    def _run_seen(self, prefix: Any, namespace: Hashable, least: int, held: HeldTexts) -> None:
        """Run the texts that a `SeenParts` has parts of, as far as they are not cached, and hold them.

        `least`: tokens of the request, which decide the regime.
        """
        forward = self._sequence.forward
        for part in prefix.texts:
            text = Text(part.tokens, namespace, part.behind)
            text.least = least
            text.regime = forward.regime(text.reach)
            if not held.find(part, forward.space_of(text)):
                _, ran = self._run(text, None, held.starts(part.behind))
                self._requests.num_prefilled += ran
                held.add(part, text, text.num_tokens - ran)

    def _run(
        self, text: Text, progress: Progress | None = None, parts: Sequence[Sequence[PartStart]] = ()
    ) -> tuple[Float32, int]:
        """Run a prompt behind its cached blocks; returns the rows of its last token, and how many tokens ran.

        Args:
            progress: see `chat`.
            parts: that it sees, of each group.
        """
        current, forward = self._sequence, self._sequence.forward
        text.regime = forward.regime(text.reach)
        text.space = forward.space_of(text)
        if self._arrivals is None:
            cached, ran = current.start(text, None, parts), 0
        else:
            self._arrivals.clear()  # what an interrupt has left
            self._arrivals.begin(text)
            cached = current.start(text, self._arrivals.arrived, parts)
            ran = self._run_while_more_arrives(self._arrivals, text, progress)
        remaining = text.remaining
        ran += 0 if cached == text.num_tokens and remaining == 1 else remaining  # all is cached, but no logits
        while text.remaining > (count := min(current.chunk - text.computed % current.chunk, text.most_rows)):
            self._run_part(text, count, progress)
        return self._run_part(text, text.remaining, progress), ran

    def _run_part(self, text: Text, count: int, progress: Progress | None) -> Float32:
        """Run the next tokens of the text; the logits after the last one of the prompt."""
        began = perf_counter()
        rows = self._sequence.run_part(count, "last" if count == text.remaining else "none")
        if self._arrivals is not None:
            self._arrivals.measured(count, perf_counter() - began)
        if progress is not None:
            progress(text.computed, text.num_tokens)
        return rows

    def _run_while_more_arrives(self, arrivals: Arrivals, text: Text, progress: Progress | None) -> int:
        """Run a prompt, but for its last token, as long as more may arrive of it; how many tokens ran."""
        firsts, ran, piece, left_at = self.inner.cache.first_tokens, 0, GROUP_TOKENS, -1
        while arrivals.is_looked_up(text) and text.remaining > 1:
            before = text.computed
            if arrivals.reaches_past(text, left_at):
                left_at = text.computed
                self._sequence.start_again(arrivals.arrived)
            elif not arrivals.is_looked_up(text):
                break
            start = text.computed
            end = firsts if start < firsts else start - start % GROUP_TOKENS + piece
            # Short pieces take more time for each token: where nothing has arrived, the next one is longer.
            piece = GROUP_TOKENS if start > before else min(2 * piece, self._sequence.chunk)
            if count := min(end, text.num_tokens - 1) - start:
                self._run_part(text, count, progress)
                ran += count
        arrivals.end(text)
        return ran
