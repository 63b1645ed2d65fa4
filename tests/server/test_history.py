"""Answers come back: each, wherever it was cut, is taken as history by every interface.

The chat templates of llama.cpp's sources are tried too where KVCACHE_VOCABULARIES names their folder `models`.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from dialect_answers import ANSWERS, SCHEMAS, mark_tokenizer
from http_servers import MODEL

from kvcache import SamplingParams
from kvcache.engine.chat import render
from kvcache.sampling.dialects.dialect_table import DIALECTS, dialect_of
from kvcache.sampling.dialects.spoken_answer import MarkTokens, SpokenAnswer
from kvcache.server.completion_bodies import asked_of_completion
from kvcache.server.completion_form import CompletionForm
from kvcache.server.conversations import placed
from kvcache.server.fields import checked
from kvcache.server.forms import Choice, Whole
from kvcache.server.message_bodies import MESSAGES, asked_of_message
from kvcache.server.message_form import MessageForm
from kvcache.server.response_bodies import RESPONSES, asked_of_response
from kvcache.server.response_form import ResponseForm
from kvcache.server.written import written

pytestmark = pytest.mark.one_build

FOLDER = os.environ.get("KVCACHE_VOCABULARIES")
TEMPLATES = sorted((Path(FOLDER) / "templates").glob("*.jinja")) if FOLDER else []
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "description": "d"}, "s": {"type": "string", "description": "d"}},
}
NAMES = ("f", "g", "g-1")
# Refuses whatever a template of those has been seen to refuse.
STRICT = (
    "{% set ns = namespace(turn=0, open=0) %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% set ns.open = ns.open - 1 %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('an id') }}{% endif %}"
    "{% elif ns.open > 0 %}{{ raise_exception('no result') }}{% endif %}"
    "{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "{% set ns.turn = ns.turn + 1 %}{% endif %}{% if m.role == 'assistant' and not m.tool_calls and not m.content %}"
    "{{ raise_exception('nothing said') }}{% endif %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('several') }}{% endif %}"
    "{% if m.content and m.reasoning_content %}{{ raise_exception('both') }}{% endif %}{% set ns.open = 1 %}{% endif %}"
    "{{ '<' + m.role + '>' }}{{ m.reasoning_content }}"
    "{% if m.content is string %}{{ '' + m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{% for k, v in c.function.arguments | items %}"
    " {{ k }}={{ v }}{% endfor %}]{% endfor %}{% endfor %}"
)


class Text:
    """A checkpoint with this template."""

    special_tokens = SPECIAL

    def __init__(self, template):
        self.source = template

    def template(self, kind):
        return self.source


@pytest.fixture(scope="module")
def tokenizer():
    return mark_tokenizer()


# Of a work.
PROMPT = {"num_prompt": 1, "whole_prompt": 1, "cached_tokens": 0, "reused_tokens": 0, "base": 0, "segments": None}


def cut_answers(tokenizer, name):
    """The whole samples of the longest answer of a dialect, cut behind each of its tokens."""
    text = max((text for dialect, text, _ in ANSWERS if dialect == name), key=len)
    tokens, marks = tokenizer.encode(text).ids, MarkTokens(tokenizer, dialect_of("<think></think>", name))
    for stop in range(len(tokens) + 1):
        spoken = SpokenAnswer(marks, [], calls=True, schemas=SCHEMAS)
        work = SimpleNamespace(
            num_tokens=1 + stop, num_new=stop, reason="length", logprobs=None, new_tokens=tokens[:stop],
            **PROMPT,
        )
        yield Whole(Choice(0, work, spoken), spoken.extend(tokens[:stop], ended=True), "length")


HI, ON = {"role": "user", "content": "hi"}, {"role": "user", "content": "go on"}
TEXT = {"type": "text", "text": "go on"}
ENGINE = SimpleNamespace(shared_block_size=0)
REQUEST = SimpleNamespace(works=[SimpleNamespace(num_tokens=1, **PROMPT)], prompt_logprobs=None)


def tool(**more):
    return [{"name": name, "description": "d", **more} for name in NAMES]


def as_json(answer):
    return json.loads("".join(written(answer)))


FUNCTIONS = [{"type": "function", "function": each} for each in tool(parameters=PARAMETERS)]
CHAT = {"model": MODEL, "messages": [HI], "tools": FUNCTIONS}
MESSAGE = {"model": MODEL, "max_tokens": 9, "messages": [HI], "tools": tool(input_schema=PARAMETERS)}
FLAT = [{"type": "function", **each} for each in tool(parameters=PARAMETERS)]
RESPONSE = {"model": MODEL, "input": [HI], "tools": FLAT}
ASKED = asked_of_completion(CHAT, True, SamplingParams())


def with_and_without(results):
    return (results, []) if results else ([],)


def by_chat(sample):
    """Read the next turn of a chat: with results of the calls, and without."""
    said = as_json(CompletionForm(ASKED, ENGINE, None).whole([REQUEST], [sample]))["choices"][0]["message"]
    calls = said.get("tool_calls", [])
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "R"} for call in calls]
    bodies = [CHAT | {"messages": [HI, said, *each, ON]} for each in with_and_without(results)]
    return [asked_of_completion(body, True, SamplingParams()) for body in bodies]


def by_messages(sample):
    content = as_json(MessageForm(ASKED, ENGINE, "msg_1").whole([REQUEST], [sample]))["content"]
    calls = [block for block in content if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "R"} for call in calls]
    said = {"role": "assistant", "content": content}
    talks = ([HI, said, {"role": "user", "content": [*each, TEXT]}] for each in with_and_without(results))
    return [asked_of_message(checked(MESSAGE | {"messages": talk}, MESSAGES, ()), SamplingParams()) for talk in talks]


def by_responses(sample):
    items = as_json(ResponseForm(ASKED, ENGINE, RESPONSE).whole([REQUEST], [sample]))["output"]
    calls = [item for item in items if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "R"} for call in calls]
    talks = ([HI, *items, *each, ON] for each in with_and_without(results))
    return [asked_of_response(checked(RESPONSE | {"input": talk}, RESPONSES, ()), SamplingParams()) for talk in talks]


def expect_taken(template, samples, shown):
    """Each sample is taken as history, by each interface; how many different answers there were.

    Args:
        shown: whether the template writes the words beside calls.
    """
    count, known, texts = 0, None, {}
    for sample in samples:
        said = [piece.text.strip() for piece in sample.pieces if piece.channel == "content" and shown]
        if sample.pieces == known:  # the next token is a part of a mark
            continue
        count, known = count + 1, sample.pieces
        for asked in (asked for interface in (by_chat, by_messages, by_responses) for asked in interface(sample)):
            (asked,) = asked.prompts
            talk = placed(asked.messages, False), asked.tools
            if (key := json.dumps(talk)) not in texts:  # interfaces agree, mostly
                texts[key] = render(Text(template), *talk)
            assert all(text in texts[key] for text in [*said, "go on"]), texts[key]
    return count


@pytest.mark.parametrize("name", sorted({name for name, _, _ in ANSWERS} & {*DIALECTS}))
def test_answers_that_were_cut_come_back(tokenizer, name):
    assert expect_taken(STRICT, cut_answers(tokenizer, name), True) > 3


@pytest.mark.skipif(not TEMPLATES, reason="KVCACHE_VOCABULARIES names no folder of templates")
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_templates_take_what_their_networks_said(tokenizer, path):
    template = path.read_text(encoding="utf-8")
    if "functions" in template and "datetime" in template:
        pytest.skip("a template with variables of its own")
    name = next(name for name, dialect in DIALECTS.items() if dialect[:3] == dialect_of(template)[:3])
    expect_taken(template, cut_answers(tokenizer, name), False)
