"""Compilations: errors by name, and what stays."""

import json
import sys
import time

import numpy as np
import pytest

from kvcache.errors import GrammarError
from kvcache.grammar import json_schema, lark, regex

pytest.importorskip("llguidance")
pytest.importorskip("tokenizers")
from spelled_networks import END, spelling
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from kvcache.grammar.compiler import GrammarCompiler

pytestmark = pytest.mark.one_build

TOKENIZER = spelling()
NAMES = {"type": "object", "propertyNames": {"pattern": "a"}}


def compiler(tokenizer=TOKENIZER, size=256, ends=(END,)):
    return GrammarCompiler(lambda: tokenizer, size, ends)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (json_schema(NAMES), "a json_schema that can be compiled, got .*propertyNames"),
        (json_schema({"type": "wat"}), "a json_schema that can be compiled, got .*Invalid type: wat"),
        (json_schema({"$ref": "http://127.0.0.1/x"}), "a json_schema that can be compiled, got .*not present"),
        (json_schema({"type": "string", "pattern": "(a"}), "a json_schema that can be compiled, got .*regex parse"),
        (json_schema({}, whitespace="("), "a json_schema that can be compiled, got"),
        (json_schema('{"anyOf":[' * 120 + "{}" + "]}" * 120), "a json_schema that can be compiled, got"),
        (regex("(a"), "a regex that can be compiled, got .*invalid regex"),
        (regex("(" * 20000 + "a" + ")" * 20000), "a regex that can be compiled, got"),
        (lark("start: FOO"), "a lark that can be compiled, got .*unknown name"),
        (lark("start: " + "(" * 20000 + '"a"' + ")" * 20000), "a lark that can be compiled, got .*nested"),
        (lark("start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(60)) + '\nR60: "a"'),
         "a lark that can be compiled, got .*too big"),
    ],
)
def test_grammars_that_are_none(grammar, message):
    with pytest.raises(GrammarError, match=f"grammar: expected {message}"):
        compiler().compile(grammar)


def test_keywords_that_are_not_supported_constrain_nothing_where_they_are_not_strict():
    assert compiler().compile(json_schema(NAMES, strict=False)).fresh([END]).holds([TOKENIZER.token_to_id("{")]) == 1


def test_the_longest_chains_within_the_bounds():
    """A schema of as many references, and a grammar of as many rules, as may be leave the stack of a thread whole."""
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(254)} | {"d254": {"type": "string"}}
    nested = {"type": "string"}
    for _ in range(18):
        nested = {"allOf": [{"oneOf": [{"type": "object", "properties": {"a": nested}}]}, {"title": "x"}]}
    text = json.dumps(nested)
    deep = {
        f"d{i}": json.loads(text.replace('"string"', f'"string", "$ref": "#/$defs/d{i + 1}"')) for i in range(7)
    }
    deep["d7"] = {"type": "string"}
    rules = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(997)) + '\nr997: "a"'
    for grammar in (
        json_schema({"$defs": links, "$ref": "#/$defs/d0"}), json_schema({"$defs": deep, "$ref": "#/$defs/d0"}),
        lark(rules), lark(rules.replace("r", "R").replace("staRt", "start")),
    ):
        compiler().compile(grammar)


LONG = "lorem ipsum " * 1000


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (json_schema({"const": LONG}), f'"{LONG}"', '"lorem ipsum Lorem'),
        (json_schema({"properties": {"a": {"pattern": "^(a{1000}){1000}$", "type": "string"}}, "required": ["a"]}),
         '{"a": "aaaaaaa', '{"a": "aaab'),
        (regex("(a{1000}){1000}"), "aaaaaaaaa", "aab"), (regex("a{2000}"), "a" * 2000, "aab"),
        (lark('start: A\nA: /(a{1000}){1000}/'), "aaaaaaaaa", "aab"),
    ],
)
def test_texts_that_would_be_forced_for_long_take_no_long_masks(grammar, good, bad):
    """The bound is a tenth of what llguidance takes for the text that is forced."""
    assert not grammar.forces
    start = compiler().compile(grammar)
    matcher, logits = start.fresh([END]), np.zeros(256, np.float32)
    began = time.process_time()
    for token in TOKENIZER.encode(good).ids[:20]:
        assert np.isfinite(matcher.masked(logits))[token]
        matcher.advance(token)
        assert matcher.forced() == []
    assert time.process_time() - began < 1
    for text, whole in ((good, True), (bad, False)):
        tokens = TOKENIZER.encode(text).ids
        assert (start.fresh([END]).holds(tokens) == len(tokens)) == whole


def test_short_texts_are_forced():
    for grammar in (regex("a{900}"), json_schema({"const": LONG[:900]}), regex("(no ){9}(yes ){9}")):
        assert grammar.forces
        assert compiler().compile(grammar).fresh([END]).forced()


def test_tokenizers_that_are_not_read():
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    for made, message in (
        (compiler(size=100), "a tokenizer that llguidance reads, got an error: .*tokens below 100"),
        (compiler(words, 2), "a tokenizer that llguidance reads, got an error"),
        (compiler(ends=(300,)), "a tokenizer that llguidance reads, got an error: .*out of range"),
        (compiler(None), "none, since the engine has no tokenizer, got one"),
        (compiler(ends=()), "a network with end tokens, got one without"),
    ):
        for _ in range(2):
            with pytest.raises(GrammarError, match=f"grammar: expected {message}"):
                made.compile(regex("a"))


@pytest.mark.parametrize("special", [False, True])
def test_an_added_token_that_ends_texts_is_no_text(special):
    """Where a checkpoint leaves out that it is special, it would end the answer within a string."""
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.add_tokens([AddedToken("[END]", special=special), AddedToken("[x]", special=False)])
    end, other, quote = map(tokenizer.token_to_id, ("[END]", "[x]", '"'))
    matcher = compiler(tokenizer, other + 1, [end]).compile(json_schema({"type": "string"})).fresh([end], [quote])
    found = np.isfinite(matcher.masked(np.zeros(other + 1, np.float32)))
    assert (found[end], found[other]) == (False, True)
    matcher.advance(quote)
    assert matcher.is_complete


@pytest.mark.parametrize("text", ["na", "12", "name"])
def test_an_end_token_that_is_text_ends_nothing_within_a_text(text):
    """A checkpoint may end its texts with an entry of its vocabulary that is no added token, and a request with any."""
    end = TOKENIZER.token_to_id(text)
    for ends, stops in (([end], [end]), ([END], [END, end])):
        start = compiler(ends=ends).compile(json_schema({"type": "string", "maxLength": 9}), stops)
        matcher = start.fresh(stops)
        for token in TOKENIZER.encode('"ab').ids:
            matcher.advance(token)
        assert not np.isfinite(matcher.masked(np.zeros(256, np.float32)))[[end, END]].any()
        for token in TOKENIZER.encode('"').ids:
            matcher.advance(token)
        assert matcher.is_complete
        forced = compiler(ends=ends).compile(regex(f"x{text}y*"), stops).fresh(stops)
        for character in f"x{text}":  # other tokens spell it
            mask = np.isfinite(forced.masked(np.zeros(256, np.float32)))
            assert not mask[end]
            assert mask[TOKENIZER.token_to_id(character)]
            forced.advance(TOKENIZER.token_to_id(character))
        assert np.isfinite(forced.masked(np.zeros(256, np.float32)))[end]


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match="grammar needs llguidance: pip install 'kvcache-cpu\\[grammar\\]'"):
        compiler().compile(regex("a"))


def test_the_newest_ones_stay():
    made = compiler()
    first, second = made.compile(regex("a")), made.compile(regex("a0"))
    for i in range(1, 63):
        made.compile(regex(f"a{i}"))
    assert made.compile(regex("a")) is first
    made.compile(regex("a63"))
    assert made.compile(regex("a0")) is not second
    assert made.compile(regex("a")) is first
    assert made.compile(json_schema({}, strict=False)) is not made.compile(json_schema({}))
