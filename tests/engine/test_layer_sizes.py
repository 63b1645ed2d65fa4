"""Engines over layers of several sizes, layers that read K and V of others, and heads that no kernel has."""

import json

import numpy as np
import pytest
from seeded_weights import golden_folder
from serving import same, sampled
from tier_stores import ObjectStore

from kvcache import BatchEngine, InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.engine import Transformer
from kvcache.errors import CheckpointError
from kvcache.eviction import EvictionPolicy
from kvcache.networks.fingerprint import fingerprint
from kvcache.networks.padded_heads import stored_sizes
from kvcache.policies import ExpectedAttention, SnapKV
from kvcache.tiers import Tiers

pytestmark = [pytest.mark.one_build, pytest.mark.no_level]

PADDED = {
    "llama_26": [32], "qwen3_100": [128, 128], "gpt_oss_18": [32, 32], "gemma4_20": [32, 32], "deepseek_v3_44": [96],
}
NAMES = ("gemma4", "gemma4_experts", "gemma4_unified", *PADDED)
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


def test_heads_that_no_kernel_has():
    """A cache has them with zeros; files and tiers name them by their true size."""
    named = {"llama_26": "-heads26-", "gemma4_20": "-heads12-heads20-", "deepseek_v3_44": "-heads34+10-"}
    for name, sizes in PADDED.items():
        model = Transformer.from_pretrained(golden_folder(name))
        caches = [cache for group in InferenceEngine(model)._sequence.pool.groups for cache in group.caches]
        assert [cache.head_dim for cache in caches if cache.num_layers] == sizes
        assert named.get(name, "-heads") in fingerprint(model)
    assert "heads" not in fingerprint(Transformer.from_pretrained(golden_folder("llama_odd")))
    sizes = {8: 8, 24: 24, 26: 32, 32: 32, 40: 64, 64: 64, 80: 96, 96: 96, 100: 128, 112: 128, 128: 128, 500: 512}
    assert {size: stored_sizes((size,))[0] for size in sizes} == sizes
    assert stored_sizes((512, 64)) == (512, 64)
    assert stored_sizes((40, 16)) == (40, 16)
    assert stored_sizes((34, 10)) == (64, 32)


def test_padded_heads_in_all_formats():
    """Packed rows are about as near to float32 as those of other heads; their bits do not depend on pieces."""
    for name in PADDED:
        model, text = Transformer.from_pretrained(golden_folder(name)), prompt(4, 90)
        exact = InferenceEngine(model).prefill_from_pos(text, 0)
        calibrations = [False, prompt(5, 150)] if name in ("llama_26", "deepseek_v3_44") else [False]
        for dtype, bound in (("f16", 0.02), ("q8", 0.2), ("q4", 2.5)):
            for calibrate in calibrations if dtype == "q4" else [False]:
                options = {"dtype": dtype, "calibrate": calibrate}
                found, pieces = (
                    InferenceEngine(model, **options, prefill_chunk=chunk).prefill_from_pos(text, 0)
                    for chunk in (512, 7)
                )
                assert found.tobytes() == pieces.tobytes(), (name, dtype)
                error = float(np.sqrt(np.mean((found - exact) ** 2)))
                assert 0 < error < bound, (name, dtype, error)


def test_padded_heads_under_policies():
    """A budget beyond the text changes nothing; a prefix that keeps all tokens is the text."""
    model, text = Transformer.from_pretrained(golden_folder("llama_26")), prompt(6, 80)
    want = InferenceEngine(model, block_size=8).complete(text, PARAMS)
    for policy in (EvictionPolicy.H2O(), SnapKV(16), ExpectedAttention()):
        found = InferenceEngine(model, block_size=8, eviction_policy=policy, kv_budget=200).complete(text, PARAMS)
        assert found.tokens == want.tokens
    streaming = InferenceEngine(model, block_size=8, eviction_policy=EvictionPolicy.StreamingLLM(4, 250))
    assert streaming.complete(text, PARAMS).tokens == want.tokens
    sparse = InferenceEngine(model, sparse_tokens=128, dtype="q8")
    assert sparse.complete(text, PARAMS).tokens == InferenceEngine(model, dtype="q8").complete(text, PARAMS).tokens
    short = InferenceEngine(model, block_size=8, eviction_policy=EvictionPolicy.StreamingLLM(4, 24))
    assert len(short.complete(text, PARAMS).tokens) == 20
    engine = InferenceEngine(model, block_size=8)
    prefix = engine.compress(text[:60], SnapKV(16), ratio=1.0)
    found = engine.complete(text[60:], PARAMS, prefix=prefix)
    assert found.tokens == want.tokens


def test_heads_of_too_many_channels(tmp_path):
    """Refused by name before weights are read."""
    for name, changes, message in (
        ("llama_26", {"head_dim": 514}, "head_dim: expected a head of at most 512 channels, got 514"),
        ("llama_26", {"head_dim": 27}, "head_dim: expected an even number"),
        ("deepseek_v3_44", {"kv_lora_rank": 560}, "kv_lora_rank: expected a head of at most 576 channels, got 570"),
        ("gemma4_20", {"per_layer_config": {i: {"head_dim": 600} for i in "14"}}, "head_dim: expected a head"),
    ):
        folder = tmp_path / f"{name}{len(message)}"
        folder.mkdir()
        content = json.loads((golden_folder(name) / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | changes))
        with pytest.raises(CheckpointError, match=message):
            InferenceEngine.from_pretrained(folder)


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
