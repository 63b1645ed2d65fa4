"""The engine compared with the transformers library, on the data of golden/make_golden.py."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from oracle_engine import DenseKvCache
from places import GOLDEN

from kvcache.engine import InferenceEngine, SamplingParams, Transformer

MODELS = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
PROMPT_LENGTHS = (1, 15, 16, 17, 33, 200)
CHUNKS = (1, 7, 16, 64, 512)
TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=64)


class DenseEngine(InferenceEngine):
    """The engine over the naive cache: its errors are not those of a kernel."""

    def _make_cache(self, **options):
        return DenseKvCache(**options)


@pytest.fixture(scope="module", params=MODELS)
def golden(request):
    """A loaded network and its reference arrays."""
    folder = GOLDEN / request.param
    with np.load(folder / "golden.npz") as arrays:
        return Transformer.from_pretrained(folder), dict(arrays)


@pytest.fixture(scope="module", params=[DenseEngine, InferenceEngine])
def engine_class(request):
    return request.param


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_logits(golden, engine_class, length, chunk):
    model, arrays = golden
    engine = engine_class(model, prefill_chunk=chunk)
    logits = engine.prefill_from_pos(arrays[f"prompt_{length}"], 0)
    np.testing.assert_allclose(logits, arrays[f"logits_{length}"][-1], rtol=0, atol=TOLERANCE)
    engine.check()


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_logits_of_every_position_by_decoding(golden, engine_class, length):
    model, arrays = golden
    engine = engine_class(model)
    prompt = arrays[f"prompt_{length}"]
    rows = np.array([engine.decode_step(token, pos) for pos, token in enumerate(prompt)])
    expected = arrays[f"logits_{length}"]
    np.testing.assert_allclose(rows[arrays[f"positions_{length}"]], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_greedy_continuation(golden, engine_class, length, chunk):
    model, arrays = golden
    engine = engine_class(model, prefill_chunk=chunk)
    assert engine.generate(arrays[f"prompt_{length}"], GREEDY) == arrays[f"greedy_{length}"].tolist()
    engine.check()


@pytest.mark.parametrize("chunk", CHUNKS)
def test_scores_are_the_log_softmax(golden, engine_class, chunk):
    model, arrays = golden
    prompt, logits = arrays["prompt_33"], arrays["logits_33"][:-1].astype(np.float64)
    expected = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[np.arange(32), prompt[1:]]
    scores = engine_class(model, prefill_chunk=chunk).score(prompt)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("dtype", "bound"), [("f16", 0.01), ("q8", 0.1), ("q4", 1.5)])
def test_the_error_of_compressed_caches(golden, dtype, bound):
    """The root mean square error of the logits, whose spread is about 3; random networks amplify noise."""
    model, arrays = golden
    logits = InferenceEngine(model, dtype=dtype).prefill_from_pos(arrays["prompt_200"], 0)
    error = float(np.sqrt(np.mean((logits - arrays["logits_200"][-1]) ** 2)))
    assert 0 < error < bound


@pytest.mark.parametrize("name", MODELS)
def test_older_spelling_of_rope(name, tmp_path):
    """Files from before transformers 5 have `rope_theta` and `rope_scaling`, with the kind as `rope_type` or `type`."""
    shutil.copytree(GOLDEN / name, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Transformer.from_pretrained(tmp_path).config == Transformer.from_pretrained(GOLDEN / name).config


def test_every_feature_has_a_model():
    configs = [Transformer.from_pretrained(GOLDEN / name).config for name in MODELS]
    assert {config.rope.kind for config in configs} == {"default", "linear", "llama3", "yarn"}
    assert len({config.architecture for config in configs}) == 4
    for flag in ("qkv_bias", "output_bias", "mlp_bias", "qk_norm", "tie_word_embeddings"):
        assert {getattr(config, flag) for config in configs} == {True, False}, flag
    assert any(config.num_heads * config.head_dim != config.hidden_size for config in configs)


def test_long_prompts_leave_the_original_context():
    """The scaling kinds change little within the original context."""
    for name in MODELS:
        rope = Transformer.from_pretrained(GOLDEN / name).config.rope
        assert rope.original_positions < 200
