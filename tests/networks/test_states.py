"""Networks with layers that keep a state: exact in pieces and token by token; rows that are left out change nothing."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import fields, replace

import numpy as np
import pytest
from dense_runs import run_dense
from gguf_files import ARRAY, BOOL, F32, U32
from oracles.engine import dense_attention
from places import GOLDEN
from seeded_weights import SEEDED, seeded, tensors_of
from seeded_weights import write as write_tensors
from state_gguf import LETTERS, convert
from tensor_files import pack_arrays

from kvcache.engine import ModelConfig, Transformer
from kvcache.errors import CheckpointError
from kvcache.kernels.matrix import Matrix
from kvcache.networks.checkpoint import Checkpoint

_FAMILIES = "lfm2", "qwen3_5", "qwen3_next", "granite_hybrid", "nemotron", "kimi_linear", "bailing_hybrid"
HYBRID = [name for name in SEEDED if name.startswith(_FAMILIES)]


def kind_of(name):
    return json.loads((GOLDEN / "seeded" / name / "config.json").read_text())["model_type"]


TOKENS = (np.arange(41, dtype=np.uint32) * 29 + 3) % 96


@pytest.fixture(scope="module", params=HYBRID)
def model(request):
    return Transformer.from_pretrained(seeded(request.param))


class Texts:
    """Several texts of a network: their K and V, and their states in slots of one array per layer."""

    def __init__(self, model, count):
        self.model, self.done = model, [0] * count
        self.kept = [[([], []) for _ in model.attention] for _ in range(count)]
        self.slots = [each and np.zeros((count, each.size), np.float32) for each in model.recurrences]

    def run(self, pieces, logits):
        """Run `{text: tokens}` in one pass."""
        texts, lens = list(pieces), np.array([len(tokens) for tokens in pieces.values()])
        stops, attention, recurrences = np.cumsum(lens), self.model.attention, self.model.recurrences

        def attend(layer, *rows):
            mixed = []
            for text, first, stop in zip(texts, stops - lens, stops, strict=True):
                queries, keys = (each[first:stop] for each in rows[:2])
                latent = attention[layer].latent
                values = keys[..., :latent] if latent else rows[2][first:stop]
                whole = [[*kept, new] for kept, new in zip(self.kept[text][layer], (keys, values), strict=True)]
                self.kept[text][layer] = whole
                keys, values = (np.concatenate(part) for part in whole)
                mixed.append(dense_attention(queries, keys, values, **attention[layer].options()).astype(np.float32))
            return np.concatenate(mixed)

        def recur(layer, rows):
            return recurrences[layer].run(rows, self.slots[layer], np.array(texts), lens)

        positions = np.concatenate(
            [np.arange(self.done[text], self.done[text] + n) for text, n in zip(texts, lens, strict=True)]
        )
        for text, n in zip(texts, lens, strict=True):
            self.done[text] += int(n)
        tokens = np.concatenate(list(pieces.values()))
        return self.model.forward(tokens, positions, attend, logits, recur=recur)


def test_bits_do_not_depend_on_pieces(model):
    whole = run_dense(model, TOKENS)
    for chunk in (1, 2, 7):
        np.testing.assert_array_equal(run_dense(model, TOKENS, chunk), whole)


def test_bits_do_not_depend_on_company(model):
    """Two texts in one pass, each in pieces of its own: the rows of each alone."""
    other = TOKENS[::-1].copy()
    texts, found = Texts(model, 2), []
    for first, second in ((slice(0, 9), slice(0, 1)), (slice(9, 10), slice(1, 20)), (slice(10, 41), slice(20, 41))):
        found.append(np.split(texts.run({1: TOKENS[first], 0: other[second]}, "all"), [first.stop - first.start]))
    for rows, tokens in zip(zip(*found, strict=True), (TOKENS, other), strict=True):
        np.testing.assert_array_equal(np.concatenate(rows), run_dense(model, tokens))


def test_rows_that_are_left_out(model):
    """Rows are left out behind the last layer that mixes tokens: states and later rows are the same."""
    whole = run_dense(model, TOKENS)
    texts = Texts(model, 1)
    assert texts.run({0: TOKENS[:10]}, "none").shape == (0, 96)
    np.testing.assert_array_equal(texts.run({0: TOKENS[10:20]}, "last"), whole[19:20])
    np.testing.assert_array_equal(texts.run({0: TOKENS[20:30]}, np.array([1, 4, 8])), whole[[21, 24, 28]])
    np.testing.assert_array_equal(texts.run({0: TOKENS[30:]}, "all"), whole[30:])


def test_layers(model):
    """Each layer has attention, a state, or neither; a state is never empty."""
    for mixer, attention, recurrence in zip(model.config.mixers, model.attention, model.recurrences, strict=True):
        assert (attention is not None, recurrence is not None) == (mixer == "attention", mixer == "state")
        assert recurrence is None or (recurrence.size > 0 and recurrence.size % 16 == 0)
    assert "state" in model.config.mixers


def test_a_call_without_a_function_for_states(model):
    with pytest.raises(ValueError, match="recur: expected a function for the layers with a state, got None"):
        model.forward(TOKENS, np.arange(41), lambda *_: None)


@pytest.mark.parametrize("name", HYBRID)
def test_weights_of_a_recurrence_stay_in_float32(name):
    """So do those that decide what decays, as files have them."""
    packed, exact = (Transformer.from_pretrained(seeded(name), weights=weights) for weights in ("q4", "auto"))
    for layer, expected in zip(packed.weights.layers, exact.weights.layers, strict=True):
        if layer.recurrence is None or expected.recurrence is None:
            continue
        for field in fields(layer.recurrence):
            found, want = (getattr(each.recurrence, field.name) for each in (layer, expected))
            if isinstance(found, Matrix):  # the second ones of Kimi-Linear
                assert (found.format == want.format) == (field.name == "decay")
                continue
            assert found is None or found.dtype == np.float32
            np.testing.assert_array_equal(found, want)
        assert "q4_1" in layer.qkv.format
        assert ("bf16" in layer.qkv.format) == (packed.config.recurrence.kind in ("delta", "kimi"))


def test_limits_of_swiglu(tmp_path):
    """The experts of one layer and the MLP beside them, computed again in float64."""
    shutil.copytree(seeded("bailing_hybrid"), tmp_path / "x")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    plain = run_dense(Transformer.from_pretrained(tmp_path / "x"), TOKENS)
    for limits, same in (([0, 0, 0, 1e9], True), ([0, None, 0], True), ([], True), ([0, 0.3, 0], False)):
        config |= {"expert_swiglu_limit_list": limits, "share_expert_swiglu_limit_list": [2 * (x or 0) for x in limits]}
        (tmp_path / "x" / "config.json").write_text(json.dumps(config))
        model = Transformer.from_pretrained(tmp_path / "x", weights="f32")
        assert np.array_equal(run_dense(model, TOKENS), plain) == same
    layer, rows = model.weights.layers[1], np.random.default_rng(0).standard_normal((5, 48)).astype(np.float32)
    alone = replace(layer, input_norm=None, qkv=None, latent=None, output=None)
    bare = replace(
        model.config, num_layers=4, mixers=("",) * 4, mlps=("", "experts", "", ""), tie_word_embeddings=False,
    )
    embedded = replace(model.weights, embedding=rows, norm=np.ones(48, np.float32), layers=tuple(
        alone if i == 1 else replace(alone, mlps=(), router=None, shared=None, mlp_norm=None) for i in range(4)
    ))
    normed = Transformer(bare, embedded).forward(
        np.arange(5, dtype=np.uint32), np.arange(5), lambda *_: None, "all", head=False
    )

    def mlp(x, weights, limit):
        gate, up = np.split(x @ weights.gate_up.to_float32().T.astype(np.float64), 2, axis=-1)
        both = np.minimum(gate / (1 + np.exp(-gate)), limit) * np.clip(up, -limit, limit)
        return both @ weights.down.to_float32().T

    x = rows / np.sqrt((rows.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-6) * layer.mlp_norm
    scores = 1 / (1 + np.exp(-(x @ layer.router.to_float32().T)))
    choice = scores + layer.expert_bias
    groups = np.sort(choice.reshape(5, 4, 2), axis=2).sum(axis=2)
    choice[np.repeat(groups < np.sort(groups, axis=1)[:, [2]], 2, axis=1)] = -np.inf
    want = rows + mlp(x, layer.shared, 0.6)
    for row, best in enumerate(np.argsort(-choice, axis=1)[:, :3]):
        shares = scores[row, best] / scores[row, best].sum() * 2.5
        want[row] += sum(
            share * mlp(x[row], layer.mlps[i], 0.3) for share, i in zip(shares, best, strict=True)
        )
    want = want / np.sqrt((want**2).mean(axis=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(normed, want, rtol=0, atol=1e-5)
    for wrong in (3.0, [0, -1.0], ["x"]):
        with pytest.raises(CheckpointError, match="expert_swiglu_limit_list: expected a list of finite numbers from 0"):
            config_of("bailing_hybrid", expert_swiglu_limit_list=wrong)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_a_text_network_beside_others(tmp_path, name):
    """Qwen3.5 as it is published: experts are stacked; images and MTP layers are left out."""
    config = json.loads((seeded(name) / "config.json").read_text())
    architecture = config["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    whole = {"architectures": [architecture], "model_type": name, "vision_config": {}}
    whole |= {"text_config": config | {"architectures": None}, "tie_word_embeddings": config["tie_word_embeddings"]}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    stored = Checkpoint(seeded(name))
    tensors = {each.replace("model.", "model.language_model."): stored.read(each) for each in stored.names()}
    for layer in range(3 if name.endswith("moe") else 0):
        stem = f"model.language_model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            np.stack([tensors.pop(f"{stem}.{i}.{part}_proj.weight") for i in range(6)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{stem}.gate_up_proj": np.concatenate([gates, ups], axis=1), f"{stem}.down_proj": downs}
    others = ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "model.visual.patch_embed.proj.weight"]
    tensors |= dict.fromkeys(others, np.ones((3, 2), np.float32))
    (tmp_path / "model.safetensors").write_bytes(pack_arrays(tensors))
    found, expected = (Transformer.from_pretrained(folder) for folder in (tmp_path, seeded(name)))
    assert found.config == expected.config
    np.testing.assert_array_equal(run_dense(found, TOKENS), run_dense(expected, TOKENS))


CONVERTED = [name for name in SEEDED if kind_of(name) in LETTERS and not {"mixed", "falcon"} & set(name.split("_"))]


@pytest.fixture(scope="module", params=CONVERTED)
def pair(request, tmp_path_factory):
    """A folder, and a GGUF file of it."""
    path = tmp_path_factory.mktemp("gguf") / "network.gguf"
    return seeded(request.param), convert(seeded(request.param), path)


def test_gguf(pair):
    """The folder's logits; in float32, since files have the same numbers.

    Value heads in another order are added up in another one, which the delta rule makes more of.
    """
    exact, found = Transformer.from_pretrained(pair[0], weights="f32"), Transformer.from_pretrained(pair[1])
    tiled = found.config.recurrence is not None and found.config.recurrence.tiled
    expected, noise = run_dense(exact, TOKENS), 2e-5 if tiled else 3e-6
    np.testing.assert_allclose(run_dense(found, TOKENS), expected, rtol=0, atol=noise * np.abs(expected).max())
    sizes = found.config.recurrence and replace(found.config.recurrence, tiled=False)
    # The size is that of an MLP, where all layers have experts; folders of Qwen3-Next do not say what guesses.
    same = {"eos_token_ids": (), "intermediate_size": 0, "sizes": (), "next_layers": 0}
    if exact.config.recurrence is None:  # of Granite 4 a file of Granite 3
        same |= {"architecture": ""}
    assert replace(found.config, recurrence=sizes, **same) == replace(exact.config, **same)


def test_gguf_of_falcon_h1(tmp_path):
    """Files have the multipliers in their weights."""
    for name in ("falcon_h1", "falcon_h1_gated"):
        exact = Transformer.from_pretrained(seeded(name), weights="f32")
        found, expected = Transformer.from_pretrained(convert(seeded(name), tmp_path / name)), run_dense(exact, TOKENS)
        np.testing.assert_allclose(run_dense(found, TOKENS), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        ones = {"embedding_scale": 1.0, "logit_scale": 1.0, "multipliers": None, "eos_token_ids": ()}
        assert replace(found.config, **ones) == replace(exact.config, **ones)


def test_first_files_of_qwen3_next(tmp_path):
    paths = [convert(seeded("qwen3_next"), tmp_path / f"{whole}.gguf", whole=whole) for whole in (False, True)]
    np.testing.assert_array_equal(*(run_dense(Transformer.from_pretrained(path), TOKENS) for path in paths))


def test_biases_of_layers_behind_the_first(tmp_path):
    """The first layer keeps a state: the biases of attention are in others alone."""
    folder = tmp_path / "folder"
    shutil.copytree(seeded("granite_hybrid"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    spec = json.loads((folder / "weights.json").read_text())
    sizes = {"q": 48, "k": 16, "v": 16, "o": 48}
    biases = {f"model.layers.1.self_attn.{part}_proj.bias": [[size], 0.3, 0.0] for part, size in sizes.items()}
    write_tensors(folder / "model.safetensors", tensors_of(spec | {"tensors": spec["tensors"] | biases}))
    path = convert(folder, tmp_path / "x.gguf")
    exact, found = (Transformer.from_pretrained(each) for each in (folder, path))
    assert (found.config.qkv_bias, found.config.output_bias) == (True, True)
    expected = run_dense(exact, TOKENS)
    assert np.abs(expected - run_dense(Transformer.from_pretrained(seeded("granite_hybrid")), TOKENS)).max() > 0.1
    np.testing.assert_allclose(run_dense(found, TOKENS), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_attention_without_rotation_says_any_number_of_turned_channels(tmp_path):
    """Files of Nemotron Nano have the hidden size over the heads, which is not the size of a head."""
    plain, odd = (
        convert(seeded("nemotron_h"), tmp_path / f"{turned}.gguf", rope__dimension_count=(U32, turned))
        for turned in (8, 112)
    )
    models = [Transformer.from_pretrained(path) for path in (plain, odd)]
    assert models[0].config == models[1].config
    with pytest.raises(CheckpointError, match=r"rope.dimension_count: expected 8 as in every head, got 6"):
        Transformer.from_pretrained(
            convert(seeded("granite_hybrid_moe"), tmp_path / "wrong.gguf", rope__dimension_count=(U32, 6))
        )


def test_gguf_with_mtp_layers(tmp_path):
    """Layers behind the last one, of Qwen3.5, are known and left out; without the entry they are unexpected."""
    more = dict.fromkeys(["blk.3.nextn.eh_proj.weight", "blk.3.ffn_up.weight"], np.ones((4, 8), np.float32))
    states = (ARRAY, [True, False, True, False], BOOL)
    entries = {"block_count": (U32, 4), "nextn_predict_layers": (U32, 1), "attention__recurrent_layers": states}
    plain = convert(seeded("qwen3_5"), tmp_path / "plain.gguf")
    path = convert(seeded("qwen3_5"), tmp_path / "guessing.gguf", tensors=more, **entries)
    models = [Transformer.from_pretrained(each) for each in (plain, path)]
    assert models[0].config == replace(models[1].config, next_layers=0)
    np.testing.assert_array_equal(*(run_dense(model, TOKENS) for model in models))
    path = convert(seeded("qwen3_5"), tmp_path / "unexpected.gguf", tensors=more)
    with pytest.raises(CheckpointError, match=r"expected no others, got the tensors blk\.3\.ffn_up\.weight"):
        Transformer.from_pretrained(path)


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("lfm2", {"shortconv__l_cache": (F32, 3.0)}, "expected a whole number of at least 2 up to 64, got 3.0"),
        ("lfm2", {"attention__head_count_kv": (ARRAY, [0, 2], U32)}, "expected a whole number for each of 3 layers"),
        ("lfm2", {"block_count": (U32, 1 << 30)}, "block_count: expected a number of layers up to 65536"),
        ("lfm2", {"attention__head_count_kv": (ARRAY, [2, 0, 1], U32)}, "expected one value for all layers"),
        ("qwen3_5", {"ssm__inner_size": (U32, 121)}, "ssm.inner_size: expected a multiple of 6 heads, got 121"),
        ("qwen3_5", {"ssm__group_count": (U32, 4)}, "expected a multiple of 4 key heads, got 6"),
        ("qwen3_5", {"nextn_predict_layers": (U32, 3)}, "nextn_predict_layers: expected a number below 3, got 3"),
        ("qwen3_5", {"attention__recurrent_layers": (ARRAY, [True], BOOL)}, "expected a bool for each of 3 layers"),
        ("nemotron_h", {"feed_forward_length": (U32, 72)}, "feed_forward_length: expected a number for each of 5"),
        ("nemotron_h", {"feed_forward_length": (ARRAY, [0, 72, 72, 0, 72], U32)}, "expected 0 for layers that attend"),
        ("kimi_linear", {"kda__head_dim": (F32, 20.0)}, "linear_head_dim: expected a positive whole number, got 20.0"),
        ("kimi_linear", {"attention__head_count_kv": (ARRAY, [0, 1], U32)}, "expected a whole number for each of 4"),
        ("kimi_linear", {"expert_gating_func": (U32, 1)}, "expert_gating_func: expected sigmoids, got 1"),
    ],
)
def test_gguf_entries_that_do_not_fit(tmp_path, name, entries, message):
    path = convert(seeded(name), tmp_path / "wrong.gguf", **entries)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Transformer.from_pretrained(path)


def config_of(name, **changes):
    return ModelConfig.from_dict(json.loads((seeded(name) / "config.json").read_text()) | changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("lfm2", {"layer_types": None, "full_attn_idxs": [1]}),
        ("lfm2", {"block_ff_dim": 72, "intermediate_size": 5}),
        ("lfm2", {"block_auto_adjust_ff_dim": False, "intermediate_size": 48}),
        ("lfm2_moe", {"tie_word_embeddings": False, "tie_embedding": True}),
        ("qwen3_5", {"layer_types": None, "full_attention_interval": 2}),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M-*M-"}),
        ("nemotron_h", {"layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp"], "num_hidden_layers": 5}),
        ("granite_hybrid", {"layer_types": ["mamba", "attention", "mamba"], "mamba_d_head": "auto"}),
        ("granite_hybrid", {"time_step_limit": None}),
        ("kimi_linear", {"layer_types": None}),
        ("kimi_linear", {"linear_attn_config": None, "layer_types": ["linear_attention", "full_attention"] * 2}),
        ("kimi_linear", {
            "model_max_length": None, "max_position_embeddings": 256, "num_expert_group": None, "n_group": 4,
            "num_experts_per_token": None, "num_experts_per_tok": 3, "mla_use_nope": True, "mla_use_output_gate": False,
            "num_shared_experts": None, "n_shared_experts": 2, "moe_router_activation_func": "sigmoid",
        }),
        ("bailing_hybrid", {"layer_types": None, "layer_group_size": 2}),
        ("bailing_hybrid", {
            "architectures": ["BailingMoeV3ForCausalLM"], "linear_head_dim": None, "head_dim": 20,
            "linear_num_heads": None, "linear_conv_kernel_dim": None, "no_kda_lora": True, "use_mla_nope": False,
            "gated_attention_proj_granularity_type": "head_wise", "moe_shared_expert_intermediate_size": 20,
        }),
        ("bailing_hybrid", {"rope_parameters": {
            "rope_type": "default", "rope_theta": 6000000.0, "partial_rotary_factor": 0.5,
        }}),
    ],
)
def test_other_spellings(name, changes):
    assert config_of(name, **changes) == config_of(name)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("lfm2", {"conv_L_cache": 65}, "conv_L_cache: expected a whole number of at least 2 up to 64, got 65"),
        ("lfm2", {"layer_types": ["conv", "mamba", "conv"]}, "layer_types: expected conv or attention or full_attent"),
        ("lfm2", {"layer_types": ["conv"]}, "for each of 3 layers, got ['conv']"),
        ("lfm2", {"layer_types": "conv"}, "layer_types: expected a list, got 'conv'"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [3]}, "full_attn_idxs: expected layers from 0 to 2, got [3]"),
        ("lfm2_moe", {"num_dense_layers": 4}, "num_dense_layers: expected a whole number of at least 0 up to 3, got 4"),
        ("qwen3_5", {"linear_num_value_heads": 5}, "linear_num_value_heads: expected a multiple of 2 key heads, got 5"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate: expected true, got false"),
        ("qwen3_next", {"norm_topk_prob": False}, "norm_topk_prob: expected true, got false"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope: expected true, got false"),
        ("kimi_linear", {"mla_use_output_gate": True}, "mla_use_output_gate: expected false, got true"),
        ("kimi_linear", {"attn_res_block_size": 12}, "attn_res_block_size: expected null, got 12"),
        ("kimi_linear", {"linear_attn_config": [3]}, "linear_attn_config: expected an object, got [3]"),
        ("kimi_linear", {"linear_attn_config": {"gate_lower_bound": -5.0}}, "gate_lower_bound: expected null, got -5"),
        ("kimi_linear", {"linear_attn_config": {"use_full_rank_gate": True}}, "use_full_rank_gate: expected false"),
        ("kimi_linear", {
            "layer_types": None, "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3]},
        }, "linear_attn_config.kda_layers: expected the layers from 1 to 4 that are not among full_attn_layers"),
        ("kimi_linear", {"layer_types": None, "linear_attn_config": {"full_attn_layers": [2.0]}}, "expected numbers"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func: expected sigmoid"),
        ("bailing_hybrid", {"kda_lower_bound": 1.0}, "kda_lower_bound: expected a number from -80 to 0, got 1.0"),
        ("bailing_hybrid", {"use_mla_nope": True}, "use_mla_nope: expected false, got true"),
        ("bailing_hybrid", {"no_kda_lora": False}, "no_kda_lora: expected true, got false"),
        ("bailing_hybrid", {"gated_attention_proj_granularity_type": "element_wise"}, "expected head_wise, got 'elem"),
        ("bailing_hybrid", {"architectures": ["BailingMoeV2_5ForCausalLM"]}, "architectures: expected one of"),
        ("nemotron_h", {"time_step_limit": [0.5]}, "time_step_limit: expected two numbers from 0 on, ascending"),
        ("nemotron_h", {"time_step_limit": [2, 1]}, "time_step_limit: expected two numbers from 0 on, ascending"),
        ("nemotron_h", {"hybrid_override_pattern": "M-X"}, "hybrid_override_pattern: expected letters of M * - E"),
        ("nemotron_h", {"n_groups": 4}, "n_groups: expected a divisor of 6 heads, got 4"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act: expected one of relu2, gelu_pytorch_tanh, xielu"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act: expected silu in layers with a state"),
        ("granite_hybrid", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act: expected silu in layers with a state"),
        ("qwen3_5", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act: expected silu in layers with a state"),
        ("nemotron_h_moe", {"n_shared_experts": 2}, "n_shared_experts: expected 1, got 2"),
        ("nemotron_h_moe", {"mlp_bias": True}, "mlp_bias: expected false with experts, got true"),
        ("nemotron_h_moe", {"n_group": 3}, "n_group: expected a divisor of 8 experts, got 3"),
        ("granite_hybrid", {"mamba_n_heads": 7}, "mamba_n_heads: expected heads of 96 channels in all, got 7 of 12"),
        ("granite_hybrid", {"mamba_n_groups": 3}, "mamba_n_groups: expected a divisor of 8 heads, got 3"),
        ("granite_hybrid", {"position_embedding_type": "alibi"}, "position_embedding_type: expected rope or nope"),
    ],
)
def test_options_that_do_not_fit(name, changes, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        config_of(name, **changes)


def test_infinity_in_a_configuration(tmp_path):
    """The published files of Nemotron-H have it in their limits of steps; elsewhere it is no number."""
    text = (seeded("nemotron_h") / "config.json").read_text()
    found, limits = json.loads(text), re.compile(r'\{\s*"__float__": "Infinity"\s*\}')
    assert found["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    path = tmp_path / "config.json"
    path.write_text(limits.sub("Infinity", text))
    assert ModelConfig.from_pretrained(tmp_path) == config_of("nemotron_h")
    path.write_text(text.replace('"layer_norm_epsilon": 1e-05', '"layer_norm_epsilon": Infinity'))
    with pytest.raises(CheckpointError, match="layer_norm_epsilon: expected a finite number of at least 0, got"):
        ModelConfig.from_pretrained(tmp_path)
