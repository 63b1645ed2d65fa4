"""The reported bytes of the bookkeeping, compared with the allocator of this process."""

import numpy as np
import pytest
from allocator import allocated, middle_growth

from kvcache import PagedKvCache, PrefixCache
from kvcache.trie.trie import TokenTrie

PAGE = 16


# The worst case, a leaf of one page with its own node, exceeds the bound. Three pages per leaf meet it.
@pytest.mark.parametrize("length", [2048, 256, 48])
def test_a_cached_page_costs_less_than_64_bytes_beyond_its_tokens(length, rng):
    pages = 40_960 // (length // PAGE) * (length // PAGE)
    prompts = rng.integers(0, 150_000, (pages * PAGE // length, length), dtype=np.uint32)
    values = np.arange(length // PAGE, dtype=np.int32)

    def measure():
        before = allocated()
        trie = TokenTrie(PAGE)
        root = trie.add_root()
        for prompt in prompts:
            trie.insert(root, prompt, values)
        return allocated() - before, trie

    allocated()
    grown, trie = middle_growth(measure)
    assert len(trie) == pages
    tokens = 4 * trie.num_tokens
    assert trie.nbytes - tokens < 64 * pages
    assert grown - tokens < 64 * pages
    # malloc adds a header and rounds up: up to 32 bytes per node and a page for each large array.
    assert trie.nbytes <= grown + 4096
    assert grown <= trie.nbytes + 32 * trie.num_nodes + 64 * 1024


def test_the_cost_of_a_page_with_its_own_node(rng):
    pages = 40_960
    trie = TokenTrie(PAGE)
    root = trie.add_root()
    for prompt in rng.permutation(pages * PAGE).astype(np.uint32).reshape(pages, PAGE):
        trie.insert(root, prompt, np.zeros(1, np.int32))
    assert trie.num_nodes == pages + 1
    assert trie.nbytes - 4 * trie.num_tokens < 180 * pages


def test_a_million_operations_leave_the_tables_as_they_were():
    cache = PagedKvCache(4_096, PAGE, 1, 8)
    ids = np.arange(64, dtype=np.uint64)
    seen = []
    for turn in range(2_000):
        cache.allocate_batch(ids, 1 + (ids.astype(np.int64) * 37 + turn) % 700)
        for _ in range(4):
            cache.append_batch(ids)
        cache.fork_batch(ids, ids + 64)
        cache.free_batch(np.concatenate([ids, ids + 64]))
        if turn % 500 == 499:
            seen.append((cache._table.nbytes, allocated()))
    assert cache.free_block_count == 4_096
    told, taken = zip(*seen, strict=True)
    assert max(told) <= 1.1 * min(told)
    assert max(taken) <= min(taken) + 64 * 1024
    cache._table.check()


def test_reordered_and_grown_caches_lose_no_memory():
    cache = PagedKvCache(512, PAGE, 1, 8)
    ids, told, taken = np.arange(16, dtype=np.uint64), [], []
    prefixes = PrefixCache.over(cache, 8)
    for turn in range(1_200):
        cache.allocate_batch(ids, 1 + (ids.astype(np.int64) * 37 + turn) % 200)
        cache.apply_streaming_llm(int(turn % 16), 4, 20)
        for step in range(4):
            cache.reorder(ids, (ids.astype(np.int64) * (turn + step) + turn) % 16)
            cache.append_batch(ids, np.full(16, step))
        cache.free_batch(ids)
        cache.grow(0)
        if turn % 300 == 299:
            told.append(cache._table.nbytes)
            taken.append(allocated())
    assert cache.free_block_count == 512
    assert max(told) <= min(told) + 8 * 512 + 4_096  # idle rows keep at most one run per block
    assert max(taken) <= min(taken) + 64 * 1024
    before, said = allocated(), cache.stats().bookkeeping_bytes + prefixes.stats().bookkeeping_bytes
    for _ in range(64):
        cache.grow(1_000)
    more = cache.stats().bookkeeping_bytes + prefixes.stats().bookkeeping_bytes - said
    # Two bytes of each block are in the memory of the K and V.
    assert abs(allocated() - before + 2 * 64_000 - more) < 64 * 1024
    prefixes.check()
    cache.check()


def test_the_prefix_cache_reports_the_bytes_of_its_index(rng):
    blocks, length = 2_048, 256
    prompts = rng.integers(0, 150_000, (2 * blocks * PAGE // length, length), dtype=np.uint32)
    row = [np.zeros(PAGE * 8, np.float32)]

    def measure():
        cache = PrefixCache(blocks, PAGE, 1, 1, 8)
        cache.store(prompts[0], 0, [(row, row)] * (length // PAGE))
        before, told = allocated(), cache.stats().bookkeeping_bytes
        for prompt in prompts[1:]:  # twice as many as fit: the cache remembers the evicted ones
            cache.store(prompt, 0, [(row, row)] * (length // PAGE))
        return allocated() - before, cache.stats().bookkeeping_bytes - told, told, cache

    grown, said, told, cache = middle_growth(measure)
    assert len(cache) == blocks
    assert told > blocks * PAGE * 4
    assert said > 2 * blocks * PAGE * 4 * 0.9  # the tokens of cached and of evicted prompts
    assert said <= grown + 4096
    assert grown <= said + 64 * 2 * blocks * PAGE // length + 64 * 1024


def test_block_tables_report_their_bytes():
    sequences, tokens = 2_000, 16 * PAGE

    def measure():
        cache = PagedKvCache(sequences * tokens // PAGE, PAGE, 1, 8)
        table = cache._table
        before, told = allocated(), table.nbytes
        cache.allocate_batch(np.arange(sequences, dtype=np.uint64), np.full(sequences, tokens))
        return allocated() - before, table.nbytes - told, cache

    allocated()
    grown, said, _ = middle_growth(measure)
    # The count includes the heap of victims, ids, rows and runs, but not the headers of malloc.
    assert said <= grown + 4096
    assert grown <= said + 64 * sequences + 64 * 1024
    assert said < 64 * sequences * tokens // PAGE
