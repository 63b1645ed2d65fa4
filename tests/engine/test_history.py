"""Turns that a chat template refuses, in another form; arguments of calls that end anywhere."""

import json

import pytest

from kvcache.engine import history
from kvcache.engine.chat import render
from kvcache.support.json_text import begun_object

pytest.importorskip("jinja2")
pytestmark = pytest.mark.one_build


class Text:
    """A checkpoint with this template."""

    special_tokens = {"eos_token": "."}  # noqa: RUF012  # nobody changes it

    def __init__(self, template):
        self.source = template

    def template(self, kind):
        return self.source


USER = {"role": "user", "content": "u"}


def call(id="abcdefgh1", arguments='{"a": 1}'):
    return {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def said(content="", *calls, **more):
    return {"role": "assistant", "content": content, **more} | ({"tool_calls": [*calls]} if calls else {})


def result(id="abcdefgh1", content="r"):
    return {"role": "tool", "tool_call_id": id, "content": content}


def refusing(condition, before=""):
    """A template that refuses messages of a condition, and writes all that they have."""
    return (
        "{% set ns = namespace(last='') %}{% for m in messages %}" + before + "{% if " + condition
        + " %}{{ raise_exception('no') }}{% endif %}{{ m.role[0] }}:{{ m.reasoning_content }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.arguments }}]{% endfor %}"
        "{{ m.tool_call_id }}|{% set ns.last = m.role %}{% endfor %}"
    )


PARTS = [{"type": "text", "text": each} for each in ("a\n", "b")]
LOOP = "{% for p in m.content %}{% endfor %}"  # so that a template knows parts
OF_USERS = LOOP + (
    "{% if m.role == 'user' and m.content is not string %}"
    "{% set m = dict(m, content=m.content | map(attribute='text') | join) %}{% endif %}"
)
FIRST = LOOP + "{% if m.content is not string %}{% set m = dict(m, content=m.content[0].text) %}{% endif %}"
TWO = [said("w", call("abcdefgh1"), call("abcdefgh2"))]
ONE = "{'a': 1}"
CASES = {
    "several calls": (
        refusing("m.tool_calls and m.tool_calls | length > 1"),
        [USER, *TWO, result("abcdefgh2", "s"), result("abcdefgh1", "r"), USER],
        f"u:u|a:w[abcdefgh1 {ONE}]|t:rabcdefgh1|a:[abcdefgh2 {ONE}]|t:sabcdefgh2|u:u|",
    ),
    "several calls, of which the template writes the first": (
        refusing("false", "{% set m = dict(m, tool_calls=(m.tool_calls or [])[:1]) %}"), [USER, *TWO, result(), USER],
        f"u:u|a:w[abcdefgh1 {ONE}]|t:rabcdefgh1|a:[abcdefgh2 {ONE}]|u:u|",
    ),
    "several calls whose results have no ids": (
        refusing("m.tool_calls and m.tool_calls | length > 1"),
        [USER, *TWO, {"role": "tool", "content": "r"}, {"role": "tool", "content": "r"}, USER],
        f"u:u|a:w[abcdefgh1 {ONE}]|t:r|a:[abcdefgh2 {ONE}]|t:r|u:u|",
    ),
    "several calls without results": (
        refusing("m.tool_calls and m.tool_calls | length > 1"), [USER, *TWO, USER],
        f"u:u|a:w[abcdefgh1 {ONE}]|a:[abcdefgh2 {ONE}]|u:u|",
    ),
    "words of the system": (
        refusing("m.role == 'system'"), [{"role": "system", "content": "s"}, USER, said("a"), USER],
        "u:s\n\nu|a:a|u:u|",
    ),
    "words of the system before an answer": (
        refusing("m.role == 'system'"), [{"role": "system", "content": "s"}, said("a"), USER], "u:s|a:a|u:u|",
    ),
    "calls without a result": (
        refusing("m.role == 'user' and ns.last == 'assistant' and messages[loop.index0 - 1].tool_calls"),
        [USER, said("w", call()), USER], f"u:u|a:w[abcdefgh1 {ONE}]|t:abcdefgh1|u:u|",
    ),
    "a word of the user behind a result": (
        refusing("m.role == 'user' and ns.last == 'tool'"), [USER, said("", call()), result(), USER],
        f"u:u|a:[abcdefgh1 {ONE}]|t:rabcdefgh1|a:|u:u|",
    ),
    "turns that do not alternate": (
        refusing("m.role == ns.last"), [USER, USER, said("a"), said("b"), said("", call()), result(), said("c"), USER],
        f"u:u\n\nu|a:a\n\nb[abcdefgh1 {ONE}]|t:rabcdefgh1|a:c|u:u|",
    ),
    "ids of another length": (
        refusing("m.tool_calls and m.tool_calls[0].id | length != 9"),
        [USER, said("", call("call_x")), result("call_x"), said("", call()), result()],
        f"u:u|a:[ld27gsy4f {ONE}]|t:rld27gsy4f|a:[abcdefgh1 {ONE}]|t:rabcdefgh1|",
    ),
    "words beside thoughts and calls": (
        refusing("m.tool_calls and m.content and m.reasoning_content"),
        [USER, said("w", call(), reasoning_content="hm"), result(), said("w", reasoning_content="hm")],
        f"u:u|a:hm\n\nw[abcdefgh1 {ONE}]|t:rabcdefgh1|a:hmw|",
    ),
    "arguments that are no object": (
        refusing("false", "{% for c in m.tool_calls or [] %}{% set _ = c.function.arguments.items() %}{% endfor %}"),
        [
            USER, said("", *(call(arguments=each) for each in ('{"a": "x\\', '{"a": 1', "[1]", "ls", "null", ""))),
            result(),
        ],
        "u:u|a:" + "".join(f"[abcdefgh1 {each}]" for each in (
            {"a": "x"}, {"a": 1}, {"arguments": "[1]"}, {"arguments": "ls"}, {}, {}
        )) + "|t:rabcdefgh1|",
    ),
    "parts of others than users, written as Python does": (
        refusing("false", OF_USERS), [{"role": "system", "content": PARTS}, USER | {"content": PARTS}, said(PARTS),
                                      USER, said("", call()), result(content=PARTS)],
        f"s:a\nb|u:a\nb|a:a\nb|u:u|a:[abcdefgh1 {ONE}]|t:a\nbabcdefgh1|",
    ),
    "parts of others than users, of which the first is written": (
        refusing("false", FIRST), [{"role": "system", "content": PARTS}, USER], "s:a\nb|u:u|",
    ),
    "none for a content": (
        refusing("m.content is none"), [USER, said(None, call()), result(), said(None), USER],
        f"u:u|a:[abcdefgh1 {ONE}]|t:rabcdefgh1|a:|u:u|",
    ),
    "nothing said, in a template with parts": (
        refusing("m.role == 'assistant' and not m.content and not m.tool_calls"),
        [USER, said("", reasoning_content="hm"), USER, said(), USER],
        "u:u|a:hm[{'type': 'thinking', 'thinking': 'hm'}, {'type': 'text', 'text': ''}]|u:u|"
        "a:[{'type': 'text', 'text': ''}]|u:u|",
    ),
    "nothing said, in a template with texts alone": (
        refusing("m.content is not string or m.role == 'assistant' and not m.content and not m.tool_calls"),
        [USER, said(), USER], "u:u|a: |u:u|",
    ),
}


@pytest.mark.parametrize(("template", "messages", "text"), CASES.values(), ids=CASES)
def test_what_a_template_refuses_has_another_form(template, messages, text):
    """Messages that the template takes stay as they are."""
    assert render(Text(template), messages) == text
    fine = [USER, said("w", call()), result(), said("v"), USER]
    assert render(Text(template), fine) == f"u:u|a:w[abcdefgh1 {ONE}]|t:rabcdefgh1|a:v|u:u|"


def test_the_forms_of_long_conversations_take_time_by_their_length(monkeypatch):
    """Thousands of calls of one turn, and of messages of one role: nothing is looked at for each other one."""
    count, compared = 400, []

    class Id(str):
        def __eq__(self, other):
            compared.append(other)
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    ids = [Id(f"{number:09}") for number in range(count)]
    results = [result(id, f"r{int(id)}") for id in reversed(ids)]
    rendered = render(Text(CASES["several calls"][0]), [USER, said("", *map(call, ids)), *results])
    assert rendered.split("|")[2::2] == [f"t:r{number}{id}" for number, id in enumerate(ids)]
    assert len(compared) < 10 * count
    joined, sizes = history._joined, []
    monkeypatch.setattr(history, "_joined", lambda group: sizes.append(len(group)) or joined(group))
    turns = [USER | {"content": f"{number}"} for number in range(count)]
    rendered = render(Text(CASES["turns that do not alternate"][0]), turns)
    assert rendered == "u:" + "\n\n".join(turn["content"] for turn in turns) + "|"
    assert max(sizes) == count
    assert sum(sizes) < 2 * count


def test_none_said_is_an_empty_text_in_templates_that_know_none_beside_calls():
    """Templates of DeepSeek R1 know it; they left out an answer that ended within its thoughts."""
    template = "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls | length }}{% else %}<{{ m.content }}>"
    template += "{% endif %}{% endfor %}"
    assert render(Text(template), [USER, said(None, reasoning_content="hm"), USER, said(None, call())]) == "<u><><u>1"


def test_results_of_calls_of_one_id():
    two = [said("", call(), call()), result(content="r"), result(content="s"), USER]
    assert render(Text(CASES["several calls"][0]), two) == (
        f"a:[abcdefgh1 {ONE}]|t:rabcdefgh1|a:[abcdefgh1 {ONE}]|t:sabcdefgh1|u:u|"
    )


def test_what_a_template_takes_stays_as_it_is():
    template = "{{ messages | tojson }}"
    messages = [USER, USER, said(None, call(), call("x", "ls"), reasoning_content="hm"), USER, said(""), said("")]
    given = json.loads(json.dumps(messages))
    assert json.loads(render(Text(template), messages))[0] == USER
    found = json.loads(render(Text(template), messages))
    assert [len(each.get("tool_calls", ())) for each in found] == [0, 0, 2, 0, 0, 0]
    assert found[2]["tool_calls"][1]["function"]["arguments"] == "ls"
    assert messages == given


def test_a_template_that_refuses_everything_says_so():
    with pytest.raises(ValueError, match="messages: expected ones that the chat template takes"):
        render(Text("{{ raise_exception('never') }}"), [USER])


def test_lists_as_queues_and_generators():
    """Templates of Kimi K2 and of DeepSeek R1 have them."""
    template = (
        "{% set q = [] %}{% for m in messages %}{% set _ = q.append(m.role) %}{% endfor %}{{ q.pop(0) }}"
        "{{ q | length }}{{ messages | map(attribute='content') | tojson }}"
    )
    assert render(Text(template), [USER, USER]) == 'user1["u", "u"]'


def test_an_object_that_ends_anywhere():
    text = '{"a": "l\\n\\u00e9\\ud83d\\udc08x\\"", "b": [1, {"c": true, "e": []}], "d": {"e": null}, "n": -12.5e3}'
    whole = json.loads(text)
    closed = {"a": "", "b": [], "d": {}, "n": -12.5e3}
    for stop in range(1, len(text) + 1):
        begun, kept = begun_object(text[:stop]), begun_object(text[:stop], whole=True)
        assert [*kept] == [*whole][: len(kept)]
        assert [*begun] == [*whole][: len(begun)]
        assert all(kept[key] == whole[key] or kept[key] in (closed[key], [1], [1, {}], [1, {"c": True}])
                   or key in "bd" for key in kept)
        assert begun.get("a", "") == whole["a"][: len(begun.get("a", ""))]
        json.dumps(begun).encode()
        begun.get("a", "").encode()  # no half of a character
        assert "n" not in kept or kept == whole
    assert begun_object(text) == begun_object(f" {text}\n") == whole
    for odd in ("", "[1]", "null", "ls", '{"a": 1} x', '{"a": 1}}', "{]", "{" * 3000, '"{}"'):
        assert begun_object(odd) is None
    long = '{"a": ["' + "x\\n" * 200_000
    assert begun_object(long) == {"a": ["x\n" * 200_000]}
