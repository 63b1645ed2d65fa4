"""Adapters in networks, beside networks into whose weights they are merged."""

import json
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from dense_runs import run_dense
from places import GOLDEN, MODELS
from random_adapters import merged, random_adapter
from seeded_weights import golden_folder

from kvcache.demo import DIRECTORY
from kvcache.engine import InferenceEngine
from kvcache.networks.adapter import PROJECTIONS, Adapter, LowRank, adapted_shapes
from kvcache.networks.adapter_files import read_adapter
from kvcache.networks.model import Transformer
from kvcache.support.arguments import BFLOAT16

pytestmark = pytest.mark.one_build

# Of each kind of layers and rows beside these: states, paired layers, streams, shared K and V, narrow values, no gate.
KINDS = (
    "deepseek_v3_44", "exaone_moe", "falcon_h1", "gemma3n_streams", "gemma4", "kimi_linear", "lfm2", "llama4",
    "mimo_v2_flash", "minicpm", "nemotron_h", "qwen3_5", "starcoder2",
)
TOKENS = np.random.default_rng(0).integers(3, 90, 23).astype(np.uint32)


class Adapted:
    """A network all rows of which have an adapter."""

    def __init__(self, model, adapter):
        self._model, self._prepared = model, model.prepare_adapter(adapter)

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, tokens, positions, attend, logits="last", **more):
        adapters = [(0, len(tokens), self._prepared)]
        return self._model.forward(tokens, positions, attend, logits, adapters=adapters, **more)


@pytest.mark.parametrize("name", sorted(path.name for path in (GOLDEN / "adapters").iterdir()))
def test_adapters_of_peft(name):
    """Compare what tests/golden/make_adapters.py made with what peft makes of a text in float64."""
    folder = GOLDEN / "adapters" / name
    network = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = Transformer.from_pretrained(GOLDEN / network, weights="f32")
    adapter = read_adapter(folder, model.config)
    with np.load(folder / "golden.npz") as golden:
        tokens, logits, plain = (golden[key] for key in ("tokens", "logits", "plain"))
    if adapter.invocation_tokens is None:
        assert distance(run_dense(Adapted(model, adapter), tokens, 8), logits) < 5e-5
    assert distance(run_dense(model, tokens)[-1], plain) < 5e-5
    assert distance(plain, logits[-1]) > 0.01
    engine = InferenceEngine(model, adapters={"mine": folder}, dtype="f32")
    assert engine.adapters["mine"].digest == adapter.digest
    wide = logits.astype(np.float64)
    wanted = np.take_along_axis(wide[:-1], tokens[1:, None].astype(np.int64), 1)[:, 0]
    wanted -= np.log(np.exp(wide[:-1]).sum(axis=1))
    assert distance(engine.score(tokens, adapter="mine"), wanted) < 5e-5


def distance(one, other):
    return np.abs(one - other).max() / np.abs(other).max()


@pytest.mark.parametrize("name", [*MODELS, *KINDS])
def test_an_adapter_is_what_it_is_merged_into_the_weights(name):
    model = Transformer.from_pretrained(golden_folder(name), weights="f32")
    adapter = random_adapter(model.config, 1)
    want = run_dense(merged(model, adapter), TOKENS, 9)
    assert distance(run_dense(Adapted(model, adapter), TOKENS, 9), want) < 5e-5
    assert distance(run_dense(model, TOKENS, 9), want) > 0.1


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
def test_types_of_adapters_and_a_part_of_the_projections(dtype):
    model = Transformer.from_pretrained(GOLDEN / "qwen2", weights="f32")
    for projections in (("q", "v"), ("k", "o"), ("gate",), ("up", "down"), None):
        adapter = random_adapter(model.config, 2, projections=projections, dtype=dtype)
        assert {place for _, place in adapter.matrices} == {*(projections or PROJECTIONS)}
        want = run_dense(merged(model, adapter), TOKENS)
        assert distance(run_dense(Adapted(model, adapter), TOKENS), want) < 5e-5
    floats = random_adapter(model.config, 2)
    mixed = {place: (floats if place[0] else adapter).matrices[place] for place in adapter.matrices}
    mixed[0, "k"] = floats.matrices[0, "k"]  # one product of several types
    want = run_dense(merged(model, Adapter(mixed)), TOKENS)
    assert distance(run_dense(Adapted(model, Adapter(mixed)), TOKENS), want) < 5e-5


@pytest.mark.parametrize("weights", ["auto", "q8", "q4"])
@pytest.mark.parametrize("activations", ["int8", "exact", "bf16"])
def test_rows_have_the_same_bits_beside_others(weights, activations):
    """Also those without an adapter; of the rows that are asked for, and where MLPs take many rows piece by piece."""
    model = Transformer.from_pretrained(GOLDEN / "gemma2", weights=weights, activations=activations)
    adapters = [model.prepare_adapter(random_adapter(model.config, seed, 1 + 9 * seed)) for seed in range(3)]
    lens, of = (4, 230, 1, 9, 2), (0, None, 1, 2, 0)

    def attend(layer, queries, keys, values, *_):  # each row its own, so that no row depends on others
        group = queries.shape[1] // keys.shape[1]
        return queries * np.float32(0.1) + np.repeat(values, group, axis=1) + np.repeat(keys, group, axis=1)

    tokens = np.random.default_rng(3).integers(3, 200, sum(lens)).astype(np.uint32)
    stops = np.cumsum(lens)
    spans = [
        (int(stop) - length, int(stop), adapters[i])
        for stop, length, i in zip(stops, lens, of, strict=True) if i is not None
    ]
    positions = np.arange(sum(lens)) % 100
    both = model.forward(tokens, positions, attend, "all", adapters=spans)
    chosen = np.array([0, 3, 100, 234, 239, 245])
    assert np.array_equal(model.forward(tokens, positions, attend, chosen, adapters=spans), both[chosen])
    for stop, length, i in zip(stops.tolist(), lens, of, strict=True):
        own, given = slice(stop - length, stop), [] if i is None else [(0, length, adapters[i])]
        alone = model.forward(tokens[own], positions[own], attend, "all", adapters=given)
        assert np.array_equal(alone, both[own])
        assert np.array_equal(alone, model.forward(tokens[own], positions[own], attend, "all")) == (i is None)
    for wrong in ([(0, 300, adapters[0])], [(5, 5, adapters[0])], [(3, 9, adapters[0]), (8, 10, adapters[1])]):
        with pytest.raises(ValueError, match="adapters: expected ascending spans of 246 rows"):
            model.forward(tokens, positions, attend, adapters=wrong)


def test_the_digest_names_every_number():
    config = Transformer.from_pretrained(GOLDEN / "llama").config
    adapter = random_adapter(config)
    assert len(adapter.digest) == 20
    assert random_adapter(config, name="other").digest == adapter.digest
    place, own = next(iter(adapter.matrices.items()))
    a, b = own.a.copy(), own.b.copy()
    a[-1, -1] += 1
    b[0, 0] = np.nextafter(b[0, 0], np.float32(9))
    changes = LowRank(a, own.b, own.scale), LowRank(own.a, b, own.scale), replace(own, scale=own.scale + 1e-9)
    others = [Adapter({**adapter.matrices, place: changed}) for changed in changes]
    others += [
        random_adapter(config, invocation=(5,)), random_adapter(config, invocation=(5, 6)), random_adapter(config, 1),
        random_adapter(config, dtype=np.float16), random_adapter(config, projections=("q",)),
        Adapter({(1, "v"): adapter.matrices[0, "v"]}), Adapter({(0, "v"): adapter.matrices[0, "v"]}),
    ]
    assert len({each.digest for each in (*others, adapter)}) == 1 + len(others)
    with pytest.raises(ValueError, match="read-only"):
        own.a[0, 0] = 1
    given = {place: LowRank(a, b, 1.0)}
    before = Adapter(given)
    a[:] = 0
    assert before.matrices[place].a.any()
    assert Adapter(before.matrices).digest == before.digest
    counted = Adapter({(np.int64(layer), name): each for (layer, name), each in adapter.matrices.items()})
    assert counted.digest == adapter.digest, "a number is the same in any type"


def test_what_is_refused():
    model = Transformer.from_pretrained(GOLDEN / "llama")
    a, b = np.ones((2, 64), np.float32), np.ones((64, 2), np.float32)
    nan = a.copy()
    nan[1, 5] = np.nan
    for given, message in (
        ({}, "matrices: expected those of a projection or more, got none"),
        ({(0, "gate_up"): LowRank(a, b, 1)}, "matrices: expected keys (layer, one of q, k, v, o, gate, up, down)"),
        ({(-1, "q"): LowRank(a, b, 1)}, "matrices: expected keys (layer, one of"),
        ({"q": LowRank(a, b, 1)}, "matrices: expected keys (layer, one of"),
        ({(0, "q"): LowRank(a, b[:, :1], 1)}, "matrices.0.q: expected b of float32 (out, 2), as many columns as a has"),
        ({(0, "q"): LowRank(a, b.astype(np.float16), 1)}, "matrices.0.q: expected b of float32 (out, 2)"),
        ({(0, "q"): LowRank(nan, b, 1)}, "matrices.0.q: expected finite numbers, got others"),
        *(
            ({(0, "q"): LowRank(a, b, scale)}, f"0.q.scale: expected a finite number that f32 can hold, got {scale}")
            for scale in (float("inf"), float("nan"), -3.5e38)
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            Adapter(given)
    words = np.full((2, 64), 0x7F80, np.uint16).view(BFLOAT16)
    with pytest.raises(ValueError, match="expected finite numbers"):
        Adapter({(0, "q"): LowRank(words, np.zeros((64, 2), BFLOAT16), 1)})
    for wrong in (a.astype(np.float64), a[0], a.tolist(), a[:0]):
        with pytest.raises(TypeError, match=re.escape("matrices.0.q: expected (rank, in) and (out, rank)")):
            Adapter({(0, "q"): LowRank(wrong, b, 1)})
    for tokens in ((), (-1,), ("a",), (1,) * 4097):
        with pytest.raises(ValueError, match="invocation_tokens: expected 1 to 4096 token ids"):
            Adapter({(0, "q"): LowRank(a, b, 1)}, tokens)
    for key, low, message in (
        ((2, "q"), LowRank(a, b, 1), "mine: layer 2, q: expected one of 2 layers, got layer 2"),
        ((1, "q"), LowRank(a[:, :63], b, 1), "layer 1, q: expected matrices for (out, in) (64, 64), got (64, 63)"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            model.prepare_adapter(Adapter({key: low}, name="mine"))
    with pytest.raises(TypeError, match="adapter: expected an Adapter"):
        model.prepare_adapter({})
    experts = Transformer.from_pretrained(GOLDEN / "mixtral")
    with pytest.raises(ValueError, match=re.escape("a projection that adapters change there, ['q', 'k', 'v', 'o']")):
        experts.prepare_adapter(Adapter({(0, "gate"): LowRank(a, b, 1)}))
    latent = Transformer.from_pretrained(golden_folder("mistral4"))
    assert not adapted_shapes(latent.config)
    with pytest.raises(ValueError, match=re.escape("expected a projection that adapters change there, [], got q")):
        latent.prepare_adapter(Adapter({(0, "q"): LowRank(a, b, 1)}))


def test_matrices_lie_in_one_allocation():
    """In the order in which a pass reads them: it is a third faster than with matrices of their own."""
    model = Transformer.from_pretrained(DIRECTORY)
    prepared = model.prepare_adapter(random_adapter(model.config, rank=16))
    spans = [
        span for layer in sorted(prepared.layers) for place in ("qkv", "output", "gate_up", "down")
        for matrix in (prepared.layers[layer][place].a, *(b for b, _, _ in prepared.layers[layer][place].parts))
        for span in matrix.spans()
    ]
    assert spans == sorted(spans)
    assert all(0 <= second - first - size < 128 for (first, size), (second, _) in pairwise(spans))
