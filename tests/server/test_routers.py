"""Routers of others before two servers, as they are installed: `.ci/run cluster` installs them."""

import random
import time
from contextlib import ExitStack
from importlib.util import find_spec

import pytest
from http_servers import tiny_file

pytest.importorskip("bench.support.common")

from bench.support.processes import Router, Server, posted

pytestmark = pytest.mark.one_build

KEY = "k-7"
HEADS = [f"# tenant {t} {random.Random(t).random()}\n" + "def walk(path, topdown=True):\n" * 6 for t in range(8)]


@pytest.fixture
def workers(tmp_path):
    (tmp_path / "keys").write_text(f"{KEY} metrics\n")
    model = tiny_file(tmp_path)
    options = ("--num-blocks", "400", "--kv-events-unsalted", "--api-keys", str(tmp_path / "keys"))
    with ExitStack() as stack:
        yield [stack.enter_context(Server(model, "tiny", *options)) for _ in range(2)]


def asked(url, text, chat=False, **more):
    """The answer to a text, in the namespace of the key."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    what = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    return posted(url + path, {"model": "tiny", **what, "max_tokens": 3, "temperature": 0, **more}, KEY)


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
    with Router.by_events(workers, "tiny") as router:
        url = router.url
        for worker in workers:  # its first event, before which it misses some
            asked(worker.url, "begin " * 9)
        time.sleep(1)
        before = [worker.count("finished_total", KEY) for worker in workers]
        for chat in (False, True):
            assert share(url, 24, chat) > 0.9
        after = [worker.count("finished_total", KEY) for worker in workers]
        done = [n - m for n, m in zip(after, before, strict=True)]
        assert sum(done) == 48
        assert min(done) >= 12
        assert asked(url, "a", stream=True).endswith(b"data: [DONE]\n\n")


@pytest.mark.skipif(find_spec("sglang_router") is None, reason="needs sglang-router")
def test_sglang_router(workers):
    """It follows what it has sent where, and needs no events; its fields are taken on every path."""
    with Router("sglang_router", workers, "--policy", "cache_aware") as router:
        url = router.url
        for chat in (False, True):
            share(url, 8, chat)
            assert share(url, 24, chat) > 0.8
            assert asked(url, "a", chat, stream=True).endswith(b"data: [DONE]\n\n")
        assert sum(worker.count("finished_total", KEY) for worker in workers) == 66
