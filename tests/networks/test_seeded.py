"""Golden networks whose weights come from a seeded stream, compared with transformers: see golden/make_golden.py."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from dense_runs import run_dense
from seeded_weights import SEEDED, seeded, tensors_of, write
from serving import run, settled

from kvcache import BatchEngine
from kvcache.engine import InferenceEngine, SamplingParams, Transformer

pytestmark = pytest.mark.one_build

GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=64)
NOISE = 2e-6  # of the largest logit: float32 against float64


@pytest.fixture(scope="module", params=SEEDED)
def golden(request):
    """A loaded network, its reference arrays, and the lengths of its prompts."""
    folder = seeded(request.param)
    with np.load(folder / "golden.npz") as found:
        arrays = dict(found)
    lengths = sorted(int(name.removeprefix("prompt_")) for name in arrays if name.startswith("prompt_"))
    return Transformer.from_pretrained(folder), arrays, lengths


def test_networks(golden):
    """Every position, compared with float64."""
    model, arrays, lengths = golden
    for length in lengths:
        expected, theirs = arrays[f"exact_{length}"], arrays[f"logits_{length}"]
        largest, rounding = np.abs(expected).max(), np.abs(theirs - expected).max()
        whole = run_dense(model, arrays[f"prompt_{length}"])
        rows = whole[arrays[f"positions_{length}"]]
        np.testing.assert_allclose(rows, expected, rtol=0, atol=max(NOISE * largest, 2 * rounding))


def test_texts(golden):
    """The greedy continuation in a batch; of the shortest and the longest alone; of this one in pieces, bit for bit."""
    model, arrays, lengths = golden
    prompts = [arrays[f"prompt_{length}"] for length in lengths]
    expected = [arrays[f"greedy_{length}"].tolist() for length in lengths]
    engines = [InferenceEngine(model, prefill_chunk=chunk) for chunk in (512, 7)]
    for engine, which in zip(engines, ((0, -1), (-1,)), strict=True):  # a single token is one piece at any size
        for i in which:
            assert engine.generate(prompts[i], GREEDY) == expected[i]
        engine.check()
    whole, pieces = (engine.prefill_from_pos(prompts[-1], 0) for engine in engines)
    np.testing.assert_array_equal(whole, pieces)
    engine = BatchEngine(model)
    requests = [engine.submit(prompt, GREEDY) for prompt in prompts]
    run(engine)
    assert [request.completions()[0].tokens for request in requests] == expected
    settled(engine)


def test_other_names_of_norms(tmp_path):
    """OLMo-Hybrid: the norms of layers with a state have names of their own in some files, as others have them."""
    folder = seeded("olmo_hybrid")
    spec = json.loads((folder / "weights.json").read_text())
    tensors = {name: array for name, (_, _, array) in tensors_of(spec).items()}
    expected = run_dense(Transformer.from_pretrained(folder, weights="f32"), np.arange(9, dtype=np.uint32))
    names = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    for own, other in names.items():
        tensors = {name.replace(own, other): array for name, array in tensors.items()}
    write(tmp_path / "model.safetensors", {name: ("F32", array, array) for name, array in tensors.items()})
    shutil.copy(folder / "config.json", tmp_path)
    found = run_dense(Transformer.from_pretrained(tmp_path, weights="f32"), np.arange(9, dtype=np.uint32))
    np.testing.assert_array_equal(found, expected)
