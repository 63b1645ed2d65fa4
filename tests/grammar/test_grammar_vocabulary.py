"""Vocabularies as grammars see them: added tokens are texts by their ids, and special tokens are none."""

import json
import re
import sys

import numpy as np
import pytest

from kvcache.errors import GrammarError
from kvcache.grammar import json_object, json_schema, lark, regex

pytest.importorskip("llguidance")
pytest.importorskip("tokenizers")
import llguidance
from spelled_networks import END, spelling
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvcache.grammar.compiler import GrammarCompiler
from kvcache.grammar.grammar_vocabulary import GrammarVocabulary
from kvcache.grammar.mask_batch import MaskBatch
from kvcache.support.byte_letters import byte_letters

pytestmark = pytest.mark.one_build

TAGS = ("<think>", "</think>", "<tool_call>")


def with_tags(special):
    """Bytes, some words of tags, and tags: None: they are no tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: id for id, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    if special is not None:
        made.add_tokens([AddedToken(tag, special=special, lstrip=True, rstrip=True) for tag in TAGS])
    return made


def compiler_of(tokenizer):
    return GrammarCompiler(lambda: tokenizer, tokenizer.get_vocab_size(), [tokenizer.token_to_id("<end>")])


def allowed(matcher):
    size = matcher._vocab_size
    return set(np.flatnonzero(np.isfinite(matcher.masked(np.zeros(size, np.float32)))).tolist())


def walked(tokenizer, grammar, tokens):
    """Whether the masks of a grammar have these tokens, and whether it may end behind them."""
    matcher = compiler_of(tokenizer).compile(grammar).fresh([tokenizer.token_to_id("<end>")])
    for token in tokens:
        if token not in allowed(matcher):
            return None
        matcher.advance(token)
    return matcher.is_complete or tokenizer.token_to_id("<end>") in allowed(matcher)


LITERALS = [  # each with a tag, wherever a grammar may have a text
    (json_schema({"const": "a <think> b"}), '"a <think> b"'), (json_schema({"enum": ["<think>", "x"]}), '"<think>"'),
    (json_schema({"properties": {"<think>": {}}, "required": ["<think>"]}), '{"<think>": 1}'),
    (json_schema({"type": "string"}), '"a <think> b"'), (json_object(), '{"a": "<think>"}'),
    (json_schema({"type": "string", "pattern": "^<think>[a-z]$"}), '"<think>a"'),
    (regex("<think>[a-z]+</think>"), "<think>abc</think>"), (regex(r"(.|\n)*"), "a <think> b"),
    (lark('start: "<think>" /[a-z]+/ "</think>"'), "<think>abc</think>"), (lark("start: /<think>[ab]/"), "<think>a"),
    (lark('start: %json {"const": "<think>"}'), '"<think>"'),
    (lark('start: t\nt[suffix="</think>"]: /.*/'), "a</think>"),
]


@pytest.mark.parametrize("special", [None, False, True], ids=["no tokens", "added", "special"])
def test_a_text_of_a_grammar_with_a_tag(special):
    """By the ids of added tokens, and by the tokens of its characters where a tag is no text, as answers are read."""
    tokenizer = with_tags(special)
    for grammar, text in LITERALS:
        parts = [part for part in re.split("(</?think>)|", text) if part]
        letters = [tokenizer.token_to_id(byte_letters()[ord(letter)]) for letter in text]
        by_id = [tokenizer.token_to_id(part if part in TAGS else byte_letters()[ord(part)]) for part in parts]
        tokens = by_id if special is False else letters
        assert tokenizer.decode(tokens) == text
        assert walked(tokenizer, grammar, tokens), text
        if special:
            assert walked(tokenizer, grammar, by_id) is None, text


def test_forced_texts_are_written_as_the_tokenizer_writes_them():
    for special in (None, False, True):
        tokenizer = with_tags(special)
        start = compiler_of(tokenizer).compile(regex("a <think> b<end>"))
        forced = start.fresh([tokenizer.token_to_id("<end>")]).forced()
        tag = [tokenizer.token_to_id("<think>")] if special is False else tokenizer.encode("<th").ids
        assert forced[2 : 2 + len(tag)] == tag
        assert tokenizer.decode(forced) == "a <think> b<end>", "the name of a special token is a text"


@pytest.mark.parametrize("special", [False, True])
def test_a_grammar_names_tokens(special):
    """By their names and by their numbers, added tokens as special ones; also where drafts are rolled back."""
    tokenizer = with_tags(special)
    think, close = map(tokenizer.token_to_id, TAGS[:2])
    letters = [tokenizer.token_to_id(letter) for letter in "ab<"]
    text = 'start: "a" <think> /(.|\\n)*/ </think> "ab" // <tool_call>\n# <tool_call> "\n'
    by_number = text.replace("<think>", f"<[{think}]>").replace("</think>", f"<[{close}-{close}]>")
    for grammar in (lark(text), lark(by_number)):
        start = compiler_of(tokenizer).compile(grammar)
        said = [letters[0], think, letters[1], letters[2], close, *letters[:2]]
        assert walked(tokenizer, grammar, said)
        assert walked(tokenizer, grammar, [letters[0], letters[2]]) is None, "no text"
        plain = start.fresh([])
        wanted = []
        for token in said:
            wanted.append(allowed(plain))
            plain.advance(token)
        matcher, other = start.fresh([]), start.fresh([])
        MaskBatch().prepare([(matcher, said[:4]), (other, said[:1])])
        for token, want in zip(said, wanted, strict=True):
            assert allowed(matcher) == want
            matcher.advance(token)
        assert matcher.is_complete


def test_names_within_texts_and_patterns_are_none():
    vocabulary = GrammarVocabulary(llguidance, with_tags(False), 300, [256])
    some = ('"<think>"', "/<think>/", r'"\"<think>"', r"/\/<think>/", "# <think>", "// <think>", '"<think>', "/<think>")
    for text in some:
        assert vocabulary.with_ids(text) == (text, False)
    assert vocabulary.with_ids('"a"<think>/b/ </think>') == ('"a"<[257]>/b/ <[258]>', True)
    others = "<end> <[256]> <other> <[400]> <[^256]>"
    assert vocabulary.with_ids(others) == (others, False)
    assert vocabulary.with_ids("<[5]>")[1]
    for hostile in ('"\\' * 30_000, "/\\" * 30_000, "<" * 60_000, "<a" * 30_000, "#" * 60_000, '"' * 60_001):
        assert vocabulary.with_ids(hostile) == (hostile, False)


def word_pieces(**more):
    """A vocabulary with bytes as a last resort, as of SentencePiece."""
    names = ["<unk>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "b", "▁▁"]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model = models.BPE({name: id for id, name in enumerate(names)}, [("▁", "a"), ("▁", "▁")], byte_fallback=True,
                       unk_token="<unk>")
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(["<unk>", "<end>"])
    made.add_tokens([AddedToken(each, special=False, normalized=False) for each in ("<b>", "[c]")])
    return made


@pytest.mark.parametrize("made", [spelling(), with_tags(True), word_pieces()], ids=["bytes", "tags", "pieces"])
def test_the_bytes_of_tokens_are_those_that_llguidance_reads(made):
    """But for added tokens in angles, which it holds for special ones."""
    size, end = made.get_vocab_size() + 3, END if made.token_to_id("<end>") is None else made.token_to_id("<end>")
    reader = llguidance.LLTokenizer(made.to_str(), n_vocab=size, eos_token=[end])
    mine = GrammarVocabulary(llguidance, made, size, [end]).reader
    for token in range(size):
        assert mine.decode_bytes([token]) == reader.decode_bytes([token]), token
        is_special = reader.is_special_token(token) and made.id_to_token(token) != "<b>"
        assert mine.is_special_token(token) == is_special, token
    assert mine.vocab_size == reader.vocab_size == size
    assert mine.eos_tokens == [end]


def test_texts_of_pieces():
    tokenizer = word_pieces()
    b, c, a = map(tokenizer.token_to_id, ("<b>", "[c]", "a"))
    quote, letter = 2 + ord('"'), [2 + byte for byte in "é".encode()]
    assert walked(tokenizer, json_schema({"const": "é<b>a[c]"}), [quote, *letter, b, a, c, quote])
    forced = compiler_of(tokenizer).compile(regex("a<b>  a")).fresh([1]).forced()
    assert [tokenizer.id_to_token(id) for id in forced] == ["a", "<b>", "▁", "▁a"]
    tokenizer.add_tokens([AddedToken("<d>", special=False)])  # with the space that its normaliser puts before it
    for text in ("a<d>", "a <d>"):
        matcher, found = compiler_of(tokenizer).compile(regex(text)).fresh([1]), []
        while not matcher.is_complete:
            found.append(next(iter(allowed(matcher))))
            matcher.advance(found[-1])
        assert tokenizer.decode([a, *found]) == "a" + text


@pytest.mark.parametrize("normalizer", [normalizers.NFC(), normalizers.Lowercase(), normalizers.NFKC()])
def test_texts_that_a_normaliser_changes(normalizer):
    """They are spelled by their bytes, since other tokens would be another text."""
    tokenizer = with_tags(False)
    tokenizer.normalizer = normalizer
    end = tokenizer.token_to_id("<end>")
    for text in ("e\u0301 Ab ﬁ <think>", "ﬁ", "É"):
        matcher = compiler_of(tokenizer).compile(regex(text)).fresh([end])
        spelled = b""
        while not matcher.is_complete:
            (token,) = allowed(matcher)
            spelled += b"<think>" if token == 257 else bytes([byte_letters().index(tokenizer.id_to_token(token))])
            matcher.advance(token)
        assert spelled.decode() == text


def test_no_line_of_python_runs_while_a_mask_is_made():
    """An interrupt comes between two of them, and llguidance would take it for a fault of its own."""
    state, seen = compiler_of(with_tags(False)).compile(regex("abc <think> def")).fresh([]).state, []
    sys.setprofile(lambda frame, event, what: seen.append(event) if event == "call" else None)
    try:
        forced = state.compute_ff_tokens()
        state.compute_bitmask()
    finally:
        sys.setprofile(None)
    assert (257 in forced, seen) == (True, [])


def test_tokenizers_with_another_order_of_their_parts():
    written = json.loads(with_tags(False).to_str())

    class Other:
        def to_str(self):
            return json.dumps(dict(reversed(written.items())))

        def __getattr__(self, name):
            return getattr(with_tags(False), name)

    assert walked(with_tags(False), json_schema({"const": "<think>"}), [1, 257, 1]) is not None
    vocabulary = GrammarVocabulary(llguidance, Other(), 260, [256])
    assert vocabulary.is_text(257)
    assert not vocabulary.is_text(256)


def test_a_decoder_of_no_bytes():
    made = Tokenizer(models.WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
    for decoder in (None, decoders.WordPiece()):
        if decoder is not None:
            made.decoder = decoder
        with pytest.raises(GrammarError, match=r"a tokenizer that llguidance reads, got an error: .*one of bytes"):
            compiler_of(made).compile(regex("a"))
