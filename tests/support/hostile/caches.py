"""Targets: the caches, with every public call on them."""

import os

import numpy as np
from hostile.target import FILES, LINE, ROWS, Target, keyword, method

from kvcache import (
    CachedKvState,
    CacheManager,
    EvictionStrategy,
    KvCache,
    KVCacheConfig,
    PagedKvCache,
    PrefixAwarePrefill,
    PrefixCache,
    PrefixCacheConfig,
    PrefixKvCache,
)
from kvcache.handle import BlockTable


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
            method("append_batch", [1, 2], [1, 0]),
            method("truncate_batch", [1, 2], [1, 0]),
            method("reorder", [1, 2], [1, 1]),
            method("grow", 2),
            method("fork_batch", [1], [9]),
            method("free_batch", [1]),
            method("get_sequence", 1),
            method("block_table", [1, 2]),
            method("write", 0, 1, ROWS, ROWS, 0),
            method("write_batch", 0, [1], ROWS[:1], ROWS[:1]),
            method("write_ragged", 0, [1], [1], ROWS[:1], ROWS[:1]),
            method("read", 0, 1, 0, 3),
            ("read out", (lambda it, x: it.read(0, 1, out=(x, np.empty_like(ROWS))), (np.empty_like(ROWS),))),
            keyword("read", "out", None, 0, 1, 0, 3),
            method("attention", 0, ROWS[:2], [1, 2]),
            keyword("attention", "query_lens", [1, 1], 0, ROWS[:2], [1, 2]),
            keyword("attention", "scale", 0.5, 0, ROWS[:2], [1, 2]),
            keyword("attention", "out", None, 0, ROWS[:2], [1, 2]),
            keyword("attention", "sink_queries", None, 0, ROWS[:2], [1, 2]),
            keyword("attention", "context_lens", [1, 1], 0, ROWS[:2], [1, 2]),
            keyword("attention", "return_scores", True, 0, ROWS[:2], [1, 2]),
            keyword("attention", "return_lse", True, 0, ROWS[:2], [1, 2]),
            keyword("attention", "causal", False, 0, ROWS[:2], [1, 2]),
            keyword("attention", "mask", [-1, -1], 0, ROWS[:2], [1, 2]),
            keyword("attention", "window", 3, 0, ROWS[:2], [1, 2]),
            ("attention chunks", (lambda it, x, y: it.attention(0, ROWS[:2], [1, 2], window=x, chunked=y), (3, True))),
            ("attention both ways", (
                lambda it, x, y: it.attention(0, ROWS[:2], [1, 2], window=x, causal=y), (3, False),
            )),
            keyword("attention", "softcap", 3.0, 0, ROWS[:2], [1, 2]),
            keyword("attention", "sinks", ROWS[0, :, 0], 0, ROWS[:2], [1, 2]),
            keyword("attention", "starts", [0, 7], 0, ROWS[:2], [1, 2]),
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

def unpacked():
    cache = PagedKvCache(16, 4, 2, 8, num_layers=2, dtype="q4", residual_length=4, first_tokens=2)
    for seq in (1, 2):
        cache.allocate(seq, 2)
        cache.append(seq, 2)
        cache.write(0, seq, ROWS, ROWS, 0)
    return cache


UNPACKED = Target(
    unpacked,
    dict(
        [
            method("unpack", 1, [(ROWS[:1], ROWS[:1])] * 2, [(ROWS[:2], ROWS[:2])] * 2),
            method("pack", 1, 3),
            method("unpacked_tokens", 1),
            method("read_unpacked", 0, 1),
            method("reserve_unpacked", 20),
            method("keep_tokens", 1, [0, 2]),
            method("apply_streaming_llm", 1, 1, 2),
            method("append", 1, 2),
            method("truncate", 1, 2),
            method("fork", 1, 9),
            method("swap", 1, 2),
            method("reorder", [1, 2], [1, 1]),
            method("write", 0, 1, ROWS, ROWS, 0),
            method("write_ragged", 0, [1], [1], ROWS[:1], ROWS[:1]),
            method("attention", 0, ROWS[:2], [1, 2]),
            keyword("attention", "query_lens", [1, 1], 0, ROWS[:2], [1, 2]),
            keyword("attention", "context_lens", [4, 3], 0, ROWS[:2], [1, 2]),
            keyword("attention", "return_scores", "head", 0, ROWS[:2], [1, 2]),
            keyword("attention", "sinks", ROWS[:2, :, 0], 0, ROWS[:2], [1, 2]),
            keyword("attention", "out", None, 0, ROWS[:2], [1, 2]),
        ]
    ),
    paged_works,
)

KEYS = np.ones((4, 1, 16), np.float32)


def indexed():
    cache = PagedKvCache(16, 4, latent=(8, 8), num_layers=2, dtype="f32", index_layers=1, index_dim=8)
    for seq in (1, 2):
        cache.allocate(seq, 4)
        cache.write(0, seq, KEYS)
        cache.write(2, seq, ROWS[:, :1])
    return cache


def indexed_works(cache):
    cache.check()
    for seq in cache.sequence_ids():
        cache.free(seq)
    cache.allocate(77, 4)
    cache.write(1, 77, KEYS)
    cache.write(2, 77, ROWS[:, :1])
    chosen = cache.choose_tokens(2, ROWS[:2], ROWS[:2, :, 0], [77], 2, query_lens=[2])
    np.testing.assert_array_equal(chosen[:, 0], [[0, 1]] * 2)
    assert np.isfinite(cache.attention(1, KEYS[:2], [77], query_lens=[2], tokens=chosen)).all()
    cache.check()


CHOSEN = np.array([[[0, -1]], [[1, 3]]])
INDEXED = Target(
    indexed,
    dict(
        [
            method("choose_tokens", 2, ROWS[:2], ROWS[:2, :, 0], [1, 2], 3),
            keyword("choose_tokens", "query_lens", [1, 1], 2, ROWS[:2], ROWS[:2, :, 0], [1, 2], 3),
            ("attention", (lambda it, q, x: it.attention(0, q, [1, 2], tokens=x), (KEYS[:2], CHOSEN))),
            ("attention of lists", (
                lambda it, lens, window, out: it.attention(
                    0, KEYS[:2], [1, 2], tokens=CHOSEN, context_lens=lens, window=window, out=out
                ), ([4, 4], None, None),
            )),
            method("write", 2, 1, ROWS[:, :1], None, 0),
            method("write_ragged", 2, [1], [1], ROWS[:1, :1], None),
            method("write_batch", 2, [1], ROWS[:1, :1], None),
            method("read", 2, 1, 0, 3),
            method("keep_tokens", 1, [0, 2]),
            method("truncate", 1, 2),
            method("fork", 1, 9),
        ]
    ),
    indexed_works,
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
            keyword("attention", "softcap", 3.0, ROWS[:1], 0),
            keyword("attention", "sinks", ROWS[0, :, 0], ROWS[:1], 0),
            method("update_attention_scores", [1.0], 0),
            method("attention_scores", 0),
            method("pyramid_budget", 0, 4),
        ]
    ),
    manager_works,
)
