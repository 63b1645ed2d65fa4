"""The ASGI application: OpenAI's interface over the engines of some models, with keys, limits and metrics."""

from __future__ import annotations

import os
import re
from asyncio import CancelledError
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from anyio import create_task_group
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvcache.server.adapter_routes import AdapterRoutes
from kvcache.server.api_keys import Keys
from kvcache.server.intake import Intake
from kvcache.server.limits import BodyReader, Threads
from kvcache.server.model_loader import ModelLoader
from kvcache.server.model_slot import ModelSlot
from kvcache.server.models import Models
from kvcache.server.refusals import REFUSED, ending, message_refusal, refusal
from kvcache.server.request_log import RequestLog, asked_path
from kvcache.server.served_model import ServedModel
from kvcache.server.server_reports import ServerReports
from kvcache.server.telemetry import Telemetry
from kvcache.support.arguments import short
from kvcache.support.hosts import is_loopback

__all__ = ["make_app"]

_ORIGIN = re.compile(r"https?://[a-z0-9.\-\[\]:]+")
_CHATS = "/v1/chat/completions"
_OF_ROUTER = ("Not Found", "Method Not Allowed")  # for paths that there are none of, and other methods
# Paths of OpenAI's interface that other models answer.
_ELSEWHERE = (
    "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits",
    "/v1/images/generations", "/v1/moderations",
)


def make_app(
    models: Sequence[ServedModel | ModelSlot], keys: Mapping[str, str | None] | None = None, *, max_body: int = 4 << 20,
    max_bodies: int = 64 << 20, timeout: float = 600.0, log: Callable[[str], Any] | None = None,
    telemetry: Telemetry | None = None, origins: Sequence[str] = (),
    adapter_folder: str | os.PathLike[str] | None = None, **loading: Any,
) -> Starlette:
    """An application with OpenAI's interface; it starts the engines of its models, and closes them at its end.

    Args:
        models: at least one; a request names one of them. A `ModelSlot` may load at the first one.
        keys: API keys, and the namespace of each; namespaces share no cached prefixes. None for a namespace: the key
            has one of its own. None for `keys`: requests need no key, must address this machine as a loopback host,
            and share one namespace.
        max_body: the most bytes of a body.
        max_bodies: the most bytes of all bodies that are on their way, beyond the first 64 KiB of each.
        timeout: seconds from the arrival of a body to the last token of its answer.
        log: takes a line of JSON about each request when it has ended, without texts; None: there are none.
        telemetry: is told of each request; None: nobody is.
        adapter_folder: clients may load and unload adapters that are in this folder; None: they may not.
        loading: how models are loaded and unloaded, see `ModelLoader`.
        origins: of pages that browsers may let ask, such as `https://example.com`; "*" for any, where there are keys.

    `app.state.leaving()` says that the server is about to end: it takes requests and is not ready any more.

    Raises:
        ValueError: no models, or two of one name; no origin.
    """
    slots = [each if isinstance(each, ModelSlot) else ModelSlot.of(each) for each in models]
    known, served = None if keys is None else Keys(keys), Models(slots)
    loader = ModelLoader(served, **loading)
    bodies, threads = BodyReader(max_body, max(max_body, max_bodies)), Threads()
    intake = Intake(served, loader, known, bodies, threads, timeout)
    reports = ServerReports(served, known, intake, threads)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as running:
            if telemetry is not None:
                running.push_async_callback(run_sync, telemetry.flush)  # a signal ends the process right after this
            running.push_async_callback(loader.close)
            await loader.start()
            async with create_task_group() as tasks:
                tasks.start_soon(loader.unload_idle)
                yield
                tasks.cancel_scope.cancel()

    routes = [
        *(Route(path, intake.route(method), methods=["POST"]) for path, method in intake.routes.items()),
        *(Route(path, _elsewhere, methods=["POST"]) for path in _ELSEWHERE),
        *AdapterRoutes(served, intake, adapter_folder).routes,
        *reports.routes,
    ]
    handlers: dict[Any, Any] = dict.fromkeys((*REFUSED, Exception), _refused)
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.state.bodies, app.state.leaving = bodies, reports.leaving.set
    app.router.redirect_slashes = False  # to a place that the client's header Host names
    if keys is None:  # or a page that a browser shows could ask in its user's name, by a name of its own for us
        app.add_middleware(_only_local)
    app.add_middleware(_counting, statuses=reports.statuses)
    if origins:
        for origin in origins:
            _check_origin(origin, keys is not None)
        shown = ["retry-after", "x-request-id", "x-stop-reason"]
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=shown,
        )
    if telemetry is not None:
        app.add_middleware(telemetry.wrap)
    app.add_middleware(RequestLog, write=log)
    return app


async def _elsewhere(request: Request) -> Response:
    path = asked_path(request.scope)
    raise HTTPException(501, f"path: expected one that answers with texts, such as {_CHATS}, got {path}")


def _counting(app: ASGIApp, statuses: Counter[int]) -> ASGIApp:
    """An application that counts its answers by their status."""

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


def _check_origin(origin: str, has_keys: bool) -> None:
    if origin == "*":
        if not has_keys:  # any page in a browser could ask a server on the same machine
            raise ValueError("cors_origin: expected origins, or API keys beside *, got * without keys")
    elif not _ORIGIN.fullmatch(origin):
        raise ValueError(f"cors_origin: expected such as https://example.com, got {short(origin)}")


def _refused(request: Request, error: Exception) -> Response:
    """An error in the form of the interface that was asked. What the router refuses names what was asked."""
    if isinstance(error, HTTPException) and error.detail in _OF_ROUTER:
        path, headers = asked_path(request.scope), error.headers or {}
        message = f"path: expected one of this server, such as {_CHATS}, got {path}"
        if allowed := headers.get("Allow"):
            message = f"method: expected {allowed} for {path}, got {request.method}"
        error = HTTPException(error.status_code, message, headers)
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
