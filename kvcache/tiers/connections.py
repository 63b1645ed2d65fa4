"""`Connections`: GET and SET over the connections of a Redis or Valkey client, without copies of values.

A pipeline of the client reads all replies of a call into one buffer that grows, and takes each value out of it with two
more copies. Most of its time is the system's, for new memory, and a server that prepares all replies at once has the
same cost. Here a connection has as many requests under way as its round trip asks for, one on a fast network, and a
value goes from the socket to where it stays. One call of the system sends a command with its value, and all nodes of a
cluster receive theirs side by side. Everything else is left to the client: TLS, caches, errors.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeVar

from kvcache.tiers.links import Measured
from kvcache.tiers.protocol import Buffer
from kvcache.tiers.spaces import SPACE

__all__ = ["Connections", "Unfit"]

_NEAR, _LARGE = 1e-3, 1 << 18  # a round trip of so many seconds, a value of so many bytes: one request at a time
_LINE = 32  # bytes that have the first line of a value

Received = TypeVar("Received", int, bytes)


class Unfit(Exception):
    """The client has to fetch or store the values itself."""


class _Stream:
    """The requests of one connection.

    Attributes:
        names: to be asked for.
        waiting: replies that are on their way.
    """

    def __init__(self, pool: Any) -> None:
        self.pool, self.connection, self.names, self.waiting = pool, _connection(pool), deque[bytes](), 0
        self._received = b""  # of the next reply

    @property
    def plain(self) -> bool:
        """Whether bytes come as the server sends them, and none has come yet, such as those of a message."""
        return type(self._socket) is socket.socket and not self.connection.can_read()

    @property
    def _socket(self) -> Any:
        return getattr(self.connection, "_sock", None)  # another one after a PING that failed

    @property
    def clean(self) -> bool:
        """Whether every reply was read, and no byte more."""
        return not self.waiting and not self._received

    def ask(self, ahead: int) -> None:
        """Send requests until so many are under way."""
        while self.names and self.waiting < ahead:
            # A PING in between, for health_check_interval, would take a reply that waits.
            self.connection.send_command("GET", self.names.popleft(), check_health=not self.waiting)
            self.waiting += 1

    def store(self, name: bytes, value: Buffer, ttl: int | None) -> None:
        """Send a value; its reply is `+OK`."""
        if not self.waiting:
            self.connection.check_health()
        parts = [b"SET", name, b"", *([] if ttl is None else [b"EX", b"%d" % ttl])]
        body = memoryview(value).cast("B")
        before = b"*%d\r\n" % len(parts) + b"".join(map(_string, parts[:2])) + b"$%d\r\n" % len(body)
        rest = [memoryview(before), body, memoryview(b"\r\n" + b"".join(map(_string, parts[3:])))]
        self.waiting += 1
        while rest:
            sent = self._socket.sendmsg(rest)
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            rest[:1] = [each[sent:] for each in rest[:1]]

    def line(self) -> bytes:
        """The first line of the next reply."""
        data = self._received
        while b"\r\n" not in data and len(data) < _LINE:
            data += _some(self._socket.recv(_LINE - len(data)))
        line, _, self._received = data.partition(b"\r\n")
        return line

    def value(self, size: int) -> memoryview:
        """So many bytes, and the end of the line."""
        value = SPACE(size + 2)
        at = min(len(self._received), len(value))
        value[:at], self._received = self._received[:at], self._received[at:]
        while at < len(value):
            at += _some(self._socket.recv_into(value[at:]))
        self.waiting -= 1
        return value[:size]


class Connections:
    """Fetches and stores values by the names of their keys.

    Args:
        client: of a server or a cluster.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._wait, self._transfer = Measured(0.1, 1.0), Measured()  # seconds of a round trip, and of a value
        self._size = 0  # bytes of the last value

    def get(self, names: Sequence[bytes]) -> list[memoryview | None]:
        """The value of each name.

        Raises:
            Unfit: connections or replies of another kind, such as TLS, a cache in the client, slots that have moved.
            Exception: what the client raises; OSError of a socket.
        """
        with self._streams(names) as streams:
            values: list[memoryview | None] = []
            asked = monotonic()
            for stream in dict.fromkeys(streams):
                stream.ask(self._ahead)
            for stream in streams:
                line, began = stream.line(), monotonic()
                if not values:  # the first reply alone tells the round trip
                    self._wait.add(began - asked)
                values.append(value := self._value(stream, line))
                if value is not None:
                    self._size = len(value)
                    self._transfer.add(max(monotonic() - began, 1e-9))
                stream.ask(self._ahead)
            return values

    def put(self, items: Sequence[tuple[bytes, Buffer]], ttl: int | None) -> None:
        """Store values by name, for so many seconds.

        Raises:
            Unfit: as `get`; also for a reply that is an error, which the client gets too when it stores them.
            Exception: OSError of a socket.
        """
        with self._streams([name for name, _ in items]) as streams:
            for stream, (name, value) in zip(streams, items, strict=True):
                stream.store(name, value, ttl)
            for stream in streams:
                if stream.line() != b"+OK":
                    raise Unfit
                stream.waiting -= 1

    @property
    def _ahead(self) -> int:
        """Requests under way on a connection."""
        wait, transfer = self._wait.mean, self._transfer.mean
        if wait is None or transfer is None or (wait < _NEAR and self._size >= _LARGE):
            return 1
        return 2 + int(wait / transfer)

    @staticmethod
    def _value(stream: _Stream, line: bytes) -> memoryview | None:
        if line in (b"_", b"$-1"):  # of RESP3 and of RESP2: there is none
            stream.waiting -= 1
            return None
        if line[:1] != b"$" or not line[1:].isdigit():
            raise Unfit
        return stream.value(int(line[1:]))

    @contextmanager
    def _streams(self, names: Sequence[bytes]) -> Iterator[list[_Stream]]:
        """The stream of each name. Each node has one; its connection is closed if it has unread replies."""
        client, opened = self._client, dict[int, _Stream]()
        own = ("connection", "read_from_replicas", "load_balancing_strategy")  # one connection, and choices among nodes
        if any(getattr(client, name, None) for name in own):
            raise Unfit
        try:
            try:
                streams = [self._stream(name, opened) for name in names]
                if not all(stream.plain for stream in opened.values()):
                    raise Unfit
            except Exception as error:  # also of a node that has gone: the client knows what to do
                raise Unfit from error
            yield streams
        finally:
            for stream in opened.values():
                if not stream.clean:
                    stream.connection.disconnect()
                stream.pool.release(stream.connection)

    def _stream(self, name: bytes, opened: dict[int, _Stream]) -> _Stream:
        """The stream to the server that has a key, which is to be asked for it."""
        client = self._client
        if hasattr(client, "get_node_from_key"):
            connect = getattr(client, "get_redis_connection", None) or client.get_valkey_connection
            client = connect(client.get_node_from_key(name))
        pool = client.connection_pool
        if (stream := opened.get(id(pool))) is None:
            stream = opened[id(pool)] = _Stream(pool)
        stream.names.append(name)
        return stream


def _string(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def _connection(pool: Any) -> Any:
    try:
        return pool.get_connection()
    except TypeError:  # valkey: the name of a command is required
        return pool.get_connection("GET")


def _some(received: Received) -> Received:
    """What a socket returned; OSError if the other side has closed it."""
    if not received:
        raise ConnectionError("socket: expected a reply, got the end of the connection")
    return received
