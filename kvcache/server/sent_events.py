"""A stream of server-sent events; where there are none for a while, one that says nothing."""

from __future__ import annotations

from asyncio import Lock
from collections.abc import Callable
from time import monotonic

from anyio import sleep
from starlette.types import Message, Send

__all__ = ["SentEvents"]

_SILENCE = 15.0  # seconds without a byte, after which a stream says that it lives: proxies and clients leave others
_HEADERS = [(b"cache-control", b"no-cache"), (b"content-type", b"text/event-stream; charset=utf-8")]


class SentEvents:
    """Sends events to a client, one message at a time.

    Args:
        send: of the ASGI server.
        ping: makes an event that says nothing.
        part: writes a part of a body at once, if it may; see `BodyParts`. None: the ASGI server has none.

    Attributes:
        is_open: whether it has begun and not ended.
    """

    def __init__(self, send: Send, ping: Callable[[], str], part: Callable[[bytes], bool] | None = None) -> None:
        self._send, self._ping, self._part = send, ping, part
        self._sending, self._last = Lock(), monotonic()
        self.is_open = False

    async def begin(self) -> None:
        """Begin the answer."""
        self.is_open = True
        await self._put({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})

    def write_at_once(self, events: str) -> bool:
        """Send events, each whole, without waiting; False: they are not sent, `write` is to wait for the client."""
        if self._part is None or self._sending.locked() or not self._part(events.encode()):
            return False
        self._last = monotonic()
        return True

    async def write(self, events: str) -> None:
        """Send events, each whole."""
        await self._put({"type": "http.response.body", "body": events.encode(), "more_body": True})

    async def end(self, events: str = "") -> None:
        """Send the last events."""
        self.is_open = False
        await self._put({"type": "http.response.body", "body": events.encode()})

    async def live(self) -> None:
        """Send a ping whenever the stream was silent, beside the rest. A client that reads slowly needs none."""
        while True:
            silent = monotonic() - self._last
            if silent < _SILENCE or self._sending.locked() or not self.is_open:
                await sleep(max(_SILENCE - silent, _SILENCE / 4))
            else:
                await self.write(self._ping())

    async def _put(self, message: Message) -> None:
        async with self._sending:
            await self._send(message)
            self._last = monotonic()
