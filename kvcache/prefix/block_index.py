"""`BlockIndex`: which block follows which tokens, who holds it, who leaves next, and why a lookup missed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.core.pool import BlockPool
from kvcache.core.store import BlockStore
from kvcache.errors import InvalidOperationError
from kvcache.prefix.ghosts import GhostTrie
from kvcache.prefix.holds import Holds
from kvcache.prefix.saved import SavedBlocks
from kvcache.prefix.segments import ranges, segments_of, walk_back
from kvcache.prefix.texts import TextCounts
from kvcache.saved.snapshot import Segments, Snapshot
from kvcache.trie.trie import TokenTrie

__all__ = ["BlockIndex", "Match"]

Int32 = npt.NDArray[np.int32]
Tokens = npt.NDArray[np.uint32]
REASONS = ("no_shared_prefix", "shorter_than_block", "evicted", "namespace")


class Match(NamedTuple):
    """What is cached of a prompt.

    Attributes:
        node: where its full blocks end, good until the index changes; -1 if there are none.
        blocks: the full blocks, int32.
        tail_block: a block that holds the next `tail_tokens` tokens; -1 if there is none.
        tail_tokens: see there.
    """

    node: int
    blocks: Int32
    tail_block: int
    tail_tokens: int


class BlockIndex:
    """A trie per namespace over the blocks of a pool, at most `max_blocks` in all; knows nothing of bytes.

    Attributes:
        holds: what requests keep.
        cached: whether the trie names the block, bool `(num_blocks,)`.
        used, born: times of each block's last use, and of its becoming cached, int64 `(num_blocks,)`.
        tokens: what each block covers, uint32 `(num_blocks, block_size)`.
        hits, misses, short: blocks found, lookups that stopped early, prompts shorter than a block.
        hit_tokens, lookup_tokens, reasons: counters.
        saved: which blocks wait for pages of a file; None: none does. Nobody holds a block that waits, and whatever
            comes after it in a text waits as well.
    """

    def __init__(self, pool: BlockPool, block_size: int, max_blocks: int) -> None:
        self.pool, self.block_size, self.max_blocks = pool, block_size, max_blocks
        self.holds = Holds(pool)
        self.cached = np.zeros(pool.num_blocks, bool)
        self.used = np.zeros(pool.num_blocks, np.int64)
        self.born = np.zeros(pool.num_blocks, np.int64)
        self.tokens = np.zeros((pool.num_blocks, block_size), np.uint32)
        self.hits = self.misses = self.short = self.hit_tokens = self.lookup_tokens = 0
        self.reasons = dict.fromkeys(REASONS, 0)
        self.saved: SavedBlocks | None = None
        self._clock = 0
        self._name_nothing(TokenTrie(block_size), self._no_texts(), GhostTrie(block_size, max_blocks))

    def _no_texts(self) -> TextCounts:
        return TextCounts(self.pool.num_blocks, self.block_size)

    def _name_nothing(self, trie: TokenTrie, texts: TextCounts, ghosts: GhostTrie) -> None:
        self.trie, self._texts, self._ghosts = trie, texts, ghosts
        self._roots: dict[Hashable, int] = {}
        self._names: dict[int, Hashable] = {}

    def __len__(self) -> int:
        return len(self.trie)

    @property
    def evictions(self) -> int:
        """Blocks evicted, ever."""
        return self.trie.evicted

    # -- match ----------------------------------------------------------------------------------------------

    def find(self, ids: Tokens, name: Hashable) -> Match:
        """What is cached of `ids`; changes nothing."""
        root = self._roots.get(name)
        if root is None:
            return Match(-1, np.empty(0, np.int32), -1, 0)
        node, length, blocks, tail = self.trie.lookup(root, ids)
        return Match(node if len(blocks) else -1, blocks, tail, length - len(blocks) * self.block_size)

    def match(self, ids: Tokens, name: Hashable) -> Match:
        """Find, count, and use what was found; `node` ends exactly with the full blocks."""
        self.holds.settle()
        found = self._ready(ids, name)
        length = len(found.blocks) * self.block_size
        reason = None
        if length + self.block_size <= len(ids):
            reason = self._why(ids[: length + self.block_size], found, name)
        if length:
            self.used[found.blocks] = self._clock + 1
            found = found._replace(node=self.trie.touch(found.node, length))
            self._clock += 1
        counts: dict[str, Any] = {
            "hits": self.hits + len(found.blocks),
            "hit_tokens": self.hit_tokens + length,
            "lookup_tokens": self.lookup_tokens + len(ids),
        }
        if reason is not None:
            counts["misses"] = self.misses + 1
        elif 0 < len(ids) < self.block_size:  # neither a hit nor a miss, and yet nothing can be reused
            counts["short"], reason = self.short + 1, "shorter_than_block"
        if reason is not None:
            counts["reasons"] = self.reasons | {reason: self.reasons[reason] + 1}
        self.__dict__.update(counts)  # one call, so that an interrupt finds all of them counted, or none
        return found

    def _why(self, missing: Tokens, found: Match, name: Hashable) -> str:
        if self._ghosts.remembers(missing, name):
            return "evicted"
        last = int(found.blocks[-1]) if len(found.blocks) else -1
        if self._texts.count(last, missing[-self.block_size :]):  # and not here, or it would have matched
            return "namespace"
        return "shorter_than_block" if found.tail_tokens else "no_shared_prefix"

    # -- insert and evict -----------------------------------------------------------------------------------

    def open(self, ids: Tokens, first: int, name: Hashable, blocks: Int32 | None = None) -> tuple[int, int, int]:
        """`(existing, last, room)`: blocks of `ids` that are cached, the last one (-1: none), and how many may follow.

        Evicts for these: for those of `blocks`, which are in use, or for as many new ones, which must be free.

        Raises:
            InvalidOperationError: fewer than `first` are cached, or one of `blocks` is for another text or in another
                namespace; nothing was evicted.
        """
        self.holds.settle()
        found = self._ready(ids, name)
        existing = len(found.blocks)
        if existing < first:
            raise InvalidOperationError(f"expected {first} blocks before this one in the cache, got {existing}")
        if blocks is not None:
            elsewhere = self.cached[blocks]
            elsewhere[:existing] &= found.blocks != blocks[:existing]
            if elsewhere.any():
                block = blocks[elsewhere.argmax()]
                raise InvalidOperationError(f"expected blocks that no other text is cached in, got block {block}")
        wanted, new = len(ids) // self.block_size - existing, blocks is None
        if not existing:
            return 0, -1, self._make_room(wanted, new)
        # What is built on is used, and must not go to make room for what comes.
        node = self.trie.touch(found.node, existing * self.block_size)
        self.trie.pin(node)
        try:
            return existing, int(found.blocks[-1]), self._make_room(wanted, new)
        finally:
            self.trie.unpin(node)

    def insert(self, ids: Tokens, existing: int, last: int, blocks: Int32, name: Hashable) -> None:
        """Name `blocks`, whose references become the index's, behind the first `existing` of `ids`, up to `last`."""
        size, count = self.block_size, existing + len(blocks)
        values = np.concatenate([np.zeros(existing, np.int32), blocks])
        tokens = ids[existing * size : count * size].reshape(-1, size)
        new, counted = name not in self._roots, False
        if new:
            root = self.trie.add_root()
            self._roots[name], self._names[root] = root, name
        try:
            # In blocks that no prompt is found in yet, nothing of this counts before the trie names them.
            self.tokens[blocks] = tokens
            self.used[blocks] = self.born[blocks] = self._clock + 1
            self.cached[blocks] = True
            self._texts.add(last, blocks, tokens)
            counted = True
            self.trie.insert(self._roots[name], ids[: count * size], values)
        except Exception:
            for block in blocks.tolist():
                self.cached[block] = False
            if counted:
                self._texts.drop(blocks)
            if new:
                self._drop(self._roots[name])
            raise
        self._clock += 1

    def _drop(self, root: int) -> None:
        self.trie.drop_empty(root)
        del self._roots[self._names.pop(root)]

    def _make_room(self, count: int, new: bool) -> int:
        """Evict until `count` more blocks fit; how many do. New ones must also be free in the pool."""
        while (room := self._room(new)) < count and self.evict(count - room):
            pass
        return max(0, min(count, self._room(new)))

    def _room(self, new: bool) -> int:
        spare = self.max_blocks - len(self)
        return min(spare, self.pool.num_free) if new else spare

    def evict(self, count: int) -> int:
        """Evict up to `count` blocks of the leaf that was used longest ago, from its tail; how many left."""
        leaf = self.trie.victim()
        if leaf < 0 or count <= 0:
            return 0
        root, tokens, _ = self.trie.path(leaf)
        blocks = self.trie.evict(min(count, self.trie.num_pages_of(leaf)))
        self._ghosts.remember(tokens, self._names[root])
        self._let_go(root, blocks)
        return len(blocks)

    def free_up(self, num_blocks: int) -> int:
        """Evict until `num_blocks` more are free in the pool, or nothing can go; how many became free."""
        self.holds.settle()
        before = self.pool.num_free
        while (wanted := before + num_blocks - self.pool.num_free) > 0 and self.evict(wanted):
            pass
        return self.pool.num_free - before

    def _let_go(self, root: int, blocks: Int32) -> None:
        """The trie names `blocks` no more; a namespace without blocks goes."""
        self.pool.release(blocks)
        self._texts.drop(blocks)
        for block in blocks.tolist():  # one by one, which takes no memory
            self.cached[block] = False
        if self.saved is not None:
            self.saved.forget(blocks)
            self._put_away_saved()
        if self.trie.is_leaf(root):
            self._drop(root)

    def clear(self) -> None:
        """Forget every block; counters stay, and so does what requests hold."""
        self.holds.settle()
        named = self.named()
        trie, texts = TokenTrie(self.block_size), self._no_texts()
        ghosts = GhostTrie(self.block_size, self.max_blocks)
        trie.evicted = self.trie.evicted
        # First of all nothing is named: while a block is, it must be known what it waits for. The old trie lives on as
        # long as requests pin it.
        self._name_nothing(trie, texts, ghosts)
        self.pool.release(named)
        self.cached.fill(False)
        self.saved = None

    @property
    def nbytes(self) -> int:
        """Bytes of the index: records of all blocks of the pool, the trie, and what was evicted not long ago."""
        records = (self.cached, self.used, self.born, self.tokens, self.holds.counts)
        tries = self.trie.nbytes + self._ghosts.nbytes + self._texts.nbytes
        return sum(record.nbytes for record in records) + tries

    # -- files ----------------------------------------------------------------------------------------------

    def _ready(self, ids: Tokens, name: Hashable) -> Match:
        """`find`, with what it names brought in from a file; what is damaged there is forgotten, and its tail."""
        while True:
            found = self.find(ids, name)
            if self.saved is None:
                return found
            blocks = found.blocks if found.tail_block < 0 else np.append(found.blocks, np.int32(found.tail_block))
            good = self.saved.fetch(blocks)
            self._put_away_saved()
            if good == len(blocks):
                return found
            root = self._roots[name]
            bad = np.concatenate([ids[: good * self.block_size], self.tokens[blocks[good]]])
            self._let_go(root, self.trie.prune(root, bad))

    def _put_away_saved(self) -> None:
        if self.saved is not None and not self.saved.waiting:
            self.saved = None  # and with it the file is closed

    def fetch_all(self) -> None:
        """Bring in all that waits in a file, and forget what is damaged there."""
        if self.saved is not None:
            for root, tokens, _ in [self.trie.path(leaf) for leaf in self.trie.leaf_ids()]:
                self._ready(tokens, self._names.get(root))

    def segments(self) -> tuple[list[Hashable], Segments, Int32]:
        """`(names, segments, blocks)`: what a saved cache says of this one."""
        return list(self._roots), *segments_of(self.trie, list(self._roots.values()), self.tokens)

    def take_in(self, snapshot: Snapshot, arena: int, store: BlockStore, then: Callable[[], None]) -> None:
        """Name the pages of an arena, those used last first, as many as there is room for; the index is empty.

        Args:
            then: called at the end; if it raises, nothing has been taken in.
        """
        segments, size = snapshot.segments, self.block_size
        room = self._room(new=True)
        pages, parents = (segments.lengths // size).tolist(), segments.parents.tolist()
        kept = [0] * len(pages)
        for i in np.flatnonzero(snapshot.arena_of[segments.namespaces] == arena).tolist():
            parent = parents[i]
            if parent < 0 or kept[parent] == pages[parent]:
                kept[i] = min(pages[i], room)
                room -= kept[i]
        chosen = np.flatnonzero(kept)
        places = ranges(snapshot.firsts // size, np.array(kept, np.int64), chosen)
        empty, no_texts = TokenTrie(size), self._no_texts()
        empty.evicted = self.trie.evicted
        blocks = self.pool.acquire(len(places))
        try:
            block_of = np.zeros(int(snapshot.num_slots[arena]) // size, np.int32)
            block_of[places] = blocks
            if len(blocks):
                self.saved = SavedBlocks(snapshot, arena, store)
                self.saved.expect(blocks, places)
            for i, ids, slots in walk_back(segments, snapshot.firsts, chosen):
                count = len(ids) // size - pages[i] + kept[i]
                path, name = block_of[slots[::size][:count] // size], snapshot.names[segments.namespaces[i]]
                known = self.find(ids[: count * size], name).blocks
                last = int(known[-1]) if len(known) else -1
                self.insert(ids[: count * size], len(known), last, path[len(known) :], name)
                self.used[path] = self._clock
            then()
        except BaseException:
            self._name_nothing(empty, no_texts, self._ghosts)
            self.pool.release(blocks)
            self.cached.fill(False)
            self.saved = None
            raise

    # -- interrupts -----------------------------------------------------------------------------------------

    def mend(self) -> None:
        """Make all agree with the trie and the open holds, wherever between two lines an interrupt has struck.

        What the trie names is cached, in the namespaces that have blocks; the rest was never inserted, or has left.
        The pool's references are its owner's to recount.
        """
        roots = self.trie.roots()
        self._names = {root: name for root, name in self._names.items() if root in roots}
        for root in roots:
            if self.trie.is_leaf(root):
                self._names.pop(root, None)
                self.trie.drop_empty(root)
        self._roots = {name: root for root, name in self._names.items()}
        cached = np.zeros(self.pool.num_blocks, bool)
        named = self.named()
        cached[named] = True
        self.cached = cached
        self._texts.recount(named)
        self.holds.mend(self.trie)
        self._ghosts.mend()
        if self.saved is not None:
            self.saved.mend(cached)
            self._put_away_saved()
        self._clock += 1

    # -- verification ---------------------------------------------------------------------------------------

    def named(self) -> Int32:
        """The blocks that the trie names, in no particular order."""
        return np.concatenate([np.empty(0, np.int32), *(self.trie.all_values(root) for root in self._names)])

    def references(self) -> Int32:
        """References of trie and requests on each block, int32 `(num_blocks,)`."""
        held = np.concatenate([self.named(), self.holds.blocks()])
        return np.bincount(held, minlength=self.pool.num_blocks).astype(np.int32)

    def check(self) -> None:
        """Verify every invariant; AssertionError names the broken one."""
        self.holds.settle()
        self.trie.check()
        self._ghosts.check()
        assert self.trie.roots() == sorted(self._names), "prefix cache: roots differ"
        assert {name: root for root, name in self._names.items()} == self._roots, "prefix cache: names differ"
        assert len(self) <= self.max_blocks, "prefix cache: more blocks than allowed"
        # Not by np.array_equal, for which any exception, also of a signal handler, is a difference.
        named = np.sort(self.named())
        assert named.tolist() == np.flatnonzero(self.cached).tolist(), "prefix cache: the trie names other blocks"
        self._texts.check(named)
        waiting = np.empty(0, np.int32) if self.saved is None else self.saved.slots()
        assert self.cached[waiting].all(), "prefix cache: a block waits that is not cached"
        assert not self.holds.counts[waiting].any(), "prefix cache: a block waits that is held"
        assert sum(self.reasons.values()) == self.misses + self.short, "prefix cache: reasons do not add up"
        assert self.hits * self.block_size == self.hit_tokens, "prefix cache: hits do not add up"
        assert (self.references() <= self.pool.ref_counts()).all(), "prefix cache: the pool counts fewer references"
