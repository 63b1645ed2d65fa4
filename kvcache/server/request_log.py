"""The id of each request, and one line of JSON about it when it has ended. No line has a text of a client.

Without these lines, the log tells of paths that there are none of, and of clients that left before their answer ended.
"""

from __future__ import annotations

import json
import logging
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

__all__ = ["RequestLog", "asked_path", "request_id"]

logger = logging.getLogger("kvcache")

_LOG_EVERY = 10.0  # seconds between two lines of one kind: a client may ask as often as it likes
_MOST_PATH = 128  # characters of a path that a client made up
_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_current: ContextVar[str | None] = ContextVar("request_id", default=None)


def request_id() -> str | None:
    """The id of the request that this code runs for; None: it runs for none."""
    return _current.get()


class RequestLog:
    """An application that gives each request an id, the client's or one of its own, and tells of it when it has ended.

    The id is in the header `x-request-id` of the answer and in messages of the log.

    Args:
        app: the application. It may leave in the state of the scope: `namespace`, `requests` of the engine, and whether
            the client has `left` before its answer ended.
        write: takes the lines; None: there are none, but some of the log.
    """

    def __init__(self, app: ASGIApp, write: Callable[[str], Any] | None = None) -> None:
        self._app, self._write = app, write
        self._told = {"path": _Paced(), "left": _Paced()}

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
            seconds = time.monotonic() - began
            if self._write is not None:
                self._write(json.dumps(_entry(scope, own, status, seconds)))
            else:
                self._tell(scope, own, status, seconds)
            for name in ("requests", "asked"):  # a connection that stays open keeps its scope: not the model too
                scope["state"].pop(name, None)

    def _tell(self, scope: Scope, own: str, status: int, seconds: float) -> None:
        """Log what an operator looks for first: a wrong address of a client, or answers that nobody reads."""
        if status in (404, 405) and "endpoint" not in scope:
            asked = f"{scope['method']} {asked_path(scope)}"
            self._told["path"].warning(f"request {own}: expected a path of the server, got {asked}: status {status}")
        if scope["state"].get("left"):
            new = sum(each.metrics.new_tokens for each in scope["state"].get("requests", ()))
            self._told["left"].warning(f"request {own}: its client left after {seconds:.1f} s and {new} new tokens")


class _Paced:
    """Logs a line at most every `_LOG_EVERY` seconds; the next one says how many there would have been."""

    def __init__(self) -> None:
        self._since, self._skipped = -_LOG_EVERY, 0

    def warning(self, line: str) -> None:
        now = time.monotonic()
        if now - self._since < _LOG_EVERY:
            self._skipped += 1
            return
        logger.warning("%s%s", line, f" (and {self._skipped} like it before)" if self._skipped else "")
        self._since, self._skipped = now, 0


def asked_path(scope: Scope) -> str:
    """The path, without what controls a terminal, and not longer than a line."""
    path = "".join(each if each.isprintable() else "?" for each in scope["path"])
    return path if len(path) <= _MOST_PATH else f"{path[:_MOST_PATH]}.."


def _entry(scope: Scope, own: str, status: int, seconds: float) -> dict[str, Any]:
    """The fields of a line. Status 0: there was none, since the client left, which `left` says."""
    state = scope["state"]
    found = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"), "id": own, "method": scope["method"],
        "path": asked_path(scope), "status": status, "seconds": round(seconds, 6),
    }
    if state.get("left"):
        found["left"] = True
    if (space := state.get("namespace")) is not None:
        found["namespace"] = sha256(str(space).encode()).hexdigest()[:12]
    if (adapter := getattr(state.get("asked"), "adapter", None)) is not None:
        found["adapter"] = adapter
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
        "finish": [reason for request in requests for reason in request.reasons],
    }
