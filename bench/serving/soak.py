"""`python -m bench soak`: hostile and ordinary clients beside each other, over a server of the demo's model.

Ordinary clients read streams, ask for answers of a new schema, and for `/health` and `/metrics` ten times a second.
Hostile ones, in a process of their own and with a key of their own, send the bodies and grammars of `hostile_bodies`.
Printed are the longest times between two events of an ordinary stream and until its first one, the longest times of
answers of the two pages and to a new schema, and the memory of the server and of its processes before and after. The
exit status is 1 where a bound is exceeded. The time until the first event has none: with less memory than all clients
ask for, some wait. A stream that has begun does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

from bench.serving.hostile_bodies import BODIES, GRAMMARS
from bench.support.processes import served
from kvcache.demo import DIRECTORY

__all__ = ["add_arguments", "main"]

STALL = 0.5  # seconds: the bound
BOUNDED = ("stream", "/health", "/metrics")
# MiB that the server may have more afterwards: 48 of K and V that were not used before, 64 of grammars that stay, and
# the allocator's.
LEFT = 192
KINDS = {"bodies": BODIES, "grammars": GRAMMARS, "all": {**BODIES, **GRAMMARS}}
HELD = 50  # connections of a client that opens many
SLOW, GRACE = 60.0, 10.0  # seconds after which an answer is given up, and ordinary clients are at the end

# A template whose sign of calls is that of Qwen3, so that tools with grammars may be called.
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}assistant:"
)


class Soak:
    """The clients of one server, and the times and answers that they saw.

    Args:
        address: of the server.
        until: when they end, by `monotonic`.

    Attributes:
        key: of the API.
        longest: the longest time of each kind, in seconds.
        counts: how many of each kind there were.
    """

    def __init__(self, address: tuple[str, int], until: float) -> None:
        self.address, self.until, self.key = address, until, "ordinary"
        self.longest = dict.fromkeys([*BOUNDED, "first event", "new schema"], 0.0)
        self.counts = dict.fromkeys([*self.longest, "hostile"], 0)

    def ordinary(self, streams: int) -> None:
        """Run ordinary clients until the end."""
        pages = [self.page("/health"), self.page("/metrics")]
        self._run([*[self.stream() for _ in range(streams)], self.schemas(), *pages])

    def hostile(self, clients: int, kind: str, counted: Any) -> None:
        """Run hostile clients until the end, and put the number of their requests into the queue `counted`."""
        self.key, names = "hostile", list(KINDS[kind])
        self._run([self.hold(), *[self.attack(kind, names[i:] + names[:i]) for i in range(clients)]])
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

    async def schemas(self) -> None:
        """Ask for answers of a schema that is new, one after another."""
        while monotonic() < self.until:
            schema = {"type": "object", "properties": {f"p{random.random()}": {"enum": ["a", "b"]}}}
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            talk, began = [{"role": "user", "content": "hi"}], monotonic()
            try:
                await self.read("/v1/chat/completions", {"messages": talk, "max_tokens": 4, "response_format": form})
            finally:
                self.see("new schema", monotonic() - began)
            await asyncio.sleep(0.5)

    async def attack(self, kind: str, names: list[str]) -> None:
        """Send hostile bodies; leave some answers unread."""
        while monotonic() < self.until:
            for name in names:
                if monotonic() < self.until:
                    with suppress(OSError, TimeoutError, asyncio.TimeoutError):
                        patience = min(SLOW, self.until - monotonic()) if random.random() < 0.7 else 0.5
                        await asyncio.wait_for(self.read(*KINDS[kind][name]()), patience)
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
            head += f"\r\nAuthorization: Bearer {self.key}\r\nContent-Length: {len(body or b'')}\r\n\r\n"
            writer.write(head.encode() + (body or b""))
            while line := await reader.readline():
                yield line
        finally:
            writer.close()

    def see(self, kind: str, seconds: float) -> None:
        """Count an answer of a kind."""
        self.counts[kind] += 1
        self.longest[kind] = max(self.longest[kind], seconds)


@contextmanager
def with_template(model: Path) -> Iterator[Path]:
    """A folder of the demo's model with a template for chats; another model is as it is."""
    if model != DIRECTORY:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        for each in DIRECTORY.iterdir():
            if each.suffix in (".json", ".safetensors"):
                (Path(folder) / each.name).symlink_to(each)
        (Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
        yield Path(folder)


def children(process: int) -> list[int]:
    """The processes that a process has started, and those of these."""
    files = [each / "children" for each in Path(f"/proc/{process}/task").iterdir()]
    found = [int(each) for file in files for each in file.read_text().split()]
    return found + [each for child in found for each in children(child)]


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
    parser.add_argument("--only", choices=KINDS, default="all", help="of hostile bodies (default all)")


def main(options: argparse.Namespace) -> int:
    """Run the clients and print what they saw; 1 if a bound is exceeded."""
    keys = "ordinary\nhostile"
    with (
        with_template(options.model) as model,
        served(model, "--drain", "5", KVCACHE_API_KEYS=keys) as (address, process),
    ):
        Soak(address, monotonic() + min(2.0, options.seconds)).ordinary(options.streams)
        before = resident(process)
        soak, others = Soak(address, monotonic() + options.seconds), multiprocessing.get_context("spawn")
        counted = others.SimpleQueue()
        attack = others.Process(target=soak.hostile, args=(options.hostile, options.only, counted))
        attack.start()
        soak.ordinary(options.streams)
        soak.counts["hostile"] = counted.get()
        attack.join()
        Soak(address, monotonic() + min(5.0, options.seconds)).ordinary(options.streams)
        after, peak = resident(process), resident(process, "VmHWM")
        others_after = sum(map(resident, children(process)))
    for kind, seconds in soak.longest.items():
        bound = f", bound {STALL} s" if kind in BOUNDED else ""
        print(f"{kind:11} {soak.counts[kind]:7} times, the longest one {seconds:.3f} s{bound}")
    print(f"hostile     {soak.counts['hostile']:7} requests")
    print(f"memory      {before} MiB before, {peak} at most, {after} after, bound {before + LEFT}")
    print(f"processes   {others_after} MiB of those that the server has started")
    return int(max(soak.longest[kind] for kind in BOUNDED) > STALL or after > before + LEFT)
