"""`EventPublisher`: the block events of a prefix cache on a socket, by a thread of its own.

    PUB      topic, number of the batch (8 bytes, big-endian, from 0), batch (MessagePack, see event_batches.py)
    ROUTER   a reader asks "", the first number that it lacks; it gets "", topic, number, batch for each of the kept
             ones from there on (event_stream.py), and "", "", -1, "" behind them
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from kvcache.prefix.events.event_stream import EventCounts, EventStream
from kvcache.prefix.events.kv_events import KvEvents, SaltOf
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.support.arguments import short

__all__ = ["EventPublisher"]

logger = logging.getLogger("kvcache")

_PAUSE = 0.02  # seconds between two looks: no event is told later than that
_AFTER_ERROR = 1.0  # seconds
_RECORDS, _TOKENS = 65536, 1 << 20  # of the ring: the most, and those whose tokens take 4 MiB
_MESSAGES = 10_000  # batches for replays, and those that wait for one slow reader
_LINGER = 500  # milliseconds in which the last batches reach readers
_LAST = (-1).to_bytes(8, "big", signed=True)


class EventPublisher:
    """Tells readers which blocks a prefix cache has, until `close`, or until the cache is dropped.

    Args:
        cache: empty; not kept alive.
        settings: addresses and names.
        salt_of: see `EventBuffer`.
        clock: the seconds that batches carry.

    Attributes:
        settings: with the addresses that are listened on.

    Raises:
        ImportError: without the packages of the extra `cluster`.
        ValueError: an address that cannot be listened on.
        InvalidOperationError: something is cached.
    """

    def __init__(self, cache: PrefixCache, settings: KvEvents, salt_of: SaltOf, clock: Callable[[], float]) -> None:
        try:
            import zmq
            from msgspec.msgpack import encode
        except ImportError as error:
            needed = "block events need msgspec and pyzmq: pip install 'kvcache-cpu[cluster]'"
            raise ImportError(f"{needed} ({error})") from None
        context = zmq.Context()
        try:
            events = _listening(zmq, context, zmq.PUB, "address", settings.address)
            asked = settings.replay and _listening(zmq, context, zmq.ROUTER, "replay", settings.replay)
            ring = cache.record_events(salt_of, min(_RECORDS, max(1024, _TOKENS // cache.block_size)))
            address, *others = (each.get_string(zmq.LAST_ENDPOINT) for each in (events, asked) if each)
            self.settings = replace(settings, address=address, replay=others[0] if others else None)
            topic = settings.topic.encode()

            def send(number: int, batch: bytes) -> None:
                events.send_multipart((topic, number.to_bytes(8, "big"), batch))

            self._stream = EventStream(ring, cache, self.settings, send, encode, clock, _MESSAGES)
        except BaseException:
            context.destroy(linger=0)
            raise
        settings.warn_of_others()
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=_run, args=(self._stream, context, asked, topic, self._stopping), name="kvcache-events", daemon=True
        )
        self._thread.start()

    def counts(self) -> EventCounts:
        """The counters now."""
        return self._stream.counts()

    def close(self) -> None:
        """Tell what is left, and that the blocks are gone, and end the thread. A second call does nothing."""
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _listening(zmq: ModuleType, context: Any, kind: int, name: str, address: str) -> Any:
    """A socket that listens on an address."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, _MESSAGES * 2)
    socket.setsockopt(zmq.IPV6, "[" in address)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ValueError(f"{name}: expected an address to listen on, got {short(address)} ({error})") from None
    return socket


def _run(stream: EventStream, context: Any, asked: Any, topic: bytes, stopping: threading.Event) -> None:
    """Send events and answer readers, until the cache is gone or `stopping`."""
    try:
        while stream.is_alive and not stopping.is_set():
            try:
                waits = asked is not None and asked.poll(1000 * _PAUSE)
                stream.tell()
                if waits:
                    _answer(stream, asked, topic)
                elif asked is None:
                    stopping.wait(_PAUSE)
            except Exception as error:  # of memory
                logger.warning("block events were lost, and a snapshot follows: %s", short(error))
                stopping.wait(_AFTER_ERROR)
        stream.end()
    finally:
        context.destroy(linger=_LINGER)


def _answer(stream: EventStream, asked: Any, topic: bytes) -> None:
    """Answer the reader that asks; another message than a number of 8 bytes is not answered."""
    reader, *message = asked.recv_multipart()
    if len(message) == 2 and message[0] == b"" and len(message[1]) == 8:
        for number, batch in stream.replay(int.from_bytes(message[1], "big")):
            asked.send_multipart((reader, b"", topic, number.to_bytes(8, "big"), batch))
        asked.send_multipart((reader, b"", b"", _LAST, b""))
