"""`CachedBlocks`: which blocks a `PrefixCache` names, how many it may name, and the `Source` outside of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvcache.errors import InvalidOperationError
from kvcache.paged.blocks import PagedBlocks
from kvcache.prefix.block_rows import Dims, write_blocks
from kvcache.prefix.cache_session import CacheSession
from kvcache.prefix.index.page_reader import PageReader
from kvcache.prefix.index.prefix_index import PrefixIndex
from kvcache.prefix.index.slots import Claim, Slots
from kvcache.support.huge_pages import huge_bytes
from kvcache.trie.policy import Policy
from kvcache.trie.trie import TokenTrie

__all__ = ["CachedBlocks", "Evicted", "Source", "fetch_offered"]

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Tokens = npt.NDArray[np.uint32]


class Evicted(NamedTuple):
    """Blocks that were evicted from the end of a text."""

    namespace: Hashable
    tokens: Tokens  # of the text, up to the end of the last block
    num_tokens: int  # of the evicted blocks, the last of the text


class Source(PageReader, Protocol):
    """A store outside of the cache: it is asked for the pages that the cache lacks, and receives those evicted."""

    def attach(self, cached: CachedBlocks) -> None:
        """The cache whose source it is from now on; the other calls follow, with the lock of the cache held."""

    def offers(self, name: Hashable, tokens: Tokens, start: int) -> int:
        """How many pages of `tokens` it has, from page `start` on, for every group that needs them."""

    def expect(self, name: Hashable, tokens: Tokens, start: int, pages: Int32) -> None:
        """Note that `pages` are for what was offered of `tokens`, from page `start` on; `fetch` of them follows."""

    def spill(self, name: Hashable, tokens: Tokens, pages: Int32) -> None:
        """`tokens` end with `pages`, whose slots are free after this call."""


def fetch_offered(
    index: PrefixIndex, source: Source, slots: Slots, tokens: Tokens, name: Hashable, make_room: Callable[[int], int]
) -> None:
    """Fetch the pages of `tokens` that `source` has and the index lacks, and name them.

    Args:
        make_room: `make_room(count)` evicts until up to `count` more pages fit, and returns how many do.
    """
    size, head = slots.page_size, index.head(tokens, name)
    start = 0 if head is None else len(head)
    wanted = len(tokens) // size - start
    if wanted > 0 and (count := make_room(min(wanted, source.offers(name, tokens, start)))) > 0:
        claim = slots.take(count)
        source.expect(name, tokens, start, claim.pages)
        good = np.isin(claim.pages, source.fetch(claim.pages))
        claim.cut(count if good.all() else int(good.argmin()))
        if len(claim):
            index.insert(tokens[: (start + len(claim)) * size], claim, name, head)


class CachedBlocks:
    """An index over the blocks of a store. Every method is called with `lock` held.

    Args:
        blocks: the store, the pool and the lock.
        dims: channels per head of K and of V; the store may have more.
        max_blocks: the most that the index may name; None: all that there are.
        policy: the order of eviction.
        shared: whether they are the blocks of a `PagedKvCache`.

    Attributes:
        source: a `Source` beside the cache; None: no source.
        evicted: a queue of what was evicted, which its reader empties; None: nobody reads it.
        exact: whether all K and V have the bits of this version. A file of before ends that for good, for texts go on
            from its blocks; nothing is offered to a source from then on.
    """

    def __init__(
        self, blocks: PagedBlocks, dims: Dims, max_blocks: int | None, policy: Policy | None, *, shared: bool = False
    ) -> None:
        self.store, self.pool, self.lock, self.formats = blocks.store, blocks.pool, blocks.lock, blocks.formats
        self.dims, self._blocks, self._limit, self._shared = dims, blocks, max_blocks, shared
        self.slots = Slots([self.pool], self.store.block_size, lock=self.lock)
        self.index = PrefixIndex(TokenTrie(self.store.block_size, policy), self.slots, self.max_blocks)
        self.source: Source | None = None
        self.evicted: deque[Evicted] | None = None
        self.exact = True
        blocks.reserves.append(self.slots.reserve)  # first: what counts must have records of all blocks
        if shared:
            blocks.idle.append(self.num_idle)
        blocks.holders.append(partial(self.slots.counts, references=True))

    @property
    def max_blocks(self) -> int:
        """The most blocks that the index may name now: a pool may grow."""
        return self.pool.num_blocks if self._limit is None else min(self._limit, self.pool.num_blocks)

    def attach(self, source: Source | None) -> None:
        """Make `source` the store that the cache reads from and writes to."""
        with self.lock:
            if source is not None:
                source.attach(self)
            self.source = source

    def fetch(self, ids: Tokens, name: Hashable) -> None:
        """Load the blocks of `ids` that a file or the source has, if they are good and there is room."""
        self.index.fetch_waiting(ids, name)
        if self.source is not None:
            fetch_offered(self.index, self.source, self.slots, ids, name, partial(self.make_room, new=True))

    def head(self, ids: Tokens, name: Hashable) -> tuple[Claim | None, int]:
        """A claim on the blocks of `ids` that are cached, so that making room does not evict them; and how many."""
        self.fetch(ids, name)
        head = self.index.head(ids, name)
        return head, 0 if head is None else len(head)

    # -- sessions -------------------------------------------------------------------------------------------

    def open_session(self, ids: Tokens, name: Hashable) -> CacheSession:
        """See `PrefixCache.open_session`."""
        self.fetch(ids, name)
        claim = self.index.claim(ids, name)
        matched = claim.num_held * self.store.block_size
        return CacheSession(matched, None, claim.tail, claim.tail_tokens, claim, self.close_session)

    def open_again(self, ids: Tokens, name: Hashable) -> CacheSession:
        """See `PrefixCache.open_again`."""
        claim, count = self.head(ids, name)
        found = [] if claim is None else claim.pages.tolist()
        return CacheSession(count * self.store.block_size, found, claim=claim, close=self.close_session)

    def close_session(self, session: CacheSession) -> None:
        """See `PrefixCache.close_session`; called without the lock."""
        if session.claim is not None and session.claim.slots is self.slots:
            self.lock.hand_over(session.claim.release)

    # -- insert ---------------------------------------------------------------------------------------------

    def store_rows(
        self, ids: Tokens, first: int, keys: list[Float32], values: list[Float32], name: Hashable
    ) -> int:
        """Cache the blocks of `ids` from block `first` on, with rows of `checked_rows`; how many of them are cached."""
        size = self.store.block_size
        head, existing = self.head(ids, name)
        if existing < first:
            raise InvalidOperationError(f"expected {first} blocks before this one in the cache, got {existing}")
        room = self.make_room(len(ids) // size - existing, new=True)
        if room:
            claim = self.slots.take(room)
            write_blocks(self.store, claim.pages, keys, values, (existing - first) * size)
            self.index.insert(ids[: (existing + room) * size], claim, name, head)
        return existing + room - first

    def as_adoptable(self, block_ids: npt.ArrayLike, num_tokens: int) -> Int32:
        """The ids of the full blocks of `num_tokens` tokens; raises as `PrefixCache.adopt`. Called without the lock."""
        full = num_tokens // self.store.block_size
        blocks = self._blocks.as_ids(block_ids)[:full]
        if not self._shared:
            raise InvalidOperationError("expected a cache over the blocks of a PagedKvCache")
        if len(blocks) < full:
            raise ValueError(f"block_ids: expected {full} for {num_tokens} tokens, got {len(blocks)}")
        return blocks

    def adopt(self, ids: Tokens, blocks: Int32, name: Hashable) -> int:
        """Cache the blocks of `ids`, which are in use in the pool, by reference; how many of them are cached."""
        known = self.pool.in_use(blocks)
        self.pool.expect_each_once(known)
        head, existing = self.head(ids, name)
        elsewhere = self.slots.records(known)["named"] != 0
        if head is not None:
            elsewhere[:existing] &= head.pages != known[:existing]
        if elsewhere.any():
            block = known[elsewhere.argmax()]
            raise InvalidOperationError(f"expected blocks that no other text is cached in, got block {block}")
        room = self.make_room(len(known) - existing, new=False)
        if room:
            claim = self.slots.share(known[existing : existing + room])
            self.index.insert(ids[: (existing + room) * self.store.block_size], claim, name, head)
        return existing + room

    # -- room -----------------------------------------------------------------------------------------------

    def make_room(self, count: int, new: bool) -> int:
        """Evict until `count` more blocks fit; how many do. New ones must also be free in the pool."""
        while (room := self.room(count, new)) < count and self.evict(count - room):
            pass
        return room

    def room(self, count: int, new: bool) -> int:
        """How many of `count` more blocks fit as it is."""
        spare = max(0, min(count, self.max_blocks - len(self.index)))
        return self.slots.room(spare) if new else spare

    def evict(self, count: int) -> int:
        """Evict up to `count` blocks from the tail of the next victim; how many."""
        waiting = self.slots.num_waiting
        evicted = self.index.evict(count)
        if evicted is None:
            return 0
        # Blocks that wait for a file have no content yet.
        if self.source is not None and self.exact and self.slots.num_waiting == waiting:
            self.source.spill(evicted.name, evicted.tokens, evicted.pages)
        if self.evicted is not None:
            size = self.store.block_size
            self.evicted.append(Evicted(evicted.name, evicted.tokens, len(evicted) * size))
        evicted.release()
        return len(evicted)

    # A function: from Python 3.12 on, Ctrl-C at the jump back of a loop with a condition skips handlers of the same
    # function, such as the end of a `with`.
    def free(self, count: int) -> int:
        """Evict until `count` more blocks are free in the pool, or nothing can go; how many became free."""
        self.slots.release_dropped()
        before = self.pool.num_free
        while (wanted := before + count - self.pool.num_free) > 0 and self.evict(wanted):
            pass
        return self.pool.num_free - before

    # -- reports --------------------------------------------------------------------------------------------

    def num_pinned(self) -> int:
        """Blocks that sessions and lookups hold."""
        self.slots.release_dropped()
        return int(np.count_nonzero(self.slots.counts()))

    def num_idle(self) -> int:
        """Cached blocks to which nothing else refers."""
        self.slots.release_dropped()
        named = self.slots.records()["named"] != 0
        return int(np.count_nonzero(named & (self.pool.ref_counts() == 1)))

    def memory(self) -> dict[str, int]:
        """See `PrefixCache.memory`."""
        kv, records = (0, 0) if self._shared else (self.store.nbytes, self.pool.nbytes + self.store.bookkeeping)
        huge = 0 if self._shared else huge_bytes([self.store.span])
        return {"kv": kv, "bookkeeping": self.index.nbytes + records, "scratch": 0, "huge": huge}

    def check(self) -> None:
        """Verify every invariant; AssertionError names the broken one."""
        self.index.check()
        assert len(self.index) <= self.max_blocks, "prefix cache: more blocks than allowed"
        self._blocks.check()
