"""`PrefixCache`, `PrefixAwarePrefill` and `CacheSession`: the documented cases, and a machine against prefixes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcache.errors import BlockNotFoundError, InvalidOperationError, OutOfMemoryError
from kvcache.paged.cache import PagedKvCache
from kvcache.prefix.cache_block import CacheBlock
from kvcache.prefix.cache_session import CacheSession
from kvcache.prefix.prefill import PrefixAwarePrefill
from kvcache.prefix.prefix_cache import PrefixCache

Pair = tuple[list[Any], list[Any]]
EIGHT = list(range(1, 9))
A, B, C = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]


def pair(value: float = 1.0, num_layers: int = 2, heads: int = 2, dim: int = 8, size: int = 4) -> Pair:
    """The documented helper: keys = v, values = v + 1."""
    rows = np.full(heads * dim * size, value, np.float32)
    return [rows] * num_layers, [rows + 1] * num_layers


def small(max_blocks: int = 8) -> PrefixCache:
    return PrefixCache(max_blocks, 4, 2, 2, 8)


def found(cache: PrefixCache, tokens: Any, **kw: Any) -> int:
    """The number of blocks that a lookup matches; it releases them."""
    matched, blocks = cache.lookup(tokens, **kw)
    for block in blocks:
        cache.release(block.index)
    cache.check()
    assert matched == 4 * len(blocks)
    return len(blocks)


# ---------------------------------------------------------------------- the documented cases


def test_case_1_a_new_block() -> None:
    block = CacheBlock(2, 4, 8, 4)
    assert block.memory_bytes == 2048
    assert (block.token_ids, block.last_used, block.ref_count) == ([], 0, 0)
    assert [len(rows) for rows in (*block.keys, *block.values)] == [128] * 4
    assert not np.any(block.keys[1])


def test_blocks_of_a_lookup_are_released_at_the_end_of_with() -> None:
    cache = small()
    cache.store(EIGHT, 0, [pair(), pair()])
    lookup = cache.lookup(EIGHT)
    with lookup as blocks:
        assert (lookup.matched_len, len(blocks), cache.pinned_blocks) == (8, 2, 2)
    assert cache.pinned_blocks == 0
    cache.lookup(A)
    with lookup:  # released already: what the other lookup holds stays held
        pass
    assert cache.pinned_blocks == 1
    with cache.lookup(B) as none:
        assert none == []


def test_case_2_and_4_insert_and_lookup() -> None:
    cache = small()
    assert cache.insert(EIGHT, 0, *pair()) == 0
    matched, blocks = cache.lookup(EIGHT)
    assert (matched, len(blocks), cache.hits) == (4, 1, 1)
    assert (blocks[0].token_ids, blocks[0].ref_count) == (A, 1)
    assert blocks[0].values[1].tolist() == [2.0] * 64
    assert found(cache, [1, 2, 3, 4, 9, 10, 11, 12]) == 1


def test_case_3_an_empty_cache() -> None:
    cache = small()
    assert cache.lookup([10, 20, 30, 40]) == (0, [])
    assert cache.misses == 1
    assert cache.lookup([10, 20]) == (0, [])
    assert (cache.hits, cache.misses) == (0, 1)


def test_case_5_the_least_recently_used_leaves() -> None:
    cache = small(2)
    cache.insert(A, 0, *pair())
    cache.insert(B, 0, *pair())
    cache.lookup(B)
    cache.insert(C, 0, *pair())
    assert (len(cache), cache.evictions, found(cache, A)) == (2, 1, 0)


def test_case_6_a_held_block_is_not_evicted() -> None:
    cache = small(1)
    cache.insert(A, 0, *pair())
    _, (block,) = cache.lookup(A)
    with pytest.raises(OutOfMemoryError):
        cache.insert(B, 0, *pair())
    assert (cache.evictions, len(cache)) == (0, 1)
    cache.release(block.index)
    now = cache.get_block(block.index)
    assert now is not None
    assert now.ref_count == 0
    with pytest.raises(InvalidOperationError):
        cache.release(block.index)


def test_case_7_and_8_hit_rate_and_clear() -> None:
    cache = small()
    cache.insert(A, 0, *pair())
    cache.lookup(A)
    cache.lookup([99, 100, 101, 102])
    assert cache.hit_rate == pytest.approx(0.5, abs=1e-5)
    cache.clear()
    assert cache.is_empty
    assert cache.lookup(A) == (0, [])
    assert (len(cache), cache.hits, cache.misses) == (0, 1, 2)


def test_case_9_sessions_by_hand() -> None:
    assert CacheSession(8, [0, 1]).cached_tokens(4) == 8
    assert not CacheSession(8, [0, 1]).is_empty
    assert CacheSession(0, []).is_empty
    assert CacheSession(0, []).cached_tokens(4) == 0


def test_case_10_and_11_prepare() -> None:
    prefill = PrefixAwarePrefill(small())
    prefill.cache.insert(EIGHT, 0, *pair())
    session, start = prefill.prepare(EIGHT)
    assert (session.matched_prefix_len, start, session.block_indices) == (4, 4, [0])
    prefill.release_session(session)
    prefill.release_session(session)
    stats = prefill.stats()
    assert (stats.total_hits, stats.total_misses, stats.capacity_blocks, stats.cached_blocks) == (1, 1, 8, 1)
    prefill.cache.check()


def test_case_12_capacity() -> None:
    cache = small(4)
    for i in range(6):
        cache.insert([i, i, i, i], 0, *pair())
        assert len(cache) <= 4
    assert cache.evictions == 2


def test_the_documented_example() -> None:
    prefill = PrefixAwarePrefill(PrefixCache(8, 4, 1, 1, 2))
    tokens = list(range(8))
    session, start = prefill.prepare(tokens)
    assert start == 0
    rows = [np.arange(8, dtype=np.float32) + 10 * i for i in range(2)]
    assert prefill.store_blocks(tokens, 0, [([r], [-r]) for r in rows]) == 2
    prefill.release_session(session)
    assert prefill.prepare(tokens)[1] == 8
    _, blocks = prefill.cache.lookup(tokens)
    assert blocks[1].keys[0].tolist() == rows[1].tolist()
    assert blocks[0].values[0].tolist() == (-rows[0]).tolist()


@pytest.mark.parametrize("start", [0, 4])
def test_a_block_comes_back_bit_for_bit(start: int) -> None:
    """Per layer 32 floats, laid out [head][position][dim]: what a paged cache reads at those positions."""
    paged = PagedKvCache(2, 4, 2, 8, num_layers=2, dtype="f32")
    cache = PrefixCache.over(paged)
    rows = np.random.default_rng(0).standard_normal((2, 4, 2, 8)).astype(np.float32)
    paged.allocate(1, 8)
    paged.write(1, 1, *rows, start=start)
    info = paged.get_sequence(1)
    assert info is not None
    cache.adopt(range(8), info.block_ids)
    block = cache.get_block(start // 4)
    assert block is not None
    for got, want in ((block.keys[1], rows[0]), (block.values[1], rows[1])):
        assert got.size == 64
        for head in range(2):
            np.testing.assert_array_equal(got.reshape(2, 4, 8)[head], want[:, head])
    assert not np.any(block.keys[0])
    other = cache.get_block(1 - start // 4)
    assert other is not None
    assert not np.any(other.keys[1])


@pytest.mark.parametrize("dim", [8, 32, 40])
@pytest.mark.parametrize("formats", ["f16 f16", "q8 q8", "q4 q4", "q3 q3", "q2 q2", "f32 q4", "q8 q2"])
def test_blocks_in_every_format(formats: str, dim: int) -> None:
    """A block that was cached reads as one that was written to a paged cache of the same formats, and costs as much."""
    (key, value), heads, size = formats.split(), 2, 16
    cache = PrefixCache(4, size, 2, heads, dim, key_dtype=key, value_dtype=value)
    paged = PagedKvCache(4, size, heads, dim, num_layers=2, key_dtype=key, value_dtype=value)
    rng = np.random.default_rng(0)
    tokens = list(range(3 * size))
    paged.allocate(0, len(tokens))
    rows = rng.standard_normal((2, 2, len(tokens), heads, dim)).astype(np.float32)
    for layer in range(2):
        paged.write(layer, 0, rows[0, layer], rows[1, layer])
    spans = [slice(i, i + size) for i in range(0, len(tokens), size)]
    pairs = [tuple([rows[s, i, at].swapaxes(0, 1).reshape(-1) for i in range(2)] for s in range(2)) for at in spans]
    assert cache.store(tokens, 0, pairs) == 3
    assert cache.memory_bytes == 3 * paged.block_memory_bytes
    _, blocks = cache.lookup(tokens)
    for block, at in zip(blocks, spans, strict=True):
        for layer in range(2):
            want = paged.read(layer, 0, at.start, at.stop)
            for got, side in ((block.keys, want[0]), (block.values, want[1])):
                np.testing.assert_array_equal(got[layer].reshape(heads, size, dim).swapaxes(0, 1), side)
    cache.check()
    with pytest.raises(ValueError, match="hold"):
        cache.insert([9] * size, 0, pairs[0][0], [np.full(heads * size * dim, 1e6, np.float32)] * 2)
    assert len(cache) == 3


def test_a_cache_without_room() -> None:
    cache = small(0)
    with pytest.raises(OutOfMemoryError):
        cache.insert(A, 0, *pair())
    assert (len(cache), cache.capacity, cache.hit_rate, cache.evictions) == (0, 0, 0.0, 0)
    cache.check()


def test_indices_are_used_again() -> None:
    cache = small(2)
    assert [cache.insert(t, 0, *pair()) for t in (A, B, C)] == [0, 1, 0]


def test_exact_numbers_of_two_calls() -> None:
    cache = PrefixCache(64, 16, 1, 2, 32)
    prefill, prompt = PrefixAwarePrefill(cache), list(range(32))
    session, start = prefill.prepare(prompt)
    prefill.store_blocks(prompt, start, [pair(1.0, 1, 2, 32, 16)] * 2)
    prefill.release_session(session)
    stats = prefill.stats()
    assert (stats.total_misses, stats.cached_blocks, stats.memory_bytes) == (1, 2, 16384)
    assert prefill.prepare(prompt)[1] == 32
    assert prefill.stats().hit_rate == 1 / 2  # 32 of 64 tokens


# ---------------------------------------------------------------------- what it does better


def test_a_prompt_longer_than_the_cache_keeps_its_head() -> None:
    prefill, prompt = PrefixAwarePrefill(small(4)), list(range(24))
    starts = []
    for _ in range(3):
        session, start = prefill.prepare(prompt)
        prefill.store_blocks(prompt, start, [pair()] * ((24 - start) // 4))
        prefill.release_session(session)
        starts.append(start)
    assert starts == [0, 16, 16]
    assert prefill.stats().total_evictions == 0


def test_a_foreign_block_costs_a_chain_its_tail_only() -> None:
    cache = small(4)
    cache.store(list(range(16)), 0, [pair()] * 4)
    cache.insert(C, 0, *pair())
    assert found(cache, list(range(16))) == 3


def test_a_dropped_session_lets_go() -> None:
    cache = small(2)
    cache.store(EIGHT, 0, [pair()] * 2)
    session = cache.open_session(EIGHT)
    with pytest.raises(OutOfMemoryError):
        cache.insert(C, 0, *pair())
    del session
    cache.insert(C, 0, *pair())
    cache.check()
    assert len(cache) == 2


def test_sessions_outlive_clear() -> None:
    cache = small(2)
    cache.store(EIGHT, 0, [pair(3.0)] * 2)
    session = cache.open_session(EIGHT)
    cache.clear()
    block = cache.get_block(session.block_indices[1])
    assert block is not None
    assert block.keys[0][0] == 3.0
    with pytest.raises(OutOfMemoryError):
        cache.insert(C, 0, *pair())
    cache.close_session(session)
    assert cache.insert(C, 0, *pair()) == 0
    with pytest.raises(BlockNotFoundError):
        _ = CacheBlock.keys.fget(_evicted(cache))  # type: ignore[attr-defined]


def _evicted(cache: PrefixCache) -> CacheBlock:
    _, (block,) = cache.lookup(C)
    cache.release(block.index)
    cache.evict(2)
    return block


def test_the_tail_of_a_match_names_a_block_to_copy_from() -> None:
    cache = small()
    cache.store(EIGHT, 0, [pair(1.0), pair(2.0)])
    session = cache.open_session([1, 2, 3, 4, 5, 6, 99])
    assert (session.matched_prefix_len, session.tail_block, session.tail_tokens) == (4, 1, 2)
    assert cache.evict(9) == 0  # the trie does not name the tail block any more; the session still holds it
    cache.check()
    block = cache.get_block(0)
    assert block is not None
    cache.close_session(session)
    assert cache.open_session(A).tail_block == -1


def test_the_hit_rate_counts_tokens_those_of_partly_matched_blocks_too() -> None:
    cache = small()
    assert cache.hit_rate == 0.0
    cache.store(EIGHT, 0, [pair(1.0), pair(2.0)])
    diverging = [*EIGHT[:6], 99, 98, 97]
    with cache.open_session(diverging) as session:  # block 0, and the first 2 tokens of block 1
        assert session.num_tokens == 6
    assert (cache.hits, cache.hit_tokens, cache.lookup_tokens, cache.hit_rate) == (1, 6, 9, 6 / 9)
    assert cache.lookup(diverging)[0] == 4  # full blocks alone
    assert (cache.hits, cache.hit_tokens, cache.lookup_tokens) == (2, 10, 18)
    with cache.open_session(EIGHT[:2]) as session:  # shorter than a block: neither a hit nor a miss
        assert session.num_tokens == 2
    assert (cache.hits, cache.misses, cache.hit_tokens, cache.lookup_tokens) == (2, 2, 12, 20)
    stats = cache.stats()
    assert (stats.hit_rate, stats.hit_tokens, stats.lookup_tokens) == (cache.hit_rate, 12, 20)
    assert cache.hit_rate == 12 / 20
    cache.check()


def test_miss_reasons() -> None:
    cache = small(2)
    cache.insert(A, 0, *pair(), namespace="a")
    for tokens, namespace in ((A, "b"), ([1, 2, 9, 9], "a"), ([7, 7, 7, 7], "a")):
        cache.lookup(tokens, namespace=namespace)
    cache.insert(B, 0, *pair(), namespace="a")
    cache.insert(C, 0, *pair(), namespace="a")
    cache.lookup(A, namespace="a")
    cache.lookup([1, 2], namespace="a")
    assert cache.misses == 4
    assert dict(cache.stats().miss_reasons) == {
        "no_shared_prefix": 1,
        "shorter_than_block": 2,
        "evicted": 1,
        "namespace": 1,
    }
    cache.check()


def test_keys_are_exact_tokens() -> None:
    """The two first blocks whose 32-bit keys collided in the original, with a common second block."""
    cache = small()
    cache.store([137, 12, 7, 7, *A], 0, [pair(1.0), pair(2.0)])
    assert found(cache, [309, 357, 7, 7, *A]) == 0
    cache.insert([309, 357, 7, 7], 0, *pair(3.0))
    assert found(cache, [309, 357, 7, 7, *A]) == 1


def test_bad_input_changes_nothing() -> None:
    cache = small()
    keys, values = pair()
    bad = [np.full(64, np.nan, np.float32)] * 2
    for call, error in [
        (lambda: cache.insert(EIGHT, 2, keys, values), ValueError),
        (lambda: cache.insert(EIGHT, 8, keys, values), ValueError),
        (lambda: cache.insert(EIGHT, -4, keys, values), ValueError),
        (lambda: cache.insert(EIGHT, 0, keys[:1], values), ValueError),
        (lambda: cache.insert(EIGHT, 0, keys, [v[:9] for v in values]), ValueError),
        (lambda: cache.insert(EIGHT, 0, keys, bad), ValueError),
        (lambda: cache.insert(EIGHT, 4, keys, values), InvalidOperationError),
        (lambda: cache.adopt(EIGHT, [0, 1]), InvalidOperationError),
    ]:
        with pytest.raises(error):
            call()
    for pairs, message in (
        (None, "pairs: expected keys and values of each block, got None"), ([(keys,)], "pairs: expected keys and val"),
        ([(keys, None)], "values: expected rows of 2 layers in a block, got None"),
        ([(keys[:1], values)], "keys: expected rows of 2 layers in a block, got 1"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            cache.store(EIGHT, 0, pairs)
    cache.check()
    assert cache.is_empty


def test_the_blocks_of_a_paged_cache_are_shared() -> None:
    paged = PagedKvCache(8, 4, 2, 8, dtype="f32", num_layers=2)
    cache = PrefixCache.over(paged, 6)
    paged.allocate(1, 10)
    rows = np.arange(10 * 16, dtype=np.float32).reshape(10, 2, 8)
    for layer in range(2):
        paged.write(layer, 1, rows + layer, -rows)
    info = paged.get_sequence(1)
    assert info is not None
    assert cache.adopt(range(10), info.block_ids) == 2
    paged.free(1)
    paged.check()
    assert paged.used_block_count == 2
    with cache.open_session([*range(7), 99]) as session:
        assert (session.shared_blocks, session.num_tokens) == ([0, 1], 7)
        assert (cache.block_ids(), cache.pinned_blocks) == ([0, 1], 1)
        paged.adopt(2, session.shared_blocks, session.num_tokens)
        paged.check()
        assert paged.used_block_count == 2
        np.testing.assert_array_equal(paged.read(1, 2)[0], rows[:7] + 1)
        assert cache.evict(2) == 0
        cache.check()
    assert cache.pinned_blocks == 0
    paged.free(2)
    assert cache.evict(2) == 1
    paged.check()
    cache.check()


def test_a_running_sequence_gives_its_full_blocks() -> None:
    paged = PagedKvCache(8, 4, 2, 8, dtype="f32", num_layers=2)
    cache = PrefixCache.over(paged)
    paged.allocate(1, 10)
    info = paged.get_sequence(1)
    assert info is not None
    assert cache.adopt(range(10), info.block_ids) == 2
    assert cache.adopt(range(10), info.block_ids) == 2
    with pytest.raises(BlockNotFoundError):
        cache.adopt(range(4), [7])
    with pytest.raises(ValueError, match="block_ids: expected 2"):
        cache.adopt(range(8), [0])
    paged.free(1)
    assert cache.evict(2) == 2
    paged.check()
    cache.check()


def test_an_error_counts_the_blocks_that_only_prefixes_hold():
    """Every call that lacks blocks counts them; those that a sequence or a session holds too do not count."""
    paged, text = PagedKvCache(6, 4, 1, 8, dtype="f32"), np.arange(16)
    cache = PrefixCache.over(paged)
    paged.allocate(1, 16)
    cache.adopt(text, paged.block_table([1]).indices)
    paged.allocate(2, 8)
    with pytest.raises(OutOfMemoryError, match=r"^out of memory: requested 3 blocks, available 0$"):
        paged.allocate(3, 12)
    paged.free(1)
    with cache.open_session(text[:4]):
        for call in (lambda: paged.allocate(3, 8), lambda: paged.append(2, 8), lambda: paged.allocate_batch([3], [8])):
            with pytest.raises(OutOfMemoryError) as caught:
                call()
            assert (caught.value.requested, caught.value.available, caught.value.idle) == (2, 0, 3)
    assert str(caught.value).endswith("and 3 that a PrefixCache alone holds; its evict(2) frees as many")
    with cache.open_session(text[:4]), pytest.raises(OutOfMemoryError) as caught:
        paged.allocate(3, 20)
    assert str(caught.value).endswith("and 3 that a PrefixCache alone holds; its evict(3) frees these, 2 too few")
    assert cache.evict(2) == 2
    paged.append_batch([2], [8])
    cache.check()


def test_an_error_of_two_prefix_caches_says_that_each_holds_some():
    """One of them frees its own blocks alone, so no number is told that its `evict` would free."""
    paged = PagedKvCache(4, 4, 1, 8, dtype="f32")
    caches = PrefixCache.over(paged), PrefixCache.over(paged)
    for cache in caches:
        paged.allocate(1, 8)
        cache.adopt(np.arange(8), paged.block_table([1]).indices)
        paged.free(1)
    with pytest.raises(OutOfMemoryError) as caught:
        paged.allocate(1, 12)
    assert (caught.value.idle, caught.value.idle_of_each) == (4, (2, 2))
    assert str(caught.value).endswith(", and 4 that 2 PrefixCaches alone hold; evict of each frees its own")
    assert [cache.evict(3) for cache in caches] == [2, 2]
    paged.allocate(1, 12)
