"""Many threads on one cache and on several: results as in a serial run, nothing lost, no deadlock."""

import os
import subprocess
import sys
import threading
from contextlib import suppress

import numpy as np
import pytest
from threads_at_once import together

from kvcache import (
    CachedKvState,
    CacheManager,
    InvalidOperationError,
    KvCache,
    KVCacheConfig,
    OutOfMemoryError,
    PagedKvCache,
    PrefixAwarePrefill,
    PrefixCache,
    PrefixCacheConfig,
    PrefixKvCache,
    SequenceNotFoundError,
)

LAYERS, HEADS, GROUP, DIM, BLOCK = 2, 2, 2, 32, 8
THREADS, ROUNDS = 8, 12


def new_cache(num_blocks, dtype):
    return PagedKvCache(num_blocks, BLOCK, HEADS, DIM, num_layers=LAYERS, dtype=dtype)


def history(cache, seq, seed):
    """Prefill, fork, decode on both, free one; returns all results of attention."""
    rng = np.random.default_rng(seed)
    n, twin, outs = int(rng.integers(1, 60)), seq + 1, []
    cache.allocate(seq, n)
    for layer in range(LAYERS):
        cache.write(layer, seq, *rng.standard_normal((2, n, HEADS, DIM), np.float32))
    cache.fork(seq, twin)
    for _ in range(4):
        cache.append_batch([seq, twin])
        for layer in range(LAYERS):
            cache.write_batch(layer, [seq, twin], *rng.standard_normal((2, 2, HEADS, DIM), np.float32))
            queries = rng.standard_normal((2, HEADS * GROUP, DIM), np.float32)
            outs.append(cache.attention(layer, queries, [seq, twin]))
    cache.free(twin)
    cache.apply_streaming_llm(seq, 2, 10)
    outs.append(cache.attention(0, queries[:1], [seq]))
    cache.free(seq)
    return np.concatenate(outs)


@pytest.mark.parametrize("dtype", ["f32", "q4"])
@pytest.mark.parametrize("shared", [True, False])
def test_as_in_a_serial_run(shared, dtype):
    alone = new_cache(64, dtype)
    serial = {(i, j): history(alone, 0, (i, j)) for i in range(THREADS) for j in range(ROUNDS)}
    one = new_cache(THREADS * 20, dtype)
    caches = [one if shared else new_cache(20, dtype) for _ in range(THREADS)]

    def work(i):
        for j in range(ROUNDS):
            assert (history(caches[i], 2 * i, (i, j)) == serial[i, j]).all()

    together(work, count=THREADS)
    for cache in caches:
        cache.check()
        assert cache.num_sequences == 0
        assert cache.free_block_count == cache.total_blocks


@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_prompts_in_one_prefix_kv_cache(dtype):
    """Too little memory for all states: held states keep their bytes while other threads store."""
    limits = PrefixCacheConfig(max_entries=20, max_memory_bytes=200 * 1024, min_prefix_len=1, dtype=dtype)
    cache = PrefixKvCache(limits)

    def rows(i, n):
        return [np.full(n * DIM, i + 1, np.float32)] * LAYERS  # constant rows come back exactly

    def work(i):
        for n in (5, 40, 17, 64) * ROUNDS:
            text = [i] * n
            with suppress(OutOfMemoryError):  # states held by other threads leave too little memory
                cache.store_snapshot(text, CachedKvState(rows(i, n), rows(-i, n), n))
            hit = cache.lookup([*text, 99])
            if hit:
                target = KvCache(LAYERS, 64, DIM)
                cache.restore(hit[1], target)
                assert (target.get_keys(1) == i + 1).all()
                assert (target.get_values(0) == 1 - i).all()

    together(work, count=THREADS)
    cache.check()
    stats = cache.stats()
    assert stats.hits + stats.misses == THREADS * 4 * ROUNDS


def test_prompts_in_one_prefix_cache():
    prefill = PrefixAwarePrefill(PrefixCache(24, 4, 1, 1, DIM, dtype="q8"))

    def work(i):
        for n in (8, 20, 12) * ROUNDS:
            text = np.arange(n) * (1 + i % 3)
            session, start = prefill.prepare(text)
            for block in session.block_indices:
                assert prefill.cache.get_block(block).keys[0][0] == 1
            pairs = [([np.ones(4 * DIM)], [np.ones(4 * DIM)])] * ((n - start) // 4)
            with suppress(InvalidOperationError):  # the block before it was evicted, since nothing holds the last block
                prefill.store_blocks(text, start, pairs)
            prefill.release_session(session)

    together(work, count=THREADS)
    prefill.cache.check()
    assert prefill.cache.pinned_blocks == 0


def test_layers_of_one_manager():
    manager = CacheManager(KVCacheConfig(64, HEADS, DIM, 4))

    def work(i):
        for n in (1, 5, 30) * ROUNDS:
            manager.append(*np.full((2, n, HEADS * DIM), i + 1, np.float32), layer_idx=i)
            with suppress(IndexError):  # rows of another layer may have evicted these
                keys, _ = manager.get([0], i)
                assert (keys == i + 1).all()
            manager.evict(48)

    together(work, count=THREADS)
    manager.check()
    assert len(manager) <= 64
    assert len(manager.layers) == THREADS


def test_one_live_cache():
    cache = KvCache(1, 1000, 8)

    def work(i):
        handle = cache.clone_handle()
        for _ in range(100):
            handle.store_kv(0, np.full(8, 1.0), np.full(8, 1.0))
            handle.advance()
            handle.check()

    together(work, count=THREADS)
    assert cache.seq_len == 100 * THREADS


def test_evictions_and_forks_under_attention():
    """Too few blocks for all: sequences are evicted between calls, but rows are never those of another sequence."""
    cache = new_cache(40, "f32")

    def rows(seq, n):
        return np.full((n, HEADS, DIM), seq + 1, np.float32)

    def user(seq):
        for n in (30, 17, 8, 41) * ROUNDS:
            with suppress(OutOfMemoryError, SequenceNotFoundError):
                cache.allocate(seq, n)
                cache.write(0, seq, rows(seq, n), rows(seq, n))
                cache.fork(seq, seq + 100)
                for s in (seq, seq + 100):
                    out = cache.attention(0, np.ones((1, HEADS * GROUP, DIM), np.float32), [s])
                    np.testing.assert_allclose(out, seq + 1, rtol=1e-5)
            for s in (seq, seq + 100):
                with suppress(SequenceNotFoundError):
                    cache.free(s)

    users = threading.Semaphore(0)  # counts finished threads

    def evictor():
        done = 0
        while done < THREADS - 1:
            cache.evict_to_threshold(0.5)
            cache.check()
            done += users.acquire(timeout=0.001)

    def work(i):
        try:
            user(i) if i else evictor()
        finally:
            users.release()

    together(work, count=THREADS)
    cache.check()
    assert cache.num_sequences == 0
    assert cache.free_block_count == cache.total_blocks


NAME = "OPENBLAS_THREAD_TIMEOUT"


def run_saying(said, code):
    """Run `code` in a process in which nothing but `said` tells the threads of OpenBLAS how long to spin."""
    left = {name: value for name, value in os.environ.items() if name != NAME}
    return subprocess.run(
        [sys.executable, "-c", code], env={**left, **said}, capture_output=True, text=True, check=True
    )


@pytest.mark.one_build
@pytest.mark.parametrize("said", [{}, {NAME: "20"}])
def test_the_environment_stays_as_it_was(said):
    run = run_saying(said, f"import os, kvcache; print(os.environ.get({NAME!r}))")
    assert run.stdout.strip() == str(said.get(NAME))


BLAS_TIMEOUT = """
import ctypes, pathlib, {first}, {second}, numpy
for path in pathlib.Path(numpy.__file__).parent.with_name("numpy.libs").glob("*openblas*"):
    if hasattr(ctypes.CDLL(str(path)), "openblas_thread_timeout"):
        print(ctypes.CDLL(str(path)).openblas_thread_timeout())
"""


@pytest.mark.exhaustive
@pytest.mark.one_build
@pytest.mark.parametrize(
    ("said", "order", "expected"),
    [
        ({}, ("kvcache", "numpy"), "17"),
        ({}, ("numpy", "kvcache"), "0"),  # too late: the default of OpenBLAS
        ({"OPENBLAS_THREAD_TIMEOUT": "20"}, ("kvcache", "numpy"), "20"),
    ],
)
def test_threads_of_openblas_soon_sleep(said, order, expected):
    run = run_saying(said, BLAS_TIMEOUT.format(first=order[0], second=order[1]))
    if not run.stdout.strip():
        pytest.skip("NumPy came with another BLAS, or one that does not say")
    assert run.stdout.split() == [expected]
