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
from kvcache.errors import CheckpointError
from kvcache.gguf import blocks
from kvcache.networks import names
from kvcache.networks.checkpoint import Checkpoint
from kvcache.networks.fingerprint import fingerprint
from kvcache.networks.gguf import GgufCheckpoint

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


def random_blocks(rng, shape, kind):
    """Rows of random blocks of small scales, and the package's name of their type."""
    quantised = gguf.GGMLQuantizationType[kind]
    raw = rng.integers(0, 256, (shape[0], blocks.row_bytes(kind, shape[1])), dtype=np.uint8)
    each = raw.reshape(-1, gguf.GGML_QUANT_SIZES[quantised][1])
    scales = (rng.standard_normal((len(each), 2)) * 1e-4).astype("<f2").view(np.uint8)
    if kind in ("MXFP4", "NVFP4"):
        low, high, count = (110, 120, 1) if kind == "MXFP4" else (0, 24, 4)
        each[:, :count] = rng.integers(low, high, (len(each), count))
    else:
        place = SCALES[kind]
        each[:, place] = scales[:, : len(range(*place.indices(each.shape[1])))]
    return raw, quantised


def random_tensors(rng, config, kind, others=None):
    """`(of the GGUF file, of the folder)`: random blocks of small scales, and what they stand for.

    `others`: the types of tensors by the ends of their names, where they are not `kind`.
    """
    stored, plain, usual = {}, {}, kind
    for name, shape in names.tensors_of(config):
        kind = next((other for end, other in (others or {}).items() if name.endswith(end)), usual)
        if len(shape) == 1:
            plain[name] = stored[name_of(name)] = rng.standard_normal(shape, np.float32)
            continue
        raw, quantised = random_blocks(rng, shape, kind)
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
    "IQ4_NL": slice(0, 2), "IQ4_XS": slice(0, 2), "IQ3_S": slice(0, 2), "IQ3_XXS": slice(0, 2), "IQ2_S": slice(0, 2),
    "IQ2_XS": slice(0, 2), "IQ2_XXS": slice(0, 2), "Q8_0": slice(0, 2), "IQ1_S": slice(0, 2), "TQ1_0": slice(52, 54),
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
    assert stored.weights.layers[0].output.format == blocks.FORMATS[kind]
    found = Transformer.from_pretrained(path, weights="f32")
    assert_same_weights(found, expected)
    assert fingerprint(found) == fingerprint(expected)
    prompt = np.arange(5, 45)
    answers = [InferenceEngine(model).generate(prompt, GREEDY) for model in (found, expected)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", [*SCALES, "MXFP4", "NVFP4"])
def test_damaged_files_of_each_type(tmp_path, rng, kind):
    """Cut short, or with a scale that is no number: refused, with the name of the file or of the tensor."""
    config = ModelConfig.from_dict(LARGE)
    stored, _ = random_tensors(rng, config, kind)
    letters, entries = entries_of(config, LARGE)
    whole = write(tmp_path / "whole.gguf", letters, entries, stored).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-64])
    with pytest.raises(CheckpointError, match=r"cut\.gguf"):
        Transformer.from_pretrained(tmp_path / "cut.gguf")
    raw, _ = stored["blk.1.ffn_down.weight"]
    last = raw.reshape(-1, raw.shape[1] // (512 // gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]))[-1]
    place = SCALES.get(kind, slice(0, 1))
    last[place] = np.frombuffer(b"\xff\xff\x00\xfc", np.uint8)[: len(range(*place.indices(len(last))))]
    named = r"^model\.layers\.1\.mlp\.down_proj\.weight: (scales|units|minima): expected"
    with pytest.raises(CheckpointError, match=named):
        Transformer.from_pretrained(write(tmp_path / "x.gguf", letters, entries, stored))


def test_factors_of_nvfp4(tmp_path, rng):
    """The factor of a matrix, in a tensor beside it; factors of activations are not used."""
    config = ModelConfig.from_dict(LARGE)
    stored, plain = random_tensors(rng, config, "NVFP4")
    for i, name in enumerate([name for name, content in stored.items() if isinstance(content, tuple)]):
        if name != "token_embd.weight":
            stored[name.replace("weight", "scale")] = np.array([2.0 ** -(i % 5)], np.float32)
            stored[name.replace("weight", "input_scale")] = np.array([7], np.float32)
    for name in plain:
        factor = stored.get(name_of(name).replace("weight", "scale"))
        plain[name] = plain[name] if factor is None else plain[name] * factor
    letters, entries = entries_of(config, LARGE)
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    (tmp_path / "model.safetensors").write_bytes(pack_arrays(plain))
    found = Transformer.from_pretrained(write(tmp_path / "x.gguf", letters, entries, stored))
    assert_same_weights(found, Transformer.from_pretrained(tmp_path))
    stored["blk.1.ffn_up.scale"] = np.ones(2, np.float32)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.scale: expected F32 \(1,\), got F32 \(2,\)"):
        Transformer.from_pretrained(write(tmp_path / "y.gguf", letters, entries, stored))


@pytest.mark.parametrize("factors", [False, True])
def test_experts_in_nvfp4(tmp_path, rng, factors):
    """Each has a factor of its own."""
    content = LARGE | {
        "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }
    config = ModelConfig.from_dict(content)
    stored, plain = {}, {}
    for name, shape in names.tensors_of(config):
        if len(shape) == 1 or ".experts." not in name:
            plain[name] = stored[name_of(name, "qwen3_moe")] = rng.standard_normal(shape, np.float32)
            continue
        raw, _ = random_blocks(rng, shape, "NVFP4")
        expert = int(name.split(".experts.")[1].split(".")[0])
        place = name_of(name.replace(f".experts.{expert}.", ".experts."), "qwen3_moe")
        stored.setdefault(place, []).append(raw)
        factor = np.float32(2.0**-expert if factors else 1)
        plain[name] = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.NVFP4) * factor
    for place in [place for place, each in stored.items() if isinstance(each, list)]:
        stored[place] = np.stack(stored[place]), "NVFP4"
        if factors:
            stored[place.replace("weight", "scale")] = np.array([1, 0.5, 0.25], np.float32)
    letters, entries = entries_of(config, content)
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "model.safetensors").write_bytes(pack_arrays(plain))
    found = Transformer.from_pretrained(write(tmp_path / "x.gguf", letters, entries, stored))
    assert_same_weights(found, Transformer.from_pretrained(tmp_path))
    assert {mlp.down.format for layer in found.weights.layers for mlp in layer.mlps} == {"nvfp4"}


# The types of llama.cpp's mixed files: of most matrices, and of some.
MIXED = {
    "Q4_K_M": ("Q4_K", {"v_proj.weight": "Q6_K", "down_proj.weight": "Q6_K", "embed_tokens.weight": "Q6_K"}),
    "Q5_K_M": ("Q5_K", {"v_proj.weight": "Q6_K", "down_proj.weight": "Q6_K", "embed_tokens.weight": "Q6_K"}),
    "Q6_K": ("Q6_K", {}),
    "MXFP4": ("MXFP4", {"self_attn.q_proj.weight": "Q8_0", "embed_tokens.weight": "Q8_0"}),
}


@pytest.mark.parametrize("name", MIXED)
def test_bytes_in_memory_over_those_of_the_file(tmp_path, rng, name):
    """At most 1.03 times as many, and the weights of the file."""
    config = ModelConfig.from_dict(LARGE)
    stored, plain = random_tensors(rng, config, *MIXED[name])
    letters, entries = entries_of(config, LARGE)
    model = Transformer.from_pretrained(write(tmp_path / "x.gguf", letters, entries, stored))
    size = sum(each[0].nbytes if isinstance(each, tuple) else each.nbytes for each in stored.values())
    assert size <= model.weights.nbytes <= 1.03 * size
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    (tmp_path / "model.safetensors").write_bytes(pack_arrays(plain))
    assert_same_weights(model, Transformer.from_pretrained(tmp_path))


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
