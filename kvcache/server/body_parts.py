"""Parts of a streamed body, written past the layers of the ASGI server, which take longer than a token."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["BodyParts"]

_EXTENSION = "kvcache.body_parts"


class BodyParts:
    """Writes parts of a body that is sent in chunks, behind the head of its response.

    Args:
        cycle: a request of uvicorn.
    """

    def __init__(self, cycle: Any) -> None:
        self._cycle, self._transport, self._flow = cycle, cycle.transport, cycle.flow

    def __call__(self, part: bytes) -> bool:
        """Write a part; False: nothing is written, since the client has left, or does not keep up."""
        if self._cycle.disconnected or self._flow.write_paused:
            return False
        self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    @staticmethod
    def of(scope: Scope) -> BodyParts | None:
        """The one that `offered` has left in a scope; None: the server has none for this request."""
        found: BodyParts | None = scope.get("extensions", {}).get(_EXTENSION)
        return found

    @staticmethod
    def offered(app: ASGIApp) -> ASGIApp:
        """The application, to which uvicorn offers this where bodies are sent in chunks: from HTTP 1.1 on."""

        async def offering(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["http_version"] == "1.1" and scope["method"] == "POST":
                cycle = getattr(send, "__self__", None)
                scope.setdefault("extensions", {})[_EXTENSION] = BodyParts(cycle)
            await app(scope, receive, send)

        return offering
