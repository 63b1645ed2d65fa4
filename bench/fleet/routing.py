"""`python -m bench routing`: cached tokens behind four routers of others, against servers without one.

Two servers of the demo's model, or two workers or replicas of it, get the same conversations through each router that
is installed: Dynamo, vllm-router, Ray Serve and SGLang's router, with small and large memories, with and without a
directory that both share. Beside them stand one server with the memory of both, and two that clients ask by turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

from bench.fleet.conversations import Conversations
from bench.support.guides import GUIDES
from bench.support.processes import DynamoFrontend, DynamoWorker, Router, Server, eventually, free_port, posted
from bench.support.report import show, write_json
from kvcache.demo import DIRECTORY

__all__ = ["add_arguments", "main"]

SMALL, LARGE = 96, 400  # blocks of each of two workers: the conversations have 330 different ones
_PATIENT = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}  # of 5 s, in which a busy machine starts no proxy
SETTLE = 1.0  # seconds in which a router reads the first events
COLUMNS = {
    f"{name}{', store' if stored else ''}": (blocks, stored)
    for name, blocks in (("small", SMALL), ("large", LARGE)) for stored in (False, True)
}


class Running(NamedTuple):
    """An engine that runs: how to ask it, and how many requests each of its workers has had."""

    ask: Callable[[str], tuple[int, int]]
    spread: Callable[[], list[int]]


def _completion(url: str, model: str, prompt: str) -> tuple[int, int]:
    """Tokens of a prompt, and those that were cached, by OpenAI's interface."""
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    usage = posted(f"{url}/v1/completions", body)["usage"]
    return usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


@contextmanager
def _servers(blocks: int, store: Path | None, count: int = 2) -> Iterator[list[Server]]:
    """Servers that have told a first event, before which routers miss some."""
    options = ["--num-blocks", str(blocks), *(["--autosave", str(store)] if store else [])]
    with ExitStack() as stack:
        yield [stack.enter_context(Server(DIRECTORY, "demo", *options)) for _ in range(count)]


def _counted(workers: list[Server] | list[DynamoWorker]) -> Callable[[], list[int]]:
    before = [each.count("finished_total") for each in workers]
    return lambda: [each.count("finished_total") - n for each, n in zip(workers, before, strict=True)]


@contextmanager
def one_server(folder: Path, blocks: int, store: Path | None) -> Iterator[Running]:
    """One server with the memory of two."""
    with _servers(2 * blocks, store, 1) as servers:
        yield Running(lambda prompt: _completion(servers[0].url, "demo", prompt), _counted(servers))


@contextmanager
def by_turns(folder: Path, blocks: int, store: Path | None) -> Iterator[Running]:
    """Two servers and no router."""
    with _servers(blocks, store) as servers:
        number = itertools.count()
        yield Running(lambda prompt: _completion(servers[next(number) % 2].url, "demo", prompt), _counted(servers))


@contextmanager
def vllm_router(folder: Path, blocks: int, store: Path | None) -> Iterator[Running]:
    """By the events of the servers."""
    with _servers(blocks, store) as servers, Router.by_events(servers, "demo") as router:
        for each in servers:
            _completion(each.url, "demo", "def first_event():\n" * 9)
        time.sleep(SETTLE)
        yield Running(lambda prompt: _completion(router.url, "demo", prompt), _counted(servers))


@contextmanager
def sglang_router(folder: Path, blocks: int, store: Path | None) -> Iterator[Running]:
    """By the texts that it has sent; two requests more on one server than on the other are as much as it lets pass."""
    options = ("--policy", "cache_aware", "--balance-abs-threshold", "2", "--balance-rel-threshold", "1.1")
    with _servers(blocks, store) as servers, Router("sglang_router", servers, *options) as router:
        yield Running(lambda prompt: _completion(router.url, "demo", prompt), _counted(servers))


@contextmanager
def dynamo(folder: Path, blocks: int, store: Path | None) -> Iterator[Running]:
    """By the events of its workers."""
    shutil.copytree(DIRECTORY, folder / "demo")
    options = ["--num-blocks", str(blocks), *(["--store", str(store)] if store else [])]
    with ExitStack() as stack:
        workers = [stack.enter_context(DynamoWorker(folder, i, *options)) for i in range(2)]
        frontend = stack.enter_context(DynamoFrontend(folder, "kv", "--router-min-initial-workers", "2"))
        eventually(lambda: [each.count("finished_total") for each in workers], 120)
        frontend.wait_until_ready()
        time.sleep(SETTLE)
        yield Running(lambda prompt: _completion(frontend.url, "demo", prompt), _counted(workers))


@contextmanager
def ray_serve(folder: Path, blocks: int, store: Path | None) -> Iterator[Running]:
    """The deployment of the guide, by the texts that it has sent.

    Sized for 8 answers at a time, so that the load decides from two requests more on, as for SGLang's router.
    """
    (block,) = re.findall(r"```py\n(.*?)```", (GUIDES / "ray.md").read_text(encoding="utf-8"), re.DOTALL)
    sizes = re.compile(r"^THREADS, RUNNING = .*$", re.MULTILINE)
    (folder / "deployment.py").write_text(sizes.sub("THREADS, RUNNING = 1, 8", block))
    port, seen = free_port(), Counter[int]()
    command = [sys.executable, "-m", "bench.fleet.ray_replicas", str(port), str(DIRECTORY), str(blocks)]
    path = os.pathsep.join([str(folder), str(GUIDES.parents[1]), os.environ.get("PYTHONPATH", "")])

    def ask(prompt: str) -> tuple[int, int]:
        body = json.dumps({"prompt": prompt, "max_tokens": 4}).encode()
        with urlopen(Request(f"http://127.0.0.1:{port}", body), timeout=60) as answer:
            usage = json.loads(answer.read().splitlines()[-1])
        seen[usage["pid"]] += 1
        return usage["prompt_tokens"], usage["cached_tokens"]

    with subprocess.Popen(
        command + ([str(store)] if store else []), env=os.environ | _PATIENT | {"PYTHONPATH": path}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if not any(line == "ready\n" for line in process.stdout):
            raise RuntimeError("Ray Serve: expected replicas that are ready, got none")
        yield Running(ask, lambda: [*seen.values(), 0][:2])
        process.stdin.close()


class Engine(NamedTuple):
    """A row of the table: what it is, how to run it, and a module that it needs."""

    name: str
    run: Callable[[Path, int, Path | None], AbstractContextManager[Running]]
    needs: str | None = None


ENGINES = (
    Engine("one server, twice the memory", one_server),
    Engine("two servers by turns", by_turns),
    Engine("Dynamo, kv", dynamo, "dynamo.frontend"),
    Engine("vllm-router, kv_aware", vllm_router, "vllm_router"),
    Engine("Ray Serve, prefix router", ray_serve, "ray.serve"),
    Engine("SGLang router, cache_aware", sglang_router, "sglang_router"),
)


def installed(module: str | None) -> bool:
    """Whether a module is there; nothing of it runs but what its package has at its top."""
    try:
        return module is None or find_spec(module) is not None
    except ImportError:
        return False


def measured(engine: Engine, blocks: int, *, stored: bool, texts: Conversations) -> tuple[float, list[int]]:
    """The share of cached tokens of all prompts, and the requests of each worker."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with engine.run(folder, blocks, folder / "store" if stored else None) as running:
            tokens, cached = texts.send(running.ask)
            return cached / tokens, running.spread()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--only", metavar="WORD", default="", help="engines with this word in their names")


def main(options: argparse.Namespace) -> int:
    """Print the table; returns how often an engine failed, or a worker got nothing."""
    texts = Conversations(8, 2) if options.quick else Conversations()
    columns = dict(itertools.islice(COLUMNS.items(), 1 if options.quick else None))
    rows, found, missed = [], {}, 0
    for engine in ENGINES:
        if options.only.lower() not in engine.name.lower():
            continue
        if not installed(engine.needs):
            rows.append([engine.name, "not installed", *[""] * (len(columns) - 1)])
            continue
        cells = []
        for name, (blocks, stored) in columns.items():
            try:
                share, spread = measured(engine, blocks, stored=stored, texts=texts)
            except (OSError, RuntimeError, TimeoutError) as error:
                print(f"{engine.name}, {name}: {error}", file=sys.stderr, flush=True)
                cells.append("failed")
                missed += 1
                continue
            missed += spread.count(0)
            cells.append(f"{share:.1%} ({'+'.join(map(str, sorted(spread)))})")
            found[f"{engine.name}; {name}"] = {"cached": share, "requests": spread}
        rows.append([engine.name, *cells])
    if not rows:
        raise SystemExit(f"--only: expected a word of an engine's name, got {options.only!r}")
    show(
        options.markdown, "Cached tokens of prompts (requests of the workers)", ["", *columns], rows,
        f"{texts.num_requests} prompts of {texts.count} conversations, {texts.clients} at a time; blocks of 16 tokens "
        f"of each of two workers: {SMALL} (small), {LARGE} (large)",
    )
    write_json(options.json, found=found)
    return missed
