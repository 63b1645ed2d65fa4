"""The engine compared with the transformers library, on the data of golden/make_golden.py."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from dense_runs import run_dense
from oracles.engine import DenseKvCache
from pace import half
from places import GOLDEN, MODELS, in_every_build
from seeded_weights import SEEDED, golden_folder

from kvcache.engine import InferenceEngine, ModelConfig, SamplingParams, Transformer
from kvcache.networks.families import FAMILIES

PROMPT_LENGTHS = (1, 15, 16, 17, 33, 200)
CHUNKS = half((1, 7, 16, 64, 512))
# A text in pieces of as many tokens as it has, or more, is one piece: of such sizes the first.
CUTS = [(n, size) for n in PROMPT_LENGTHS for i, size in enumerate(CHUNKS) if i == 0 or CHUNKS[i - 1] < n]
TOLERANCE = 1e-4
NOISE = 2e-6  # of the largest logit: float32 against float64
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=64)


class DenseEngine(InferenceEngine):
    """The engine over the naive cache: its errors are not those of a kernel."""

    def _make_cache(self, **options):
        return DenseKvCache(**options)


# The naive cache keeps every token of every layer: the engine gives it no windows.
ENGINES = [(name, InferenceEngine) for name in MODELS]
ENGINES += [(name, DenseEngine) for name in MODELS if not any(ModelConfig.from_pretrained(GOLDEN / name).windows)]


def loaded(name):
    with np.load(GOLDEN / name / "golden.npz") as arrays:
        return Transformer.from_pretrained(GOLDEN / name), dict(arrays)


@pytest.fixture(scope="module", params=in_every_build(MODELS))
def network(request):
    """A loaded network and its reference arrays."""
    return loaded(request.param)


@pytest.fixture(
    scope="module",
    params=in_every_build(ENGINES, lambda pair: pair[0]),
    ids=lambda pair: f"{pair[0]}-{pair[1].__name__}",
)
def engine_of(request):
    """A golden network's name, and an engine that runs it."""
    return request.param


@pytest.fixture(scope="module")
def golden(engine_of):
    """A loaded network and its reference arrays."""
    return loaded(engine_of[0])


@pytest.fixture(scope="module")
def engine_class(engine_of):
    return engine_of[1]


def test_networks(network):
    """The network alone, by naive attention: every position, compared with float64.

    To `NOISE`. Where float32 rounds by more than that, as the distance of transformers in float32 shows, to twice
    that distance.
    """
    model, arrays = network
    for length in PROMPT_LENGTHS:
        expected, theirs = arrays[f"exact_{length}"], arrays[f"logits_{length}"]
        largest, rounding = np.abs(expected).max(), np.abs(theirs - expected).max()
        for chunk in (None, *(size for size in (7, 33) if size < length)):
            rows = run_dense(model, arrays[f"prompt_{length}"], chunk)[arrays[f"positions_{length}"]]
            bound = max(NOISE * largest, 2 * rounding)
            np.testing.assert_allclose(rows, expected, rtol=0, atol=bound, err_msg=f"{length} in pieces of {chunk}")


def test_a_position_that_no_text_of_the_regime_has():
    """A text beyond the original context has the long factors from its first token on."""
    model, _ = loaded("phi3_longrope")
    assert [model.regime(n) for n in (1, 64, 65, 512)] == [0, 0, 1, 1]
    tokens = np.arange(65, dtype=np.uint32)
    short, long = run_dense(model, tokens[:64]), run_dense(model, tokens)[:64]
    assert np.abs(short - long).max() > 0.1
    for regime in (0, 2, -1):
        with pytest.raises(ValueError, match=f"regime: expected that of a text with these positions, got {regime}"):
            run_dense(model, tokens, regime=regime)
    with pytest.raises(ValueError, match="regime: expected that of a text"):
        run_dense(loaded("llama")[0], tokens, regime=1)


def test_networks_continue_greedily(network):
    """Each token is that of the text so far, in the regime of its length."""
    model, arrays = network
    for length in PROMPT_LENGTHS:
        text = np.concatenate([arrays[f"prompt_{length}"], arrays[f"greedy_{length}"]])
        ends = np.arange(length, len(text))
        regimes = np.array([model.regime(end) for end in ends])
        for regime in set(regimes.tolist()):
            last = int(ends[regimes == regime].max())
            choices = run_dense(model, text[:last], regime=regime).argmax(axis=1)
            for end in ends[regimes == regime]:
                assert choices[end - 1] == text[end], length


def test_logits(golden, engine_class):
    model, arrays = golden
    for length, chunk in CUTS:
        engine = engine_class(model, prefill_chunk=chunk)
        logits = engine.prefill_from_pos(arrays[f"prompt_{length}"], 0)
        expected, cut = arrays[f"logits_{length}"][-1], f"{length} in pieces of {chunk}"
        np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE, err_msg=cut)
        engine.check()


def test_logits_of_every_position_by_decoding(golden, engine_class):
    model, arrays = golden
    for length in PROMPT_LENGTHS:
        engine = engine_class(model)
        prompt = arrays[f"prompt_{length}"]
        rows = np.array([engine.decode_step(token, pos) for pos, token in enumerate(prompt)])
        positions = arrays[f"positions_{length}"]
        # The reference saw the whole text at once: its first tokens too have the angles of a text of that length.
        same = np.array([model.regime(pos + 1) == model.regime(length) for pos in positions])
        expected = arrays[f"logits_{length}"][same]
        np.testing.assert_allclose(rows[positions[same]], expected, rtol=0, atol=TOLERANCE, err_msg=f"{length} tokens")


@pytest.mark.one_build
def test_greedy_continuation(golden, engine_class):
    model, arrays = golden
    for length, chunk in zip(PROMPT_LENGTHS, (64, 7, 7, 64, 64, 7), strict=True):
        engine = engine_class(model, prefill_chunk=chunk)
        assert engine.generate(arrays[f"prompt_{length}"], GREEDY) == arrays[f"greedy_{length}"].tolist(), length
        engine.check()


def test_scores_are_the_log_softmax(golden, engine_class):
    model, arrays = golden
    prompt, logits = arrays["prompt_33"], arrays["logits_33"][:-1].astype(np.float64)
    expected = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[np.arange(32), prompt[1:]]
    for chunk in CHUNKS:
        scores = engine_class(model, prefill_chunk=chunk).score(prompt)
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, expected, rtol=0, atol=TOLERANCE, err_msg=f"pieces of {chunk}")


def test_the_error_of_compressed_caches(network):
    """The root mean square error of the logits, whose spread is about 3; random networks amplify noise."""
    model, arrays = network
    for dtype, bound in (("f16", 0.01), ("q8", 0.1), ("q4", 1.5)):
        logits = InferenceEngine(model, dtype=dtype).prefill_from_pos(arrays["prompt_200"], 0)
        error = float(np.sqrt(np.mean((logits - arrays["logits_200"][-1]) ** 2)))
        assert 0 < error < bound, dtype


@pytest.mark.parametrize("name", in_every_build(MODELS))
def test_older_spelling_of_rope(name, tmp_path):
    """Files from before transformers 5 have `rope_theta` and `rope_scaling`, with the kind as `rope_type` or `type`."""
    shutil.copytree(GOLDEN / name, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    if "sliding_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    config["partial_rotary_factor"] = rope.pop("partial_rotary_factor", 1.0)
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Transformer.from_pretrained(tmp_path).config == Transformer.from_pretrained(GOLDEN / name).config


def test_every_feature_has_a_model():
    configs = [ModelConfig.from_pretrained(golden_folder(name)) for name in MODELS + SEEDED]
    assert {config.rope.kind for config in configs} == {"default", "divided", "linear", "llama3", "yarn", "longrope"}
    elsewhere = {"BailingMoeV2ForCausalLM"}  # which transformers has not: test_chosen_experts.py
    assert {config.architecture for config in configs} | elsewhere == set(FAMILIES)
    for flag in ("qkv_bias", "output_bias", "mlp_bias", "tie_word_embeddings", "value_norm", "head_bias",
                 "layer_scales", "chunked"):
        assert {getattr(config, flag) for config in configs} == {True, False}, flag
    for flag in ("normalise", "sigmoid", "bias", "before"):
        assert {getattr(each.experts.choice, flag) for each in configs if each.experts} == {True, False}, flag
    assert {each.experts.choice.best for each in configs if each.experts and each.experts.choice.groups > 1} == {1, 2}
    for part in ("window_rope", "attention_scale", "attention_softcap", "logit_softcap", "unrotated_growth"):
        assert {getattr(config, part) is None for config in configs} == {True, False}, part
    for name in ("embedding_scale", "residual_scale", "logit_scale"):
        assert any(getattr(config, name) != 1 for config in configs), name
    assert {config.qk_norm for config in configs} == {"", "head", "all", "turned", "layer", "plain", "unit"}
    assert {(config.norm, config.norm_bias) for config in configs} == {
        ("rms", False), ("layer", False), ("layer", True)
    }
    assert {config.norms for config in configs} == {"before", "after", "both", "parallel", "mixed"}
    assert {(config.activation, config.mlp_gate) for config in configs} == {
        ("silu", True), ("gelu_tanh", True), ("clamped", True), ("gelu_tanh", False), ("relu2", False),
        ("xielu", False),
    }
    assert {config.sinks for config in configs} == {"", "all", "windows"}
    assert any(config.layer_inputs for config in configs)
    assert any(config.experts and config.experts.beside for config in configs)
    for part in ("windows", "rotated"):  # layers of both kinds in one network
        assert any(len(set(getattr(config, part))) == 2 for config in configs), part
    assert any(config.rotary_dim < config.head_dim for config in configs)
    assert any(config.num_heads * config.head_dim != config.hidden_size for config in configs)


def test_long_prompts_leave_the_original_context():
    """The scaling kinds change little within the original context."""
    for name in MODELS:
        rope = Transformer.from_pretrained(GOLDEN / name).config.rope
        assert rope.original_positions < 200
