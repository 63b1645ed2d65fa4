"""Paths as sources of draft tokens: the tokens of both checkpoints are compared."""

import json
import shutil

import pytest
from places import GOLDEN
from serving import GREEDY

from kvcache import BatchEngine, InferenceEngine

pytest.importorskip("tokenizers")
from spelled_networks import spelling

pytestmark = pytest.mark.one_build


def folder(place, size=256, **names):
    """A checkpoint of 256 rows with `size` tokens, some of which have other names."""
    shutil.copytree(GOLDEN / "llama", place)
    content = json.loads(spelling(size).to_str())
    for old, new in names.items():
        content["model"]["vocab"][new] = content["model"]["vocab"].pop(old)
        content["model"]["merges"] = [each for each in content["model"]["merges"] if old not in "".join(each)]
    (place / "tokenizer.json").write_text(json.dumps(content))
    return place


def test_tokens_are_compared(tmp_path):
    network = folder(tmp_path / "network")
    other = folder(tmp_path / "other", alpha="gamma")
    message = r"draft: expected the tokens of the network, with 'alpha' for id \d+, got 'gamma'"
    for kind in (BatchEngine, InferenceEngine):
        with pytest.raises(ValueError, match=message):
            kind.from_pretrained(network, draft=("ngram", other))
    fewer = folder(tmp_path / "fewer", 240)
    want = InferenceEngine.from_pretrained(network).generate([5, 6, 7], GREEDY)
    assert InferenceEngine.from_pretrained(network, draft=fewer).generate([5, 6, 7], GREEDY) == want
    assert InferenceEngine.from_pretrained(fewer, draft=str(network)).generate([5, 6, 7], GREEDY) == want
