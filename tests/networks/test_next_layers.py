"""The MTP layer: its arithmetic, its files, and what a pass leaves in the cache for it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from bailing import twins
from dense_runs import IndexedAttention, run_dense
from gguf_files import ARRAY, BOOL, U32, convert
from latent_gguf import as_converted
from latent_gguf import convert as convert_latent
from next_layers import MADE_AFTER, with_next_layer
from seeded_weights import write
from state_gguf import convert as convert_state

from kvcache.engine import Transformer
from kvcache.networks.checkpoint import Checkpoint
from kvcache.networks.fingerprint import fingerprint
from kvcache.networks.hidden_rows import HiddenRows

pytestmark = pytest.mark.one_build

TOKENS = np.random.default_rng(3).integers(0, 96, 30).astype(np.uint32)


@pytest.fixture(params=sorted(MADE_AFTER))
def folder(request, tmp_path):
    return with_next_layer(request.param, tmp_path / request.param)


class Dense:
    """A cache in plain arrays, as far as a pass needs one."""

    def __init__(self, model):
        self.model, self.rows, self.attention = model, [[] for _ in model.attention], IndexedAttention(model)
        self.states = [each and np.zeros((1, each.size), np.float32) for each in model.recurrences]

    def attend(self, layer, queries, keys, values, _=None, rows=None):
        each = self.model.attention[layer]
        values = keys[..., : each.latent] if each.latent else values
        self.rows[layer].append((keys.copy(), values.copy()))
        keys, values = self.kept(layer)
        return self.attention(layer, queries, keys, values, rows)

    def recur(self, layer, inputs):
        zero, count = np.zeros(1, np.int64), np.array([len(inputs[0])])
        return self.model.recurrences[layer].run(inputs, self.states[layer], zero, count)

    def kept(self, layer):
        return [np.concatenate(rows) for rows in zip(*self.rows[layer], strict=True)]

    def run(self, tokens, first, logits="all", before=None):
        hidden = HiddenRows(np.zeros(1, np.int64), np.zeros((1, 48), np.float32) if before is None else before)
        more = {"recur": self.recur} if self.states else {}
        at = np.arange(first, first + len(tokens))
        return self.model.forward(tokens, at, self.attend, logits, hidden=hidden, **more), hidden.rows


def normed(config, x, weight):
    """An RMSNorm, or a LayerNorm, whose weights are `(2, hidden)`."""
    x = x.astype(np.float64)
    if config.norm == "layer":
        x, weight = x - x.mean(axis=-1, keepdims=True), weight[0]
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.rms_norm_eps) * weight


def test_it_is_a_usual_layer_of_joined_rows(folder):
    """Its logits and hidden rows are those of a network of this one layer, whose embedding the joined rows are."""
    model, dense = Transformer.from_pretrained(folder, draft_layer=True, weights="f32"), None
    config, layer = model.config, model.weights.layers[-1]
    dense = Dense(model)
    _, rows = dense.run(TOKENS, 0)
    before = np.concatenate([np.zeros((1, config.hidden_size), np.float32), rows[:-1]])
    embedded = model.weights.embedding[TOKENS.astype(np.int64)]
    norms = ((embedded, layer.next.token_norm), (before, layer.next.hidden_norm))
    both = np.concatenate([normed(config, *each) for each in norms], axis=1)
    joined = both @ layer.next.joint.to_float32().astype(np.float64).T
    one = {name: getattr(config, name)[-1:] for name in ("sizes", "windows", "rotated", "mixers", "mlps", "limits")}
    alone = Transformer(
        replace(config, num_layers=1, draft_layers=0, **one),
        replace(model.weights, embedding=joined.astype(np.float32), norm=layer.next.norm, layers=(layer,)),
    )
    want = run_dense(alone, np.arange(len(TOKENS)).astype(np.uint32))
    found = []
    dense.rows[-1].clear(), dense.attention.keys[-1].clear()
    for i, token in enumerate(TOKENS):
        logits, hidden = model.draft(TOKENS[i : i + 1], np.array([i]), dense.attend, before[i : i + 1])
        found.append(logits[0])
        behind = normed(config, hidden, layer.next.norm) if config.next_layer.is_raw else hidden
        heads = behind @ model.weights.head.to_float32().T * config.logit_scale
        np.testing.assert_allclose(heads, logits, atol=1e-4)
        assert token == TOKENS[i]
    assert np.abs(np.array(found) - want).max() < 3e-4 * np.abs(want).max()


def test_a_pass_stores_what_the_layer_reads(folder):
    """In pieces or at once, bit for bit; logits are those of the network without the layer."""
    model, plain = (Transformer.from_pretrained(folder, draft_layer=each) for each in (True, False))
    assert (model.draft_layers, plain.draft_layers, model.config.num_layers) == (1, 0, plain.config.num_layers + 1)
    whole, pieces, alone = Dense(model), Dense(model), Dense(plain)
    want, rows = whole.run(TOKENS, 0)
    np.testing.assert_array_equal(want, run_dense(plain, TOKENS))
    first, start = None, 0
    for stop, logits in ((7, "none"), (8, "last"), (30, np.array([3, 21]))):
        found, hidden = pieces.run(TOKENS[start:stop], start, logits, None if first is None else first[-1:])
        first, start = hidden, stop
    np.testing.assert_array_equal(found, want[[11, 29]])
    np.testing.assert_array_equal(first, rows[8:])
    for ours, theirs in zip(pieces.kept(-1), whole.kept(-1), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    alone.run(TOKENS[:1], 0)
    assert fingerprint(model) != fingerprint(plain)


def test_files_of_gguf_have_it(folder, tmp_path):
    name = folder.name
    if name == "bailing_hybrid":  # llama.cpp has none
        return
    if name.startswith("qwen"):
        kinds = json.loads((folder / "config.json").read_text())["layer_types"]
        states = (ARRAY, [*(each == "linear_attention" for each in kinds), False], BOOL)
        entries = {"block_count": (U32, 4), "nextn_predict_layers": (U32, 1), "attention__recurrent_layers": states}
        path = convert_state(folder, tmp_path / "x.gguf", **entries)
    elif name in ("glm4_moe", "hy_v3", "exaone_moe", "cohere2_moe", "step3p7", "mimo_v2_flash"):
        path = convert(folder, tmp_path / "x.gguf")
    else:
        folder = as_converted(folder, tmp_path / "folder")
        path = convert_latent(folder, tmp_path / "x.gguf")
    models = [Transformer.from_pretrained(each, draft_layer=True) for each in (folder, path)]
    logits = []
    for model in models:
        assert model.draft_layers == 1
        dense = Dense(model)
        _, rows = dense.run(TOKENS, 0)
        logits.append(model.draft(TOKENS[5:6], np.array([30]), dense.attend, rows[-1:])[0])
    assert np.abs(logits[0] - logits[1]).max() < 1e-4 * np.abs(logits[0]).max()
    assert Transformer.from_pretrained(path).draft_layers == 0


def test_ling_calls_it_otherwise(tmp_path):
    glm, ling = twins(tmp_path, next_layer=True)
    logits = []
    for path in (glm, ling, convert(ling, tmp_path / "x.gguf")):
        model = Transformer.from_pretrained(path, draft_layer=True)
        dense = Dense(model)
        _, rows = dense.run(TOKENS, 0)
        logits.append(model.draft(TOKENS[5:6], np.array([30]), dense.attend, rows[-1:])[0])
        assert Transformer.from_pretrained(path).draft_layers == 0
    np.testing.assert_allclose(logits[1:], logits[:1] * 2, atol=1e-4 * np.abs(logits[0]).max())


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe", "deepseek_v3"])
def test_a_second_layer_is_left_out(name, tmp_path):
    """Published files have one. Of several the first is loaded, which proposes all draft tokens, in GGUF files too."""
    folder = with_next_layer(name, tmp_path / name)
    qwen, config, stored = name.startswith("qwen"), json.loads((folder / "config.json").read_text()), {}
    first = 0 if qwen else config["num_hidden_layers"]
    prefix = "mtp.layers" if qwen else "model.layers"
    checkpoint = Checkpoint(folder)
    for each in checkpoint.names():
        stored[each] = ("F32", checkpoint.read(each), None)
        if each.startswith(f"{prefix}.{first}."):
            stored[each.replace(f"{prefix}.{first}.", f"{prefix}.{first + 1}.")] = ("F32", -2 * stored[each][1], None)
    key = "mtp_num_hidden_layers" if qwen else "num_nextn_predict_layers"
    more = tmp_path / "more"
    more.mkdir()
    (more / "config.json").write_text(json.dumps(config | {key: 2}))
    write(more / "model.safetensors", stored)
    paths = [more]
    if not qwen:
        converting = convert if name == "glm4_moe" else convert_latent
        paths.append(converting(as_converted(more, tmp_path / "folder"), tmp_path / "x.gguf"))
        folder = as_converted(folder, tmp_path / "one")
    want = list(Transformer.from_pretrained(folder, draft_layer=True, weights="f32").weights.layers[-1].arrays())
    for path in paths:
        found = Transformer.from_pretrained(path, draft_layer=True, weights="f32")
        assert (found.draft_layers, found.config.next_layers) == (1, 2)
        assert Transformer.from_pretrained(path).draft_layers == 0
        for ours, theirs in zip(found.weights.layers[-1].arrays(), want, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                ours, theirs = (each if isinstance(each, np.ndarray) else each.to_float32() for each in (ours, theirs))
                np.testing.assert_array_equal(ours, theirs)


def test_stacked_experts_and_towers_and_files_without(tmp_path):
    """Qwen3.5 as it is published, with stacked experts; a folder that says it has a layer, but has not."""
    folder = with_next_layer("qwen3_5_moe", tmp_path / "x")
    want = Transformer.from_pretrained(folder, draft_layer=True)
    config, stored = json.loads((folder / "config.json").read_text()), Checkpoint(folder)
    whole = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "vision_config": {},
        "text_config": config | {"architectures": None}, "tie_word_embeddings": config["tie_word_embeddings"],
    }
    tensors = {each.replace("model.", "model.language_model."): stored.read(each) for each in stored.names()}
    stem = "mtp.layers.0.mlp.experts"
    gates, ups, downs = (
        np.stack([tensors.pop(f"{stem}.{i}.{part}_proj.weight") for i in range(6)]) for part in ("gate", "up", "down")
    )
    tensors |= {f"{stem}.gate_up_proj": np.concatenate([gates, ups], axis=1), f"{stem}.down_proj": downs}

    def saved(name, some):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(whole))
        write(tmp_path / name / "model.safetensors", {key: ("F32", each, None) for key, each in some.items()})
        return Transformer.from_pretrained(tmp_path / name, draft_layer=True)

    found = saved("whole", tensors)
    for ours, theirs in zip(found.weights.layers[-1].arrays(), want.weights.layers[-1].arrays(), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            ours, theirs = (each if isinstance(each, np.ndarray) else each.to_float32() for each in (ours, theirs))
            np.testing.assert_array_equal(ours, theirs)
    without = saved("without", {key: each for key, each in tensors.items() if not key.startswith("mtp.")})
    assert without.draft_layers == 0
    assert without.config.next_layers == 1
