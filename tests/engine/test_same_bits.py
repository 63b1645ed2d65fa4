"""A text gives the same logits, bit for bit, in any pieces, beside a cached prefix, and on any number of threads."""

from itertools import pairwise

import numpy as np
import pytest
from pace import FAST, half
from places import GOLDEN

from kvcache import get_num_threads, set_num_threads
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams, Transformer

WEIGHTS = ("auto", "f32", "f16", "q8", "q4")
NETWORKS = (
    "llama", "llama_biases", "qwen3_tied", "gemma2", "gpt_oss", "qwen3_moe", "olmo2", "granite", "phi3_longrope",
)


@pytest.fixture(autouse=True)
def threads():
    before = get_num_threads()
    yield
    set_num_threads(before)


def pieces_of(rng, tokens):
    """The tokens cut at random places; single tokens among them."""
    cuts = np.unique(np.concatenate([[0, len(tokens)], rng.integers(0, len(tokens), 6), [len(tokens) - 1]]))
    return [(int(a), tokens[a:b]) for a, b in pairwise(cuts)]


@pytest.mark.parametrize(
    ("weights", "activations"),
    [*((weights, "int8") for weights in WEIGHTS), ("q8", "exact"), ("q4", "exact"), ("bf16", "bf16"), ("q4", "bf16")],
)
@pytest.mark.parametrize("name", half(NETWORKS))
def test_pieces_and_threads(rng, name, weights, activations):
    model = Transformer.from_pretrained(GOLDEN / name, weights=weights, activations=activations)
    tokens = rng.integers(0, model.config.vocab_size, 45).astype(np.uint32)
    for dtype in ("f16",) if FAST else ("f32", "f16"):
        set_num_threads(1)
        whole = InferenceEngine(model, dtype=dtype, num_blocks=8)
        want = whole.prefill_from_pos(tokens, 0)
        for count in (3,) if FAST else (1, 3):
            set_num_threads(count)
            engine = InferenceEngine(model, dtype=dtype, num_blocks=8, prefill_chunk=int(rng.integers(1, 50)))
            for at, piece in pieces_of(rng, tokens):
                logits = engine.prefill_from_pos(piece, at)
            np.testing.assert_array_equal(logits.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize(
    ("weights", "dtype", "activations"),
    [*((weights, dtype, "int8") for weights in WEIGHTS for dtype in ("f32", "q8", "q4")),
     *((weights, "f32", "bf16") for weights in ("f16", "q8"))],
)
def test_a_cached_prefix_gives_the_cold_text(rng, weights, dtype, activations):
    """Scores of the new tokens too, where K and V are floats."""
    model = Transformer.from_pretrained(GOLDEN / "llama", weights=weights, activations=activations)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=2)
    prompt = rng.integers(0, model.config.vocab_size, 50).astype(np.uint32)
    cold = InferenceEngine(model, dtype=dtype, num_blocks=16).complete(prompt, params)
    cached = PrefixCachedEngine(InferenceEngine(model, dtype=dtype, num_blocks=64), 32, strict=True)
    cached.generate(prompt[:40], params)
    warm = cached.complete(prompt, params)
    assert warm.cached_tokens >= 32
    assert warm.tokens == cold.tokens
    if dtype == "f32":
        assert warm.logprobs == cold.logprobs
