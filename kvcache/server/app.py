"""The ASGI application: OpenAI's interface over an engine, with keys, limits and metrics."""

from __future__ import annotations

import json
from asyncio import CancelledError
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from hashlib import sha256
from typing import Any
from urllib.parse import urlsplit

from anyio import create_task_group, fail_after, move_on_after
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvcache.core.arguments import short
from kvcache.core.hosts import is_loopback
from kvcache.errors import OutOfMemoryError, QueueFullError
from kvcache.server.bodies import REFUSED, Body, choice, head, parse, refusal, too_many, usage
from kvcache.serving import BatchEngine, NewTokens, exposition
from kvcache.serving import Request as EngineRequest
from kvcache.serving.work import Work

__all__ = ["make_app"]

_ARRIVING, _READING = 30.0, 30.0  # seconds for a body; and beyond the time limit, for reading the end of an answer


def make_app(
    engine: BatchEngine, model: str, keys: Mapping[str, str] | None = None, *, max_body: int = 4 << 20,
    timeout: float = 600.0,
) -> Starlette:  # fmt: skip
    """An application with OpenAI's interface; it starts the engine, and closes it at its end.

    Args:
        engine: has a tokenizer; it has the limits of queue and memory.
        model: the name by which clients ask for the model.
        keys: API keys, and the namespace of each; namespaces share no cached prefixes. None: requests need
            no key, must address this machine as a loopback host, and share one namespace.
        max_body: the most bytes of a body.
        timeout: seconds from the arrival of a body to the last token of its answer.
    """
    # By digests: neither a time nor a message tells anything of a key.
    spaces = {sha256(key.encode()).digest(): space for key, space in (keys or {}).items()}
    statuses: Counter[int] = Counter()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await run_in_threadpool(engine.close, cancel=True)

    def namespace(request: Request) -> str | None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        found = spaces.get(sha256(key.strip().encode()).digest()) if scheme.lower() == "bearer" else None
        if found is None and keys is not None:
            raise HTTPException(401, "authorization: expected Bearer and a known key, got another")
        return found

    async def complete(chat: bool, request: Request) -> ASGIApp:
        space, data = namespace(request), await _read(request, max_body, min(_ARRIVING, timeout))
        return await run_in_threadpool(begin, data, chat, space)

    def begin(data: bytes, chat: bool, space: str | None) -> ASGIApp:
        """Queue the requests of a body, all or none."""
        body = parse(data, chat, engine.sampling_params)
        if body.model != model:
            raise HTTPException(404, f"model: expected {model}, got {short(body.model)}")
        answer = _Answer(body, engine.tokenizer, timeout + _READING)
        try:
            for prompt in body.prompts:
                tokens = engine.apply_chat_template(prompt, tokenize=True) if chat else prompt
                answer.requests.append(engine.submit(tokens, body.params, namespace=space, deadline=timeout, n=body.n))
        except BaseException as error:
            answer.cancel()
            count = body.n * len(body.prompts)
            if isinstance(error, QueueFullError) and count > error.max_queue:  # there is never room for all of it
                raise too_many(chat, error.max_queue, count) from None
            raise
        return answer

    async def models(request: Request) -> Response:
        """The list of one model, or under its name the model itself."""
        namespace(request)
        found = {"id": model, "object": "model", "created": 0, "owned_by": "kvcache"}
        asked = request.path_params.get("name", model)
        if asked != model:
            raise HTTPException(404, f"model: expected {model}, got {short(asked)}")
        return JSONResponse(found if request.path_params else {"object": "list", "data": [found]})

    async def health(request: Request) -> Response:
        good = engine.is_running
        return JSONResponse({"status": "ok" if good else "the engine does not run"}, 200 if good else 503)

    async def metrics(request: Request) -> Response:
        """What Prometheus reads. A key of the namespace `metrics` gets all namespaces, and another key its own."""
        own = namespace(request)
        stats, found = await run_in_threadpool(lambda: (engine.stats(), engine.namespace_stats()))
        found = {name: counts for name, counts in found.items() if own in (None, "metrics", name)}
        text = exposition(stats, found, http_responses=("status", statuses))
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def counting(app: ASGIApp) -> ASGIApp:
        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            begun = False

            async def note(message: Message) -> None:
                nonlocal begun
                if message["type"] == "http.response.start":
                    begun = True
                    statuses[message["status"]] += 1
                await send(message)

            try:
                await app(scope, receive, note)
            except Exception:
                if not begun:  # the application answers so to an error that nothing expects
                    statuses[500] += 1
                raise

        return counted

    routes = [
        Route("/v1/chat/completions", partial(complete, True), methods=["POST"]),
        Route("/v1/completions", partial(complete, False), methods=["POST"]),
        Route("/v1/models", models), Route("/v1/models/{name:path}", models), Route("/health", health),
        Route("/metrics", metrics),
    ]  # fmt: skip
    handlers: dict[Any, Any] = dict.fromkeys((*REFUSED, Exception), lambda request, error: refusal(error))
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    if keys is None:  # or a page that a browser shows could ask in its user's name, by a name of its own for us
        app.add_middleware(_only_local)
    app.add_middleware(counting)
    return app


def _only_local(app: ASGIApp) -> ASGIApp:
    """An application that takes requests whose Host is a loopback address or localhost."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else "localhost"
        if _is_local(host):
            return await app(scope, receive, send)
        error = HTTPException(400, f"host: expected a loopback address or localhost, got {short(host)}")
        await refusal(error)(scope, receive, send)

    return checked


def _is_local(host: str) -> bool:
    with suppress(ValueError):
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    return False


def _is_cut(work: Work) -> bool:
    """Whether memory ran out behind its first token; what it has is its answer then."""
    return isinstance(work.error, OutOfMemoryError) and work.num_tokens > work.num_prompt


async def _arrivals(request: EngineRequest, with_text: bool = True) -> AsyncIterator[NewTokens]:
    """As `arrivals` of the request, less the ends of samples that failed; raises unless these are cut alone."""
    try:
        async for new in request.arrivals(with_text=with_text):
            if new.finish_reason != "error" or _is_cut(request.works[new.index]):
                yield new
    except OutOfMemoryError:
        if not all(work.error is None or _is_cut(work) for work in request.works):
            raise


async def _read(request: Request, most: int, seconds: float) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # which no page of another origin may send
        raise HTTPException(415, f"content-type: expected application/json, got {kind[:100]}")
    data, announced = bytearray(), int(request.headers.get("content-length", 0))
    try:
        with fail_after(seconds):
            async for chunk in request.stream():
                data += chunk
                if max(len(data), announced) > most:
                    raise HTTPException(413, f"body: expected at most {most} bytes, got more")
    except (TimeoutError, ClientDisconnect):
        raise HTTPException(408, "body: expected all of it in time, got a part of it") from None
    return bytes(data)


class _Answer:
    """An ASGI application that answers a body. A client that leaves cancels its requests, within a step.

    A server that ends cancels this: an answer that has not begun is an error of status 500, and a stream ends with one.
    """

    def __init__(self, body: Body, tokenizer: Any, seconds: float) -> None:
        self._body, self._choice, self._seconds = body, partial(choice, body, tokenizer), seconds
        self.requests: list[EngineRequest] = []  # one for each prompt

    def cancel(self) -> None:
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
                        await (await self._whole())(scope, receive, note)
                tasks.cancel_scope.cancel()
        except CancelledError:
            error = refusal(HTTPException(500, "answer: expected one, got none: the server ends"))
            if not sent:
                await error(scope, receive, send)
            elif self._body.stream and sent[0].get("more_body", True):
                await send({"type": "http.response.body", "body": b"data: %b\n\ndata: [DONE]\n\n" % bytes(error.body)})
        finally:
            self.cancel()

    async def _whole(self) -> Response:
        choices: list[Any] = []
        try:
            for request in self.requests:
                async for _ in _arrivals(request, with_text=False):
                    pass
                for each in request.completions_so_far():
                    choices.append(self._choice(len(choices), each, request.prompt[-1:]))
            return JSONResponse({**head(self._body), "choices": choices, "usage": usage(self.requests)})
        except Exception as error:
            return refusal(error, running=True)

    async def _events(self) -> AsyncIterator[str]:
        common = head(self._body) | ({"usage": None} if self._body.with_usage else {})
        try:
            for number, request in enumerate(self.requests):
                last: dict[int, list[int]] = {}  # the token before the next one, of each sample
                async for new in _arrivals(request):
                    before, first = last.get(new.index, request.prompt[-1:]), new.index not in last
                    last[new.index] = new.tokens[-1:] or before
                    found = self._choice(number * request.n + new.index, new, before, first)
                    if new.text or new.logprobs or new.finish_reason or first:
                        yield f"data: {json.dumps({**common, 'choices': [found]})}\n\n"
            if self._body.with_usage:
                yield f"data: {json.dumps({**common, 'choices': [], 'usage': usage(self.requests)})}\n\n"
        except Exception as error:
            yield f"data: {bytes(refusal(error, running=True).body).decode()}\n\n"
        yield "data: [DONE]\n\n"
