"""Grammars of answers that must call: whatever the network draws, the dialect reads calls of the functions."""

import json
import re
from dataclasses import replace
from functools import cache

import jsonschema
import numpy as np
import pytest

pytest.importorskip("llguidance")
pytest.importorskip("tokenizers")
from spelled_networks import END, spelling

from kvcache.errors import GrammarError
from kvcache.grammar import json_object, json_schema
from kvcache.grammar.compiler import GrammarCompiler
from kvcache.sampling.dialects.call_grammars import calls_grammar, lead_of_answers
from kvcache.sampling.dialects.dialect_table import DIALECTS
from kvcache.sampling.dialects.member_calls import MemberCalls
from kvcache.sampling.dialects.spoken_answer import MarkTokens, SpokenAnswer
from kvcache.sampling.dialects.tag_calls import TagCalls

pytestmark = pytest.mark.one_build

PLACE = {"enum": ["here", "there"]}
FUNCTIONS = [
    {
        "name": "look",
        "parameters": {
            "type": "object", "required": ["place"], "additionalProperties": False, "$defs": {"p": PLACE},
            "properties": {"place": {"$ref": "#/$defs/p"}, "n": {"type": "integer", "maximum": 9, "minimum": 0}},
        },
    },
    {"name": 'say "hi"', "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
]
SPECIAL = (
    "<tool_call>", "</think>", "<|tool_call|>", '<|"|>', "<|tool_call>", "<|message|>", "<|channel|>", "<|end|>",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<minimax:tool_call>", "<arg_value>",
)


@cache
def tokenizer_of(special):
    """A tokenizer as of `spelling`, with some marks for its unused tokens."""
    content = json.loads(spelling().to_str())
    unused = [token for token in content["added_tokens"] if "unused" in token["content"]]
    for token, mark in zip(unused, special, strict=False):
        content["model"]["vocab"][mark] = content["model"]["vocab"].pop(token["content"])
        token["content"] = mark
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(content))


def tokenizer_for(name, special):
    """One that can write the marks of a dialect: its bytes are those of ASCII."""
    if name == "deepseek":
        return tokenizer_of((*special, *DIALECTS[name].marks))
    parts = ("<|open|>", "<|sep|>", "<|close|>") if special else ()
    word, nested = ("｜DSML｜",), ("]<]minimax[>[", "<tool_call>") if special else ()
    own = {"kimi_k3": parts, "deepseek_v3_2": word, "deepseek_v4": word, "minimax_m3": nested}
    return tokenizer_of(own.get(name, special))


@cache
def compiler_of(tokenizer):
    return GrammarCompiler(lambda: tokenizer, 256, [END])


def compiled(tokenizer, grammar):
    return compiler_of(tokenizer).compile(grammar)


CLOSERS = {
    "qwen3_coder": "</parameter>", "glm": "</arg_value>", "gemma4": '<|"|>', "functiongemma": "<escape>",
    "harmony": "<|end|>", "deepseek_v3_2": "/", "kimi_k3": "<|close|>argument<|sep|>",
    "minimax_m3": "]<]minimax[>[</text>",
}


def drawn(grammar, tokenizer, seed, most=400, closer=""):
    """Random tokens of a grammar; those that close something are likely, and so is `closer`, once it has begun."""
    matcher = compiled(tokenizer, grammar).fresh([END])
    rng, tokens, text = np.random.default_rng(seed), [], ""
    likely = [tokenizer.token_to_id(each) for each in ('"', "}", ">", "t", "/", closer) if tokenizer.token_to_id(each)]
    for _ in range(most):
        logits = rng.gumbel(size=256).astype(np.float32)
        logits[likely] += 3
        logits[END] += 6
        begun = max((n for n in range(len(closer)) if text.endswith(closer[:n])), default=0)
        if closer and tokenizer.token_to_id(closer[begun]):
            logits[tokenizer.token_to_id(closer[begun])] += 12 if begun else 4
        token = int(np.argmax(matcher.masked(logits)))
        if token == END:
            break
        tokens.append(token)
        text = (text + tokenizer.decode([token], skip_special_tokens=False))[-40:]
        matcher.advance(token)
        if matcher.is_complete:
            break
    return tokens


# Dialects whose calls are those of others between other marks.
LIKE_OTHERS = {"none", "ernie", "nemotron", "apriel", "seed_oss", "deepseek_v4", "gigachat3_1"}


def names_of(name):
    """Functions whose names the words of a dialect can say."""
    others = ("harmony", "deepseek", "kimi", "functionary", "solar_open")
    odd = DIALECTS[name].stream in (MemberCalls, TagCalls) or name in others
    return [FUNCTIONS[0], FUNCTIONS[1] | {"name": "say"}] if odd else FUNCTIONS


@pytest.mark.parametrize("special", [(), SPECIAL], ids=["marks are text", "some are tokens"])
@pytest.mark.parametrize("name", sorted(set(DIALECTS) - LIKE_OTHERS))
def test_every_dialect(name, special):
    tokenizer = tokenizer_for(name, special)
    dialect = DIALECTS[name]._replace(thoughts=None)
    marks = MarkTokens(tokenizer, dialect)
    functions = names_of(name)
    schemas = {each["name"]: each["parameters"] for each in functions}
    names, sizes = set(), set()
    for seed in range(10):
        parallel = bool(seed % 2)
        grammar = calls_grammar(marks, functions, parallel=parallel, thinks=False)
        tokens = drawn(grammar, tokenizer, seed, closer=CLOSERS.get(name, ""))
        answer = SpokenAnswer(marks, [], calls=True, schemas=schemas, names=frozenset(schemas), parallel=parallel)
        pieces = [piece for piece in answer.extend(tokens, ended=True) if piece.channel != "reasoning"]
        assert pieces, tokenizer.decode(tokens, skip_special_tokens=False)
        between = {"content"} if parallel else set()  # new lines between calls
        assert {piece.channel for piece in pieces} <= {"call", "arguments"} | between, pieces
        calls = [piece.text for piece in pieces if piece.channel == "call"]
        assert calls
        assert len(calls) == 1 or (parallel and name != "harmony")
        names.update(calls)
        for text in (text for channel, text in pieces if channel == "arguments"):
            found = json.loads(text)
            sizes.add(len(found))
            assert set(found) <= {"place", "n"}
            assert found.get("place", "here") in PLACE["enum"]
            assert found.get("n", 0) in range(10)
    assert names == {*schemas}
    assert {0, 1} <= sizes


TYPED = {
    "type": "object", "required": ["text", "list", "o"], "additionalProperties": False,
    "$defs": {"tree": {"type": "object", "properties": {"down": {"$ref": "#/$defs/tree"}}, "required": []}},
    "properties": {
        "first": {"type": ["boolean", "null"]}, "text": {"type": "string"}, "last": {"const": "}"},
        "list": {"type": "array", "items": {"enum": ["a b", 7, None]}, "minItems": 2, "maxItems": 3},
        "any": {}, "o": {"type": "object", "properties": {"deep key": {"type": "number"}}, "required": ["deep key"]},
        "either": {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "null"}]}, "tree": {"$ref": "#/$defs/tree"},
    },
}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "gemma4", "functiongemma", "kimi_k3", "minimax_m3"])
def test_values_are_of_their_types(name):
    tokenizer, seen = tokenizer_of(()), set()
    marks = MarkTokens(tokenizer, DIALECTS[name]._replace(thoughts=None))
    schema = {**TYPED, "properties": {**TYPED["properties"]}}
    if name == "minimax_m3":  # where each text has an end of its own, and what is drawn has that of one
        del schema["properties"]["any"]
    for seed in range(8):
        function = {"name": "f", "parameters": schema, "strict": True}
        grammar = calls_grammar(marks, [function], parallel=False, thinks=False)
        tokens = drawn(grammar, tokenizer, seed, 600, CLOSERS[name])
        answer = SpokenAnswer(marks, [], calls=True, schemas={"f": TYPED}, parallel=False)
        pieces = answer.extend(tokens, ended=True)
        if not answer.has_calls:  # a text without end
            continue
        found = json.loads("".join(piece.text for piece in pieces if piece.channel == "arguments"))
        seen |= set(found)
        assert {"text", "list", "o"} <= set(found) <= set(TYPED["properties"])
        assert isinstance(found["text"], str)
        assert found.get("first") in (True, False, None)
        assert found.get("last", "}") == "}"
        assert len(found["list"]) in (2, 3)
        assert all(each in ("a b", 7, None) for each in found["list"])
        assert isinstance(found["o"]["deep key"], (int, float))
        assert found.get("either") is None or found["either"] >= 5
        tree = found.get("tree", {})
        while tree:
            tree = tree.get("down", {})
            assert isinstance(tree, dict)
    assert len(seen) > 4 - (name == "minimax_m3")


HELD = {
    "type": "object", "additionalProperties": {"type": "integer"},
    "required": ["color", "filter", "first", "mixed", "short", "code", "map", "either"],
    "$defs": {
        "Color/s": {"type": "string", "enum": ["red", "1", "true", "null", "a\"b"]},
        "Name": {"type": "string", "maxLength": 3},
        "Filter": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
                   "additionalProperties": False},
    },
    "properties": {
        "color": {"anyOf": [{"$ref": "#/$defs/Color~1s"}, {"type": "null"}]},
        "filter": {"allOf": [{"$ref": "#/$defs/Filter"}], "description": "x"},
        "first": {"$ref": "#/properties/either/anyOf/0"}, "mixed": {"enum": ["a b", 7, None, True, "}"]},
        "short": {"allOf": [{"$ref": "#/$defs/Name"}, {"minLength": 2}]},
        "code": {"type": ["string", "null"], "pattern": r"^[a-c]{2}/?\d$"},
        "map": {"type": "object", "additionalProperties": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/Filter"}]}},
        "either": {
            "anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Filter"}, "maxItems": 2}, {"type": "integer"}],
        },
    },
}


@pytest.mark.parametrize("name", [
    "qwen3_coder", "glm", "minimax", "deepseek_v3_2", "kimi_k3", "minicpm5", "minimax_m3", "gemma4", "functiongemma",
])
def test_strict_calls_hold_their_schema(name):
    """References through lists, parts of several, limits of texts, members that are not named: all by jsonschema."""
    tokenizer, count = tokenizer_for(name, ()), 0
    marks = MarkTokens(tokenizer, DIALECTS[name]._replace(thoughts=None))
    function = {"name": "f", "parameters": HELD, "strict": True}
    grammar = calls_grammar(marks, [function], parallel=False, thinks=False)
    for seed in range(6):
        tokens = drawn(grammar, tokenizer, seed, 1000)
        answer = SpokenAnswer(marks, [], calls=True, schemas={"f": HELD}, parallel=False)
        pieces = answer.extend(tokens, ended=True)
        if answer.has_calls:
            count += 1
            found = json.loads("".join(piece.text for piece in pieces if piece.channel == "arguments"))
            jsonschema.validate(found, HELD)
    assert count > 2


@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4", "minimax_m3"])
def test_numbers_are_those_of_64_bits(name):
    tokenizer = tokenizer_for(name, ())
    marks = MarkTokens(tokenizer, DIALECTS[name]._replace(thoughts=None))
    schema = {"type": "object", "properties": {"n": {"type": ["number", "null"]}}, "required": ["n"]}
    grammar = calls_grammar(marks, [{"name": "f", "parameters": schema}], parallel=False, thinks=False)
    words = {"qwen3_coder": "<tool_call>\n<function=f>\n<parameter=n>\n~\n</parameter>\n</function>\n</tool_call>",
             "gemma4": "<|tool_call>call:f{n:~}<tool_call|>",
             "minimax_m3": '@<tool_call>\n@<invoke name="f">@<n>~@</n>@</invoke>\n@</tool_call>'}[name]
    for number, fits in (("1e99", True), ("-0.5E-9", True), ("null", True), ("7", True), ("1e999", None), ("1e", None)):
        text = words.replace("~", number).replace("@", "]<]minimax[>[")
        assert follows(tokenizer, grammar, text) is fits, number


def test_tags_within_tags():
    """Objects, lists, a schema within itself, and what they may not be."""
    tokenizer = tokenizer_of(("]<]minimax[>[",))
    marks = MarkTokens(tokenizer, DIALECTS["minimax_m3"]._replace(thoughts=None))
    grammar = calls_grammar(marks, [{"name": "f", "parameters": TYPED, "strict": True}], parallel=False, thinks=False)
    good = (
        '<tool_call>\n~<invoke name="f">~<first>null~</first>~<text>a~</text>~<list>~<item>a b~</item>~<item>7~</item>'
        "~</list>~<o>~<deep key>1.5~</deep key>~</o>~<either>8~</either>~<tree>~<down>~<down>~</down>~</down>~</tree>"
        "~</invoke>\n~</tool_call>"
    )
    wanted = {
        "first": None, "text": "a", "list": ["a b", 7], "o": {"deep key": 1.5}, "either": 8,
        "tree": {"down": {"down": {}}},
    }
    said = ("~" + good).replace("~", "]<]minimax[>[")
    assert follows(tokenizer, grammar, said)
    pieces = SpokenAnswer(marks, [], calls=True, schemas={"f": TYPED}).extend(tokenizer.encode(said).ids, ended=True)
    assert json.loads("".join(piece.text for piece in pieces if piece.channel == "arguments")) == wanted
    for old, new in (("a b", "ab"), ("8", "4"), ("down", "up"), ("~<item>7~</item>", ""), ("1.5", "x"), ("deep ", "")):
        other = ("~" + good.replace(old, new)).replace("~", "]<]minimax[>[")
        assert follows(tokenizer, grammar, other) is None, other
    refused("minimax_m3", "keys that this network can write", {"properties": {"a>": {}}})
    refused("minimax_m3", "a schema without", {"properties": {"a": {"const": "]<]minimax[>[</a>"}}})
    refused("minimax_m3", "a schema that this network's calls can follow, got 'pattern'",
            {"properties": {"a": {"type": "string", "pattern": "(?=x)"}}}, strict=True)


@pytest.mark.parametrize("special", [(), SPECIAL], ids=["marks are text", "some are tokens"])
def test_thoughts_come_first(special):
    tokenizer = tokenizer_of(special)
    marks = MarkTokens(tokenizer, DIALECTS["hermes"])
    opened = tokenizer.encode("<think>").ids
    for prompt, thinks in (([], False), (opened, True)):
        grammar = calls_grammar(marks, FUNCTIONS, parallel=False, thinks=thinks)
        found = {"reasoning": 0, "call": 0}
        for text in ("<think>", "") if not thinks else ("",):
            call = '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'
            said = f"{text}so </th{'</think>'}\n{call}" if text or thinks else call
            tokens = tokenizer.encode(said).ids
            matcher = compiled(tokenizer, grammar).fresh([END])
            for token in tokens:
                matcher.advance(token)
            assert matcher.is_complete
            for channel, _ in SpokenAnswer(marks, prompt, calls=True).extend(tokens, ended=True):
                found[channel] = found.get(channel, 0) + 1
        assert found["reasoning"] > 0
        assert found["call"] > 0
        assert "content" not in found


def test_answers_of_glm_begin_with_a_new_line():
    marks = MarkTokens(tokenizer_of(()), DIALECTS["glm"])
    grammar = calls_grammar(marks, STRICT, parallel=False, thinks=False)
    for begin in ("", "\n", "<think>a</think>", "\n<think>a</think>\n"):
        assert follows(marks.tokenizer, grammar, begin + CALLS["glm"]), begin


@pytest.mark.parametrize("special", [(), ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")])
def test_thoughts_of_messages_come_first(special):
    tokenizer = tokenizer_of(special)
    marks = MarkTokens(tokenizer, DIALECTS["harmony"])
    said = (
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary to=functions.look "
        '<|constrain|>json<|message|>{"place": "here"}'
    )
    tokens = tokenizer.encode(said).ids
    grammar = calls_grammar(marks, [FUNCTIONS[0]], parallel=True, thinks=False)
    matcher = compiled(tokenizer, grammar).fresh([END])
    for token in tokens:
        matcher.advance(token)
    assert matcher.is_complete
    pieces = SpokenAnswer(marks, [], calls=True).extend(tokens, ended=True)
    assert pieces == [("reasoning", "so"), ("call", "look"), ("arguments", '{"place": "here"}')]


@pytest.mark.parametrize(
    ("name", "thinks", "may_think", "good", "bad"),
    [
        ("hermes", False, True, ["{}", "<think>a{</think>{}", "<think></think>\n\n{}"], ["a", "a</think>{}"]),
        ("hermes", True, True, ["a</think>\n{}", "</think>{}"], ["{}{}"]),
        ("hermes", False, False, ["{}"], ["<think>a</think>{}"]),
        ("mistral", False, True, ["{}", "[THINK]a[/THINK]{}"], ["[THINK]{}"]),
        ("gemma4", False, True, ["{}", "<|channel>thought\na\n<channel|>{}"], ["<|channel>a<channel|>{}"]),
        ("harmony", False, True, [
            "<|channel|>final<|message|>{}", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final"
            "<|message|>{}"], ["{}", "<|channel|>commentary"]),
        ("none", False, True, ["{}"], ["<think>"]),
    ],
)
@pytest.mark.parametrize("special", [(), ("</think>", "[THINK]", "<channel|>", "<|message|>")])
def test_an_answer_in_json_behind_thoughts(name, thinks, may_think, good, bad, special):
    tokenizer = tokenizer_of(special)
    marks = MarkTokens(tokenizer, DIALECTS[name])
    lead = lead_of_answers(marks, thinks=thinks, may_think=may_think)
    start = compiled(tokenizer, replace(json_object(), lead=lead))
    for text in good:
        tokens = tokenizer.encode(text).ids
        matcher = start.fresh([END])
        for token in tokens:
            matcher.advance(token)
        assert matcher.is_complete, text
        opened = tokenizer.encode("<think>").ids if thinks else []
        pieces = SpokenAnswer(marks, opened).extend(tokens, ended=True)
        assert "".join(piece.text for piece in pieces if piece.channel == "content") == "{}", text
    for text in bad:
        tokens = tokenizer.encode(text).ids
        matcher = start.fresh([END])
        if matcher.holds(tokens) == len(tokens):
            for token in tokens:
                matcher.advance(token)
            assert not matcher.is_complete, text


CALLS = {  # in the words of each dialect
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=place>\nhere\n</parameter>\n</function>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="look">\n<parameter name="place">here</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
    '{"place": "here"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    '{"place": "here"}<|tool_call_end|><|tool_calls_section_end|>',
    "glm": "<tool_call>look\n<arg_key>place</arg_key>\n<arg_value>here</arg_value>\n</tool_call>",
    "hy3": "<tool_calls:opensource>\n<tool_call:opensource>look<tool_sep:opensource>\n<arg_key:opensource>place"
    "</arg_key:opensource>\n<arg_value:opensource>here</arg_value:opensource>\n</tool_call:opensource>\n"
    "</tool_calls:opensource>",
    "gemma4": '<|tool_call>call:look{place:<|"|>here<|"|>}<tool_call|>',
    "functiongemma": "<start_function_call>call:look{place:<escape>here<escape>}<end_function_call>",
    "mistral": '[TOOL_CALLS][{"name": "look", "arguments": {"place": "here"}}]',
    "granite": '<|tool_call|>[{"name": "look", "arguments": {"place": "here"}}]',
    "lfm2": '<|tool_call_start|>\n{"name": "look", "arguments": {"place": "here"}}\n<|tool_call_end|>',
    "deepseek_v3_2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="place" '
    'string="true">here</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|><|open|>argument key="place" type="string"'
    "<|sep|>here<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="look">]<]minimax[>[<place>here'
    "]<]minimax[>[</place>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "solar_open": "<|tool_calls|><|tool_call:begin|>a-1<|tool_call:name|>look<|tool_call:args|>"
    '{"place": "here"}<|tool_call:end|><|calls|>',
    "minicpm5": '<function name="look"><param name="place">here</param></function>',
    "gigachat3": '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "look", "arguments": {"place": "here"}}',
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "look", "parameters": {"place": "here"}}]'
    "<|END_ACTION|>",
    "apertus": '<|tools_prefix|>[{"look": {"place": "here"}}]<|tools_suffix|>',
    "functionary": '<function=look>{"place": "here"}</function>',
    "llama3": '{"name": "look", "parameters": {"place": "here"}}',
    "llama4": '{"name": "look", "parameters": {"place": "here"}}',
    "harmony": '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"place": "here"}',
}
LEADING = ("llama3", "llama4")  # an answer that begins with a call has nothing else
STRICT = [FUNCTIONS[0] | {"strict": True}]
LISTED = '[{"name": "look", "arguments": {"place": "here"}}]'
LIKE = {  # calls of the other dialects
    "ernie": CALLS["hermes"], "nemotron": f"<TOOLCALL>{LISTED}</TOOLCALL>",
    "apriel": f"<tool_calls>{LISTED}</tool_calls>",
    "seed_oss": CALLS["qwen3_coder"].replace("tool_call", "seed:tool_call").replace("\nhere\n", "here"),
    "deepseek_v4": CALLS["deepseek_v3_2"].replace("function_calls", "tool_calls"),
    "gigachat3_1": '<|function_call|>{"name": "look", "arguments": {"place": "here"}}',
}
# The tokens of marks, where these are no tokens by themselves.
PARTS = {
    "kimi_k3": ("<|open|>", "<|sep|>", "<|close|>"), "deepseek_v3_2": ("｜DSML｜",), "deepseek_v4": ("｜DSML｜",),
    "minimax_m3": ("]<]minimax[>[", "<tool_call>", "</tool_call>", "<mm:think>", "</mm:think>"),
    "gigachat3": ("<|message_sep|>", "<|role_sep|>"),
}


def marked_tokenizer(name, kind):
    """A tokenizer of bytes; the marks of a dialect are no tokens, added ones, or special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab, merges = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []
    for piece in ("<|START_", "<seed:"):  # llguidance looks back over four tokens for the beginning of another one
        for end in range(2, len(piece) + 1):
            merges.append((piece[: end - 1], piece[end - 1]))
            vocab.setdefault(piece[:end], len(vocab))
    made = Tokenizer(models.BPE(vocab, [*dict.fromkeys(merges)]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    tokens = () if kind == "text" else PARTS.get(name, DIALECTS[name].marks)
    made.add_tokens([AddedToken(token, special=kind == "special") for token in tokens])
    return made


def written(tokenizer, grammar, text):
    """The ids of a text, each of which the grammar's mask has, and behind which it may end."""
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id("<end>")
    matcher = GrammarCompiler(lambda: tokenizer, size, [end]).compile(grammar).fresh([end])
    tokens = tokenizer.encode(text).ids
    for number, token in enumerate(tokens):
        assert np.isfinite(matcher.masked(np.zeros(size, np.float32)))[token], tokenizer.decode(tokens[:number])
        matcher.advance(token)
    assert matcher.is_complete or np.isfinite(matcher.masked(np.zeros(size, np.float32)))[end], text
    return tokens


@pytest.mark.parametrize("kind", ["text", "added", "special"])
@pytest.mark.parametrize("name", sorted(set(DIALECTS) - {"none"}))
def test_marks_of_every_kind(name, kind):
    """A call that is required, one of a strict function, an answer in a form, and one of both; behind a thought too."""
    tokenizer, dialect, call = marked_tokenizer(name, kind), DIALECTS[name], (CALLS | LIKE)[name]
    marks, begin = MarkTokens(tokenizer, dialect), "<|channel|>final<|message|>" if name == "harmony" else ""
    thoughts = ["", "<|channel|>analysis<|message|>so<|end|><|start|>assistant"] if name == "harmony" else [""]
    if dialect.thoughts is not None:
        thoughts.append(("thought\nso" if dialect.titled else "so").join(dialect.thoughts))
    required, free = (calls_grammar(marks, STRICT, parallel=True, thinks=False, free=free) for free in (False, True))
    form = replace(json_object(), lead=lead_of_answers(marks, thinks=False, may_think=True))
    either = calls_grammar(marks, STRICT, parallel=True, thinks=False, form=json_object())
    called, formed = [("call", "look"), ("arguments", '{"place": "here"}')], [("content", '{"a": "b"}')]
    for thought in thoughts:
        for grammar, text, want in (
            (required, call, called), (free, call, called), (either, call, called),
            *((each, begin + formed[0][1], formed) for each in (form, either)),
        ):
            tokens = written(tokenizer, grammar, thought + text)
            schemas = {"look": STRICT[0]["parameters"]}
            answer = SpokenAnswer(marks, [], calls=True, names=frozenset(schemas), schemas=schemas)
            found = answer.extend(tokens, ended=True)
            assert found == [("reasoning", "so")] * bool(thought) + want, (thought, text)


def test_a_form_that_begins_as_a_call_does():
    """Llama's calls are objects without a mark; the arguments may refer to their schema, wherever it stands."""
    tokenizer = marked_tokenizer("llama3", "text")
    schema = {
        "type": "object", "properties": {"n": {"type": "integer"}, "more": {"$ref": "#"}},
        "required": ["n"], "additionalProperties": False,
    }
    form = json_schema({"type": "object", "properties": {"name": {"type": "string"}}, "additionalProperties": False})
    function = {"name": "f", "parameters": schema, "strict": True}
    marks = MarkTokens(tokenizer, DIALECTS["llama3"])
    grammar = calls_grammar(marks, [function], parallel=False, thinks=False, form=form)
    for text in (
        '{"name": "f", "parameters": {"n": 1, "more": {"n": 2, "more": {"n": 3}}}}', '{"name": "Bob"}',
        '{"name": "f"}', "{}",
    ):
        written(tokenizer, grammar, text)
    for more in ('g", "parameters"', 'f", "parameters": {"more"', 'f", "parameters": {"n": "'):
        with pytest.raises(AssertionError):
            written(tokenizer, grammar, '{"name": "' + more)


def test_what_constrains_nothing_takes_no_room():
    marks, long = MarkTokens(marked_tokenizer("hermes", "text"), DIALECTS["hermes"]), "x" * 300_000
    named = {"description": {"const": {"title": "kept"}}, "title": {"enum": [{"default": 1}]}}
    schema = {"type": "object", "properties": named, "required": [*named], "additionalProperties": False}
    function = {"name": "f", "parameters": schema | {"description": long[:200_000]}, "strict": True}
    grammar = calls_grammar(marks, [function], parallel=False, thinks=False)
    assert len(grammar.text) < 1000
    arguments = '{"description": {"title": "kept"}, "title": {"default": 1}}'
    call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    written(marks.tokenizer, grammar, call)


def follows(tokenizer, grammar, text):
    """Whether a grammar takes a text token by token, and whether it may end there."""
    matcher = compiled(tokenizer, grammar).fresh([END])
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        if not np.isfinite(matcher.masked(np.zeros(256, np.float32))[token]):
            return None
        matcher.advance(token)
    return bool(np.isfinite(matcher.masked(np.zeros(256, np.float32))[END]) or matcher.is_complete)


@pytest.mark.parametrize("special", [(), SPECIAL], ids=["marks are text", "some are tokens"])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_texts_are_free_until_a_call_begins(name, special):
    tokenizer = tokenizer_for(name, special)
    marks = MarkTokens(tokenizer, DIALECTS[name]._replace(thoughts=None))
    grammar = calls_grammar(marks, STRICT, parallel=True, thinks=False, free=True)
    call = CALLS[name]
    said = "<|channel|>final<|message|>" if name == "harmony" else ""
    before = "<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant" if name == "harmony" else "Hm. "
    before = "" if name in LEADING else before
    for text in ("", "Hello < [1, 2] {}", "\n<tool", '{"nam', "[a", '{"a": 1}'):
        assert follows(tokenizer, grammar, said + text), text
    assert follows(tokenizer, grammar, before + call)
    assert follows(tokenizer, grammar, before + call.partition("here")[0]) is False, "a call ends as one"
    for other in (call.replace("here", "hers"), call.replace("look", "book"), call.replace("place", "plate")):
        assert follows(tokenizer, grammar, before + other) is None, other
    one = calls_grammar(marks, STRICT, parallel=False, thinks=False, free=True)
    assert follows(tokenizer, one, before + call)
    if name == "llama4":
        assert follows(tokenizer, one, f"<|python_start|>{call}<|python_end|>")
    if name not in ("harmony", *LEADING):
        assert follows(tokenizer, grammar, f"{call} and {call}.") or name in ("mistral", "granite")
        assert follows(tokenizer, one, f"{call} and {call}.") is None


def test_thoughts_before_free_texts():
    marks = MarkTokens(tokenizer_of(()), DIALECTS["hermes"])
    call = CALLS["hermes"]
    for thinks, begin in ((True, ""), (False, "<think>")):
        grammar = calls_grammar(marks, STRICT, parallel=True, thinks=thinks, free=True)
        thought = f"{begin}a <tool_> b</think>\n\n"
        assert follows(marks.tokenizer, grammar, f"{thought}Hm. {call}")
        assert follows(marks.tokenizer, grammar, thought + call.replace("here", "hers")) is None
        for each in (grammar, calls_grammar(marks, STRICT, parallel=True, thinks=thinks)):
            assert follows(marks.tokenizer, each, f"{begin}a {call}") is None, "a call in a thought would count"


def refused(dialect, message, schema=None, **function):
    marks = MarkTokens(tokenizer_of(()), DIALECTS[dialect])
    with pytest.raises(GrammarError, match=f"grammar: expected {message}"):
        calls_grammar(marks, [{"name": "f", "parameters": schema, **function}], parallel=True, thinks=False)


def test_what_cannot_be_required():
    marks = MarkTokens(spelling(), DIALECTS["none"])
    assert calls_grammar(marks, FUNCTIONS, parallel=True, thinks=False) is None
    large = {"properties": {f"p{i}": True for i in range(5000)}}
    refused("hermes", "a JSON schema of at most 4096 members", large)
    for name in ("qwen3_coder", "glm", "gemma4"):
        for schema in (
            {"properties": {"a": {"type": "string", "pattern": "(?=x)"}}}, {"patternProperties": {}},
            {"properties": {"a": {"type": "string", "format": "date"}}},
        ):
            refused(name, "a schema that this network's calls can follow, got", schema, strict=True)
        many = {f"p{i}": {"$ref": "#/$defs/e"} for i in range(4000)}
        large = {"e": {"enum": [f"v{i}" for i in range(5000)]}}
        refused(name, "rules of at most 65536 characters, got more", {"properties": many, "$defs": large})
        refused(name, "a schema with all properties that it requires", {"properties": {"a": {}}, "required": ["b"]})
        refused(name, "names that this network can write, got", name="a\nb")
    refused("qwen3_coder", "a schema without </parameter>", {"properties": {"a": {"enum": ["</parameter>"]}}})
    refused("qwen3_coder", "keys that this network can write", {"properties": {"a>": {}}})
    refused("glm", "keys that this network can write", {"properties": {"a<": {}}})
    refused("gemma4", r'a schema without <\|"\|>', {"properties": {"a": {"const": '<|"|>'}}})
    for schema in ({"enum": []}, {"allOf": [{"const": 1}, {"type": "string"}]}):
        refused("gemma4", "a schema of some values, got one of none", {"properties": {"a": schema}}, strict=True)
    refused("gemma4", "texts and numbers in enum", {"properties": {"a": {"enum": [[1]]}}})
    refused("harmony", "names that this network can write", name="a b")


def test_arguments_of_any_object():
    """Functions without properties take any."""
    tokenizer = tokenizer_of(())
    for name, said in (
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=k>\nv\n</parameter>\n</function>\n</tool_call>"),
        ("glm", "<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>"),
        ("gemma4", '<|tool_call>call:f{k:<|"|>v<|"|>,l:[1,{a:true}]}<tool_call|>'),
    ):
        marks = MarkTokens(tokenizer, DIALECTS[name]._replace(thoughts=None))
        grammar = calls_grammar(marks, [{"name": "f"}], parallel=False, thinks=False)
        tokens = tokenizer.encode(said).ids
        assert compiled(tokenizer, grammar).fresh([END]).holds(tokens) == len(tokens)


TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
SUM = 'start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]/'


@pytest.mark.parametrize("form", [("regex", r"[0-9](\+[0-9])*/?"), ("lark", SUM)], ids=["regex", "lark"])
@pytest.mark.parametrize("name", ["hermes", "harmony", "qwen3_coder", "gemma4"])
def test_a_text_of_a_form(name, form):
    tokenizer = tokenizer_of(())
    marks = MarkTokens(tokenizer, DIALECTS[name]._replace(thoughts=None))
    function = {"name": "sum", "parameters": TEXT, "format": form}
    if form[0] == "lark" and name in ("hermes", "harmony"):
        with pytest.raises(GrammarError, match="grammar: expected a regex or text of 'sum' in JSON, got a lark"):
            calls_grammar(marks, [function], parallel=False, thinks=False)
        return
    grammar = calls_grammar(marks, [function], parallel=False, thinks=False)
    for seed in range(3):
        tokens = drawn(grammar, tokenizer, seed, closer=CLOSERS.get(name, ""))
        answer = SpokenAnswer(marks, [], calls=True, parallel=False, customs=frozenset(["sum"]))
        pieces = [piece for piece in answer.extend(tokens, ended=True) if piece.channel != "reasoning"]
        assert [piece.channel for piece in pieces] == ["call", "arguments"]
        assert re.fullmatch(r"[0-9](\+[0-9])*/?", pieces[1].text), pieces


def test_texts_of_custom_tools_are_the_same_in_any_pieces():
    tokenizer = tokenizer_of(())
    marks = MarkTokens(tokenizer, DIALECTS["hermes"])
    said = (
        '<tool_call>{"name": "sum", "arguments": {"input": "1\\n2"}}</tool_call>'
        '<tool_call>{"name": "f", "arguments": {"input": "x"}}</tool_call>'
        '<tool_call>{"name": "sum", "arguments": {"inp'
    )
    tokens, found = tokenizer.encode(said).ids, []
    for size in (1, 7, len(tokens)):
        answer = SpokenAnswer(marks, [], calls=True, customs=frozenset(["sum"]))
        cuts = [tokens[at : at + size] for at in range(0, len(tokens), size)]
        pieces = [piece for cut in cuts for piece in answer.extend(cut, ended=False)] + answer.extend([], ended=True)
        texts = [""]
        for channel, text in pieces:
            texts = [*texts, ""] if channel == "call" else [*texts[:-1], texts[-1] + text]
        found.append((texts, [text for channel, text in pieces if channel == "call"]))
    assert found == [(["", "1\n2", '{"input": "x"}', '{"inp'], ["sum", "f", "sum"])] * 3
