"""Engines whose queries choose tokens (`sparse_tokens`): one answer however it ran, and what is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
from places import GOLDEN
from seeded_weights import golden_folder
from serving import Alone, Clock, repeating, run, same, settled

from kvcache import BatchEngine, EvictionPolicy, InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.engine import LayerAttention, Transformer
from kvcache.errors import SnapshotError

pytestmark = pytest.mark.one_build

FORMATS = [("q4", 32), ("f16", 0)]


@pytest.mark.parametrize(("dtype", "length"), FORMATS)
def test_requests_beside_each_other_give_what_they_give_alone(rng, network, dtype, length):
    """With shared prefixes, draft tokens and preemptions."""
    stem = rng.integers(0, network.config.vocab_size, 190).astype(np.uint32)
    own = [np.concatenate([stem[: 100 + 30 * i], stem[i : 60 + i]]) for i in range(4)]
    options = {"dtype": dtype, "residual_length": length, "sparse_tokens": 16}
    asked = [(prompt, repeating(i, 60, logprobs=1)) for i, prompt in enumerate(own)]
    alone, engine = Alone(network, **options), BatchEngine(network, num_blocks=26, clock=Clock(), **options)
    requests = [engine.submit(prompt, params) for prompt, params in asked]
    run(engine)
    for request, (prompt, params) in zip(requests, asked, strict=True):
        same(request.completions()[0], alone(prompt, params))
    settled(engine)
    assert engine.stats().preemptions > 0
    assert engine.stats().cached_tokens > 0


@pytest.mark.parametrize(("dtype", "length"), FORMATS)
def test_pieces_and_cached_prefixes_change_no_answer(rng, network, tmp_path, dtype, length):
    options = {"dtype": dtype, "residual_length": length, "num_blocks": 64}
    prompt = rng.integers(0, network.config.vocab_size, 300).astype(np.uint32)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, logprobs=2)
    whole = InferenceEngine(network, sparse_tokens=32, **options)
    cold = whole.complete(prompt, params)
    assert cold.tokens != InferenceEngine(network, **options).complete(prompt, params).tokens
    pieces = InferenceEngine(network, sparse_tokens=32, prefill_chunk=37, **options).complete(prompt, params)
    assert (pieces.tokens, pieces.logprobs) == (cold.tokens, cold.logprobs)
    cached = PrefixCachedEngine(InferenceEngine(network, sparse_tokens=32, **options), 64, strict=True)
    cached.generate(prompt[:250], params)
    warm = cached.complete(prompt, params)
    assert warm.cached_tokens >= 240
    assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)
    cached.check()
    cached.save(tmp_path / "saved")
    again = PrefixCachedEngine(InferenceEngine(network, sparse_tokens=32, **options), 64)
    assert again.load(tmp_path / "saved") > 0
    if not length:
        warm = again.complete(prompt, params)
        assert warm.cached_tokens >= 240
        assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)
    for other in ({}, {"sparse_tokens": 48}):
        with pytest.raises(SnapshotError):
            PrefixCachedEngine(InferenceEngine(network, **options, **other), 64).load(tmp_path / "saved")


def test_summaries_count_as_memory(network):
    limit = 200_000
    for sparse in (None, 16):
        engine = BatchEngine(network, dtype="q4", residual_length=0, max_memory_bytes=limit, sparse_tokens=sparse)
        assert 0.98 * limit < engine.memory()["kv"] <= limit


def test_what_cannot_be_honoured_is_named(network):
    for options, name in (
        ({"eviction_policy": EvictionPolicy.SlidingWindow(64, 4)}, "sparse_tokens"),
        ({"block_size": 24}, "block_size"), ({"sparse_tokens": 0}, "sparse_tokens"),
    ):
        for kind in (InferenceEngine, BatchEngine):
            with pytest.raises(ValueError, match=name):
                kind(network, **{"sparse_tokens": 64, **options})
    latent = Transformer.from_pretrained(golden_folder("deepseek_v3"))
    with pytest.raises(ValueError, match="sparse_tokens: expected None with layers whose V is a part of K"):
        InferenceEngine(latent, sparse_tokens=64)
    layers = LayerAttention(), LayerAttention(num_kv_heads=1, head_dim=32)
    unlike = SimpleNamespace(config=network.config, forward=network.forward, attention=layers)
    with pytest.raises(ValueError, match="sparse_tokens: expected None with layers that keep all tokens"):
        InferenceEngine(unlike, sparse_tokens=64)
    gemma = InferenceEngine(Transformer.from_pretrained(GOLDEN / "gemma2"), sparse_tokens=16)  # windows attend as ever
    assert gemma.sparse_tokens == 16
    assert len(gemma.generate(list(range(1, 200)), SamplingParams(max_tokens=4))) == 4
