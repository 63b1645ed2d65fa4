"""Every public call with every hostile value in place of each of its arguments.

A call must end with a result or with one of a few errors, soon; the object must be sound after it and go on to work.
`TARGETS` lists, for each public class and function, how it is made and how it is called when all is right.
"""

import itertools
import os
import random
import time
import warnings

import numpy as np
import pytest
from engines import GOLDEN
from hostile_values import VALUES

import kvcache
from kvcache import (
    CachedKvState,
    CacheManager,
    EvictionPolicy,
    EvictionStrategy,
    KvCache,
    KVCacheConfig,
    KvCacheError,
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

ALLOWED = (TypeError, ValueError, IndexError, KvCacheError)
FILES = (*ALLOWED, OSError)
SOON = 10  # seconds for a call, on a busy machine; all but a few take less than a millisecond
ROWS = np.ones((4, 2, 8), np.float32)
LINE = np.ones(16, np.float32)


class Target:
    """What is called.

    Args:
        make: a new object.
        calls: by name, a function of the object and the arguments, and good arguments.
        works: asserts that the object works; the calls leave what it needs.
        errors: that a call may end with.
    """

    def __init__(self, make, calls, works=lambda it: None, errors=ALLOWED):
        self.make, self.calls, self.works, self.errors = make, calls, works, errors


def method(name, *arguments):
    return name, (lambda it, *given: getattr(it, name)(*given), arguments)


def keyword(name, key, value, *arguments):
    """An argument that is given by its name, after those that are not."""
    return f"{name}({key}=)", (lambda it, given: getattr(it, name)(*arguments, **{key: given}), (value,))


def paged():
    cache = PagedKvCache(16, 4, 2, 8, num_layers=2, dtype="f32", eviction_strategy=EvictionStrategy.Priority(4))
    for seq in (1, 2):
        cache.allocate(seq, 4)
        cache.write(0, seq, ROWS, ROWS)
    return cache


def paged_works(cache):
    cache.check()
    for seq in cache.sequence_ids():
        cache.free(seq)
    cache.allocate(77, 4)
    cache.write(1, 77, ROWS, ROWS)
    np.testing.assert_array_equal(cache.read(1, 77)[0], ROWS)
    assert np.isfinite(cache.attention(1, ROWS[:1], [77])).all()
    cache.free(77)
    cache.check()


PAGED = Target(
    paged,
    dict(
        [
            method("allocate", 9, 3),
            method("adopt", 9, [0], 2),
            method("fork", 1, 9),
            method("swap", 1, 2),
            method("free", 1),
            method("append", 1, 2),
            method("truncate", 1, 2),
            method("keep_tokens", 1, [0, 2]),
            method("apply_streaming_llm", 1, 1, 2),
            method("compact", 1),
            method("allocate_batch", [7, 8], [1, 2]),
            method("append_batch", [1, 2]),
            method("fork_batch", [1], [9]),
            method("free_batch", [1]),
            method("get_sequence", 1),
            method("block_table", [1, 2]),
            method("write", 0, 1, ROWS, ROWS, 0),
            method("write_batch", 0, [1], ROWS[:1], ROWS[:1]),
            method("read", 0, 1, 0, 3),
            method("attention", 0, ROWS[:2], [1, 2]),
            keyword("attention", "query_lens", [1, 1], 0, ROWS[:2], [1, 2]),
            keyword("attention", "scale", 0.5, 0, ROWS[:2], [1, 2]),
            keyword("attention", "out", None, 0, ROWS[:2], [1, 2]),
            keyword("attention", "sink_queries", None, 0, ROWS[:2], [1, 2]),
            keyword("attention", "context_lens", [1, 1], 0, ROWS[:2], [1, 2]),
            keyword("attention", "return_scores", True, 0, ROWS[:2], [1, 2]),
            keyword("attention", "return_lse", True, 0, ROWS[:2], [1, 2]),
            method("handle", 1),
            method("with_eviction_strategy", EvictionStrategy.LRU()),
            method("pin", 1),
            method("with_eviction_threshold", 0.5),
            method("set_priority", 1, 2),
            method("unpin", 1),
            method("evict_to_threshold", 0.5),
            method("copy_blocks", [0], [1]),
            method("__contains__", 1),
        ]
    ),
    paged_works,
)

HANDLE = Target(
    lambda: paged().handle(1),
    dict(
        [
            method("key_cache", 0),
            method("value_cache", 0),
            method("kv_cache", 0),
            ("length", (lambda it, n: setattr(it.block_table_mut(), "sequence_length", n), (5,))),
            ("add_blocks", (lambda it, ids: it.block_table_mut().add_blocks(ids), ([1],))),
        ]
    ),
    lambda it: paged_works(it._cache),
)


def kv_cache():
    cache = KvCache(2, 4, 16, num_heads=2)
    cache.store_kv(0, LINE, LINE)
    cache.advance()
    return cache


def kv_cache_works(cache):
    cache.check()
    cache.clear()
    cache.store_kv(1, LINE, LINE)
    cache.advance()
    np.testing.assert_array_equal(cache.get_keys(1), LINE)
    cache.check()


KV = Target(
    kv_cache,
    dict(
        [
            method("store_kv", 0, LINE, LINE),
            method("truncate", 0),
            method("get_keys", 0),
            method("get_values", 0),
            method("for_each_key", 0, lambda position, row: None),
            method("for_each_value", 0, lambda position, row: None),
            method("restore_from_snapshot", [LINE, LINE], [LINE, LINE], 1),
            method("key_cache", 0),
            method("kv_cache", 0),
            ("length", (lambda it, n: setattr(it.block_table_mut(), "sequence_length", n), (1,))),
        ]
    ),
    kv_cache_works,
)


def table():
    return BlockTable(4, [1, 2], [0, 1], 5)


TABLE = Target(
    table,
    dict(
        [
            method("add_blocks", [1]),
            method("extend_sequence", 1),
            method("blocks_needed_for_length", 5, 4),
        ]
    ),
    lambda it: it.num_blocks,
)

TEXT = [1, 2, 3, 4, 5]


def state(n=5):
    return CachedKvState([np.ones(16 * n, np.float32)] * 2, [np.ones(16 * n, np.float32)] * 2, n)


def entries():
    cache = PrefixKvCache(PrefixCacheConfig(max_entries=4, max_memory_bytes=1 << 20, min_prefix_len=1))
    cache.store_snapshot(TEXT, state(), "a")
    return cache


def entries_work(cache):
    cache.check()
    cache.store_snapshot([7, 8, 9, 1, 2], state(), "works")
    assert cache.lookup([7, 8, 9, 1, 2], "works")[0] == 5
    cache.check()


def live():
    cache = KvCache(2, 8, 16)
    cache.restore_from_snapshot([np.ones(80, np.float32)] * 2, [np.ones(80, np.float32)] * 2, 5)
    return cache


ENTRIES = Target(
    entries,
    dict(
        [
            method("lookup", TEXT, "a"),
            method("restore", state(), live()),
            method("store", TEXT, live(), 5, 16, 2, "b"),
            method("store_snapshot", TEXT, state(), "b"),
            method("remove", TEXT, "a"),
        ]
    ),
    entries_work,
)
ENTRIES_FILES = Target(
    entries, dict([method("save", os.devnull, ""), method("load", os.devnull, "")]), entries_work, FILES
)

PAIRS = [([np.ones(64, np.float32)] * 2, [np.ones(64, np.float32)] * 2)]


def blocks():
    cache = PrefixCache(8, 4, 2, 2, 8)
    cache.store([1, 2, 3, 4], 0, PAIRS, "a")
    return cache


def blocks_work(cache):
    cache.check()
    cache.clear()
    assert cache.store([7, 8, 9, 1], 0, PAIRS, "works") == 1
    length, found = cache.lookup([7, 8, 9, 1], "works")
    assert length == 4
    cache.release(found[0].index)
    cache.check()


BLOCKS = Target(
    blocks,
    dict(
        [
            method("lookup", TEXT, "a"),
            method("release", 0),
            method("open_session", TEXT, "a"),
            method("close_session", None),
            method("insert", [1, 2, 3, 4], 0, *PAIRS[0], "b"),
            method("store", [1, 2, 3, 4], 0, PAIRS, "b"),
            method("evict", 1),
            method("get_block", 0),
        ]
    ),
    blocks_work,
)
BLOCKS_FILES = Target(
    blocks,
    dict(
        [
            method("save", os.devnull, ""),
            method("load", os.devnull, ""),
            keyword("save", "beside", (), os.devnull),
            keyword("load", "beside", (), os.devnull),
        ]
    ),
    blocks_work,
    FILES,
)
PREFILL = Target(
    lambda: PrefixAwarePrefill(blocks()),
    dict(
        [
            method("prepare", TEXT, "a"),
            method("store_blocks", [1, 2, 3, 4], 0, PAIRS, "b"),
            method("release_session", None),
        ]
    ),
    lambda it: blocks_work(it.cache),
)
SHARED = Target(
    lambda: PrefixCache.over(paged()),
    dict([method("adopt", [1, 2, 3, 4], [0], "a")]),
    lambda it: it.check(),
)


def manager():
    found = CacheManager(KVCacheConfig(16, 2, 8))
    found.append(LINE, LINE, 0)
    found.append(LINE, LINE, 1)
    return found


def manager_works(found):
    found.check()
    found.append(LINE, LINE, 0)
    assert len(found.positions(0))
    found.check()


MANAGER = Target(
    manager,
    dict(
        [
            method("append", LINE, LINE, 0),
            method("get", [0], 0),
            method("positions", 0),
            method("evict", 1, 0),
            method("attention", ROWS[:1], 0),
            method("update_attention_scores", [1.0], 0),
            method("attention_scores", 0),
            method("pyramid_budget", 0, 4),
        ]
    ),
    manager_works,
)


def function(name, call, *arguments):
    return name, (lambda it, *given: call(*given), arguments)


def named(name, call, key, value, *arguments):
    return f"{name}({key}=)", (lambda it, given: call(*arguments, **{key: given}), (value,))


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
TARGETS = {name.lower(): target for name, target in list(globals().items()) if isinstance(target, Target)}


def single(target):
    """Each hostile value in place of each argument of each call."""
    for name, (_, arguments) in target.calls.items():
        for place, value in itertools.product(range(len(arguments)), VALUES):
            yield name, {place: value}


def several(target, count):
    """Hostile values in place of some arguments, at random."""
    rng = random.Random(0)
    names = [name for name, (_, arguments) in target.calls.items() if len(arguments) > 1]
    for _ in range(count if names else 0):
        name = rng.choice(names)
        places = range(len(target.calls[name][1]))
        yield name, {place: rng.choice(list(VALUES)) for place in rng.sample(places, rng.randrange(2, len(places) + 1))}


CALLS = sum(len(arguments) * len(VALUES) for target in TARGETS.values() for _, arguments in target.calls.values())
assert CALLS >= 12_500, CALLS


def attack(target, cases):
    it = target.make()
    for name, chosen in cases:
        call, good = target.calls[name]
        given = [VALUES[chosen[place]]() if place in chosen else good[place] for place in range(len(good))]
        what = f"{name}: {chosen}"
        start = time.monotonic()
        try:
            call(it, *given)
        except target.errors:
            if hasattr(it, "check"):
                it.check()
        except BaseException as error:
            raise AssertionError(f"{what} raised {type(error).__name__}: {error!s:.200}") from error
        else:
            target.works(it)
            it = target.make()
        assert time.monotonic() - start < SOON, f"{what} took {time.monotonic() - start:.1f} s"
    target.works(it)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_hostile_arguments(name, long, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a text may be the name of a file
    target = TARGETS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attack(target, single(target))
        if long:
            attack(target, several(target, 20_000))
