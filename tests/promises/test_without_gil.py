"""Several threads and no GIL between them: what takes no lock of a cache is whole all the same, as with the GIL."""

import asyncio
import subprocess
import sys
import sysconfig
import threading

import numpy as np
import pytest
from threads_at_once import together

from kvcache import (
    BatchEngine,
    EvictionPolicy,
    InferenceEngine,
    InvalidOperationError,
    PagedKvCache,
    PrefixCache,
    SamplingParams,
    get_num_threads,
    set_num_threads,
    simd_level,
    simd_levels,
    use_simd,
)
from kvcache.core.locks import CallLock
from kvcache.demo import DIRECTORY
from kvcache.engine.turns import Turns
from kvcache.kernels.layers import rms_norm
from kvcache.kernels.matrix import Matrix
from kvcache.paged.seq_ids import as_seq_ids
from kvcache.prefix.index.event_buffer import KINDS
from kvcache.serving.request import Pending
from kvcache.support.recycled import check, free_pieces
from kvcache.support.token_ids import as_tokens
from kvcache.tiers.links import Link
from kvcache.tiers.spaces import Space
from kvcache.tiers.writing import WriteBehind, Written
from kvcache.trie.trie import TokenTrie

THREADS = 4
IMPORTS = """
import sys
import numpy
import kvcache
from kvcache import SamplingParams
from kvcache.demo import DIRECTORY
assert len(kvcache.InferenceEngine.from_pretrained(DIRECTORY).generate([1, 2, 3], max_tokens=4)) == 4
with kvcache.BatchEngine.from_pretrained(DIRECTORY) as engine:
    assert len(engine.submit([1, 2, 3], SamplingParams(max_tokens=4)).result()) == 4
print(sys._is_gil_enabled())
"""


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has a GIL")
def test_the_gil_stays_off():
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


def test_a_release_is_done_by_one_of_the_threads_that_meet():
    """Also if it is queued at the moment at which the last call ends: no later call is needed."""
    lock, done, rounds = CallLock(), [], 400

    def call(_):
        for _ in range(rounds):
            with lock:
                pass

    def release(number):
        for i in range(rounds):
            lock.hand_over(lambda i=i: done.append((number, i)))

    together(call, release)
    assert sorted(done) == [(number, i) for number in range(THREADS) for i in range(rounds)]


def test_locks_have_an_order_each():
    orders = []
    together(lambda _: orders.extend([CallLock().order for _ in range(500)]))
    assert len({*orders}) == len(orders)


def test_level_and_number_of_threads_change_while_others_compute():
    """A call keeps what it began with, and each level has the same bits."""
    rows, weight = np.random.default_rng(0).standard_normal((64, 257)).astype(np.float32), np.ones(257, np.float32)
    matrix, before = Matrix(64, 257, "q8_0"), (simd_level(), get_num_threads())
    matrix.put(0, rows)

    def compute():
        return matrix.multiply(rms_norm(rows, weight, 1e-6))

    def work(number):
        for i in range(50):
            if number:
                assert compute().tobytes() == expected
                assert get_num_threads() in (before[1], 1, 2, 3)
            else:
                with use_simd(simd_levels()[i % len(simd_levels())]):
                    set_num_threads(1 + i % 3)

    expected = compute().tobytes()
    try:
        together(work)
    finally:
        set_num_threads(before[1])
    assert simd_level() == before[0]


def test_turns_of_many_threads():
    """One at a time; one that its thread has left is given back once, on whichever thread it is dropped."""
    turns, inside, most, dropped = Turns(), [], [], []

    def stream(number):
        for i in range(100):
            turn = turns.take(-1)
            inside.append(number)
            most.append(len(inside))
            turn.go_on(-1)
            turn.leave(0)
            inside.pop()
            if i % 2:
                dropped.append(turn)  # another thread drops it
                del turn
                dropped.pop()
            else:
                turn.give_back()
                turn.give_back()

    together(stream)
    assert {*most} == {1}
    turn = turns.take(3)
    with pytest.raises(InvalidOperationError):
        turns.take(3)
    turn.give_back()


def test_claims_end_while_others_begin():
    """Sessions that are dropped on one thread while others look up, insert, evict, clear and count."""
    cache = PrefixCache(64, 4, 1, 1, 8)
    rows = [(np.ones((1, 32), np.float32), np.ones((1, 32), np.float32))] * 4
    pairs = [([k[0]], [v[0]]) for k, v in rows]

    def use(number):
        held = []
        for i in range(150):
            text = np.arange(16, dtype=np.uint32) + (number * i) % 7
            cache.store(text, 0, pairs)
            held.append(cache.open_session(text))
            assert len(held[-1].claim) == held[-1].claim.num_held <= 4
            if len(held) > 3:
                del held[0]  # no call of the cache
            if i % 10 == 9:
                cache.evict(3)

    def look(_):
        for i in range(300):
            assert 0 <= len(cache) <= 64
            assert cache.pinned_blocks <= 64
            if i % 50 == 49:
                cache.clear()

    together(use, look, count=2)
    cache.check()
    cache.clear()
    assert cache.pinned_blocks == 0
    assert cache.num_free_and_idle() == (64, 0)


def test_events_are_taken_whole_while_they_are_written():
    """A reader learns in parts what is cached at the end."""
    cache, known, over = PrefixCache(32, 4, 1, 1, 8), set(), threading.Event()
    ring = cache.record_events(lambda name: (7, None), 256)
    pair = [([np.ones(32, np.float32)], [np.ones(32, np.float32)])] * 3

    def learn(noted):
        for page, kind in noted.events[["page", "kind"]].tolist():
            if KINDS[kind] == "cleared":
                known.clear()
            elif KINDS[kind] == "removed":
                known.remove(page)
            else:
                known.add(page)

    def write(number):
        for i in range(150):
            cache.store(np.arange(12) + 1000 * number + i % 9, 0, pair)
            if i % 20 == 19:
                cache.clear()
        over.set()

    def read(_):
        while not over.is_set():
            learn(cache.event_snapshot() if ring.is_full else ring.take(16))

    def look(_):
        while not over.is_set():
            assert 0 <= len(ring) <= 256
            assert ring.num_spaces >= 0
            assert ring.dropped >= 0

    together(write, read, look, count=1)
    while len(ring):
        learn(cache.event_snapshot() if ring.is_full else ring.take(1000))
    ring.check()
    assert len(known) == len(cache)


def test_a_handle_asks_for_its_sequence_while_others_come_and_go():
    cache = PagedKvCache(256, 4, 1, 8)
    cache.allocate(1, 4)
    handle = cache.handle(1)

    def change(number):
        for i in range(200):
            cache.allocate_batch(np.arange(20) + 100 * (number + 1), [1] * 20)
            cache.free_batch(np.arange(20) + 100 * (number + 1))
            if i % 20 == 0:
                cache.grow(1)

    def ask(_):
        for _ in range(1000):
            assert handle.is_valid
            assert cache.memory()["kv"] > 0
            assert str(cache.eviction_strategy)

    together(change, ask, count=2)
    cache.check()


def test_lists_of_ids_that_another_thread_changes():
    """A call has one of the lists that there were, or refuses it; no id is made up."""
    ids, over = list(range(1000)), threading.Event()

    def change(_):
        for i in range(3000):
            ids.append(i % 1000)
            del ids[:1]
        over.set()

    def convert(_):
        while not over.is_set():
            for found in (as_tokens(ids), as_seq_ids(ids)):
                assert 0 <= found.min() <= found.max() < 1000
                assert 999 <= len(found) <= 1001

    together(change, convert, count=1)


def test_pieces_of_memory_are_taken_by_one_thread_each():
    weight = np.ones(64, np.float32)

    def make(number):
        for i in range(1, 120):
            array = rms_norm(np.full((600 + 50 * (i % 5), 64), 1.0, np.float32), weight * (number + i), 0.0)
            assert (array == number + i).all()
            check()
            assert all(size > 0 for size in free_pieces())

    together(make)


def test_values_of_many_threads_lie_apart():
    """A piece of memory is used again when no thread has a value in it, however often each has sliced its own."""
    space = Space()

    def use(number):
        held = []
        for i in range(40):
            value = space(1 << 20)
            value[:] = bytes([number * 40 + i]) * len(value)
            held.append((number * 40 + i, value))
            for _ in range(50):
                assert len(memoryview(value)[1:]) == len(value) - 1
            if len(held) > 2:
                byte, value = held.pop(0)
                assert value[:: 1 << 12].tobytes() == bytes([byte]) * 256

    together(use)


def test_a_trie_of_many_threads():
    trie = TokenTrie(4)
    root = trie.add_root()

    def use(number):
        for i in range(200):
            tokens = np.arange(16) + i % 11 + 100 * number
            trie.insert(root, tokens, np.arange(4))
            _, length = trie.match(root, tokens)
            assert 0 <= length <= 16
            if i % 7 == 6:
                trie.evict(2)
            assert trie.num_pages <= 4 * 11 * THREADS
            if i % 50 == 49:
                trie.check()

    together(use)
    trie.check()
    assert len(trie.all_values(root)) == trie.num_pages


def test_waits_in_event_loops_begin_while_others_are_woken():
    pending, ended, errors, over = Pending(None, []), [], [], threading.Event()

    async def wait():
        for _ in range(4):
            await pending.wait_in_loop(lambda: False)

    async def several():
        await asyncio.wait_for(asyncio.gather(*[wait() for _ in range(300)]), 300)

    def run(_):
        try:
            asyncio.run(several())
        finally:
            ended.append(over)
            if len(ended) == 3:
                over.set()

    def wake(number):
        while number == 0 and not over.is_set():
            try:
                Pending.wake_all([pending])
            except RuntimeError as error:  # they would wait for ever if nobody went on
                errors.append(error)

    together(run, wake, count=3)
    assert errors == []


class _OneWriter:
    """A tier that counts its values, and calls of it that overlap."""

    secret = bytes(16)

    def __init__(self):
        self.known, self.inside, self.most = [], [], 0

    def contains_many(self, keys):
        return [False] * len(keys)

    def get_many(self, keys):
        return [None] * len(keys)

    def put_many(self, items):
        self.inside.append(1)
        self.most = max(self.most, len(self.inside))
        self.known += [key for key, _ in items]
        self.inside.pop()


def test_one_thread_writes_what_threads_offer_at_once():
    for _ in range(4):
        tier = _OneWriter()
        writer = WriteBehind(Link(tier, tier.secret, 1), 1 << 20)

        def offer(number, writer=writer):
            for i in range(500):
                writer.offer(Written(b"%d %d" % (number, i), memoryview(b"value"), False, lambda: None))

        def look(_, writer=writer):
            for _ in range(50):
                assert 0 <= writer.queued_bytes <= 5 * 500 * 2

        together(offer, look, count=2)
        assert writer.close(60.0)
        assert tier.most == 1
        assert sorted(tier.known) == sorted(b"%d %d" % (number, i) for number in range(2) for i in range(500))


@pytest.mark.parametrize("options", [{}, {"eviction_policy": EvictionPolicy.StreamingLLM(2, 6), "max_running": 3}])
def test_a_thread_that_sees_an_end_sees_its_error(options):
    """It reads reports meanwhile, which wait for no step and count all that there is."""

    def failing(text, logits):
        raise ZeroDivisionError

    def use(_):
        for _ in range(2):
            request = engine.submit([5, 6, 7], SamplingParams(max_tokens=1, logits_processor=failing))
            while not request.is_finished:
                stats = engine.stats()
                # A step tells its ends when it is over: until then they count beside what their threads submit next.
                assert 0 <= stats.waiting <= 2 * THREADS
                assert stats.free_blocks + stats.claimed_blocks + stats.cached_blocks == total
                assert engine.memory()["kv"] > 0
                assert "running" in repr(engine)
            with pytest.raises(ZeroDivisionError):
                request.raise_error()

    with BatchEngine.from_pretrained(DIRECTORY, **options) as engine:
        total = engine.stats().free_blocks
        together(use, count=2)
        engine.check()


def test_an_engine_has_one_drafter_that_threads_ask_for_at_once():
    engine = InferenceEngine.from_pretrained(DIRECTORY, draft="ngram")
    for _ in range(8):
        found = []
        together(lambda _, found=found: found.append(engine.requests.drafter))
        assert found == [engine.requests.drafter] * THREADS
        engine.enlarge(1)
        assert engine.requests.drafter is not found[0]
