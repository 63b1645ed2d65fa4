"""Several models in one server: each answers by its name as it does alone, and reports name it."""

import json
import subprocess
import sys
from urllib.error import HTTPError
from urllib.request import urlopen

import openai
import pytest
from http_servers import MODEL, Served, fetched, tiny_file
from peft_folders import modules_of, write_adapter

from kvcache import BatchEngine, InferenceEngine
from kvcache.__main__ import main
from kvcache.demo import DIRECTORY
from kvcache.server.model_slot import ModelSlot
from kvcache.server.models import Models
from kvcache.server.served_model import ServedModel

pytestmark = pytest.mark.one_build


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    other = ServedModel(BatchEngine.from_pretrained(DIRECTORY, max_queue=2, max_running=1), "demo", aliases=["gpt-4o"])
    path = tiny_file(tmp_path_factory.mktemp("tiny"))
    with Served(path, limits={"aliases": ["small"], "others": [other]}) as served:
        served.other = other.engine
        yield served


def test_each_answers_by_its_names(served):
    client = served.client()
    assert [each.id for each in client.models.list()] == [MODEL, "small", "demo", "gpt-4o"]
    assert client.models.retrieve("gpt-4o").id == "gpt-4o"
    engines = {MODEL: served.alone, "small": served.alone}
    engines |= dict.fromkeys(("demo", "gpt-4o"), InferenceEngine.from_pretrained(DIRECTORY))
    asked = {"prompt": "def f(x):", "max_tokens": 6, "temperature": 0}
    streams = {name: client.completions.create(model=name, stream=True, **asked) for name in engines}
    for name, engine in engines.items():
        want = engine.complete("def f(x):", max_tokens=6, temperature=0.0).text
        assert "".join(each.choices[0].text for each in streams[name]) == want
        got = client.completions.create(model=name, **asked)
        assert (got.model, got.choices[0].text) == (name, want)
        text = fetched_json(served, "/tokenize", {"model": name, "prompt": "def f(x):"})
        assert text["tokens"] == engine.tokenizer.encode("def f(x):").ids
        back = fetched_json(served, "/detokenize", {"model": name, "tokens": text["tokens"]})
        assert back == {"prompt": "def f(x):"}
    first = fetched_json(served, "/tokenize", {"prompt": "x"})
    assert first["tokens"] == served.alone.tokenizer.encode("x").ids, "without a name the first model counts"
    with pytest.raises(HTTPError) as caught:
        fetched_json(served, "/v1/completions", {"prompt": "x"})
    assert json.loads(caught.value.read())["error"]["message"] == "model: expected one, got none", "of several"


def fetched_json(served, path, body):
    return json.loads(urlopen(request(served, path, body), timeout=60).read())


def request(served, path, body):
    from urllib.request import Request

    url = served.url.removesuffix("/v1") + path
    return Request(url, json.dumps(body).encode(), {"content-type": "application/json"})


def test_unknown_names(served):
    for path in ("completions", "chat.completions", "responses"):
        method = served.client()
        for part in path.split("."):
            method = getattr(method, part)
        body = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}.get(path, {"messages": []})
        with pytest.raises(openai.NotFoundError) as caught:
            method.create(model="other", **body)
        assert caught.value.code == "model_not_found"
        assert caught.value.body["message"] == "model: expected tiny or small or demo or gpt-4o, got 'other'"
    with pytest.raises(openai.BadRequestError, match="model: expected a str, got int"):
        served.client().completions.create(model=3, prompt="x")


def test_reports_name_the_model(served):
    served.client().completions.create(model="gpt-4o", prompt="x" * 9, max_tokens=2)
    lines = fetched(served, "/metrics")[2].splitlines()
    assert len({line for line in lines if line.startswith("#")}) == sum(line.startswith("#") for line in lines)
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    for name, engine in ((MODEL, served.engine), ("demo", served.other)):
        assert values[f'kvcache_new_tokens_total{{model="{name}"}}'] == engine.stats().new_tokens
        assert values[f'kvcache_queued_seconds_count{{model="{name}"}}'] > 0
        assert f'kvcache_namespace_queries_total{{model="{name}",namespace=""}}' in values


def test_ready_while_one_model_takes_requests(served):
    """A full queue of one model refuses its requests; the server is ready for the other one."""
    other = served.other
    long = [other.submit([5] * 16, max_tokens=900, temperature=0.0)]
    while other.stats().running == 0:
        pass
    long += [other.submit([5] * 16, max_tokens=1) for _ in range(2)]
    assert fetched(served, "/ready")[0] == 200
    with pytest.raises(openai.RateLimitError):
        served.client().completions.create(model="demo", prompt="x", max_tokens=1)
    assert served.client().completions.create(model=MODEL, prompt="x", max_tokens=1).usage.completion_tokens == 1
    for each in long:
        each.cancel()


def test_each_name_once(served):
    found = ServedModel(served.other, "a", aliases=["b", "a"]), ServedModel(served.other, "c", aliases=["b"])
    models = [ModelSlot.of(each) for each in found]
    with pytest.raises(ValueError, match="models: expected each name once, got 'b' twice"):
        Models(models)
    assert Models(models[:1]).names == ("a", "b")
    with pytest.raises(ValueError, match="models: expected at least one, got none"):
        Models([])


# -- the file of options ----------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads no TOML")
def test_tables_of_models(tmp_path):
    """The command line counts more than a table, and a table more than the rest of the file."""
    file = tmp_path / "server.toml"
    file.write_text(
        f'dtype = "q4"\nport = 1\nmax-tokens = 3\n[[model]]\npath = {str(DIRECTORY)!r}\nname = "one"\naliases = ["m"]\n'
        f'dtype = "q8"\nnum-blocks = 20\n[[model]]\npath = {str(DIRECTORY)!r}\nname = "two"\nmax-tokens = 5\n'
        f"temperature = 0.0\ncontext = 640\nadapter = ['x={tmp_path / 'a'}']\n"
    )
    write_adapter(tmp_path / "a", modules_of(DIRECTORY, ("q_proj",)))
    command = [sys.executable, "-m", "kvcache", "serve", "--port", "0", "--config", str(file), "--top-k", "7"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("one, two at http://127.0.0.1:")
            url = line.rpartition("/v1")[0].partition(" at ")[2]
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
            assert [each.id for each in client.models.list()] == ["one", "m", "two", "x"]
            for name, most in (("m", 3), ("two", 5), ("x", 5)):
                assert client.completions.create(model=name, prompt="def ").usage.completion_tokens == most
            metrics = urlopen(f"{url}/metrics", timeout=60).read().decode().splitlines()
        finally:
            process.terminate()
    blocks = {line.split()[0]: int(line.split()[1]) for line in metrics if "_blocks{" in line}
    for name, most in (("one", 20), ("two", 41)):
        kinds = ("free", "claimed", "cached")
        assert sum(blocks[f'kvcache_{kind}_blocks{{model="{name}"}}'] for kind in kinds) == most


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads no TOML")
@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        ("[[model]]\nname = 'x'", [], "config: model: expected tables with a path, got {'name': 'x'}"),
        ("[[model]]\npath = 'x'\nport = 1", [], "config: expected options of a model, got 'port'"),
        ("[[model]]\npath = 'x'\nmodel = 'y'", [], "config: expected options of a model, got 'model'"),
        ("[[model]]\npath = 'x'\nmax-queue = 0", [], "--max-queue: expected an int >= 1, got 0"),
        ("[[model]]\npath = 'x'\nnum-blocks = 2\ncontext = 9", [], "expected none beside --num-blocks"),
        ("[[model]]\npath = 'x'", ["--model", "y"], "in the tables [[model]] alone, got another"),
        ("name = 'n'\n[[model]]\npath = 'x'", [], "in the tables [[model]] alone, got another"),
        ("model = [1]", [], "config: model: expected tables with a path, got 1"),
        ("[[model]]\npath = [1]", [], "config: path: expected a text or a number, got [1]"),
        ("[[model]]\npath = 'x'\naliases = 'y'", [], "config: aliases: expected a list of texts, got 'y'"),
    ],
)
def test_tables_that_are_none(tmp_path, content, more, message, capsys):
    file = tmp_path / "server.toml"
    file.write_text(content)
    assert main(["serve", "--port", "0", "--config", str(file), *more]) == 2
    assert message in capsys.readouterr().err
