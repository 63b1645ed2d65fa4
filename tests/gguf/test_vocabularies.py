"""The vocabulary files of llama.cpp, with the ids that it expects.

They are in its sources, as `models/ggml-vocab-*.gguf` with texts (`.inp`) and ids (`.out`). The tests run where
KVCACHE_VOCABULARIES names that folder.
"""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

import pytest

from kvcache.gguf import GgufFile
from kvcache.sampling.tokenizer import GgufText

FOLDER = os.environ.get("KVCACHE_VOCABULARIES")
FILES = sorted(Path(FOLDER).glob("ggml-vocab-*.gguf")) if FOLDER else []
pytestmark = [
    pytest.mark.one_build,
    pytest.mark.skipif(not FILES, reason="KVCACHE_VOCABULARIES names no folder of vocabularies"),
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem.removeprefix("ggml-vocab-"))
def test_ids(path):
    """The same ids. llama.cpp composes no characters: where our tokenizer does, its texts have to be composed."""
    file = GgufFile(path)
    if file.metadata["tokenizer.ggml.model"] in ("bert", "t5"):
        pytest.skip("a tokenizer of encoders")
    tokenizer = GgufText(file).tokenizer
    if not path.with_name(f"{path.name}.out").exists():
        return
    texts = path.with_name(f"{path.name}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    ids = [[int(id) for id in line.split()] for line in path.with_name(f"{path.name}.out").read_text().splitlines()]
    assert len(ids) >= 46
    for text, expected in zip(texts, ids, strict=False):
        composes = tokenizer.normalizer is not None and tokenizer.normalizer.normalize_str("e\u0301") == "é"
        if not composes or unicodedata.is_normalized("NFC", text):
            assert tokenizer.encode(text, add_special_tokens=False).ids == expected
