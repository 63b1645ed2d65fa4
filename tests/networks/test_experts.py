"""Experts: the mixture compared with its definition, and their weights in every format and file."""

import json
import shutil
from dataclasses import replace

import gguf
import numpy as np
import pytest
from dense_runs import run_dense
from gguf_files import BOOL, F32, STRING, U32, as_converted, convert, write
from places import GOLDEN
from tensor_files import pack_arrays

from kvcache.engine import Transformer
from kvcache.errors import CheckpointError
from kvcache.kernels.layers import top_experts
from kvcache.networks.checkpoint import Checkpoint
from kvcache.networks.entries import Flag, Number, Size
from kvcache.networks.expert_kinds import ExpertKind, StackedExperts
from kvcache.networks.experts import mix_experts
from kvcache.networks.families import FAMILIES
from kvcache.networks.family import Family
from kvcache.networks.gguf_architectures import ARCHITECTURES, Architecture

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


class MadeUp:
    """A made-up network, `(x + experts(norm(x)))` behind attention that adds nothing, in float64."""

    vocab, hidden, inner, experts, chosen, dense = 40, 32, 16, 6, 2, 1
    kind = ExpertKind(
        count=("experts",), per_token=Size("top"), size=Size("moe_size"), apart=True, dense_first="first",
        shared_count=Size("shared"), choice={
            "normalise": Flag("divide", False), "sigmoid": True, "bias": True,
            "factor": Number("route_scale"),
        }, checks=(),
    )

    def __init__(self, rng):
        self.config = {
            "architectures": ["MadeUpForCausalLM"], "model_type": "made_up", "vocab_size": self.vocab,
            "hidden_size": self.hidden, "intermediate_size": 24, "moe_size": self.inner, "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "experts": self.experts,
            "top": self.chosen, "first": self.dense, "shared": 2, "divide": True, "route_scale": 1.5,
        }
        self.names = {
            "mlp.gate": "moe.router", "mlp.expert_bias": "moe.bias",
            **{f"mlp.shared_expert.{name}_proj": f"moe.common.{name}" for name in ("gate", "up", "down")},
        }

        def draw(*shape):
            return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

        self.tensors = {"model.norm.weight": 1 + draw(self.hidden), "lm_head.weight": draw(self.vocab, self.hidden)}
        self.tensors["model.embed_tokens.weight"] = draw(self.vocab, self.hidden) * 5
        for i in range(3):
            layer = f"model.layers.{i}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self.tensors[f"{layer}{norm}.weight"] = 1 + draw(self.hidden)
            for name in "qkvo":
                self.tensors[f"{layer}self_attn.{name}_proj.weight"] = draw(self.hidden, self.hidden) * (name != "o")
            mlps = {"mlp.{}_proj.weight": 24}
            if i >= self.dense:
                mlps = {"moe.common.{}.weight": 2 * self.inner}
                mlps |= {f"moe.{expert}.{{}}.w": self.inner for expert in range(self.experts)}
                self.tensors[f"{layer}moe.router.weight"] = draw(self.experts, self.hidden)
                self.tensors[f"{layer}moe.bias"] = draw(self.experts)
            for name, inner in mlps.items():
                for part in ("gate", "up"):
                    self.tensors[layer + name.format(part)] = draw(inner, self.hidden)
                self.tensors[layer + name.format("down")] = draw(self.hidden, inner)

    def norm(self, x, name):
        return x / np.sqrt(np.mean(x * x) + 1e-5) * self.tensors[f"{name}.weight"]

    def mlp(self, x, name):
        gate, up, down = (self.tensors[name.format(part)].astype(np.float64) for part in ("gate", "up", "down"))
        inside = gate @ x
        return down @ (inside / (1 + np.exp(-inside)) * (up @ x))

    def logits(self, token):
        x = self.tensors["model.embed_tokens.weight"][token].astype(np.float64)
        for i in range(3):
            layer = f"model.layers.{i}."
            row = self.norm(x, f"{layer}post_attention_layernorm")
            if i < self.dense:
                x = x + self.mlp(row, f"{layer}mlp.{{}}_proj.weight")
                continue
            scores = 1 / (1 + np.exp(-self.tensors[f"{layer}moe.router.weight"].astype(np.float64) @ row))
            best = np.argsort(-(scores + self.tensors[f"{layer}moe.bias"]))[: self.chosen]
            x = x + self.mlp(row, f"{layer}moe.common.{{}}.weight")
            for expert in best:
                x = x + 1.5 * scores[expert] / scores[best].sum() * self.mlp(row, f"{layer}moe.{expert}.{{}}.w")
        return self.tensors["lm_head.weight"] @ self.norm(x, "model.norm")

    def stacked(self):
        """The tensors with the experts of a layer in two, each transposed, gate and up in turn."""
        found = {name: value for name, value in self.tensors.items() if not name.endswith(".w")}
        for i in range(self.dense, 3):
            gate, up, down = (
                np.stack([self.tensors[f"model.layers.{i}.moe.{expert}.{part}.w"].T for expert in range(self.experts)])
                for part in ("gate", "up", "down")
            )
            found[f"model.layers.{i}.moe.both"] = np.stack([gate, up], axis=3).reshape(*gate.shape[:2], -1)
            found[f"model.layers.{i}.moe.down"] = down
        return found

    def write_gguf(self, path, **changes):
        """The same network as a GGUF file; all experts of a part are one tensor."""
        names = {
            "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
            "moe.router": "made_up_router", **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
            **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
            **{f"moe.common.{part}": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
        }
        whole = {"output_norm": "model.norm", "output": "lm_head", "token_embd": "model.embed_tokens"}
        tensors = {f"{name}.weight": self.tensors[f"{own}.weight"] for name, own in whole.items()}
        for name, values in self.tensors.items():
            layer, _, part = name.removeprefix("model.layers.").partition(".")
            if layer.isdecimal() and part == "moe.bias":
                tensors[f"blk.{layer}.exp_probs_b.bias"] = values
            elif layer.isdecimal() and not part.endswith(".w"):
                tensors[f"blk.{layer}.{names[part.removesuffix('.weight')]}.weight"] = values
        for i in range(self.dense, 3):
            for part in ("gate", "up", "down"):
                each = [self.tensors[f"model.layers.{i}.moe.{expert}.{part}.w"] for expert in range(self.experts)]
                tensors[f"blk.{i}.ffn_{part}_exps.weight"] = np.stack(each)
        entries = {
            "block_count": (U32, 3), "context_length": (U32, 64), "embedding_length": (U32, self.hidden),
            "feed_forward_length": (U32, 24), "attention.head_count": (U32, 2), "rope.freq_base": (F32, 1e4),
            "attention.layer_norm_rms_epsilon": (F32, 1e-5), "expert_count": (U32, self.experts),
            "expert_used_count": (U32, self.chosen), "expert_feed_forward_length": (U32, self.inner),
            "leading_dense_block_count": (U32, self.dense), "expert_shared_count": (U32, 2),
            "expert_weights_norm": (BOOL, True), "expert_weights_scale": (F32, 1.5), "expert_gating_func": (U32, 2),
        }
        entries = {f"made-up.{key}": content for key, content in (entries | changes).items()}
        return write(path, "made-up", entries | {"tokenizer.ggml.model": (STRING, "none")}, tensors)


def test_a_kind_of_experts_is_two_rows(tmp_path, monkeypatch, rng):
    """A made-up family and its kind of experts: rows of two tables, no code; stored one by one, and stacked.

    A GGUF file of it needs one row more, which says nothing of experts.
    """
    made_up = MadeUp(rng)
    (tmp_path / "config.json").write_text(json.dumps(made_up.config))
    monkeypatch.setattr("kvcache.networks.families._BY_NAME", {"MadeUpForCausalLM": "MadeUpForCausalLM"})
    want = np.stack([made_up.logits(token) for token in range(20)])
    stack = StackedExperts("moe.both", "moe.down", turned=True, in_turn=True)
    for tensors, storage in (
        (made_up.tensors, {"each": "moe.{}.{}.w"}), (made_up.stacked(), {"each": "", "stacks": (stack,)}),
    ):
        kind = replace(made_up.kind, **storage)
        monkeypatch.setitem(FAMILIES, "MadeUpForCausalLM", Family("made_up", experts=kind, names=made_up.names))
        (tmp_path / "model.safetensors").write_bytes(pack_arrays(tensors))
        model = Transformer.from_pretrained(tmp_path)
        assert model.config.mlps == ("mlp", "experts", "experts")
        assert model.config.experts.shared == 2 * made_up.inner
        found = run_dense(model, np.arange(20, dtype=np.uint32))
        np.testing.assert_allclose(found, want, rtol=0, atol=2e-6 * np.abs(want).max())
    monkeypatch.setattr("kvcache.networks.families._BY_TYPE", {"made_up": "MadeUpForCausalLM"})
    monkeypatch.setitem(ARCHITECTURES, "made-up", Architecture("made_up", parts={"mlp.gate": "made_up_router"}))
    model = Transformer.from_pretrained(made_up.write_gguf(tmp_path / "x.gguf"))
    assert (model.config.mlps, model.config.experts.shared) == (("mlp", "experts", "experts"), 2 * made_up.inner)
    found = run_dense(model, np.arange(20, dtype=np.uint32))
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-6 * np.abs(want).max())
    for changes, message in (
        ({"expert_gating_func": (U32, 1)}, "made-up.expert_gating_func: expected sigmoids, got 1"),
        ({"expert_count": (U32, 0)}, "made-up.expert_count: expected experts, got 0"),
        ({"expert_used_count": (U32, 7)}, "made-up.expert_used_count: expected a positive whole number up to 6, got 7"),
        ({"expert_group_count": (U32, 2)}, "made-up.expert_group_count: expected 0 or 1, got 2"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Transformer.from_pretrained(made_up.write_gguf(tmp_path / "x.gguf", **changes))
