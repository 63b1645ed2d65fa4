"""Models that load at the first request, and are unloaded for others, or when nobody asks."""

import gc
import json
import threading
import time
import weakref
from contextlib import ExitStack, contextmanager
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import openai
import pytest
from http_servers import MODEL, Served, fetched, post, tiny_file
from tier_stores import GIVEN

from kvcache import BatchEngine, InferenceEngine
from kvcache.demo import DIRECTORY
from kvcache.server.model_slot import ModelSlot
from kvcache.server.served_model import ServedModel
from kvcache.tiers import DirectoryTier, Tiers

pytestmark = pytest.mark.one_build
PROMPT = "def f(x):\n    return x + 1\n\n" * 12  # more than 64 tokens
ASKED = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}


class Makes:
    """Makes models of the demo network; `errors` are raised first, one at a time.

    `loads` and `unloads` are events that loading and unloading wait for; `begun` counts the loads that have begun.
    """

    def __init__(self, folder=None):
        self.folder, self.errors, self.engines, self.begun = folder, [], [], 0
        self.loads, self.unloads = threading.Event(), threading.Event()
        self.loads.set()
        self.unloads.set()

    def __call__(self, name, stack):
        self.begun += 1
        self.loads.wait(60)
        if self.errors:
            raise self.errors.pop(0)
        stack.callback(self.unloads.wait, 60)
        tiers = None
        if self.folder is not None:
            tiers = Tiers([DirectoryTier(self.folder / name, "1GiB", **GIVEN)], after_uses=1, head_start=60)
            stack.callback(tiers.close, 60)
        engine = BatchEngine.from_pretrained(DIRECTORY, num_blocks=200, tiers=tiers)
        stack.callback(engine.close, cancel=True)
        self.engines.append(weakref.ref(engine))
        return ServedModel(engine, name, pooling="mean")


@contextmanager
def serving(tmp_path, makes, names, *, pinned=(), drain=None, **loading):
    """A server of the tiny model, which stays, and of models that load on demand."""
    from functools import partial

    slots = {name: ModelSlot((name,), partial(makes, name), is_pinned=name in pinned) for name in names}
    with Served(tiny_file(tmp_path), drain=drain, limits={"others": [*slots.values()], **loading}) as served:
        served.slots = slots
        yield served


def loaded(served):
    return {each["id"] for each in json.loads(fetched(served, "/v1/models")[2])["data"] if each["loaded"]}


def refused(served, name):
    """The status, the header retry-after and the message of a refusal."""
    url, body = f"{served.url}/completions", json.dumps({"model": name, **ASKED}).encode()
    with pytest.raises(HTTPError) as caught:
        urlopen(Request(url, body, {"content-type": "application/json"}), timeout=60)
    with caught.value as error:
        return error.code, error.headers["retry-after"], json.loads(error.read())["error"]["message"]


def test_a_swap_loses_nothing(tmp_path):
    """Answers are those of an engine that stays; after a swap the prefix comes from the folder."""
    want = InferenceEngine.from_pretrained(DIRECTORY).complete(PROMPT, max_tokens=4, temperature=0.0).text
    makes = Makes(tmp_path / "kept")
    with serving(tmp_path, makes, "ab", most_loaded=2) as served:
        client = served.client()
        assert loaded(served) == {MODEL}
        assert fetched(served, "/ready")[0] == 200
        for round_, cached in enumerate((0, 64)):
            for name, other in ("ab", "ba"):
                answer = client.completions.create(model=name, **ASKED)
                assert (answer.model, answer.choices[0].text) == (name, want)
                assert (answer.usage.prompt_tokens_details.cached_tokens >= 64) == bool(cached)
                assert loaded(served) == {MODEL, name}
                assert served.slots[other].model is None
                assert served.slots[name].loads == round_ + 1
        entry = json.loads(fetched(served, "/v1/models/b")[2])
        assert entry["max_model_len"] == 2048
        lines = fetched(served, "/metrics")[2].splitlines()
        assert 'kvcache_model_loads_total{model="a"} 2' in lines
        assert any(line.startswith('kvcache_running{model="b"}') for line in lines)
        assert not any(line.startswith('kvcache_running{model="a"}') for line in lines)
    gc.collect()
    assert [each() for each in makes.engines] == [None] * 4


def test_running_requests_end_first(tmp_path):
    """The model of a stream is unloaded when the stream has ended; requests for it wait, and load it again."""
    makes, found = Makes(), {}
    with serving(tmp_path, makes, "ab", most_loaded=2) as served:
        client = served.client()
        stream = client.completions.create(model="a", prompt="x", max_tokens=1500, temperature=0, stream=True)
        pieces = [next(stream)]

        def ask(name):
            found[name] = client.completions.create(model=name, **ASKED).choices[0].text

        threads = [threading.Thread(target=ask, args=("b",))]
        threads[0].start()
        while not served.slots["a"].is_leaving:
            time.sleep(0.001)
        threads += [threading.Thread(target=ask, args=("a",))]
        threads[1].start()
        while not served.slots["a"].waiting:
            time.sleep(0.001)
        assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).usage.completion_tokens == 1
        assert served.slots["b"].model is None
        pieces += stream
        for thread in threads:
            thread.join()
        assert pieces[-1].choices[0].finish_reason == "length"
        assert found["a"] == found["b"]
        assert [served.slots[name].loads for name in "ab"] == [2, 1]


def test_idle_models_leave(tmp_path):
    makes = Makes()
    with serving(tmp_path, makes, "ab", pinned="b", idle=0.05) as served:
        for name in "ab":
            served.client().completions.create(model=name, **ASKED)
        end = time.monotonic() + 60
        while served.slots["a"].model is not None and time.monotonic() < end:
            time.sleep(0.01)
        assert loaded(served) == {MODEL, "b"}
        gc.collect()
        assert makes.engines[0]() is None
        assert served.client().completions.create(model="a", **ASKED).model == "a"


def test_memory(tmp_path):
    """Models that together take more than there is replace each other; so does one whose loading finds no memory."""
    makes = Makes()
    with serving(tmp_path, makes, "abc", pinned="c") as served:
        for name in "abc":
            served.client().completions.create(model=name, **ASKED)
        assert loaded(served) == {MODEL, *"abc"}
    needs = served.slots["a"].needs
    assert needs > 1 << 20
    makes = Makes()
    with serving(tmp_path, makes, "abc", pinned="c", memory=5 * needs // 2) as served:
        client = served.client()
        for name, there in (("a", "a"), ("b", "ab"), ("c", "bc"), ("a", "ac")):
            served.slots[name].needs = served.slots[name].needs or needs
            client.completions.create(model=name, **ASKED)
            assert loaded(served) == {MODEL, *there}
        makes.errors = [MemoryError("no room")]
        served.slots["b"].needs = 0
        client.completions.create(model="b", **ASKED)
        assert loaded(served) == {MODEL, *"bc"}, "only the pinned one stays"
        makes.errors = [MemoryError("no room")] * 2
        assert refused(served, "a") == (503, "1", "model: expected memory for it, got none: no room")
        assert loaded(served) == {MODEL, "c"}


def test_refused_by_name(tmp_path):
    makes = Makes()
    with serving(tmp_path, makes, "ab", pinned="b", most_loaded=2, most_waiting=3) as served:
        makes.errors = [OSError("gone")]
        status, again, message = refused(served, "a")
        assert (status, again) == (503, "1")
        assert message == "model: expected one that loads, got OSError"
        slot = served.slots["a"]
        slot.waiting, slot.seconds = 3, 12.3
        status, again, message = refused(served, "a")
        assert (status, again) == (503, "12")
        assert message == "model: expected at most 3 requests that wait until it is loaded, got more"
        slot.waiting = 0
        assert served.client().completions.create(model="a", **ASKED).model == "a"
        assert served.client().completions.create(model="b", **ASKED).model == "b"
        status, again, message = refused(served, "a")
        assert message == "model: expected a place for it, got pinned models in all of them"
        with pytest.raises(openai.BadRequestError, match="prompt: expected"):
            served.client().completions.create(model="b", prompt={}, max_tokens=1)
        assert served.slots["b"].uses == 0


def until(is_so):
    """Wait until it is so."""
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def asked(served, name):
    """Whether a request is answered."""
    try:
        return served.client().completions.create(model=name, **ASKED).model == name
    except openai.InternalServerError as error:
        assert error.status_code == 503
        return False


def test_time_limits_leave_nothing_half_open(tmp_path):
    """One passes while a model loads, and while another one is unloaded for it; both can be asked afterwards."""
    makes = Makes()
    with serving(tmp_path, makes, "ab", most_loaded=2, timeout=2.0) as served:
        makes.loads.clear()
        thread = threading.Thread(target=asked, args=(served, "a"))
        thread.start()
        until(lambda: makes.begun)
        time.sleep(0.01)
        makes.loads.set()
        thread.join()
        until(lambda: asked(served, "a"))
        slots = served.slots
        for name, other in ("ba", "ab"):
            makes.unloads.clear()
            status, _, message = refused(served, name)
            assert (status, message) == (503, "model: expected one that is loaded in time, got none")
            assert slots[other].model is None
            assert loaded(served) == {MODEL}, "what is being closed is not seen"
            assert fetched(served, "/ready")[0] == fetched(served, "/metrics")[0] == 200
            makes.unloads.set()
            until(lambda other=other: not slots[other].is_leaving)
            makes.loads.clear()
            status, _, message = refused(served, name)
            assert (status, message) == (503, "model: expected one that is loaded in time, got none")
            makes.loads.set()
            until(lambda name=name: asked(served, name))
            assert fetched(served, "/ready")[0] == 200
        assert [slots[name].uses for name in "ab"] == [0, 0]


def test_clients_that_leave(tmp_path):
    """Nothing is loaded, nor unloaded, for one; the model of a stream that nobody reads can leave."""
    makes = Makes()
    body = json.dumps({"model": "b", **ASKED}).encode()
    with serving(tmp_path, makes, "ab", most_loaded=2) as served:
        a, b = served.slots["a"], served.slots["b"]
        stream = served.client().completions.create(model="a", prompt="x", max_tokens=1900, temperature=0, stream=True)
        next(stream)
        connection = served.connect(post(body))
        until(lambda: a.is_leaving)
        connection.close()
        until(lambda: not (b.waiting or a.is_leaving))
        assert (makes.begun, b.model, a.uses) == (1, None, 1)
        stream.close()
        until(lambda: not a.uses)
        assert asked(served, "b")
        assert a.model is None


def test_what_keeps_no_model(tmp_path):
    """Neither connections that stay open, nor grammars, nor answers of any kind; every use ends."""
    makes = Makes()
    with serving(tmp_path, makes, "ab", most_loaded=2) as served:
        client = served.client()
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        talk = [{"role": "user", "content": "x"}]
        for _ in range(2):
            assert len(client.embeddings.create(model="a", input=["x", "y"]).data) == 2
            for path, more in (("tokenize", {"prompt": "x"}), ("detokenize", {"tokens": [1]})):
                client.post(f"{served.url.removesuffix('/v1')}/{path}", body={"model": "a", **more}, cast_to=object)
            try:
                client.chat.completions.create(model="a", messages=talk, max_tokens=4, response_format=schema)
            except openai.BadRequestError as error:  # without a chat template, or the package of grammars
                assert error.status_code == 400
            with pytest.raises(openai.BadRequestError):
                client.embeddings.create(model="a", input=[])
        until(lambda: not served.slots["a"].uses)
        client.embeddings.create(model="a", input="x")
        assert asked(served, "b")
        assert makes.engines[0]() is None, "its memory is there for the next one"


def test_a_slot_that_is_closed_while_it_loads():
    makes, closed = Makes(), []
    makes.loads.clear()

    def make(stack):
        model = makes("a", stack)
        stack.callback(closed.append, model.engine)
        return model

    slot = ModelSlot(("a",), make)
    thread = threading.Thread(target=slot.load)
    thread.start()
    slot.close()
    makes.loads.set()
    thread.join()
    assert (slot.model, slot.loads, len(closed)) == (None, 0, 1)
    assert not closed[0].is_running

    def fail(stack):
        stack.callback(closed.append, None)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        ModelSlot(("a",), fail).load()
    assert closed[1:] == [None]


def test_a_model_that_cannot_be_closed(tmp_path):
    """The server goes on; the next load opens another one."""
    makes = Makes()

    def fail():
        raise OSError("disk")

    with serving(tmp_path, makes, "ab", most_loaded=2) as served:
        assert asked(served, "a")
        with ExitStack() as stack:
            stack.callback(fail)
            stack.push(served.slots["a"]._stack.pop_all())
            served.slots["a"]._stack = stack.pop_all()
        assert asked(served, "b")
        assert asked(served, "a")
        assert makes.begun == 3


def test_a_server_that_ends_while_a_model_loads(tmp_path):
    """It does not wait for the thread that loads, which closes what it opens."""
    makes = Makes()
    with serving(tmp_path, makes, "a", drain=0) as served:
        makes.loads.clear()
        thread = threading.Thread(target=asked, args=(served, "a"))
        thread.start()
        until(lambda: makes.begun)
    assert not served._thread.is_alive()
    thread.join()
    makes.loads.set()
    until(lambda: gc.collect() >= 0 and makes.engines and makes.engines[0]() is None)
    assert served.slots["a"].model is None


def test_what_loading_took_is_no_time_for_the_answer(tmp_path, monkeypatch):
    makes, seconds = Makes(), []
    queued = ServedModel.queued

    def note(model, prepared, threads, timeout):
        seconds.append(timeout)
        return queued(model, prepared, threads, timeout)

    monkeypatch.setattr(ServedModel, "queued", note)
    with serving(tmp_path, makes, "a", timeout=60.0) as served:
        assert asked(served, "a")
        assert asked(served, "a")
    assert seconds[0] < seconds[1] == 60.0
