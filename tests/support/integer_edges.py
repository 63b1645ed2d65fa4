"""Every integer that a caller may pass, at the edges of all integer types; `test_integer_edges.py` runs it.

Each call ends in a result or in an error of the documented kinds, soon, without memory in proportion to a hostile
number, and leaves its object sound. The process has little memory, so that what takes it is found.

    python tests/support/integer_edges.py all|some [LABEL]
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import numpy as np
from contents import pairs, state
from places import GOLDEN

from kvcache import (
    BlockTable,
    CacheBlock,
    CachedKvState,
    CacheManager,
    CacheSession,
    EvictionPolicy,
    EvictionStrategy,
    KvCache,
    KVCacheConfig,
    KvCacheError,
    PagedKvCache,
    PrefixAwarePrefill,
    PrefixCache,
    PrefixCacheConfig,
    PrefixKvCache,
    get_num_threads,
    set_num_threads,
)
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams, Transformer

DOCUMENTED = (KvCacheError, TypeError, ValueError, IndexError)
SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "")
ROOM = 3 << 30  # bytes of addresses beside those that are in use at the start
SECONDS = 2.0  # of a call, in its own time
RESIDENT = 600 << 20  # bytes that one call may touch

ALL = sys.argv[1:2] == ["all"]  # else fewer types and states
BITS = (31, 32, 63, 64) if sys.argv[1:2] == ["few"] else (7, 8, 15, 16, 31, 32, 62, 63, 64)

KINDS = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
EDGES = sorted(
    {0, 1, -1}
    | {2**k + more for k in BITS for more in (-1, 0, 1)}
    | {-(2**k) - more for k in BITS for more in (0, 1)}
)


def scalars(n):
    """The number, and as a scalar of NumPy: of the narrowest type that has it, and of both of 64 bits."""
    yield n
    if not ALL and abs(n) > 1 and n % 2:
        return
    fits = [kind for kind in KINDS if np.iinfo(kind).min <= n <= np.iinfo(kind).max]
    for kind in {*fits[:1], *(kind for kind in fits if kind.itemsize == 8)}:
        yield kind.type(n)


def arrays(n):
    """The number alone, twice, behind and before others; as a list and as arrays."""
    for numbers in ([n], [n, n], [1, n], [n, 2, n, 3]) if ALL else ([n], [n, 2, n, 3]):
        yield numbers
        fits = [k for k in KINDS if all(np.iinfo(k).min <= x <= np.iinfo(k).max for x in numbers)]
        for kind in {*fits[:1], *(kind for kind in fits if kind.itemsize == 8)}:
            yield np.array(numbers, kind)


# -- states ----------------------------------------------------------------------------------------------------

WRITTEN = np.ones((20, 1, 8), np.float32)


def empty():
    return PagedKvCache(8, 16, 1, 8)


def forked():
    """A tail that two sequences share, and one with a hole."""
    cache = empty()
    cache.allocate(1, 20)
    cache.write(0, 1, WRITTEN, WRITTEN)
    cache.fork(1, 2)
    cache.allocate(3, 20)
    cache.apply_streaming_llm(3, 2, 5)
    return cache


def full():
    cache = empty()
    cache.allocate(1, 8 * 16 - 3)
    return cache


def over():
    """A prefix cache over a paged one, with a session."""
    paged = forked()
    cache = PrefixCache.over(paged)
    cache.paged = paged
    cache.adopt(np.arange(16), paged.get_sequence(1).block_ids)
    cache.session = cache.open_session(np.arange(20))
    return cache


def pinned():
    return over().paged


def blocks():
    cache = PrefixCache(6, 4, 2, 1, 8)
    text = np.arange(20)
    cache.store(text, 0, pairs(None, text, 4, 1, 8))
    cache.found = cache.lookup(text[:9])
    return cache


def entries():
    cache = PrefixKvCache(PrefixCacheConfig(max_entries=4, max_memory_bytes=1 << 14, min_prefix_len=1))
    cache.store_snapshot(np.arange(20), state(None, np.arange(20), 8))
    return cache


def live():
    cache = KvCache(2, 30, 8)
    whole = state(None, np.arange(20), 8)
    cache.restore_from_snapshot(whole.keys, whole.values, 20)
    return cache


def manager(policy=None):
    it = CacheManager(KVCacheConfig(40, 1, 8, 4, policy or EvictionPolicy.H2O()))
    it.append(*np.ones((2, 15, 8), np.float32))
    it.append(*np.ones((2, 15, 8), np.float32), layer_idx=1)
    return it


def pyramid():
    return manager(EvictionPolicy.PyramidKV(3))


LLAMA = GOLDEN / "llama"
MODEL = Transformer.from_pretrained(LLAMA)
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)
HERE = Path(tempfile.mkdtemp())


def engine():
    it = InferenceEngine(MODEL, num_blocks=6)
    it.prefill_from_pos([1, 2, 3], 0)
    return it


def cached():
    return PrefixCachedEngine(InferenceEngine(MODEL, num_blocks=6), 4, strict=True)


def nothing():
    return None


Q = np.ones((1, 1, 8), np.float32)
ROW = np.ones((1, 1, 8), np.float32)
PAIR = pairs(None, np.arange(20), 4, 1, 8)
STATE = state(None, np.arange(20), 8)
LOGITS = np.ones(MODEL.config.vocab_size, np.float32)


def table_of(it):
    it.handle(1).block_table_mut().sequence_length  # noqa: B018
    return it.handle(1).block_table_mut()


def resize(table, n):
    table.sequence_length = n


def built(cache):
    """What a constructor made: it is sound."""
    if hasattr(cache, "check"):
        cache.check()


# -- calls -------------------------------------------------------------------------------------------------------

PAGED = [empty, forked, full, pinned] if ALL else [full, pinned]
# (states, label, call(object, number)) of single numbers, and of arrays below.
SCALARS = [
    (PAGED, "allocate id", lambda it, n: it.allocate(n, 3)),
    (PAGED, "allocate", lambda it, n: it.allocate(9, n)),
    (PAGED, "adopt id", lambda it, n: it.adopt(n, [0], 3)),
    (PAGED, "adopt", lambda it, n: it.adopt(9, [0, 1], n)),
    (PAGED, "fork from", lambda it, n: it.fork(n, 9)),
    (PAGED, "fork to", lambda it, n: it.fork(1, n)),
    (PAGED, "swap", lambda it, n: it.swap(1, n)),
    (PAGED, "swap first", lambda it, n: it.swap(n, 1)),
    (PAGED, "free", lambda it, n: it.free(n)),
    (PAGED, "append id", lambda it, n: it.append(n, 1)),
    (PAGED, "append", lambda it, n: it.append(1, n)),
    (PAGED, "append behind a hole", lambda it, n: it.append(3, n)),
    (PAGED, "append to a fork", lambda it, n: it.append(2, n)),
    (PAGED, "truncate id", lambda it, n: it.truncate(n, 1)),
    (PAGED, "truncate", lambda it, n: it.truncate(1, n)),
    (PAGED, "keep_tokens id", lambda it, n: it.keep_tokens(n, [0])),
    (PAGED, "apply_streaming_llm id", lambda it, n: it.apply_streaming_llm(n, 1, 1)),
    (PAGED, "apply_streaming_llm sinks", lambda it, n: it.apply_streaming_llm(1, n, 2)),
    (PAGED, "apply_streaming_llm window", lambda it, n: it.apply_streaming_llm(1, 2, n)),
    (PAGED, "apply_streaming_llm both", lambda it, n: it.apply_streaming_llm(1, n, n)),
    (PAGED, "compact", lambda it, n: it.compact(n)),
    (PAGED, "in", lambda it, n: n in it),
    (PAGED, "get_sequence", lambda it, n: it.get_sequence(n)),
    (PAGED, "set_priority id", lambda it, n: it.set_priority(n, 1)),
    (PAGED, "set_priority", lambda it, n: it.set_priority(1, n)),
    (PAGED, "pin", lambda it, n: it.pin(n)),
    (PAGED, "unpin", lambda it, n: it.unpin(n)),
    (PAGED, "evict_to_threshold", lambda it, n: it.evict_to_threshold(n)),
    (PAGED, "with_eviction_threshold", lambda it, n: it.with_eviction_threshold(n)),
    (PAGED, "handle", lambda it, n: it.handle(n)),
    (PAGED, "write layer", lambda it, n: it.write(n, 1, ROW, ROW)),
    (PAGED, "write id", lambda it, n: it.write(0, n, ROW, ROW)),
    (PAGED, "write start", lambda it, n: it.write(0, 1, ROW, ROW, n)),
    (PAGED, "write_batch layer", lambda it, n: it.write_batch(n, [1], ROW, ROW)),
    (PAGED, "read layer", lambda it, n: it.read(n, 1)),
    (PAGED, "read id", lambda it, n: it.read(0, n)),
    (PAGED, "read start", lambda it, n: it.read(0, 1, n)),
    (PAGED, "read stop", lambda it, n: it.read(0, 1, 0, n)),
    (PAGED, "read start and stop", lambda it, n: it.read(0, 1, n, n)),
    (PAGED, "attention layer", lambda it, n: it.attention(n, Q, [1])),
    (PAGED, "attention scale", lambda it, n: it.attention(0, Q, [1], scale=n)),
    ([forked], "handle layer", lambda it, n: it.handle(1).kv_cache(n)),
    ([forked], "handle key_cache", lambda it, n: it.handle(1).key_cache(n)),
    ([forked, pinned], "handle resize", lambda it, n: resize(table_of(it), n)),
    ([forked, pinned], "handle extend", lambda it, n: table_of(it).extend_sequence(n)),
    ([blocks, over], "evict blocks", lambda it, n: it.evict(n)),
    ([blocks, over], "release", lambda it, n: it.release(n)),
    ([blocks, over], "get_block", lambda it, n: it.get_block(n)),
    ([blocks, over], "insert", lambda it, n: it.insert(np.arange(20), n, *PAIR[0])),
    ([blocks, over], "store", lambda it, n: it.store(np.arange(20), n, PAIR)),
    ([blocks, over], "store_blocks", lambda it, n: PrefixAwarePrefill(it).store_blocks(np.arange(20), n, PAIR)),
    ([blocks, over], "token", lambda it, n: it.lookup([1, n, 2, 3, 4, 5])),
    ([blocks, over], "namespace", lambda it, n: (it.open_session(np.arange(9), n), it.save(HERE / "b"))),
    ([pinned], "over", lambda it, n: built(PrefixCache.over(it, n))),
    ([entries], "lookup token", lambda it, n: it.lookup([n, 1])),
    ([entries], "remove token", lambda it, n: it.remove([n])),
    ([entries], "store seq_len", lambda it, n: it.store(np.arange(20), live(), n, 8, 2)),
    ([entries], "store kv_dim", lambda it, n: it.store(np.arange(20), live(), 20, n, 2)),
    ([entries], "store num_layers", lambda it, n: it.store(np.arange(20), live(), 20, 8, n)),
    ([entries], "store namespace", lambda it, n: (it.store_snapshot(np.arange(20), STATE, n), it.save(HERE / "e"))),
    ([nothing], "CachedKvState", lambda _, n: CachedKvState(STATE.keys, STATE.values, n)),
    ([nothing], "CachedKvState of nothing", lambda _, n: CachedKvState([], [], n)),
    ([live], "store_kv", lambda it, n: it.store_kv(n, np.ones(8), np.ones(8))),
    ([live], "truncate live", lambda it, n: it.truncate(n)),
    ([live], "get_keys", lambda it, n: it.get_keys(n)),
    ([live], "get_values", lambda it, n: it.get_values(n)),
    ([live], "key_cache", lambda it, n: it.key_cache(n)),
    ([live], "value_cache", lambda it, n: it.value_cache(n)),
    ([live], "for_each_key", lambda it, n: it.for_each_key(n, lambda position, row: None)),
    ([live], "restore_from_snapshot", lambda it, n: it.restore_from_snapshot(STATE.keys, STATE.values, n)),
    ([live], "live resize", lambda it, n: resize(it.block_table_mut(), n)),
    ([live], "live extend", lambda it, n: it.block_table_mut().extend_sequence(n)),
    ([nothing], "KvCache layers", lambda _, n: built(KvCache(n, 4, 8))),
    ([nothing], "KvCache tokens", lambda _, n: built(KvCache(2, n, 8))),
    ([nothing], "KvCache kv_dim", lambda _, n: built(KvCache(2, 4, n))),
    ([nothing], "KvCache heads", lambda _, n: built(KvCache(2, 4, 8, num_heads=n))),
    ([nothing], "KvCache all", lambda _, n: built(KvCache(n, n, n))),
    ([manager, pyramid], "append layer", lambda it, n: it.append(np.ones(8), np.ones(8), n)),
    ([manager, pyramid], "get layer", lambda it, n: it.get([0], n)),
    ([manager, pyramid], "positions", lambda it, n: it.positions(n)),
    ([manager, pyramid], "attention_scores", lambda it, n: it.attention_scores(n)),
    ([manager, pyramid], "attention layer of a manager", lambda it, n: it.attention(Q, n)),
    ([manager, pyramid], "evict to a budget", lambda it, n: it.evict(n)),
    ([manager, pyramid], "evict layer", lambda it, n: it.evict(4, n)),
    ([manager, pyramid], "evict a layer to a budget", lambda it, n: it.evict(n, 1)),
    ([manager, pyramid], "update_attention_scores layer", lambda it, n: it.update_attention_scores(np.ones(15), n)),
    ([manager, pyramid], "pyramid_budget layer", lambda it, n: it.pyramid_budget(n, 4)),
    ([manager, pyramid], "pyramid_budget layers", lambda it, n: it.pyramid_budget(0, n)),
    ([nothing], "KVCacheConfig max_seq_len", lambda _, n: CacheManager(KVCacheConfig(n, 1, 8))),
    ([nothing], "KVCacheConfig num_heads", lambda _, n: CacheManager(KVCacheConfig(40, n, 8))),
    ([nothing], "KVCacheConfig head_dim", lambda _, n: CacheManager(KVCacheConfig(40, 1, n))),
    ([nothing], "KVCacheConfig bits", lambda _, n: CacheManager(KVCacheConfig(40, 1, 8, n))),
    ([nothing], "KVCacheConfig key_bits", lambda _, n: CacheManager(KVCacheConfig(40, 1, 8, key_bits=n))),
    ([nothing], "manager max_seq_len", lambda _, n: CacheManager(KVCacheConfig(n, 1, 8)).append(ROW, ROW)),
    ([nothing], "manager PyramidKV", lambda _, n: manager(EvictionPolicy.PyramidKV(n))),
    ([nothing], "manager SlidingWindow window", lambda _, n: manager(EvictionPolicy.SlidingWindow(n, 1))),
    ([nothing], "manager SlidingWindow sink", lambda _, n: manager(EvictionPolicy.SlidingWindow(1, n))),
    ([nothing], "policy StreamingLLM", lambda _, n: EvictionPolicy.StreamingLLM(n, n)),
    ([nothing], "policy H2O", lambda _, n: EvictionPolicy.H2O(n)),
    ([forked], "strategy Priority", lambda it, n: it.with_eviction_strategy(EvictionStrategy.Priority(n))),
    ([forked], "strategy sinks", lambda it, n: it.with_eviction_strategy(EvictionStrategy.StreamingLLM(n, 1))),
    ([forked], "strategy window", lambda it, n: it.with_eviction_strategy(EvictionStrategy.StreamingLLM(1, n))),
    ([forked], "strategy both", lambda it, n: it.with_eviction_strategy(EvictionStrategy.StreamingLLM(n, n))),
    ([nothing], "PagedKvCache blocks", lambda _, n: built(PagedKvCache(n, 16, 1, 8))),
    ([nothing], "PagedKvCache block_size", lambda _, n: built(PagedKvCache(4, n, 1, 8))),
    ([nothing], "PagedKvCache heads", lambda _, n: built(PagedKvCache(4, 16, n, 8))),
    ([nothing], "PagedKvCache head_dim", lambda _, n: built(PagedKvCache(4, 16, 1, n))),
    ([nothing], "PagedKvCache layers", lambda _, n: built(PagedKvCache(4, 16, 1, 8, num_layers=n))),
    ([nothing], "PagedKvCache layers and heads", lambda _, n: built(PagedKvCache(4, 16, n, 8, num_layers=n))),
    ([nothing], "PagedKvCache threshold", lambda _, n: built(PagedKvCache(4, 16, 1, 8, eviction_threshold=n))),
    ([nothing], "PrefixCache blocks", lambda _, n: built(PrefixCache(n, 4, 1, 1, 8))),
    ([nothing], "PrefixCache block_size", lambda _, n: built(PrefixCache(4, n, 1, 1, 8))),
    ([nothing], "PrefixCache layers", lambda _, n: built(PrefixCache(4, 4, n, 1, 8))),
    ([nothing], "PrefixCache heads", lambda _, n: built(PrefixCache(4, 4, 1, n, 8))),
    ([nothing], "PrefixCache head_dim", lambda _, n: built(PrefixCache(4, 4, 1, 1, n))),
    *(
        ([nothing], f"PrefixCacheConfig {name}", lambda _, n, name=name: PrefixKvCache(
            PrefixCacheConfig(**{"min_prefix_len": 1, "dtype": "q8", name: n})
        ).store_snapshot(np.arange(20), STATE))
        for name in ("max_entries", "max_memory_bytes", "min_prefix_len", "head_dim")
    ),
    ([nothing], "BlockTable size", lambda _, n: BlockTable(n, [0], [0], 0).free_tokens),
    ([nothing], "BlockTable length", lambda _, n: BlockTable(4, [0], [0], n).free_tokens),
    ([nothing], "BlockTable extend", lambda _, n: BlockTable(4, [0], [0], 0).extend_sequence(n)),
    ([nothing], "blocks_needed length", lambda _, n: BlockTable.blocks_needed_for_length(n, 4)),
    ([nothing], "blocks_needed size", lambda _, n: BlockTable.blocks_needed_for_length(4, n)),
    ([nothing], "cached_tokens", lambda _, n: CacheSession(0, [], -1, 0).cached_tokens(n)),
    ([nothing], "CacheBlock", lambda _, n: CacheBlock(n, 1, 8, 4)),
    ([nothing], "set_num_threads", lambda _, n: set_num_threads(n)),
    *(
        ([nothing], f"SamplingParams {name}", lambda _, n, name=name: SamplingParams(**{name: n}))
        for name in ("temperature", "top_k", "top_p", "repetition_penalty", "max_tokens", "seed")
    ),
    ([nothing], "SamplingParams stop_token_ids", lambda _, n: SamplingParams(stop_token_ids=(n,))),
    *(
        ([engine], f"generate with {name}", lambda it, n, name=name: next(
            it.stream([1, 2], SamplingParams(**{"temperature": 0.7, name: n}))
        , None))
        for name in ("temperature", "top_k", "top_p", "repetition_penalty", "max_tokens", "seed")
    ),
    ([engine], "generate with stop_token_ids", lambda it, n: next(
        it.stream([1, 2], SamplingParams(stop_token_ids=(n,))), None
    )),
    *(
        ([nothing], f"InferenceEngine {name}", lambda _, n, name=name: built(
            InferenceEngine(MODEL, **{**({} if name == "num_blocks" else {"num_blocks": 4}), name: n})
        ))
        for name in ("seed", "block_size", "num_blocks", "prefill_chunk", "residual_length")
    ),
    *(
        ([nothing], f"evicting {name}", lambda _, n, name=name: built(
            InferenceEngine(MODEL, eviction_policy=EvictionPolicy.H2O(), **{"kv_budget": 8, name: n})
        ))
        for name in ("kv_budget", "block_size", "prefill_chunk", "num_blocks")
    ),
    ([nothing], "streaming window", lambda _, n: built(
        InferenceEngine(MODEL, eviction_policy=EvictionPolicy.StreamingLLM(2, n))
    )),
    ([nothing], "streaming sinks", lambda _, n: built(
        InferenceEngine(MODEL, eviction_policy=EvictionPolicy.StreamingLLM(n, 8))
    )),
    ([nothing], "pyramid engine", lambda _, n: built(
        InferenceEngine(MODEL, eviction_policy=EvictionPolicy.PyramidKV(n), kv_budget=8)
    )),
    ([nothing], "from_pretrained", lambda _, n: built(
        InferenceEngine.from_pretrained(LLAMA, None, n, num_blocks=n, prefill_chunk=n)
    )),
    ([engine], "prefill pos", lambda it, n: it.prefill_from_pos([1, 2], n)),
    ([engine, cached], "token of generate", lambda it, n: it.generate([1, n], GREEDY)),
    ([engine], "token of prefill", lambda it, n: it.prefill_from_pos([n], 0)),
    ([engine], "token of score", lambda it, n: it.score([1, n])),
    ([engine], "decode_step token", lambda it, n: it.decode_step(n, 3)),
    ([engine], "decode_step pos", lambda it, n: it.decode_step(1, n)),
    ([engine], "decode history", lambda it, n: next(it.decode(LOGITS, GREEDY, [n]))),
    ([engine], "kept_positions", lambda it, n: it.kept_positions(n)),
    ([engine], "alive_tokens", lambda it, n: it.alive_tokens(n)),
    ([engine], "enlarge", lambda it, n: it.enlarge(n)),
    ([engine], "reseed", lambda it, n: (it.reseed(n), it.generate([1], SamplingParams(max_tokens=1)))),
    ([engine], "begin", lambda it, n: it.begin(lambda cache, seq: (cache.allocate(seq, 0), n)[1])),
    ([nothing], "PrefixCachedEngine", lambda _, n: built(PrefixCachedEngine(InferenceEngine(MODEL, num_blocks=4), n))),
    ([engine], "PrefixCachedEngine seed", lambda it, n: PrefixCachedEngine(it, 2, seed=n)),
    ([cached], "namespace of a request", lambda it, n: (it.generate(np.arange(3, 20), GREEDY, namespace=n),
                                                        it.save(HERE / "c", "m"))),
]  # fmt: skip

ARRAYS = [
    (PAGED, "adopt blocks", lambda it, a: it.adopt(9, a, 16 * len(a))),
    (PAGED, "copy_blocks from", lambda it, a: it.copy_blocks(a, [0] * len(a))),
    (PAGED, "copy_blocks to", lambda it, a: it.copy_blocks([0] * len(a), a)),
    (PAGED, "reference_counts", lambda it, a: it.reference_counts(a)),
    (PAGED, "keep_tokens", lambda it, a: it.keep_tokens(1, a)),
    (PAGED, "allocate_batch ids", lambda it, a: it.allocate_batch(a, [1] * len(a))),
    (PAGED, "allocate_batch counts", lambda it, a: it.allocate_batch(range(11, 11 + len(a)), a)),
    (PAGED, "append_batch", lambda it, a: it.append_batch(a)),
    (PAGED, "fork_batch from", lambda it, a: it.fork_batch(a, range(11, 11 + len(a)))),
    (PAGED, "fork_batch to", lambda it, a: it.fork_batch([1] * len(a), a)),
    (PAGED, "free_batch", lambda it, a: it.free_batch(a)),
    (PAGED, "block_table", lambda it, a: it.block_table(a)),
    (PAGED, "write_batch ids", lambda it, a: it.write_batch(0, a, np.ones((len(a), 1, 8)), np.ones((len(a), 1, 8)))),
    (PAGED, "attention ids", lambda it, a: it.attention(0, np.ones((len(a), 1, 8)), a)),
    (PAGED, "query_lens", lambda it, a: it.attention(0, Q, [1] * len(a), query_lens=a)),
    (PAGED, "query_lens of more", lambda it, a: it.attention(0, np.ones((4, 1, 8)), [1] * len(a), query_lens=a)),
    (PAGED, "context_lens", lambda it, a: it.attention(0, np.ones((len(a), 1, 8)), [1] * len(a), context_lens=a)),
    (PAGED, "all lens", lambda it, a: it.attention(0, Q, [1] * len(a), query_lens=a, context_lens=a,
                                                   return_scores=True, return_lse=True)),
    ([over], "adopt block ids", lambda it, a: it.adopt(np.arange(100, 100 + 16 * len(a)), a)),
    ([over, blocks], "tokens of lookup", lambda it, a: it.lookup(a)),
    ([over, blocks], "tokens of open_session", lambda it, a: it.open_session(a)),
    ([blocks], "tokens of store", lambda it, a: it.store([*a, *a, *a, *a], 0, PAIR)),
    ([entries], "tokens", lambda it, a: it.lookup(a)),
    ([entries], "tokens of store_snapshot", lambda it, a: it.store_snapshot(
        a, state(None, np.arange(len(a)), 8)
    )),
    ([manager, pyramid], "get", lambda it, a: it.get(a)),
    ([manager, pyramid], "get of a layer", lambda it, a: it.get(a, 1)),
    ([manager, pyramid], "update_attention_scores", lambda it, a: it.update_attention_scores(a)),
    ([engine, cached], "tokens of generate", lambda it, a: it.generate(a, GREEDY)),
    ([engine], "tokens of score", lambda it, a: it.score(a)),
]  # fmt: skip


# -- running -------------------------------------------------------------------------------------------------------


def negatives(it):
    """Counts below zero in what an object says of itself."""
    found = []
    if hasattr(it, "stats"):
        stats = it.stats()
        for name in type(stats).__dataclass_fields__:
            value = getattr(stats, name)
            if isinstance(value, (int, float)) and value < 0:
                found.append(f"{name} {value}")
    for name in (
        "num_sequences", "free_block_count", "used_block_count", "utilization", "used_memory_bytes", "num_tokens",
        "memory_bytes", "allocated_bytes", "memory_usage", "seq_len", "pinned_blocks",
    ):  # fmt: skip
        value = getattr(it, name, 0)
        if isinstance(value, (int, float)) and value < 0:
            found.append(f"{name} {value}")
    return found


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class TooLong(BaseException):
    """Raised by a timer."""


def too_long(*_):
    raise TooLong


class Tries:
    def __init__(self):
        self.outcomes, self.problems = Counter(), []

    def one(self, make, label, call, number):
        what = f"{label} with {number!r} ({getattr(number, 'dtype', type(number).__name__)}) on {make.__name__}"
        it = make()
        started = time.process_time()
        peak = resident()
        signal.setitimer(signal.ITIMER_PROF, 2 * SECONDS * (10 if SANITIZED else 1))
        try:
            result = call(it, number)
            self.outcomes["results"] += 1
            if type(result) is int and result < 0:
                self.problems.append(f"{what} gave {result}")
        except DOCUMENTED as error:
            self.outcomes["refused"] += 1
            message = str(error)
            if "-" in message and isinstance(error, MemoryError):
                self.problems.append(f"{what}: a negative count: {message}")
            del error
        except BaseException as error:
            place = traceback.format_exc(limit=-2)
            self.problems.append(f"{what}: {type(error).__name__}: {str(error)[:200]}\n{place}")
            del error
        signal.setitimer(signal.ITIMER_PROF, 0)
        took, grown = time.process_time() - started, resident() - peak
        if took > SECONDS * (10 if SANITIZED else 1):
            self.problems.append(f"{what} took {took:.1f} s")
        if grown > RESIDENT and not SANITIZED:
            self.problems.append(f"{what} took {grown >> 20} MiB")
        if it is not None:
            try:
                it.check()
                assert not (wrong := negatives(it)), wrong
            except Exception:
                self.problems.append(f"{what} leaves: {traceback.format_exc(limit=-2)}")


def main(_, only=""):
    logging.disable()
    faulthandler.enable()
    signal.signal(signal.SIGPROF, too_long)
    faulthandler.dump_traceback_later(500, exit=True)
    np.seterr(over="ignore", invalid="ignore")
    threads = get_num_threads()
    if not SANITIZED:  # which maps terabytes
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.getrlimit(resource.RLIMIT_AS)[1]))
    tries, slowest = Tries(), Counter()
    for calls, variants in ((SCALARS, scalars), (ARRAYS, arrays)):
        for states, label, call in calls:
            if only not in label:
                continue
            started = time.perf_counter()
            for make in states:
                for edge in EDGES:
                    for number in variants(edge):
                        tries.one(make, label, call, number)
                set_num_threads(threads)
            gc.collect()
            slowest[label] = time.perf_counter() - started
            if os.environ.get("VERBOSE"):
                print(f"{label}: {slowest[label]:.1f} s, {len(tries.problems)} problems", flush=True)
    seen = set()
    for problem in tries.problems:
        head = problem.split(" with ")[0]
        if (head, problem.splitlines()[-1][:40]) not in seen:
            seen.add((head, problem.splitlines()[-1][:40]))
            print(problem[:1200])
    print("slowest:", {label: round(took, 1) for label, took in slowest.most_common(6)})
    print(
        f"{sum(tries.outcomes.values()) + len(tries.problems)} calls, {tries.outcomes['results']} results, "
        f"{tries.outcomes['refused']} refused, {len(tries.problems)} problems"
    )
    return bool(tries.problems)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
