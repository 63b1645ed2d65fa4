"""The id of each request, and one line of JSON about it when it has ended. No line has a text of a client."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from contextvars import ContextVar
from datetime import datetime, timezone
from hashlib import sha256
from secrets import token_hex
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["RequestLog", "request_id"]

_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_current: ContextVar[str | None] = ContextVar("request_id", default=None)


def request_id() -> str | None:
    """The id of the request that this code runs for; None: it runs for none."""
    return _current.get()


class RequestLog:
    """An application that gives each request an id, the client's or one of its own, and tells of it when it has ended.

    The id is in the header `x-request-id` of the answer and in messages of the log.

    Args:
        app: the application. It may leave `namespace`, and `requests` of the engine, in the state of the scope.
        write: takes the lines; None: there are none.
    """

    def __init__(self, app: ASGIApp, write: Callable[[str], Any] | None = None) -> None:
        self._app, self._write = app, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        asked = Headers(scope=scope).get("x-request-id", "")
        own = asked if _ID.fullmatch(asked) else f"req-{token_hex(12)}"
        began, status = time.monotonic(), 0
        scope.setdefault("state", {})

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = own
            await send(message)

        mark = _current.set(own)
        try:
            await self._app(scope, receive, note)
        finally:
            _current.reset(mark)
            if self._write is not None:
                self._write(json.dumps(_entry(scope, own, status, time.monotonic() - began)))


def _entry(scope: Scope, own: str, status: int, seconds: float) -> dict[str, Any]:
    """The fields of a line. Status 0: the client left before there was one."""
    state = scope["state"]
    found = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"), "id": own, "method": scope["method"],
        "path": scope["path"] if status not in (0, 404, 405) else None, "status": status, "seconds": round(seconds, 6),
    }
    if (space := state.get("namespace")) is not None:
        found["namespace"] = sha256(str(space).encode()).hexdigest()[:12]
    if not (requests := state.get("requests")):
        return found
    metrics = [request.metrics for request in requests]
    queued = [each.queued for each in metrics if each.queued is not None]
    firsts = [each.ttft for each in metrics if each.ttft is not None]
    return found | {
        "prompt_tokens": sum(each.prompt_tokens for each in metrics),
        "cached_tokens": sum(each.cached_tokens for each in metrics),
        "new_tokens": sum(each.new_tokens for each in metrics),
        "preemptions": sum(each.preemptions for each in metrics),
        "queued": round(min(queued), 6) if queued else None,
        "first_token": round(min(firsts), 6) if firsts else None,
        "finish": [work.reason for request in requests for work in request.works],
    }
