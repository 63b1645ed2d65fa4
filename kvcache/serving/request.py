"""A request as its caller sees it: tokens as they come, the result, the metrics."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import Any, Protocol, cast

from kvcache.engine.completion import Completion, TokenLogprobs
from kvcache.errors import InvalidOperationError
from kvcache.serving.work import Drawing, FinishReason, Work
from kvcache.support.copies import refuse_copies

__all__ = ["Incoming", "NewTokens", "Pending", "Request", "RequestMetrics"]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """A snapshot of the measurements of a request, in seconds of the engine's clock.

    Attributes:
        queued: from `submit` until its first token ran; None: it waits.
        ttft: from `submit` until the first new token; None: there is none.
        itl: the times between new tokens, of all samples.
        cached_tokens: tokens of the prompt that did not run, since their K and V were cached.
        preemptions: how often it gave up its memory and began again.
        prompt_tokens, new_tokens: tokens of the prompt, and new ones of all samples.
    """

    queued: float | None
    ttft: float | None
    itl: tuple[float, ...]
    cached_tokens: int
    preemptions: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The new tokens of one sample of a request since the item before.

    Attributes:
        index: the number of the sample, from 0 on.
        tokens: its new tokens.
        logprobs: one `TokenLogprobs` for each of these; None unless `SamplingParams.logprobs` asked for them.
        finish_reason: why it ended, as of `Request`; None: more will come.
        text: what they add to the text: whole characters, and nothing that may begin a stop string. None without a
            tokenizer.
    """

    index: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    text: str | None


class Stepping(Protocol):
    """The steps that works run in; see `Steps`."""

    @property
    def clock(self) -> Callable[[], float]: ...
    @property
    def is_running(self) -> bool: ...
    def step(self) -> bool: ...
    def cancel(self, pending: Pending) -> None: ...


class Pending:
    """Works of one call, and those that wait for them.

    Without a thread of the engine, waiting steps the engine.

    Attributes:
        works: of the call.
    """

    def __init__(self, steps: Stepping, works: Sequence[Work]) -> None:
        self._steps, self.works = steps, tuple(works)
        self._waiters: deque[Callable[[], None]] = deque()  # of threads
        self._calls: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []  # in event loops, which add to it

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for any reason."""
        return all(work.reason is not None for work in self.works)

    def cancel(self) -> None:
        """End it, at the latest after the running step; it keeps its tokens. Does nothing after its end."""
        self._steps.cancel(self)

    def raise_error(self) -> None:
        """Raise what a work has failed with."""
        for work in self.works:
            if work.error is not None:
                raise work.error.with_traceback(work.trace)

    def expect_end(self) -> None:
        """Raise what a work has failed with. InvalidOperationError: it was cancelled."""
        self.raise_error()
        if any(work.reason == "cancelled" for work in self.works):
            raise InvalidOperationError("expected texts that run to their end, got one that was cancelled")

    def wait(self, until: Callable[[], bool], timeout: float | None = None) -> None:
        """Wait until a condition holds; TimeoutError after `timeout` seconds."""
        steps = self._steps
        stop = None if timeout is None else steps.clock() + timeout
        while not until():
            left = None if stop is None else stop - steps.clock()
            if left is not None and left <= 0:
                raise TimeoutError(f"timeout: expected the end within {timeout} s, got none")
            if not steps.is_running:
                steps.step()
                continue
            woken: SimpleQueue[None] = SimpleQueue()
            self._waiters.append(lambda woken=woken: woken.put(None))  # type: ignore[misc]
            if until():
                return
            with suppress(Empty):  # the thread may have ended meanwhile
                woken.get(timeout=1.0 if left is None else min(left, 1.0))

    async def wait_in_loop(self, until: Callable[[], bool]) -> None:
        """Wait in an event loop, which is free meanwhile, until this is woken, unless a condition holds."""
        arrived = (loop := asyncio.get_running_loop()).create_future()
        self._calls.append((loop, lambda: None if arrived.done() else arrived.set_result(None)))
        if not until():
            await arrived

    async def at_each_step(self, take: Callable[[], bool]) -> None:
        """Call `take` in the running event loop, now and after each step with a token or an end, until that is False.

        The loop calls it: no task is woken, which takes longer than most of what callers do with a token.

        Raises:
            Exception: what `take` raises.
        """
        if not self._steps.is_running:
            while take():
                await asyncio.to_thread(self._steps.step)
            return
        turns = _Turns(self._calls, take)
        turns()
        await turns.until_ended()

    @staticmethod
    def wake_all(some: Iterable[Pending]) -> None:
        """Wake all that wait for some calls now: there is a new token, or the end.

        Who comes meanwhile has seen it, and waits for the next one. An event loop gets one call, however many wait in
        it: it runs at once, and the thread that calls waits for it.
        """
        found = [(each, list(each._calls)) for each in dict.fromkeys(some)]
        loops: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        for each, calls in found:
            for _ in range(len(each._waiters)):
                with suppress(IndexError):  # another thread has it
                    each._waiters.popleft()()
            for loop, call in calls:
                loops.setdefault(loop, []).append(call)
        for loop, due in loops.items():
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_call_all, due)
        for each, calls in found:  # not before: an interrupt leaves nobody waiting
            del each._calls[: len(calls)]


def _call_all(calls: Iterable[Callable[[], None]]) -> None:
    for call in calls:
        call()


class _Turns:
    """Calls a function whenever it is woken, until that returns False or raises, or nobody waits for it any more.

    Args:
        calls: of the call of the engine that wakes it.
        take: the function.
    """

    def __init__(
        self, calls: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]], take: Callable[[], bool]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls, self._take, self._ended = calls, take, self._loop.create_future()

    def __call__(self) -> None:
        if self._ended.done():
            return
        self._calls.append((self._loop, self))  # before it looks: no token comes unseen
        try:
            if not self._take():
                self._ended.set_result(None)
        except Exception as error:
            self._ended.set_exception(error)

    async def until_ended(self) -> None:
        """Wait for the end; then what is left of this in the call of the engine keeps nothing alive."""
        try:
            await self._ended
        finally:
            del self._take


class Request(Pending):
    """The result of `BatchEngine.submit`: an iterable, and asynchronous iterable, of the new tokens.

    Without a thread of the engine, waiting for tokens steps the engine. A request that is dropped runs to its end.
    """

    def __init__(self, steps: Stepping, samples: Sequence[Drawing]) -> None:
        super().__init__(steps, samples)
        self._samples = tuple(samples)

    @property
    def n(self) -> int:
        """The number of samples."""
        return len(self._samples)

    @property
    def prompt(self) -> list[int]:
        """The token ids of the prompt."""
        first = self._samples[0]
        prompt: list[int] = first.tokens[: first.num_prompt].tolist()
        return prompt

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, of several samples the first one: "stop", "length", "cancelled", "deadline" or "error"."""
        return self._samples[0].reason

    @property
    def tokens(self) -> list[int]:
        """The new tokens so far, of several samples those of the first one."""
        return self._samples[0].new_tokens

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """A `TokenLogprobs` for each token of the prompt, the first one None; None: `submit` did not ask for them."""
        return self._samples[0].prompt_logprobs

    @property
    def reasons(self) -> list[FinishReason | None]:
        """Why each sample ended."""
        return [sample.reason for sample in self._samples]

    @property
    def metrics(self) -> RequestMetrics:
        """The measurements so far."""
        first = self._samples[0]
        times = [sample.times[:] for sample in self._samples]
        starts = [each for each in (sample.started for sample in self._samples) if each is not None]
        firsts = [each[0] for each in times if each]
        return RequestMetrics(
            min(starts) - first.arrival if starts else None,
            min(firsts) - first.arrival if firsts else None,
            tuple(b - a for each in times for a, b in pairwise(each)),
            first.cached_tokens,
            sum(sample.preemptions for sample in self._samples),
            first.num_prompt,
            sum(sample.num_new for sample in self._samples),
        )

    # -- the result -----------------------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end: the new tokens, a list of ints; with `n` above 1 a list of such lists.

        A request that was cancelled or whose deadline came gives the tokens that it has.

        Raises:
            TimeoutError: it has not ended after `timeout` seconds. It goes on.
            Exception: what it failed with.
        """
        self.wait(lambda: self.is_finished, timeout)
        self.raise_error()
        results = [sample.new_tokens for sample in self._samples]
        return results if self.n > 1 else results[0]

    def text(self, timeout: float | None = None) -> Any:
        """Wait as `result`; the text up to a stop string, a str; with `n` above 1 a list. None without a tokenizer."""
        self.result(timeout)
        texts = [sample.text for sample in self._samples]
        return texts if self.n > 1 else texts[0]

    def completions(self, timeout: float | None = None) -> list[Completion]:
        """Wait as `result`; a `Completion` for each sample, as `InferenceEngine.complete` returns it.

        `finish_reason` may also be "cancelled" or "deadline".
        """
        self.result(timeout)
        return self.completions_so_far()

    def completions_so_far(self) -> list[Completion]:
        """As `completions`, of what each sample has now; `finish_reason` may also be "error", or None."""
        return [
            Completion(
                each.new_tokens, each.text, cast(Any, each.reason), each.logprobs, each.cached_tokens, each.segments
            )
            for each in self._samples
        ]

    # -- tokens as they come --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        """The tokens from the first on; each iterator has them all. InvalidOperationError: several samples."""
        self._expect_one()
        return self._stream()

    def _stream(self) -> Iterator[int]:
        given = 0
        while True:
            ended, new = self.is_finished, self._samples[0].new_tokens[given:]
            yield from new
            given += len(new)
            if ended:
                break
            if not new:
                self.wait(lambda: self.is_finished or self._samples[0].num_new > given)  # noqa: B023
        self.raise_error()

    def __aiter__(self) -> AsyncIterator[int]:
        """As `__iter__`; the event loop is free while it waits."""
        self._expect_one()
        return self._stream_to_loop()

    async def _stream_to_loop(self) -> AsyncIterator[int]:
        async for new in self.arrivals(with_text=False):
            for token in new.tokens:
                yield token

    async def arrivals(self, *, with_text: bool = True) -> AsyncIterator[NewTokens]:
        """The new tokens of every sample, as they come; the last item of each sample has its `finish_reason`.

        The event loop is free while it waits. No step waits for the caller: one that is late finds several tokens in
        an item.

        Args:
            with_text: whether items have a text, which takes time.

        Raises:
            Exception: what it failed with, after the last item.
        """
        incoming = Incoming(self._samples, with_text=with_text)
        while not incoming.ended:
            before = self._progress()
            for new in incoming.take():
                yield new
            if not incoming.ended:
                await self._next_step(before)
        self.raise_error()

    def incoming(self) -> Incoming:
        """The new tokens of every sample, for callers that take them by `at_each_step`; they have no texts."""
        return Incoming(self._samples, with_text=False)

    def _progress(self) -> int:
        """A number that is another one after each new token and each end."""
        return sum(sample.num_new + (sample.reason is not None) for sample in self._samples)

    async def _next_step(self, before: int) -> None:
        if not self._steps.is_running:
            if self._progress() == before:
                await asyncio.to_thread(self._steps.step)
            return
        await self.wait_in_loop(lambda: self._progress() != before)

    def _expect_one(self) -> None:
        if self.n > 1:
            raise InvalidOperationError(f"expected one sample to iterate, got {self.n}; `result` returns them")

    __reduce_ex__ = refuse_copies("`result` returns its tokens")

    def __repr__(self) -> str:
        state = self.finish_reason if self.is_finished else "waits" if self.metrics.queued is None else "runs"
        new = ", ".join(str(sample.num_new) for sample in self._samples)
        return f"Request({self._samples[0].num_prompt} tokens of prompt, {new} new tokens, {state})"


class Incoming:
    """The new tokens of some samples that were not taken yet.

    Args:
        samples: of a request.
        with_text: whether items have a text.
    """

    def __init__(self, samples: Sequence[Drawing], *, with_text: bool) -> None:
        self._samples = samples
        self._given = [0] * len(samples)
        self._alive = list(range(len(samples)))
        self._streams = [sample.new_text() if with_text else None for sample in samples]

    @property
    def ended(self) -> bool:
        """Whether the ends of all samples were taken."""
        return not self._alive

    def take(self) -> Iterator[NewTokens]:
        """The new tokens; all of them are to be read before the next call."""
        found: list[tuple[int, FinishReason | None, list[int]]] = []
        for index in reversed(self._alive):  # the first sample has a token before the others: it is read after them
            sample = self._samples[index]
            reason = sample.reason
            found.append((index, reason, sample.tokens[sample.num_prompt + self._given[index] :].tolist()))
        for index, reason, tokens in reversed(found):
            sample, start = self._samples[index], self._given[index]
            self._given[index] += len(tokens)
            if reason is not None:
                self._alive.remove(index)
            if tokens or reason is not None:
                logprobs = None if sample.logprobs is None else sample.logprobs[start : self._given[index]]
                stream = self._streams[index]
                text = None if stream is None else stream.extend(tokens, ended=reason is not None)
                yield NewTokens(index, tokens, logprobs, reason, text)
