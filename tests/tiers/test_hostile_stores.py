"""Stores that raise what is no `Exception`, return what nobody asked for, vanish, and flood the log."""

import asyncio
import inspect
import logging
import tracemalloc

import pytest
from prefix_engines import SHORT, prompt
from tier_stores import SECRET, ObjectStore

from kvcache.engine import InferenceEngine, PrefixCachedEngine
from kvcache.tiers import DirectoryTier, RedisTier, Tiers, links, lookups, process_thread

pytestmark = [pytest.mark.exhaustive, pytest.mark.one_build]


class Ended(BaseException):
    """An exception of no family, whose text cannot be read."""

    def __str__(self):
        raise SystemExit


class Raising(ObjectStore):
    """Raises `error` in the methods named in `where`."""

    error, where = SystemExit(1), ()

    def get_many(self, keys):
        self.fail("get_many")
        return super().get_many(keys)

    def put_many(self, items):
        self.fail("put_many")
        super().put_many(items)

    def contains_many(self, keys):
        self.fail("contains_many")
        found = super().contains_many(keys)
        return [Truth(self, each) for each in found] if "__bool__" in self.where else found

    def fail(self, name):
        if name in self.where:
            raise self.error


class Truth:
    def __init__(self, store, value):
        self.store, self.value = store, value

    def __bool__(self):
        self.store.fail("__bool__")
        return self.value


def tiers_over(store, **options):
    return Tiers([store], **{"secret": SECRET, "after_uses": 1, "head_start": 60, **options})


def engine_over(network, tiers):
    return PrefixCachedEngine(InferenceEngine(network), 64, tiers=tiers, strict=True)


@pytest.mark.parametrize("method", ["get_many", "put_many", "contains_many", "__bool__"])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, Ended])
def test_what_is_no_exception_ends_no_thread(network, monkeypatch, method, kind):
    """It is an error of the tier like any other one, and the tier is used again as soon as it works."""
    monkeypatch.setattr("kvcache.tiers.links.PAUSE", 0.01)
    text, store = prompt(1, 300), Raising()
    want = InferenceEngine(network).generate(text, SHORT)
    with tiers_over(store) as tiers:
        cached = engine_over(network, tiers)
        if method == "get_many":
            cached.generate(text, SHORT)
            assert tiers.flush(60)
        store.error, store.where = kind(), (method,)
        for count in range(1, 4):
            cached.clear_cache()
            assert cached.generate(text, SHORT) == want
            tiers.flush(0.3 if method != "get_many" else 60)
            assert tiers.stats()[0].errors >= count
        store.where = ()
        cached.clear_cache()
        assert cached.generate(text, SHORT) == want
        assert tiers.flush(60)
        cached.clear_cache()
        assert cached.complete(text, SHORT).cached_tokens == 256
        assert tiers.close(60)


def test_stores_are_told_how_large_a_value_is(network, tmp_path):
    """Where they have a parameter for it; those of the library do."""
    for store in (DirectoryTier, RedisTier):
        assert list(inspect.signature(store.get_many).parameters) == ["self", "keys", "most_bytes"]

    told = set()

    class Told(ObjectStore):
        def get_many(self, keys, *, most_bytes):
            told.add(most_bytes)
            return super().get_many(keys)

    text, store = prompt(1, 300), Told()
    with tiers_over(store) as tiers:
        cached = engine_over(network, tiers)
        cached.generate(text, SHORT)
        assert tiers.flush(60)
        cached.clear_cache()
        assert cached.complete(text, SHORT).cached_tokens == 256
    assert told == {len(value) for value in store.bucket.values()}


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_values_of_another_size_are_not_kept(network, kind):
    """A value of any store that is larger than expected is freed at once, not when its turn comes."""

    class Large(ObjectStore):
        def get_many(self, keys):
            return [kind(bytes(50 << 20)) for _ in keys]

    text, store = prompt(1, 300), Large()
    with tiers_over(store) as tiers:
        cached = engine_over(network, tiers)
        cached.generate(text, SHORT)
        assert tiers.flush(60)
        link = tiers._links[0]
        tracemalloc.start()
        assert link.get([bytes(20)], 1000) == [b""]
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
        tracemalloc.stop()
        cached.clear_cache()
        assert cached.complete(text, SHORT).cached_tokens == 0
        assert tiers.stats()[0].wrong == 1


def test_a_value_that_leaves_between_probe_and_fetch_is_written_again(network):
    class Leaving(ObjectStore):
        def get_many(self, keys):
            self.bucket.clear()
            return super().get_many(keys)

    text, store = prompt(1, 300), Leaving()
    with tiers_over(store) as tiers:
        cached = engine_over(network, tiers)
        cached.generate(text, SHORT)
        assert tiers.flush(60)
        assert len(store.bucket) == 4
        cached.clear_cache()
        assert cached.complete(text, SHORT).cached_tokens == 0
        assert tiers.flush(60)
        assert len(store.bucket) == 4


def test_wrong_values_do_not_flood_the_log(network, caplog):
    class Wrong(ObjectStore):
        def get_many(self, keys):
            return [b"wrong"] * len(keys)

    text, store = prompt(1, 200), Wrong()
    with tiers_over(store) as tiers:
        cached = engine_over(network, tiers)
        for count in range(20):
            cached.generate(text, SHORT)
            assert tiers.flush(60)
            cached.clear_cache()
            assert tiers.stats()[0].wrong == count
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in warned] == [
        "Wrong: a value is not what belongs under its key; it is a miss"
    ]


def test_a_store_does_not_choose_the_log(caplog):
    """The text of an error is one line of it, however long it is."""
    for error in (RuntimeError("x\nERROR forged\n" * 100_000), Ended()):
        store = Raising()
        store.error, store.where = error, ("get_many",)
        link = links.Link(store, SECRET, 1)
        for _ in range(links.FAILURES):
            assert link.get([bytes(20)], 10) is None
    first, second = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert first.startswith("Raising failed 3 times in a row: RuntimeError: 'x\\nERROR")
    assert len(first) < 200
    assert "\n" not in first
    assert second == "Raising failed 3 times in a row: Ended"


def test_a_system_without_threads(network, monkeypatch):
    """Requests run as without tiers; threads begin as soon as there are some."""

    def none_left(*_):
        raise RuntimeError("can't start new thread")

    text, store = prompt(1, 300), ObjectStore()
    want = InferenceEngine(network).generate(text, SHORT)
    with tiers_over(store) as tiers:
        cached = engine_over(network, tiers)
        with monkeypatch.context() as patched:
            patched.setattr(process_thread, "start_new_thread", none_left)
            assert cached.generate(text, SHORT) == want
        assert not tiers.flush(60)
        assert tiers.stats()[0].dropped == 4
        assert tiers.stats()[0].late == 1
        tiers._links[0]._closed_until = 0.0
        assert cached.generate(text, SHORT) == want
        assert tiers.flush(60)
        with monkeypatch.context() as patched:
            patched.setattr(lookups._Check, "start", none_left)
            cached.clear_cache()
            assert cached.complete(text, SHORT).cached_tokens == 0
        cached.clear_cache()
        assert cached.complete(text, SHORT).cached_tokens == 256
