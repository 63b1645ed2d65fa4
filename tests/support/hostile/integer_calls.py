"""Every public call that takes integers, each as a function of one integer or of one array of integers."""

import tempfile
from pathlib import Path

import numpy as np
from contents import pairs, state
from hostile.integer_states import (
    LLAMA,
    MODEL,
    blocks,
    cached,
    engine,
    entries,
    forked,
    full,
    indexed,
    live,
    manager,
    nothing,
    over,
    pinned,
    pyramid,
    unpacked,
)

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
    PagedKvCache,
    PrefixAwarePrefill,
    PrefixCache,
    PrefixCacheConfig,
    PrefixKvCache,
    set_num_threads,
)
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.kernels.matrix import Matrix
from kvcache.networks.linear import MatrixStack
from kvcache.tiers import DirectoryTier, RedisTier, Tiers

GREEDY = SamplingParams(temperature=0.0, max_tokens=2)
HERE = Path(tempfile.mkdtemp())
Q = np.ones((1, 1, 8), np.float32)
LATENT = np.ones((1, 1, 16), np.float32)
ROW = np.ones((1, 1, 8), np.float32)
PAIR = pairs(None, np.arange(20), 4, 1, 8)
STATE = state(None, np.arange(20), 8)
LOGITS = np.ones(MODEL.config.vocab_size, np.float32)


class Client:
    """A client of Redis, or a tier, of which nothing is called."""

    pipeline = get_many = put_many = contains_many = print


def table_of(it):
    it.handle(1).block_table_mut().sequence_length  # noqa: B018
    return it.handle(1).block_table_mut()


def resize(table, n):
    table.sequence_length = n


def built(cache):
    """The object that a constructor made, after its check."""
    if hasattr(cache, "check"):
        cache.check()


PAGED = [full, pinned]
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
    (PAGED, "grow", lambda it, n: it.grow(n)),
    (PAGED, "write_batch layer", lambda it, n: it.write_batch(n, [1], ROW, ROW)),
    (PAGED, "read layer", lambda it, n: it.read(n, 1)),
    (PAGED, "read id", lambda it, n: it.read(0, n)),
    (PAGED, "read start", lambda it, n: it.read(0, 1, n)),
    (PAGED, "read stop", lambda it, n: it.read(0, 1, 0, n)),
    (PAGED, "read start and stop", lambda it, n: it.read(0, 1, n, n)),
    (PAGED, "attention layer", lambda it, n: it.attention(n, Q, [1])),
    (PAGED, "attention window", lambda it, n: it.attention(0, Q, [1], window=n)),
    (PAGED, "attention softcap", lambda it, n: it.attention(0, Q, [1], softcap=n)),
    (PAGED, "attention scale", lambda it, n: it.attention(0, Q, [1], scale=n)),
    (PAGED, "chunks of attention", lambda it, n: it.attention(0, Q, [1], window=n, chunked=True)),
    (PAGED, "window both ways", lambda it, n: it.attention(0, Q, [1], window=n, causal=False)),
    ([indexed], "choose_tokens layer", lambda it, n: it.choose_tokens(n, Q, Q[..., 0], [1], 3)),
    ([indexed], "choose_tokens id", lambda it, n: it.choose_tokens(1, Q, Q[..., 0], [n], 3)),
    ([indexed], "choose_tokens", lambda it, n: it.choose_tokens(1, Q, Q[..., 0], [1], n)),
    ([indexed], "attention in an index layer", lambda it, n: it.attention(n, LATENT, [1])),
    ([unpacked], "pack id", lambda it, n: it.pack(n, 3)),
    ([unpacked], "pack", lambda it, n: (it.pack(1, n), it.pack(3, n))),
    ([unpacked], "unpack id", lambda it, n: it.unpack(n)),
    ([unpacked], "unpacked_tokens", lambda it, n: it.unpacked_tokens(n)),
    ([unpacked], "read_unpacked layer", lambda it, n: it.read_unpacked(n, 1)),
    ([unpacked], "read_unpacked id", lambda it, n: it.read_unpacked(0, n)),
    ([unpacked], "reserve_unpacked", lambda it, n: it.reserve_unpacked(n)),
    ([unpacked], "append unpacked", lambda it, n: (it.append(3, n), built(it), it.append(1, n))),
    ([unpacked], "truncate unpacked", lambda it, n: (it.truncate(3, n), built(it), it.truncate(1, n))),
    ([unpacked], "write unpacked", lambda it, n: (it.write(0, 3, ROW, ROW, n), it.write(0, 1, ROW, ROW, n))),
    ([unpacked], "keep unpacked", lambda it, n: (it.keep_tokens(3, [n]), built(it), it.keep_tokens(1, [n]))),
    ([unpacked], "stream sinks unpacked", lambda it, n: (it.apply_streaming_llm(3, n, 2), built(it))),
    ([unpacked], "stream window unpacked", lambda it, n: (it.apply_streaming_llm(3, 1, n), built(it))),
    ([unpacked], "context of unpacked", lambda it, n: it.attention(0, Q, [1], context_lens=[n], return_scores=True)),
    ([unpacked], "queries of unpacked", lambda it, n: it.attention(0, Q, [3], query_lens=[n], return_scores="head")),
    ([nothing], "residual_length", lambda _, n: built(PagedKvCache(4, 16, 1, 8, residual_length=n))),
    ([nothing], "first_tokens", lambda _, n: built(PagedKvCache(4, 16, 1, 8, first_tokens=n))),
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
    ([nothing], "latent", lambda _, n: (
        built(PagedKvCache(4, 16, latent=(n, 8))), built(PagedKvCache(4, 16, latent=(8, n)))
    )),
    ([nothing], "index_layers", lambda _, n: built(PagedKvCache(4, 16, latent=(8, 8), index_layers=n))),
    ([nothing], "index_dim", lambda _, n: built(PagedKvCache(4, 16, latent=(8, 8), index_layers=1, index_dim=n))),
    ([nothing], "PagedKvCache blocks", lambda _, n: built(PagedKvCache(n, 16, 1, 8))),
    ([nothing], "PagedKvCache block_size", lambda _, n: built(PagedKvCache(4, n, 1, 8))),
    ([nothing], "PagedKvCache heads", lambda _, n: built(PagedKvCache(4, 16, n, 8))),
    ([nothing], "PagedKvCache head_dim", lambda _, n: built(PagedKvCache(4, 16, 1, n))),
    ([nothing], "PagedKvCache value_head_dim", lambda _, n: built(PagedKvCache(4, 16, 1, 8, value_head_dim=n))),
    ([nothing], "PagedKvCache layers", lambda _, n: built(PagedKvCache(4, 16, 1, 8, num_layers=n))),
    ([nothing], "PagedKvCache layers and heads", lambda _, n: built(PagedKvCache(4, 16, n, 8, num_layers=n))),
    ([nothing], "PagedKvCache threshold", lambda _, n: built(PagedKvCache(4, 16, 1, 8, eviction_threshold=n))),
    ([nothing], "PagedKvCache bytes", lambda _, n: built(PagedKvCache(4, 16, 1, 8, max_memory_bytes=n))),
    ([nothing], "PagedKvCache bytes alone", lambda _, n: built(PagedKvCache(None, 256, 8, 256, max_memory_bytes=n))),
    ([nothing], "PrefixCache bytes", lambda _, n: built(PrefixCache(4, 4, 1, 1, 8, max_memory_bytes=n))),
    ([nothing], "KVCacheConfig bytes", lambda _, n: KVCacheConfig(40, 1, 8, max_memory_bytes=n)),
    ([nothing], "engine bytes", lambda _, n: InferenceEngine(MODEL, max_memory_bytes=n)),
    ([engine], "PrefixCachedEngine bytes", lambda it, n: PrefixCachedEngine(it, 4, max_memory_bytes=n)),
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
    ([nothing], "Matrix rows", lambda _, n: Matrix(n, 64, "q8_0")),
    ([nothing], "Matrix columns", lambda _, n: Matrix(64, n, "f32")),
    ([nothing], "Matrix both", lambda _, n: Matrix(n, n, "q4_1")),
    ([nothing], "Matrix num_bytes", lambda _, n: Matrix.num_bytes(n, n, "f16")),
    ([nothing], "row of a matrix", lambda _, n: Matrix(32, 64, "f32")[n]),
    ([nothing], "row of matrices", lambda _, n: MatrixStack([Matrix(32, 64, "f32"), Matrix(9, 64, "q8_0")])[n]),
    ([nothing], "put row", lambda _, n: Matrix(32, 64, "f32").put(n, np.ones((1, 64)))),
    ([nothing], "codes of row", lambda _, n: Matrix(32, 64, "q8_0").codes(n)),
    ([nothing], "part row", lambda _, n: Matrix(32, 64, "f32").part(n, 16)),
    ([nothing], "part count", lambda _, n: Matrix(32, 64, "f32").part(0, n)),
    ([nothing], "DirectoryTier bytes", lambda _, n: DirectoryTier(HERE / "tier", n)),
    ([nothing], "RedisTier ttl", lambda _, n: RedisTier(Client, secret=bytes(32), ttl=n)),
    *(
        ([nothing], f"Tiers {name}", lambda _, n, name=name: Tiers([Client], secret=bytes(32), **{name: n}).close(0))
        for name in ("after_uses", "queue_bytes", "deadline", "head_start")
    ),
    *(
        ([nothing], f"SamplingParams {name}", lambda _, n, name=name: SamplingParams(**{name: n}))
        for name in ("temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty", "max_tokens", "seed")
    ),
    ([nothing], "SamplingParams stop_token_ids", lambda _, n: SamplingParams(stop_token_ids=(n,))),
    *(
        ([engine], f"generate with {name}", lambda it, n, name=name: next(
            it.stream([1, 2], SamplingParams(**{"temperature": 0.7, name: n}))
        , None))
        for name in ("temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty", "max_tokens", "seed")
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
]

ARRAYS = [
    (PAGED, "adopt blocks", lambda it, a: it.adopt(9, a, 16 * len(a))),
    (PAGED, "copy_blocks from", lambda it, a: it.copy_blocks(a, [0] * len(a))),
    (PAGED, "copy_blocks to", lambda it, a: it.copy_blocks([0] * len(a), a)),
    (PAGED, "reference_counts", lambda it, a: it.reference_counts(a)),
    (PAGED, "keep_tokens", lambda it, a: it.keep_tokens(1, a)),
    (PAGED, "allocate_batch ids", lambda it, a: it.allocate_batch(a, [1] * len(a))),
    (PAGED, "allocate_batch counts", lambda it, a: it.allocate_batch(range(11, 11 + len(a)), a)),
    (PAGED, "append_batch", lambda it, a: it.append_batch(a)),
    (PAGED, "append_batch counts", lambda it, a: it.append_batch([1, 2, 3][: len(a)], a)),
    (PAGED, "truncate_batch ids", lambda it, a: it.truncate_batch(a, [1] * len(a))),
    (PAGED, "truncate_batch counts", lambda it, a: it.truncate_batch([1, 2, 3][: len(a)], a)),
    (PAGED, "reorder ids", lambda it, a: it.reorder(a, [0] * len(a))),
    (PAGED, "reorder rows", lambda it, a: it.reorder([1, 2, 3][: len(a)], a)),
    (PAGED, "write_ragged lens", lambda it, a: it.write_ragged(0, [1, 2, 3][: len(a)], a, ROW, ROW)),
    (PAGED, "fork_batch from", lambda it, a: it.fork_batch(a, range(11, 11 + len(a)))),
    (PAGED, "fork_batch to", lambda it, a: it.fork_batch([1] * len(a), a)),
    (PAGED, "free_batch", lambda it, a: it.free_batch(a)),
    (PAGED, "block_table", lambda it, a: it.block_table(a)),
    (PAGED, "write_batch ids", lambda it, a: it.write_batch(0, a, np.ones((len(a), 1, 8)), np.ones((len(a), 1, 8)))),
    (PAGED, "attention ids", lambda it, a: it.attention(0, np.ones((len(a), 1, 8)), a)),
    (PAGED, "query_lens", lambda it, a: it.attention(0, Q, [1] * len(a), query_lens=a)),
    (PAGED, "query_lens of more", lambda it, a: it.attention(0, np.ones((4, 1, 8)), [1] * len(a), query_lens=a)),
    (PAGED, "context_lens", lambda it, a: it.attention(0, np.ones((len(a), 1, 8)), [1] * len(a), context_lens=a)),
    (PAGED, "firsts", lambda it, a: it.attention(0, np.ones((len(a), 1, 8)), [1], query_lens=[len(a)], firsts=a)),
    (PAGED, "mask", lambda it, a: it.attention(0, np.ones((len(a), 1, 8)), [1], query_lens=[len(a)], mask=a)),
    (PAGED, "starts", lambda it, a: it.attention(0, np.ones((len(a), 1, 8)), [1] * len(a), starts=a, window=2)),
    (PAGED, "all lens", lambda it, a: it.attention(0, Q, [1] * len(a), query_lens=a, context_lens=a,
                                                   return_scores=True, return_lse=True)),
    ([indexed], "choose_tokens lens", lambda it, a: it.choose_tokens(
        1, np.ones((4, 1, 8)), np.ones((4, 1)), [1] * len(a), 3, query_lens=a
    )),
    ([indexed], "tokens of attention", lambda it, a: it.attention(0, LATENT, [1], tokens=[[a]])),
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
    ([nothing], "rows of a matrix", lambda _, a: Matrix(32, 64, "f32")[a]),
    ([nothing], "rows of matrices", lambda _, a: MatrixStack([Matrix(32, 64, "f32"), Matrix(9, 64, "q8_0")])[a]),
]
