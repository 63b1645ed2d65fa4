"""A proxy on loopback between a client and a server, with a given rate each way and a given delay."""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from collections import deque
from typing import Any

__all__ = ["Proxy"]

_CHUNK = 1 << 16  # bytes
_MOST = 1 << 18  # bytes that are on their way; more wait in the sockets, as in a network


class _OneWay:
    """One direction of a connection: a thread receives, another one sends each chunk when it is due."""

    def __init__(self, source: socket.socket, target: socket.socket, rate: float, delay: float) -> None:
        self._source, self._target, self._rate, self._delay = source, target, rate, delay
        self._changed = threading.Condition()
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._size, self._ended = 0, False
        for run in (self._receive, self._send):
            threading.Thread(target=run, daemon=True).start()

    def _receive(self) -> None:
        free = 0.0  # when the line is free again
        while True:
            try:
                data = self._source.recv(_CHUNK)
            except OSError:
                data = b""
            with self._changed:
                if not data:
                    self._ended = True
                    self._changed.notify_all()
                    return
                free = max(free, time.monotonic()) + len(data) / self._rate
                self._chunks.append((free + self._delay, data))
                self._size += len(data)
                self._changed.notify_all()
                while self._size > _MOST + self._rate * self._delay:
                    self._changed.wait()

    def _send(self) -> None:
        while True:
            with self._changed:
                while not self._chunks:
                    if self._ended:
                        self._target.close()
                        return
                    self._changed.wait()
                due, data = self._chunks.popleft()
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                self._target.sendall(data)
            except OSError:
                self._source.close()
                return
            with self._changed:
                self._size -= len(data)
                self._changed.notify_all()


def _serve(port: int, rate: float, delay: float, ready: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ready.send(listening.getsockname()[1])
        while True:
            client, _ = listening.accept()
            server = socket.create_connection(("127.0.0.1", port))
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _OneWay(client, server, rate, delay)
            _OneWay(server, client, rate, delay)


class Proxy:
    """A process that forwards to a port of this machine.

    Args:
        port: of the server.
        rate: bytes per second, each way.
        delay: seconds of a round trip.

    Attributes:
        port: of the proxy.
    """

    def __init__(self, port: int, rate: float, delay: float) -> None:
        context = multiprocessing.get_context("spawn")
        mine, other = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(port, rate, delay / 2, other), daemon=True)
        self._process.start()
        self.port: int = mine.recv()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.join()
