"""Engines over layers of several sizes, layers that read K and V of others, and heads that no kernel has."""

import json
import random

import numpy as np
import pytest
from places import GOLDEN
from seeded_weights import SEEDED, golden_folder
from serving import same, sampled
from tier_stores import ObjectStore

from kvcache import BatchEngine, InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.engine import ModelConfig, Transformer
from kvcache.errors import CheckpointError
from kvcache.eviction import EvictionPolicy
from kvcache.networks.fingerprint import fingerprint
from kvcache.networks.names import tensors_of
from kvcache.networks.padded_heads import stored_sizes
from kvcache.networks.tensors import StoredRows
from kvcache.networks.weights import Weights
from kvcache.policies import ExpectedAttention, SnapKV
from kvcache.tiers import Tiers

pytestmark = pytest.mark.one_build

PADDED = {
    "llama_26": [32], "qwen3_100": [128, 128], "gpt_oss_18": [32, 32], "gemma4_20": [32, 32], "deepseek_v3_44": [96],
}
NAMES = ("gemma3n", "gemma4", "gemma4_experts", "gemma4_unified", "mimo_v2_flash", "mimo_v2_flash_groups", *PADDED)
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
        ("deepseek_v3_44", {"kv_lora_rank": 560}, "at most 576 channels, got 570, which are kept as 608"),
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


class Drawn:
    """Tensors of a network of any sizes, by their Hugging Face names: `Tensors` without a file."""

    def __init__(self, config):
        self._shapes = dict(tensors_of(config))
        if config.paired:  # a layer that attends takes the rows that the layer with a state before it took
            names = [f"model.layers.{i}.input_layernorm.weight" for i in range(config.num_layers)]
            self._shapes |= dict.fromkeys(names, (config.hidden_size,))

    def __contains__(self, name):
        return name in self._shapes

    def require(self, expected, optional=None):
        pass

    def format(self, name):
        return "f32"

    def read(self, name):
        shape = self._shapes[name]
        found = np.random.default_rng(len(name)).standard_normal(shape, np.float32) * np.float32(0.3)
        if name.endswith("act_fn.eps"):
            return np.array(-0.1, np.float32)
        return -np.abs(found) - np.float32(0.1) if name.endswith("mixer.rate") else found

    def rows(self, name, first, stop):
        return StoredRows("f32", self.read(name)[first:stop])


SIZES = {
    "hidden_size": (50, 33), "intermediate_size": (33, 1), "vocab_size": (97, 11), "head_dim": (26, 100, 2, 130, 514),
    "num_attention_heads": (3, 5), "num_key_value_heads": (1, 3), "moe_intermediate_size": (21,),
    "linear_key_head_dim": (7, 130), "linear_value_head_dim": (5, 300), "linear_conv_kernel_dim": (1, 7),
    "conv_L_cache": (1, 2), "mamba_head_dim": (1, 5), "ssm_state_size": (3, 300), "conv_kernel": (1, 5),
    "kv_lora_rank": (34, 7, 560), "qk_rope_head_dim": (2, 10, 64), "qk_nope_head_dim": (1, 7), "v_head_dim": (1, 9),
    "q_lora_rank": (5,), "moe_latent_size": (7,), "hidden_size_per_layer_input": (5,), "sliding_window": (1, 3),
    "shared_expert_intermediate_size": (5,), "mamba_d_state": (3,),
}


def test_sizes_run_or_are_refused_before_weights_are_read():
    """Drawn sizes of every kind of network: a configuration is refused, or its texts have their bits in pieces."""
    rng, ran = random.Random(3), 0
    for name in SEEDED:
        content = json.loads((GOLDEN / "seeded" / name / "config.json").read_text())
        texts = content.get("text_config", content)
        texts |= {key: rng.choice(some) for key, some in SIZES.items() if texts.get(key) and rng.random() < 0.3}
        try:
            config = ModelConfig.from_dict(content)
        except CheckpointError:
            continue
        model = Transformer(config, Weights.read(Drawn(config), config))
        text = prompt(0, 40) % config.vocab_size
        whole, pieces = (InferenceEngine(model, prefill_chunk=each).prefill_from_pos(text, 0) for each in (64, 7))
        assert np.isfinite(whole).all(), name
        assert whole.tobytes() == pieces.tobytes(), name
        ran += 1
    assert ran > 0.5 * len(SEEDED)
