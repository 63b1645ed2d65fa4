"""`BatchEngine`: many requests at once over one network and one pool of blocks."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvcache.core.memory import total
from kvcache.drafts.draft_pace import MOST_DRAFTS
from kvcache.drafts.sources import DraftSources
from kvcache.engine.completion import as_prompt, listed
from kvcache.engine.documents import LINK, Documents, Placed
from kvcache.engine.network_engine import NetworkEngine
from kvcache.engine.new_requests import NewRequests, Shared
from kvcache.engine.opening import open_drafts
from kvcache.engine.partings import partings
from kvcache.engine.requests import SCORE_FLOATS
from kvcache.engine.text_rows import TextRows
from kvcache.engine.vectors import Vectors
from kvcache.errors import InvalidOperationError, OutOfMemoryError
from kvcache.grammar.grammar import Grammar
from kvcache.grammar.trials import Trials
from kvcache.networks.protocols import Float32, Model, is_causal
from kvcache.prefix.events.kv_events import KvEvents
from kvcache.prefix.prefix_stats import PrefixCacheStats
from kvcache.sampling.sampling import SamplingParams
from kvcache.sampling.stop_strings import StopWatch
from kvcache.sampling.text_stream import TextStream
from kvcache.sampling.tokenizer import CheckpointText, GgufText
from kvcache.serving.budget import CHEAP_ROWS, MOST, MOST_PROMPTS, TokenBudget
from kvcache.serving.engine_events import EngineEvents
from kvcache.serving.many import run_all
from kvcache.serving.observed import Observed, OnEviction
from kvcache.serving.pins import as_kept
from kvcache.serving.progress import Progress
from kvcache.serving.request import Pending, Request
from kvcache.serving.scheduler import Scheduler
from kvcache.serving.seen_texts import PreparedSegments, SeenText
from kvcache.serving.stats import BatchStats, NamespaceStats
from kvcache.serving.steps import Steps
from kvcache.serving.work import Drawing, Reading, Scoring, Work
from kvcache.support.arguments import as_count, as_finite, as_instance, as_integer
from kvcache.support.copies import refuse_copies
from kvcache.support.exclusions import expect
from kvcache.texts.arrivals import GROUP_TOKENS, Arrivals, as_tiers
from kvcache.texts.behind import Behind
from kvcache.texts.forward import Forward, expect_own
from kvcache.texts.hints import Hint, Hinted
from kvcache.texts.kv_settings import Options, Settings, with_options
from kvcache.texts.seen_parts import SeenParts
from kvcache.texts.settings import CacheSettings, Load
from kvcache.texts.text import Tokens
from kvcache.texts.text_adapter import TextAdapter
from kvcache.tiers.directory import DirectoryTier
from kvcache.tiers.tiers import Tiers

if TYPE_CHECKING:  # typing has it from Python 3.11 on
    from typing_extensions import Unpack

__all__ = ["BatchEngine"]

Clock = Callable[[], float]


class BatchEngine(NetworkEngine):
    """Runs many requests at once through a network; they share the blocks of equal prefixes.

    `submit` queues a request, and each `step` runs one pass of the network over the next tokens of many. `with engine:`
    or `start` runs a thread that steps; without one, `step` and all that waits for tokens do. Threads may share an
    engine.

    The tokens and the log-probabilities of a request are those of an `InferenceEngine` of the same settings, bit for
    bit, whatever runs beside it and however often it was preempted. The `seed` of requests without their own is
    derived alike, from the number of the request; of `n` samples each counts as a request.

    Where memory or places are short, the request that came last gives its up and continues later; the second sample of
    a request counts as one that came 10 s after it. So a request of one sample that runs stops for earlier requests
    alone, and does not wait for all samples of others. A request that fits the pool alone never runs out of memory.

    Args:
        model: a `Transformer`, or anything with the `Model` protocol.
        sampling_params: the default for requests without `params`.
        seed: for requests without their own.
        settings, options: how K and V are stored, see `Settings`; its attributes are keywords too. `num_blocks` is the
            size of the cache, of running requests and cached prefixes together; by default four times the whole
            context, at most for 16,384 tokens. The unpacked tokens of all requests that may run count in
            `max_memory_bytes`. With an `eviction_policy` each request has a budget of its own; such requests share
            nothing, have no draft tokens and are not preempted: one begins if there is memory for all that it may
            keep.
        max_queue: the most requests that wait, samples counted.
        max_running: the most requests that run at a time, samples counted.
        target_gap: seconds between new tokens that prompts of other requests may cause: fewer tokens of prompts run in
            a step that would last longer (16 to 512). None: 0.05, or twice as long as a step without prompts. A step
            without new tokens lasts four times as long at most (128 to 512 tokens): so long a request that comes waits.
        draft: where draft tokens come from, which one pass checks together. The results are the same; beside what they
            save, sources take at most 2 % of the time, and that of 32 passes. "ngram": what followed the last tokens
            before, in the prompt or the text (prompt lookup). A network of the same vocabulary, or the path of one: its
            most likely tokens. Its K and V, in f16 and of as many tokens, count in `max_memory_bytes`. "mtp": the MTP
            layer of a checkpoint (multi-token prediction; `from_pretrained` loads it, and it has K and V too).
            "auto": n-grams, and that layer where there is one. Several of these, in a tuple: each is asked where those
            before it have none. None: there are none.
        draft_tokens: the most draft tokens of a request in a step, up to 16.
        max_state_bytes: the most bytes of cached states, an int or a text, for networks whose layers keep one; those of
            running requests come to it. By default as many as K and V have, and at least eight states.
        tiers: where blocks go beyond this process, and come from, while prompts run; see `Tiers`.
        autosave: as of `PrefixCachedEngine`; `close` writes what is left.
        on_eviction: called with an `Eviction` after each step in which cached blocks left to make room, in the thread
            that ran the step. No lock is held: it may call the engine. Its errors are logged.
        kv_events: where routers read which blocks are cached, a `KvEvents` or its address (extra `cluster`). Namespaces
            are then None, bools, ints, texts, bytes or tuples of these. Where layers have windows or a state, a text
            may have to continue before the end of the blocks that are told.
        clock: seconds, for metrics, deadlines and the rates of the scheduler.
        adapters: as `load_adapter` takes them, by name. One pass runs requests with any of them.

    Layers with a sliding window keep it, and no more than two blocks beside it, in pools of their own, with room for
    `max_running` texts, which `max_memory_bytes` counts too. With tiers they keep 64 tokens more, or a block.

    Layers with a state have room for the states of `max_running` texts; of `max_memory_bytes` these take a quarter at
    most, and fewer texts run where that is too little. Memory of states that no text has had is not touched.

    Attributes:
        model: the network.
        sampling_params: the defaults of a request.
        adapters: a mapping from names to each `Adapter`.
        clock, tiers, max_queue: see above.
        max_positions: the most tokens of a text; None: any number, under StreamingLLM.
    """

    @with_options
    def __init__(
        self,
        model: Model,
        sampling_params: SamplingParams | None = None,
        seed: int = 0,
        *,
        settings: Settings | None = None,
        max_queue: int = 1024,
        max_running: int = 64,
        target_gap: float | None = None,
        draft: Any = "ngram",
        draft_tokens: int = MOST_DRAFTS,
        max_state_bytes: int | str | None = None,
        tiers: Tiers | None = None,
        autosave: str | os.PathLike[str] | DirectoryTier | None = None,
        on_eviction: OnEviction | None = None,
        kv_events: KvEvents | str | None = None,
        clock: Clock = perf_counter,  # on Windows monotonic() counts steps of 16 ms
        adapters: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, sampling_params, adapters=adapters)
        self.clock = clock
        max_running = as_count(max_running, "max_running", 1)
        self.tiers = tiers = as_tiers(tiers, autosave)
        self._autosaves = autosave is not None
        given = Settings.of(settings, options)
        block_size = as_count(given.block_size, "block_size", 1, most=None)
        spare = 1 if tiers is None else max(GROUP_TOKENS, block_size) + 1
        draft_tokens = as_count(draft_tokens, "draft_tokens", 1, CHEAP_ROWS)
        load = Load(max_running, MOST, draft_tokens, MOST_PROMPTS + CHEAP_ROWS, spare, 16384, 4)
        sources = DraftSources(open_drafts(draft), model, load, block_size)
        checked = CacheSettings.of(model, load, given, max_state_bytes=max_state_bytes)
        self._settings = checked = sources.split(checked)
        expect("tiers", tiers, checked.features)
        expect("kv_events", kv_events, checked.features)
        self._pool = checked.pool(checked.total_blocks())
        arrivals = None if tiers is None else Arrivals(tiers, checked, self._pool)
        forward = Forward(model, self._pool)
        self._drafter = sources.drafter(forward, draft_tokens, clock)
        scheduler = Scheduler(
            forward, arrivals, TokenBudget(target_gap), max_running, MOST_PROMPTS if checked.keeps_f16 else MOST,
            max(1, SCORE_FLOATS // model.config.vocab_size),
            Observed(self._pool, on_eviction, clock, forward.name_of), self._drafter,
        )
        self.max_queue = as_count(max_queue, "max_queue", 1)
        self._steps = Steps(scheduler, forward, self.max_queue, clock)
        self.max_positions = checked.max_positions
        self._whole = not is_causal(model)
        self._new = NewRequests(
            model.config, self.max_positions, seed, self._steps.inbox_lock, lambda: self.tokenizer, checked.features
        )
        self._text: CheckpointText | GgufText | None = None
        self._events: EngineEvents | None = None
        if kv_events is not None:
            self._events = EngineEvents(self._pool.prefixes[0], kv_events, forward.name_of)

    def unload_adapter(self, name: str) -> None:
        """See `NetworkEngine`; waits for no step."""
        super().unload_adapter(name)
        self._steps.end_unloaded()

    def _set_text(self, text: CheckpointText | GgufText) -> None:
        self._text = text

    # -- requests -------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        namespace: Hashable = None,
        priority: int = 0,
        deadline: float | None = None,
        n: int = 1,
        keep: float | Iterable[tuple[int, float]] | None = None,
        parts_at: Iterable[int] = (),
        prefix: Behind | None = None,
        head: Any = None,
        segments: Iterable[Any] | None = None,
        link: int = LINK,
        adapter: str | None = None,
        prompt_logprobs: int | None = None,
        watch: Callable[[], StopWatch] | None = None,
        **sampling: Any,
    ) -> Request:
        """Queue a request.

        Args:
            prompt: at least one token id; or a text, if the engine has a tokenizer.
            params: how to sample; by default the engine's `sampling_params`.
            namespace: requests share blocks only within one namespace (a tenant).
            priority: requests begin in the order of arrival time + 10 s * priority: a lower number is earlier. One that
                is earlier than the last that runs takes its place, where there is no other.
            deadline: seconds from now; a request that has not ended then ends with the tokens that it has.
            n: independent samples, at most `max_queue`. With a seed in `params`, sample i draws as one of seed + i. It
                has the priority `priority + i`.
            keep: seconds that the prompt stays cached for, when it has run and after each later use; or pairs of a
                number of its first tokens, and seconds. It ends earlier where a request would not run otherwise, the
                one that ends first at first. All such prefixes have a half of the blocks at most, those of a namespace
                a quarter, and there are at most 1,024 of them, 512 of a namespace; what is beyond is not kept.
                Namespaces that are tuples count together where their first entry is the same. With `max_tokens` 0 the
                prompt runs, and nothing else.
            parts_at: after how many tokens of the prompt later ones are expected to differ, as `chat_parts` tells. A
                network whose layers keep a state keeps it there; of no use to others.
            prefix: what `InferenceEngine.compress` made of a text before the prompt, whose tokens the prompt does not
                repeat. Requests share blocks only behind the same one.
            adapter: as of `PrefixCachedEngine.generate`.
            head, segments, link: as of `InferenceEngine.complete`. Each segment runs once for all requests that have
                it, as an ordinary prompt behind the head, and stays cached. `keep` is of what follows the segments.
            prompt_logprobs: report the log-probability of each token of the prompt, and of this many most likely ones
                beside it, as `Request.prompt_logprobs`. The prompt then shares no blocks, `keep` and `prefix` are not
                for it, and with `max_tokens` 0 nothing else is computed.
            watch: makes, for each sample, what reads its new tokens and finds the stop strings of `params`, such as a
                `SpokenAnswer`, to which those in thoughts and calls count for nothing. None: they count anywhere.
            sampling: attributes of `SamplingParams`, in place of those of `params`.

        Raises:
            TypeError, ValueError: as `InferenceEngine.complete`; a place outside of the prompt.
            QueueFullError: `max_queue` requests wait.
            OutOfMemoryError: the prompt does not fit the pool.
            InvalidOperationError: the engine is closed.
        """
        expect_own(namespace)
        placed = None
        if head is not None or segments is not None:
            given = {"logprobs": prompt_logprobs, "adapter": adapter}
            own_features = {name for name in given if given[name] is not None}
            placed = self._new.placed(prompt, prefix, Documents(head, segments, link), own_features)
            prompt, prefix = placed.prompt, placed.prefix
        self._settings.expect(prefix, adapter, self._new.features)
        loaded = None if adapter is None else self.adapters.find(adapter)
        if self._events is not None:
            self._events.expect(namespace)
        priority, n = as_integer(priority, "priority"), as_count(n, "n", 1)
        deadline = None if deadline is None else as_finite(deadline, "deadline", 0.0)
        params = self.sampling_params if params is None else as_instance(params, SamplingParams, "params")
        params = params.changed(sampling)
        prompt = self._new.prompt(prompt, prefix)
        own = None if loaded is None else TextAdapter.of(loaded, prompt)
        places = tuple(as_count(each, "parts_at", 1, len(prompt)) for each in parts_at)
        self._steps.expect_room(n)  # before each sample takes its random numbers
        shared = self._new.shared(params, with_text=True)
        kept = None if keep is None else as_kept(keep, len(prompt), self._pool.block_size)
        top = None if prompt_logprobs is None else as_count(prompt_logprobs, "prompt_logprobs")
        if kept is not None or prefix is not None:
            features = self._settings.features | (set() if top is None else {"logprobs"})
            expect("keep", keep, features)
            expect("prefix: of parts of cached texts" if isinstance(prefix, SeenParts) else "prefix", prefix, features)
        samples = [self._sample(prompt, namespace, shared, i, prefix, placed, own, watch) for i in range(n)]
        if kept is not None:
            samples[0].keep = kept
        if top is not None:
            samples[0].score(top)
        if params.max_tokens == 0 and (kept is not None or top is not None):
            for each in samples:
                each.warm()
        samples[0].parts_at = places
        for each in samples[1:]:
            each.leader, each.parts_at = samples[0], places
        request = Request(self._steps, samples)
        self._enqueue(request, samples, priority, deadline)
        return request

    def prepare(
        self, segments: Iterable[Any], *, head: Any = None, namespace: Hashable = None, priority: int = 0,
        deadline: float | None = None, keep: float | None = None,
    ) -> PreparedSegments:
        """Queue segments behind a head, so that later requests find them cached.

        Args:
            segments, head, namespace, priority, deadline: as of `submit`.
            keep: seconds that their full blocks stay cached for, with the limits of `keep` of `submit`.

        Raises:
            as `submit`.
        """
        expect_own(namespace)
        placed = self._new.placed([0], None, Documents(head, segments, 0))
        if self._events is not None:
            self._events.expect(namespace)
        priority = as_integer(priority, "priority")
        deadline = None if deadline is None else as_finite(deadline, "deadline", 0.0)
        seen, works = self._settings.expect(placed.prefix), list[SeenText]()
        for part in seen.texts if isinstance(seen, SeenParts) else ():
            works.append(SeenText(part, namespace))
            if keep is not None:
                works[-1].keep = as_kept(keep, len(part.tokens), self._pool.block_size)
            self._expect_fits(works[-1])
        prepared = PreparedSegments(self._steps, works, placed)
        if works:
            self._steps.enqueue(prepared, works, priority, deadline)
        return prepared

    def hint(
        self,
        action: str,
        *prompts: Any,
        namespace: Hashable = None,
        ttl: float | None = None,
        resume_in: float | None = None,
        after: int | None = None,
        prefix: Behind | None = None,
        adapter: str | None = None,
    ) -> Hinted:
        """Tell what is known of cached texts while no request has them: it changes times, never bits.

        It takes effect now, or when the running step ends, and waits for neither; texts are read while the thread of
        the engine, or its caller, steps.

        Args:
            action: "demote": a tool runs; the text is copied to the tiers, and what it alone has is evicted before all
                else, unless it is used again. "pin": it stays, as by `keep` of `submit`, as far as it is cached.
                "prefetch": it comes back; it is read from the tiers, and pinned. "release": it has ended; what it alone
                has is forgotten, in the memory of this process. "share": the head that all of the prompts begin with is
                pinned. Blocks behind a text, such as those of an answer, are its own where no other text has them.
            prompts: token ids, or texts, at most 64; "share" takes two or more.
            namespace, prefix, adapter: as of `submit`.
            ttl: seconds that a text stays for, of "pin" and "share" (by default 300) and of "prefetch" (60 more than
                `resume_in`).
            resume_in: seconds until a text of "prefetch" comes back; it is read a second before that, or earlier where
                tiers are slow. By default now.
            after: of "demote" and "release", how many first tokens of each text stay as they are: those of the text
                that a branch has left.

        Returns:
            How many tokens the texts have, and of how many K and V are cached now.

        Raises:
            TypeError, ValueError: as `submit`; no such action, or an argument that it does not take.
            QueueFullError: too many hints wait for the end of a step, or texts for their time.
            InvalidOperationError: the engine is closed.
        """
        expect_own(namespace)
        self._settings.expect(prefix, adapter)
        expect("hint", action, self._settings.features)
        if self._events is not None:
            self._events.expect(namespace)
        found = [self._new.prompt(each, prefix) for each in prompts]
        loaded = None if adapter is None else self.adapters.find(adapter)
        hint = Hint.of(self._steps.forward, action, found, namespace, prefix, ttl, resume_in, after, loaded)
        hinted = hint.found(self._pool)
        self._steps.hint(hint)
        return hinted

    def prepare_grammar(
        self, grammar: Grammar, stop_token_ids: Iterable[int] = (), *, trials: Trials | None = None
    ) -> None:
        """Compile a grammar, so that a `submit` with it and with these stop tokens finds it.

        The first one reads the vocabulary, which takes seconds where that is large, and other threads wait meanwhile;
        compilations hold up none.

        Args:
            trials: compile a grammar that is new in another process first, under limits of time and memory, as the
                server does. None: a hostile grammar may take minutes and all memory.

        Raises:
            GrammarError: it is none, or beyond a limit; the engine has no tokenizer that llguidance reads, or its
                network has no end tokens.
            OutOfMemoryError: the grammars of all texts take the memory that they may.
            ImportError: without llguidance.
        """
        grammar = as_instance(grammar, Grammar, "grammar")
        self._new.matcher(grammar, stop_token_ids, trials)

    def knows_grammar(self, grammar: Grammar, stop_token_ids: Iterable[int] = ()) -> bool:
        """Whether `prepare_grammar` with these compiles nothing: it was compiled, or refused by trials."""
        grammar = as_instance(grammar, Grammar, "grammar")
        return self._new.compiler().knows(grammar, stop_token_ids)

    def _sample(
        self, prompt: Tokens, namespace: Hashable, shared: Shared, number: int, prefix: Behind | None,
        placed: Placed | None, adapter: TextAdapter | None, watch: Callable[[], StopWatch] | None,
    ) -> Drawing:
        request, decoder = self._new.request(prompt, shared, number, prefix, adapter), shared.decoder
        request.placed = placed
        make_text = None if decoder is None else partial(TextStream, decoder, prompt, shared.stop_strings)
        work = Drawing(request, make_text, self.config, namespace, self._drafter.begin(), watch)
        if self._settings.budgets is not None:
            work.evict(self._pool.chunk, endless=self._settings.max_positions is None)
        return work

    def _enqueue(self, pending: Pending, works: Sequence[Work], priority: int, deadline: float | None) -> None:
        self._expect_fits(works[0])
        self._steps.enqueue(pending, works, priority, deadline)

    def _expect_fits(self, work: Work) -> None:
        needed, total_blocks = self._pool.blocks_for(work.num_tokens), self._pool.total_blocks
        if isinstance(work.prefix, SeenParts):  # one block more for each that may run beside it
            needed += sum(self._pool.blocks_for(len(each.tokens)) + 1 for each in work.prefix.texts) + 1
        if needed > total_blocks:
            raise OutOfMemoryError(needed, total_blocks)
        self._pool.expect_parts(work)

    def generate_batch(
        self,
        prompts: Iterable[Any],
        params: SamplingParams | None = None,
        *,
        namespace: Hashable = None,
        progress: Progress = True,
        **sampling: Any,
    ) -> list[list[int]]:
        """Continue many prompts: the new tokens of each, in the order of the prompts.

        Any number: they are queued as there is room. If one fails, or the call is interrupted, all are cancelled.

        Args:
            prompts, params, namespace, sampling: as of `submit`.
            progress: True shows a bar if stderr is a terminal, False shows none; a function is called with the number
                of prompts that are done, and of all.

        Raises:
            as `submit`, but QueueFullError; InvalidOperationError: the engine was closed meanwhile, and cancelled
                texts.
        """
        submit = partial(self.submit, params=params, namespace=namespace, **sampling)
        requests = run_all([*listed(prompts, "prompts")], submit, self._steps.wait_for_any, progress)
        for each in requests:
            each.expect_end()
        return [each.result() for each in requests]

    def score_batch(self, texts: Iterable[Any], *, progress: Progress = True) -> list[Float32]:
        """`InferenceEngine.score` of many texts: float32 `(len(tokens) - 1,)` for each, in their order.

        Args:
            texts: token ids, at least one each; or texts, if the engine has a tokenizer.
            progress: as of `generate_batch`.

        Raises:
            as `InferenceEngine.score`; InvalidOperationError: the engine was closed meanwhile, and cancelled texts.
        """
        most = self.max_positions and self.max_positions + 1  # the last token does not run
        texts = listed(texts, "texts")
        prompts = [as_prompt(text, lambda: self.tokenizer, self.config.vocab_size, most) for text in texts]
        for tokens in prompts:
            self._new.check_span(tokens[:-1] if len(tokens) > 1 else tokens, 0)
        chunk = min(self._pool.chunk, max(1, SCORE_FLOATS // self.config.vocab_size))
        works = [Scoring(tokens, chunk) for tokens in prompts]

        def submit(work: Scoring) -> Pending:
            pending = Pending(self._steps, [work])
            self._enqueue(pending, [work], 0, None)
            return pending

        for pending in run_all([work for work in works if work.num_tokens], submit, self._steps.wait_for_any, progress):
            pending.expect_end()
        return [work.scores for work in works]

    def _checkpoint(self) -> CheckpointText | GgufText | None:
        return self._text

    def _limits(self) -> tuple[Collection[str], int | None]:
        return self._settings.features, self.max_positions

    def vectors(self) -> Vectors:
        """See `ChatEngine`."""
        expect("embed", self._settings.budgets, self._settings.features)
        return Vectors(self.model, self._text, self.max_positions)

    def _read(self, readings: Sequence[TextRows], progress: Callable[[int, int], object] | None) -> None:
        def submit(reading: TextRows) -> Pending:
            return self.submit_readings([reading])

        for pending in run_all(readings, submit, self._steps.wait_for_any, False if progress is None else progress):
            pending.expect_end()

    def submit_readings(
        self, readings: Sequence[TextRows], *, namespace: Hashable = None, deadline: float | None = None
    ) -> Pending:
        """Queue texts of `vectors()`, all or none; their results are there when the call that is returned has ended.

        Args:
            namespace, deadline: as of `submit`.

        Raises:
            as `submit`.
        """
        expect_own(namespace)
        works = [Reading(each, namespace, whole=self._whole) for each in readings]
        pending = Pending(self._steps, works)
        if works:
            longest = max(works, key=lambda work: work.num_tokens)
            self._expect_fits(longest)
            self._steps.enqueue(pending, works, 0, deadline)
        return pending

    def chat_parts(
        self, messages: Any, prompt: Sequence[int], *, tools: Any = None, template: Any = None
    ) -> tuple[int, ...]:
        """`parts_at` of a conversation: where its next turn, and others with its system prompt, will differ.

        Args:
            messages, tools, template: as of `apply_chat_template`.
            prompt: the token ids of the conversation.

        Returns:
            The places, ascending; none for a network without a state, or a template that tells none.
        """
        return partings(self._text, messages, prompt, tools, template) if self.keeps_states else ()

    # -- steps ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one pass of the network over the next tokens of many requests; whether there is work left.

        Where a pass fails, its requests run one by one. One that fails alone ends with the error of the network, and
        nothing is raised here.
        """
        return self._steps.step()

    # -- start and close ------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether a thread steps the engine, other than this one."""
        return self._steps.is_running

    def start(self) -> BatchEngine:
        """Run a thread that steps as long as there is work; returns the engine. A second call does nothing.

        Raises:
            InvalidOperationError: the engine is closed.
        """
        self._steps.start(self)
        return self

    def close(self, *, cancel: bool = False) -> None:
        """Take no more requests, finish those that were submitted, or cancel them, and end the thread.

        What `autosave` still has to write is written, for 5 seconds at most; tiers of the caller stay open. A second
        call does nothing, or continues the first if that was interrupted.
        """
        self._steps.close()
        if cancel:
            self._steps.cancel_all()
        self._steps.stop()
        while self.step():
            pass
        self._steps.release_pins()
        if self._events is not None:
            self._events.close()
        if self._autosaves and self.tiers is not None:
            self.tiers.close()

    def __enter__(self) -> BatchEngine:
        return self.start()

    def __exit__(self, kind: object, *exception: object) -> None:
        self.close(cancel=kind is not None)

    # -- reports --------------------------------------------------------------------------------------------

    @property
    def shared_block_size(self) -> int:
        """Tokens of a block of cached prefixes; 0: requests share none, since tokens are evicted."""
        return 0 if self._settings.budgets is not None else self._settings.block_size

    @property
    def max_prompt(self) -> int | None:
        """The most tokens of a prompt that there are positions and memory for; None: any number."""
        if self.max_positions is None:
            return None
        return bisect_right(range(1, self.max_positions + 1), self._pool.total_blocks, key=self._pool.blocks_for)

    @property
    def total_tokens(self) -> int:
        """Tokens that there is memory for: of requests that run and of cached prefixes together."""
        return self._pool.total_blocks * self._settings.block_size

    def stats(self) -> BatchStats:
        """The counters at the end of the last step, and blocks and requests that wait as they are now.

        Waits for no step, but for the attention of a layer.
        """
        found = self._steps.stats()
        return found if self._events is None else self._events.counted(found)

    @property
    def kv_events(self) -> KvEvents | None:
        """Where block events are read, with the ports that the system chose; None: nowhere."""
        return None if self._events is None else self._events.settings

    def namespace_stats(self) -> dict[Hashable, NamespaceStats]:
        """The counters of each namespace that has had requests, or has something cached; waits as `stats`.

        Of more than 4,096 with requests, the one without a request for longest is forgotten. If it comes back, it
        counts from zero, as counters do after a restart.
        """
        return self._steps.namespaces()

    def cache_stats(self) -> PrefixCacheStats:
        """As `PrefixCachedEngine.cache_stats`; a request that waits for blocks, or was preempted, looks up again."""
        return self._pool.stats()

    def clear_cache(self) -> None:
        """Drop every cached prefix, pinned ones too; running requests keep their blocks."""
        self._steps.release_pins()
        self._pool.clear()

    def save(self, path: str | os.PathLike[str], model: str | None = None) -> None:
        """Write the cached prefixes to a file; see `PrefixCachedEngine.save`, which writes the same format."""
        self._expect_all_kept("save")
        self._pool.save(path, self._settings.named(model))

    def load(self, path: str | os.PathLike[str], model: str | None = None, *, exact: bool = True) -> int:
        """Add the blocks of a saved file to the cached prefixes; see `PrefixCachedEngine.load`.

        Raises:
            InvalidOperationError: prefixes are cached already.
        """
        self._expect_all_kept("load")
        return self._pool.load(path, self._settings.named(model), exact=exact)

    def _expect_all_kept(self, call: str) -> None:
        budgets = self._settings.budgets
        if budgets is not None:
            raise InvalidOperationError(f"{call}: expected an engine that keeps all tokens, got {budgets.policy}")

    def memory(self) -> dict[str, int]:
        """Bytes: "weights" (0 for a model that does not say), "kv", "bookkeeping", "scratch", "huge"."""
        weights = getattr(self.model, "weights", None)
        products = {"scratch": getattr(weights, "scratch_bytes", 0), "huge": getattr(weights, "huge_bytes", 0)}
        read = getattr(weights, "nbytes", 0) + self.adapters.nbytes
        own = {"weights": read, **total(self._pool.memory(self._steps.running), products)}
        return total(own, self._drafter.memory())

    @property
    def keeps_states(self) -> bool:
        """Whether layers of the network keep a state, which `parts_at` of `submit` are for."""
        return self._pool.keeps_states

    @property
    def shares_prefixes(self) -> bool:
        """Whether requests share cached prefixes: not where a policy evicts tokens."""
        return self._settings.budgets is None

    @property
    def generates(self) -> bool:
        """Whether texts are continued: not where tokens see later ones, and texts are embedded alone."""
        return not self._whole

    @property
    def residual_length(self) -> int:
        """Tokens per group of the residual; 0: queries read all tokens as the cache stores them."""
        return self._settings.storage.residual_length

    __reduce_ex__ = refuse_copies("make another one over the same `model`")

    def __repr__(self) -> str:
        steps, blocks = self._steps, self._pool.count()
        num_blocks, free = sum(blocks.values()), blocks["free"]
        return (
            f"BatchEngine({type(self.model).__name__}, {self.config.num_layers} layers, {steps.num_running} running, "
            f"{steps.num_waiting} waiting, {num_blocks - free} of {num_blocks} blocks in use)"
        )

    def check(self) -> None:
        """Verify the invariants: of works, blocks and the prefix index; AssertionError names the broken one."""
        self._steps.check()
