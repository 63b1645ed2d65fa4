"""One request beside the others: bodies on their way, texts that cannot fit, long answers, errors in clients' words."""

import json
import re
import threading
import time

import anyio
import openai
import pytest
from chat_folders import chat_folder
from http_servers import MODEL, Served, answer, fetched, post

from kvcache import SamplingParams
from kvcache.commands.serve import keys_of
from kvcache.sampling import text_stream
from kvcache.server import logprobs
from kvcache.server.api_keys import Keys
from kvcache.server.limits import Threads

pytestmark = pytest.mark.one_build

TALK = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """With 2,048 positions, and tokens of at most 41 bytes."""
    with Served(chat_folder(tmp_path_factory.mktemp("demo") / "chat")) as made:
        yield made


def asked(served, path="/v1/completions", **body):
    """The status and the error of a body."""
    status, data = answer(served.connect(post(json.dumps({"model": MODEL, **body}).encode(), path)))
    return status, json.loads(data).get("error")


# -- bodies -----------------------------------------------------------------------------------------------------


def test_bodies_on_their_way_have_one_budget(path):
    """A body beyond it is told to come again; small bodies get in all the time, and the room comes back."""
    with Served(path, limits={"max_body": 300_000, "max_bodies": 600_000}) as served:
        body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
        large = body + b" " * (300_000 - len(body))
        waiting = [served.connect(post(large)[:-1]) for _ in range(2)]
        until(lambda: served.bodies._bytes > 400_000)
        waiting.append(served.connect(post(large)[:-1]))
        status, data = answer(waiting.pop())
        assert (status, json.loads(data)["error"]["message"]) == (
            503, "body: expected room for it among those on their way, got none"
        )
        with pytest.raises(openai.InternalServerError) as caught:
            served.client().completions.create(model=MODEL, prompt="x", extra_body={"user": "y" * 250_000})
        assert caught.value.response.headers["retry-after"] == "1"
        assert answer(served.connect(post(body + b" " * 60_000)))[0] == 200
        for connection in waiting:
            connection.sendall(b" ")
            assert answer(connection)[0] == 200
        assert served.bodies._bytes == 0
        left = served.connect(post(large)[:-1])
        until(lambda: served.bodies._bytes > 200_000)
        left.close()
        until(lambda: served.bodies._bytes == 0)


def test_new_grammars_of_a_key_wait_for_each_other():
    """One of another key waits for one of them, however many there are."""

    async def compiled(threads, space, order):
        async with threads.turn(space), threads.grammars:
            order.append(space)
            await anyio.sleep(0)

    async def all_of_them():
        threads, order = Threads(), []
        async with anyio.create_task_group() as tasks:
            for space in "aaaaabbc":
                tasks.start_soon(compiled, threads, space, order)
        return "".join(order), threads._turns

    assert anyio.run(all_of_them) == ("abcabaaa", {})


def until(condition):
    while not condition():
        time.sleep(0.002)


def test_large_bodies_become_requests_one_at_a_time(demo, monkeypatch):
    """Small ones do not wait for them."""
    begun, running, most = threading.Event(), [0], [0]
    free = threading.Event()
    encode = demo.engine.apply_chat_template

    def slow(messages, **options):
        if len(messages[0]["content"]) > 60_000:
            running[0] += 1
            most[0] = max(most[0], running[0])
            begun.set()
            free.wait(60)
            running[0] -= 1
        return encode(messages, **options)

    monkeypatch.setattr(demo.engine, "apply_chat_template", slow)
    large = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 70_000}]}
    request = post(json.dumps(large).encode(), "/v1/chat/completions")
    connections = [demo.connect(request) for _ in range(50)]
    assert begun.wait(60)
    assert demo.client().completions.create(model=MODEL, prompt="x", max_tokens=1).usage.completion_tokens == 1
    free.set()
    assert {answer(each)[0] for each in connections} == {400}
    assert most == [1]


# -- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "code", "says"),
    [
        ({"prompt": ""}, "prompt", None, "prompt: expected at least one token, got none"),
        ({"prompt": [1, 300]}, "prompt", None, "prompt: expected ids from 0 to 255, got 300 at index 1"),
        ({"prompt": "x" * 513}, "prompt", "context_length_exceeded",
         "prompt: expected at most 512 tokens, got 513 tokens: this model's maximum context length is 512 tokens"),
        ({"prompt": [1] * 513}, "prompt", "context_length_exceeded", "got 513 tokens"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "context_length_exceeded", "tokens"),
        ({"prompt": "x", "tools": [1]}, "tools", "unsupported_parameter", "tools: expected none"),
        ({"prompt": "x", "n": 0}, "n", None, "n: expected"),
    ],
)
def test_errors_are_in_the_words_of_clients(served, body, param, code, says):
    status, error = asked(served, "/v1/chat/completions" if "messages" in body else "/v1/completions", **body)
    assert (status, error["param"], error["code"]) == (400, param, code)
    assert says in error["message"]
    assert "block" not in error["message"]


def test_a_text_that_does_not_fit_the_memory(path):
    with Served(path, num_blocks=20) as served:
        status, error = asked(served, prompt="x" * 400)
        assert (status, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")
        assert error["message"] == (
            "prompt: expected at most 320 tokens, got 400 tokens: this model's maximum context length is 320 tokens on "
            "this server; --context, --num-blocks or --max-memory of the server gives more"
        )
        for path, body in (
            ("/v1/completions", {"prompt": "x" * 600}), ("/v1/completions", {"prompt": "x" * 100_000}),
            ("/v1/chat/completions", {"messages": [TALK[0] | {"content": "x" * 600}]}),
            ("/v1/chat/completions", {"messages": [TALK[0] | {"content": "x" * 400}]}),
            ("/v1/responses", {"input": "x" * 600}), ("/v1/messages", {"messages": [TALK[0] | {"content": "x" * 600}]}),
        ):
            status, error = asked(served, path, **body, **({"max_tokens": 1} if path == "/v1/messages" else {}))
            assert status == 400
            assert re.search(
                r"(prompt|messages|input): expected at most 320 tokens, got .*: this model's maximum context length is "
                "320 tokens on this server; --context, ", error["message"]
            ), body
        assert asked(served, prompt="x" * 320, max_tokens=1)[0] == 200
        assert asked(served, prompt="x" * 321, max_tokens=1)[0] == 400
        (entry,) = served.client().models.list()
        assert entry.max_model_len == 320


def test_a_text_that_cannot_fit_is_refused_by_its_length(demo, monkeypatch):
    """Without a look at its tokens, in completions and in chats."""
    monkeypatch.setattr(demo.engine.tokenizer, "encode_batch_fast", None, raising=False)
    text = "def walk " * 10_000
    talk = [TALK[0] | {"content": text}]
    for path, body in (("completions", {"prompt": text}), ("chat/completions", {"messages": talk})):
        status, error = asked(demo, f"/v1/{path}", **body)
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", next(iter(body)))
        assert "expected at most 2048 tokens, got a text of 900" in error["message"]


def test_another_model_has_a_code(served):
    status, error = asked(served, prompt="x", model="other")
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")


def test_a_key_that_did_not_come_is_told_so(path):
    with Served(path, keys={"a": None}) as served:
        for header, got in (({}, "got none"), ({"Authorization": "Bearer b"}, "got another")):
            status, _, text = fetched(served, "/v1/models", header)
            error = json.loads(text)["error"]
            assert (status, error["param"], error["code"]) == (401, None, "invalid_api_key")
            assert error["message"].endswith(got)


def test_a_content_type_that_did_not_come_is_told_so(served):
    request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    status, data = answer(served.connect(request))
    assert (status, json.loads(data)["error"]["message"]) == (415, "content-type: expected application/json, got none")


@pytest.mark.parametrize("place", ["/v1/completions/", "/v1/chat/completions/", "/health/", "/metrics/"])
def test_no_path_redirects(served, place):
    """The place to go to would be the one that the header Host names."""
    request = f"POST {place} HTTP/1.1\r\nHost: localhost:1\r\nContent-Length: 0\r\n\r\n"
    assert answer(served.connect(request.encode()))[0] == 404


# -- keys -------------------------------------------------------------------------------------------------------


def test_metrics_show_no_hash_of_a_key(path):
    """A weak key could be guessed by it. The namespace stays the same over restarts, as kept blocks need."""
    keys = keys_of(["prometheus metrics", "12345", "hunter2"])
    found = Keys(keys)
    assert found.namespace("Bearer 12345") == "key 5994471abb01112a"
    assert found.namespace("Bearer 12345") == Keys({"12345": None}).namespace("bearer  12345")
    with Served(path, keys=keys) as served:
        for key in ("12345", "hunter2"):
            served.client(key=key).completions.create(model=MODEL, prompt="x" * 20, max_tokens=1)
        for key, names in (("prometheus", ["key 2", "key 3"]), ("hunter2", ["key 3"])):
            _, _, text = fetched(served, "/metrics", {"Authorization": f"Bearer {key}"})
            lines = [line for line in text.splitlines() if line.startswith("kvcache_namespace_queries")]
            labels = [f'{{model="{MODEL}",namespace="{name}"}}' for name in names]
            assert lines == [f"kvcache_namespace_queries_total{each} 1" for each in labels]
            assert "5994471abb01112a" not in text


# -- answers ----------------------------------------------------------------------------------------------------


def test_whole_answers_are_made_beside_the_event_loop(served, monkeypatch):
    """The texts of the answer, and those of the tokens in its log-probabilities."""
    threads = {logprobs: set(), text_stream: set()}
    for module in threads:

        def watched(*args, module=module, decoded=module.decoded, **options):
            threads[module].add(threading.current_thread())
            return decoded(*args, **options)

        monkeypatch.setattr(module, "decoded", watched)
    with Served(served.path) as other:
        got = other.client().completions.create(model=MODEL, prompt="x", max_tokens=300, n=8, logprobs=20, seed=1)
        assert sum(len(each.logprobs.tokens) for each in got.choices) == got.usage.completion_tokens
        for found in threads.values():
            assert found
            assert other._thread not in found


def test_long_answers_come_in_pieces_that_are_the_whole(served):
    """Log-probabilities of 800 tokens, against those of an engine alone."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 200, "n": 4, "logprobs": 20, "seed": 1, "temperature": 1}
    status, data = answer(served.connect(post(json.dumps(body).encode())))
    assert status == 200
    pieces = []
    while data:
        length, _, data = data.partition(b"\r\n")
        pieces.append(data[: int(length, 16)])
        data = data[int(length, 16) + 2 :]
    assert (len(pieces) > 5, pieces.pop()) == (True, b"")
    choices = json.loads(b"".join(pieces))["choices"]
    tokenizer = served.alone.tokenizer
    for index, choice in enumerate(choices):
        params = SamplingParams(max_tokens=200, logprobs=20, seed=1 + index, temperature=1, top_p=0.9, top_k=40)
        alone = served.alone.complete("x", params)
        assert (choice["index"], choice["text"]) == (index, alone.text)
        assert choice["logprobs"]["tokens"] == [tokenizer.decode([token]) for token in alone.tokens]
        assert choice["logprobs"]["token_logprobs"] == [each.logprob for each in alone.logprobs]
        for offset, text in zip(choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"], strict=True):
            if "\ufffd" not in text:
                assert alone.text[offset:].startswith(text)


def test_events_of_a_stream_are_small(served):
    """However late its reader is; together they are the answer."""
    settings = {"max_tokens": 300, "seed": 2, "logprobs": 5}
    served.network.closed = True
    stream = served.client().completions.create(model=MODEL, prompt="late", stream=True, **settings)
    served.network.open()
    until(lambda: not served.engine.stats().running + served.engine.stats().waiting)
    chunks = [chunk.choices[0] for chunk in stream]
    whole = served.client().completions.create(model=MODEL, prompt="late", **settings).choices[0]
    assert "".join(each.text for each in chunks) == whole.text
    assert max(len(each.logprobs.tokens) for each in chunks) <= 16
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [each for chunk in chunks for each in getattr(chunk.logprobs, name)] == getattr(whole.logprobs, name)
    assert [each.finish_reason for each in chunks] == [None] * (len(chunks) - 1) + [whole.finish_reason]


def test_metrics_do_not_wait_for_other_threads(served):
    """Each small body has a thread while it becomes a request; here all are taken."""
    held, count = threading.Event(), threading.Semaphore(0)
    submit = served.engine.submit

    def slow(*arguments, **options):
        count.release()
        held.wait(60)
        return submit(*arguments, **options)

    served.engine.submit = slow
    try:
        body = post(json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode())
        connections = [served.connect(body) for _ in range(60)]
        count.acquire()
        assert fetched(served, "/metrics")[0] == 200
        assert fetched(served, "/health")[0] == 200
    finally:
        held.set()
        del served.engine.submit
    assert {answer(each)[0] for each in connections} == {200}


# -- special tokens of users ------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True])
def test_special_tokens_of_users(tmp_path, plain):
    folder = chat_folder(tmp_path / "chat")
    with Served(folder, limits={"plain_special_tokens": plain}) as served:
        client, used = served.client(), []
        for text in ("a<|endoftext|>b", "a b"):
            got = client.completions.create(model=MODEL, prompt=text, max_tokens=1)
            talk = client.chat.completions.create(model=MODEL, messages=[TALK[0] | {"content": text}], max_tokens=1)
            used.append((got.usage.prompt_tokens, talk.usage.prompt_tokens))
        whole = served.alone.tokenizer.encode("a<|endoftext|>b").ids
        assert len(whole) == 3
        assert (used[0][0] == 3) == (not plain)
        assert (used[0][1] - used[1][1] < 3) == (not plain)
