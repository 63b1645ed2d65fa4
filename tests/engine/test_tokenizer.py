"""Text to tokens and back, for checkpoints with and without a tokenizer."""

from __future__ import annotations

import shutil
import sys

import pytest
from engines import GREEDY, PROMPT
from places import GOLDEN

from kvcache.engine import InferenceEngine
from kvcache.errors import CheckpointError


@pytest.fixture
def with_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    shutil.copytree(GOLDEN / "llama", tmp_path, dirs_exist_ok=True)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_tokenizer(with_tokenizer):
    tokenizer = InferenceEngine.from_pretrained(with_tokenizer).tokenizer
    assert tokenizer.encode("b a c").ids == [1, 0, 2]


def test_no_tokenizer_file():
    assert InferenceEngine.from_pretrained(GOLDEN / "llama").tokenizer is None


def test_damaged_tokenizer(with_tokenizer):
    (with_tokenizer / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        _ = InferenceEngine.from_pretrained(with_tokenizer).tokenizer


def test_tokenizers_not_installed(with_tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    engine = InferenceEngine.from_pretrained(with_tokenizer)
    with pytest.raises(ImportError, match=r"kvcache-cpu\[text\]"):
        _ = engine.tokenizer
    assert engine.generate(PROMPT, GREEDY)
