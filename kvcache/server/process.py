"""The process of a server: its descriptors, its connections, its heaps, and the signals that end it."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

import uvicorn
from starlette.types import ASGIApp

from kvcache.server.body_parts import BodyParts

__all__ = ["Capacity", "bound_heaps", "capacity", "run"]

logger = logging.getLogger("kvcache")

_DESCRIPTORS, _CONNECTIONS, _BACKLOG = 1 << 16, 4096, 1024  # the most of each
_LOOKED_AT = 64  # connections, for one that is idle
_LOG_EVERY = 10.0  # seconds between lines about descriptors
_SWITCH = 0.0005  # seconds: a step waits so long for the interpreter after each kernel, beside threads that write JSON
# Heaps of the C library. Each keeps what its threads had at their most, and by default there are eight for each core.
_HEAPS, _M_ARENA_MAX = 2, -8
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Capacity(NamedTuple):
    """Connections that a server holds, and those that may wait to be accepted."""

    connections: int
    backlog: int


def capacity() -> Capacity:
    """Raise the limit of the process for descriptors as far as it may, and divide them.

    A quarter is for files, tiers and connections that are accepted at one time: as many as the backlog.
    """
    descriptors = _DESCRIPTORS
    with suppress(ImportError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                soft = wanted
        descriptors = _DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    connections = min(_CONNECTIONS, max(1, descriptors * 3 // 4))
    return Capacity(connections, min(_BACKLOG, max(1, (descriptors - connections) // 2)))


def bound_heaps() -> None:
    """Let all threads from now on share few heaps of the C library, where it is glibc."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _HEAPS)


def run(
    app: ASGIApp, listening: socket.socket, limits: Capacity, drain: int, delay: float = 0.0,
    leaving: Callable[[], None] | None = None,
) -> None:
    """Serve an application until SIGINT or SIGTERM.

    Args:
        app: with a lifespan.
        listening: a socket.
        limits: of connections.
        drain: seconds that answers have to end in. A second signal ends them, and a third one the process.
        delay: seconds that requests are taken for after the first signal.
        leaving: called when these begin.
    """
    sys.setswitchinterval(_SWITCH)
    bound_heaps()
    config = uvicorn.Config(
        BodyParts.offered(app), log_level="warning", timeout_graceful_shutdown=drain, server_header=False,
        limit_concurrency=limits.connections + 1, backlog=limits.backlog, lifespan="on",
    )
    _Server(config, limits, delay, leaving).run(sockets=[listening])


class _Server(uvicorn.Server):
    """A server that holds a number of connections, and that a second signal hurries."""

    def __init__(
        self, config: uvicorn.Config, limits: Capacity, delay: float, leaving: Callable[[], None] | None
    ) -> None:
        super().__init__(config)
        self._limits, self._hurried, self._logged_at = limits, False, -_LOG_EVERY
        self._drain = config.timeout_graceful_shutdown
        self._delay, self._leaving, self._leaves = delay, leaving, False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._note)
        self.config.http_protocol_class = _bounded(self.config.http_protocol_class, self._limits)
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None or not (self.should_exit or self._leaves or self._delay):
            super().handle_exit(sig, frame)
        elif not self.should_exit and not self._leaves:
            self._leaves = True
            self._loop.call_soon_threadsafe(self._leave, sig)
        elif not self._hurried:
            self._hurried = True
            super().handle_exit(sig, frame)
            self._loop.call_soon_threadsafe(self._hurry)
        else:
            self.force_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        count, loop = len(self.server_state.tasks), asyncio.get_running_loop()
        since = loop.time()
        logger.warning("drain: %d requests run and have %s s; new ones are refused", count, self._drain)
        await super().shutdown(sockets)
        logger.warning("drain: ended after %.1f s", loop.time() - since)

    def _leave(self, sig: int) -> None:
        """Fail the probe of readiness, and end the server after the delay, in which a balancer sees it."""
        logger.warning("drain: begins in %g s; until then requests are taken, and /ready says 503", self._delay)
        if self._leaving is not None:
            self._leaving()
        asyncio.get_running_loop().call_later(self._delay, self._end, sig)

    def _end(self, sig: int) -> None:
        if not self.should_exit:
            super().handle_exit(sig, None)

    def _hurry(self) -> None:
        logger.warning("drain: a second signal cuts %d requests", len(self.server_state.tasks))
        for task in list(self.server_state.tasks):
            task.cancel()

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """One line where descriptors run out: the loop tells it for each connection that waits."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _EXHAUSTED:
            loop.default_exception_handler(context)
        elif (now := loop.time()) - self._logged_at >= _LOG_EVERY:
            self._logged_at = now
            logger.warning("connections wait: %s", error)


def _bounded(kind: Any, limits: Capacity) -> Any:
    """A class of connections that are no more than the limit: the oldest idle one makes room for a new one.

    So does one that is closed while its client does not read what it has been sent.

    Args:
        kind: uvicorn's class of connections.
    """
    order: OrderedDict[Any, None] = OrderedDict()  # all of them; the oldest first, less those found busy

    class Connection(kind):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            order[self] = None
            if len(self.connections) > limits.connections:
                self._make_room(transport)

        def connection_lost(self, error: Exception | None) -> None:
            order.pop(self, None)
            super().connection_lost(error)

        def _make_room(self, transport: Any) -> None:
            for _ in range(min(len(order) - 1, _LOOKED_AT)):
                other = next(iter(order))
                if other.cycle is None or other.cycle.response_complete or other.transport.is_closing():
                    order.pop(other)
                    self.connections.discard(other)
                    other.transport.abort()
                    return
                order.move_to_end(other)
            if len(self.connections) > limits.connections + limits.backlog:  # those between get status 503
                transport.abort()

    return Connection
