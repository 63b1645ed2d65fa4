"""Workers behind Dynamo's frontend, as it is installed: `.ci/run cluster` installs it."""

import json
import random
import shutil
import signal
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from kvcache.demo import DIRECTORY

pytest.importorskip("bench.support.common")

from bench.support.processes import DynamoFrontend, DynamoWorker, eventually, posted

pytestmark = [
    pytest.mark.one_build,
    pytest.mark.skipif(find_spec("dynamo") is None, reason="needs ai-dynamo"),
]


class Frontend(DynamoFrontend):
    """A frontend that is asked by texts."""

    def ask(self, prompt, path="completions", **more):
        what = {"prompt": prompt} if path == "completions" else {"messages": [{"role": "user", "content": prompt}]}
        return posted(f"{self.url}/v1/{path}", {"model": "demo", "temperature": 0, "max_tokens": 4, **what, **more})

    def share(self, name, count=64):
        """The share of cached tokens of requests over 8 prefixes, one after another: events come in between."""
        heads = [f"# {name} {i} {random.Random(i).random()}\n" + "def walk(path, top=True):\n" * 24 for i in range(8)]
        order = random.Random(7).choices(heads, k=count)
        found = [self.ask(f"{head}    x{i} = ")["usage"] for i, head in enumerate(order)]
        cached = sum((each.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for each in found)
        return cached / sum(each["prompt_tokens"] for each in found)


@pytest.fixture
def folder(tmp_path):
    """A folder with the demo model, and a chat template."""
    shutil.copytree(DIRECTORY, tmp_path / "demo")
    path = tmp_path / "demo" / "tokenizer_config.json"
    template = {"chat_template": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"}
    path.write_text(json.dumps(json.loads(path.read_text()) | template))
    (tmp_path / "kv").mkdir()
    return tmp_path


@contextmanager
def processes():
    with ExitStack() as stack:
        yield stack.enter_context


def test_prefixes_decide_where_requests_go(folder):
    """The router finds cached prefixes, and both workers work; answers are as requests ask; a client may leave."""
    with processes() as started:
        small = ("--num-blocks", "100")  # of the 140 that all prefixes need
        workers = [started(DynamoWorker(folder, i, *small)) for i in range(2)]
        plain, routed = (started(Frontend(folder, mode)) for mode in ("round-robin", "kv"))
        for frontend in (plain, routed):
            frontend.wait_until_ready()
        before = plain.share("a")
        done = [worker.count("finished_total") for worker in workers]
        after = routed.share("b")
        done = [worker.count("finished_total") - n for worker, n in zip(workers, done, strict=True)]
        assert after > before + 0.1
        assert min(done) >= 8
        check_answers(routed)
        check_that_leaving_cancels(routed, workers)


def check_answers(frontend):
    found = frontend.ask("def walk(path):\n", n=3, temperature=0.9, logprobs=2, max_tokens=6)
    assert len(found["choices"]) == 3
    assert found["usage"]["completion_tokens"] <= 18
    longest = max(found["choices"], key=lambda each: len(each["text"]))
    assert len(longest["logprobs"]["token_logprobs"]) >= 1
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 10, "maximum": 99}},
              "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    found = frontend.ask("answer", "chat/completions", max_tokens=40, response_format=form)
    assert 10 <= json.loads(found["choices"][0]["message"]["content"])["a"] <= 99
    text = "# salted\n" + "def walk(path, top=True):\n" * 24
    cached = []
    for salt in ("one", "two", "one", "two", "three", "one"):
        usage = frontend.ask(text, nvext={"cache_salt": salt})["usage"]
        cached.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        time.sleep(0.5)  # for the events
    assert cached[0] == cached[1] == cached[4] == 0
    assert min(cached[2], cached[3], cached[5]) > 100  # by turns, one of them would find nothing
    with pytest.raises(HTTPError) as refused:
        frontend.ask("a", ignore_eos=True)
    assert refused.value.code == 400


def check_that_leaving_cancels(frontend, workers):
    body = {"model": "demo", "prompt": "def ", "max_tokens": 800, "stream": True, "temperature": 2.0}
    head = {"content-type": "application/json"}
    request = Request(f"{frontend.url}/v1/completions", json.dumps(body).encode(), head)
    with suppress(HTTPError), urlopen(request, timeout=60) as page:
        page.read(10)
        assert sum(worker.count("running") for worker in workers) == 1
    eventually(lambda: sum(worker.count("running") for worker in workers) == 0, 20)


def test_workers_come_and_go(folder):
    """Requests of a worker that is killed are answered by another one; one that is told to end ends its answers first.

    A worker that is started again finds prefixes in the store.
    """
    with processes() as started:
        store = ("--num-blocks", "600", "--store", str(folder / "store"))
        workers = [started(DynamoWorker(folder, i, *store)) for i in range(2)]
        routed = started(Frontend(folder, "kv", "--migration-limit", "3"))
        routed.wait_until_ready()
        head, answers = "# store\n" + "def walk(path, top=True):\n" * 24, []
        alone = routed.ask(head, max_tokens=300)["choices"][0]["text"]

        def retried():
            for _ in range(20):
                try:
                    return answers.append(routed.ask(head, max_tokens=300)["choices"][0]["text"])
                except OSError:
                    time.sleep(0.3)

        threads = [threading.Thread(target=retried) for _ in range(6)]
        for each in threads:
            each.start()
        eventually(lambda: max(worker.count("running") for worker in workers) >= 2)
        busy = max(workers, key=lambda worker: worker.count("running"))
        busy.end(signal.SIGKILL)
        for each in threads:
            each.join()
        assert answers == [alone] * 6
        (left,) = (worker for worker in workers if worker is not busy)
        thread = threading.Thread(target=retried)
        thread.start()
        eventually(lambda: left.count("running") >= 1)
        left.end()
        thread.join(1)
        again = started(DynamoWorker(folder, 2, *store))
        thread.join()
        eventually(lambda: again.count("finished_total") >= 0)
        assert answers == [alone] * 7
        routed.wait_until_ready()
        before = again.count("cached_tokens_total")
        routed.ask(head + "    x = ")
        assert again.count("cached_tokens_total") - before > 100
