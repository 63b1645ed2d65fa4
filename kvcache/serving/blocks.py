"""The blocks of all texts: sequences that run, and prefixes that are cached.

    free       no reference
    claimed    a sequence refers to them, and perhaps the prefix index too
    cached     the index alone refers to them: evicted, the least recently used first, where a sequence needs them

Free, claimed and cached blocks together are all blocks. Full blocks enter the index as they fill, so that texts share
with texts that are still running. A text that loses its sequence finds its blocks again, as far as they have stayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kvcache.core.memory import total
from kvcache.engine.newest import NewestGroups
from kvcache.errors import OutOfMemoryError
from kvcache.networks.protocols import Float32
from kvcache.paged.cache import PagedKvCache
from kvcache.prefix.cache_session import CacheSession
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.serving.guesses import MOST as MOST_GUESSES
from kvcache.serving.tiered import TieredWorks
from kvcache.serving.windows import WindowPools, has_room
from kvcache.serving.work import Tokens, Work

__all__ = ["SharedBlocks"]


class SharedBlocks:
    """A paged cache, and the prefix index over its blocks.

    Attributes:
        cache: the sequences, in the layers that keep all tokens.
        prefixes: the index.
        newest: the first tokens of cached texts, unpacked; None: no text has such tokens.
        windows: the layers that keep a window alone, and the cached windows of prefixes.
        tiered: the lookups of works in tiers; None: there are no tiers.
        chunk: of the works, as of `Work`.
    """

    chunk = 0

    def __init__(
        self, cache: PagedKvCache, newest: NewestGroups | None = None, windows: WindowPools | None = None
    ) -> None:
        self.cache, self.prefixes, self.newest = cache, PrefixCache.over(cache), newest
        self.windows = WindowPools() if windows is None else windows
        self.tiered: TieredWorks | None = None
        self._ids = count()
        self._bytes = cache.total_memory_bytes

    @property
    def keeps_unpacked(self) -> bool:
        """Whether tokens of a text that runs stay unpacked."""
        return self.cache.residual_length > 0 or self.cache.first_tokens > 0

    @property
    def beside(self) -> list[PrefixCache]:
        """The caches that are saved in one file with the index."""
        if self.newest is not None:
            return [self.newest.cache]
        return self.windows.cached.caches

    def blocks_for(self, num_tokens: int) -> int:
        """The blocks of so many tokens."""
        return -(-num_tokens // self.cache.block_size)

    def cached(self, work: Work) -> int:
        """How many tokens of a work that waits are cached."""
        if not work.shares:
            return 0
        return self.windows.cached.longest(work.tokens, self.prefixes.peek(work.tokens, work.space), work.space)

    def start(self, work: Work, running: Sequence[Work]) -> bool:
        """Give a work a sequence of its longest cached prefix, if there is room for all its tokens; whether there is.

        Args:
            running: the works that have one; for each, a block must be left.

        Raises:
            MemoryError: of the system; nothing has changed.
        """
        if self.tiered is not None:
            self.tiered.begin(work)
        size, tokens = self.cache.block_size, work.tokens if work.shares else work.tokens[:0]
        if self._start(work, tokens, running) or running:
            return work.seq_id >= 0
        # Alone it has room for all its tokens, but not beside what is held and not used: then less is shared.
        whole = min(self.cached(work), work.num_tokens - 1) // size * size
        return self._start(work, tokens[:whole], running) or self._start(work, tokens[:0], running)

    def _start(self, work: Work, tokens: Tokens, running: Sequence[Work]) -> bool:
        """`start` where these first tokens may be shared."""
        size = self.cache.block_size
        with self.prefixes.open_session(tokens, work.space) as session:  # holds what is found
            if self.tiered is not None:
                self.tiered.arrived(work, session.num_tokens)
            most, firsts = self._recall(work, min(session.num_tokens, work.num_tokens - 1))
            begun = self._adopt(work, running, session, most, firsts)
        if begun is None:
            return False
        seq_id, found = begun
        parted = most // size * size  # two texts part here, and the window has left: it is kept for the next such text
        work.window_ends = [parted] if found < parted else []
        work.moved(seq_id, found)
        return True

    def _recall(self, work: Work, found: int) -> tuple[int, list[tuple[Float32, Float32]]]:
        """Behind how many of `found` cached tokens a work can continue, and its first ones, which all read unpacked."""
        found -= found % (self.cache.residual_length or 1)
        if self.newest is None or not found:
            return found, []
        firsts = self.newest.recall_firsts(work.tokens, work.space) if found >= self.cache.first_tokens else []
        return found if firsts else 0, firsts

    def _adopt(
        self, work: Work, running: Sequence[Work], session: CacheSession, most: int,
        firsts: list[tuple[Float32, Float32]],
    ) -> tuple[int, int] | None:  # fmt: skip
        """A new sequence with at most `most` cached tokens of a work, and how many; None: there is no room for it."""
        with self.windows.hold(work, most) as (found, pages):
            size, texts = self.cache.block_size, len(running)
            tokens = sum([each.num_tokens for each in running])  # each with guesses, a block that it began, and a copy
            claimed = len(session.shared_blocks) + (tokens + texts * (MOST_GUESSES + size - 1)) // size + texts
            needed = self.blocks_for(work.num_tokens) - found // size + texts
            if not has_room(self.cache, self.prefixes, needed, claimed):
                return None
            if not self.windows.have_room(work.num_tokens, found, pages, len(running)):
                return None
            seq_id = next(self._ids)
            self.cache.adopt(seq_id, session.shared_blocks[: self.blocks_for(found)], found)
            try:
                if firsts:
                    self.cache.unpack(seq_id, (), firsts)
                self.windows.start(work, seq_id, found, pages)
            except Exception:
                self._free(seq_id)
                raise
        return seq_id, found

    def _free(self, seq_id: int) -> None:
        self.cache.free(seq_id)
        self.windows.free(seq_id)

    def fork(self, leader: Work, follower: Work, computed: int) -> None:
        """Give a follower a sequence with the tokens of the leader's, whose pass has `computed` of them."""
        seq_id = next(self._ids)
        self.cache.fork(leader.seq_id, seq_id)
        try:
            self._pack(seq_id, computed)
            self.windows.fork(leader, follower, seq_id)
        except MemoryError:
            self._free(seq_id)
            raise
        follower.moved(seq_id, computed)

    def append(self, pieces: Sequence[tuple[Work, int]]) -> None:
        """Make room for the next tokens of many works, all or nothing; evicts what no sequence refers to.

        Raises:
            OutOfMemoryError: there are too few blocks, even so.
        """
        ids = np.array([work.seq_id for work, _ in pieces], np.uint64)
        counts = np.array([count for _, count in pieces])
        for work, _ in pieces:
            self.windows.slide(work)
        _append(self.cache, self.prefixes, ids, counts)
        try:
            for group, cached in zip(self.windows.groups, self.windows.cached.caches, strict=True):
                _append(group.cache, cached, ids, counts)
        except Exception:
            for work, _ in pieces:
                self._truncate(work)
            raise

    def lengthen(self, work: Work, count: int, more: int) -> bool:
        """Make room for `more` tokens behind the next `count`, which have room; whether there is."""
        self._truncate(work)  # a residual keeps what queries read from the group on in which the last append began
        try:
            self.append([(work, count + more)])
        except OutOfMemoryError:
            self.append([(work, count)])
            return False
        return True

    def _truncate(self, work: Work) -> None:
        self.cache.truncate(work.seq_id, work.computed)
        self.windows.truncate(work)

    def _pack(self, seq_id: int, computed: int) -> None:
        """Free the unpacked rows of groups before the one in which a sequence ends."""
        if length := self.cache.residual_length:
            self.cache.pack(seq_id, computed - computed % length)

    def _keep_firsts(self, work: Work) -> None:
        if self.newest is not None and work.shares:
            with suppress(MemoryError):  # of the system: they are not cached then
                self.newest.keep_firsts(work.seq_id, work.tokens[: work.computed], work.space)

    def index(self, work: Work) -> None:
        """Cache the full blocks of a work's sequence, by reference, and its first tokens."""
        self._keep_firsts(work)
        full = work.computed // self.cache.block_size
        if full and work.shares:
            blocks = self.cache.block_table([work.seq_id]).block_ids
            with suppress(MemoryError):  # of the system: the blocks are not cached then
                self.prefixes.adopt(work.tokens[: full * self.cache.block_size], blocks[:full], work.space)

    def stop(self, work: Work) -> None:
        """Take a work's sequence away; its full blocks stay cached until their memory is needed."""
        if work.seq_id >= 0:
            seq_id = work.seq_id
            self.windows.keep(work, work.computed)
            work.moved(-1, 0)
            self._free(seq_id)

    def ran(self, work: Work, count: int, wrong: int) -> None:
        """Note that the next `count` tokens of a work have run, and `wrong` guesses behind them."""
        before, computed = work.computed, work.computed + count
        work.moved(work.seq_id, computed)
        if wrong:
            self._truncate(work)
        if before < self.cache.first_tokens <= computed:
            self._keep_firsts(work)
        if (length := self.cache.residual_length) and before // length < computed // length:
            self._pack(work.seq_id, computed)
        if self.windows.groups:
            for end in (*work.window_ends, work.num_prompt):
                if before < end <= computed:
                    self.windows.keep(work, end)

    def mend(self, running: Sequence[Work]) -> list[Work]:
        """Free sequences that no work has, and cut others to what was computed; the works that have no sequence."""
        for cache in [self.prefixes, *self.beside]:
            cache.close_sessions()  # a call that an error ended may not have
        lost = [work for work in running if self.windows.lost(work) or not self._cut(work)]
        for work in lost:
            work.moved(-1, 0)
        owned = {work.seq_id for work in running}
        for each in self.cache.sequence_ids():
            if int(each) not in owned:
                self.cache.free(each)
        self.windows.settle([work for work in running if work not in lost])
        return lost

    def _cut(self, work: Work) -> bool:
        """Cut a work's sequence to what was computed; whether all that its next tokens read is there."""
        if work.seq_id < 0 or work.seq_id not in self.cache:
            return False
        self.cache.truncate(work.seq_id, work.computed)
        if not self.keeps_unpacked:
            return True
        self._pack(work.seq_id, work.computed)
        return self._is_unpacked(work)

    def _is_unpacked(self, work: Work) -> bool:
        """Whether a work has the rows of its first tokens, and of its group those that were computed."""
        (firsts, base, _), length = self.cache.unpacked_tokens(work.seq_id), self.cache.residual_length
        whole = firsts == self.cache.first_tokens or not base
        return whole and (not length or base <= work.computed // length * length)

    def memory(self) -> dict[str, int]:
        """Bytes of K and V, "kv", of "bookkeeping" and of "scratch"."""
        newest = {} if self.newest is None else self.newest.memory()
        return total(self.cache.memory(), self.prefixes.memory(), self.windows.memory(), newest)

    def count(self) -> dict[str, int]:
        """How many blocks are "free", "claimed" and "cached"."""
        free, idle = self.prefixes.num_free_and_idle()
        return {"free": free, "claimed": self.cache.total_blocks - free - idle, "cached": idle}

    def total_and_free(self) -> tuple[int, int]:
        """How many blocks there are, and how many of them are free."""
        count = self.count()
        return sum(count.values()), count["free"]

    def check(self, running: Sequence[Work]) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        self.cache.check()
        self.prefixes.check()
        if self.newest is not None:
            self.newest.check()
        self.windows.check(running)
        assert self.prefixes.pinned_blocks == 0, "blocks of a prefix are held that no work uses"
        owned = {work.seq_id: work for work in running}
        assert sorted(owned) == [int(each) for each in self.cache.sequence_ids()], "sequences and works differ"
        claimed: set[int] = set()
        for seq_id, work in owned.items():
            info = self.cache.get_sequence(seq_id)
            assert info is not None, f"{work}: the sequence is gone"
            assert info.num_tokens == work.computed, f"{work}: the sequence has {info.num_tokens} tokens"
            assert not self.keeps_unpacked or self._is_unpacked(work), f"{work}: tokens that it reads are packed"
            claimed.update(int(block) for block in info.block_ids)
        assert self.cache.total_memory_bytes == self._bytes, "unpacked tokens took more memory than was reserved"
        assert self.count()["claimed"] == len(claimed), "free, claimed and cached blocks are not all blocks"


def _append(cache: PagedKvCache, prefixes: PrefixCache, ids: NDArray[np.uint64], counts: NDArray[np.int64]) -> None:
    """Append to many sequences, and evict what no sequence refers to as far as that needs it."""
    while True:
        try:
            cache.append_batch(ids, counts)
            return
        except OutOfMemoryError as error:
            evicted = prefixes.evict(error.requested - error.available)
            if not evicted and cache.free_block_count <= error.available:  # nor did another thread free any
                raise
