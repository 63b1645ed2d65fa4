"""The routes that routers and tools ask beside answers: tokens of prompts, and paths of other models."""

import json

import openai
import pytest
from http_servers import MODEL, Served, answer, post, tiny_file

pytestmark = pytest.mark.one_build

TALK = [{"role": "user", "content": "Hi 猫"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEMPLATE = "{{ tools | tojson }}{{ mode }}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(tiny_file(tmp_path_factory.mktemp("tokens"), TEMPLATE), {"k": "one"}) as made:
        yield made


def ask(served, path, key="k", **body):
    request = post(json.dumps(body).encode(), path)
    request = request.replace(b"\r\n", f"\r\nAuthorization: Bearer {key}\r\n".encode(), 1)
    status, data = answer(served.connect(request))
    return status, json.loads(data)


def test_the_tokens_of_a_conversation(served):
    asked = {"messages": TALK, "tools": [TOOL], "chat_template_kwargs": {"mode": "m"}}
    wanted = served.alone.apply_chat_template(TALK, tools=[TOOL], template={"mode": "m"}, tokenize=True)
    for body in (asked, asked | {"model": MODEL, "add_special_tokens": False, "add_generation_prompt": True}):
        status, found = ask(served, "/tokenize", **body)
        assert (status, found["tokens"], found["count"]) == (200, wanted, len(wanted))
        assert (found["max_model_len"], found["token_strs"]) == (served.engine.max_positions, None)
    status, found = ask(served, "/v1/chat/completions/render", model=MODEL, stream=True, **asked)
    assert (status, found["token_ids"]) == (200, wanted)
    got = served.client(key="k").chat.completions.create(
        model=MODEL, messages=TALK, tools=[TOOL], max_tokens=1, extra_body={"chat_template_kwargs": {"mode": "m"}}
    )
    assert got.usage.prompt_tokens == len(wanted)


def test_the_tokens_of_texts(served):
    ids = served.engine.tokenizer.encode("猫 im").ids
    status, found = ask(served, "/tokenize", prompt="猫 im", return_token_strs=True)
    assert (status, found["tokens"]) == (200, ids)
    assert found["token_strs"][-1] == "im"
    assert ask(served, "/tokenize", prompt=ids)[1]["tokens"] == ids
    assert ask(served, "/detokenize", tokens=ids)[1] == {"prompt": "猫 im"}
    status, found = ask(served, "/v1/completions/render", model=MODEL, prompt=["猫 im", [1, 2]])
    assert (status, [each["token_ids"] for each in found]) == (200, [ids, [1, 2]])
    assert len({each["request_id"] for each in found}) == 2


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "other": 1}, 400, "other"),
        ("/tokenize", {"prompt": "x", "model": "y"}, 404, "model"),
        ("/tokenize", {"prompt": "x" * 600}, 400, "prompt"),
        ("/tokenize", {"prompt": [300]}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a", "b"]}, 400, "prompt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [300]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1] * 600}, 400, "tokens"),
        ("/v1/chat/completions/render", {"model": MODEL}, 400, "messages"),
        ("/v1/completions/render", {"model": MODEL, "prompt": "x", "other": 1}, 400, "other"),
        ("/v1/embeddings", {"input": "x"}, 400, "model"),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}, 400, "model"),
        ("/v1/images/generations", {"prompt": "x"}, 501, None),
    ],
)
def test_what_is_refused(served, path, body, status, param):
    got, found = ask(served, path, **body)
    assert (got, found["error"]["param"]) == (status, param)


def test_keys_count_here_too(served):
    for path in ("/tokenize", "/detokenize", "/v1/completions/render", "/v1/messages/count_tokens"):
        assert ask(served, path, key="wrong", prompt="x")[0] == 401


def test_a_client_learns_that_there_are_no_embeddings(served):
    with pytest.raises(openai.BadRequestError, match="model: expected one whose checkpoint, or --pooling, says"):
        served.client(key="k").embeddings.create(model=MODEL, input="x")
    head = b"HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert served.connect(head).recv(100).startswith(b"HTTP/1.1 200")
