"""Targets: constructors, functions and engines, with every public call on them."""

import os
from types import SimpleNamespace

import numpy as np
from hostile.caches import blocks, paged
from hostile.target import FILES, LINE, ROWS, Target, function, keyword, method, named
from places import GOLDEN

import kvcache
from kvcache import (
    CachedKvState,
    CacheManager,
    EvictionPolicy,
    EvictionStrategy,
    KvCache,
    KVCacheConfig,
    PagedKvCache,
    PrefixAwarePrefill,
    PrefixCache,
    PrefixCacheConfig,
    PrefixCachedEngine,
    PrefixKvCache,
    SamplingParams,
    merge_attention,
)
from kvcache.engine import InferenceEngine, ModelConfig, Transformer
from kvcache.handle import BlockTable

PAGED_OPTIONS = {
    "num_layers": 1,
    "dtype": "f16",
    "key_dtype": None,
    "value_dtype": None,
    "rotate": "auto",
    "eviction_strategy": None,
    "eviction_threshold": 0.5,
}
CONFIG_OPTIONS = {
    "max_entries": 4,
    "max_memory_bytes": 1 << 20,
    "min_prefix_len": 1,
    "partial_matches": True,
    "dtype": "f32",
    "key_dtype": None,
    "value_dtype": None,
    "rotate": "auto",
    "head_dim": None,
}
SAMPLING_OPTIONS = {
    "temperature": 0.7,
    "top_k": 1,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "max_tokens": 3,
    "seed": 1,
    "stop_token_ids": (1,),
}
CONSTRUCTORS = Target(
    lambda: None,
    dict(
        [
            function("PagedKvCache", PagedKvCache, 4, 4, 2, 8),
            *(named("PagedKvCache", PagedKvCache, key, value, 4, 4, 2, 8) for key, value in PAGED_OPTIONS.items()),
            ("PagedKvCache of latent rows", (
                lambda _, latent, *index: PagedKvCache(
                    4, 4, latent=latent, **dict(zip(("index_layers", "index_dim", "index_dtype"), index, strict=True))
                ), ((8, 8), 1, 8, "q8"),
            )),
            function("PrefixCache", PrefixCache, 4, 4, 2, 2, 8),
            *(
                named("PrefixCache", PrefixCache, key, None, 4, 4, 2, 2, 8)
                for key in ("dtype", "key_dtype", "value_dtype")
            ),
            function("PrefixCache.over", lambda *given: PrefixCache.over(*given), paged(), 2),
            function("PrefixKvCache", PrefixKvCache, None),
            function("PrefixAwarePrefill", PrefixAwarePrefill, blocks()),
            *(named("PrefixCacheConfig", PrefixCacheConfig, key, value) for key, value in CONFIG_OPTIONS.items()),
            function("KvCache", KvCache, 2, 4, 16),
            named("KvCache", KvCache, "num_heads", 2, 2, 4, 16),
            function("KVCacheConfig", KVCacheConfig, 16, 2, 8, 4, EvictionPolicy.H2O()),
            named("KVCacheConfig", KVCacheConfig, "key_bits", 4, 16, 2, 8),
            named("KVCacheConfig", KVCacheConfig, "value_bits", 4, 16, 2, 8),
            function("CacheManager", CacheManager, KVCacheConfig(16, 2, 8)),
            function("CachedKvState", CachedKvState, [LINE], [LINE], 1),
            function("merge_attention", merge_attention, ROWS, ROWS[:, :, 0], ROWS, ROWS[:, :, 0]),
            function("Priority", EvictionStrategy.Priority, 3),
            function("StreamingLLM", EvictionStrategy.StreamingLLM, 4, 8),
            function("EvictionStrategy", EvictionStrategy, "LRU", "recency", None, None, None),
            function("EvictionStrategy levels", EvictionStrategy, "Priority", "priority", 3),
            function("H2O", EvictionPolicy.H2O, 0.5),
            function("SlidingWindow", EvictionPolicy.SlidingWindow, 8, 2),
            function("policy StreamingLLM", EvictionPolicy.StreamingLLM, 4, 8),
            function("PyramidKV", EvictionPolicy.PyramidKV, 4, 0.5),
            function("EvictionPolicy", EvictionPolicy, "H2O", 0.5, None, None, None),
            function("EvictionPolicy window", EvictionPolicy, "SlidingWindow", None, 8, 2),
            *(named("SamplingParams", SamplingParams, key, value) for key, value in SAMPLING_OPTIONS.items()),
            function("CacheBlock", kvcache.CacheBlock, 2, 2, 8, 4),
            function("BlockTable", BlockTable, 4),
            function("set_num_threads", lambda n: _threads(n), 1),
            function("use_simd", lambda n: _level(n), "scalar"),
            function("ModelConfig.from_dict", ModelConfig.from_dict, {}),
        ]
    ),
)


def _threads(count):
    before = kvcache.get_num_threads()
    kvcache.set_num_threads(count)
    kvcache.set_num_threads(before)


def _level(name):
    with kvcache.use_simd(name):
        pass


PATHS = Target(
    lambda: None,
    dict(
        [
            function("InferenceEngine.from_pretrained", InferenceEngine.from_pretrained, GOLDEN / "llama"),
            function("Transformer.from_pretrained", Transformer.from_pretrained, GOLDEN / "llama"),
            function("ModelConfig.from_pretrained", ModelConfig.from_pretrained, GOLDEN / "llama"),
        ]
    ),
    errors=FILES,
)

MODEL = Transformer.from_pretrained(GOLDEN / "llama")
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


def engine():
    found = InferenceEngine(MODEL, GREEDY, num_blocks=8)
    found.prefill_from_pos([1, 2, 3], 0)
    return found


class Words:
    """The text side of a checkpoint without files."""

    special_tokens = {"eos_token": "."}  # noqa: RUF012

    @property
    def tokenizer(self):
        return self

    def template(self, name):
        return "{% for m in messages %}{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}{{ tools | tojson }}"

    def encode(self, text, add_special_tokens=True):
        return SimpleNamespace(ids=[1, 2, len(text) % 7])

    def decode(self, tokens):
        return "x" * len(tokens)


def talking():
    found = engine()
    found.requests.text = Words()
    return found


MESSAGES = [{"role": "user", "content": "hello"}]
TALKING = Target(
    talking,
    dict(
        [
            method("apply_chat_template", MESSAGES),
            keyword("apply_chat_template", "tools", [{"type": "function"}], MESSAGES),
            keyword("apply_chat_template", "add_generation_prompt", True, MESSAGES),
            keyword("apply_chat_template", "tokenize", True, MESSAGES),
            ("a role", (lambda it, given: it.apply_chat_template([{"role": given, "content": "x"}]), ("user",))),
            ("a content", (lambda it, given: it.apply_chat_template([{"role": "user", "content": given}]), ("x",))),
            ("chat", (lambda it, *given: list(it.chat(*given)), (MESSAGES, GREEDY))),
        ]
    ),
    lambda found: engine_works(found),
)


def engine_works(found):
    found.check()
    found.reset()
    assert len(found.generate([1, 2, 3], GREEDY)) <= 2
    found.check()


LOGITS = np.zeros(MODEL.config.vocab_size, np.float32)
ENGINE = Target(
    engine,
    dict(
        [
            method("reseed", 1),
            method("enlarge", 1),
            method("alive_tokens", 0),
            method("kept_positions", 0),
            method("generate", [1, 2, 3], GREEDY),
            method("score", [1, 2, 3]),
            method("prefill_from_pos", [4], 3),
            method("decode_step", 4, 3),
            ("stream", (lambda it, *given: list(it.stream(*given)), ([1, 2, 3], GREEDY))),
            ("decode", (lambda it, *given: list(it.decode(*given)), (LOGITS, GREEDY, (1,)))),
        ]
    ),
    engine_works,
)
ENGINE_OPTIONS = {
    "dtype": "f32",
    "key_dtype": None,
    "value_dtype": None,
    "rotate": "auto",
    "block_size": 16,
    "num_blocks": 8,
    "prefill_chunk": 16,
    "residual_length": None,
    "eviction_policy": None,
    "kv_budget": None,
}
ENGINES = Target(
    lambda: None,
    dict(
        [
            function(
                "InferenceEngine", lambda params, seed: InferenceEngine(MODEL, params, seed, num_blocks=8), GREEDY, 0
            ),
            *(named("InferenceEngine", InferenceEngine, key, value, MODEL) for key, value in ENGINE_OPTIONS.items()),
            function(
                "InferenceEngine H2O",
                lambda budget: InferenceEngine(
                    MODEL, eviction_policy=EvictionPolicy.H2O(), kv_budget=budget, num_blocks=64
                ),
                8,
            ),
            function("PrefixCachedEngine", PrefixCachedEngine, engine(), 2),
            named("PrefixCachedEngine", PrefixCachedEngine, "seed", 1, engine(), 2),
        ]
    ),
)


def cached_works(found):
    found.check()
    assert len(found.generate([1, 2, 3], GREEDY)) <= 2
    found.check()


CACHED = Target(
    lambda: PrefixCachedEngine(engine(), 4, strict=True),
    dict(
        [
            method("generate", [1, 2, 3], GREEDY),
            keyword("generate", "namespace", "a", [1, 2, 3], GREEDY),
            ("stream", (lambda it, *given: list(it.stream(*given)), ([1, 2, 3], GREEDY))),
        ]
    ),
    cached_works,
)
CACHED_FILES = Target(
    lambda: PrefixCachedEngine(engine(), 4),
    dict([method("save", os.devnull, ""), method("load", os.devnull, "")]),
    cached_works,
    FILES,
)
