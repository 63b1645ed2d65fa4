"""Tokenizers built from the vocabulary of a GGUF file. Beside llama.cpp: tests/engine/test_smollm2.py."""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
import pytest
from gguf_files import ARRAY, BOOL, F32, I32, STRING, U32, write

from kvcache.errors import CheckpointError
from kvcache.sampling import vocabulary_tokenizer as module
from kvcache.sampling.tokenizer import GgufText

pytestmark = pytest.mark.one_build

TEXTS = [
    "", " ", "a", "  two  spaces ", "Hello world", "don't I'LL", "12345 3.14", "x1y22", "\n\n \t\r\n", "naïve café",
    "日本語 한국어", "😀 👨‍👩‍👧", "<|end|>a<|end|>", "a\u00a0b\u3000c", "\x00\x01\x7f", "e\u0301", "\ufeff\u200b",
    "½²³ Ⅷ ٣٤", "def f(x):\n    return x  # ok\n", "a" * 300, " " * 100,
]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_characters():
    """The characters by which GPT-2 writes bytes: printable ones stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return dict(zip(printable, map(chr, printable), strict=True)) | {b: chr(256 + i) for i, b in enumerate(others)}


BYTES = byte_characters()
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġ Ġ", "1 2", "12 3", "a b", "ab c"]


@pytest.fixture
def build(tmp_path):
    """Writes a vocabulary and builds its tokenizer."""

    def build_from(kind, texts, kinds, architecture="llama", name=None, **entries):
        found = {
            "model": (STRING, kind),
            "tokens": (ARRAY, texts, STRING),
            "token_type": (ARRAY, kinds, I32),
        } | entries
        named = {f"tokenizer.ggml.{key}": content for key, content in found.items() if content is not None}
        if name is not None:
            named["general.name"] = (STRING, name)
        return GgufText(write(tmp_path / "x.gguf", architecture, named, {})).tokenizer

    return build_from


@pytest.fixture
def bytewise(build):
    """Byte-level BPE with few merges."""

    def build_bytewise(pre="gpt-2", more=(), **entries):
        texts = [*BYTES.values(), *(merge.replace(" ", "") for merge in MERGES), "<|end|>", "USER", *more]
        kinds = [NORMAL] * (len(texts) - 2 - len(more)) + [CONTROL, USER_DEFINED] + [NORMAL] * len(more)
        chosen = {"pre": pre and (STRING, pre), "merges": (ARRAY, MERGES, STRING)}
        return build("gpt2", texts, kinds, **chosen | entries)

    return build_bytewise


@pytest.mark.parametrize("pre", [*module._PRE])
def test_every_text_comes_back(bytewise, pre):
    tokenizer = bytewise(pre)
    for text in TEXTS:
        expected = text if pre not in module._COMPOSED else text.replace("e\u0301", "é")
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == expected


def test_merges(bytewise):
    tokenizer = bytewise()
    assert tokenizer.encode("hello hello abc").tokens == ["hello", "Ġ", "hello", "Ġ", "abc"]
    assert tokenizer.encode("hellohe").tokens == ["hello", "he"]


PIECES = {
    "gpt-2": ["I", "'LL", " say", " don", "'t", ":", " 1234", "  ", " x", "!?\n\n", "y"],
    "smollm": ["I", "'LL", " say", " don", "'t", ":", " ", "1", "2", "3", "4", "  ", " x", "!?\n\n", "y"],
    "qwen2": ["I", "'LL", " say", " don", "'t", ":", " ", "1", "2", "3", "4", "  ", " x", "!?\n\n", "y"],
    "llama-bpe": ["I", "'LL", " say", " don", "'t", ":", " ", "123", "4", "  ", " x", "!?\n\n", "y"],
    "smaug-bpe": ["I", "'LL", " say", " don", "'t", ":", " ", "123", "4", "  ", " x", "!?\n\n", "y"],
    "gpt-4o": ["I'LL", " say", " don't", ":", " ", "123", "4", "  ", " x", "!?\n\n", "y"],
    "tekken": ["I", "'LL", " say", " don", "'t", ":", " ", "1", "2", "3", "4", "  ", " x", "!?\n\n", "y"],
    "qwen35": ["I", "'LL", " say", " don", "'t", ":", " ", "1", "2", "3", "4", "  ", " x", "!?\n\n", "y"],
    "falcon": [
        "I", "'", "LL", " say", " don", "'", "t", ":", " ", "123", "4", "  ", " x", "!?", "\n", "\n", "y",
    ],
    "deepseek-coder": [
        "I", "'", "LL", " say", " don", "'", "t", ":", " ", "1", "2", "3", "4", "  ", " x", "!?", "\n", "\n", "y",
    ],
    "deepseek-llm": [
        "I", "'", "LL", " say", " don", "'", "t", ":", " ", "1234", "  ", " x", "!?", "\n", "\n", "y",
    ],
    "kimi-k2": ["I'LL", " say", " don't", ":", " ", "123", "4", "  ", " x", "!?\n\n", "y"],
    "youtu": ["I'LL", " say", " don't", ":", " ", "1", "2", "3", "4", "  ", " x", "!?\n\n", "y"],
    "viking": ["I'LL", " say", " don't:", " ", "1", "2", "3", "4", "  ", " x", "!?\n\n", "y"],
    "superbpe": ["I'LL say don't: ", "1", "234", "   x!?\n\ny"],
    "tiny_aya": ["I'LL", " say", " don't", ":", " ", "1", "234", "  ", " x", "!?\n\n", "y"],
    "minicpm5": ["I", "'LL", " say", " don", "'t", ":", " ", "123", "4", "  ", " x", "!?\n\n", "y"],
    "bailingmoe": ["I", "'LL", " say", " don", "'t", ":", " ", "1", "2", "3", "4", "  ", " x", "!?\n\n", "y"],
    "glm4": ["I", "'LL", " say", " don", "'t", ":", " ", "123", "4", "  ", " x", "!?\n\n", "y"],
    "seed-coder": ["I", "'LL", " say", " don", "'t", ":", " ", "1", "2", "3", "4", "  ", " x", "!?", "\n\n", "y"],
    "hunyuan-dense": ["I", "'LL", " say", " don", "'t", ":", " ", "123", "4", "  ", " x", "!?\n\n", "y"],
    "default": ["I", "'", "LL", " say", " don", "'", "t", ":", " ", "123", "4", "  ", " x", "!?", "\n", "\n", "y"],
}


@pytest.mark.parametrize("pre", PIECES)
def test_pieces(bytewise, pre):
    """Pre-tokenizers divide texts as expected. GPT-2 takes only lower-case endings, so `'LL` is two pieces there."""
    expected = PIECES[pre]
    if pre in ("gpt-2", "smollm"):
        expected = ["I", "'", "LL", *expected[2:]]
        at = expected.index("!?\n\n")
        expected[at : at + 1] = ["!?", "\n", "\n"]
    text = "I'LL say don't: 1234   x!?\n\ny"
    assert "".join(expected) == text
    found = [text[start:stop] for _, (start, stop) in bytewise(pre).pre_tokenizer.pre_tokenize_str(text)]
    assert found == expected


def test_whole_words(bytewise):
    """A word that is a token is one, in the vocabularies of Llama 3, also if no merges lead to it."""
    more = ["Ġxyz"]
    assert bytewise("llama-bpe", more).encode(" xyz").tokens == more
    for pre in ("gpt-2", "smaug-bpe"):
        assert bytewise(pre, more).encode(" xyz").tokens == ["Ġ", "x", "y", "z"]


@pytest.mark.parametrize("pre", module._COMPOSED)
def test_composed_characters(bytewise, pre):
    """Qwen's tokenizers, and some others, bring a text to Unicode NFC."""
    assert bytewise(pre).encode("e\u0301").tokens == bytewise(pre).encode("é").tokens == [BYTES[0xC3], BYTES[0xA9]]


def test_marks_belong_to_their_letters(bytewise):
    """Qwen3.5 has them in words, where Qwen2 divides a text before a mark that has no composed letter."""
    text = "a\u0330b"
    for pre, expected in (("qwen35", [text]), ("qwen2", ["a", "\u0330b"])):
        found = [text[start:stop] for _, (start, stop) in bytewise(pre).pre_tokenizer.pre_tokenize_str(text)]
        assert found == expected


def test_kimi_has_han_characters_apart(bytewise):
    text = "abc中文def你好。\nHTTPServer iPhone's /\n"
    found = [text[start:stop] for _, (start, stop) in bytewise("kimi-k2").pre_tokenizer.pre_tokenize_str(text)]
    assert found == ["abc", "中文", "def", "你好", "。\n", "HTTPServer", " i", "Phone's", " /\n"]


def test_youtu_has_scripts_apart(bytewise):
    text = "abc中文def한글。。ㄅㄆx"
    found = [text[start:stop] for _, (start, stop) in bytewise("youtu").pre_tokenizer.pre_tokenize_str(text)]
    assert found == ["abc", "中文", "def", "한글", "。。", "ㄅㄆ", "x"]


def test_tekken_divides_at_changes_of_case(bytewise):
    """It begins a text with bos, and leaves a word that is a token whole, as the vocabularies of Llama 3 do."""
    text = "HTTPServer XMLHttp iPhone's"
    tokenizer = bytewise("tekken", ["ĠiPhone"], bos_token_id=(U32, 0))
    found = [text[start:stop] for _, (start, stop) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert found == ["HTTPServer", " XMLHttp", " i", "Phone", "'s"]
    assert tokenizer.encode("he").tokens == ["!", "he"]


def test_special_tokens(bytewise):
    tokenizer = bytewise()
    ids = tokenizer.encode("he<|end|>USERhe").ids
    assert [tokenizer.id_to_token(id) for id in ids] == ["he", "<|end|>", "USER", "he"]
    assert tokenizer.decode(ids) == "heUSERhe"
    assert tokenizer.get_vocab_size() == 256 + len(MERGES) + 2


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "smaug-bpe"])
def test_beginning_and_end(bytewise, pre):
    """bos and eos as the file says; without a word, vocabularies of Llama 3 add bos and the others do not."""
    named = {"bos_token_id": (U32, 256 + len(MERGES)), "eos_token_id": (U32, 0)}
    both = bytewise(pre, add_bos_token=(BOOL, True), add_eos_token=(BOOL, True), **named)
    assert both.encode("he").tokens == ["<|end|>", "he", "!"]
    assert both.encode("he", add_special_tokens=False).tokens == ["he"]
    none = bytewise(pre, add_bos_token=(BOOL, False), **named)
    assert none.encode("he").tokens == ["he"]
    assert bytewise(pre, **named).encode("he").tokens == ["<|end|>"] * (pre == "llama-bpe") + ["he"]


def test_an_absent_pre_tokenizer_is_the_default(bytewise):
    text = "I'LL say don't: 1234"
    assert bytewise(pre=None).encode(text).ids == bytewise("default").encode(text).ids
    assert bytewise(pre=None).encode(text).ids != bytewise("smollm").encode(text).ids


# ---------------------------------------------------------------- SentencePiece

WORDS = ["▁", "t", "h", "e", "▁t", "he", "▁the", "th", "a", "▁a", "at", "▁that", "hat", "é", "日", "b", "ab", "▁▁"]
PIECES_OF_SPM = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, "<|x|>"]
KINDS_OF_SPM = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(WORDS), CONTROL]


def sentencepiece(text, scores):
    """The definition: of all neighbours whose text is a token, merge those of the highest score, leftmost first."""
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [(scores.get(a + b, -np.inf), -i) for i, (a, b) in enumerate(pairwise(parts))]
        if not pairs or max(pairs)[0] == -np.inf:
            break
        i = -max(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    known = [[part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [piece for pieces in known for piece in pieces]


@pytest.fixture
def spm(build, rng):
    def build_spm(**entries):
        scores = [0.0] * 259 + (-rng.permutation(len(WORDS) + 1)).astype(float).tolist()
        entries = {"scores": (ARRAY, scores, F32)} | entries
        return build("llama", PIECES_OF_SPM, KINDS_OF_SPM, **entries), dict(zip(WORDS, scores[259:], strict=False))

    return build_spm


def test_sentencepiece(spm, rng):
    tokenizer, scores = spm()
    texts = ["".join(rng.choice(list("theat é日b\n"), 12)) for _ in range(300)]
    for text in [text for text in TEXTS if text and "<|end|>" not in text] + texts:
        assert tokenizer.encode(text).tokens == ["<s>", *sentencepiece(" " + text, scores)]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("").tokens == ["<s>"]


def test_spaces_after_special_tokens(spm):
    """Each part between special tokens begins with a space, as llama.cpp does it."""
    tokenizer, _ = spm(add_bos_token=(BOOL, False), add_eos_token=(BOOL, True))
    assert tokenizer.encode("a<|x|>a").tokens == ["▁a", "<|x|>", "▁a", "</s>"]
    plain, _ = spm(add_space_prefix=(BOOL, False))
    assert plain.encode("a<|x|>a").tokens == ["<s>", "a", "<|x|>", "a"]
    assert plain.decode(plain.encode(" a").ids) == " a"


def test_special_tokens_of_phi3_take_the_spaces_behind_them(build):
    """No file says so. Without it every chat prompt has a newline after `<|user|>` that the network never saw."""
    words = ["▁", "a", "b", "▁a", "▁b"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    texts = ["<unk>", "<s>", "</s>", *bytes_, *words, "<|endoftext|>", "<|user|>", "<|end|>"]
    kinds = [UNKNOWN, CONTROL, USER_DEFINED, *[BYTE] * 256, *[NORMAL] * len(words), *[CONTROL] * 3]
    entries = {"scores": (ARRAY, [0.0] * 262 + [1.0, 2.0] + [0.0] * 3, F32), "add_bos_token": (BOOL, False)}
    text = "<|user|>\na<|end|> \t\nb</s> a<s>\na<|endoftext|> a"
    phi3 = ["<|user|>", "▁a", "<|end|>", "▁b", "</s>", "▁a"]
    kept = ["<s>", "▁", "<0x0A>", "a", "<|endoftext|>", "▁", "▁a"]

    def tokens(**network):
        tokenizer = build("llama", texts, kinds, **network, **entries)
        return [tokenizer.id_to_token(id) for id in tokenizer.encode(text).ids]

    for network in ({"architecture": "phi3"}, {"name": "Microsoft Phi-3 Mini"}, {"name": "my-phi3-tune"}):
        assert tokens(**network) == phi3 + kept
    others = tokens(name="Phi 4")
    assert others[:4] == ["<|user|>", "▁", "<0x0A>", "a"]
    assert others[-7:] == kept


def test_runs_that_gemma_has_as_tokens(build):
    """Runs of spaces and of newlines are tokens of their own kind; a text does not begin with a space."""
    texts = ["<unk>", "<bos>", "\n\n", "   ", "▁", "a", "b", "▁a", "\n", "<start_of_turn>"]
    kinds = [UNKNOWN, CONTROL, USER_DEFINED, USER_DEFINED, *[NORMAL] * 5, CONTROL]
    scores = np.arange(len(texts), dtype=np.float32)
    named = {"bos_token_id": (U32, 1), "unknown_token_id": (U32, 0), "add_space_prefix": (BOOL, False)}
    tokenizer = build("llama", texts, kinds, scores=(ARRAY, scores.tolist(), F32), **named)
    text = "<start_of_turn>a a\n\nb   a\nb"
    expected = ["<bos>", "<start_of_turn>", "a", "▁a", "\n\n", "b", "   ", "a", "\n", "b"]
    assert tokenizer.encode(text).tokens == expected
    assert tokenizer.decode(tokenizer.encode(text).ids[1:], skip_special_tokens=False) == text


@pytest.mark.parametrize(("model", "pre"), [("gemma4", None), ("llama", "gemma4")])
def test_gemma_4_has_merges_over_characters(build, model, pre):
    """Spaces are written as U+2581 and a merge may join words. bos is first, whatever a file says."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    texts = ["<pad>", "<bos>", "<unk>", *bytes_, "▁", "a", "b", "▁a", "a▁", "\n", "\n\n", "ab", "a▁a", "<|turn>"]
    kinds = [CONTROL, CONTROL, UNKNOWN, *[BYTE] * 256, *[NORMAL] * 9, CONTROL]
    entries = {"merges": (ARRAY, ["a b", "a ▁", "a▁ a", "▁ a", "\n \n"], STRING), "pre": pre and (STRING, pre)}
    entries |= {"bos_token_id": (U32, 1), "unknown_token_id": (U32, 2), "add_bos_token": (BOOL, False)}
    entries["scores"] = (ARRAY, list(range(len(texts))), F32)  # some files have these too: they mean nothing
    tokenizer = build(model, texts, kinds, **entries)
    for text, expected in {
        "a a": ["a▁a"], " a": ["▁a"], "ab\n\na": ["ab", "\n\n", "a"], "<|turn>a b": ["<|turn>", "a▁", "b"],
        "é": ["<0xC3>", "<0xA9>"], "": [],
    }.items():
        assert tokenizer.encode(text).tokens == ["<bos>", *expected]
        assert tokenizer.decode(tokenizer.encode(text).ids[1:], skip_special_tokens=False) == text


def test_a_byte_without_a_token_is_unknown(build):
    tokenizer = build(
        "llama", ["<unk>", "a"], [UNKNOWN, NORMAL], **{f"add_{x}": (BOOL, False) for x in ("space_prefix", "bos_token")}
    )
    assert tokenizer.encode("aéa").tokens == ["a", "<unk>", "a"]


# ---------------------------------------------------------------- faults


def test_no_vocabulary(tmp_path):
    text = GgufText(write(tmp_path / "x.gguf", "llama", {}, {}))
    assert text.tokenizer is text.chat_template is None
    entries = {"tokenizer.ggml.model": (STRING, "none"), "tokenizer.chat_template": (STRING, "{{ x }}")}
    text = GgufText(write(tmp_path / "y.gguf", "llama", entries, {}))
    assert (text.tokenizer, text.special_tokens) == (None, {})
    assert text.chat_template == text.template("tool_use") == "{{ x }}"


def test_the_package_is_missing(bytewise, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"x\.gguf needs the tokenizers package: pip install 'kvcache-cpu\[text\]'"):
        bytewise()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"pre": "no-such"}, "tokenizer.ggml.pre: expected one of default, .*, got 'no-such'"),
        ({"pre": b"\xff"}, r"tokenizer.ggml.pre: expected a string, got b'\\xff'"),
        ({"merges": (ARRAY, [b"\xff", b"a b"], STRING)}, "merges: expected an array of strings in UTF-8, got "),
        ({"merges": None}, "tokenizer.ggml.merges: expected an array of strings in UTF-8, got nothing"),
        ({"merges": (ARRAY, ["ab"], STRING)}, "merges: expected two texts and a space between, got 'ab'"),
        ({"merges": (ARRAY, ["y z"], STRING)}, "tokenizer: expected a consistent vocabulary, got .*yz"),
        ({"token_type": (ARRAY, [1], I32)}, "tokenizer.ggml.token_type: expected 268 numbers of int32, one for each"),
        ({"bos_token_id": (U32, 268)}, "bos_token_id: expected the id of one of 268 tokens, got 268"),
        ({"add_bos_token": (U32, 1)}, "add_bos_token: expected true or false, got 1"),
        ({"model": (STRING, "bert")}, "tokenizer.ggml.model: expected gpt2, llama or gemma4, got 'bert'"),
    ],
)
def test_refused(bytewise, entries, message):
    with pytest.raises(CheckpointError, match=rf"x\.gguf: .*{message}"):
        bytewise(**entries)


def test_a_package_that_panics_while_it_builds(bytewise, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")

    def panic(**_):
        short = tokenizers.Tokenizer(tokenizers.models.WordLevel({"aa": 0}, "aa"))
        short.decoder = tokenizers.decoders.Strip("a", 0, 3)
        short.decode([0])

    monkeypatch.setattr(tokenizers.models, "BPE", panic)
    with pytest.raises(CheckpointError, match=r"x\.gguf: tokenizer: expected a consistent vocabulary, got an error"):
        bytewise()


def test_limits(build, bytewise, monkeypatch):
    monkeypatch.setattr(module, "_MAX_CHARACTERS", 3)
    with pytest.raises(CheckpointError, match="at most 512 characters each and 3 together, got 3 and 4"):
        build("llama", ["abc", "d"], [1, 1])
    monkeypatch.setattr(module, "_MAX_CHARACTERS", 100)
    monkeypatch.setattr(module, "MOST", 1)
    with pytest.raises(CheckpointError, match="merges: expected at most 1, got more"):
        build("llama", ["a", "b", "ab", "aab"], [1] * 4)
    monkeypatch.setattr("kvcache.gguf.vocabulary.MOST", 9)
    with pytest.raises(CheckpointError, match="tokens: expected at most 9, got 268"):
        bytewise()
    monkeypatch.setattr("kvcache.gguf.vocabulary.MOST", 268)
    with pytest.raises(CheckpointError, match="merges: expected at most 268, got 269"):
        bytewise(merges=(ARRAY, ["a b"] * 269, STRING))
