"""Servers, workers of Dynamo and routers before them: processes of this Python on loopback, for benches and tests."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

__all__ = ["DynamoFrontend", "DynamoWorker", "Router", "Server", "eventually", "free_port", "posted", "served"]

PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")  # of Dynamo, on one machine


def free_port() -> int:
    """A port below 32,768: Dynamo reads one of its settings as 16 bits with a sign."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", random.randrange(20_000, 32_000))) as free:
            return int(free.getsockname()[1])


def _head(key: str | None) -> dict[str, str]:
    return {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})


def _fetched(url: str, key: str | None = None) -> str:
    """The page of an address."""
    with urlopen(Request(url, headers=_head(key)), timeout=30) as page:
        return str(page.read().decode())


def posted(url: str, body: dict[str, Any], key: str | None = None) -> Any:
    """Send a body, with an API key if there is one.

    Returns:
        The object that is the answer; of a stream, all of its bytes.
    """
    head = _head(key)
    with urlopen(Request(url, json.dumps(body).encode(), head), timeout=120) as answer:
        data = answer.read()
    return data if body.get("stream") else json.loads(data)


def eventually(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Wait until a condition holds; what does not listen, or count, yet is waited for."""
    end = time.monotonic() + seconds
    while True:
        with suppress(OSError, LookupError):
            if condition():
                return
        if time.monotonic() > end:
            raise TimeoutError(f"expected it within {seconds} s: {condition}")
        time.sleep(0.02)


class Process:
    """A module of this Python that runs until the end of a block.

    Args:
        log: a file for what it says; None: nobody reads it. With `stdout` its standard output is a pipe instead.
        variables: of its environment, beside those of this process.
    """

    def __init__(self, *command: str, log: Path | None = None, stdout: bool = False, **variables: str) -> None:
        self._log = open(log or os.devnull, "ab")  # noqa: SIM115  as long as the process
        self.running = subprocess.Popen(
            [sys.executable, "-m", *command], env=os.environ | variables, text=True, stderr=self._log,
            stdout=subprocess.PIPE if stdout else self._log,
        )

    def said(self) -> str:
        """The next line of its standard output."""
        assert self.running.stdout is not None
        return self.running.stdout.readline()

    def end(self, how: int = signal.SIGTERM, patience: float = 60) -> None:
        """Send a signal, and wait until the process has ended; after `patience` seconds it is killed."""
        self.running.send_signal(how)
        with suppress(subprocess.TimeoutExpired):
            self.running.wait(patience)
        self.running.kill()
        self.running.wait()
        if self.running.stdout is not None:
            self.running.stdout.close()
        self._log.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()


class Server(Process):
    """A server of this library, on one thread.

    Args:
        model: its path; clients ask for it by `name`.
        options: further ones of `python -m kvcache serve`.
        told: whether it tells block events (extra `cluster`).

    Attributes:
        url: its address.
        events, replay: those of block events, or "".
    """

    def __init__(self, model: Path, name: str, *options: str, told: bool = True, port: int = 0) -> None:
        self.replay = f"tcp://127.0.0.1:{free_port()}" if told else ""
        events = ("--kv-events", "tcp://127.0.0.1:*", "--kv-events-replay", self.replay) if told else ()
        super().__init__(
            "kvcache", "serve", "--model", str(model), "--name", name, "--port", str(port), "--threads", "1",
            *events, *options, stdout=True,
        )
        try:
            self.url = self._said_at().removesuffix("/v1")
            self.events = self._said_at() if told else ""
        except BaseException:
            self.end()
            raise

    def _said_at(self) -> str:
        line = self.said()
        if " at " not in line:
            raise RuntimeError(f"expected a server that says its addresses, got {line!r}")
        return line.split(" at ")[1].strip()

    def count(self, name: str, key: str | None = None) -> int:
        """A counter of its page of metrics, which a key may have to open."""
        return _count(f"{self.url}/metrics", name, key)


@contextmanager
def served(model: Path, *options: str, **variables: str) -> Iterator[tuple[tuple[str, int], int]]:
    """A server of a model, which is named m: its address, and the id of its process."""
    command = [sys.executable, "-m", "kvcache", "serve", "--model", str(model), "--name", "m", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | variables) as process:
        try:
            assert process.stdout is not None
            host, _, port = process.stdout.readline().rpartition("/v1")[0].rpartition("//")[2].rpartition(":")
            yield (host, int(port)), process.pid
        finally:
            process.terminate()


def _count(url: str, name: str, key: str | None = None) -> int:
    found = re.search(rf"^kvcache_{name}(?:\{{.*\}})? (\d+)", _fetched(url, key), re.MULTILINE)
    if found is None:
        raise LookupError(f"{name}: expected it on {url}, got none")
    return int(found[1])


class Router(Process):
    """vllm-router or SGLang's router before servers, once it answers.

    Args:
        module: `vllm_router` or `sglang_router`.
        options: beside those of addresses.
    """

    def __init__(self, module: str, servers: list[Server], *options: str, port: int | None = None) -> None:
        port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(
            f"{module}.launch_router", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port",
            str(free_port()), *options, "--worker-urls", *[each.url for each in servers],
        )
        try:
            eventually(lambda: _fetched(f"{self.url}/health") is not None)
        except BaseException:
            self.end()
            raise

    @classmethod
    def by_events(cls, servers: list[Server], name: str, port: int | None = None) -> Router:
        """vllm-router with its policy `kv_aware` over the events of the servers."""
        sources = [f"--kv-event-source={each.url}={each.events}" for each in servers]
        replays = [f"--kv-event-replay-source={each.url}={each.replay}" for each in servers]
        names = ["--kv-event-block-size", "16", "--kv-event-model", name, "--policy", "kv_aware"]
        return cls("vllm_router", servers, *names, *sources, *replays, port=port)


class DynamoWorker(Process):
    """A worker of Dynamo, on one thread.

    Args:
        folder: where its log goes, and where Dynamo finds workers (`kv`); the model is there too, in a folder `demo`.
        options: further ones of `python -m kvcache.integrations.dynamo`.
    """

    def __init__(self, folder: Path, number: int, *options: str) -> None:
        self._port = free_port()
        super().__init__(
            "kvcache.integrations.dynamo", "--model", str(folder / "demo"), "--threads", "1", *PLANES, *options,
            log=folder / f"worker{number}.log", DYN_FILE_KV=str(folder / "kv"), DYN_SYSTEM_PORT=str(self._port),
        )

    def count(self, name: str) -> int:
        """A counter of its page of metrics."""
        return _count(f"http://127.0.0.1:{self._port}/metrics", name)


class DynamoFrontend(Process):
    """Dynamo's frontend; `mode` is how it routes."""

    def __init__(self, folder: Path, mode: str, *options: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(
            "dynamo.frontend", *PLANES, "--router-mode", mode, "--http-host", "127.0.0.1", "--http-port", str(port),
            *options, log=folder / f"{mode}.log", DYN_FILE_KV=str(folder / "kv"),
        )

    def wait_until_ready(self) -> None:
        """Wait until it has the answer of a worker."""
        body = {"model": "demo", "prompt": "ready", "max_tokens": 1}
        eventually(lambda: posted(f"{self.url}/v1/completions", body), 120)
