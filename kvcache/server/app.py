"""The ASGI application: OpenAI's interface over an engine, with keys, limits and metrics."""

from __future__ import annotations

from asyncio import CancelledError
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvcache.errors import GrammarError, OutOfMemoryError, QueueFullError
from kvcache.grammar import json_object
from kvcache.server.answers import HttpAnswer
from kvcache.server.api_keys import Keys, Label
from kvcache.server.bodies import Body, parse
from kvcache.server.completion_form import CompletionForm
from kvcache.server.constraints import grammar_refused, knows_grammars
from kvcache.server.limits import BodyReader, Threads
from kvcache.server.logprobs import TokenTexts
from kvcache.server.prompts import Prompts
from kvcache.server.refusals import REFUSED, ending, refusal, too_large, too_many
from kvcache.server.voices import Voices
from kvcache.serving import BatchEngine, exposition
from kvcache.support.arguments import short
from kvcache.support.hosts import is_loopback

__all__ = ["make_app"]

_ARRIVING, _READING = 30.0, 30.0  # seconds for a body; and beyond the time limit, for reading the end of an answer


def make_app(
    engine: BatchEngine, model: str, keys: Mapping[str, str | None] | None = None, *, max_body: int = 4 << 20,
    max_bodies: int = 64 << 20, timeout: float = 600.0, plain_special_tokens: bool = False,
    tool_parser: str | None = None,
) -> Starlette:
    """An application with OpenAI's interface; it starts the engine, and closes it at its end.

    Args:
        engine: has a tokenizer; it has the limits of queue and memory.
        model: the name by which clients ask for the model.
        keys: API keys, and the namespace of each; namespaces share no cached prefixes. None for a namespace: the key
            has one of its own. None for `keys`: requests need no key, must address this machine as a loopback host,
            and share one namespace.
        max_body: the most bytes of a body.
        max_bodies: the most bytes of all bodies that are on their way, beyond the first 64 KiB of each.
        timeout: seconds from the arrival of a body to the last token of its answer.
        plain_special_tokens: whether special tokens in the texts of users are text; see `PlainText`.
        tool_parser: the dialect in which the network writes thoughts and calls, a name of `DIALECTS`; None: that of its
            chat template.
    """
    known = None if keys is None else Keys(keys)
    bodies, threads = BodyReader(max_body, max(max_body, max_bodies)), Threads()
    prompts, texts = Prompts(engine, plain_special_tokens), TokenTexts(engine.tokenizer)
    voices = Voices(engine.tokenizer, engine.chat_template, tool_parser)
    statuses: Counter[int] = Counter()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if knows_grammars():
            with suppress(GrammarError):  # a tokenizer that llguidance does not read: each request is told
                await run_sync(engine.prepare_grammar, json_object())  # no thread runs while it reads the vocabulary
        engine.start()
        try:
            yield
        finally:
            await run_sync(partial(engine.close, cancel=True))

    def namespace(request: Request) -> str | None:
        return None if known is None else known.namespace(request.headers.get("authorization"))

    async def complete(chat: bool, request: Request) -> ASGIApp:
        space = namespace(request)
        async with bodies.body(request, min(_ARRIVING, timeout)) as data:
            limiter = threads.for_body(len(data))
            found = await run_sync(begin, data, chat, space, limiter=limiter)
            if not isinstance(found, Body):
                return found
            await run_sync(compiled, found.params.grammar, limiter=threads.grammars)
            return await run_sync(queued, found, space, limiter=limiter)

    def begin(data: bytearray, chat: bool, space: Hashable) -> Body | ASGIApp:
        """Queue the requests of a body; one with a grammar comes back, since its compilation may take long."""
        body = parse(data, chat, engine.sampling_params, engine.max_positions)
        if body.model != model:
            raise HTTPException(404, f"model: expected {model}, got {short(body.model)}")
        return queued(body, space) if body.params.grammar is None else body

    def compiled(grammar: Any) -> None:
        try:
            engine.prepare_grammar(grammar)
        except GrammarError as error:
            raise grammar_refused(error) from None

    def queued(body: Body, space: Hashable) -> ASGIApp:
        """Queue the requests of a body, all or none."""
        form = CompletionForm(body, texts)
        answer = HttpAnswer(form, body.stream, partial(voices.spoken, body), threads, timeout + _READING)
        tokens = None
        space = (space, body.salt) if body.salt is not None else space
        try:
            for number, tokens in enumerate(prompts.tokens(body)):
                later = number * body.n  # so that a body of many texts waits rather than one of a single text
                submit = partial(engine.submit, namespace=space, deadline=timeout, n=body.n, priority=later)
                answer.requests.append(submit(tokens, body.params))
        except BaseException as error:
            answer.cancel()
            count = body.n * len(body.prompts)
            if isinstance(error, QueueFullError) and count > error.max_queue:  # there is never room for all of it
                raise too_many(body.chat, error.max_queue, count) from None
            if isinstance(error, OutOfMemoryError) and tokens is not None:
                raise too_large(body.field, len(tokens)) from None
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
        """The counters for Prometheus. A key of the namespace `metrics` gets all namespaces, another one its own."""
        return PlainTextResponse(
            await run_sync(report, namespace(request), limiter=threads.reports),
            media_type="text/plain; version=0.0.4",
        )

    def report(own: str | None) -> str:
        found: dict[Hashable, Any] = {}
        for name, counts in engine.namespace_stats().items():
            space = name[0] if isinstance(name, tuple) else name  # that of the key, where a body has a salt
            if own in (None, "metrics", space):
                found[Label(name, str((space or "") if known is None else known.shown(space)))] = counts
        return exposition(engine.stats(), found, http_responses=("status", statuses))

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
            except CancelledError:  # the server ends; an answer that has begun says so itself
                if scope["type"] != "http":
                    raise
                if not begun:
                    await refusal(ending())(scope, receive, note)
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
    ]
    handlers: dict[Any, Any] = dict.fromkeys((*REFUSED, Exception), lambda request, error: refusal(error))
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.state.bodies = bodies
    app.router.redirect_slashes = False  # to a place that the client's header Host names
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
