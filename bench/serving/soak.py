"""`python -m bench soak`: hostile and ordinary clients beside each other, over a server of the demo's model.

Ordinary clients read streams, and ask for `/health` and `/metrics` ten times a second. Hostile ones, in a process of
their own, send what `HOSTILE` has. Printed are the longest times between two events of an ordinary stream and until its
first one, the longest time of an answer of the two pages, and the server's memory before and after. The exit status is
1 where a bound is exceeded. The time until the first event has none: with less memory than all clients ask for, some
wait. A stream that has begun does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from bench.support.processes import served
from kvcache.demo import DIRECTORY

__all__ = ["HOSTILE", "add_arguments", "main"]

STALL = 0.5  # seconds: the bound
BOUNDED = ("stream", "/health", "/metrics")
LEFT = 128  # MiB that the server may have more afterwards: 48 of K and V that were not used before, and the allocator's
HELD = 50  # connections of a client that opens many
SLOW, GRACE = 60.0, 10.0  # seconds after which an answer is given up, and ordinary clients are at the end

# Bodies of requests, which take memory or time where a server has no limit for them.
HOSTILE: dict[str, Callable[[], Any]] = {
    "a long text": lambda: {"prompt": "a" * 3_000_000},
    "a long word": lambda: {"prompt": "\u00e9" * 1_500_000},
    "a text of many messages": lambda: {"prompt": ["hello"] * 100_000},
    "all log-probabilities": lambda: {"prompt": "x", "n": 32, "logprobs": 5, "max_tokens": 500},
    "many end tokens": lambda: {"prompt": "x", "stop_token_ids": list(range(400_000))},
    "long stop strings": lambda: {"prompt": "x", "stop": ["ab" * 100_000] * 4, "max_tokens": 200},
    "many biases": lambda: {"prompt": "x", "logit_bias": {str(i): -1 for i in range(200_000)}},
    "many samples": lambda: {"prompt": "x", "n": 128, "max_tokens": 500},
    "deep JSON": lambda: b"[" * 1_000_000,
    "no JSON": lambda: random.randbytes(1_000_000),
}


class Soak:
    """The clients of one server, and the times and answers that they saw.

    Args:
        address: of the server.
        until: when they end, by `monotonic`.

    Attributes:
        longest: the longest time of each kind, in seconds.
        counts: how many of each kind there were.
    """

    def __init__(self, address: tuple[str, int], until: float) -> None:
        self.address, self.until = address, until
        self.longest = dict.fromkeys([*BOUNDED, "first event"], 0.0)
        self.counts = dict.fromkeys([*self.longest, "hostile"], 0)

    def ordinary(self, streams: int) -> None:
        """Run ordinary clients until the end."""
        self._run([*[self.stream() for _ in range(streams)], self.page("/health"), self.page("/metrics")])

    def hostile(self, clients: int, counted: Any) -> None:
        """Run hostile clients until the end, and put the number of their requests into the queue `counted`."""
        self._run([self.hold(), *[self.attack(list(HOSTILE)[i:] + list(HOSTILE)[:i]) for i in range(clients)]])
        counted.put(self.counts["hostile"])

    def _run(self, clients: list[Coroutine[Any, Any, None]]) -> None:
        async def all_of_them() -> None:
            with suppress(TimeoutError, asyncio.TimeoutError):  # two classes in Python 3.10
                await asyncio.wait_for(asyncio.gather(*clients), self.until - monotonic() + GRACE)

        asyncio.run(all_of_them())

    async def stream(self) -> None:
        """Read streams, one after another."""
        body = {"prompt": "Once upon a time", "max_tokens": 100, "stream": True}
        while monotonic() < self.until:
            kind, last = "first event", monotonic()
            try:
                async for line in self.lines("/v1/completions", body):
                    if line.startswith(b"data: {"):
                        self.see(kind, monotonic() - last)
                        kind, last = "stream", monotonic()
            finally:
                self.see(kind, monotonic() - last)

    async def page(self, path: str) -> None:
        """Ask for a page ten times a second."""
        while monotonic() < self.until:
            began = monotonic()
            try:
                await self.read(path)
            finally:
                self.see(path, monotonic() - began)
            await asyncio.sleep(0.1)

    async def attack(self, names: list[str]) -> None:
        """Send hostile bodies; leave some answers unread."""
        while monotonic() < self.until:
            for name in names:
                if monotonic() < self.until:
                    with suppress(OSError, TimeoutError, asyncio.TimeoutError):
                        patience = min(SLOW, self.until - monotonic()) if random.random() < 0.7 else 0.5
                        await asyncio.wait_for(self.read("/v1/completions", HOSTILE[name]()), patience)
                    self.counts["hostile"] += 1

    async def hold(self) -> None:
        """Open connections that send a part of a request, and nothing more."""
        while monotonic() < self.until:
            held = []
            with suppress(OSError):
                for _ in range(HELD):
                    _, writer = await asyncio.open_connection(*self.address)
                    held.append(writer)
                    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 400000\r\n\r\n{")
            await asyncio.sleep(min(5.0, max(0.0, self.until - monotonic())))
            for writer in held:
                writer.close()

    async def read(self, path: str, body: Any = None) -> None:
        """Read an answer to its end."""
        async for _ in self.lines(path, body):
            pass

    async def lines(self, path: str, body: Any = None) -> AsyncIterator[bytes]:
        """The lines of an answer."""
        if isinstance(body, dict):
            body = json.dumps({"model": "m", **body}).encode()
        method = "GET" if body is None else "POST"
        reader, writer = await asyncio.open_connection(*self.address, limit=1 << 30)
        try:
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json"
            writer.write(f"{head}\r\nContent-Length: {len(body or b'')}\r\n\r\n".encode() + (body or b""))
            while line := await reader.readline():
                yield line
        finally:
            writer.close()

    def see(self, kind: str, seconds: float) -> None:
        """Count an answer of a kind."""
        self.counts[kind] += 1
        self.longest[kind] = max(self.longest[kind], seconds)


def resident(process: int, what: str = "VmRSS") -> int:
    """MiB of memory that a process has; "VmHWM": had at its most."""
    found = re.search(rf"{what}:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) >> 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--model", type=Path, default=DIRECTORY, help="a checkpoint; by default the demo's")
    parser.add_argument("--seconds", type=float, default=60.0, help="default 60; an hour shows what grows slowly")
    parser.add_argument("--streams", type=int, default=2, help="ordinary streams at once (default 2)")
    parser.add_argument("--hostile", type=int, default=4, help="hostile clients at once (default 4)")


def main(options: argparse.Namespace) -> int:
    """Run the clients and print what they saw; 1 if a bound is exceeded."""
    with served(options.model, "--drain", "5") as (address, process):
        Soak(address, monotonic() + 2).ordinary(options.streams)
        before = resident(process)
        soak, others = Soak(address, monotonic() + options.seconds), multiprocessing.get_context("spawn")
        counted = others.SimpleQueue()
        attack = others.Process(target=soak.hostile, args=(options.hostile, counted))
        attack.start()
        soak.ordinary(options.streams)
        soak.counts["hostile"] = counted.get()
        attack.join()
        Soak(address, monotonic() + 5).ordinary(options.streams)
        after, peak = resident(process), resident(process, "VmHWM")
    for kind, seconds in soak.longest.items():
        bound = f", bound {STALL} s" if kind in BOUNDED else ""
        print(f"{kind:11} {soak.counts[kind]:7} times, the longest one {seconds:.3f} s{bound}")
    print(f"hostile     {soak.counts['hostile']:7} requests")
    print(f"memory      {before} MiB before, {peak} at most, {after} after, bound {before + LEFT}")
    return int(max(soak.longest[kind] for kind in BOUNDED) > STALL or after > before + LEFT)
