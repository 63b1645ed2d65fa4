"""Block events: a mirror that reads them equals the index, whatever happens in it and whatever is lost on the way."""

import gc
import logging
import sys
import tempfile
import threading
import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import zmq
from event_reader import Mirror, Reader, cached_texts
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvcache import InvalidOperationError, PrefixCache
from kvcache.prefix.events import event_publisher, event_stream
from kvcache.prefix.events.event_batches import event_batches
from kvcache.prefix.events.event_publisher import EventPublisher
from kvcache.prefix.events.event_stream import EventStream
from kvcache.prefix.events.kv_events import KvEvents
from kvcache.prefix.index.event_buffer import KINDS, EventBuffer
from kvcache.prefix.index.prefix_index import PrefixIndex
from kvcache.trie.trie import TokenTrie

SIZE = 2
NAMES = st.sampled_from([None, "a", "b"])
TEXT = st.lists(st.integers(0, 1), max_size=11).map(tuple)
BOTH = KvEvents("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")


def salt_of(name):
    return (0 if name is None else 7919 * ord(name)), name


def small(blocks=12):
    return PrefixCache(blocks, SIZE, 1, 1, 8)


def store(cache, tokens, name=None):
    """Store a text as far as there is room; how many of its blocks are cached."""
    rows = [np.zeros(8 * SIZE, np.float32)]
    return cache.store(tokens, 0, [(rows, rows)] * (len(tokens) // SIZE), name)


class Shelf:
    """A `Source` that has the texts of all blocks that were evicted, and their content, which is zero."""

    def __init__(self):
        self.texts = set()

    def attach(self, cached):
        pass

    def offers(self, name, tokens, start):
        count = start
        while (name, tuple(tokens[: (count + 1) * SIZE])) in self.texts and (count + 1) * SIZE <= len(tokens):
            count += 1
        return count - start

    def expect(self, name, tokens, start, pages):
        pass

    def fetch(self, pages):
        return pages

    def spill(self, name, tokens, pages):
        self.texts.update((name, tuple(tokens[: len(tokens) - i * SIZE])) for i in range(len(pages)))


class EventMachine(RuleBasedStateMachine):
    """A cache with a small ring and few kept batches, and a reader that loses messages."""

    @initialize(
        blocks=st.integers(1, 14), capacity=st.sampled_from([1, 2, 3, 5, 9, 40]), kept=st.sampled_from([1, 2, 3, 100]),
        at_once=st.sampled_from([1, 2, 5, 256]), shelf=st.booleans(),
    )
    def start(self, blocks, capacity, kept, at_once, shelf):
        event_stream._AT_ONCE = at_once
        self.cache = small(blocks)
        if shelf:
            self.cache.source = Shelf()
        self.ring = self.cache.record_events(salt_of, capacity)
        self.sent, self.mirror, self.kept = [], Mirror(), kept
        self.stream = EventStream(
            self.ring, self.cache, KvEvents("inproc://none"), lambda *batch: self.sent.append(batch),
            msgspec.msgpack.encode, time.time, kept,
        )

    def teardown(self):
        try:
            if hasattr(self, "cache"):
                self.settle()
        finally:
            event_stream._AT_ONCE = 256

    @rule(name=NAMES, tokens=TEXT)
    def store(self, name, tokens):
        store(self.cache, tokens, name)

    @rule(name=NAMES, tokens=TEXT)
    def look_up(self, name, tokens):
        with self.cache.open_session(tokens, name):
            pass

    @rule(count=st.integers(1, 4))
    def evict(self, count):
        self.cache.evict(count)

    @rule(name=NAMES)
    def forget(self, name):
        self.cache.forget(name)

    @rule()
    def clear(self):
        self.cache.clear()

    @rule()
    def save_and_load(self):
        """All pages wait for their content then, and are told: a text can go on from them."""
        with tempfile.TemporaryDirectory() as folder:
            self.cache.save(f"{folder}/blocks")
            self.cache.clear()
            self.cache.load(f"{folder}/blocks")
            self.cache.block_ids()

    @rule(most=st.integers(1, 3))
    def tell_some(self, most):
        """A batch of few records goes out; the ring may fill up behind it."""
        self.stream._tell_all(self.ring.take(most))

    @rule()
    def tell(self):
        self.stream.tell()
        assert len(self.ring) == 0

    @precondition(lambda self: self.sent)
    @rule(lost=st.lists(st.booleans(), min_size=1, max_size=5))
    def read(self, lost):
        """Messages arrive in order; some are lost, the last ones too."""
        for i, (number, batch) in enumerate(self.sent):
            if not lost[i % len(lost)]:
                self.mirror.read(number, batch, self.stream.replay)
        self.sent.clear()

    @rule()
    def settle(self):
        """With all that has happened told, and the last message not lost, the mirror has what the cache has."""
        self.stream.tell()
        self.stream._tell([])
        self.read([True] * (len(self.sent) - 1) + [False])
        want = cached_texts(self.cache)
        assert self.mirror.texts() == want
        self.cache.check()
        self.stream.check()
        late = Mirror()
        for number, batch in self.stream.replay(0):
            late.take(number, batch)
        assert late.texts() == want


TestEventMachine = EventMachine.TestCase
TestEventMachine.settings = settings(max_examples=50, stateful_step_count=25)


# -- hashes


def hashes(tokens, salt, size=SIZE):
    """The twin of the hashes of a text's blocks: splitmix64 over its tokens, two at a time."""
    low, text, found = 2**64 - 1, 0, []

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & low
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & low
        return x ^ (x >> 31)

    for first in range(0, len(tokens) - size + 1, size):
        for i in range(first, first + size, 2):
            two = tokens[i] | ((tokens[i + 1] << 32) if i + 1 < first + size else 0)
            text = mix((text + two + 0x9E3779B97F4A7C15) & low)
        found.append(mix(text ^ salt) >> 1)
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_hashes_are_those_of_every_process(size):
    cache = PrefixCache(8, size, 1, 1, 8)
    ring = cache.record_events(salt_of, 100)
    tokens, rows = [0] * size + list(range(2**31, 2**31 + 2 * size)), [np.zeros(8 * size, np.float32)]
    for name in (None, "a"):
        cache.store(tokens, 0, [(rows, rows)] * 3, name)
    noted = ring.take(99)
    events = [event for batch in event_batches(noted, BOTH) for event in batch]
    (unsalted,) = event_batches(noted, replace(BOTH, unsalted=True))
    assert unsalted == [{key: event[key] for key in events[0]} for event in events]
    assert [event["block_hashes"] for event in events] == [hashes(tokens, salt, size) for salt in (0, 7919 * 97)]
    assert [event["extra_keys"] for event in events[1:]] == [[["a"], None, None]]
    assert "extra_keys" not in events[0]
    assert [event["token_ids"] for event in events] == [tokens] * 2
    assert len({each for event in events for each in event["block_hashes"]}) == 6


# -- the ring


def test_a_ring_says_what_is_wrong():
    cache = small()
    store(cache, [1, 2])
    with pytest.raises(InvalidOperationError, match="empty"):
        cache.record_events(salt_of, 4)
    cache.clear()
    with pytest.raises(ValueError, match="capacity"):
        cache.record_events(salt_of, 0)
    cache.record_events(salt_of, 4)
    with pytest.raises(InvalidOperationError, match="no events"):
        cache.record_events(salt_of, 4)
    with pytest.raises(ValueError, match="one kind of slots"):
        PrefixIndex(TokenTrie(SIZE)).record(salt_of, 4)
    with pytest.raises(ValueError, match="capacity"):
        EventBuffer(0, salt_of, 1)


def test_a_name_without_a_salt_changes_nothing():
    def raising(name):
        raise TypeError("no salt")

    cache = small()
    ring = cache.record_events(raising, 4)
    with pytest.raises(TypeError, match="no salt"):
        store(cache, [1, 2], "a")
    assert (len(cache), len(ring)) == (0, 0)
    cache.check()


def test_salts_of_namespaces_that_ended_are_forgotten():
    cache = small()
    ring = cache.record_events(salt_of, 1000)
    for i in range(50):
        store(cache, [1, 2], chr(i))
        cache.forget(chr(i))
        cache.check()
    assert len(ring.salts) == 50
    ring.take(1000)
    assert ring.salts == {}
    store(cache, [1, 2], "z")
    cache.clear()
    store(cache, [1, 2], "a")
    ring.take(1)
    assert list(ring.salts.values()) == ["a"]
    ring.check()


def test_a_reader_takes_records_while_they_are_verified():
    cache, ended, interval = small(), threading.Event(), sys.getswitchinterval()
    ring = cache.record_events(salt_of, 1000)

    def read():
        while not ended.is_set():
            ring.take(1000)

    reader = threading.Thread(target=read)
    sys.setswitchinterval(1e-6)
    try:
        reader.start()
        for i in range(1500):
            store(cache, [1, 2], chr(i))
            cache.forget(chr(i))
            ring.check()
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        reader.join()
    cache.check()
    ring.take(1000)
    assert ring.salts == {}


def test_blocks_in_which_a_text_ends_are_not_told():
    cache = small()
    ring = cache.record_events(salt_of, 100)
    store(cache, [1, 2, 3, 2**32 - 1])
    assert ring.take(1).events["page"].tolist() == hashes([1, 2], 0)
    assert (len(ring), len(cache), cache._index.events is ring) == (0, 2, True)
    assert len(cache.event_snapshot().events) == 2
    cache.evict(12)
    assert ring.take(1).events["page"].tolist() == hashes([1, 2], 0)
    cache.check()
    assert ring.take(9).events["kind"].tolist() == [KINDS.index("left")]


def test_a_record_is_cheap():
    """At most 0.2 us a block, here with room for the noise of a busy machine."""
    cache = PrefixCache(4096, 16, 1, 1, 8)
    rows = [np.zeros(128, np.float32)]
    tokens = np.arange(4096 * 16, dtype=np.uint32)
    best = {}
    for told in (False, True):
        if told:
            ring = cache.record_events(salt_of, 65536)
        for _ in range(5):
            store_of = cache._cached.index.insert
            cache.store(tokens[:16], 0, [(rows, rows)])
            claim = cache._slots.take(4095)
            head = cache._index.head(tokens[:16])
            began = time.perf_counter()
            store_of(tokens, claim, None, head)
            best[told] = min(best.get(told, 9.9), time.perf_counter() - began)
            cache.clear()
    assert ring.dropped == 0
    assert (best[True] - best[False]) / 4095 < 1e-6


# -- the publisher


@pytest.fixture
def publisher():
    cache = small(100)
    found = EventPublisher(cache, BOTH, salt_of, time.time)
    yield cache, found
    found.close()


def test_a_router_reads_all_of_it(publisher):
    cache, events = publisher
    with Reader(events.settings) as reader:
        for i in range(30):
            store(cache, [i, 0, 1, 2, 3, 4], [None, "a"][i % 2])
        cache.evict(60)
        reader.read_until(cache)
        cache.forget("a")
        reader.read_until(cache)
        cache.clear()
        store(cache, [7, 7])
        reader.read_until(cache)
        assert reader.mirror.events[0] == "AllBlocksCleared"
        with Reader(events.settings) as late:  # it has missed all batches, and asks for them
            for token in range(8, 90):  # what comes before it is connected, a replay alone would bring
                store(cache, [token, token])
                late.read()
                if late.mirror.gaps:
                    break
            late.read_until(cache)
            assert late.mirror.gaps == 1
        assert events.counts().replays >= 1
        assert events.counts().dropped == events.counts().snapshots == 0
        events.close()
        reader.read()
        assert reader.mirror.blocks == {}
        events.close()


def test_a_storm_ends_in_a_snapshot(monkeypatch):
    """More happens in one call than the ring has room for: nothing waits, and nothing is lost."""
    monkeypatch.setattr(event_publisher, "_RECORDS", 8)
    cache = small(100)
    events = EventPublisher(cache, BOTH, salt_of, time.time)
    with Reader(events.settings) as reader:
        for _ in range(3):
            store(cache, [1, 2, 3, 4])
            reader.read_until(cache)
            store(cache, [i % 2**16 for i in range(200)])
            reader.read_until(cache)
            cache.clear()
        assert events.counts().snapshots == 3
        assert events.counts().dropped > 200
    events.close()


def test_hostile_requests_for_replays(publisher):
    cache, events = publisher
    store(cache, [1, 2])
    with Reader(events.settings) as reader:
        socket = reader._context.socket(zmq.DEALER)
        socket.connect(events.settings.replay)
        for message in ([b""], [b"", b"12"], [b"x", bytes(8)], [b"", bytes(8), b""], [b"", b"\xff" * 8]):
            socket.send_multipart(message)
        assert socket.poll(10_000)
        assert socket.recv_multipart()[2] == (-1).to_bytes(8, "big", signed=True)  # of the last one: nothing is there
        assert next(number for number, _ in reader.replay(0)) == 0


def test_the_thread_ends_with_its_cache():
    cache = small()
    EventPublisher(cache, BOTH, salt_of, time.time)
    del cache
    gc.collect()
    end = time.monotonic() + 20
    while any(each.name == "kvcache-events" for each in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_error_ends_in_a_snapshot():
    cache, sent = small(), []
    ring = cache.record_events(salt_of, 100)
    broken = []

    def encode(batch):
        if broken:
            raise MemoryError
        return msgspec.msgpack.encode(batch)

    stream = EventStream(ring, cache, BOTH, lambda *batch: sent.append(batch), encode, time.time, 100)
    store(cache, [1, 2, 3, 4])
    broken.append(True)
    for _ in range(2):
        with pytest.raises(MemoryError):
            stream.tell()
    broken.clear()
    stream.tell()
    mirror = Mirror()
    for number, batch in sent:
        mirror.read(number, batch, stream.replay)
    assert mirror.texts() == cached_texts(cache)
    stream.check()


@pytest.mark.parametrize("wrong", [
    {"address": "127.0.0.1:5557"}, {"address": "tcp://127.0.0.1"}, {"address": "udp://127.0.0.1:1"}, {"address": "ipc://"},
    {"address": "tcp://127.0.0.1:5557", "replay": "tcp://127.0.0.1:5557"}, {"address": "tcp://127.0.0.1:1", "rank": -1},
    {"address": "tcp://127.0.0.1:1", "topic": "x" * 513},
])
def test_addresses_that_are_none(wrong):
    with pytest.raises(ValueError, match="expected"):
        KvEvents(**wrong)


def test_other_settings():
    for wrong in ({"address": 5557}, {"address": "tcp://127.0.0.1:1", "topic": b""}):
        with pytest.raises(TypeError, match="expected"):
            KvEvents(**wrong)
    with pytest.raises(TypeError, match="kv_events: expected"):
        KvEvents.of(5557)
    with pytest.raises(ValueError, match=r"address: expected an address to listen on, got 'tcp://192\.0\.2\.1:1'"):
        EventPublisher(small(), KvEvents("tcp://192.0.2.1:1"), salt_of, time.time)


def test_addresses_of_other_machines_are_told(caplog):
    with caplog.at_level(logging.WARNING, "kvcache"):
        for quiet in ("tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:*", "ipc:///tmp/x", "tcp://127.0.0.1:*"):
            KvEvents(quiet, "ipc:///tmp/y").warn_of_others()
        assert not caplog.records
        for loud in ("tcp://*:1", "tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://10.0.0.1:*", "tcp://eth0:1"):
            KvEvents("ipc:///tmp/y", loud).warn_of_others()
    assert len(caplog.records) == 5


def test_without_the_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ImportError, match=r"pip install 'kvcache-cpu\[cluster\]'"):
        EventPublisher(small(), BOTH, salt_of, time.time)
