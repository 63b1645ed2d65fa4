"""The ASGI application: routes, keys, limits, metrics."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from functools import partial
from itertools import accumulate
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvcache.core.arguments import short
from kvcache.errors import CheckpointError, InvalidOperationError, OutOfMemoryError, QueueFullError
from kvcache.server.answers import Answer, Refused, refusal
from kvcache.server.bodies import Body, parse
from kvcache.server.keys import Keys
from kvcache.serving.engine import BatchEngine
from kvcache.serving.request import Request
from kvcache.serving.stats import Histogram

__all__ = ["make_app"]

_GAUGES = ("waiting", "running", "free_blocks", "claimed_blocks", "cached_blocks")  # the other counters only grow
_BODY_SECONDS = 30.0  # for the arrival of a body


def make_app(
    engine: BatchEngine, model: str, keys: Keys | None = None, *, max_body: int = 4 << 20, timeout: float = 600.0
) -> Starlette:
    """An application with OpenAI's interface; it starts the engine, and closes it at its end.

    Args:
        engine: has a tokenizer; it has the limits of queue and memory.
        model: the name by which clients ask for the model.
        keys: whose requests are answered; None: everybody's whose request names this machine by a loopback address, all
            in one namespace.
        max_body: the most bytes of a body.
        timeout: seconds from the arrival of a body to the last token of its answer.
    """
    return _Server(engine, model, keys, max_body, timeout).app


class _Server:
    def __init__(self, engine: BatchEngine, model: str, keys: Keys | None, max_body: int, timeout: float) -> None:
        self._engine, self._model, self._keys = engine, model, keys
        self._max_body, self._timeout = max_body, timeout
        self._statuses: Counter[int] = Counter()
        routes = [
            Route("/v1/chat/completions", partial(self._complete, True), methods=["POST"]),
            Route("/v1/completions", partial(self._complete, False), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        self.app = Starlette(
            routes=routes, lifespan=self._lifespan,
            exception_handlers={Refused: self._refuse, HTTPException: self._refuse, Exception: self._refuse},
        )  # fmt: skip
        if keys is None:  # or a page that a browser shows could ask in its user's name, by a name of its own for us
            self.app.add_middleware(TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1", "[::1]", "["])
        self.app.add_middleware(_Counted, statuses=self._statuses)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._engine.start()
        try:
            yield
        finally:
            await run_in_threadpool(self._engine.close, cancel=True)

    # -- completions ----------------------------------------------------------------------------------------

    async def _complete(self, chat: bool, request: HttpRequest) -> Any:
        namespace = self._namespace(request)
        data = await self._read(request)
        try:
            body, prompts, requests = await run_in_threadpool(self._begin, data, chat, namespace)
        except QueueFullError as error:
            raise Refused(429, str(error), retry=1) from None
        except InvalidOperationError as error:
            raise Refused(503, str(error)) from None
        except CheckpointError:
            raise
        except (OutOfMemoryError, TypeError, ValueError) as error:
            raise Refused(400, str(error), str(error).partition(":")[0]) from None
        return Answer(body, requests, prompts, self._engine.tokenizer, self._timeout)

    def _begin(self, data: bytes, chat: bool, namespace: str | None) -> tuple[Body, list[list[int]], list[Request]]:
        """Queue the requests of a body, all or none."""
        body = parse(data, chat, self._engine.sampling_params)
        if body.model != self._model:
            raise Refused(404, f"model: expected {self._model}, got {short(body.model)}", "model")
        prompts: list[list[int]] = []
        for prompt in body.prompts:
            if chat:
                prompts.append(self._engine.apply_chat_template(prompt, tokenize=True))
            else:
                prompts.append(self._engine.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt)
        requests: list[Request] = []
        try:
            for tokens in prompts:
                requests.append(self._engine.submit(
                    tokens, body.params, namespace=namespace, deadline=self._timeout, n=body.n
                ))  # fmt: skip
        except BaseException:
            for each in requests:
                each.cancel()
            raise
        return body, prompts, requests

    async def _read(self, request: HttpRequest) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which no page of another origin may send
            raise Refused(415, f"content-type: expected application/json, got {kind[:100]}")
        try:
            return await asyncio.wait_for(self._receive(request), min(_BODY_SECONDS, self._timeout))
        except asyncio.TimeoutError:
            raise Refused(408, "body: expected it in time, got a part of it") from None
        except ClientDisconnect:
            raise Refused(400, "body: expected all of it, got a part of it") from None

    async def _receive(self, request: HttpRequest) -> bytes:
        said = request.headers.get("content-length", "")
        data, most = bytearray(), self._max_body
        if not (said.isdecimal() and len(said) < 20 and int(said) > most):
            async for chunk in request.stream():
                data += chunk
                if len(data) > most:
                    break
            else:
                return bytes(data)
        raise Refused(413, f"body: expected at most {most} bytes, got more")

    def _namespace(self, request: HttpRequest) -> str | None:
        if self._keys is None:
            return None
        namespace = self._keys.namespace(request.headers.get("authorization"))
        if namespace is None:
            raise Refused(401, "authorization: expected Bearer and a known key, got another")
        return namespace

    # -- the rest -------------------------------------------------------------------------------------------

    async def _models(self, request: HttpRequest) -> Response:
        self._namespace(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "kvcache"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self, request: HttpRequest) -> Response:
        good = self._engine.is_running
        return JSONResponse({"status": "ok" if good else "the engine does not run"}, 200 if good else 503)

    async def _metrics(self, request: HttpRequest) -> Response:
        """The counters of the engine as Prometheus reads them."""
        self._namespace(request)
        stats = await run_in_threadpool(self._engine.stats)
        lines = []
        for name in (field.name for field in fields(stats)):
            value = getattr(stats, name)
            if isinstance(value, (int, float)):
                kind, full = ("gauge", name) if name in _GAUGES else ("counter", f"{name}_total")
                lines += [f"# TYPE kvcache_{full} {kind}", f"kvcache_{full} {value}"]
            elif isinstance(value, Histogram):
                lines += _histogram(f"kvcache_{name}_seconds", value)
        lines.append("# TYPE kvcache_http_responses_total counter")
        lines += [f'kvcache_http_responses_total{{status="{code}"}} {n}' for code, n in sorted(self._statuses.items())]
        return PlainTextResponse("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

    async def _refuse(self, request: HttpRequest, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = Refused(error.status_code, error.detail)
        status, body = refusal(error)
        headers = getattr(error, "headers", None)
        return Response(json.dumps(body), status, headers, "application/json")  # ASCII, whatever texts are in it


def _histogram(name: str, found: Histogram) -> list[str]:
    """The lines of a histogram: the measurements up to each bound."""
    counts = accumulate(found.counts)
    buckets = [f'{name}_bucket{{le="{b}"}} {n}' for b, n in zip((*found.bounds, "+Inf"), counts, strict=True)]
    return [f"# TYPE {name} histogram", *buckets, f"{name}_sum {found.total}", f"{name}_count {sum(found.counts)}"]


class _Counted:
    """Counts the responses of an application by their status."""

    def __init__(self, app: Any, statuses: Counter[int]) -> None:
        self._app, self._statuses = app, statuses

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._statuses[message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counted)
