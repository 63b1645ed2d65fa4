"""Kimi's tiktoken.model: compared with its definition, and what is refused."""

from __future__ import annotations

import base64
import json
from itertools import pairwise

import pytest

from kvcache.errors import CheckpointError
from kvcache.sampling.tokenizer import CheckpointText
from kvcache.sampling.vocabulary_tokenizer import KIMI_PATTERN

pytestmark = pytest.mark.one_build

WORDS = [
    b"he", b"ll", b"hell", b" w", b"  ", b"hello", "你".encode(), "你好".encode(), b"ab", b"bc", b"abc", b"12", b"zz!",
]
RANKED = [bytes([i]) for i in range(255, -1, -1)] + WORDS  # bytes come in any order
FIRST = len(RANKED)
SPECIAL = {"0": "[BOS]", "1": "[EOS]", "2": "<|im_end|>", "5": "<think>"}
CONFIG = {
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "added_tokens_decoder": {
        str(FIRST + int(at)): {"content": text, "special": text != "<think>"} for at, text in SPECIAL.items()
    },
    "bos_token": "[BOS]", "eos_token": "[EOS]",
}
CODE = "pat_str = '|'.join([" + ", ".join(f'r"""{part}"""' for part in KIMI_PATTERN) + "])\n"


def save(folder, ranked=None, code=CODE, **changes):
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ranked or RANKED)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG | changes))
    if code is not None:
        (folder / "tokenization_kimi.py").write_text(code)
    return CheckpointText(folder)


def by_ranks(piece):
    """The definition: a token as it is; else join the neighbours that are the token of lowest rank, leftmost first."""
    ranks = {token: rank for rank, token in enumerate(RANKED)}
    parts = [piece] if piece in ranks else [bytes([byte]) for byte in piece]
    while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [ranks[part] for part in parts]


def test_ids(tmp_path, rng):
    tokenizer = save(tmp_path).tokenizer
    texts = ["", "hello hello", "zz!", "你好hello 12345\n\n"] + [
        "".join(rng.choice(list("helowabcZ 12é你好'\n"), 14)) for _ in range(200)
    ]
    for text in texts:
        expected, left = [], text.encode()
        for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text):
            expected += by_ranks(left[: len(piece)])  # a character of a piece is a byte
            left = left[len(piece) :]
        assert tokenizer.encode(text).ids == expected
        assert tokenizer.decode(expected) == text
    assert tokenizer.get_vocab_size() == FIRST + 256


@pytest.mark.parametrize("code", [CODE, None], ids=["beside its Python", "alone"])
def test_special_tokens(tmp_path, code):
    text = save(tmp_path, code=code)
    ids = text.tokenizer.encode("[BOS]<think>ab<|im_end|><|reserved_token_300|>").ids
    assert ids == [FIRST, FIRST + 5, RANKED.index(b"ab"), FIRST + 2, 300]
    assert text.tokenizer.decode(ids) == "<think>ab"
    assert text.special_tokens == {"bos_token": "[BOS]", "eos_token": "[EOS]"}


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"tokenizer_config\.json: auto_map.AutoTokenizer: expected tokenization_kimi.TikTokenTokenizer, whose "
         r"tiktoken.model is the only one that is read, got 'other.Tokenizer'",
         {"auto_map": {"AutoTokenizer": ["other.Tokenizer", None]}}),
        (r"auto_map.AutoTokenizer: expected .*, got \[\]", {"auto_map": {"AutoTokenizer": []}}),
        (r"tokenization_kimi\.py: pat_str: expected the part .*Han.*, got 'another pattern'", {"code": "pat_str = 1"}),
        (r"tiktoken\.model: expected 256 to \d+ tokens, got 3", {"ranked": WORDS[:3]}),
        (r"tiktoken\.model: expected each byte as a token", {"ranked": [*RANKED[1:], b"ac"]}),
        (r"line 270: expected base64 of a token and a rank of its own", {"ranked": [*RANKED, b"a" * 300]}),
        (r"added_tokens_decoder: expected an object of at most 256 tokens, got None", {"added_tokens_decoder": None}),
        (r"added_tokens_decoder: expected texts of ids from 269 to 524",
         {"added_tokens_decoder": {"9": {"content": "a"}}}),
        (r"added_tokens_decoder: expected texts of ids", {"added_tokens_decoder": {"270": {"content": 1}}}),
        (r"added_tokens_decoder: expected texts that are no other",
         {"added_tokens_decoder": {"270": {"content": "ab"}}}),
    ],
)
def test_refused(tmp_path, message, changes):
    with pytest.raises(CheckpointError, match=message):
        _ = save(tmp_path, **changes).tokenizer


@pytest.mark.parametrize("line", ["YWM= 12", "YWM= x", "YWM 269", "YWM=", "", "YWM= 999999999999999999999"])
def test_a_line_that_is_none(tmp_path, line):
    save(tmp_path)
    path = tmp_path / "tiktoken.model"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(CheckpointError, match=r"tiktoken\.model: line 270: expected base64 of a token and a rank"):
        _ = CheckpointText(tmp_path).tokenizer
