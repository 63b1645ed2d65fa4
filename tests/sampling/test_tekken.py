"""Mistral's tekken.json: compared with its definition, and what is refused."""

from __future__ import annotations

import base64
import json
import shutil
from itertools import pairwise

import pytest
from places import GOLDEN

from kvcache.engine import InferenceEngine
from kvcache.errors import CheckpointError
from kvcache.sampling.tekken import tekken_vocabulary
from kvcache.sampling.text_files import TextFiles
from kvcache.sampling.tokenizer import CheckpointText
from kvcache.sampling.vocabulary_tokenizer import TEKKEN_PATTERN

pytestmark = pytest.mark.one_build

WORDS = [
    b"he", b"ll", b"lo", b"hell", b" w", b"  ", b"hello", b" wo", b"\xc3\xa9", b"\xe6\x97", b"ab", b"bc", b"abc", b"12",
]
SPECIAL = 30
TEXTS = [
    "", " ", "hello hello", "HTTPServer XMLHttp iPhone", "abcabc abbc", "  \n\n\tdef f(x):\n    return x//2\n",
    "12345", "café 日本語", "e\u0301", "👍🏽 ok", "lllhehello wowo",
]


def content(**changes):
    ranked = [bytes([i]) for i in range(256)] + WORDS + [b"more", b"than needed"]
    found = {
        "config": {
            "pattern": TEKKEN_PATTERN, "num_vocab_tokens": len(ranked), "version": "v3",
            "default_vocab_size": 256 + len(WORDS) + SPECIAL, "default_num_special_tokens": SPECIAL,
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for i, token in enumerate(ranked)
        ],
    }
    return found | changes


def save(folder, found):
    path = folder / "tekken.json"
    path.write_text(json.dumps(found))
    return path


def by_ranks(piece):
    """The definition: of all neighbours that together are a token, join those of the lowest rank, leftmost first."""
    ranks = {bytes([i]): i for i in range(256)} | {word: 256 + i for i, word in enumerate(WORDS)}
    parts = [bytes([byte]) for byte in piece]
    while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [ranks[part] + SPECIAL for part in parts]


@pytest.fixture
def tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    save(tmp_path, content())
    return CheckpointText(tmp_path).tokenizer


def test_ids(tokenizer, rng):
    texts = TEXTS + ["".join(rng.choice(list("helowabc 12é"), 14)) for _ in range(300)]
    for text in texts:
        pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        expected, left = [1], text.encode()
        for piece in pieces:
            expected += by_ranks(left[: len(piece)])  # a character of a piece is a byte
            left = left[len(piece) :]
        ids = tokenizer.encode(text).ids
        assert ids == expected
        assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == 256 + len(WORDS) + SPECIAL


def test_special_tokens(tokenizer, tmp_path):
    assert tokenizer.encode("<s>[INST]ab[/INST]</s>", add_special_tokens=False).ids == [1, 3, SPECIAL + 266, 4, 2]
    assert [tokenizer.id_to_token(i) for i in (11, 19, 20, 29)] == [
        "<pad>", "[TOOL_CONTENT]", "<SPECIAL_20>", "<SPECIAL_29>",
    ]
    assert CheckpointText(tmp_path).special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_listed_special_tokens(tmp_path):
    """Newer files list their own; one that is no control token is text."""
    pytest.importorskip("tokenizers")
    names = ["<unk>", "<s>", "</s>", "[THINK]", "[/THINK]"]
    listed = [{"rank": i, "token_str": name, "is_control": i < 3} for i, name in enumerate(names)]
    save(tmp_path, content(special_tokens=listed))
    tokenizer = CheckpointText(tmp_path).tokenizer
    ids = tokenizer.encode("[THINK]ab[/THINK]</s>").ids
    assert ids == [1, 3, SPECIAL + 266, 4, 2]
    assert tokenizer.decode(ids) == "[THINK]ab[/THINK]"
    assert tokenizer.id_to_token(5) == "<SPECIAL_5>"


def test_tokenizer_json_comes_first(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    shutil.copytree(GOLDEN / "llama", tmp_path, dirs_exist_ok=True)
    save(tmp_path, {"no": "tokenizer"})
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.save(str(tmp_path / "tokenizer.json"))
    assert InferenceEngine.from_pretrained(tmp_path).tokenizer.encode("a").ids == [0]
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tekken\.json: config: expected an object, got None"):
        _ = InferenceEngine.from_pretrained(tmp_path).tokenizer


CONFIG = content()["config"]
VOCAB = content()["vocab"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": 3}, "config: expected an object, got 3"),
        ({"config": CONFIG | {"pattern": "(a|b|ab)+$"}}, r"config.pattern: expected that of .*, got '\(a\|b"),
        ({"config": CONFIG | {"default_vocab_size": -1}}, "config.default_vocab_size: expected a whole number from 20"),
        ({"config": CONFIG | {"default_vocab_size": 2**40}}, "config.default_vocab_size: expected a whole number"),
        ({"config": CONFIG | {"default_vocab_size": 2**20}}, "vocab: expected a list of at least .* tokens"),
        ({"config": CONFIG | {"default_vocab_size": 200}}, "vocab: expected a list of at least 256 tokens"),
        ({"config": CONFIG | {"default_num_special_tokens": 19}}, "config.default_num_special_tokens: expected a whol"),
        ({"vocab": None}, "vocab: expected a list of at least 270 tokens, got None"),
        ({"vocab": VOCAB[1:]}, "vocab: expected the bytes of the token of rank 0, got .*'rank': 1"),
        ({"vocab": [7] * 300}, "vocab: expected the bytes of the token of rank 0, got 7"),
        ({"vocab": [{"rank": 0, "token_bytes": "a b"}] * 300}, "vocab: expected base64 of the token of rank 0"),
        ({"vocab": [{"rank": 0, "token_bytes": "é"}] * 300}, "vocab: expected base64 of the token of rank 0"),
        ({"vocab": [{"rank": 0, "token_bytes": "A" * 600}] * 300}, "vocab: expected the bytes of the token of rank 0"),
        ({"vocab": [entry | {"token_bytes": "AA=="} for entry in VOCAB]}, "vocab: expected each byte first"),
        ({"vocab": [*VOCAB[:269], VOCAB[260] | {"rank": 269}]}, "vocab: expected each token once, got one twice"),
        ({"special_tokens": []}, r"special_tokens: expected a list of 3 to 30 tokens, got \[\]"),
        ({"special_tokens": [{"rank": i + 1} for i in range(3)]}, "special_tokens: expected the text of .* rank 0"),
        ({"special_tokens": [{"rank": i, "token_str": 1} for i in range(3)]}, "special_tokens: expected the text"),
        (
            {"special_tokens": [{"rank": i, "token_str": "a"} for i in range(3)]},
            "vocab: expected each token once, got one twice",
        ),
    ],
)
def test_refused(tmp_path, changes, message):
    save(tmp_path, content(**changes))
    with pytest.raises(CheckpointError, match=rf"tekken\.json: {message}"):
        tekken_vocabulary(TextFiles(tmp_path))


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "[" * 100_000])
def test_damaged(tmp_path, text):
    (tmp_path / "tekken.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"tekken\.json: expected "):
        tekken_vocabulary(TextFiles(tmp_path))
