"""Workers behind Dynamo's frontend, as it is installed: `.ci/run cluster` installs it."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from kvcache.demo import DIRECTORY

pytestmark = [
    pytest.mark.no_level, pytest.mark.one_build,
    pytest.mark.skipif(find_spec("dynamo") is None, reason="needs ai-dynamo"),
]
PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")


def free_port():
    """A port that Dynamo takes: it reads one of its settings as 16 bits with a sign."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", random.randrange(20_000, 32_000))) as free:
            return free.getsockname()[1]


def fetched(url):
    with urlopen(url, timeout=30) as page:
        return page.read().decode()


class Process:
    """A process of this Python, with what it writes in a file."""

    def __init__(self, folder, name, *command, **variables):
        self._log = open(folder / f"{name}.log", "ab")  # noqa: SIM115  as long as the process
        environment = os.environ | {"DYN_FILE_KV": str(folder / "kv"), **variables}
        self.running = subprocess.Popen(
            [sys.executable, "-m", *command], env=environment, stdout=self._log, stderr=self._log
        )

    def end(self, how=signal.SIGTERM):
        self.running.send_signal(how)
        with suppress(subprocess.TimeoutExpired):
            self.running.wait(60)
        self.running.kill()
        self._log.close()


class Worker(Process):
    def __init__(self, folder, number, *options):
        self.port = free_port()
        super().__init__(
            folder, f"worker{number}", "kvcache.integrations.dynamo", "--model", str(folder / "demo"), "--threads", "1",
            *PLANES, *options,
            DYN_SYSTEM_PORT=str(self.port),
        )

    def count(self, name):
        page = fetched(f"http://127.0.0.1:{self.port}/metrics")
        return int(re.search(rf"^kvcache_{name}(?:\{{.*\}})? (\d+)", page, re.MULTILINE)[1])


class Frontend(Process):
    def __init__(self, folder, mode, *options):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(
            folder, mode, "dynamo.frontend", *PLANES, "--router-mode", mode, "--http-host", "127.0.0.1",
            "--http-port", str(port), *options,
        )

    def ask(self, prompt, path="completions", **more):
        what = {"prompt": prompt} if path == "completions" else {"messages": [{"role": "user", "content": prompt}]}
        body = json.dumps({"model": "demo", "temperature": 0, "max_tokens": 4, **what, **more}).encode()
        with urlopen(Request(f"{self.url}/v1/{path}", body, {"content-type": "application/json"}), timeout=120) as page:
            return json.load(page)

    def wait_until_ready(self):
        end = time.monotonic() + 120
        while True:
            try:
                return self.ask("ready")
            except (URLError, OSError):
                assert time.monotonic() < end, "no model is served"
                time.sleep(0.3)

    def share(self, name, count=64):
        """The share of cached tokens of requests over 8 prefixes, four at a time."""
        heads = [f"# {name} {i} {random.Random(i).random()}\n" + "def walk(path, top=True):\n" * 24 for i in range(8)]
        order, found = random.Random(7).choices(range(8), k=count), []

        def some(first):
            for i in range(first, count, 4):
                found.append(self.ask(f"{heads[order[i]]}    x{i} = ")["usage"])

        threads = [threading.Thread(target=some, args=(i,)) for i in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        cached = sum((each.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for each in found)
        assert len(found) == count
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
        yield lambda it: stack.callback(it.end) and it


def eventually(condition, seconds=60):
    """Wait until a condition holds; a process that does not listen yet is waited for."""
    end = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            if condition():
                return
        assert time.monotonic() < end
        time.sleep(0.1)


def test_prefixes_decide_where_requests_go(folder):
    """The router finds cached prefixes, and both workers work; answers are as requests ask; a client may leave."""
    with processes() as started:
        small = ("--num-blocks", "64")  # of the 100 that all prefixes need
        workers = [started(Worker(folder, i, *small)) for i in range(2)]
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
    for salt in ("one", "one", "one", "two", "three"):
        usage = frontend.ask(text, nvext={"cache_salt": salt})["usage"]
        cached.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        time.sleep(0.5)  # for the events
    assert cached[0] == cached[3] == cached[4] == 0
    assert cached[2] > 100  # of three, two went to one of the two workers
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
        workers = [started(Worker(folder, i, *store)) for i in range(2)]
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
        again = started(Worker(folder, 2, *store))
        thread.join()
        eventually(lambda: "finished_total" in fetched(f"http://127.0.0.1:{again.port}/metrics"))
        assert answers == [alone] * 7
        routed.wait_until_ready()
        before = again.count("cached_tokens_total")
        routed.ask(head + "    x = ")
        assert again.count("cached_tokens_total") - before > 100
