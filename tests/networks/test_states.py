"""Networks with layers that keep a state: exact in pieces and token by token; rows that are left out change nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
from dense_runs import run_dense
from oracles.engine import dense_attention
from seeded_weights import SEEDED, seeded
from tensor_files import pack_arrays

from kvcache.engine import Transformer
from kvcache.networks.checkpoint import Checkpoint

HYBRID = [name for name in SEEDED if name.startswith(("lfm2", "qwen3_5", "qwen3_next", "granite_hybrid", "nemotron"))]
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
                queries, keys, values = (each[first:stop] for each in rows)
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


@pytest.mark.parametrize("weights", ["q8", "q4", "f16"])
def test_weights_of_a_recurrence_stay_in_float32(model, weights):
    folder = seeded(HYBRID[0])
    loaded = Transformer.from_pretrained(folder, weights=weights)
    for layer, exact in zip(loaded.weights.layers, Transformer.from_pretrained(folder).weights.layers, strict=True):
        if layer.recurrence is not None:
            assert layer.recurrence.taps.dtype == np.float32
            np.testing.assert_array_equal(layer.recurrence.taps, exact.recurrence.taps)


def test_a_text_network_beside_others(tmp_path):
    """Qwen3.5 as it is published: a tower for images and layers that guess more tokens are left out."""
    config = json.loads((seeded("qwen3_5") / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "vision_config": {}}
    whole |= {"text_config": config | {"architectures": None}, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    stored = Checkpoint(seeded("qwen3_5"))
    tensors = {name.replace("model.", "model.language_model."): stored.read(name) for name in stored.names()}
    others = dict.fromkeys(["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "model.visual.patch_embed.proj.weight"])
    tensors |= dict.fromkeys(others, np.ones((3, 2), np.float32))
    (tmp_path / "model.safetensors").write_bytes(pack_arrays(tensors))
    found, expected = (Transformer.from_pretrained(folder) for folder in (tmp_path, seeded("qwen3_5")))
    assert found.config == expected.config
    np.testing.assert_array_equal(run_dense(found, TOKENS), run_dense(expected, TOKENS))
