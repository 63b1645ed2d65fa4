"""Types of weights in GGUF files: what a network keeps of them, and what it loses."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
from engines import GREEDY
from gguf_files import convert, entries_of, name_of, tensors_of, with_rows_for_llama, write
from network_weights import assert_same_weights, float32
from places import GOLDEN
from tensor_files import pack_arrays

from kvcache.engine import InferenceEngine, ModelConfig, Transformer
from kvcache.gguf import blocks
from kvcache.networks import names
from kvcache.networks.checkpoint import Checkpoint
from kvcache.networks.fingerprint import fingerprint
from kvcache.networks.gguf import GgufCheckpoint

pytestmark = pytest.mark.no_level

SIMPLE = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")  # types that the gguf package can make


@pytest.mark.parametrize("kind", SIMPLE)
@pytest.mark.parametrize("name", ["llama", "qwen3_tied"])
def test_quantised_weights(tmp_path, name, kind):
    """Matrices in each type: what the gguf package makes of them, and the network's result with those weights."""
    config = ModelConfig.from_pretrained(GOLDEN / name)
    stored = tensors_of(GOLDEN / name, config, kind)
    model = Transformer.from_pretrained(convert(GOLDEN / name, tmp_path / "x.gguf", kind))
    layer, folder = model.weights.layers[1], Checkpoint(GOLDEN / name)

    def expected(tensor, heads=None):
        content = stored[name_of(tensor)]
        if isinstance(content, tuple):
            content = gguf.quants.dequantize(content[0], gguf.GGMLQuantizationType[kind])
        if heads and name == "llama":  # back to the order of the folder
            content = content.reshape(heads, -1, 2, content.shape[1]).swapaxes(1, 2).reshape(content.shape)
        assert content.shape == folder.read(tensor).shape
        return content

    at = "model.layers.1."
    qkv = [
        expected(at + "self_attn.q_proj.weight", config.num_heads),
        expected(at + "self_attn.k_proj.weight", config.num_kv_heads),
        expected(at + "self_attn.v_proj.weight"),
    ]
    for matrix, want in (
        (layer.qkv, np.concatenate(qkv)),
        (layer.output, expected(at + "self_attn.o_proj.weight")),
        (layer.mlps[0].down, expected(at + "mlp.down_proj.weight")),
        (model.weights.embedding, expected("model.embed_tokens.weight")),
    ):
        np.testing.assert_array_equal(float32(matrix), want)
    exact = float32(Transformer.from_pretrained(GOLDEN / name).weights.layers[1].qkv)
    assert 0 < np.abs(float32(layer.qkv) - exact).max() < 0.2 * np.abs(exact).max() or kind == "BF16"


LARGE = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 64, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
}


def random_tensors(rng, config, kind):
    """`(of the GGUF file, of the folder)`: random blocks of small scales, and what they stand for."""
    stored, plain = {}, {}
    quantised = gguf.GGMLQuantizationType[kind]
    for name, shape in names.tensors_of(config):
        if len(shape) == 1:
            plain[name] = stored[name_of(name)] = rng.standard_normal(shape, np.float32)
            continue
        raw = rng.integers(0, 256, (shape[0], blocks.row_bytes(kind, shape[1])), dtype=np.uint8)
        each = raw.reshape(-1, gguf.GGML_QUANT_SIZES[quantised][1])
        scales = (rng.standard_normal((len(each), 2)) * 1e-4).astype("<f2").view(np.uint8)
        if kind in ("MXFP4", "NVFP4"):
            low, high, count = (110, 120, 1) if kind == "MXFP4" else (0, 24, 4)
            each[:, :count] = rng.integers(low, high, (len(each), count))
        else:
            place = SCALES[kind]
            each[:, place] = scales[:, : len(range(*place.indices(each.shape[1])))]
        stored[name_of(name)] = raw, kind
        rows = gguf.quants.dequantize(raw, quantised)
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        if heads:
            rows = rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
            np.testing.assert_array_equal(with_rows_for_llama(rows, heads), gguf.quants.dequantize(raw, quantised))
        plain[name] = np.ascontiguousarray(rows, np.float32)
    return stored, plain


# Where a block has its scale, or its scale and its minimum.
SCALES = {
    "Q2_K": slice(80, 84), "Q3_K": slice(108, 110), "Q4_K": slice(0, 4), "Q5_K": slice(0, 4), "Q6_K": slice(208, 210),
    "IQ4_NL": slice(0, 2), "IQ4_XS": slice(0, 2),
}


@pytest.mark.parametrize("kind", [*SCALES, "MXFP4", "NVFP4"])
def test_k_types(tmp_path, rng, kind):
    """Types that the package can only read: random blocks, the same network as a folder of float32."""
    config = ModelConfig.from_dict(LARGE)
    stored, plain = random_tensors(rng, config, kind)
    letters, entries = entries_of(config, LARGE)
    path = write(tmp_path / "x.gguf", letters, entries, stored)
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    (tmp_path / "model.safetensors").write_bytes(pack_arrays(plain))
    expected = Transformer.from_pretrained(tmp_path)
    stored = Transformer.from_pretrained(path)
    assert_same_weights(stored, expected)
    assert stored.weights.layers[0].output.format == kind.lower()
    found = Transformer.from_pretrained(path, weights="f32")
    assert_same_weights(found, expected)
    assert fingerprint(found) == fingerprint(expected)
    prompt = np.arange(5, 45)
    answers = [InferenceEngine(model).generate(prompt, GREEDY) for model in (found, expected)]
    assert answers[0] == answers[1]


def test_rows_of_any_range(tmp_path, rng):
    """`rows` returns those of the original order, whatever the range and the heads that it cuts."""
    config = ModelConfig.from_dict(LARGE)
    stored, plain = random_tensors(rng, config, "Q4_K")
    letters, entries = entries_of(config, LARGE)
    checkpoint = GgufCheckpoint(write(tmp_path / "x.gguf", letters, entries, stored))
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        rows = plain[name]
        assert checkpoint.format(name) == "q4_k"
        for first, stop in ((0, len(rows)), (0, 1), (63, 65), (1, 200), (len(rows) - 1, len(rows)), (5, 5)):
            found = checkpoint.rows(name, first, stop)
            assert found.format == "q4_k"
            np.testing.assert_array_equal(found.to_float32(), rows[first:stop])


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "phi3_longrope"])
def test_stacked_and_fused_tensors_of_small_floats(tmp_path, name):
    """Experts in MXFP4, as the files of gpt-oss have them, and fused matrices: the same as their values in F32."""
    config = ModelConfig.from_pretrained(GOLDEN / name)
    content = json.loads((GOLDEN / name / "config.json").read_text())
    letters, entries = entries_of(config, content)
    packed = tensors_of(GOLDEN / name, config, "MXFP4")
    kind = gguf.GGMLQuantizationType.MXFP4
    plain = {
        key: gguf.quants.dequantize(value[0], kind) if isinstance(value, tuple) else value
        for key, value in packed.items()
    }
    found = Transformer.from_pretrained(write(tmp_path / "x.gguf", letters, entries, packed))
    expected = Transformer.from_pretrained(write(tmp_path / "y.gguf", letters, entries, plain))
    assert_same_weights(found, expected)
    assert any("mxfp4" in mlp.gate_up.format for layer in found.weights.layers for mlp in layer.mlps)
