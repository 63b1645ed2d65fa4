"""Routers of others before two servers, as they are installed: `.ci/run cluster` installs them."""

import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from http_servers import tiny_file

pytestmark = [pytest.mark.no_level, pytest.mark.one_build]

HEADS = [f"# tenant {t} {random.Random(t).random()}\n" + "def walk(path, topdown=True):\n" * 6 for t in range(8)]


@contextmanager
def process(*command, stdout=subprocess.PIPE):
    """A process of this Python, until the end of the block."""
    with subprocess.Popen([sys.executable, *command], stdout=stdout, stderr=subprocess.DEVNULL, text=True) as running:
        try:
            yield running
        finally:
            running.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                running.wait(10)
            running.kill()


class Worker:
    """A server of the tiny model.

    Attributes:
        url, events, replay: its addresses.
    """

    def __init__(self, stack, model):
        free = "tcp://127.0.0.1:*"
        with socket.create_server(("127.0.0.1", 0)) as port:
            self.replay = f"tcp://127.0.0.1:{port.getsockname()[1]}"
        running = stack.enter_context(process(
            "-m", "kvcache", "serve", "--model", str(model), "--name", "tiny", "--port", "0", "--threads", "1",
            "--num-blocks", "400", "--kv-events", free, "--kv-events-replay", self.replay,
        ))
        self.url = re.search(r"http://[\d.:]+", running.stdout.readline())[0]
        self.events = running.stdout.readline().split(" at ")[1].strip()

    def finished(self):
        with urlopen(f"{self.url}/metrics", timeout=60) as page:
            return int(re.search(r"^kvcache_finished_total(?:\{.*\})? (\d+)", page.read().decode(), re.MULTILINE)[1])


@pytest.fixture
def workers(tmp_path):
    model = tiny_file(tmp_path)
    with ExitStack() as stack:
        yield [Worker(stack, model) for _ in range(2)]


@contextmanager
def router(module, *options):
    """The address of a router, when it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    host = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(port + 1 if port < 65535 else 1024))
    with process("-m", f"{module}.launch_router", *host, *options, stdout=subprocess.DEVNULL):
        end = time.monotonic() + 60
        while True:
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=10).close()
                break
            except (URLError, OSError):
                assert time.monotonic() < end, "the router is not ready"
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"


def asked(url, text, chat=False, **more):
    """The answer to a text, as an object; of a stream, all of its bytes."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    what = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    body = json.dumps({"model": "tiny", **what, "max_tokens": 3, "temperature": 0, **more}).encode()
    with urlopen(Request(url + path, body, {"content-type": "application/json"}), timeout=60) as answer:
        data = answer.read()
    return data if more.get("stream") else json.loads(data)


def share(url, count, chat=False):
    """The share of cached tokens of requests that continue the prefixes in random order."""
    draw, prompt, cached = random.Random(5), 0, 0
    for i in range(count):
        usage = asked(url, f"{HEADS[draw.randrange(8)]}x{i}", chat)["usage"]
        prompt += usage["prompt_tokens"]
        cached += usage["prompt_tokens_details"]["cached_tokens"]
    return cached / prompt


@pytest.mark.skipif(find_spec("vllm_router") is None, reason="needs vllm-router")
def test_vllm_router(workers):
    """Its policy kv_aware finds the worker that has a prefix, also of before it was there; both have work."""
    for chat in (False, True):
        for t, head in enumerate(HEADS):
            asked(workers[t % 2].url, f"{head}warm", chat)
    sources = [f"--kv-event-source={worker.url}={worker.events}" for worker in workers]
    replays = [f"--kv-event-replay-source={worker.url}={worker.replay}" for worker in workers]
    names = ["--kv-event-block-size", "16", "--kv-event-model", "tiny", "--policy", "kv_aware"]
    with router("vllm_router", *names, *sources, *replays, "--worker-urls", *[each.url for each in workers]) as url:
        for worker in workers:  # its first event, before which it misses some
            asked(worker.url, "begin " * 9)
        time.sleep(1)
        before = [worker.finished() for worker in workers]
        for chat in (False, True):
            assert share(url, 24, chat) > 0.9
        after = [worker.finished() for worker in workers]
        done = [n - m for n, m in zip(after, before, strict=True)]
        assert sum(done) == 48
        assert min(done) >= 12
        assert asked(url, "a", stream=True).endswith(b"data: [DONE]\n\n")


@pytest.mark.skipif(find_spec("sglang_router") is None, reason="needs sglang-router")
def test_sglang_router(workers):
    """It follows what it has sent where, and needs no events; its fields are taken on every path."""
    with router("sglang_router", "--policy", "cache_aware", "--worker-urls", *[each.url for each in workers]) as url:
        for chat in (False, True):
            share(url, 8, chat)
            assert share(url, 24, chat) > 0.8
            assert asked(url, "a", chat, stream=True).endswith(b"data: [DONE]\n\n")
        assert sum(worker.finished() for worker in workers) == 66
