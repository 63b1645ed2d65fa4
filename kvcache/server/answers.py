"""The answer to a body: whole, or as a stream of server-sent events. Neither holds up the event loop."""

from __future__ import annotations

import time
from asyncio import CancelledError
from collections.abc import AsyncIterator, Iterator, Sequence
from secrets import token_hex
from typing import Any

from anyio import create_task_group, move_on_after
from anyio.lowlevel import checkpoint
from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from kvcache.engine.completion import TokenLogprobs
from kvcache.errors import OutOfMemoryError
from kvcache.server.bodies import Body
from kvcache.server.limits import Threads
from kvcache.server.logprobs import Offsets, TokenTexts, of_chat, of_texts
from kvcache.server.refusals import ending, refusal, too_large
from kvcache.server.written import JsonObject, pieces, written
from kvcache.serving import NewTokens
from kvcache.serving import Request as EngineRequest
from kvcache.serving.work import Work

__all__ = ["HttpAnswer", "head", "usage"]

_EVENT = 16  # tokens of an event, which with 20 log-probabilities each take milliseconds


class HttpAnswer:
    """An ASGI application that answers a body. A client that leaves cancels its requests, within a step.

    A server that ends cancels this: an answer that has not begun is an error of status 503, and a stream ends with one.

    Args:
        body: of the client.
        texts: of the engine's tokens.
        threads: that make whole answers.
        seconds: how long it may take, with the time that the client takes to read it.

    Attributes:
        requests: of the engine, one for each prompt.
    """

    def __init__(self, body: Body, texts: TokenTexts, threads: Threads, seconds: float) -> None:
        self._body, self._texts, self._threads, self._seconds = body, texts, threads, seconds
        self.requests: list[EngineRequest] = []

    def cancel(self) -> None:
        """End its requests."""
        for request in self.requests:
            request.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        sent: list[Message] = []

        async def note(message: Message) -> None:
            sent[:] = [message]
            await send(message)

        try:
            async with create_task_group() as tasks:
                tasks.start_soon(watch)
                with move_on_after(self._seconds):
                    if self._body.stream:
                        headers = {"cache-control": "no-cache"}
                        await StreamingResponse(self._events(), 200, headers, "text/event-stream").stream_response(note)
                    else:
                        await self._whole(scope, receive, note)
                tasks.cancel_scope.cancel()
        except CancelledError:
            error = refusal(ending())
            if not sent:
                await error(scope, receive, send)
            elif self._body.stream and sent[0].get("more_body", True):
                await send({"type": "http.response.body", "body": b"data: %b\n\ndata: [DONE]\n\n" % bytes(error.body)})
        finally:
            self.cancel()

    # -- whole ----------------------------------------------------------------------------------------------

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer when it has ended: as one piece with a length, or in pieces as they are made."""
        try:
            for request in self.requests:
                async for _ in self._arrivals(request):
                    pass
            made = pieces(await run_sync(self._answer, limiter=self._threads.answers))
            first, second = await self._next(made), await self._next(made)
        except Exception as error:
            return await refusal(error, running=True)(scope, receive, send)
        if second is None:
            return await Response(first, 200, None, "application/json")(scope, receive, send)

        async def rest() -> AsyncIterator[bytes]:
            yield first or b""
            yield second
            while (piece := await self._next(made)) is not None:
                yield piece

        await StreamingResponse(rest(), 200, None, "application/json").stream_response(send)

    async def _next(self, made: Iterator[bytes]) -> bytes | None:
        return await run_sync(next, made, None, limiter=self._threads.answers)

    def _answer(self) -> JsonObject:
        choices = [
            self._choice(number * request.n + index, request, work)
            for number, request in enumerate(self.requests)
            for index, work in enumerate(request.works)
        ]
        return JsonObject(**head(self._body), choices=iter(choices), usage=usage(self.requests))

    def _choice(self, number: int, request: EngineRequest, work: Any) -> JsonObject:
        reason = _reason(work.reason, is_empty=not work.num_new)
        logprobs = None
        if (found := work.logprobs) is not None:
            logprobs = self._logprobs(work.new_tokens, found, Offsets(self._texts, _prompt(work)))
        return JsonObject(index=number, **self._content(work.text, True), logprobs=logprobs, finish_reason=reason)

    # -- streams --------------------------------------------------------------------------------------------

    async def _events(self) -> AsyncIterator[str]:
        common = head(self._body) | ({"usage": None} if self._body.with_usage else {})
        try:
            for number, request in enumerate(self.requests):
                streams = [_Stream(self, number * request.n + i, work) for i, work in enumerate(request.works)]
                async for new in self._arrivals(request):
                    for found in streams[new.index].choices(new):
                        yield f"data: {''.join(written(JsonObject(**common, choices=iter([found]))))}\n\n"
                        await checkpoint()  # others have their turn between two events
            if self._body.with_usage:
                yield f"data: {''.join(written({**common, 'choices': [], 'usage': usage(self.requests)}))}\n\n"
        except Exception as error:
            yield f"data: {bytes(refusal(error, running=True).body).decode()}\n\n"
        yield "data: [DONE]\n\n"

    # -- both -----------------------------------------------------------------------------------------------

    async def _arrivals(self, request: EngineRequest) -> AsyncIterator[NewTokens]:
        """The tokens of a request as they come, less the ends of samples that failed; raises unless these are cut."""
        try:
            async for new in request.arrivals(with_text=False):
                if new.finish_reason != "error" or _is_cut(request.works[new.index]):
                    yield new
        except OutOfMemoryError:
            if not all(work.error is None or _is_cut(work) for work in request.works):
                raise too_large(self._body.field, request.works[0].num_prompt) from None

    def _content(self, text: str | None, first: bool) -> dict[str, Any]:
        if not self._body.chat:
            return {"text": text}
        role = {"role": "assistant"} if first else {}
        return {"delta" if self._body.stream else "message": {**role, "content": text}}

    def _logprobs(self, tokens: Sequence[int], found: Sequence[TokenLogprobs], offsets: Offsets) -> JsonObject:
        if self._body.chat:
            return of_chat(self._texts, tokens, found)
        return of_texts(self._texts, tokens, found, offsets)


class _Stream:
    """The events of one choice of an answer."""

    def __init__(self, answer: HttpAnswer, number: int, work: Any) -> None:
        self._answer, self._number, self._first = answer, number, True
        self._text, self._offsets = work.new_text(), Offsets(answer._texts, _prompt(work))

    def choices(self, new: NewTokens) -> Iterator[JsonObject]:
        """The choices of events for what is new, each of a few tokens."""
        reason = _reason(new.finish_reason, is_empty=self._first and not new.tokens)
        for start in range(0, max(1, len(new.tokens)), _EVENT):
            stop = start + _EVENT
            tokens, ended = new.tokens[start:stop], reason is not None and stop >= len(new.tokens)
            text, logprobs = self._text.extend(tokens, ended=ended), None
            if new.logprobs is not None:
                logprobs = self._answer._logprobs(tokens, new.logprobs[start:stop], self._offsets)
            if text or logprobs or ended or self._first:
                content = self._answer._content(text, self._first)
                yield JsonObject(
                    index=self._number, **content, logprobs=logprobs, finish_reason=reason if ended else None
                )
            self._first = False


def _prompt(work: Work) -> Any:
    return work.tokens[: work.num_prompt]


def _is_cut(work: Work) -> bool:
    """Whether memory ran out behind its first token; what it has is its answer then."""
    return isinstance(work.error, OutOfMemoryError) and work.num_tokens > work.num_prompt


def _reason(reason: str | None, *, is_empty: bool) -> str | None:
    """Why an answer ended, in the words of the interface. HTTPException: it ended without any."""
    if reason == "cancelled":
        raise ending()
    if reason == "deadline" and is_empty:
        raise HTTPException(503, "answer: expected one, got none: no token within the time limit")
    return "length" if reason in ("deadline", "error") else reason  # of errors: memory ran out behind a token


def head(body: Body) -> dict[str, Any]:
    """The fields that all parts of an answer have."""
    kind, prefix = ("chat.completion", "chatcmpl") if body.chat else ("text_completion", "cmpl")
    kind += ".chunk" if body.chat and body.stream else ""
    return {"id": f"{prefix}-{token_hex(12)}", "object": kind, "created": int(time.time()), "model": body.model}


def usage(requests: Sequence[EngineRequest]) -> dict[str, Any]:
    """The numbers of tokens of an answer."""
    firsts = [request.works[0] for request in requests]
    new = sum(work.num_tokens - work.num_prompt for request in requests for work in request.works)
    counts = {"prompt_tokens": sum(work.num_prompt for work in firsts), "completion_tokens": new}
    details = {"cached_tokens": sum(work.cached_tokens for work in firsts)}
    return {**counts, "total_tokens": sum(counts.values()), "prompt_tokens_details": details}
