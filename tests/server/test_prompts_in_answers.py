"""Prompts in answers: their texts, log-probabilities and token ids; and prompts that end within an answer."""

import anthropic
import numpy as np
import openai
import pytest
from http_servers import MODEL, Served, tiny_file

pytestmark = pytest.mark.one_build

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [{"role": "user", "content": "Hi 猫"}]
BEGUN = [*TALK, {"role": "assistant", "content": "It is"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(tiny_file(tmp_path_factory.mktemp("prompts"), TEMPLATE)) as made:
        yield made


def complete(served, prompt, **settings):
    more = {name: settings.pop(name) for name in ("return_token_ids", "repetition_penalty") if name in settings}
    client = served.client().completions
    return client.create(model=MODEL, prompt=prompt, temperature=0, extra_body=more, **settings)


@pytest.mark.parametrize("most", [0, 3])
def test_the_prompt_has_its_log_probabilities(served, most):
    """As lm-eval asks for them: token ids, several prompts, the most likely token beside each."""
    prompts = [[5, 60, 7, 199, 30, 8], [9, 9], [77]]
    got = complete(served, prompts, max_tokens=most, logprobs=1, echo=True, n=2, repetition_penalty=1.0)
    assert len(got.choices) == 6
    plain = complete(served, prompts, max_tokens=max(1, most), logprobs=1, n=2, repetition_penalty=1.0)
    for choice, alone in zip(got.choices, plain.choices, strict=True):
        prompt, found = prompts[choice.index // 2], choice.logprobs
        begin = len(prompt)
        assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
        want = served.alone.score(prompt) if begin > 1 else []
        np.testing.assert_allclose(found.token_logprobs[1:begin], want, atol=1e-5)
        for logprob, top in zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
            (best,) = top.values()
            assert logprob <= best
        text = served.engine.tokenizer.decode(prompt)
        assert choice.text == text + (alone.text if most else "")
        assert found.token_logprobs[begin:] == (alone.logprobs.token_logprobs if most else [])
        assert found.text_offset[0] == 0
        assert found.text_offset == sorted(found.text_offset)
    assert got.usage.completion_tokens == 6 * most
    served.engine.check()


def test_an_echo_without_log_probabilities(served):
    for prompt in ("猫 im", served.engine.tokenizer.encode("猫 im").ids):
        whole = complete(served, prompt, max_tokens=4, echo=True).choices[0]
        assert whole.text == "猫 im" + complete(served, prompt, max_tokens=4).choices[0].text
        assert whole.logprobs is None
        parts = [part.choices[0] for part in complete(served, prompt, max_tokens=4, echo=True, stream=True)]
        assert "".join(part.text for part in parts) == whole.text
    with pytest.raises(openai.BadRequestError, match="echo: expected none beside logprobs in a stream"):
        complete(served, "x", logprobs=1, echo=True, stream=True)
    with pytest.raises(openai.BadRequestError, match="logprobs: expected at most 1048576 values of prompts"):
        complete(served, [[5] * 500] * 128, logprobs=20, echo=True, max_tokens=0)


def ids_of(parts):
    return [token for part in parts for token in part.choices[0].token_ids]


def test_token_ids(served):
    whole = complete(served, ["ab", "c"], max_tokens=5, return_token_ids=True)
    for choice, prompt in zip(whole.choices, ("ab", "c"), strict=True):
        assert choice.prompt_token_ids == served.engine.tokenizer.encode(prompt).ids
        assert choice.token_ids == served.alone.generate(choice.prompt_token_ids, max_tokens=5, temperature=0.0)
    parts = [*complete(served, "ab", max_tokens=5, return_token_ids=True, stream=True)]
    given = [part.choices[0].model_extra.get("prompt_token_ids") for part in parts]
    assert given == [whole.choices[0].prompt_token_ids, *[None] * (len(parts) - 1)]
    assert ids_of(parts) == whole.choices[0].token_ids
    chat = {"model": MODEL, "messages": TALK, "max_tokens": 5, "temperature": 0}
    chat |= {"extra_body": {"return_token_ids": True}}
    got = served.client().chat.completions.create(**chat)
    assert got.prompt_token_ids == served.alone.apply_chat_template(TALK, tokenize=True)
    assert len(got.choices[0].token_ids) == got.usage.completion_tokens
    first, *rest = served.client().chat.completions.create(**chat, stream=True)
    assert first.prompt_token_ids == got.prompt_token_ids
    assert all("prompt_token_ids" not in each.model_extra for each in rest)
    assert ids_of([first, *rest]) == got.choices[0].token_ids


def rendered(served, messages, **more):
    body = {"model": MODEL, "messages": messages, **more}
    return served.client().post("/chat/completions/render", body=body, cast_to=object)["token_ids"]


def test_an_answer_goes_on_with_a_text(served):
    tokenizer, head = served.engine.tokenizer, "<user>Hi 猫</>\n<assistant>"
    for content, text in (("It is", "It is"), ("It is ", "It is"), ([{"type": "text", "text": "</"}], "</")):
        said = [*TALK, {"role": "assistant", "content": content}]
        for more in ({}, {"add_generation_prompt": False}):
            got = rendered(served, said, continue_final_message=True, **more)
            assert tokenizer.decode(got) == head + text
    assert tokenizer.decode(rendered(served, BEGUN, add_generation_prompt=False)) == f"{head}It is</>\n"
    assert tokenizer.decode(rendered(served, BEGUN)) == f"{head}It is</>\n<assistant>"
    prompt = tokenizer.encode(f"{head}It is", add_special_tokens=False).ids
    client = anthropic.Anthropic(base_url=served.url.removesuffix("/v1"), api_key="x", max_retries=0)
    got = client.messages.create(model=MODEL, messages=BEGUN, max_tokens=4)
    usage = got.usage
    read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    assert usage.input_tokens + read + written == len(prompt)
    with Served(served.path, limits={"plain_special_tokens": True}) as plain:
        assert rendered(plain, BEGUN, continue_final_message=True) == prompt


@pytest.mark.parametrize(
    ("messages", "more", "message"),
    [
        (BEGUN, {"add_generation_prompt": True}, "add_generation_prompt: expected false beside continue_final_message"),
        (TALK, {}, "continue_final_message: expected a text of the assistant as the last message"),
        ([*TALK, {"role": "assistant", "content": None}], {}, "continue_final_message: expected a text"),
        ([], {}, "continue_final_message: expected a text"),
        ([*TALK, {"role": "assistant", "content": 3}], {}, "messages: expected a str"),
        ("x", {}, "continue_final_message: expected a text"),
    ],
)
def test_what_does_not_go_on_is_refused(served, messages, more, message):
    with pytest.raises(openai.BadRequestError, match=message):
        rendered(served, messages, continue_final_message=True, **more)


def test_a_template_without_the_last_message(tmp_path):
    with (
        Served(tiny_file(tmp_path, "{{ messages[0].content }}")) as other,
        pytest.raises(openai.BadRequestError, match="messages: expected a chat template that writes the last message"),
    ):
        rendered(other, BEGUN, continue_final_message=True)


def test_a_priority_counts(served, monkeypatch):
    asked, submit = [], served.engine.submit
    monkeypatch.setattr(
        served.engine, "submit", lambda *args, **more: (asked.append(more["priority"]), submit(*args, **more))[1]
    )
    client = served.client().completions
    client.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=1, extra_body={"priority": 7})
    assert asked == [7, 9]
    for wrong in (-1, 1 << 40, "x", True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.create(model=MODEL, prompt="a", extra_body={"priority": wrong})
        assert caught.value.param == "priority"
