"""The ASGI application: OpenAI's interface over an engine, with keys, limits and metrics."""

from __future__ import annotations

from asyncio import CancelledError
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from threading import Event
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

from kvcache.errors import GrammarError
from kvcache.grammar import json_object
from kvcache.server.api_keys import Keys, Label
from kvcache.server.constraints import knows_grammars
from kvcache.server.intake import Intake
from kvcache.server.limits import BodyReader, Threads
from kvcache.server.prompts import Prompts
from kvcache.server.refusals import REFUSED, ending, message_refusal, refusal
from kvcache.server.request_log import RequestLog
from kvcache.server.voices import Voices
from kvcache.serving import BatchEngine, exposition
from kvcache.support.arguments import short
from kvcache.support.hosts import is_loopback

__all__ = ["make_app"]

# Paths of OpenAI's interface that other models answer.
_ELSEWHERE = (
    "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/embeddings", "/v1/images/edits",
    "/v1/images/generations", "/v1/moderations", "/v1/rerank",
)


def make_app(
    engine: BatchEngine, model: str, keys: Mapping[str, str | None] | None = None, *, max_body: int = 4 << 20,
    max_bodies: int = 64 << 20, timeout: float = 600.0, plain_special_tokens: bool = False,
    tool_parser: str | None = None, aliases: Sequence[str] = (), log: Callable[[str], Any] | None = None,
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
        aliases: further names of the model.
        log: takes a line of JSON about each request when it has ended, without texts; None: there are none.

    `app.state.leaving()` says that the server is about to end: it takes requests and is not ready any more.
    """
    known = None if keys is None else Keys(keys)
    bodies, threads = BodyReader(max_body, max(max_body, max_bodies)), Threads()
    prompts = Prompts(engine, plain_special_tokens)
    voices = Voices(engine.tokenizer, engine.chat_template, tool_parser)
    names, leaving = tuple(dict.fromkeys((model, *aliases))), Event()
    intake = Intake(engine, names, known, bodies, threads, timeout, prompts, voices)
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

    async def models(request: Request) -> Response:
        """The model under each of its names, or under the one that is asked for."""
        intake.namespace(request)
        found = [{"id": name, "object": "model", "created": 0, "owned_by": "kvcache"} for name in names]
        if not request.path_params:
            return JSONResponse({"object": "list", "data": found})
        intake.expect_model(asked := request.path_params["name"])
        return JSONResponse(found[names.index(asked)])

    async def alive(request: Request) -> Response:
        return Response()  # clients ask so whether there is a server

    async def elsewhere(request: Request) -> Response:
        raise HTTPException(501, "path: expected one of a model that generates text, got another")

    async def health(request: Request) -> Response:
        return probed(None)

    async def ready(request: Request) -> Response:
        return probed("the queue is full" if engine.stats().waiting >= engine.max_queue else None)

    def probed(fault: str | None) -> Response:
        if leaving.is_set() or not engine.is_running:
            fault = "the server ends" if leaving.is_set() else "the engine does not run"
        return JSONResponse({"status": fault or "ok"}, 503 if fault else 200)

    async def metrics(request: Request) -> Response:
        """The counters for Prometheus. A key of the namespace `metrics` gets all namespaces, another one its own."""
        return PlainTextResponse(
            await run_sync(report, intake.namespace(request), limiter=threads.reports),
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
        *(Route(path, intake.route(answer), methods=["POST"]) for path, answer in intake.routes.items()),
        *(Route(path, elsewhere, methods=["POST"]) for path in _ELSEWHERE),
        Route("/", alive), Route("/live", alive), Route("/ready", ready), Route("/health", health),
        Route("/metrics", metrics), Route("/v1/models", models),
        Route("/v1/models/{name:path}", models),
    ]
    handlers: dict[Any, Any] = dict.fromkeys((*REFUSED, Exception), _refused)
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.state.bodies, app.state.leaving = bodies, leaving.set
    app.router.redirect_slashes = False  # to a place that the client's header Host names
    if keys is None:  # or a page that a browser shows could ask in its user's name, by a name of its own for us
        app.add_middleware(_only_local)
    app.add_middleware(counting)
    app.add_middleware(RequestLog, write=log)
    return app


def _refused(request: Request, error: Exception) -> Response:
    """An error in the form of the interface that was asked."""
    return (message_refusal if request.url.path.startswith("/v1/messages") else refusal)(error)


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
