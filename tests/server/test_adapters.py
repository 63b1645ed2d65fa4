"""Adapters over HTTP: a request names one as its model, and answers as it does alone; clients load and unload them."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import anthropic
import openai
import pytest
from http_servers import MODEL, Served, fetched, tiny_file
from peft_folders import TENSORS, modules_of, write_adapter

from kvcache import BatchEngine, InferenceEngine
from kvcache.server.model_slot import ModelSlot
from kvcache.server.models import Models
from kvcache.server.served_adapters import ServedAdapters
from kvcache.server.served_model import ServedModel

pytestmark = pytest.mark.one_build
PROMPT = "def f(x): " * 4
TALK = [{"role": "user", "content": PROMPT}]
GREEDY = {"max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder with the adapters `a`, `b` and `c`, whose answers differ."""
    place, modules = tmp_path_factory.mktemp("adapters"), modules_of("llama")
    for seed, name in enumerate("abc"):
        write_adapter(place / name, modules, seed=seed, lora_alpha=12)
    return place


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_file(tmp_path_factory.mktemp("tiny"))


def serving(path, folders, names="ab", keys=None, **limits):
    """A server whose model has some of the adapters; so has the engine for one request."""
    served = Served(path, keys, limits={"adapters": ServedAdapters({n: str(folders / n) for n in names}), **limits})
    for name in "abc":
        served.alone.load_adapter(name, str(folders / name))
    return served


@pytest.fixture(scope="module")
def served(path, folders):
    with serving(path, folders) as made:
        yield made


def posted(served, path, body, key=None):
    """The status and the content of an answer."""
    headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
    url = served.url.removesuffix("/v1") + path
    try:
        with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=60) as page:
            return page.status, page.read().decode()
    except HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def asked(served, form, name, stream=False):
    """The text of an answer in one of the forms, and the name of the model in it."""
    client = served.client()
    if form == "completions":
        found = client.completions.create(model=name, prompt=PROMPT, stream=stream, **GREEDY)
        if stream:
            events = list(found)
            return "".join(each.choices[0].text for each in events), events[0].model
        return found.choices[0].text, found.model
    if form == "chat":
        found = client.chat.completions.create(model=name, messages=TALK, stream=stream, **GREEDY)
        if stream:
            events = list(found)
            return "".join(each.choices[0].delta.content or "" for each in events), events[0].model
        return found.choices[0].message.content, found.model
    if form == "responses":
        found = client.responses.create(model=name, input=TALK, stream=stream, temperature=0, max_output_tokens=6)
        if stream:
            found = list(found)[-1].response
        return found.output_text, found.model
    claude = anthropic.Anthropic(base_url=served.url.removesuffix("/v1"), api_key="x", max_retries=0)
    more = {"max_tokens": 6, "extra_body": {"temperature": 0}}
    found = claude.messages.create(model=name, messages=TALK, stream=stream, **more)
    if stream:
        events = list(found)
        deltas = [each.delta.text for each in events if each.type == "content_block_delta"]
        return "".join(deltas), events[0].message.model
    return found.content[0].text, found.model


FORMS = ("completions", "chat", "responses", "messages")


def expected(served, form, name):
    adapter = None if name == MODEL else name
    if form == "completions":
        return served.alone.complete(PROMPT, adapter=adapter, max_tokens=6, temperature=0.0).text
    return "".join(served.alone.chat(TALK, adapter=adapter, max_tokens=6, temperature=0.0))


def test_each_name_answers_as_its_adapter_alone(served):
    """In every form, whole and as a stream, several times at once: prefixes are cached, and none is another one's."""
    want = {(form, name): expected(served, form, name) for form in FORMS for name in (MODEL, "a", "b")}
    assert len({want["completions", name] for name in (MODEL, "a", "b")}) == 3
    cases = [(form, name, stream) for form, name in want for stream in (False, True)] * 2
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda case: asked(served, *case), cases))
    for (form, name, _), (text, model) in zip(cases, found, strict=True):
        assert text == want[form, name]
        assert model == name
    body = {"model": "a", "prompt": [PROMPT, "x = "], "n": 2, "seed": 5, "max_tokens": 4}
    choices = served.client().completions.create(**body).choices
    for number, prompt in enumerate(body["prompt"]):
        for sample in (0, 1):
            text = served.alone.complete(prompt, adapter="a", max_tokens=4, seed=5 + sample).text
            assert choices[2 * number + sample].text == text
    scored = served.client().completions.create(model="b", prompt="def f", max_tokens=0, echo=True, logprobs=0)
    tokens = served.alone.tokenizer.encode("def f").ids
    assert scored.choices[0].logprobs.token_logprobs[1:] == pytest.approx(served.alone.score(tokens, adapter="b"))


def test_an_activated_adapter(path, folders):
    """A template that ends with its invocation invokes it; its prefix is that of the network; others are refused."""
    tokens = InferenceEngine.from_pretrained(path).tokenizer.encode("assistant:").ids
    for name, invocation in (("late", tokens), ("never", [1, 2, 1, 2])):
        write_adapter(folders / name, modules_of("llama"), seed=3, lora_alpha=12, alora_invocation_tokens=invocation)
    with serving(path, folders, ["late", "never"]) as served:
        served.alone.load_adapter("late", folders / "late")
        for form in FORMS[1:]:
            assert asked(served, form, MODEL)[0] == expected(served, form, MODEL)
            assert asked(served, form, "late")[0] == expected(served, form, "late") != expected(served, form, MODEL)
        assert served.engine.cache_stats().hit_tokens >= 48
        status, answer = posted(served, "/v1/completions", {"model": "late", "prompt": PROMPT})
        assert (status, answer["error"]["param"]) == (400, "prompt")
        status, answer = posted(served, "/v1/chat/completions", {"model": "never", "messages": TALK})
        assert (status, answer["error"]["param"]) == (400, "messages")
        assert "messages: expected one with the invocation tokens" in answer["error"]["message"]


def test_lists_of_models(served):
    found = {each["id"]: each for each in json.loads(fetched(served, "/v1/models")[2])["data"]}
    assert list(found) == [MODEL, "a", "b"]
    assert [(found[name]["root"], found[name]["parent"]) for name in found] == [
        (MODEL, None), ("a", MODEL), ("b", MODEL)
    ]
    assert found["a"]["max_model_len"] == found[MODEL]["max_model_len"] > 0
    assert json.loads(fetched(served, "/v1/models/b")[2]) == found["b"]
    assert fetched(served, "/v1/models/c")[0] == 404


def test_what_an_adapter_is_not_for(served):
    """Vectors are those of the network; tokens are the same; an unknown name is told with those that are there."""
    for route, body in (
        ("/v1/embeddings", {"input": "x"}), ("/v1/rerank", {"query": "x", "documents": ["y"]}),
    ):
        status, answer = posted(served, route, {"model": "a", **body})
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "model", "unsupported_model")
        assert "model: expected tiny, since vectors have no adapters, got a" in answer["error"]["message"]
    status, answer = posted(served, "/tokenize", {"model": "a", "prompt": "def f"})
    assert json.loads(answer)["tokens"] == served.alone.tokenizer.encode("def f").ids
    status, answer = posted(served, "/v1/completions", {"model": "c", "prompt": "x"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert answer["error"]["message"] == "model: expected tiny or a or b, got 'c'"
    parts = [{"type": "text", "text": "def f", "segment": True}, {"type": "text", "text": "(x):"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    assert posted(served, "/v1/chat/completions", {"model": MODEL, **body})[0] == 200
    status, answer = posted(served, "/v1/chat/completions", {"model": "a", **body})
    assert (status, answer["error"]["message"].partition(",")[0]) == (400, "segments: expected None with an adapter")


def test_clients_load_none_unless_the_server_lets_them(served, folders):
    for route in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert posted(served, route, {"lora_name": "a", "lora_path": str(folders / "c")})[0] == 404
    assert asked(served, "completions", "a")[0] == expected(served, "completions", "a")


def test_loading_and_unloading(path, folders):
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    with serving(path, folders, "a", adapter_folder=folders) as served:
        assert posted(served, load, {"lora_name": "b", "lora_path": "b"}) == (200, "Loaded the adapter b.")
        assert posted(served, load, {"lora_name": "c", "lora_path": str(folders / "c")})[0] == 200
        for name in "abc":
            assert asked(served, "chat", name)[0] == expected(served, "chat", name)
        refused = (
            ({"lora_name": "b", "lora_path": "b"}, 400, "lora_name: expected one that is not loaded, or load_inplace"),
            ({"lora_name": MODEL, "lora_path": "b"}, 400, "lora_name: expected a name that nothing else has"),
            ({"lora_name": "d"}, 400, "lora_path: expected one, got none"),
            ({"lora_name": "d", "lora_path": "none"}, 404, "lora_path: expected an adapter there, got none: "),
            ({"lora_name": "d", "lora_path": "../tiny"}, 400, "lora_path: expected a path in the folder of adapters"),
            ({"lora_name": "d", "lora_path": "/etc"}, 400, "lora_path: expected a path in the folder of adapters"),
            ({"lora_name": "d", "lora_path": "."}, 400, "lora_path: expected a path in the folder of adapters"),
            ({"lora_name": "d", "lora_path": "\0"}, 400, "lora_path: expected a path in the folder of adapters"),
            ({"lora_name": "", "lora_path": "b"}, 400, "adapter: expected a name of 1 to 200 characters"),
            ({"lora_name": "d\n", "lora_path": "b"}, 400, "adapter: expected a name of 1 to 200 characters"),
            ({"lora_name": 3, "lora_path": "b"}, 400, "lora_name: expected a str, got int"),
            ({"lora_name": "d", "lora_path": "b", "more": 1}, 400, "more: expected none, since it is not supported"),
            ({"lora_name": "d", "lora_path": "b", "model": "x"}, 404, "model: expected tiny or a or b or c"),
        )
        for body, status, message in refused:
            found = posted(served, load, body)
            assert found[0] == status
            assert message in found[1]["error"]["message"]
            assert str(folders) not in found[1]["error"]["message"]
        damaged = write_adapter(folders / "damaged", modules_of("llama_biases"))
        status, answer = posted(served, load, {"lora_name": "d", "lora_path": "damaged"})
        assert (status, answer["error"]["param"]) == (400, "lora_path")
        told = answer["error"]["message"].partition("got an error: ")[2]
        assert told.startswith("damaged/adapter_model.safetensors: model.layers.2.")
        (damaged / TENSORS).unlink()
        assert posted(served, unload, {"lora_name": "b", "lora_int_id": None}) == (200, "Unloaded the adapter b.")
        for name in ("b", MODEL, "none"):
            status, answer = posted(served, unload, {"lora_name": name})
            assert (status, answer["error"]["param"]) == (404, "lora_name")
        with pytest.raises(openai.NotFoundError) as caught:
            asked(served, "chat", "b")
        assert caught.value.code == "model_not_found"
        assert [each.id for each in served.client().models.list()] == [MODEL, "a", "c"]


def test_another_adapter_of_the_same_name(path, folders):
    """Cached prefixes of the old one are of no use to it, whether it was unloaded between or replaced."""
    with serving(path, folders, "a", adapter_folder=folders) as served:
        before = {name: expected(served, "completions", name) for name in "abc"}
        for folder, more in (("b", {"load_inplace": True}), ("a", {"load_inplace": True}), ("c", None)):
            assert asked(served, "completions", "a")[0] in before.values()
            if more is None:
                assert posted(served, "/v1/unload_lora_adapter", {"lora_name": "a"})[0] == 200
            body = {"lora_name": "a", "lora_path": folder, **(more or {})}
            assert posted(served, "/v1/load_lora_adapter", body)[0] == 200
            for _ in range(2):
                assert asked(served, "completions", "a")[0] == before[folder]


def test_keys_that_may_load(path, folders):
    keys = {"k": "alice", "admin": "adapters"}
    with serving(path, folders, "a", keys, adapter_folder=folders) as served:
        body = {"lora_name": "b", "lora_path": "b"}
        for route in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert posted(served, route, body)[0] == 401
            status, answer = posted(served, route, body, "k")
            assert status == 403
            assert answer["error"]["message"].startswith("authorization: expected a key of the namespace adapters")
        assert posted(served, "/v1/load_lora_adapter", body, "admin")[0] == 200
        assert served.client(key="k").completions.create(model="b", prompt=PROMPT, **GREEDY).choices[0].text == (
            expected(served, "completions", "b")
        )
        assert posted(served, "/v1/unload_lora_adapter", {"lora_name": "b"}, "admin")[0] == 200


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_adapter_that_is_unloaded_ends_its_requests_alone(path, folders, form, stream):
    with serving(path, folders, adapter_folder=folders) as served, ThreadPoolExecutor(4) as pool:
        want = {name: expected(served, form, name) for name in (MODEL, "b")}
        served.network.closed = True
        found = {name: pool.submit(asked, served, form, name, stream) for name in (MODEL, "a", "b")}
        while served.engine.stats().running + served.engine.stats().waiting < 3:
            assert served.network.waiting.wait(60)
        unloading = pool.submit(posted, served, "/v1/unload_lora_adapter", {"lora_name": "a"})
        assert unloading.result(60)[0] == 200
        served.network.closed = False
        for _ in range(50):
            served.network.permits.release()
        for name in (MODEL, "b"):
            assert found[name].result(60)[0] == want[name]
        with pytest.raises((openai.APIError, anthropic.APIError, AttributeError)) as caught:
            assert found["a"].result(60)[0].impossible
        if not isinstance(caught.value, AttributeError):
            assert "model: expected an adapter that is loaded, got 'a', which was unloaded" in str(caught.value)
            if not stream:
                assert caught.value.status_code == 404
        else:  # a response that failed is an answer
            assert (form, stream) == ("responses", True)


def test_a_response_that_failed_says_why(path, folders):
    """As a stream of responses tells it, whose last event is the failed response."""
    with serving(path, folders, adapter_folder=folders) as served:
        served.network.closed = True
        stream = served.client().responses.create(model="a", input=TALK, stream=True)
        assert served.network.waiting.wait(60)
        assert posted(served, "/v1/unload_lora_adapter", {"lora_name": "a"})[0] == 200
        served.network.open()
        last = list(stream)[-1]
        assert (last.type, last.response.error.code) == ("response.failed", "model_not_found")


def test_reports(path, folders):
    """Counters of each adapter, a field of the lines about requests, and no path anywhere."""
    lines = []
    with serving(path, folders, log=lines.append) as served:
        for name in (MODEL, "a", "a"):
            asked(served, "completions", name)
        metrics = fetched(served, "/metrics")[2]
        told = [json.loads(each) for each in lines]
    assert 'kvcache_adapter_requests_total{adapter="a"} 2' in metrics
    assert 'kvcache_adapter_requests_total{adapter="b"} 0' in metrics
    assert 'kvcache_adapter_requests_total{adapter=""} 1' in metrics
    assert [each.get("adapter") for each in told if each["path"] == "/v1/completions"] == [None, "a", "a"]
    assert str(folders) not in metrics + "".join(lines)


def test_hints_name_an_adapter_as_requests_do(path, folders):
    def hint(served, name, kind="kv.pin"):
        action = {"action_version": "1", "action_type": kind, "payload": {}}
        body = {"prompt": "x" * 64, "kv_hints": {"protocol_version": "0.1", "actions": [action]}, "model": name}
        status, answer = posted(served, "/v1/cache/hints", body)
        return status, answer if status != 200 else json.loads(answer)

    with serving(path, folders) as served:
        served.client().completions.create(model="a", prompt="x" * 64, max_tokens=1)
        found = {name: hint(served, name)[1] for name in (MODEL, "a", "b")}
        assert [found[name]["results"][0]["status"] for name in found] == ["missing", "accepted", "missing"]
        assert [each["model"] for each in found.values()] == [MODEL, "a", "b"]
        body = {"prompt": "x" * 64, "model": "b", "nvext": {"agent_hints": {"speculative_prefill": True}}}
        assert posted(served, "/v1/cache/hints", body)[0] == 200
        while served.engine.stats().running + served.engine.stats().waiting:
            pass
        assert hint(served, "b")[1]["results"][0]["tokens_found"] >= 48
        assert hint(served, "c")[0] == 404


def test_what_is_unloaded_while_a_model_loads():
    """It is not in the engine, and one that cannot be read any more does not end the load."""
    adapters, loaded = ServedAdapters({"x": "of x"}), {}

    def load(name, path):
        if name == "gone" and adapters.get("gone") and loaded.get("x"):
            adapters.unload(None, "x")
            adapters.unload(None, "gone")
            raise FileNotFoundError(path)
        loaded[name] = path

    engine = SimpleNamespace(adapters=loaded, load_adapter=load, unload_adapter=loaded.pop)
    adapters.load(engine, "gone", "of gone")
    adapters.load(engine, "stays", "of stays")
    loaded.clear()
    adapters.attach(engine)
    assert (list(adapters), loaded) == (["stays"], {"stays": "of stays"})


def test_a_model_on_demand(path, folders, tmp_path, caplog):
    """The name of an adapter loads its model; what clients have loaded is there again after the model was unloaded."""
    adapters, opened = ServedAdapters({"x": str(folders / "a")}), []

    def make(stack):
        engine = BatchEngine.from_pretrained(path, num_blocks=100)
        opened.append(engine)
        stack.callback(engine.close, cancel=True)
        return ServedModel(engine, "later", adapters=adapters)

    slot, none = ModelSlot(("later",), make, adapters=adapters), ServedAdapters()
    assert ModelSlot(("later",), make, adapters=none).adapters is none  # what clients load into it is the slot's too
    with serving(path, folders, "b", others=[slot], adapter_folder=folders) as served:
        found = {each["id"]: each for each in json.loads(fetched(served, "/v1/models")[2])["data"]}
        assert (found["x"]["parent"], found["x"]["loaded"]) == ("later", False)
        assert asked(served, "completions", "x")[0] == expected(served, "completions", "a")
        body = {"lora_name": "y", "lora_path": "c"}
        status, answer = posted(served, "/v1/load_lora_adapter", body)
        assert (status, answer["error"]["message"]) == (400, "model: expected one, got none")
        assert posted(served, "/v1/load_lora_adapter", body | {"model": "later"})[0] == 200
        assert posted(served, "/v1/load_lora_adapter", body | {"model": MODEL})[0] == 400
        slot.unload()
        assert asked(served, "completions", "y")[0] == expected(served, "completions", "c")
        assert len(opened) == 2
        slot.unload()
        (folders / "c").rename(folders / "moved")
        try:
            assert asked(served, "completions", "x")[0] == expected(served, "completions", "a")
        finally:
            (folders / "moved").rename(folders / "c")
        assert "the adapter y cannot be loaded again" in caplog.text
        assert posted(served, "/v1/completions", {"model": "y", "prompt": "x"})[0] == 404
        slot.unload()
        assert posted(served, "/v1/unload_lora_adapter", {"lora_name": "x"})[0] == 200
        assert slot.model is None
        assert posted(served, "/v1/completions", {"model": "x", "prompt": "x"})[0] == 404


def test_names_that_are_taken(served):
    model = ServedModel(served.engine, "m")
    for name in ("m", MODEL):
        slots = [ModelSlot.of(served.model), ModelSlot(("m",), None, model=model, adapters=ServedAdapters())]
        slots[1].adapters._paths = {name: "x"}
        with pytest.raises(ValueError, match=f"models: expected other names of adapters, got '{name}' twice"):
            Models(slots)
    for name in ("", "x" * 201, " x", "a\tb"):
        with pytest.raises(ValueError, match="adapter: expected a name of 1 to 200 characters"):
            ServedAdapters({name: "x"})


def test_loads_and_unloads_beside_requests(path, folders):
    """Threads that load, unload and ask: each answer is one of a folder, or 404."""
    with serving(path, folders, "", adapter_folder=folders) as served:
        want = {expected(served, "completions", name) for name in "abc"}
        stopped = threading.Event()

        def change(number):
            while not stopped.is_set():
                body = {"lora_name": "x", "lora_path": "abc"[number], "load_inplace": True}
                assert posted(served, "/v1/load_lora_adapter", body)[0] == 200
                assert posted(served, "/v1/unload_lora_adapter", {"lora_name": "x"})[0] in (200, 404)

        def ask(_):
            try:
                return asked(served, "completions", "x")[0]
            except openai.NotFoundError:
                return None

        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(5))
            stack.callback(stopped.set)
            changes = [pool.submit(partial(change, number)) for number in (0, 1)]
            found = set(pool.map(ask, range(40)))
            stopped.set()
            for each in changes:
                each.result(60)
        assert found <= want | {None}
        assert served.engine.stats().running == 0
        served.engine.check()
