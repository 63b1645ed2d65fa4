"""`Connections`: EXISTS, GET and SET over the connections of a Redis or Valkey client, without copies of values.

A pipeline of the client reads all replies of a call into one buffer that grows, and takes each value out of it with two
more copies. Most of its time is the system's, for new memory, and a server that prepares all replies at once has the
same cost. Here a connection has as many requests under way as its round trip asks for, one on a fast network, and a
value goes from the socket to where it stays. One call of the system sends a command with its value, and all nodes of a
cluster receive theirs side by side. A reply has a limit, which is checked before it is read: no server decides how much
memory or time a call takes. The client connects, with TLS and passwords, and finds the nodes of a cluster.
"""

from __future__ import annotations

import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeVar

from kvcache.support.arguments import short
from kvcache.tiers.links import Measured
from kvcache.tiers.protocol import Buffer
from kvcache.tiers.spaces import SPACE

__all__ = ["Connections", "Unfit"]

_NEAR, _LARGE = 1e-3, 1 << 18  # seconds of a round trip, bytes of a value: from there on, one request at a time
_LINE, _MOST_LINE = 32, 1 << 10  # bytes that have the first line of a value; the most that a line has, such as an error
_MOST_SECONDS = 30.0  # of one call, however often a server sends a byte
_GONE = ("ClusterDownError", "ConnectionError", "SlotNotCoveredError")  # errors of a cluster that may have other nodes
_REDIRECTIONS = 16  # of one call, as of the client

Received = TypeVar("Received", int, bytes)
Result = TypeVar("Result")


class Unfit(Exception):
    """The client has to fetch or store the values itself."""


class _Stream:
    """The requests of one connection.

    Attributes:
        names: to be asked for.
        waiting: replies that are on their way.
        broken: whether what the server sends is of no use any more.
    """

    def __init__(self, pool: Any) -> None:
        self.pool, self.connection, self.names, self.waiting = pool, _connection(pool), deque[bytes](), 0
        self.broken, self._received = False, b""  # the first bytes of the next reply
        self._timeout: float | None = None  # of the client
        self._end = monotonic() + _MOST_SECONDS

    def open(self) -> None:
        """Begin with a connection on which nothing has come yet, such as a message of the server.

        Raises:
            Unfit: it has no socket of the system, as that of a client with a cache.
        """
        if isinstance(self._socket, socket.socket) and self.connection.can_read():
            self.connection.disconnect()
            self.connection.connect()
        if not isinstance(self._socket, socket.socket):
            raise Unfit
        self._timeout = self._socket.gettimeout()
        self._socket.settimeout(min(_MOST_SECONDS, self._timeout or _MOST_SECONDS))

    def close(self) -> None:
        """Give the connection back; closed, unless every reply was read, and no byte more."""
        if self.broken or self.waiting or self._received:
            self.connection.disconnect()
        elif isinstance(self._socket, socket.socket):
            self._socket.settimeout(self._timeout)
        self.pool.release(self.connection)

    @property
    def _socket(self) -> Any:
        return getattr(self.connection, "_sock", None)

    def ask(self, ahead: int) -> None:
        """Send requests for values until `ahead` are under way."""
        while self.names and self.waiting < ahead:
            self._send([_command(b"GET", self.names.popleft())])
            self.waiting += 1

    def ask_whether(self) -> None:
        """Ask for all names whether they are there; each reply is a number."""
        self.waiting += len(self.names)
        self._send([b"".join(_command(b"EXISTS", name) for name in self.names)])

    def store(self, name: bytes, value: Buffer, ttl: int | None) -> None:
        """Send a value; its reply is `+OK`."""
        body, last = memoryview(value).cast("B"), [] if ttl is None else [b"EX", b"%d" % ttl]
        before = b"*%d\r\n" % (3 + len(last)) + _string(b"SET") + _string(name) + b"$%d\r\n" % len(body)
        self.waiting += 1
        self._send([before, body, b"\r\n" + b"".join(map(_string, last))])

    def _send(self, parts: Sequence[Buffer]) -> None:
        if type(self._socket) is not socket.socket or sys.platform == "win32":  # TLS; Windows sends no parts at once
            for each in parts:
                self._socket.sendall(each)
            return
        rest = [memoryview(each) for each in parts]
        while rest:
            sent = self._in_time(self._socket.sendmsg(rest))
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            rest[:1] = [each[sent:] for each in rest[:1]]

    def line(self) -> bytes:
        """The first line of the next reply."""
        data = self._received
        while b"\r\n" not in data:
            if len(data) > _MOST_LINE:
                raise ConnectionError(f"reply: expected a line of at most {_MOST_LINE} bytes, got more")
            data += self._some(self._socket.recv(_LINE))
        line, _, self._received = data.partition(b"\r\n")
        return line

    def value(self, size: int) -> memoryview:
        """So many bytes, and the end of the line."""
        value = SPACE(size + 2)
        at = min(len(self._received), len(value))
        value[:at], self._received = self._received[:at], self._received[at:]
        while at < len(value):
            at += self._some(self._socket.recv_into(value[at:]))
        self.waiting -= 1
        return value[:size]

    def error(self, line: bytes, expected: str) -> Exception:
        """The error of a reply that is another one than expected. The connection ends with it."""
        self.broken = True
        parse = getattr(getattr(self.connection, "_parser", None), "parse_error", None)
        if line[:1] == b"-" and parse is not None:
            found: Exception = parse(line[1:].decode(errors="replace"))
            return found
        return ConnectionError(f"reply: expected {expected}, got {short(line)}")

    def _some(self, received: Received) -> Received:
        """The result of a socket; OSError if the other side has closed it."""
        if not received:
            raise ConnectionError("socket: expected a reply, got the end of the connection")
        return self._in_time(received)

    def _in_time(self, result: Received) -> Received:
        if monotonic() > self._end:
            raise TimeoutError(f"socket: expected all replies within {_MOST_SECONDS:g} s, got a part of them")
        return result


class Connections:
    """Fetches and stores values by the names of their keys.

    Args:
        client: of a server or a cluster.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._wait, self._transfer = Measured(0.1, 1.0), Measured()  # seconds of a round trip, and of a value
        self._size = 0  # bytes of the last value

    def get(self, names: Sequence[bytes], most: int) -> list[Buffer | None]:
        """The value of each name; empty for one of more than `most` bytes, and None for others of the same node then.

        Raises:
            Unfit: connections of another kind, as of a client with a cache; nothing was sent.
            Exception: what the client raises; OSError of a socket.
        """

        def run(streams: list[_Stream]) -> list[Buffer | None]:
            values: list[Buffer | None] = []
            asked = monotonic()
            for stream in dict.fromkeys(streams):
                stream.ask(self._ahead)
            for stream in streams:
                if stream.broken:
                    values.append(None)
                    continue
                line, began = stream.line(), monotonic()
                if not values:  # the first reply alone tells the round trip
                    self._wait.add(began - asked)
                values.append(value := self._value(stream, line, most))
                if value:
                    self._size = len(value)
                    self._transfer.add(max(monotonic() - began, 1e-9))
                stream.ask(self._ahead)
            return values

        return self._call(names, run)

    def contains(self, names: Sequence[bytes]) -> list[bool]:
        """Whether each name has a value; raises as `get`."""

        def run(streams: list[_Stream]) -> list[bool]:
            for stream in dict.fromkeys(streams):
                stream.ask_whether()
            found = []
            for stream in streams:
                if (line := stream.line()) not in (b":0", b":1"):
                    raise stream.error(line, "0 or 1")
                stream.waiting -= 1
                found.append(line == b":1")
            return found

        return self._call(names, run)

    def put(self, items: Sequence[tuple[bytes, Buffer]], ttl: int | None) -> None:
        """Store values by name, for `ttl` seconds; raises as `get`."""

        def run(streams: list[_Stream]) -> None:
            for stream, (name, value) in zip(streams, items, strict=True):
                stream.store(name, value, ttl)
            for stream in streams:
                if (line := stream.line()) != b"+OK":
                    raise stream.error(line, "OK")
                stream.waiting -= 1

        self._call([name for name, _ in items], run, reads=False)

    def _call(
        self, names: Sequence[bytes], run: Callable[[list[_Stream]], Result], *, reads: bool = True
    ) -> Result:
        """Run requests on the stream of each name; again where a key has moved to another node of a cluster."""
        choices = ("read_from_replicas", "load_balancing_strategy")
        replica = reads and any(getattr(self._client, each, None) for each in choices)
        nodes, gone, left = getattr(self._client, "nodes_manager", None), False, _REDIRECTIONS
        while True:
            try:
                with self._streams(names, replica) as streams:
                    return run(streams)
            except Exception as error:
                left -= 1
                if nodes is None or not left:
                    raise
                if type(error).__name__ == "MovedError":
                    (getattr(nodes, "move_slot", None) or nodes.update_moved_exception)(error)  # the latter: valkey
                    continue
                if gone or not (isinstance(error, ConnectionError) or type(error).__name__ in _GONE):
                    raise
            gone = True
            nodes.initialize()

    @property
    def _ahead(self) -> int:
        """Requests under way on a connection."""
        wait, transfer = self._wait.mean, self._transfer.mean
        if wait is None or transfer is None or (wait < _NEAR and self._size >= _LARGE):
            return 1
        return 2 + int(wait / transfer)

    @staticmethod
    def _value(stream: _Stream, line: bytes, most: int) -> Buffer | None:
        if line in (b"_", b"$-1"):  # of RESP3 and of RESP2: there is none
            stream.waiting -= 1
            return None
        if line[:1] != b"$" or not line[1:].isdigit():
            raise stream.error(line, "a value")
        if int(line[1:]) > most:
            stream.broken = True
            return b""
        return stream.value(int(line[1:]))

    @contextmanager
    def _streams(self, names: Sequence[bytes], replica: bool) -> Iterator[list[_Stream]]:
        """The stream of each name. Each node has one."""
        opened: dict[int, _Stream] = {}
        try:
            streams = [self._stream(name, replica, opened) for name in names]
            for stream in opened.values():
                stream.open()
            yield streams
        finally:
            for stream in opened.values():
                stream.close()

    def _stream(self, name: bytes, replica: bool, opened: dict[int, _Stream]) -> _Stream:
        """The stream to a server that has a key, which is to be asked for it."""
        client = self._client
        if hasattr(client, "get_node_from_key"):
            connect = getattr(client, "get_redis_connection", None) or client.get_valkey_connection
            node = client.get_node_from_key(name, replica=True) if replica else None
            client = connect(node or client.get_node_from_key(name))
        if not hasattr(client, "connection_pool"):
            raise Unfit
        pool = client.connection_pool
        if (stream := opened.get(id(pool))) is None:
            stream = opened[id(pool)] = _Stream(pool)
        stream.names.append(name)
        return stream


def _string(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def _command(name: bytes, key: bytes) -> bytes:
    return b"*2\r\n" + _string(name) + _string(key)


def _connection(pool: Any) -> Any:
    try:
        return pool.get_connection()
    except TypeError:  # valkey: the name of a command is required
        return pool.get_connection("GET")
