"""Quantised folders: the same network as a folder of float32 with the numbers that the packed ones stand for.

The packing here is that of the writers (transformers, compressed-tensors, GPTQ, AWQ), by their definitions. Small
floats are those of ml_dtypes.
"""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from dense_runs import run_dense
from network_weights import assert_same_weights
from places import GOLDEN
from tensor_files import pack_arrays

from kvcache.engine import ModelConfig, Transformer
from kvcache.errors import CheckpointError
from kvcache.networks.checkpoint import Checkpoint
from kvcache.networks.names import tensors_of
from kvcache.networks.packed_matrices import _E4M3

pytestmark = pytest.mark.one_build

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "vocab_size": 64, "num_key_value_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 64,
}
COMPRESSED = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
PACKED = COMPRESSED | {"format": "pack-quantized"}


def words(codes, bits, axis):
    """Codes as 32-bit words, the lowest bits first, along an axis."""
    moved = np.moveaxis(codes, axis, -1).astype(np.uint32)
    moved = moved.reshape(*moved.shape[:-1], -1, 32 // bits) << np.arange(0, 32, bits, dtype=np.uint32)
    return np.ascontiguousarray(np.moveaxis(moved.sum(-1, dtype=np.uint32), -1, axis)).view(np.int32)


def wide(values, columns):
    """Values of groups, for each channel."""
    return np.repeat(values, columns // values.shape[1], axis=1)


def scales_of(rng, rows, groups, dtype=np.float16):
    return ((rng.random((rows, groups)) + 0.5) * 0.02).astype(dtype)


def fp8(rng, rows, columns, block=None, name="weight_scale_inv", dtype=np.float32):
    raw = (rng.standard_normal((rows, columns)) * 60).astype(ml_dtypes.float8_e4m3fn)
    height, width = block or (rows, columns)
    scales = scales_of(rng, -(-rows // height), -(-columns // width), dtype) / 60
    spread = np.repeat(np.repeat(scales.astype(np.float32), height, axis=0), width, axis=1)[:rows, :columns]
    stored = scales.reshape(()) if block is None else scales
    return raw.astype(np.float32) * spread, {"weight": raw, name: stored}


def fp8_blocks(rng, rows, columns):
    return fp8(rng, rows, columns, (48, 40), dtype=ml_dtypes.bfloat16)


def fp8_wide(rng, rows, columns):
    return fp8(rng, rows, columns, (48, 256))


def fp8_rows(rng, rows, columns):
    value, parts = fp8(rng, rows, columns, (1, columns), "weight_scale")
    return value, parts | {"input_scale": np.ones(1, np.float32)}


def int8(rng, rows, columns, groups=1):
    codes, scales = rng.integers(-128, 128, (rows, columns)).astype(np.int8), scales_of(rng, rows, groups) / 8
    zeros = np.zeros(scales.shape, np.int8)
    return codes * wide(scales.astype(np.float32), columns), {
        "weight": codes, "weight_scale": scales, "weight_zero_point": zeros,
    }


def int8_groups(rng, rows, columns):
    return int8(rng, rows, columns, columns // 64)


def packed(rng, rows, columns, bits=4, groups=4, zeros=None, dtype=ml_dtypes.bfloat16):
    codes = rng.integers(0, 1 << bits, (rows, columns))
    scales = scales_of(rng, rows, groups, dtype)
    parts = {"weight_packed": words(codes, bits, 1), "weight_scale": scales, "weight_shape": np.array([rows, columns])}
    middle = 1 << bits - 1
    if zeros is not None:
        middle = zeros = rng.integers(0, 1 << bits, (rows, groups))
        parts["weight_zero_point"] = words(zeros, bits, 0)
        middle = wide(zeros, columns)
    return (codes - middle) * wide(scales.astype(np.float32), columns), parts


def packed_rows(rng, rows, columns):
    value, parts = packed(rng, rows, columns, groups=1, dtype=np.float16)
    return value, parts | {"weight_g_idx": np.zeros(columns, np.int32)}


def packed_8(rng, rows, columns):
    return packed(rng, rows, columns, bits=8, groups=2)


def packed_zeros(rng, rows, columns):
    return packed(rng, rows, columns, zeros=True)


def gptq(rng, rows, columns, bits=4, less=1, symmetric=True, size=32):
    groups = columns // size
    codes, scales = rng.integers(0, 1 << bits, (columns, rows)), scales_of(rng, rows, groups)
    zeros = np.full((groups, rows), 1 << bits - 1) if symmetric else rng.integers(1, 1 << bits, (groups, rows))
    value = (codes.T - wide(zeros.T, columns)) * wide(scales.astype(np.float32), columns)
    return value, {
        "qweight": words(codes, bits, 0), "qzeros": words(zeros - less, bits, 1),
        "scales": np.ascontiguousarray(scales.T), "g_idx": (np.arange(columns) // size).astype(np.int32),
        "bias": np.zeros(rows, np.float16),
    }


def gptq_v2(rng, rows, columns):
    return gptq(rng, rows, columns, less=0)


def gptq_8(rng, rows, columns):
    return gptq(rng, rows, columns, bits=8)


def gptq_zeros(rng, rows, columns):
    return gptq(rng, rows, columns, symmetric=False)


def awq(rng, rows, columns):
    order, groups = [0, 2, 4, 6, 1, 3, 5, 7], columns // 64
    codes, zeros = rng.integers(0, 16, (columns, rows)), rng.integers(0, 16, (groups, rows))
    scales = scales_of(rng, rows, groups)

    def in_order(values):
        return words(values.reshape(len(values), -1, 8)[..., order].reshape(values.shape), 4, 1)

    value = (codes.T - wide(zeros.T, columns)) * wide(scales.astype(np.float32), columns)
    return value, {"qweight": in_order(codes), "qzeros": in_order(zeros), "scales": np.ascontiguousarray(scales.T)}


def small(rng, rows, columns, channels, dtype):
    """4-bit floats and their scales: `(values, parts)`."""
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    low, high = (120, 124) if channels == 32 else (0, 127)
    scales = rng.integers(low, high, (rows, columns // channels), dtype=np.uint8)
    floats = codes.astype(ml_dtypes.uint4).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    value = floats * np.repeat(scales.view(dtype).astype(np.float64), channels, axis=1)
    return value, {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales}


def mxfp4(rng, rows, columns):
    return small(rng, rows, columns, 32, ml_dtypes.float8_e8m0fnu)


def nvfp4(rng, rows, columns):
    value, parts = small(rng, rows, columns, 16, ml_dtypes.float8_e4m3fn)
    parts["weight_scale"] = parts["weight_scale"].view(ml_dtypes.float8_e4m3fn)
    return value / np.float32(3000), parts | {
        "weight_global_scale": np.full(1, 3000, np.float32), "input_global_scale": np.ones(1, np.float32),
    }


def nvfp4_2(rng, rows, columns):
    value, parts = small(rng, rows, columns, 16, ml_dtypes.float8_e4m3fn)
    scales = parts["weight_scale"].view(ml_dtypes.float8_e4m3fn)
    return value * 2.0**-11, {
        "weight": parts["weight_packed"], "weight_scale": scales, "weight_scale_2": np.array(2.0**-11, np.float32),
        "input_scale": np.array(1, np.float32), "k_scale": np.array(1, np.float32),
    }


def fp8_one(rng, rows, columns):
    value, parts = fp8(rng, rows, columns)
    return value, {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"]}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
# How a matrix is packed, what config.json says, the format that it becomes, and the share of the largest weight that
# this may lose.
CASES = {
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": None}, "f16", 2.0**-11),
    "fp8 blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [48, 40]}, "f16", 2.0**-11),
    "fp8 wide blocks": (fp8_wide, {"quant_method": "fp8", "weight_block_size": [48, 256]}, "f16", 2.0**-11),
    "float rows": (fp8_rows, COMPRESSED | {"format": "float-quantized"}, "f16", 2.0**-11),
    "int rows": (int8, COMPRESSED | {"format": "int-quantized"}, "q8_0", 0),
    "int groups": (int8_groups, COMPRESSED | {"format": "int-quantized"}, "q8_0", 0),
    "packed": (packed, PACKED, "q4_0", 0),
    "packed rows": (packed_rows, PACKED, "q4_0", 0),
    "packed 8 bits": (packed_8, PACKED, "q8_0", 0),
    "packed with zeros": (packed_zeros, PACKED, "q4_1", 2.0**-10),
    "gptq": (gptq, GPTQ, "q4_0", 0),
    "gptq_v2": (gptq_v2, GPTQ | {"checkpoint_format": "gptq_v2"}, "q4_0", 0),
    "gptq_v2 that says gptq": (gptq_v2, GPTQ | {"checkpoint_format": "gptq"}, "q4_0", 0),
    "gptq 8 bits": (gptq_8, GPTQ | {"bits": 8}, "q8_0", 0),
    "gptq with zeros": (gptq_zeros, GPTQ | {"sym": False}, "q4_1", 2.0**-10),
    "mxfp4": (mxfp4, COMPRESSED | {"format": "mxfp4-pack-quantized"}, "mxfp4", 0),
    "nvfp4": (nvfp4, COMPRESSED | {"format": "nvfp4-pack-quantized"}, "nvfp4", 2.0**-22),
    "nvfp4 of modelopt": (nvfp4_2, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 0),
    "fp8 of modelopt": (fp8_one, {"quant_method": "modelopt", "quant_algo": "FP8"}, "f16", 2.0**-11),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, "q4_1", 2.0**-10),
}


def folders(rng, place, pack, said, config=CONFIG):
    """A plain folder and the quantised one."""
    plain, quantised = {}, {}
    for name, shape in tensors_of(ModelConfig.from_dict(config)):
        if len(shape) == 1 or "proj" not in name:
            plain[name] = quantised[name] = rng.standard_normal(shape, np.float32)
            continue
        value, parts = pack(rng, *shape)
        plain[name] = value.astype(np.float32)
        stem = name.removesuffix("weight")
        quantised |= {f"{stem}{key}": part for key, part in parts.items()}
    save(place / "plain", config, plain)
    save(place / "quantised", config | {"quantization_config": said}, quantised)
    return place / "plain", place / "quantised", quantised


def save(folder, config, arrays):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(pack_arrays(arrays))


@pytest.mark.parametrize("case", CASES)
def test_the_same_network(rng, tmp_path, monkeypatch, case):
    pack, said, kept, lost = CASES[case]
    plain, quantised, _ = folders(rng, tmp_path, pack, said)
    expected, found = Transformer.from_pretrained(plain), Transformer.from_pretrained(quantised)
    assert_same_weights(found, expected, lost)
    layer = found.weights.layers[1]
    assert {layer.qkv.format, layer.output.format, layer.mlps[0].gate_up.format, layer.mlps[0].down.format} == {kept}
    assert_same_weights(Transformer.from_pretrained(quantised, weights="f32"), expected, 2.0**-22)
    monkeypatch.setattr("kvcache.networks.weights._BAND_BYTES", 7 * 128 * 4)  # seven rows at a time
    assert_same_weights(Transformer.from_pretrained(quantised), found)


def test_the_file_of_modelopt(rng, tmp_path):
    """Older folders say in a file of its own how they are quantised."""
    _, folder, arrays = folders(rng, tmp_path, nvfp4_2, CASES["nvfp4 of modelopt"][1])
    expected = Transformer.from_pretrained(folder)
    save(folder, CONFIG, arrays)
    quantised = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    said = {"producer": {"name": "modelopt"}, "quantization": quantised}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    assert_same_weights(Transformer.from_pretrained(folder), expected)
    said["quantization"]["quant_algo"] = "INT4_AWQ"
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=r"quantization\.quant_algo: expected NVFP4 or FP8, got 'INT4_AWQ'"):
        Transformer.from_pretrained(folder)


@pytest.mark.parametrize("case", ["mxfp4", "nvfp4", "packed", "int rows"])
def test_what_is_smaller_than_asked_for_stays(rng, tmp_path, case):
    """`weights="q8"` packs the floats; codes of as many bits or fewer are those of the file."""
    pack, said, kept, _ = CASES[case]
    _, folder, _ = folders(rng, tmp_path, pack, said)
    expected, found = (Transformer.from_pretrained(folder, weights=weights) for weights in ("auto", "q8"))
    assert {expected.weights.embedding.format, found.weights.embedding.format} == {"f32", "q8_0"}
    for mine, theirs in zip(found.weights.layers, expected.weights.layers, strict=True):
        assert {mine.qkv.format, mine.output.format, mine.mlps[0].down.format} == {kept}
        np.testing.assert_array_equal(mine.output.to_float32(), theirs.output.to_float32())
    small = Transformer.from_pretrained(folder, weights="q4")
    assert small.weights.layers[0].output.format == ("q4_1" if kept == "q8_0" else kept)


def test_every_byte_of_e4m3():
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(_E4M3, values)


def test_gpt_oss_as_it_is_published(rng, tmp_path):
    """Experts in MXFP4, rows of gate and up in turn: the same as the transposed tensors of the unpacked folder."""
    content = json.loads((GOLDEN / "gpt_oss" / "config.json").read_text()) | {"intermediate_size": 96}
    hidden, inner, experts = content["hidden_size"], 96, content["num_local_experts"]
    checkpoint = Checkpoint(GOLDEN / "gpt_oss")
    plain, packed_ = {}, {}
    for name in checkpoint.names():
        value, stem = checkpoint.read(name), name.removesuffix("_bias")
        rows, columns = (2 * inner, hidden) if "gate_up" in stem else (hidden, inner)
        if ".experts." not in name:
            plain[name] = packed_[name] = value
        elif name != stem:
            plain[name] = packed_[name] = rng.standard_normal((experts, rows)).astype(np.float32)
        else:
            nibbles = rng.integers(0, 16, (experts, rows, columns), dtype=np.uint8)
            exponents = rng.integers(118, 125, (experts, rows, columns // 32), dtype=np.uint8)
            scales = exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
            floats = nibbles.astype(ml_dtypes.uint4).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
            plain[name] = np.ascontiguousarray((floats * np.repeat(scales, 32, axis=2)).swapaxes(1, 2))
            blocks = nibbles.reshape(experts, rows, -1, 16, 2)
            packed_ |= {f"{name}_blocks": blocks[..., 0] | blocks[..., 1] << 4, f"{name}_scales": exponents}
    save(tmp_path / "plain", content, plain)
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    save(tmp_path / "packed", content | {"quantization_config": said}, packed_)
    expected, found = (Transformer.from_pretrained(tmp_path / name) for name in ("plain", "packed"))
    assert_same_weights(found, expected)
    assert {mlp.down.format for layer in found.weights.layers for mlp in layer.mlps} == {"mxfp4"}
    tokens = np.arange(30, dtype=np.uint32)
    exact = Transformer(found.config, found.weights, "exact")
    np.testing.assert_allclose(run_dense(exact, tokens), run_dense(expected, tokens), rtol=0, atol=1e-2)


def test_a_text_network_inside_a_larger_one(rng, tmp_path):
    """Instruct folders of Ministral 3: 8-bit floats with a scale each, under the prefix of the text network."""
    content = json.loads((GOLDEN / "towers" / "mistral3" / "config.json").read_text())
    checkpoint, plain, quantised = Checkpoint(GOLDEN / "towers" / "mistral3"), {}, {}
    for name in checkpoint.names():
        value = plain[name] = quantised[name] = checkpoint.read(name)
        if name.startswith("language_model.model.layers.") and value.ndim == 2:
            value, parts = fp8(rng, *value.shape, dtype=ml_dtypes.bfloat16)
            plain[name] = value.astype(np.float32)
            parts["activation_scale"] = np.ones((), np.float32)
            quantised |= {f"{name.removesuffix('weight')}{key}": part for key, part in parts.items()}
    said = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static", "dequantize": False}
    save(tmp_path / "plain", content, plain)
    save(tmp_path / "quantised", content | {"quantization_config": said}, quantised)
    expected, found = (Transformer.from_pretrained(tmp_path / name) for name in ("plain", "quantised"))
    assert_same_weights(found, expected, 2.0**-11)
    assert {layer.output.format for layer in found.weights.layers} == {"f16"}


WRONG = {
    "no scales": ("packed", {".weight_scale": None}, "weight_scale: expected a tensor beside .*, got none"),
    "scales of another matrix": ("packed", {".weight_scale": (7, 4)}, r"weight_scale: expected .*128, 4\), got .*7, 4"),
    "small groups": ("packed", {".weight_scale": (128, 8)}, "expected groups of a multiple of 32 channels, got 8"),
    "another shape": ("packed", {".weight_shape": np.array([128, 96])}, "weight_shape: expected the shape of 128 rows"),
    "no shape": ("packed", {".weight_shape": np.array([0, 0])}, "weight_shape: expected the shape of 128 rows"),
    "words that are none": ("packed", {".weight_packed": (128, 16)}, "weight_packed: expected I32 of 2 axes, got F32"),
    "another order": (
        "gptq", {".g_idx": (np.arange(128) % 4).astype(np.int32)},
        r"g_idx: expected channels in the order of their groups, got another order \(desc_act\)",
    ),
    "a bias": ("gptq", {".bias": np.ones(128, np.float16)}, "expected no others, got the tensors .*bias"),
    "zeros of symmetric numbers": (
        "gptq", {".qzeros": np.zeros((4, 16), np.int32)},
        "qzeros: expected zeros of 8, those of symmetric numbers, got others",
    ),
    "zeros in 8 bits": ("gptq 8 bits", {".qzeros": np.zeros((4, 32), np.int32)}, "qzeros: expected zeros of 128,"),
    "zeros of bytes": ("int rows", {".weight_zero_point": np.ones((128, 1), np.int8)}, "point: expected zeros of 0,"),
    "zeros beside 8 bits": (
        "packed 8 bits", {".weight_zero_point": np.zeros((32, 2), np.int32)}, "expected 8 bits without zeros,",
    ),
    "no numbers": ("fp8", {".weight": np.full((128, 128), 0x7F, np.uint8).view(ml_dtypes.float8_e4m3fn)}, "finite"),
    "other blocks": ("fp8 blocks", {".weight_scale_inv": (2, 3)}, "weight_scale_inv: expected .* got .*2, 3"),
    "a scale of the cache": ("float rows", {".k_scale": (1,)}, "expected no others, got the tensors .*k_scale"),
    "no factor": ("nvfp4", {".weight_global_scale": None}, "weight_scale_2: expected a tensor beside .*, got none"),
    "a factor of 0": ("nvfp4", {".weight_global_scale": np.zeros(1, np.float32)}, "units: expected finite numbers"),
    "no number of 8 bits": ("mxfp4", {".weight_scale": np.full((128, 4), 255, np.uint8)}, "scales: expected 0 to 254"),
    "negative scales": (
        "nvfp4", {".weight_scale": np.full((128, 8), -1, ml_dtypes.float8_e4m3fn)}, "scales: expected 0 to 126, got",
    ),
    "scales of other groups": ("mxfp4", {".weight_scale": np.ones((128, 8), np.uint8)}, "weight_scale: expected U8 or"),
    "small floats in words": ("mxfp4", {".weight_packed": (128, 64)}, "weight_packed: expected I32 of 2 axes, got F32"),
    "a matrix of half the size": ("int rows", {".weight": np.ones((64, 128), np.int8)}, "weight"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_damaged(rng, tmp_path, fault):
    case, changes, message = WRONG[fault]
    _, folder, arrays = folders(rng, tmp_path, *CASES[case][:2])
    for key, value in changes.items():
        name = f"model.layers.1.self_attn.o_proj{key}"
        arrays.pop(name, None)
        if value is not None:
            arrays[name] = np.ones(value, np.float32) if isinstance(value, tuple) else value
    save(folder, json.loads((folder / "config.json").read_text()), arrays)
    with pytest.raises(CheckpointError, match=message) as error:
        Transformer.from_pretrained(folder)
    assert "o_proj" in str(error.value)


SAID = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "expected one of mxfp4, .*, got quant_method 'bitsandb"),
    ({"bits": 4}, "quantization_config: expected one of mxfp4, .*, got {'bits': 4}"),
    ([], r"quantization_config: expected one of mxfp4, .*, got \[\]"),
    ({"quant_method": ["gptq"]}, r"got quant_method \['gptq'\] of"),
    ({"quant_method": "mxfp4"}, "quantization_config: expected mxfp4 for gpt_oss alone, got it for llama"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "quantization_config.fmt: expected e4m3, got 'e5m2'"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size: expected two positive whole numbers"),
    ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "weight_block_size: expected two positive whole numbers"),
    (COMPRESSED | {"format": "marlin-24"}, "format: expected float-quantized or .*, got 'marlin-24"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo: expected NVFP4 or FP8, got 'W4A8_AWQ'"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size: expected 16, got 32"),
    (PACKED | {"quantization_status": "frozen"}, "quantization_status: expected compressed, got 'frozen'"),
    (PACKED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: expected none, got {'num_bits': 8}"),
    (PACKED | {"transform_config": {"config_groups": {}}}, "transform_config: expected none, got"),
    (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: expected none, got"),
    (
        PACKED | {"config_groups": {str(i): {"weights": {"block_structure": [i + 1, 8]}} for i in range(2)}},
        "config_groups: expected blocks of one size",
    ),
    (GPTQ | {"bits": 3}, "quantization_config.bits: expected 4 or 8, got 3"),
    (GPTQ | {"group_size": 0}, "quantization_config.group_size: expected a positive whole number, got 0"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: expected gptq or gptq_v2, got 'marlin'"),
    (GPTQ | {"dynamic": {"-:lm_head": {}}}, "quantization_config.dynamic: expected none, got"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version: expected gemm or GEMM, got 'gemv'"),
    ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point: expected True, got False"),
    ({"quant_method": "awq", "bits": 8}, "quantization_config.bits: expected 4, got 8"),
]


@pytest.mark.parametrize(("said", "message"), SAID)
def test_refused_by_name(said, message):
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict(CONFIG | {"quantization_config": said})


def test_settings_without_an_effect():
    for said in (
        PACKED | {"kv_cache_scheme": None, "sparsity_config": {"format": "dense"}, "transform_config": {}},
        GPTQ | {"dynamic": {}, "group_size": -1, "true_sequential": True, "damp_percent": 0.1},
        {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": ["lm_head"]},
    ):
        assert ModelConfig.from_dict(CONFIG | {"quantization_config": said}) == ModelConfig.from_dict(CONFIG)
