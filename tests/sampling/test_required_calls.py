"""Grammars of answers that must call: whatever the network draws, the dialect reads calls of the functions."""

import json

import numpy as np
import pytest

pytest.importorskip("llguidance")
pytest.importorskip("tokenizers")
from spelled_networks import END, spelling

from kvcache.errors import GrammarError
from kvcache.grammar.compiler import GrammarCompiler
from kvcache.sampling.dialects.dialect_table import DIALECTS
from kvcache.sampling.dialects.required_calls import calls_grammar
from kvcache.sampling.dialects.spoken_answer import MarkTokens, SpokenAnswer

pytestmark = [pytest.mark.no_level, pytest.mark.one_build]

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
SPECIAL = ("<tool_call>", "</think>", "<|tool_call|>")


def tokenizer_of(special):
    """A tokenizer as of `spelling`, with some marks for its unused tokens."""
    content = json.loads(spelling().to_str())
    unused = [token for token in content["added_tokens"] if "unused" in token["content"]]
    for token, mark in zip(unused, special, strict=False):
        content["model"]["vocab"][mark] = content["model"]["vocab"].pop(token["content"])
        token["content"] = mark
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(content))


def drawn(grammar, tokenizer, seed, most=400):
    """Random tokens of a grammar; those that close something are likely."""
    matcher = GrammarCompiler(lambda: tokenizer, 256, [END]).compile(grammar).fresh([END])
    rng, tokens = np.random.default_rng(seed), []
    likely = [tokenizer.token_to_id(each) for each in ('"', "}", ">", "<", "t", "/") if tokenizer.token_to_id(each)]
    for _ in range(most):
        logits = rng.gumbel(size=256).astype(np.float32)
        logits[likely] += 3
        logits[END] += 6
        token = int(np.argmax(matcher.masked(logits)))
        if token == END:
            break
        tokens.append(token)
        matcher.advance(token)
        if matcher.is_complete:
            break
    return tokens


@pytest.mark.parametrize("special", [(), SPECIAL], ids=["marks are text", "some are tokens"])
@pytest.mark.parametrize("name", ["hermes", "granite", "mistral", "lfm2", "llama3"])
def test_every_dialect_that_writes_json(name, special):
    tokenizer = tokenizer_of(special)
    dialect = DIALECTS[name]._replace(thoughts=None)
    marks = MarkTokens(tokenizer, dialect)
    schemas = {each["name"]: each["parameters"] for each in FUNCTIONS}
    names = set()
    for seed in range(12):
        parallel = bool(seed % 2)
        grammar = calls_grammar(marks, FUNCTIONS, parallel=parallel, thinks=False)
        tokens = drawn(grammar, tokenizer, seed)
        answer = SpokenAnswer(marks, [], calls=True, schemas=schemas, names=frozenset(schemas), parallel=parallel)
        pieces = answer.extend(tokens, ended=True)
        assert pieces, tokenizer.decode(tokens, skip_special_tokens=False)
        between = {"content"} if parallel else set()  # new lines between calls
        assert {piece.channel for piece in pieces} <= {"call", "arguments"} | between, pieces
        calls = [piece.text for piece in pieces if piece.channel == "call"]
        assert calls
        assert len(calls) == 1 or parallel
        names.update(calls)
        for channel, text in pieces:
            if channel == "arguments":
                assert set(json.loads(text)) <= {"place", "n"}
    assert names == {*schemas}


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
            matcher = GrammarCompiler(lambda: tokenizer, 256, [END]).compile(grammar).fresh([END])
            for token in tokens:
                matcher.advance(token)
            assert matcher.is_complete
            for channel, _ in SpokenAnswer(marks, prompt, calls=True).extend(tokens, ended=True):
                found[channel] = found.get(channel, 0) + 1
        assert found["reasoning"] > 0
        assert found["call"] > 0
        assert "content" not in found


def test_what_cannot_be_required():
    marks = {name: MarkTokens(spelling(), dialect) for name, dialect in DIALECTS.items()}
    for name in ("none", "qwen3_coder", "gemma4", "functiongemma", "harmony"):
        assert calls_grammar(marks[name], FUNCTIONS, parallel=True, thinks=False) is None
    large = {"properties": {f"p{i}": True for i in range(5000)}}
    with pytest.raises(GrammarError, match="grammar: expected a JSON schema of at most 4096 members"):
        calls_grammar(marks["hermes"], [{"name": "f", "parameters": large}], parallel=True, thinks=False)
