"""Limits that all requests share: memory for bodies on their way, and threads for work that takes long."""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property

from anyio import CapacityLimiter, Lock, fail_after
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

__all__ = ["BodyReader", "Threads"]

_SMALL = 1 << 16  # bytes of a body that count nowhere, so that small requests get in whatever others send


class BodyReader:
    """Reads bodies, and counts their bytes until they have become requests of the engine.

    Args:
        each: the most bytes of a body.
        together: the most bytes of all bodies beyond their first 64 KiB.
    """

    def __init__(self, each: int, together: int) -> None:
        self._each, self._together = each, together
        self._bytes = 0

    @asynccontextmanager
    async def body(self, request: Request, seconds: float) -> AsyncIterator[bytearray]:
        """Read a body of JSON in at most `seconds`; its bytes count as long as the context lasts."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which no page of another origin may send
            raise HTTPException(415, f"content-type: expected application/json, got {kind[:100] or 'none'}")
        data, announced, counted = bytearray(), int(request.headers.get("content-length", 0)), 0
        try:
            with fail_after(seconds):
                async for chunk in request.stream():
                    if max(len(data) + len(chunk), announced) > self._each:
                        raise HTTPException(413, f"body: expected at most {self._each} bytes, got more")
                    more = max(0, len(data) + len(chunk) - _SMALL) - counted
                    if self._bytes + more > self._together:
                        raise HTTPException(503, "body: expected room for it among those on their way, got none")
                    self._bytes, counted = self._bytes + more, counted + more
                    data += chunk
            yield data
        except (TimeoutError, ClientDisconnect):
            raise HTTPException(408, "body: expected all of it in time, got a part of it") from None
        finally:
            self._bytes -= counted


@dataclass
class _Turns:
    """The lock of a namespace, and how many have it or wait for it."""

    lock: Lock
    count: int = 0


class Threads:
    """Limits of how much runs at a time beside the event loop; the rest waits without a thread."""

    def __init__(self) -> None:
        self._turns: dict[Hashable, _Turns] = {}  # of namespaces with grammars that wait

    @cached_property
    def reports(self) -> CapacityLimiter:
        """The limit of reports for `/metrics`, which wait for nothing else."""
        return CapacityLimiter(1)

    @cached_property
    def answers(self) -> CapacityLimiter:
        """The limit of pieces of answers. Each holds the GIL for milliseconds."""
        return CapacityLimiter(2)

    @cached_property
    def short(self) -> CapacityLimiter:
        """The limit of small bodies that become requests."""
        return CapacityLimiter(8)

    @cached_property
    def long(self) -> CapacityLimiter:
        """The limit of large bodies: the tokens of a text of 4 MiB take half a gigabyte for a second or two."""
        return CapacityLimiter(1)

    @cached_property
    def grammars(self) -> CapacityLimiter:
        """The limit of new grammars that are compiled: a hostile one takes a second of the processor."""
        return CapacityLimiter(1)

    @asynccontextmanager
    async def turn(self, space: Hashable) -> AsyncIterator[None]:
        """Wait until no other new grammar of a namespace waits: one of another namespace waits for one of each."""
        turns = self._turns.setdefault(space, _Turns(Lock()))
        turns.count += 1
        try:
            async with turns.lock:
                yield
        finally:
            turns.count -= 1
            if not turns.count:
                del self._turns[space]

    def for_body(self, size: int) -> CapacityLimiter:
        """The limiter for a body of `size` bytes."""
        return self.short if size <= _SMALL else self.long
