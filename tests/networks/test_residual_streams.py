"""Several residual streams (Gemma 3n): each step compared with float64, the keys of files, weights and names."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from dense_runs import run_dense
from gguf_files import ARRAY, F32, U32, as_converted, entries_of, tensors_of, write
from network_weights import assert_same_weights
from seeded_weights import golden_folder, seeded
from tensor_files import pack_arrays

from kvcache.engine import ModelConfig, Transformer
from kvcache.errors import CheckpointError
from kvcache.kernels.layers import thin
from kvcache.kernels.matrix import Matrix
from kvcache.networks.checkpoint import Checkpoint
from kvcache.networks.fingerprint import fingerprint
from kvcache.networks.residual_streams import StreamEnds, StreamWeights
from kvcache.networks.sparse_gates import cutoff_of, share_of

pytestmark = pytest.mark.one_build

TOKENS = np.arange(40, dtype=np.uint32)
EPS = 1e-6
SHARES = "activation_sparsity_pattern: expected a number below 1"


def content(name="gemma3n"):
    return json.loads((golden_folder(name) / "config.json").read_text())


def matrix(values):
    found = Matrix(*values.shape, "f32")
    found.put(0, values)
    return found


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weights_of(count, hidden, rank, scaled):
    names = {"router": (count, hidden), "predict": (count * count, count), "correct": (count, count),
             "left": (rank, hidden), "right": (hidden, rank)}
    arrays = {name: normal(i, *shape) * np.float32(shape[1] ** -0.5) for i, (name, shape) in enumerate(names.items())}
    vectors = {name: 1 + normal(9 + i, hidden) / 4 for i, name in enumerate(("norm", "low_norm", "scale"))}
    if not scaled:
        vectors["scale"] = None
    return arrays | vectors, StreamWeights(**{name: matrix(each) for name, each in arrays.items()}, **vectors)


def normed(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


def times(x, weight):
    return weight.multiply(x)


@pytest.mark.parametrize(("count", "active", "scaled"), [(4, 0, True), (3, 2, False), (1, 0, True)])
def test_a_layer_reads_and_corrects_streams(count, active, scaled):
    """As the formulas say; a row alone has the bits that it has among others."""
    n, hidden = 9, 20
    arrays, weights = weights_of(count, hidden, 5, scaled)
    w = {name: None if each is None else each.astype(np.float64) for name, each in arrays.items()}
    streams, made = normal(20, n, count, hidden), normal(21, n, hidden)
    wide = streams.astype(np.float64)

    def modes(x):
        return np.tanh(normed(x, w["norm"]) @ w["router"].T)

    found = weights.predicted(streams, active, times, EPS)
    shares = (modes(wide[:, active]) @ w["predict"].T).reshape(n, count, count)
    expected = wide + np.einsum("nij,njd->nid", shares, wide)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    corrected = found.copy()
    first = weights.correct_by(made, corrected, active, times, EPS)
    factors = 1 + modes(made.astype(np.float64)) @ w["correct"].T
    expected = found + factors[:, :, None] * (made - found[:, active].astype(np.float64))[:, None]
    np.testing.assert_allclose(corrected, expected, rtol=0, atol=1e-5)
    scale = w["scale"] if scaled else 1
    np.testing.assert_allclose(first, expected[:, active] * scale, rtol=0, atol=1e-5)
    beside = weights.beside(made, times, EPS)
    expected = made + normed(made @ w["left"].T @ w["right"].T, w["low_norm"])
    np.testing.assert_allclose(beside, expected, rtol=0, atol=1e-5)
    for i in range(n):
        one, row = streams[i : i + 1], made[i : i + 1]
        alone = weights.predicted(one, active, times, EPS)
        assert alone.tobytes() == found[i : i + 1].tobytes()
        assert weights.correct_by(row, alone, active, times, EPS).tobytes() == first[i : i + 1].tobytes()
        assert alone.tobytes() == corrected[i : i + 1].tobytes()
        assert weights.beside(row, times, EPS).tobytes() == beside[i : i + 1].tobytes()
    assert streams.tobytes() == normal(20, n, count, hidden).tobytes()  # a step leaves what it is given


def test_the_ends_of_streams():
    """All streams have the size of the first one; one of nearly nothing keeps to the least size."""
    n, hidden = 7, 20
    begin, end = ([normal(30 + 10 * which + i, hidden, hidden) for i in range(3)] for which in range(2))
    begin[1] *= np.float32(1e-5)
    ends = StreamEnds(tuple(map(matrix, begin)), tuple(map(matrix, end)))

    def resized(x, size):
        return x * size / np.sqrt(np.maximum(np.mean(x * x, axis=1, keepdims=True), 1e-5))

    x = normal(50, n, hidden)
    wide = x.astype(np.float64)
    size = np.sqrt(np.mean(wide * wide, axis=1, keepdims=True))
    streams = ends.spread(x, times)
    expected = np.stack([wide, *(resized(wide @ each.T.astype(np.float64), size) for each in begin)], axis=1)
    np.testing.assert_allclose(streams, expected, rtol=0, atol=1e-5)
    assert np.abs(streams[:, 2]).max() < 0.1 < np.abs(streams[:, 1]).max()
    merged = ends.merged(streams, times)
    rest = [resized(streams[:, i + 1] @ each.T.astype(np.float64), size) for i, each in enumerate(end)]
    np.testing.assert_allclose(merged, np.mean([streams[:, 0], *rest], axis=0), rtol=0, atol=1e-5)
    for i in range(n):
        alone = ends.spread(x[i : i + 1], times)
        assert alone.tobytes() == streams[i : i + 1].tobytes()
        assert ends.merged(alone, times).tobytes() == merged[i : i + 1].tobytes()


def test_sparse_gates():
    """About the share of a normal distribution is 0, whatever its mean and spread."""
    before = normal(60, 50, 2 * 3000) * 3 + 5
    for share in (0.95, 0.5, 0.1):
        found = before.copy()
        thin(found, cutoff_of(share))
        assert abs(np.mean(found[:, :3000] == 0) - share) < 0.01
        assert share_of(cutoff_of(share)) == pytest.approx(share, abs=1e-7)
    assert share_of(-math.inf) == 0
    assert cutoff_of(0.95) == pytest.approx(1.6448536)


def test_what_a_config_says():
    config = ModelConfig.from_dict(content())
    assert (config.streams.count, config.streams.active, config.streams.rank) == (4, 0, 10)
    assert [size.kv_layer for size in config.sizes] == [None] * 4 + [1, 3, 1]
    assert [size.cutoff is None for size in config.sizes] == [False, False, False, True, True, False, True]
    assert ModelConfig.from_dict(content("gemma4")).streams is None
    every = ModelConfig.from_dict(content() | {"intermediate_size": [72] * 7})
    assert every == config
    other = ModelConfig.from_dict(content() | {"layer_types": ["full_attention"] + ["sliding_attention"] * 6})
    assert other.windows[-1] == 20
    published = ModelConfig.from_dict(content() | {  # E2B: what its files say
        "num_hidden_layers": 30, "num_kv_shared_layers": 10, "intermediate_size": [8192] * 30, "sliding_window": 512,
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "vocab_size": 262400, "rope_parameters": None,
        "vocab_size_per_layer_input": 262144, "max_position_embeddings": 32768, "rope_theta": 1e6, "rope_scaling": None,
        "rope_local_base_freq": 10000.0, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
    })
    assert [size.kv_layer for size in published.sizes[19:]] == [None, *[18, 18, 18, 18, 19] * 2]
    assert (published.rope.theta, published.window_rope.theta, published.attention_scale) == (1e6, 1e4, 1.0)
    assert {size.cutoff for size in published.sizes[:10]} == {cutoff_of(0.95)}


@pytest.mark.parametrize(("changes", "message"), [
    ({"altup_active_idx": 4}, "altup_active_idx: expected one of 4 streams, got 4"),
    ({"altup_num_inputs": 0}, "altup_num_inputs: expected a positive whole number"),
    ({"altup_correct_scale": 1}, "altup_correct_scale: expected true or false, got 1"),
    ({"laurel_rank": 0}, "laurel_rank: expected a positive whole number"),
    ({"activation_sparsity_pattern": [0.5] * 6}, f"{SHARES} for each of 7 layers"),
    ({"activation_sparsity_pattern": [0.5] * 6 + [1.0]}, SHARES),
    ({"activation_sparsity_pattern": [0.5] * 6 + ["x"]}, SHARES),
    ({"activation_sparsity_pattern": 0.5}, SHARES),
    ({"activation_sparsity_pattern": [0.5] * 6 + [1e-50]}, SHARES),
    ({"intermediate_size": [72] * 6}, "intermediate_size: expected one for each of 7 layers"),
    ({"intermediate_size": [72] * 6 + [0]}, "per_layer_config.6.intermediate_size: expected a positive whole number"),
    ({"num_kv_shared_layers": 7}, "num_kv_shared_layers: expected a whole number of at least 0 up to 6, got 7"),
    ({"vocab_size_per_layer_input": 0}, "vocab_size_per_layer_input: expected a positive whole number"),
])
def test_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict(content() | changes)


def test_tokens_without_inputs_of_their_own():
    """The table has 90 of 96 tokens: the others have the inputs of token 0."""
    model = Transformer.from_pretrained(golden_folder("gemma3n_streams"))
    assert model.weights.inputs.table.shape[0] == model.config.layer_input_tokens == 90
    x = normal(70, 3, 48)
    found = model._token_inputs(np.array([0, 95, 89], np.uint32), np.stack([x[0], x[0], x[0]]))
    assert found[0].tobytes() == found[1].tobytes() != found[2].tobytes()


def test_packed_weights():
    """The matrices that choose among streams stay as they are stored."""
    exact = Transformer.from_pretrained(golden_folder("gemma3n"), weights="f32")
    expected = run_dense(exact, TOKENS)
    for kind, bound in (("q8", 0.3), ("q4", 0.9)):
        packed = Transformer.from_pretrained(golden_folder("gemma3n"), weights=kind)
        streams = packed.weights.layers[2].streams
        assert {streams.router.format, streams.predict.format, streams.correct.format} == {"bf16"}
        assert {streams.left.format, packed.weights.ends.begin[0].format} == {f"{kind}_{'0' if kind == 'q8' else '1'}"}
        error = np.sqrt(np.mean((run_dense(packed, TOKENS) - expected) ** 2)) / expected.std()
        assert 0 < error < bound


def test_the_fingerprint_covers_the_ends():
    model, other = (Transformer.from_pretrained(golden_folder("gemma3n")) for _ in range(2))
    ends = other.weights.ends
    changed = matrix(ends.end[2].to_float32() + np.float32(0.5))
    other.weights = replace(other.weights, ends=replace(ends, end=(*ends.end[:2], changed)))
    assert fingerprint(other) != fingerprint(model)


def test_a_network_that_takes_images_and_sounds(tmp_path):
    """The text network of a published folder: its names have a prefix, K and V of layers that share are left out."""
    folder, config = golden_folder("gemma3n"), content()
    expected = Transformer.from_pretrained(folder)
    checkpoint, arrays = Checkpoint(seeded("gemma3n")), {}
    for name in checkpoint._files:
        arrays[name.replace("model.", "model.language_model.", 1)] = checkpoint.read(name)
    for part, shape in (("k_proj.weight", (72, 48)), ("v_proj.weight", (72, 48)), ("k_norm.weight", (24,))):
        arrays[f"model.language_model.layers.5.self_attn.{part}"] = np.ones(shape, np.float32)
    for name in ("vision_tower.x", "audio_tower.x", "embed_vision.x", "embed_audio.x"):
        arrays[f"model.{name}.weight"] = np.ones((2, 2), np.float32)
    (tmp_path / "model.safetensors").write_bytes(pack_arrays(arrays))
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": {
        key: value for key, value in config.items() if key not in ("architectures", "tie_word_embeddings")
    }}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    found = Transformer.from_pretrained(tmp_path)
    assert found.config == expected.config
    assert_same_weights(found, expected)


class TestGguf:
    """Files of llama.cpp's converter, with entries that are missing or do not fit."""

    def file(self, tmp_path, changes=()):
        folder = as_converted(golden_folder("gemma3n"), tmp_path / "folder")
        config = ModelConfig.from_pretrained(folder)
        letters, entries = entries_of(config, content())
        entries = {key: value for key, value in (entries | dict(changes)).items() if value is not None}
        return write(tmp_path / "x.gguf", letters, entries, tensors_of(folder, config))

    def test_a_table_with_all_tokens(self, tmp_path):
        """Converters fill the table of inputs with zeros."""
        found = Transformer.from_pretrained(self.file(tmp_path, {"gemma3n.final_logit_softcapping": None}))
        assert found.config.layer_input_tokens == 96
        assert found.config.logit_softcap == 30  # of files that leave it out

    @pytest.mark.parametrize(("changes", "message"), [
        ({"altup.num_inputs": None}, "altup.num_inputs: expected a number, got nothing"),
        ({"altup.active_idx": (U32, 4)}, "gemma3n.altup.active_idx: expected one of 4 streams, got 4"),
        ({"altup.num_inputs": (U32, 3)}, "altup_proj.weight: expected shape"),
        ({"attention.shared_kv_layers": None}, "attention.shared_kv_layers: expected a number, got nothing"),
        ({"activation_sparsity_scale": None}, "activation_sparsity_scale: expected a number for each of 7 layers"),
        ({"activation_sparsity_scale": (ARRAY, [1.0] * 6, F32)}, "sparsity_scale: expected a number for each of 7"),
        *(({"activation_sparsity_scale": (ARRAY, [wrong] * 7, F32)}, "sparsity_scale: expected numbers up to 5 or")
          for wrong in (99.0, -99.0, math.inf, math.nan)),
    ])
    def test_refused(self, tmp_path, changes, message):
        named = {f"gemma3n.{key}": value for key, value in changes.items()}
        with pytest.raises(CheckpointError, match=message):
            Transformer.from_pretrained(self.file(tmp_path, named))
