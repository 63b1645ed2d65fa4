"""Tiers as the source of a `PrefixCache`, their queue, their threads, and what they decide."""

import _thread
import gc
import threading
import time
import tracemalloc

import numpy as np
import pytest
from prefix_engines import SHORT, prompt
from saved_caches import set_bits
from tier_stores import SECRET, ObjectStore, twin_keys, twin_value

from kvcache import PrefixCache
from kvcache.engine import InferenceEngine, PrefixCachedEngine
from kvcache.kernels.kernels import BITS_VERSION, FORMATS
from kvcache.prefix.block_file import arena_of_blocks
from kvcache.saved.namespaces import encode_namespace
from kvcache.tiers import Tiers, lookups
from kvcache.tiers.links import FAILURES, Link, Measured
from kvcache.tiers.lookups import Lookup, pays
from kvcache.tiers.values import Signed, ValueFormat

pytestmark = pytest.mark.one_build

SIZE = 16


def rows(rng, num_blocks):
    """K and V of blocks of 3 layers."""
    return list(rng.standard_normal((num_blocks, 2, 3, SIZE * 16), np.float32))


def content(cache, tokens, namespace=None):
    with cache.lookup(tokens, namespace) as blocks:
        return [layer.tobytes() for block in blocks for layer in (*block.keys, *block.values)]


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_prefix_cache_spills_and_fetches(rng, dtype):
    """Blocks that leave the cache come back with the same bits, and nowhere else."""
    store = ObjectStore()
    with Tiers([store], secret=SECRET, deadline=60) as tiers:
        cache = PrefixCache(12, SIZE, 3, 2, 8, dtype=dtype, source=tiers.source("m"))
        texts = [np.arange(i, i + 8 * SIZE, dtype=np.uint32) for i in (0, 1000, 2000)]
        first = []
        for i, text in enumerate(texts):
            assert cache.store(text, 0, rows(rng, 8), i % 2) == 8
            first.append(content(cache, text, i % 2))
            assert tiers.flush(60)
        for i, text in enumerate(texts):
            assert content(cache, text, i % 2) == first[i]
            assert content(cache, text, "other") == []
            assert tiers.flush(60)
            cache.check()
        with pytest.raises(TypeError, match="model: expected a str, got NoneType"):
            tiers.source(None)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_blocks_of_a_file_that_nobody_read_are_not_written(rng, tmp_path, count):
    """Their memory has nothing of them yet, so a tier must not get it; what was read is written."""
    text, path, store = np.arange(4 * SIZE, dtype=np.uint32), tmp_path / "saved", ObjectStore()
    saved = PrefixCache(4, SIZE, 3, 2, 8)
    saved.store(text, 0, rows(rng, 4))
    want = content(saved, text)
    saved.save(path)
    with Tiers([store], secret=SECRET, deadline=60) as tiers:
        cache = PrefixCache(4, SIZE, 3, 2, 8, source=tiers.source("m"))
        cache.load(path)
        assert cache.evict(count) == count
        assert tiers.flush(60)
        assert store.bucket == {}
        assert content(cache, text) == want[: len(want) // 4 * (4 - count)]
        cache.clear()
        cache.load(path)
        assert content(cache, text) == want
        assert cache.evict(count) == count
        assert tiers.flush(60)
        assert len(store.bucket) == 1
        assert content(cache, text) == want
        cache.check()
        set_bits(path, 0)
        store.bucket.clear()
        cache.clear()
        cache.load(path, exact=False)
        assert content(cache, text) == want
        assert cache.evict(4) == 4  # their K and V have other bits
        assert tiers.flush(60)
        assert store.bucket == {}


def test_lookups_for_which_there_is_no_room_end(rng):
    """Their values do not stay until the same text comes again."""
    store, source = ObjectStore(), None
    texts = [np.arange(i, i + 4 * SIZE, dtype=np.uint32) for i in range(0, 8000, 1000)]
    with Tiers([store], secret=SECRET, deadline=60) as tiers:
        cache, source = PrefixCache(32, SIZE, 3, 2, 8, source=tiers.source("m")), tiers.source("m")
        for text in texts:
            cache.store(text, 0, rows(rng, 4))
        cache.evict(32)
        assert tiers.flush(60)
        full = PrefixCache(1, SIZE, 3, 2, 8, source=source)
        full.store(np.arange(50, 50 + SIZE), 0, rows(rng, 1))
        with full.open_session(np.arange(50, 50 + SIZE)):
            for text in texts:
                assert content(full, text) == []
                assert len(source._lookups) <= 1
        assert len(content(full, texts[2])) == 6


def test_the_values_of_a_cache_are_those_of_the_twin(rng):
    store, tokens = ObjectStore(), rng.integers(0, 2**32, 10 * SIZE).astype(np.uint32)
    with Tiers([store], secret=SECRET) as tiers:
        cache = PrefixCache(10, SIZE, 3, 2, 8, dtype="q8", source=tiers.source("name"))
        cache.store(tokens, 0, rows(rng, 10), ("a", 7))
        cache.evict(10)
        assert tiers.flush(60)
    arena = arena_of_blocks(cache._cached)
    context = b"\0".join([b"1", b"%d" % BITS_VERSION, arena.pack(), b"name"])
    keys = twin_keys(SECRET, context, encode_namespace(("a", 7)), tokens, 64)
    assert sorted(store.bucket) == sorted(keys)
    other = PrefixCache(10, SIZE, 3, 2, 8, dtype="q8", source=Tiers([store], secret=SECRET, deadline=60).source("name"))
    with other.lookup(tokens, ("a", 7)) as found:
        assert len(found) == 8
        order = [block.index for block in found]
        for i, key in enumerate(keys):
            body = b"".join(
                other._store.raw(layer)[block].tobytes() for block in order[4 * i : 4 * i + 4] for layer in range(3)
            )
            assert store.bucket[key] == twin_value(SECRET, key, tokens[64 * i : 64 * i + 64], body)


class Gate(ObjectStore):
    """A store whose calls wait until `open` is set."""

    def __init__(self, bucket=None):
        super().__init__(bucket)
        self.open, self.entered = threading.Event(), threading.Event()

    def _wait(self):
        self.entered.set()
        assert self.open.wait(60)

    def get_many(self, keys):
        self._wait()
        return super().get_many(keys)

    def put_many(self, items):
        self._wait()
        super().put_many(items)

    def contains_many(self, keys):
        self._wait()
        return super().contains_many(keys)


def test_the_queue_is_bounded(network):
    store = Gate()
    tiers = Tiers([store], secret=SECRET, after_uses=1, queue_bytes=5 * (64 * 2 * 2 * 2 * 16 * 4 + 352))
    cached = PrefixCachedEngine(InferenceEngine(network), 128, tiers=tiers, strict=True)
    tiers._reader.close()
    for seed in range(5):
        assert cached.generate(prompt(seed, 200), SHORT)
    (stats,) = tiers.stats()
    assert 0 < stats.queued_bytes <= 5 * (64 * 2 * 2 * 2 * 16 * 4 + 352)
    assert stats.dropped == 15 - 5
    assert not tiers.flush(0.01)
    store.open.set()
    assert tiers.close(60)
    assert len(store.bucket) == tiers.stats()[0].stored == 5
    assert cached.generate(prompt(9, 200), SHORT)
    assert tiers.stats()[0].queued_bytes == 0


def test_values_that_cannot_be_sealed_are_dropped(network, monkeypatch):
    """The others are written."""
    real, turns = Signed.seal, iter(range(100))

    def seal(*arguments):
        if next(turns) == 2:
            raise MemoryError
        real(*arguments)

    monkeypatch.setattr(Signed, "seal", seal)
    store = ObjectStore()
    with Tiers([store], secret=SECRET, after_uses=1) as tiers:
        PrefixCachedEngine(InferenceEngine(network), 64, tiers=tiers, strict=True).generate(prompt(1, 400), SHORT)
        assert not tiers.flush(60)
        (stats,) = tiers.stats()
        assert (stats.stored, stats.dropped, stats.errors, stats.queued_bytes) == (5, 1, 1, 0)
        assert len(store.bucket) == 5


def test_a_prompt_does_not_wait_for_a_tier(network):
    """Calls that never end: prompts run, lookups are refused instead of waiting, and `close` returns."""
    store, text = Gate(), prompt(1, 300)
    tiers = Tiers([store], secret=SECRET, after_uses=1)
    cached = PrefixCachedEngine(InferenceEngine(network), 64, tiers=tiers, strict=True)
    want = InferenceEngine(network).generate(text, SHORT)
    for _ in range(30):
        assert cached.generate(text, SHORT) == want
        cached.clear_cache()
    assert store.entered.is_set()
    assert tiers.stats()[0].late > 0
    assert not tiers.close(0.01)
    store.open.set()


def test_no_thread_and_no_memory_stays(network):
    before = _thread._count()
    for _ in range(3):
        tiers = Tiers([ObjectStore()], secret=SECRET, after_uses=1, head_start=60)
        cached = PrefixCachedEngine(InferenceEngine(network), 64, tiers=tiers)
        cached.generate(prompt(1, 300), SHORT)
        del tiers, cached
        gc.collect()
    while _thread._count() > before:
        time.sleep(0.001)


class Failing(ObjectStore):
    def contains_many(self, keys):
        self.calls.append(("contains", len(keys)))
        raise ConnectionError("down")


def test_a_tier_that_fails_is_passed_over(network, monkeypatch):
    store, now = Failing(), [1000.0]
    monkeypatch.setattr("kvcache.tiers.links.monotonic", lambda: now[0])  # the pause, however long a request takes
    with Tiers([store], secret=SECRET, after_uses=100, head_start=60) as tiers:
        cached = PrefixCachedEngine(InferenceEngine(network), 64, tiers=tiers, strict=True)
        for _ in range(FAILURES + 4):
            assert cached.generate(prompt(1, 300), SHORT)
            cached.clear_cache()
        (stats,) = tiers.stats()
        assert (stats.errors, stats.passed, len(store.calls)) == (FAILURES, 4, FAILURES)
        # After the pause it is asked once; one failure more, and it is passed over again.
        now[0] += 11
        for _ in range(3):
            cached.generate(prompt(1, 300), SHORT)
            cached.clear_cache()
        assert len(store.calls) == FAILURES + 1


def test_a_fetch_has_to_pay(monkeypatch):
    """Below half of the seconds of computing; what is not known is tried."""
    monkeypatch.setattr(lookups, "_SHARE", 0.5)
    form, speed = ValueFormat(64, 10**6), Measured()
    lookup = Lookup(None, np.zeros(640, np.uint32), 0, 10, [[]], [Signed(SECRET)], form, speed)
    link = Link(ObjectStore(), SECRET, 1)
    assert pays(lookup, link, 10)
    speed.add(64.0)  # a group a second
    assert pays(lookup, link, 10)
    link.rate.add(form.value_bytes * 2.2)  # a value takes 0.45 seconds
    assert pays(lookup, link, 10)
    link.latency.add(0.04)  # of each of 11 calls, for 10 values
    assert pays(lookup, link, 10)
    assert not pays(lookup, link, 1)
    for _ in range(50):
        link.rate.add(form.value_bytes * 1.9)
    assert not pays(lookup, link, 10**6)


def test_what_is_slower_than_computing_is_declined(network, monkeypatch):
    monkeypatch.setattr(lookups, "_SHARE", 0.5)

    class Slow(ObjectStore):
        def get_many(self, keys):
            time.sleep(0.3)
            return super().get_many(keys)

    store = Slow()
    with Tiers([store], secret=SECRET, after_uses=1, head_start=60) as tiers:
        cached = PrefixCachedEngine(InferenceEngine(network), 64, tiers=tiers, strict=True)
        want = cached.generate(prompt(1, 480), SHORT)
        assert tiers.flush(60)
        cached.clear_cache()
        for _ in range(3):
            assert cached.generate(prompt(1, 480), SHORT) == want
            cached.clear_cache()
        calls = len(store.calls)
        assert cached.generate(prompt(1, 480), SHORT) == want
        assert len(store.calls) == calls  # not even asked, by what was measured before
        (stats,) = tiers.stats()
        assert stats.declined >= 2
        assert stats.bytes_per_second < 10**6


def test_memory_stays_as_it_is(network, long):
    """Requests that fetch, store and evict take no more memory with time."""
    store = ObjectStore()
    with Tiers([store], secret=SECRET, after_uses=1, head_start=60, queue_bytes="1MB") as tiers:
        cached = PrefixCachedEngine(InferenceEngine(network), 24, tiers=tiers, strict=True)

        def run():
            for seed in range(8):
                cached.generate(prompt(seed, 300), SHORT, namespace=seed % 3)
            assert tiers.flush(60)
            store.calls.clear()  # its own record of every call
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            for _ in range(3):
                run()
            before = run()
            for _ in range(300 if long else 8):
                after = run()
        finally:
            tracemalloc.stop()
        assert after < before + 50_000
        assert cached._arrivals.source._lookups == []
        assert cached._arrivals.source._expected == {}
