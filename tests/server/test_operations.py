"""Running a server: its probes, the ids and lines of requests, its file of options, its end."""

import json
import logging
import re
import signal
import subprocess
import sys
import threading
import time
from urllib.request import Request, urlopen

import anthropic
import openai
import pytest
from http_servers import MODEL, Served, answer, fetched, post, tiny_file
from posix_modules import needs_posix

pytestmark = pytest.mark.one_build

TALK = [{"role": "user", "content": "a text that no line has"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_file(tmp_path_factory.mktemp("tiny"))


def headers_of(served, path, **headers):
    with urlopen(Request(served.url.removesuffix("/v1") + path, headers=headers), timeout=60) as page:
        return page.headers


# -- probes -----------------------------------------------------------------------------------------------------


def test_probes(path):
    with Served(path, max_queue=2, max_running=1) as served:
        for probe in ("/live", "/ready", "/health"):
            assert fetched(served, probe)[0] == 200
        served.network.closed = True
        waiting = [served.engine.submit([5], max_tokens=1) for _ in range(1)]
        assert served.network.waiting.wait(60)
        waiting += [served.engine.submit([5], max_tokens=1) for _ in range(2)]
        status, _, text = fetched(served, "/ready")
        assert (status, json.loads(text)["status"]) == (503, "the queue is full")
        assert fetched(served, "/live")[0] == fetched(served, "/health")[0] == 200
        served.network.closed = False
        for _ in range(9):
            served.network.permits.release()
        for each in waiting:
            each.result()
        assert fetched(served, "/ready")[0] == 200
        served.app.state.leaving()
        for probe, want in (("/live", 200), ("/ready", 503), ("/health", 503)):
            status, _, text = fetched(served, probe)
            assert status == want
            assert want == 200 or json.loads(text)["status"] == "the server ends"
        served.client().completions.create(model=MODEL, prompt="x", max_tokens=1)  # which still gets in


# -- ids and lines ----------------------------------------------------------------------------------------------


def test_ids(path, caplog):
    with Served(path) as served:
        assert headers_of(served, "/health", **{"X-Request-Id": "abc-1.2:3"})["x-request-id"] == "abc-1.2:3"
        for odd in ("x" * 129, "a b", 'a"b'):
            own = headers_of(served, "/health", **{"X-Request-Id": odd})["x-request-id"]
            assert own.startswith("req-")
            assert len(own) == 28
        found = served.client().chat.completions.create(model=MODEL, messages=TALK, max_tokens=1)
        assert found._request_id.startswith("req-")
        with pytest.raises(openai.BadRequestError) as caught:
            served.client().chat.completions.create(
                model=MODEL, messages=TALK, temperature=-1, extra_headers={"x-request-id": "mine"}
            )
        assert caught.value.request_id == "mine"
        served.network.error = RuntimeError("broken")
        with caplog.at_level(logging.ERROR, "kvcache"), pytest.raises(openai.InternalServerError):
            served.client().chat.completions.create(
                model=MODEL, messages=TALK, max_tokens=1, extra_headers={"x-request-id": "mine-2"}
            )
        assert "mine-2" in caplog.text


def test_one_line_for_each_request(path):
    lines = []
    with Served(path, keys={"k": "team"}, limits={"log": lines.append}) as served:
        client = served.client(key="k")
        client.chat.completions.create(model=MODEL, messages=TALK, max_tokens=4, n=2, temperature=0)
        list(client.chat.completions.create(model=MODEL, messages=TALK, max_tokens=3, stream=True, temperature=0))
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=MODEL, messages=TALK, temperature=-1)
        with pytest.raises(openai.AuthenticationError):
            served.client(key="other").chat.completions.create(model=MODEL, messages=TALK)
        assert fetched(served, "/a-path-of-a-client?with=a-text")[0] == 404
    whole, streamed, refused, unknown, nowhere = map(json.loads, lines)
    for each in (whole, streamed):
        assert (each["method"], each["path"], each["status"]) == ("POST", "/v1/chat/completions", 200)
        assert each["prompt_tokens"] > 20
        assert each["seconds"] >= each["first_token"] >= each["queued"] >= 0
        assert each["namespace"] == whole["namespace"]
        assert len(each["namespace"]) == 12
    assert (whole["new_tokens"], whole["finish"]) == (8, ["length", "length"])
    assert (streamed["new_tokens"], streamed["finish"]) == (3, ["length"])
    assert streamed["cached_tokens"] > 0
    assert (refused["status"], "new_tokens" in refused) == (400, False)
    assert (unknown["status"], "namespace" in unknown) == (401, False)
    assert (nowhere["status"], nowhere["path"]) == (404, "/a-path-of-a-client")
    assert len({each["id"] for each in (whole, streamed, refused, unknown, nowhere)}) == 5
    assert not any("text" in line or "team" in line for line in lines)


def test_clients_that_leave_and_wrong_addresses_are_told(path, caplog):
    """In the lines of requests; without them, in the log, not oftener than every few seconds."""
    lines = []
    body = json.dumps({"prompt": "x", "max_tokens": 400, "stream": True}).encode()
    for log in (lines.append, None):
        with Served(path, limits={"log": log}) as served, caplog.at_level(logging.WARNING, "kvcache"):
            served.client().completions.create(model=MODEL, prompt="x", max_tokens=1)
            list(served.client().completions.create(model=MODEL, prompt="x", max_tokens=1, stream=True))
            served.network.closed = True
            for stream in (True, False):
                served.network.waiting.clear()
                connection = served.connect(post(body if stream else body.replace(b"true", b"false")))
                assert served.network.waiting.wait(60)
                connection.close()
                served.network.permits.release()
            served.network.open()
            while served.engine.stats().running or served.server.server_state.tasks:
                time.sleep(0.01)
            for method in ("POST", "GET"):
                for wrong in ("/chat/completions%1b", "/chat/completions?key=1"):
                    answer(served.connect(f"{method} {wrong} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()))
            assert fetched(served, "/v1/models/nothing")[0] == 404
        if log is not None:
            assert not caplog.messages
    found = [json.loads(line) for line in lines]
    assert [(each["status"], each.get("left", False)) for each in found[:4]] == [
        (200, False), (200, False), (200, True), (0, True)
    ]
    wrong = ["/chat/completions?", "/chat/completions"]
    assert [each["path"] for each in found[4:]] == [*wrong, *wrong, "/v1/models/nothing"]
    left, wrong = caplog.messages
    assert re.fullmatch(r"request req-\w+: its client left after [\d.]+ s and \d+ new tokens", left)
    assert re.fullmatch(
        r"request req-\w+: expected a path of the server, got POST /chat/completions\?: status 404", wrong
    )


# -- names ------------------------------------------------------------------------------------------------------


def test_further_names(path):
    began = int(time.time())
    with Served(path, limits={"aliases": ("gpt-4o", "org/m")}) as served:
        client = served.client()
        assert [each.id for each in client.models.list()] == [MODEL, "gpt-4o", "org/m"]
        entry = client.models.retrieve("org/m")
        assert (entry.id, entry.object, entry.max_model_len) == ("org/m", "model", served.engine.max_positions)
        assert began <= entry.created <= time.time()
        theirs = anthropic.Anthropic(base_url=served.url.removesuffix("/v1"), api_key="k").models.list()
        assert [(each.id, each.type, each.display_name) for each in theirs] == [
            (name, "model", name) for name in (MODEL, "gpt-4o", "org/m")
        ]
        assert {int(each.created_at.timestamp()) for each in theirs} == {entry.created}
        response = client.responses.create(model=MODEL, input="x", max_output_tokens=1)
        assert began <= response.created_at <= time.time()
        assert response.completed_at is None, "it was cut"
        found = client.completions.create(model="gpt-4o", prompt="x", max_tokens=2, temperature=0)
        assert found.model == "gpt-4o"
        assert found.choices == client.completions.create(model=MODEL, prompt="x", max_tokens=2, temperature=0).choices
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt-4", prompt="x")


# -- the process ------------------------------------------------------------------------------------------------


def started(*options):
    command = [sys.executable, "-m", "kvcache", "serve", *map(str, options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    port = int(line.rsplit(":", 1)[1].partition("/")[0])
    return process, line, f"http://127.0.0.1:{port}"


toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")


@pytest.mark.skipif(sys.version_info >= (3, 11), reason="for Python 3.10")
def test_a_file_of_options_needs_a_later_python(tmp_path, capsys):
    from kvcache.__main__ import main

    (tmp_path / "server.toml").write_text("port = 1\n")
    assert main(["serve", "--config", str(tmp_path / "server.toml")]) == 2
    assert "--config: expected Python 3.11 or later" in capsys.readouterr().err


@toml
@needs_posix
def test_a_file_of_options_and_the_end_that_is_told_first(tmp_path):
    """Options on the command line win. After SIGTERM the server is not ready, and still answers, for a while."""
    file = tmp_path / "server.toml"
    file.write_text(
        'port = 1\nname = "one"\nserved-name = ["two", "three"]\nlog_format = "json"\ndrain-delay = 0.5\n'
        "max-running = 3\nplain-special-tokens = true\ntemperature = 0.0\n"
    )
    process, line, url = started("--port", 0, "--config", file)
    with process:
        try:
            assert line.startswith("one at")
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
            assert [each.id for each in client.models.list()] == ["one", "two", "three"]
            process.send_signal(signal.SIGTERM)
            until(url, 503)
            found = client.completions.create(model="two", prompt="def ", max_tokens=2)
            assert found.usage.completion_tokens == 2
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode in (0, -signal.SIGTERM)), errors
    entries = [json.loads(each) for each in output.splitlines()]
    assert {each["path"] for each in entries} == {"/v1/models", "/ready", "/v1/completions"}


def probe(url):
    try:
        with urlopen(f"{url}/ready", timeout=30) as page:
            return page.status
    except OSError as error:
        return getattr(error, "code", None)


def until(url, status):
    deadline = time.monotonic() + 60
    while (found := probe(url)) != status:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


@toml
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot = 1", "config: expected options of the command, got 'prot'"), ("port = [1]", "config: port: expected"),
        ("config = 'x'", "config: expected options"), ("port = 'x'", "--port"), ("= 1", "config: expected TOML"),
        ("plain-special-tokens = 1", "config: plain-special-tokens: expected true or false, got 1"),
        ("stop = 'x'", "config: stop: expected a list of texts, got 'x'"),
        ("log-format = 'xml'", "--log-format: expected text or json, got 'xml'"),
    ],
)
def test_files_that_are_none(tmp_path, content, message, capsys):
    from kvcache.__main__ import main

    file = tmp_path / "server.toml"
    file.write_text(content)
    with pytest.raises(SystemExit) if message == "--port" else threading.Lock():
        assert main(["serve", "--config", str(file)]) == 2
    assert message in capsys.readouterr().err
