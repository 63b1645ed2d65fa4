"""Engines over layers of several sizes, and layers that read K and V of others: prefixes, files, tiers, fewer rows."""

import numpy as np
import pytest
from seeded_weights import golden_folder
from serving import same, sampled
from tier_stores import ObjectStore

from kvcache import BatchEngine, InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.engine import Transformer
from kvcache.tiers import Tiers

pytestmark = [pytest.mark.one_build, pytest.mark.no_level]

NAMES = ("gemma4", "gemma4_experts", "gemma4_unified")
PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=20, logprobs=1)


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    return Transformer.from_pretrained(golden_folder(request.param))


def prompt(seed, count):
    return np.random.default_rng(seed).integers(0, 96, count).astype(np.uint32)


def cached_engine(model, **options):
    return PrefixCachedEngine(InferenceEngine(model, dtype="q8", block_size=8), 100, strict=True, **options)


def test_caches_of_their_own():
    """E2B: a cache of windows and one of the other layers, with the layers that have K and V."""
    engine = InferenceEngine(Transformer.from_pretrained(golden_folder("gemma4")), num_blocks=8)
    caches = [cache for group in engine._sequence.pool.groups for cache in group.caches]
    assert [(cache.num_layers, cache.num_heads, cache.head_dim) for cache in caches] == [(2, 1, 24), (3, 1, 16)]
    assert [group.layers for group in engine._sequence.pool.groups] == [(1, 4, 6, 7), (0, 2, 3, 5)]


def test_a_prefix_in_memory_in_a_file_and_in_tiers(model, tmp_path):
    """The answer behind a cached prefix has the bits of one without."""
    head, store = prompt(0, 120), ObjectStore()
    text = np.concatenate([head, prompt(1, 30)])
    want = InferenceEngine(model, dtype="q8", block_size=8).complete(text, PARAMS)
    secret = bytes(range(16))
    with Tiers([store], secret=secret, after_uses=1, head_start=60) as tiers:
        first = cached_engine(model, tiers=tiers)
        first.generate(head, PARAMS)
        warm = first.complete(text, PARAMS)
        assert warm.cached_tokens >= 112
        same(warm, want)
        first.save(tmp_path / "cache")
        assert tiers.flush(60)
    loaded = cached_engine(model)
    loaded.load(tmp_path / "cache")
    again = loaded.complete(text, PARAMS)
    assert again.cached_tokens >= 112
    same(again, want)
    with Tiers([store], secret=secret, after_uses=1, head_start=60) as tiers:
        cold = cached_engine(model, tiers=tiers)
        found = cold.complete(text, PARAMS)
        assert found.cached_tokens >= 64
        same(found, want)
        cold.check()


def test_rows_of_which_no_logits_are_asked_stop_where_sharing_begins():
    """Alone, and beside others in a batch; the logits have the bits of all rows."""
    model = Transformer.from_pretrained(golden_folder("gemma4"))
    shared, asked = [i for i, size in enumerate(model.config.sizes) if size.kv_layer is not None], []
    assert shared == [5, 6, 7]

    class Counting:
        selects_rows, config, attention = True, model.config, model.attention

        def forward(self, tokens, positions, attend, logits):
            def counted(layer, queries, *rest):
                asked.append((layer, len(queries)))
                return attend(layer, queries, *rest)

            return model.forward(tokens, positions, counted, logits)

    text = prompt(2, 40)
    engine = InferenceEngine(Counting(), prefill_chunk=16)
    last = engine.prefill_from_pos(text, 0)
    assert [count for layer, count in asked if layer == 0] == [16, 16, 8]
    assert [pair for pair in asked if pair[0] in shared] == [(layer, 1) for layer in shared]
    every = np.zeros((40, 96), np.float32)
    for i in range(40):
        every[i] = InferenceEngine(model).prefill_from_pos(text[: i + 1], 0)
    assert last.tobytes() == every[-1].tobytes()
    asked.clear()
    batch, alone = BatchEngine(Counting(), num_blocks=60), InferenceEngine(model)
    requests = [(prompt(seed, 20 + seed), sampled(seed, 6, logprobs=1)) for seed in range(4)]
    works = [batch.submit(*each) for each in requests]
    while batch.step():
        batch.check()
    for work, each in zip(works, requests, strict=True):
        same(work.completions()[0], alone.complete(*each))
    assert max(count for layer, count in asked if layer in shared) <= 4 < max(count for _, count in asked)
