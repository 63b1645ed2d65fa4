"""`PagedKvCache.grow`: ids, K and V, handles, snapshots and prefix caches stay; all or nothing; no byte is lost."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from kvcache import OutOfMemoryError, PagedKvCache, PrefixCache
from kvcache.core.runs import RUN
from kvcache.kernels.kernels import FORMATS

LAYERS, HEADS, DIM, SIZE = 3, 2, 32, 16


def filled(rng, dtype="f32", num_blocks=12):
    """Two sequences, a fork of each, and free blocks that were written before."""
    cache = PagedKvCache(num_blocks, SIZE, HEADS, DIM, num_layers=LAYERS, dtype=dtype)
    cache.allocate_batch([1, 2, 3], [37, 20, 9])
    for seq, n in ((1, 37), (2, 20), (3, 9)):
        for layer in range(LAYERS):
            cache.write(layer, seq, *rng.standard_normal((2, n, HEADS, DIM), np.float32))
    cache.fork_batch([1, 2], [11, 12])
    cache.free(3)
    return cache


def content(cache):
    """Everything that a caller sees of each sequence, but for accesses."""
    out = []
    for seq in cache.sequence_ids():
        info = cache.get_sequence(seq)
        rows = [cache.read(layer, seq) for layer in range(LAYERS)]
        out.append((info.block_ids, info.num_tokens, info.priority, [side.tobytes() for pair in rows for side in pair]))
    return out


@pytest.mark.parametrize("dtype", FORMATS)
def test_ids_and_bytes_stay_in_every_format(rng, dtype):
    cache = filled(rng, dtype)
    queries = rng.standard_normal((2, 4, DIM), np.float32)
    before, raw = content(cache), [cache._store.raw(layer).copy() for layer in range(LAYERS)]
    outputs = [cache.attention(layer, queries, [1, 12]) for layer in range(LAYERS)]
    table, handle, live = cache.block_table([1, 2]), cache.handle(1), cache.handle(2).block_table_mut()
    shown = [part.tolist() for part in table]
    free = cache.free_block_count
    cache.grow(20)
    assert (cache.total_blocks, cache.free_block_count) == (32, free + 20)
    assert cache.total_memory_bytes == 32 * cache.block_memory_bytes
    assert content(cache) == before
    for layer in range(LAYERS):
        np.testing.assert_array_equal(cache._store.raw(layer)[:12], raw[layer])
        np.testing.assert_array_equal(cache.attention(layer, queries, [1, 12]), outputs[layer])
    assert [part.tolist() for part in table] == shown
    assert handle.is_valid
    live.sequence_length = 40
    assert cache.get_sequence(2).num_tokens == 40
    cache.check()


def test_new_blocks_come_after_the_free_ones_and_read_as_zeros(rng):
    cache = filled(rng)
    free = cache.free_block_count
    cache.grow(3)
    cache.allocate(9, SIZE * (free + 3))
    assert sorted(cache.get_sequence(9).block_ids[free:]) == [12, 13, 14]
    for layer in range(LAYERS):
        for side in cache.read(layer, 9):
            assert not side.any()
    with pytest.raises(OutOfMemoryError):
        cache.allocate(10, 1)


def test_a_fork_is_copied_on_write_into_new_blocks(rng):
    cache = PagedKvCache(3, SIZE, HEADS, DIM, num_layers=LAYERS, dtype="f32")
    cache.allocate(1, 3 * SIZE)
    rows = rng.standard_normal((2, 3 * SIZE, HEADS, DIM), np.float32)
    cache.write(1, 1, *rows)
    cache.fork(1, 2)
    with pytest.raises(OutOfMemoryError):
        cache.write(1, 2, -rows[0], -rows[1])
    cache.grow(3)
    cache.write(1, 2, -rows[0], -rows[1])
    np.testing.assert_array_equal(cache.read(1, 1), rows)
    np.testing.assert_array_equal(cache.read(1, 2), -rows)
    assert cache.free_block_count == 0
    cache.check()


def test_nothing_and_none_at_all():
    cache = PagedKvCache(0, SIZE, HEADS, DIM)
    cache.grow(0)
    cache.grow(2)
    cache.allocate(1, 2 * SIZE)
    cache.grow(0)
    cache.check()


def test_a_refused_grow_changes_nothing(rng):
    cache = PagedKvCache(12, 256, 8, 256, num_layers=LAYERS, dtype="f32")
    cache.allocate(1, 300)
    cache.write(1, 1, *rng.standard_normal((2, 300, 8, 256), np.float32))
    prefixes = PrefixCache.over(cache)
    prefixes.adopt(range(256), cache.get_sequence(1).block_ids[:1])
    before, stats = content(cache), cache.stats()
    with pytest.raises(OutOfMemoryError) as caught:
        cache.grow(10**9)  # more bytes than an address has
    assert caught.value.unit == "bytes"
    for wrong in (-1, 2**31 - 12, 2**62):
        with pytest.raises(ValueError, match="num_blocks: expected"):
            cache.grow(wrong)
    assert content(cache) == before
    assert (cache.total_blocks, cache.stats()) == (12, stats)
    prefixes.check()
    cache.check()


def test_prefix_caches_over_the_pool_go_on(rng):
    """Sessions, lookups and names stay; one without a limit of its own may name the new blocks, the others may not."""
    cache = filled(rng)
    every, two = PrefixCache.over(cache), PrefixCache.over(cache, 2)
    every.adopt(range(32), cache.get_sequence(1).block_ids[:2])
    two.adopt(range(16), cache.get_sequence(2).block_ids[:1])
    session = every.open_session(range(30))
    found = every.lookup(range(16))[1]
    want = found[0].keys[1].copy()
    cache.grow(50)
    assert (every.capacity, two.capacity) == (62, 2)
    assert session.num_tokens == 30
    np.testing.assert_array_equal(every.get_block(found[0].index).keys[1], want)
    cache.adopt(20, session.shared_blocks, session.num_tokens)
    np.testing.assert_array_equal(cache.read(1, 20), [side[:30] for side in cache.read(1, 1)])
    every.close_session(session)
    every.release(found[0].index)
    # The newest blocks can be named, found and evicted, and the reason of a miss is known.
    count = cache.free_block_count
    cache.allocate(30, count * SIZE)
    blocks = cache.get_sequence(30).block_ids
    assert max(blocks) == 61
    text = rng.integers(0, 1000, count * SIZE)
    assert every.adopt(text, blocks) == count
    assert two.adopt(text, blocks) == 2
    assert every.lookup(text)[0] == count * SIZE
    for block in blocks:
        every.release(block)
    cache.free(30)
    assert every.evict(62) == count - 2  # the other cache names two of them
    assert every.lookup(text)[0] == 0
    assert every.stats().miss_reasons["evicted"] == 1
    for part in (every, two, cache):
        part.check()


def test_a_saved_cache_loads_across_a_grow(rng, tmp_path):
    """Blocks that still wait for their content in the file, and a file that needs more blocks than there were."""
    saved = PagedKvCache(20, SIZE, HEADS, DIM, num_layers=LAYERS, dtype="q8")
    prefixes = PrefixCache.over(saved)
    saved.allocate(1, 10 * SIZE)
    for layer in range(LAYERS):
        saved.write(layer, 1, *rng.standard_normal((2, 10 * SIZE, HEADS, DIM), np.float32))
    text = rng.integers(0, 1000, 10 * SIZE)
    prefixes.adopt(text, saved.get_sequence(1).block_ids)
    saved.grow(7)
    prefixes.save(tmp_path / "cache")
    small = PagedKvCache(4, SIZE, HEADS, DIM, num_layers=LAYERS, dtype="q8")
    loaded = PrefixCache.over(small)
    assert loaded.load(tmp_path / "cache") == 4
    small.grow(6)
    with loaded.open_session(text) as session:
        assert session.num_tokens == 4 * SIZE
        small.adopt(1, session.shared_blocks, session.num_tokens)
    for layer in range(LAYERS):
        np.testing.assert_array_equal(small.read(layer, 1), [side[: 4 * SIZE] for side in saved.read(layer, 1)])
    small.free(1)
    loaded.clear()
    assert loaded.load(tmp_path / "cache") == 10
    loaded.check()
    small.check()


def test_other_threads_see_their_rows_while_the_cache_grows():
    """Reads, writes and attention of other threads, each on its sequence, across forty moves of the memory."""
    cache = PagedKvCache(8, SIZE, HEADS, DIM, num_layers=LAYERS, dtype="f32")
    cache.allocate_batch(range(4), [2 * SIZE] * 4)
    done, errors = threading.Event(), []

    def work(seq):
        rng = np.random.default_rng(seq)
        try:
            while not done.is_set():
                layer = int(rng.integers(LAYERS))
                rows = rng.standard_normal((2, 2 * SIZE, HEADS, DIM), np.float32)
                cache.write(layer, seq, *rows)
                np.testing.assert_array_equal(cache.read(layer, seq), rows)
                same = np.repeat(rows[1][-1:], 2 * SIZE, axis=0)
                cache.write(layer, seq, rows[0], same)
                out = cache.attention(layer, rows[0][:3], [seq], query_lens=[3])
                np.testing.assert_allclose(out, same[:3], rtol=1e-5, atol=1e-6)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seq,), daemon=True) for seq in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        cache.grow(5)
    done.set()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive(), "a thread hangs"
    assert not errors, errors[0]
    assert cache.total_blocks == 208
    cache.check()


def test_a_view_of_the_old_bytes_stays_readable(rng):
    cache = filled(rng)
    view = cache._store.raw(0)
    cache.grow(500)
    view.sum()
    cache.write(0, 1, *rng.standard_normal((2, 37, HEADS, DIM), np.float32))
    view.sum()


def test_untouched_blocks_stay_untouched(rng):
    cache = PagedKvCache(50, SIZE, HEADS, DIM, num_layers=LAYERS, dtype="f32")
    cache.allocate(1, 3 * SIZE)
    runs = np.array([(7, 0, SIZE)], RUN)
    rows = rng.standard_normal((2, SIZE, HEADS, DIM), np.float32)
    cache._store.write(1, runs, *rows)  # of a block that no sequence has
    cache.grow(1)
    np.testing.assert_array_equal(cache._store.read(1, runs), rows)
    assert not cache._store.raw(1)[8:].any()


PEAK = """
import re, sys
import numpy as np
from kvcache import PagedKvCache

def status(name):
    return int(re.search(rf"^{name}:\\s+(\\d+) kB", open("/proc/self/status").read(), re.M)[1]) // 1024

cache = PagedKvCache(256, 256, 4, 64, num_layers=8, dtype="f32")    # 128 MiB per layer
rows = np.ones((256, 4, 64), np.float32)
cache.allocate(1, 0)
for _ in range(64):    # 256 MiB in all
    cache.append(1, 256)
    for layer in range(8):
        cache.write(layer, 1, rows, rows)
before = status("VmRSS")
for _ in range(5):
    cache.grow(64)
print(before, status("VmRSS"), status("VmHWM"), sum("rw-p" in line for line in open("/proc/self/maps")))
"""


@pytest.mark.one_build
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_memory_in_use_rises_by_one_layer_at_most():
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=300)
    before, after, peak, _ = map(int, done.stdout.split())
    assert before > 256
    assert after < before + 16
    assert peak < before + 32 + 16  # MiB of a layer, and slack
