"""The answer to a body: whole, or as a stream of server-sent events. Neither holds up the event loop."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

from anyio import create_task_group, move_on_after
from anyio.lowlevel import checkpoint
from anyio.to_thread import run_sync
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from kvcache.errors import InvalidOperationError, OutOfMemoryError
from kvcache.sampling.dialects.spoken_answer import SpokenAnswer
from kvcache.server.asked import Asked
from kvcache.server.body_parts import BodyParts
from kvcache.server.forms import TIMED_OUT, Choice, Form, Whole, reason_of
from kvcache.server.limits import Threads
from kvcache.server.refusals import ending, no_adapter
from kvcache.server.sent_events import SentEvents
from kvcache.server.written import JsonObject, pieces
from kvcache.serving import NewTokens
from kvcache.serving import Request as EngineRequest
from kvcache.serving.work import Work

__all__ = ["HttpAnswer", "WholeAnswer"]

_EVENT = 16  # tokens of one message, which with 20 log-probabilities each take milliseconds


class HttpAnswer:
    """An ASGI application that answers a body. A client that leaves cancels its requests, within a step.

    A server that ends cancels this: an answer that has not begun is an error of status 503, and a stream ends with one.

    Args:
        form: writes it.
        asked: the answer.
        readers: for each prompt, what makes the reader of a sample's tokens.
        threads: that make whole answers.
        seconds: how long it may take, with the time that the client takes to read it.

    Attributes:
        requests: of the engine, one for each prompt.
    """

    def __init__(
        self, form: Form, asked: Asked, readers: Sequence[Callable[[], SpokenAnswer]], threads: Threads, seconds: float
    ) -> None:
        self._form, self._asked, self._readers, self._threads, self._seconds = form, asked, readers, threads, seconds
        self.requests: list[EngineRequest] = []

    def cancel(self) -> None:
        """End its requests."""
        for request in self.requests:
            request.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state.update(requests=self.requests, asked=self._asked)
        begun = ended = False

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            state["left"] = not ended
            tasks.cancel_scope.cancel()

        async def note(message: Message) -> None:
            nonlocal begun, ended
            begun = True
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        stream = SentEvents(note, self._form.ping, BodyParts.of(scope))
        try:
            async with create_task_group() as tasks:
                tasks.start_soon(watch)
                with move_on_after(self._seconds):
                    if self._asked.stream:
                        tasks.start_soon(stream.live)
                        await self._stream(stream)
                    else:
                        await self._whole(scope, receive, note)
                tasks.cancel_scope.cancel()
        except CancelledError:
            if not begun:
                await self._form.refusal(ending())(scope, receive, send)
            elif stream.is_open:
                await stream.end("".join(self._form.fail(ending())))
        finally:
            self.cancel()

    # -- whole ----------------------------------------------------------------------------------------------

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer when it has ended: as one piece with a length, or in pieces as they are made."""
        try:
            for request in self.requests:
                await request.at_each_step(partial(_is_running, request))
                self._raise_error(request)
            timed = any(work.reason == "deadline" for request in self.requests for work in request.works)
            answer = await WholeAnswer.begun(self._answer, self._threads, TIMED_OUT if timed else None)
        except Exception as error:
            return await self._form.refusal(error, running=True)(scope, receive, send)
        await answer(scope, receive, send)

    def _answer(self) -> JsonObject:
        found = []
        for choice in self._choices():
            work = choice.work
            reason = reason_of(work.reason, is_empty=not work.num_new)
            found.append(Whole(choice, choice.spoken.extend(work.new_tokens, ended=True), reason))
        return self._form.whole(self.requests, found)

    def _choices(self) -> list[Choice]:
        requests = zip(self.requests, self._readers, strict=True)
        samples = [(work, read()) for request, read in requests for work in request.works]
        return [Choice(number, work, spoken) for number, (work, spoken) in enumerate(samples)]

    # -- streams --------------------------------------------------------------------------------------------

    async def _stream(self, stream: SentEvents) -> None:
        choices, ended = self._choices(), False
        await stream.begin()
        try:
            if first := "".join(self._form.begin(self.requests)):
                await stream.write(first)
            for number, request in enumerate(self.requests):
                await self._follow(request, choices[number * request.n :], stream)
            ended = True
            last = "".join(self._form.end(self.requests, choices))
        except Exception as error:
            if ended:
                raise
            last = "".join(self._form.fail(error))
        await stream.end(last)

    async def _follow(self, request: EngineRequest, choices: Sequence[Choice], stream: SentEvents) -> None:
        """Send what is new in a request, step by step, until it ends: at once, as long as its client keeps up."""
        incoming = request.incoming()
        parts: Iterator[tuple[int, str]] = iter(())

        def take() -> bool:
            nonlocal parts
            parts = self._parts(choices, incoming.take())
            for place, events in parts:
                if place or not stream.write_at_once(events):
                    parts = chain([(place, events)], parts)
                    return False
            return not incoming.ended

        while not incoming.ended:
            await request.at_each_step(take)
            for place, events in parts:
                if place:
                    await checkpoint()  # others have their turn between two parts of one step
                await stream.write(events)
        self._raise_error(request)

    def _parts(self, choices: Sequence[Choice], arrived: Iterable[NewTokens]) -> Iterator[tuple[int, str]]:
        """The events for what has arrived, less the ends of samples that failed, with their places in their samples."""
        for new in arrived:
            choice = choices[new.index]
            if new.finish_reason != "error" or _is_cut(choice.work):
                yield from enumerate(self._new(choice, new))

    def _new(self, choice: Choice, new: NewTokens) -> Iterator[str]:
        """The events for what is new in a sample, those of a few tokens together."""
        is_empty = choice.work.num_new == len(new.tokens) == 0
        reason = reason_of(new.finish_reason, is_empty=is_empty)
        for start in range(0, max(1, len(new.tokens)), _EVENT):
            stop = start + _EVENT
            tokens, ended = new.tokens[start:stop], reason is not None and stop >= len(new.tokens)
            found = choice.spoken.extend(tokens, ended=ended)
            logprobs = None if new.logprobs is None else new.logprobs[start:stop]
            details = self._form.details(choice, tokens, logprobs)
            if events := "".join(self._form.events(choice, found, details, reason if ended else None)):
                yield events

    # -- both -----------------------------------------------------------------------------------------------

    def _raise_error(self, request: EngineRequest) -> None:
        """Raise what a request has failed with, unless its samples are cut."""
        try:
            request.raise_error()
        except OutOfMemoryError:
            if not all(work.error is None or _is_cut(work) for work in request.works):
                raise self._form.too_large(request.works[0].whole_prompt) from None
        except InvalidOperationError:
            if (name := self._asked.adapter) is None or not any(map(_is_unloaded, request.works)):
                raise
            raise no_adapter(name) from None


class WholeAnswer:
    """An ASGI application that sends JSON: as one piece with a length, or in pieces as they are made.

    Args:
        made: the pieces behind the first ones.
        first: these, at most two.
        threads: that make the others.
        headers: of the response.
    """

    def __init__(
        self, made: Iterator[bytes], first: Sequence[bytes], threads: Threads, headers: Mapping[str, str] | None
    ) -> None:
        self._made, self._first, self._threads, self._headers = made, first, threads, headers

    @classmethod
    async def begun(
        cls, make: Callable[[], JsonObject], threads: Threads, headers: Mapping[str, str] | None = None
    ) -> WholeAnswer:
        """The answer that `make` returns, its first pieces made; its errors are those of `make`."""
        made = pieces(await run_sync(make, limiter=threads.answers))
        first = [each for each in (await _next(made, threads), await _next(made, threads)) if each is not None]
        return cls(made, first, threads, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self._first) < 2:
            return await Response(self._first[0], 200, self._headers, "application/json")(scope, receive, send)
        # Another task reads `receive`.
        await StreamingResponse(self._pieces(), 200, self._headers, "application/json").stream_response(send)

    async def _pieces(self) -> AsyncIterator[bytes]:
        for each in self._first:
            yield each
        while (piece := await _next(self._made, self._threads)) is not None:
            yield piece


async def _next(made: Iterator[bytes], threads: Threads) -> bytes | None:
    return await run_sync(next, made, None, limiter=threads.answers)


def _is_running(request: EngineRequest) -> bool:
    return not request.is_finished


def _is_unloaded(work: Work) -> bool:
    """Whether the adapter of a text was unloaded as it ran."""
    return work.adapter is not None and not work.adapter.loaded.is_loaded


def _is_cut(work: Work) -> bool:
    """Whether memory ran out behind its first token; what it has is its answer then."""
    return isinstance(work.error, OutOfMemoryError) and work.num_tokens > work.num_prompt
