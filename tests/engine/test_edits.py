"""Edits of conversations: which results and thoughts leave a prompt, and that it is the prompt of what is left."""

from functools import partial
from types import SimpleNamespace

import pytest
from chat_folders import chat_folder
from tool_talks import TEMPLATE, TOOLS, at, call, result, said, tools, uses

from kvcache import InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.engine.chat import render
from kvcache.engine.edits import CLEARED, ToolClearing, as_edits, clearings, edited
from kvcache.engine.prompt_measure import PromptMeasure

pytestmark = pytest.mark.one_build

THINKING = "clear_thinking_20251015"
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.1, max_tokens=12)


class Words:
    """A measure by which a word is a token, and the prompt of messages has a word more for each."""

    def __init__(self):
        self.prompts = 0

    def prompt(self, messages):
        self.prompts += 1
        return sum(1 + len(self._words(each)) for each in messages)

    def before(self, messages, points):
        return [sum(1 + len(self._words(each)) for each in messages[:point]) for point in points]

    def text(self, text):
        return len(text.split())

    def _words(self, message):
        calls = [call.get("function", call)["arguments"] for call in message.get("tool_calls") or []]
        said = [message.get("content"), message.get("reasoning_content"), *calls]
        return " ".join(each for each in said if isinstance(each, str)).split()


def after(messages, *edits):
    """The conversation after its edits; what they say has to be true."""
    measure = Words()
    found = edited(messages, as_edits(edits), measure)
    assert [each["role"] for each in found.messages] == [each["role"] for each in messages]
    assert bool(found.applied) == (found.original_tokens is not None)
    if found.applied:
        tokens = sum(each["cleared_input_tokens"] for each in found.applied)
        assert found.original_tokens == measure.prompt(messages)
        assert tokens == measure.prompt(messages) - measure.prompt(found.messages)
    return found


def cleared(messages):
    results = [each["content"] for each in messages if each["role"] == "tool"]
    return [number for number, content in enumerate(results) if content == CLEARED]


ALL = at("tool_uses", 0)  # a trigger that each use exceeds
# A conversation of uses, the fields of the edit, and which results are cleared.
CLEARS = [
    ("aaaaa", {}, []),  # below 100,000 tokens
    ("aaaaa", {"trigger": ALL}, [0, 1]),
    ("aaa", {"trigger": ALL}, []),
    ("aaaaa", {"trigger": at("tool_uses", 5)}, []),
    ("aaaaa", {"trigger": at("tool_uses", 4)}, [0, 1]),
    ("aaaaa", {"trigger": ALL, "keep": at("tool_uses", 0)}, [0, 1, 2, 3, 4]),
    ("aaaaa", {"trigger": ALL, "keep": at("tool_uses", 4)}, [0]),
    ("aaaaa", {"trigger": ALL, "keep": at("tool_uses", 9)}, []),
    ("aaaaa", {"trigger": at("input_tokens", 2 + 5 * 27)}, []),  # exactly as many: a call has 6, a result 21
    ("aaaaa", {"trigger": at("input_tokens", 1 + 5 * 27)}, [0, 1]),
    ("abbab", {"trigger": ALL, "exclude_tools": ["a"], "keep": at("tool_uses", 1)}, [1, 2]),
    ("abbab", {"trigger": ALL, "exclude_tools": ["a", "b"], "keep": at("tool_uses", 1)}, []),
    ("abbab", {"trigger": ALL, "exclude_tools": None, "clear_at_least": None, "clear_tool_inputs": None}, [0, 1]),
    # 20 words leave with each result and 7 come in their place
    ("aaaaa", {"trigger": ALL, "clear_at_least": at("input_tokens", 2 * 13)}, [0, 1]),
    ("aaaaa", {"trigger": ALL, "clear_at_least": at("input_tokens", 2 * 13 + 1)}, []),
    ("aaaaaa", {"trigger": ALL, "clear_at_least": at("input_tokens", 2 * 13)}, [0, 1]),  # the third alone is too few
    ("aaaaaaa", {"trigger": ALL, "clear_at_least": at("input_tokens", 2 * 13)}, [0, 1, 2, 3]),
    # the arguments of a call have 3 words
    ("aaaaa", {"trigger": ALL, "clear_tool_inputs": True, "clear_at_least": at("input_tokens", 2 * 16)}, [0, 1]),
    ("aaaaa", {"trigger": ALL, "clear_tool_inputs": ["b"], "clear_at_least": at("input_tokens", 2 * 16)}, []),
]


def test_which_results_are_cleared():
    for names, fields, wanted in CLEARS:
        messages = uses(names)
        found = after(messages, tools(**fields))
        assert cleared(found.messages) == wanted, (names, fields)
        assert [each["cleared_tool_uses"] for each in found.applied] == [len(wanted)] * bool(wanted)
        others = [(a, b) for a, b in zip(messages, found.messages, strict=True) if b["content"] != CLEARED]
        if not fields.get("clear_tool_inputs"):
            assert all(a == b for a, b in others)
        assert messages == uses(names), "the client's own are as they were"


def test_which_inputs_are_cleared():
    for inputs, wanted in ((False, []), (True, [0, 1]), (["b"], [1]), ([], [])):
        found = after(uses("abbab"), tools(trigger=ALL, clear_tool_inputs=inputs)).messages
        calls = [each["tool_calls"][0]["function"] for each in found if each.get("tool_calls")]
        assert [number for number, each in enumerate(calls) if each["arguments"] == "{}"] == wanted
        assert [each["name"] for each in calls] == [*"abbab"]
    result = {"role": "tool", "content": "y " * 9}
    bare = [{"role": "user", "content": "go"}, said("", {"name": "a", "arguments": {"x": 1}}), result]
    found = after(bare, tools(trigger=ALL, keep=at("tool_uses", 0), clear_tool_inputs=True)).messages
    assert (found[1]["tool_calls"], found[2]["content"]) == ([{"name": "a", "arguments": {}}], CLEARED)


def test_a_result_that_is_no_longer_than_the_placeholder_stays():
    """Nothing would be gained; nor does it count for `clear_at_least`, where arguments of its call do."""
    size, keep = len(CLEARED.split()), at("tool_uses", 0)
    talk = [{"role": "user", "content": "go"}]
    for number, words in enumerate((size, size + 1, 1, 30)):
        talk += [said("so", call(f"c{number}", "a")), result(f"c{number}", words)]
    found = after(talk, tools(trigger=ALL, keep=keep))
    assert cleared(found.messages) == [1, 3]
    assert found.applied[0]["cleared_tool_uses"] == 2
    assert found.applied[0]["cleared_input_tokens"] == 1 + 30 - size
    short = [*talk[:3], *talk[5:7]]
    assert after(short, tools(trigger=ALL, keep=keep)).messages == short
    found = after(short, tools(trigger=ALL, keep=keep, clear_tool_inputs=True))
    assert (cleared(found.messages), found.applied[0]["cleared_tool_uses"]) == ([], 2)
    parts = [talk[0], said("so", call("c", "a")), {"role": "tool", "content": [{"type": "text", "text": "a " * 3}] * 3}]
    assert cleared(edited(parts, as_edits([tools(trigger=ALL, keep=keep)]), Words()).messages) == [0]
    least = {"type": "input_tokens", "value": 31 - size}
    assert not after(talk[:5], tools(trigger=ALL, keep=keep, clear_at_least=least)).applied
    assert cleared(after(talk, tools(trigger=ALL, keep=keep, clear_at_least=least)).messages) == [1, 3]


def test_results_belong_to_calls_by_their_ids():
    messages = [
        {"role": "user", "content": "go"}, said("", call("x", "a"), call("y", "b"), call("z", "a")),
        result("z"), result("y"), result("x"), {"role": "tool", "content": "of no call", "name": "b"}, said("ok"),
    ]
    found = after(messages, tools(trigger=ALL, keep=at("tool_uses", 0), exclude_tools=["b"])).messages
    assert cleared(found) == [0, 2]
    nameless = [{key: value for key, value in each.items() if key != "tool_call_id"} for each in messages]
    found = after(nameless, tools(trigger=ALL, keep=at("tool_uses", 0), exclude_tools=["b"])).messages
    assert cleared(found) == [0, 2], "without ids by their order"


class CountedId(str):
    """An id that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        CountedId.compared += 1
        return str.__eq__(self, other)


def test_results_of_many_calls_are_found_without_a_search():
    """Each has its own result, whatever their order is: ids are not compared one by one."""
    names = ["a", "b"] * 300
    calls = [call(CountedId(f"c{number}"), name) for number, name in enumerate(names)]
    results = [result(CountedId(f"c{number}"), 1) for number in reversed(range(len(names)))]
    messages = [{"role": "user", "content": "go"}, said("", *calls), *results]
    CountedId.compared = 0
    found = clearings(messages, ToolClearing(-1, keep=0, exclude=frozenset("b")), Words())
    assert CountedId.compared < 10 * len(names)
    assert [use.call for each in found for use in each.uses] == [(1, at) for at in range(598, -1, -2)]


def test_results_with_some_ids_take_the_calls_that_are_left():
    """A result without an id, or with one of no call, is that of the first call that has none yet."""
    calls = [call("x", "a"), call("x", "b"), call("y", "c"), call(None, "d"), call("z", "e")]
    results = [result("x"), {"role": "tool", "content": "it"}, result("z"), result("of none"), result("x"), result("y")]
    messages = [{"role": "user", "content": "go"}, said("", *calls), *results]
    found = clearings(messages, ToolClearing(-1, keep=0), Words())[0].uses
    assert [use.name for use in found] == ["a", "d", "e", "b", "c", ""]
    alone = [{"role": "tool", "content": "it"}, *results]
    found = clearings([*messages[:2], *alone], ToolClearing(-1, keep=0), Words())[0].uses
    assert [use.name for use in found] == ["d", "a", "b", "e", "c", "", ""]
    bare = [{key: value for key, value in each.items() if key != "tool_call_id"} for each in results]
    named = [call(f"c{number}", name) for number, name in enumerate("abc")]
    mixed = [messages[0], said("", *named), bare[0], result("c0"), result("c2"), bare[1]]
    found = clearings(mixed, ToolClearing(-1, keep=0), Words())[0].uses
    assert [use.name for use in found] == ["a", "b", "c", ""]


def test_a_clearing_stays_as_the_conversation_grows():
    """So the next turns have the same prompt before them, until enough has come that a clearing is worth it."""
    edit = as_edits([tools(trigger=at("input_tokens", 100), clear_at_least=at("input_tokens", 3 * 13))]).uses
    messages, seen = uses("a" * 16), []
    for length in range(3, len(messages) + 1, 2):
        talk = messages[:length]
        done = clearings(talk, edit, Words())
        assert done[: len(seen)] == seen
        assert len(done) <= len(seen) + 1
        seen = done
        assert clearings([*talk, said("ok")], edit, Words(), each=True) == done
    assert [len(each.uses) for each in seen] == [3, 3, 3, 3]
    once = ToolClearing(trigger=100)
    for length in range(1, len(messages) + 1):
        one = [use for each in clearings(messages[:length], once, Words()) for use in each.uses]
        each = [use for each in clearings(messages[:length], once, Words(), each=True) for use in each.uses]
        assert one == each


def test_clearings_of_a_long_conversation_are_few_where_each_counts():
    """Behind masks a token sees the parts between them: after some, one waits until it clears enough of the prompt."""
    messages, done, edit = uses("a" * 400, 10), [], ToolClearing(0, counts_uses=True, mask=True)
    for length in (401, 601, 801):
        before, done = done, clearings(messages[:length], edit, Words(), each=True)
        assert done[: len(before)] == before
    assert [len(each.uses) for each in done[:32]] == [1] * 32
    later = [len(each.uses) for each in done[32:]]
    assert (len(later) < 70, min(later), max(later)) == (True, 2, 21)
    whole = clearings(messages, edit, Words())
    assert [len(each.uses) for each in whole] == [397]


def test_thoughts_of_the_last_turns_stay():
    """A turn goes on while calls have results, whatever the user says beside these."""
    turn = [
        {"role": "user", "content": "q"}, said("", call("x"), reasoning_content="t1"), result("x"),
        {"role": "user", "content": "a reminder"}, said("", call("y"), thinking="t2"), result("y"),
        said("answer", reasoning="t3"),
    ]
    parts = said([{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "p"}])
    messages = [*turn, {"role": "user", "content": "and"}, said("no thoughts"), *turn, turn[0], parts, turn[0]]
    for keep, turns in (({}, 2), ({"keep": at("thinking_turns", 2)}, 1), ({"keep": at("thinking_turns", 3)}, 0),
                        ({"keep": "all"}, 0), ({"keep": {"type": "all"}}, 0)):
        found = edited(messages, as_edits([{"type": THINKING, **keep}]), Words())
        assert [each["cleared_thinking_turns"] for each in found.applied] == [turns] * bool(turns)
        first = [bool({"reasoning_content", "reasoning", "thinking"} & {*each}) for each in found.messages[:7]]
        assert any(first) == (turns < 1)
        assert any("reasoning" in each for each in found.messages[9:]) == (turns < 2)
        assert found.messages[-2] == parts
    more = edited([*messages, turn[1]], as_edits([{"type": THINKING}]), Words())
    assert more.messages[-3]["content"] == [{"type": "text", "text": "p"}]


def test_two_edits_are_done_one_behind_the_other():
    """The second one counts what the first one has left."""
    messages = [*uses("aaaaa", thoughts=True), said("done"), *TURN, said("", reasoning="z"), *TURN]
    size = Words().prompt(messages)
    for trigger, kinds in ((size - 10, [THINKING]), (size - 11, [THINKING, TOOLS])):
        found = after(messages, {"type": THINKING}, tools(trigger=at("input_tokens", trigger)))
        assert [each["type"] for each in found.applied] == kinds
    counted = Words()
    edited(messages, as_edits([{"type": THINKING, "keep": "all"}]), counted)
    assert counted.prompts == 0, "what changes nothing takes no time"


TURN = [{"role": "user", "content": "y"}]
REFUSED = [
    ("x", r"edits: expected a list, got str"), ([3], r"edits\[0\]: expected a dict, got int"),
    ([{"type": "compact_20260112"}], r"edits\[0\]\.type: expected clear_thinking_20251015 or clear_tool_uses_20250919"),
    ([{}], r"edits\[0\]\.type: expected .* got None"),
    ([tools(), tools()], r"edits\[1\]\.type: expected each type once"),
    ([tools(), {"type": THINKING}], r"edits\[1\]\.type: expected clear_thinking_20251015 before"),
    ([tools(kept=1)], r"edits\[0\]: expected the fields trigger, keep, .* got kept"),
    ([tools(trigger=5)], r"edits\[0\]\.trigger: expected a dict, got int"),
    ([tools(trigger=at("turns", 5))], r"edits\[0\]\.trigger\.type: expected input_tokens or tool_uses, got 'turns'"),
    ([tools(trigger=at("tool_uses", -1))], r"edits\[0\]\.trigger\.value: expected an int >= 0"),
    ([tools(trigger={"type": "tool_uses"})], r"edits\[0\]\.trigger\.value: expected an int, got NoneType"),
    ([tools(keep=at("input_tokens", 1))], r"edits\[0\]\.keep\.type: expected tool_uses, got 'input_tokens'"),
    ([tools(clear_at_least=at("tool_uses", 1))], r"edits\[0\]\.clear_at_least\.type: expected input_tokens"),
    ([tools(clear_at_least=at("input_tokens", 1.5))], r"edits\[0\]\.clear_at_least\.value: expected an int"),
    ([tools(exclude_tools="a")], r"edits\[0\]\.exclude_tools: expected a list, got str"),
    ([tools(exclude_tools=[1])], r"edits\[0\]\.exclude_tools: expected a str, got int"),
    ([tools(clear_tool_inputs="a")], r"edits\[0\]\.clear_tool_inputs: expected a list, got str"),
    ([{"type": THINKING, "keep": at("thinking_turns", 0)}], r"edits\[0\]\.keep\.value: expected an int >= 1"),
    ([{"type": THINKING, "keep": at("tool_uses", 1)}], r"edits\[0\]\.keep\.type: expected thinking_turns"),
    ([tools(kvcache_mode="mark")], r"edits\[0\]\.kvcache_mode: expected recompute or mask, got 'mark'"),
    ([tools(kvcache_mode="mask", clear_tool_inputs=True)], r"edits\[0\]\.clear_tool_inputs: expected false beside"),
    ([{"type": THINKING, "kvcache_mode": "mask"}], r"edits\[0\]\.kvcache_mode: expected recompute, got 'mask'"),
    ([{"type": THINKING, "trigger": ALL}], r"edits\[0\]: expected the fields keep, kvcache_mode, got trigger"),
]


def test_what_is_no_edit_is_refused_by_name():
    for value, says in REFUSED:
        with pytest.raises((TypeError, ValueError), match=f"^{says}"):
            as_edits(value)
    assert as_edits([]) is None


# -- prompts ------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    return InferenceEngine.from_pretrained(chat_folder(tmp_path_factory.mktemp("edits") / "x", TEMPLATE))


def size(engine, messages):
    return len(engine.apply_chat_template(messages, tokenize=True))


def test_a_prompt_after_edits_is_that_of_the_messages_with_the_placeholder(engine):
    messages = [*uses("aaaaa", thoughts=True), said("so", reasoning_content="z"), {"role": "user", "content": "and?"}]
    edits = [{"type": THINKING}, tools(trigger=ALL, clear_tool_inputs=True)]
    by_hand = [{**each} for each in messages]
    for number in (2, 4):
        by_hand[number]["content"] = CLEARED
        by_hand[number - 1]["tool_calls"] = [call(f"c{number // 2 - 1}", "a", "{}")]
    for each in by_hand:
        each.pop("reasoning_content", None)
    messages += [said("yes", reasoning_content="last"), *TURN]
    by_hand += [said("yes", reasoning_content="last"), *TURN]
    found = engine.edit(messages, edits)
    prompt = engine.apply_chat_template(by_hand, tokenize=True)
    assert engine.apply_chat_template(messages, tokenize=True, edits=edits) == prompt
    assert [each["type"] for each in found.applied] == [THINKING, TOOLS]
    assert found.original_tokens == size(engine, messages)
    assert sum(each["cleared_input_tokens"] for each in found.applied) == size(engine, messages) - len(prompt)
    # and so are the bits of an answer, whatever ran before
    cached = PrefixCachedEngine(engine, max_cache_blocks=200)
    wanted = engine.complete(prompt, GREEDY, logprobs=3)
    cached.complete(messages[0]["content"], GREEDY)
    cached.complete(prompt[:40], GREEDY)
    answer = cached.chat(messages, GREEDY, edits=edits)
    assert ("".join(answer), answer.applied_edits) == (engine.tokenizer.decode(wanted.tokens), [*found.applied])
    assert answer.cached_tokens >= 32
    for each in (engine, cached):
        again = each.chat(messages, GREEDY, edits=edits)
        assert ([*again] and again.tokens, again.prompt_tokens) == (wanted.tokens, len(prompt))
    assert engine.chat(messages, GREEDY).applied_edits == []


def test_the_prompts_of_earlier_requests_are_counted_in_that_of_the_last(engine):
    """Exactly, where the template writes texts as they are; where it does not, the rule is asked for now alone."""
    messages = [*uses("aaaa"), said("ok"), {"role": "user", "content": [{"type": "text", "text": " and\n"}]}]
    points = [3, 5, 9, 11]
    for template, is_known in ((TEMPLATE, True), (TEMPLATE.replace("| trim", "| length"), False)):
        side = SimpleNamespace(template=lambda kind, own=template: own, special_tokens={"eos_token": "<|endoftext|>"})
        measure = PromptMeasure(partial(render, side), engine.tokenizer)
        wanted = [measure.prompt(messages[:point]) for point in points]
        assert measure.before(messages, points) == (wanted if is_known else [0, 0, 0, wanted[-1]])


def test_a_trigger_counts_the_tokens_of_the_prompt(engine):
    messages = uses("aaaaa")
    tokens = size(engine, messages)
    for value, wanted in ((tokens, []), (tokens - 1, [0, 1])):
        found = engine.edit(messages, [tools(trigger=at("input_tokens", value))])
        assert cleared(found.messages) == wanted
    assert engine.apply_chat_template(messages, edits=[tools(trigger=ALL)]).count(CLEARED) == 2
