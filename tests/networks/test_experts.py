"""Experts: the mixture compared with its definition, and their weights in every format and file."""

import shutil

import gguf
import numpy as np
import pytest
from dense_runs import run_dense
from gguf_files import as_converted, convert
from places import GOLDEN
from tensor_files import pack_arrays

from kvcache.engine import Transformer
from kvcache.errors import CheckpointError
from kvcache.kernels.layers import top_experts
from kvcache.networks.checkpoint import Checkpoint
from kvcache.networks.experts import mix_experts

NETWORKS = ("qwen3_moe", "mixtral", "gpt_oss")


@pytest.mark.parametrize(("rows", "experts", "count"), [(1, 4, 2), (17, 5, 3), (64, 8, 1), (3, 6, 6)])
def test_the_definition(rng, rows, experts, count):
    """Each row's sum in the order of its own choice; an expert is called once, with its rows in order, or never."""
    matrices = rng.standard_normal((experts, 8, 8)).astype(np.float32)
    x = rng.standard_normal((rows, 8)).astype(np.float32)
    chosen, weights = top_experts(rng.standard_normal((rows, experts)).astype(np.float32), count, True)
    called = []

    def expert(i, part):
        called.append(i)
        np.testing.assert_array_equal(part, x[(chosen == i).any(axis=1)])
        return np.stack([row @ matrices[i] for row in part])

    out = mix_experts(x, chosen, weights, expert)
    assert called == np.unique(chosen).tolist()
    for row, ids, shares, found in zip(x, chosen, weights, out, strict=True):
        want = np.zeros(8, np.float32)
        for i, share in zip(ids, shares, strict=True):
            want = want + (row @ matrices[i]) * share
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("weights", ["f32", "f16", "q8", "q4"])
@pytest.mark.parametrize("name", NETWORKS)
def test_formats(name, weights):
    """All experts have the format; the router stays as it is stored."""
    exact = Transformer.from_pretrained(GOLDEN / name)
    model = Transformer.from_pretrained(GOLDEN / name, weights=weights, activations="exact")
    layer = model.weights.layers[1]
    assert layer.router.format == "bf16"
    assert len(layer.mlps) == model.config.num_experts
    assert {mlp.gate_up.format for mlp in layer.mlps} == {{"q8": "q8_0", "q4": "q4_1"}.get(weights, weights)}
    tokens = np.arange(3, 40, dtype=np.uint32)
    found, want = run_dense(model, tokens), run_dense(exact, tokens)
    near = {"f32": 1e-5, "f16": 1e-2, "q8": 0.3, "q4": 2.0}[weights]  # another expert may be chosen
    assert np.sqrt(np.mean((found - want) ** 2)) < near


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_stacked_experts_of_gguf(tmp_path, name, kind):
    """Each expert's rows of the stacked tensors, in the type of the file."""
    folder = as_converted(GOLDEN / name, tmp_path / name)
    expected = Transformer.from_pretrained(folder, weights="f32")
    found = Transformer.from_pretrained(convert(folder, tmp_path / "x.gguf", kind))
    quantised = gguf.GGMLQuantizationType[kind]
    for mine, theirs in zip(found.weights.layers, expected.weights.layers, strict=True):
        for a, b in zip(mine.mlps, theirs.mlps, strict=True):
            for matrix, exact in ((a.gate_up, b.gate_up), (a.down, b.down)):
                assert matrix.format == {"BF16": "bf16"}.get(kind, kind.lower())
                stored = gguf.quants.quantize(exact.to_float32(), quantised)
                want = gguf.quants.dequantize(stored, quantised)
                np.testing.assert_allclose(matrix.to_float32(), want, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["gpt_oss", "phi3_longrope", "mixtral"])
def test_small_bands(tmp_path, monkeypatch, name):
    """Tensors that are stored together or transposed, read a few rows at a time, from folders and from GGUF."""
    folder = as_converted(GOLDEN / name, tmp_path / name)
    path = convert(folder, tmp_path / "x.gguf")
    whole = list(Transformer.from_pretrained(folder).weights.arrays())
    monkeypatch.setattr("kvcache.networks.weights._BAND_BYTES", 7 * 64 * 4)
    for found in (Transformer.from_pretrained(folder), Transformer.from_pretrained(path)):
        for a, b in zip(found.weights.arrays(), whole, strict=True):
            a, b = (array if isinstance(array, np.ndarray) else array.to_float32() for array in (a, b))
            np.testing.assert_array_equal(a, b)


def rewritten(tmp_path, name, change):
    """A golden folder whose tensors `change` has edited."""
    shutil.copytree(GOLDEN / name, tmp_path, dirs_exist_ok=True)
    checkpoint = Checkpoint(tmp_path)
    tensors = {tensor: checkpoint.read(tensor) for tensor in checkpoint._files}
    change(tensors)
    (tmp_path / "model.safetensors").write_bytes(pack_arrays(tensors))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w3.weight"),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight"),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj"),
        ("gpt_oss", "model.layers.1.self_attn.sinks"),
        ("phi3_longrope", "model.layers.1.self_attn.qkv_proj.weight"),
        ("gemma3", "model.layers.1.post_feedforward_layernorm.weight"),
        ("olmo2", "model.layers.0.self_attn.k_norm.weight"),
    ],
)
def test_missing(tmp_path, name, tensor):
    with pytest.raises(CheckpointError, match=f"expected the tensors {tensor}, got none"):
        Transformer.from_pretrained(rewritten(tmp_path, name, lambda tensors: tensors.pop(tensor)))


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj", (5, 64, 62)),
        ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj", (4, 64, 64)),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_bias", (5, 63)),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj", (5 * 64, 64)),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.0.w2.weight", (32, 64)),
        ("phi3_longrope", "model.layers.0.mlp.gate_up_proj.weight", (222, 64)),
    ],
)
def test_other_shapes(tmp_path, name, tensor, shape):
    def change(tensors):
        tensors[tensor] = np.ones(shape, np.float32)

    with pytest.raises(CheckpointError, match=rf"{tensor}: expected shape .*, got \({', '.join(map(str, shape))}\)"):
        Transformer.from_pretrained(rewritten(tmp_path, name, change))
