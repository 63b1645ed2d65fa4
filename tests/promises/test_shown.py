"""Objects have a repr with what matters, HTML in notebooks and `dir`, and refuse copies."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from engines import GREEDY

import kvcache
from kvcache import (
    LFU,
    LRU,
    BatchEngine,
    CachedKvState,
    CacheManager,
    InferenceEngine,
    KvCache,
    KVCacheConfig,
    PagedKvCache,
    PrefixAwarePrefill,
    PrefixCache,
    PrefixCachedEngine,
    PrefixKvCache,
)
from kvcache.support.strip import bar, strip

pytestmark = pytest.mark.one_build


@pytest.fixture
def paged():
    cache = PagedKvCache(8, 16, 2, 64, dtype="f16")
    cache.allocate(7, 40)
    cache.fork(7, 8)
    cache.append_batch([8])  # its last block is its own now
    return cache


@pytest.fixture
def state():
    return CachedKvState([np.ones((6, 32), np.float32)] * 2, [np.ones((6, 32), np.float32)] * 2, 6)


@pytest.fixture
def entries(state):
    cache = PrefixKvCache()
    cache.store_snapshot([1, 2, 3, 4, 5, 6], state)
    return cache


@pytest.fixture
def blocks():
    cache = PrefixCache(4, 2, 1, 1, 8)
    cache.insert([1, 2], 0, *np.ones((2, 1, 16), np.float32))
    return cache


@pytest.fixture
def live():
    return KvCache(num_layers=2, max_seq_len=8, kv_dim=32, num_heads=2)


@pytest.fixture
def manager():
    return CacheManager(KVCacheConfig(max_seq_len=8, num_heads=1, head_dim=8))


def test_reprs(paged, state, entries, live, network):
    assert repr(LRU()) == "LRU()"
    assert repr(LFU(3)) == "LFU(age=3)"
    assert repr(state) == "CachedKvState(2 layers, 6 tokens, kv_dim 32)"
    assert repr(entries) == "PrefixKvCache(1 of 256 entries, 6 tokens, 3072 of 536870912 bytes)"
    assert repr(live) == "KvCache(2 layers, 0 of 8 tokens, kv_dim 32, num_heads 2)"
    assert repr(network) == "Transformer(LlamaForCausalLM, 2 layers, hidden_size 64)"
    cached = PrefixCachedEngine(InferenceEngine(network), 16)
    cached.generate(range(40), GREEDY)
    engine = "InferenceEngine(Transformer, 2 layers, 49 of 512 positions in use)"
    assert repr(cached) == f"PrefixCachedEngine({engine}, 3 of 16 blocks cached)"
    assert repr(cached.prefix_cache).startswith("PrefixAwarePrefill(")
    with cached.prefix_cache.prepare([*range(36), 0])[0] as session:
        assert repr(session) == "CacheSession(32 tokens in 2 blocks, 4 tokens of block 2)"
    _, found = cached.prefix_cache.cache.lookup(range(20))
    assert repr(found) == "FoundBlocks(1 blocks of 16 tokens)"
    (block,) = found
    assert repr(block) == f"CacheBlock(index={block.index}, 16 tokens, {block.memory_bytes} bytes)"


def test_a_cache_shows_its_blocks(paged):
    shown = paged._repr_html_()
    ElementTree.fromstring(shown.replace("&nbsp;", " "))  # well-formed
    assert "PagedKvCache(num_blocks=8" in shown
    for part in ("4&nbsp;free", "2&nbsp;used", "2&nbsp;shared"):
        assert part in shown


def test_a_prefix_cache_shows_what_is_held_and_cached_no_more():
    cache = kvcache.PrefixCache(8, 4, 1, 1, 8)
    cache.store(range(16), 0, np.ones((4, 2, 1, 32), np.float32))
    with cache.open_session(range(16)):
        cache.clear()
        cache.store(range(50, 58), 0, np.ones((2, 2, 1, 32), np.float32))
        shown = cache._repr_html_()
    for part in ("2&nbsp;free", "2&nbsp;cached", "4&nbsp;in use"):
        assert part in shown


def bars(text):
    return [(float(width), colour) for width, colour in re.findall(r'width="([\d.]+)" height="14" fill="(#\w+)"', text)]


@pytest.mark.parametrize("count", [1, 3, 512, 513, 5000])
def test_a_strip_is_as_wide_for_any_number_of_blocks(count):
    states = np.zeros(count, np.int32)
    states[-1] = 2
    shown = bars(strip("a <b>", ("x", "y", "z"), states))
    assert sum(width for width, _ in shown) == pytest.approx(512, abs=1)
    assert len(shown) == (1 if count == 1 else 2)
    assert f"{count - 1}&nbsp;x" in strip("a <b>", ("x", "y", "z"), states)
    assert "a &lt;b&gt;" in strip("a <b>", ("x", "y", "z"), states)


def test_a_strip_of_no_blocks():
    assert bars(strip("empty", ("x",), np.zeros(0, np.int32))) == []


def test_dir_shows_the_public_names():
    assert set(dir(kvcache)) == {*kvcache.__all__, "__version__"}


def test_caches_without_blocks_show_their_share(entries, live, manager):
    for layer in (0, 1):
        live.store_kv(layer, *np.ones((2, 32), np.float32))
    live.advance()
    manager.append(*np.ones((2, 3, 8), np.float32))
    for cache, used, total, unit in (
        (entries, 3072, 1 << 29, "bytes"),
        (live, live.seq_len, 8, "tokens"),
        (manager, 3, 8, "entries"),
    ):
        shown = cache._repr_html_()
        ElementTree.fromstring(shown.replace("&nbsp;", " "))
        assert repr(cache).split("(")[0] in shown
        assert f"{used}&nbsp;{unit} used" in shown
        assert f"{total - used}&nbsp;{unit} free" in shown
        assert sum(width for width, _ in bars(shown)) == pytest.approx(512, abs=1)
    assert bars(bar("none", "bytes", 0, 0)) == []
    assert len(bars(bar("full", "bytes", 9, 8))) == 1  # over its limit


@pytest.fixture
def objects(paged, state, entries, blocks, live, manager, network):
    """Instances of every public class, and of those that public calls return."""
    handle, engine, batch = paged.handle(7), InferenceEngine(network), BatchEngine(network)
    request = batch.submit([1, 2], GREEDY)
    tokens = kvcache.TokenLogprobs(-1.0, {1: -1.0})
    live_objects = [
        paged, handle, handle.block_table_mut(), entries, blocks, live, manager, engine, PrefixCachedEngine(engine, 4),
        blocks.open_session([1, 2, 3]), blocks.lookup([1, 2])[1], network.weights.embedding, batch,
        request, kvcache.Calibration([[[1.0]]]),
    ]
    values = [
        LFU(5), LRU(), kvcache.BlockId(3), kvcache.SeqId(3), kvcache.BlockNotFoundError(3),
        kvcache.CheckpointError("x"),
        kvcache.GrammarError("x"), kvcache.KvEvents("tcp://127.0.0.1:5557"),
        kvcache.InvalidOperationError("x"), kvcache.KvCacheError("x"), kvcache.OutOfMemoryError(3, 2, "bytes"),
        kvcache.QueueFullError(8), batch.stats(), request.metrics,
        kvcache.SequenceNotFoundError(4), kvcache.SnapshotError("x"), handle.block_table, handle.stats(), handle.device,
        blocks.get_block(0), paged.stats(), state, entries.lookup([1, 2, 3, 4])[1],
        kvcache.Completion([1], "a", "stop", [tokens], 0), tokens, paged.block_table([7, 8]), paged.get_sequence(7),
        kvcache.EvictionPolicy.H2O(), kvcache.EvictionStrategy.LRU(), KVCacheConfig(8, 1, 8), entries.config,
        kvcache.Segment("x", "y"),
        entries.stats(), blocks.stats(), kvcache.SamplingParams(stop="x", logit_bias={1: 2.0}),
    ]
    return live_objects, values


def test_live_objects_refuse_to_be_copied(objects):
    for it in objects[0]:
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps, lambda x: pickle.dumps(x, 0)):
            with pytest.raises(TypeError, match=f"^{type(it).__name__}: expected no copy and no pickle of it, got"):
                attempt(it)


def test_values_are_copied_and_pickled(objects, state):
    for value in objects[1]:
        for other in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
            assert repr(other) == repr(value).replace("LeasedState", "CachedKvState")
            for name in ("keys", "values"):
                for ours, theirs in zip(getattr(value, name, ()), getattr(other, name, ()), strict=True):
                    np.testing.assert_array_equal(ours, theirs)
    *_, stats, _ = objects[1]
    assert pickle.loads(pickle.dumps(stats)) == stats
    assert "miss_reasons={'" in repr(stats)


def test_every_public_class_is_copied_or_refused(objects):
    seen = {type(it).__name__ for them in objects for it in them}
    classes = {name for name in kvcache.__all__ if inspect.isclass(getattr(kvcache, name))}
    # Interfaces; and an object of two others.
    assert classes - seen == {"KvCacheAccess", "KvCacheHandle", "PrefixAwarePrefill"}


def test_no_public_class_has_the_repr_of_object():
    plain = {
        name
        for name in kvcache.__all__
        if inspect.isclass(it := getattr(kvcache, name)) and it.__repr__ is object.__repr__
    }
    # Interfaces, namespaces of names, and PrefixCache.
    assert plain <= {"KvCacheAccess", "KvCacheHandle", "EvictionStrategy", "Device", "PrefixCache"}, plain
    assert PrefixAwarePrefill.__repr__ is not object.__repr__
