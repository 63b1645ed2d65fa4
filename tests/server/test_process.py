"""The process of a server: descriptors, connections, signals."""

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import pytest
from http_servers import answer, post

from kvcache.server.process import Capacity, _bounded

resource = pytest.importorskip("resource")
pytestmark = [pytest.mark.exhaustive, pytest.mark.one_build]

LIMITS = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
MAIN = "from kvcache.__main__ import main; sys.exit(main(['serve', '--port', '0', *sys.argv[1:]]))"


@contextmanager
def serving(*options, soft=256, hard=256):
    """A process with at most `soft` descriptors; yields it and the address of the demo model in it."""
    command = [sys.executable, "-c", LIMITS.format(soft=soft, hard=hard) + MAIN, *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ, **pipes) as process:
        try:
            port = re.search(r":(\d+)/v1", process.stdout.readline())[1]
            yield process, ("127.0.0.1", int(port))
        finally:
            if process.poll() is None:
                process.kill()


def asked(address, **body):
    connection = socket.create_connection(address, timeout=60)
    connection.sendall(post(json.dumps({"model": "demo", "prompt": "def ", **body}).encode()))
    return connection


def ready(address):
    """The status of the probe."""
    connection = socket.create_connection(address, timeout=60)
    connection.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    return answer(connection)[0]


def test_descriptors_and_signals():
    """The soft limit of descriptors is raised; the oldest idle connections make room, and the log stays small.

    A first signal fails the probe, and answers go on; a second one ends them at once, and they say why.
    """
    with serving("--drain", "600", "--drain-delay", "600", soft=64) as (process, address):
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (256, 256)
        slow = asked(address, max_tokens=300, temperature=0, logit_bias={"0": -100})
        idle = [socket.create_connection(address, timeout=60) for _ in range(320)]
        for connection in (asked(address, max_tokens=1) for _ in range(3)):
            assert answer(connection)[0] == 200
        assert idle[0].recv(1) == b"", "closed"
        status, body = answer(slow)
        assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 300)
        for connection in idle:
            connection.close()
        stream = asked(address, max_tokens=1900, n=32, temperature=1, stream=True, logit_bias={"0": -100})
        assert stream.recv(1 << 16)
        process.send_signal(signal.SIGTERM)
        while ready(address) != 503:
            time.sleep(0.01)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        data = b""
        while piece := stream.recv(1 << 16):
            data += piece
        assert b"the server ends" in data
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        _, errors = process.communicate(timeout=60)
        assert process.returncode in (0, -signal.SIGTERM)
        assert len(errors) < 10_000
        lines = [line for line in errors.splitlines() if line.startswith("drain: ")]
        assert re.fullmatch(
            r"drain: begins in 600 s; .*\ndrain: a second signal cuts \d+ requests\n"
            r"drain: \d+ requests run and have 600 s; new ones are refused\ndrain: ended after [\d.]+ s",
            "\n".join(lines),
        ), errors
        assert "Traceback" not in errors


class Transport:
    """A connection of the event loop.

    Attributes:
        is_closed: whether it is, though bytes may wait that nobody reads.
        is_gone: whether it is gone, bytes and all.
    """

    def __init__(self, is_closed):
        self.is_closed, self.is_gone = is_closed, False

    def is_closing(self):
        return self.is_closed

    def abort(self):
        self.is_gone = True


class Protocol:
    """A connection of uvicorn."""

    connections: ClassVar = set()

    def __init__(self, ended):
        self.cycle = SimpleNamespace(response_complete=ended)

    def connection_made(self, transport):
        self.transport = transport
        self.connections.add(self)


def test_a_closed_connection_whose_client_reads_nothing_makes_room():
    """An answer that ran out of time has not ended; bytes of it would wait for its client for ever."""
    kind = _bounded(Protocol, Capacity(4, 8))
    made = [kind(ended) for ended in (False, False, True, False, False, False)]
    transports = [Transport(is_closed) for is_closed in (False, True, False, False, False, False)]
    for connection, transport in zip(made, transports, strict=True):
        connection.connection_made(transport)
    assert [each.is_gone for each in transports] == [False, True, True, False, False, False]
    assert Protocol.connections == {each for each in made if not each.transport.is_gone}


HEAPS = """
import ctypes, sys, threading

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
if sys.argv[1] == "bounded":
    from kvcache.server import process

    process.bound_heaps()
meeting = threading.Barrier(8)

def allocate():
    meeting.wait()
    libc.malloc(5000)
    meeting.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="needs glibc")
def test_threads_share_heaps(tmp_path):
    """The memory that threads of a server leave is that of two heaps, not of one for each of them."""
    counts = {}
    for kind in ("default", "bounded"):
        subprocess.run([sys.executable, "-c", HEAPS, kind, str(tmp_path / kind)], check=True)
        counts[kind] = (tmp_path / kind).read_text().count("<heap nr=")
    assert counts["bounded"] <= 2 < counts["default"]
