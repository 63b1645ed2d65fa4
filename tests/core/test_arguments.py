"""Counts, numbers and masked arrays: the same rules for every argument, and limits on sizes."""

import subprocess
import sys

import numpy as np
import pytest
from hostile.limited_process import limited_memory

from kvcache import (
    BatchEngine,
    CachedKvState,
    CacheManager,
    EvictionPolicy,
    EvictionStrategy,
    InferenceEngine,
    KvCache,
    KVCacheConfig,
    KvCacheError,
    OutOfMemoryError,
    PagedKvCache,
    PrefixCache,
    PrefixCacheConfig,
    PrefixKvCache,
    SamplingParams,
    merge_attention,
)
from kvcache.core.calibration import Calibration
from kvcache.demo import DIRECTORY
from kvcache.eviction import pyramid_budgets
from kvcache.kernels.matrix import Matrix
from kvcache.networks.tokens import as_tokens
from kvcache.support.arguments import short
from kvcache.tiers import DirectoryTier

NO_COUNTS = [2.5, 4.0, float("nan"), True, np.True_, "4", None, 1j, np.float32(4), np.array(4), np.timedelta64(4, "s")]
COUNTS = {
    "Priority": EvictionStrategy.Priority,
    "strategy, sinks": lambda n: EvictionStrategy.StreamingLLM(n, 8),
    "strategy, window": lambda n: EvictionStrategy.StreamingLLM(4, n),
    "levels": lambda n: EvictionStrategy("Priority", "priority", levels=n),
    "SlidingWindow, window": lambda n: EvictionPolicy.SlidingWindow(n, 1),
    "SlidingWindow, sink": lambda n: EvictionPolicy.SlidingWindow(8, n),
    "policy, sinks": lambda n: EvictionPolicy.StreamingLLM(n, 8),
    "policy, window": lambda n: EvictionPolicy.StreamingLLM(4, n),
    "PyramidKV": EvictionPolicy.PyramidKV,
    "window": lambda n: EvictionPolicy("SlidingWindow", window=n, sink=1),
    "pyramid_budgets, budget": lambda n: pyramid_budgets(n, 4),
    "pyramid_budgets, layers": lambda n: pyramid_budgets(4, n),
    "pyramid_budget": lambda n: CacheManager(KVCacheConfig(16, 2, 8)).pyramid_budget(0, n),
    "max_blocks": lambda n: PrefixCache.over(PagedKvCache(8, 4, 2, 8), n),
    "adopt": lambda n: adopt(n),
    "top_k": lambda n: SamplingParams(top_k=n),
    "max_tokens": lambda n: SamplingParams(max_tokens=n),
    "num_blocks": lambda n: PagedKvCache(n, 4, 2, 8),
    "num_layers": lambda n: PagedKvCache(8, 4, 2, 8, num_layers=n),
}


def adopt(num_tokens):
    cache = PagedKvCache(8, 4, 2, 8)
    cache.allocate(1, 4)
    cache.adopt(9, [0], num_tokens)
    assert cache.get_sequence(9).num_tokens == num_tokens
    cache.check()


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_ints(name):
    for number in (4, np.int64(4), np.uint8(4)):
        COUNTS[name](number)
    for value in NO_COUNTS:
        if value is None and name == "max_blocks":
            continue
        with pytest.raises(TypeError, match=r"int|whole number"):
            COUNTS[name](value)
    with pytest.raises((ValueError, KvCacheError)):
        COUNTS[name](-2 if name == "top_k" else -1)


SIZES = [2**31, 2**32, 2**40, 2**62, 2**63, 2**64, 10**5000, -(2**31), -(2**63), -(10**30)]


@pytest.fixture
def little_memory():
    with limited_memory(4 << 30):
        yield


@pytest.mark.parametrize("number", SIZES, ids=range(len(SIZES)))
def test_no_size_overflows(number, little_memory):
    """A size that is too large is refused by name, or the call has no memory."""
    sizes = ("num_blocks", "block_size", "num_heads", "head_dim")
    for at, name in enumerate(sizes):
        given = [8, 16, 2, 8]
        given[at] = number
        with pytest.raises((ValueError, OutOfMemoryError), match=rf"{name}|memory"):
            PagedKvCache(*given)
    with pytest.raises((ValueError, OutOfMemoryError), match=r"num_layers|memory"):
        PagedKvCache(8, 16, 2, 8, num_layers=number)
    with pytest.raises(OutOfMemoryError, match=r"requested \d{19,} bytes"):  # each size is legal
        PagedKvCache(4, 256, 2**28, 512, num_layers=2**16)
    for at in range(5):
        given = [8, 4, 2, 2, 8]
        given[at] = number
        with pytest.raises((ValueError, OutOfMemoryError)):
            PrefixCache(*given)
    for at in range(3):
        for make, good in ((KvCache, [2, 4, 16]), (KVCacheConfig, [16, 2, 8])):
            given = list(good)
            given[at] = number
            with pytest.raises((ValueError, OutOfMemoryError)):
                make(*given)
    for given in ((number, 64), (64, number), (number, number)):
        for format in ("f32", "q4_0"):
            with pytest.raises((ValueError, OutOfMemoryError), match=r"rows|columns|memory"):
                Matrix(*given, format)


@pytest.mark.parametrize(
    "arguments",
    [
        ("LRU", "frequency"), ("lru", "recency"), (3, "recency"), ("LRU", "recency", 4), ("Priority", "priority"),
        ("StreamingLLM", "recency", None, 4), ("StreamingLLM", "recency", 3, 4, 5), ("Priority", "priority", 0),
        ("LRU", ["recency"]), (["LRU"], "recency"), ("Priority", "priority", 2**31),
    ],
)
def test_inconsistent_strategies(arguments):
    with pytest.raises((TypeError, ValueError)):
        EvictionStrategy(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("H2O",), ("h2o", 0.5), ("H2O", 1.5), ("H2O", float("nan")), ("H2O", True), ("H2O", "0.5"), ("H2O", 0.5, 3),
        ("SlidingWindow", None, 3), ("SlidingWindow", 0.5, 3, 4), ("PyramidKV", 0.5), ("H2O", 0.5, None, None, 4),
        (None, 0.5), ("PyramidKV", 0.5, None, None, 4097), ("SlidingWindow", None, 2**63, 0), ("H2O", 10**400),
    ],
)
def test_inconsistent_policies(arguments):
    with pytest.raises((TypeError, ValueError)):
        EvictionPolicy(*arguments)


@pytest.mark.parametrize("layers", [4097, 2**31, 2**63, 10**30])
def test_pyramids_of_too_many_layers(layers):
    for make in (COUNTS["PyramidKV"], COUNTS["pyramid_budget"], COUNTS["pyramid_budgets, layers"]):
        with pytest.raises(ValueError, match="total_layers: expected an int <= 4096"):
            make(layers)


def slow_pyramid(budget, layers):
    """The definition, in quadratic time."""
    whole = layers * (layers + 1) // 2
    parts = [divmod(budget * weight, whole) for weight in range(layers, 0, -1)]
    budgets = [share for share, _ in parts]
    for layer in sorted(range(layers), key=lambda layer: -parts[layer][1])[: budget - sum(budgets)]:
        budgets[layer] += 1
    for layer in range(layers):
        if budgets[layer] == 0 and budget >= layers:
            giver = budgets.count(max(budgets)) - 1
            budgets[giver] -= 1
            budgets[layer] = 1
    return tuple(budgets)


def test_pyramids_agree_with_the_definition():
    for layers in (1, 2, 3, 5, 8, 13, 40):
        for budget in (*range(120), 1000, 4097):
            assert pyramid_budgets(budget, layers) == slow_pyramid(budget, layers)


def test_the_work_of_a_pyramid_does_not_grow_with_its_budget():
    for budget in (4096, 5000, 100_000, 2**62):  # a step for each token would never end
        assert sum(pyramid_budgets(budget, 4096)) == budget


# -- masked arrays ------------------------------------------------------------------------------------------

ROWS, LINE = np.ones((4, 2, 8), np.float32), np.ones(16, np.float32)


def paged():
    cache = PagedKvCache(16, 4, 2, 8, dtype="f32")
    cache.allocate(1, 4)
    cache.write(0, 1, ROWS, ROWS)
    return cache


def manager():
    found = CacheManager(KVCacheConfig(16, 2, 8))
    found.append(LINE, LINE)
    return found


def kv_cache():
    return KvCache(1, 4, 16)


PAIRS = ([np.ones(64, np.float32)], [np.ones(64, np.float32)])
# A valid array, and a call that takes it with otherwise valid arguments.
ARRAYS = {
    "keys": (ROWS, lambda x: paged().write(0, 1, x, ROWS)),
    "values": (ROWS, lambda x: paged().write(0, 1, ROWS, x)),
    "batch keys": (ROWS[:1], lambda x: paged().write_batch(0, [1], x, ROWS[:1])),
    "queries": (ROWS, lambda x: paged().attention(0, x, [1], query_lens=[4])),
    "sink queries": (ROWS, lambda x: paged().attention(0, ROWS, [1], query_lens=[4], sink_queries=x)),
    "ragged keys": (ROWS[:1], lambda x: paged().write_ragged(0, [1], [1], x, ROWS[:1])),
    "lens": (np.array([1]), lambda x: paged().write_ragged(0, [1], x, ROWS[:1], ROWS[:1])),
    "sequence ids": (np.array([1]), lambda x: paged().append_batch(x)),
    "uint64 ids": (np.array([1], np.uint64), lambda x: paged().block_table(x)),
    "query_lens": (np.array([4]), lambda x: paged().attention(0, ROWS, [1], query_lens=x)),
    "context_lens": (np.array([4]), lambda x: paged().attention(0, ROWS[:1], [1], context_lens=x)),
    "token indices": (np.array([0, 2]), lambda x: paged().keep_tokens(1, x)),
    "block ids": (np.array([0]), lambda x: paged().adopt(9, x, 4)),
    "counts": (np.array([3]), lambda x: paged().allocate_batch([7], x)),
    "tokens": (np.arange(4), lambda x: PrefixKvCache().lookup(x)),
    "uint32 tokens": (np.arange(4, dtype=np.uint32), lambda x: PrefixKvCache().lookup(x)),
    "one row": (LINE, lambda x: kv_cache().store_kv(0, x, LINE)),
    "a state": (LINE, lambda x: CachedKvState([x], [LINE], 1)),
    "a snapshot": (LINE, lambda x: kv_cache().restore_from_snapshot([x], [LINE], 1)),
    "a block": (PAIRS[0][0], lambda x: PrefixCache(8, 4, 1, 2, 8).store([1, 2, 3, 4], 0, [([x], PAIRS[1])])),
    "an entry": (LINE, lambda x: manager().append(x, LINE)),
    "scores": (np.ones(1), lambda x: manager().update_attention_scores(x)),
    "positions": (np.array([0]), lambda x: manager().get(x)),
    "entries' queries": (ROWS[:1], lambda x: manager().attention(x)),
    "outputs": (ROWS, lambda x: merge_attention(x, ROWS[..., 0], ROWS, ROWS[..., 0])),
    "log-sum-exps": (ROWS[..., 0], lambda x: merge_attention(ROWS, x, ROWS, ROWS[..., 0])),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_masked_values_are_refused(name):
    array, call = ARRAYS[name]
    call(array)
    call(np.ma.array(array, mask=False))
    call(np.ma.array(array))
    one = np.zeros(array.shape, bool)
    one.reshape(-1)[-1] = True
    for mask in (one, True):
        hidden = np.ma.array(array, mask=mask)
        with pytest.raises(ValueError, match="without masked values"):
            call(hidden)
        with pytest.raises((ValueError, TypeError)):
            call([hidden])
        if array.ndim > 1:
            with pytest.raises(ValueError, match="without masked values"):
                call(list(hidden))


def test_no_call_imports_masked_arrays():
    """NumPy imports `numpy.ma` on demand; a first request would wait for it, and come to other allocations."""
    lines = ["import sys, numpy", "from kvcache import PagedKvCache, PrefixKvCache", "c = PagedKvCache(4, 4, 1, 8)"]
    lines += ["c.allocate_batch([1, 2], (3, 1))", "c.write(0, 1, rows := numpy.ones((3, 1, 8), '>f8').tolist(), rows)"]
    lines += ["PrefixKvCache().lookup([numpy.int64(3)])", "assert 'numpy.ma' not in sys.modules"]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


@pytest.mark.parametrize("order", ["<", ">"])
def test_numbers_of_any_byte_order(order):
    cache = paged()
    cache.write(0, 1, (2 * ROWS).astype(order + "f4"), ROWS.astype(order + "f8"))
    np.testing.assert_array_equal(cache.read(0, 1)[0], 2 * ROWS)
    cache.append_batch(np.array([1], order + "u8"))
    assert cache.get_sequence(1).num_tokens == 5
    index = PrefixKvCache()
    index.store_snapshot(np.arange(4, dtype=order + "u4"), CachedKvState([np.ones(64, "f4")], [np.ones(64, "f4")], 4))
    assert index.lookup([0, 1, 2, 3])[0] == 4


# -- magnitudes ---------------------------------------------------------------------------------------------

LARGEST = 2.0**96


@pytest.mark.parametrize("sign", [-1, 1])
def test_values_as_large_as_f32_storage_takes_average_to_themselves(sign):
    """The sum of weights times values, before the division, does not overflow for 5000 of the largest values."""
    count = 5000
    cache = PagedKvCache(400, 16, 1, 16, dtype="f32")
    cache.allocate(1, count)
    rows = np.full((count, 1, 16), sign * LARGEST, np.float32)
    cache.write(0, 1, np.zeros_like(rows), rows)
    for queries in (1, 40):
        out = cache.attention(0, np.ones((queries, 1, 16), np.float32), [1], query_lens=[queries])
        np.testing.assert_allclose(out, sign * LARGEST, rtol=1e-5)


def test_keys_as_large_as_f32_storage_takes_have_finite_scores():
    cache = PagedKvCache(4, 16, 1, 256, dtype="f32")
    cache.allocate(1, 40)
    keys = np.full((40, 1, 256), LARGEST, np.float32)
    cache.write(0, 1, keys, np.ones_like(keys))
    out, mass = cache.attention(0, np.full((1, 1, 256), 2.0**22, np.float32), [1], scale=1.0, return_scores=True)
    np.testing.assert_allclose(out, 1, rtol=1e-5)
    np.testing.assert_allclose(mass, 1 / 40, rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nextafter(np.float32(LARGEST), np.float32(np.inf)), -1e38, 3.4e38, np.inf, np.nan])
def test_larger_values_are_refused(bad):
    cache = paged()
    before = cache.read(0, 1)
    worse = ROWS.copy()
    worse[2, 1, 3] = bad
    for pair in ((worse, ROWS), (ROWS, worse)):
        with pytest.raises(ValueError, match=r"that f32 can hold, up to 2\*\*96, got .* in row 2"):
            cache.write(0, 1, *pair)
    np.testing.assert_array_equal(cache.read(0, 1), before)


def test_what_is_no_path_is_named():
    prefixes, demo = PrefixKvCache(), DIRECTORY
    for name, call in (
        ("path", prefixes.save), ("path", prefixes.load), ("path", PrefixCache(4, 2, 1, 1, 8).load),
        ("path", lambda path: DirectoryTier(path, 1 << 20)), ("path", Calibration.load),
        ("path", InferenceEngine.from_gguf), ("directory", InferenceEngine.from_pretrained),
        ("spill", lambda path: PagedKvCache(4, 4, 2, 8, spill=path, max_memory_bytes=1 << 20)),
        ("spill", lambda path: InferenceEngine.from_pretrained(demo, spill=path, max_memory_bytes="1MiB")),
        ("autosave", lambda path: BatchEngine.from_pretrained(demo, autosave=path)),
    ):
        with pytest.raises(TypeError, match=f"^{name}: expected a path, got int"):
            call(3)
    with pytest.raises(TypeError, match=r"^chat_template: expected a str, got int"):
        InferenceEngine.from_pretrained(demo, chat_template=3)


def test_what_cannot_name_a_namespace_is_named():
    """Also where a tuple holds it; the caches stay as they were."""
    prefixes, blocks = PrefixKvCache(PrefixCacheConfig(min_prefix_len=1)), PrefixCache(4, 2, 1, 1, 8)
    rows = np.ones((1, 2, 1, 8), np.float32)
    state = CachedKvState([np.ones(16, np.float32)], [np.ones(16, np.float32)], 2)
    for namespace, got in (([], "list"), ((1, ({},)), "dict"), (np.zeros(2), "ndarray"), (bytearray(1), "bytearray")):
        for call in (
            lambda name: blocks.peek([1], name), lambda name: blocks.lookup([1], name), blocks.forget,
            lambda name: blocks.open_session([1], name), lambda name: blocks.insert([1, 2], 0, rows, rows, name),
            lambda name: blocks.demote([1], name), lambda name: blocks.discard([1], name),
            lambda name: prefixes.lookup([1], name), lambda name: prefixes.remove([1], name),
            lambda name: prefixes.store_snapshot([1, 2], state, name),
        ):
            with pytest.raises(TypeError, match=f"^namespace: expected a hashable value, got {got}$"):
                call(namespace)
    blocks.check()
    assert (blocks.stats().lookup_tokens, blocks.namespace_tokens(), prefixes.stats().entries) == (0, {}, 0)


def test_one_value_in_place_of_tokens_is_named():
    """The message has its type, and not the shape of the array that NumPy makes of it; that of a number has none."""
    engine, cache = InferenceEngine.from_pretrained(DIRECTORY), PagedKvCache(4, 4, 2, 8)
    cache.allocate(0, 4)
    for value in (5, None, {1: 2}, {1}, np.uint32(4), iter([1]), object(), 3.5):
        got = f"got {type(value).__name__}$"
        with pytest.raises(TypeError, match=f"^prompt: expected a text or token ids, {got}"):
            engine.complete(value)
        expected = f"^tokens: expected integers, {got}"
        if is_number := isinstance(value, (int, float, np.number)):
            expected = r"^tokens: expected one dimension, got shape \(\)"
        for call in (engine.score, PrefixCache(4, 2, 1, 1, 8).peek, PrefixKvCache().lookup):
            with pytest.raises(ValueError if is_number else TypeError, match=expected):
                call(value)
    with pytest.raises(ValueError, match=r"^tokens: expected one dimension, got shape \(\)"):
        engine.score(np.array(5))
    with pytest.raises(TypeError, match=r"^prompt: expected a text or token ids, got int64 \(\)"):
        engine.complete(np.array(5))


def test_checked_ids_are_a_copy():
    ids = np.arange(5, dtype=np.uint32)
    for given in (ids, memoryview(ids), ids.view(type("Own", (np.ndarray,), {})), ids[1:]):
        assert not np.shares_memory(as_tokens(given, 10), ids)


def test_values_in_messages_are_one_line():
    with pytest.raises(TypeError, match=r"^latent: expected a pair of channels, got array\(.*\)\Z"):
        PagedKvCache(1, 16, latent=np.eye(9))
    assert short("a\n  b") == r"'a\n  b'"
