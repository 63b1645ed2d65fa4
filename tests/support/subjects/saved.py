"""Subjects of saved caches: they load a file, read its pages, and forget the damaged ones."""

import dataclasses
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from contents import LAYERS, pairs, rows, state
from subjects.subject import Subject

from kvcache import PrefixCache, PrefixCacheConfig, PrefixKvCache
from kvcache.prefix.block_rows import read_block
from kvcache.saved.snapshot import Snapshot

DIM, SIZE = 8, 16
TEXT = np.arange(600, dtype=np.uint32)
PROMPTS = ((None, TEXT[:200]), (None, np.r_[TEXT[:80], TEXT[:100]]), ("other", TEXT[8:152]))


@cache
def folder():
    """The folder of this process's files."""
    return tempfile.TemporaryDirectory()


class SavedPrefix(Subject):
    """A loaded cache of float32 rows, with the rows of one prompt read."""

    evicts = True
    formats, slot_bytes = "f32", 2 * LAYERS * DIM * 4

    def _build(self):
        self.file = Path(folder().name) / type(self).__name__
        if not self.file.exists():
            self._save()
        cache = self._fresh()
        cache.load(self.file)
        self._get(cache, *PROMPTS[2])
        return cache

    def _save(self):
        cache = self._fresh()
        for name, tokens in PROMPTS:
            self._put(cache, tokens, name)
        cache.save(self.file)

    def _fresh(self):
        config = PrefixCacheConfig(4, 480 * self.slot_bytes, dtype=self.formats, head_dim=DIM)
        return PrefixKvCache(config)

    @staticmethod
    def _put(cache, tokens, name=None):
        cache.store_snapshot(tokens, state(name, tokens, DIM), name)

    @staticmethod
    def _get(cache, name, tokens):
        hit = cache.lookup(tokens, name)
        return 0 if hit is None else hit[0]

    def _texts(self):
        """`(name, tokens, pages, slots)` of every sequence."""
        trie, spaces = self.it._index.trie, {space.root: space for space in self.it._index.namespaces()}
        for root, tokens, pages in map(trie.path, trie.leaf_ids()):
            yield spaces[root].name, tokens, pages, spaces[root].slots

    def _state(self):
        texts = sorted((repr(name), tokens.tobytes()) for name, tokens, *_ in self._texts())
        return texts, self.it.stats()

    def _check(self):
        """Verify all invariants, and the rows that were read."""
        super()._check()
        for name, tokens, pages, slots in self._texts():
            here = slots.records(pages)["waits"] == 0
            for side, layers in enumerate(rows(name, tokens, DIM)):
                for layer, expected in enumerate(layers):
                    found = slots.rows.read(side, layer, pages).reshape(-1, DIM)
                    assert np.allclose(found[here], expected[here], atol=0.03), "rows of other tokens"

    def lookup(self):
        self._get(self.it, *PROMPTS[0])

    def store_longer(self):
        self._put(self.it, TEXT[:210])

    def store_and_evict(self):
        self._put(self.it, TEXT[300:600])

    def remove(self):
        self.it.remove(PROMPTS[1][1])

    def remove_what_is_there(self):
        self.it.remove(PROMPTS[2][1], "other")

    def save(self):
        self.it.save(Path(folder().name) / "again")

    def clear(self):
        self.it.clear()


class SavedPackedPrefix(SavedPrefix):
    formats, slot_bytes = "q8", 2 * LAYERS * (DIM + 4)
    lookup = SavedPrefix.lookup
    store_longer = SavedPrefix.store_longer
    store_and_evict = SavedPrefix.store_and_evict


class LoadPrefix(SavedPrefix):
    """Empty but for a state that a caller holds; of a file that cannot be loaded nothing stays."""

    def _build(self):
        super()._build()
        cache = self._fresh()
        self._put(cache, TEXT[:30])
        self.held = cache.lookup(TEXT[:30])
        cache.remove(TEXT[:30])
        return cache

    def load(self):
        self.it.load(self.file)


class DamagedPrefix(SavedPrefix):
    """A page in the middle of each prompt is damaged; a call that fails may have noticed it."""

    def _save(self):
        super()._save()
        snapshot = Snapshot(self.file, "blocks" if isinstance(self, SavedBlocks) else "entries", "")
        with open(self.file, "r+b") as file:
            for page in range(1, len(snapshot._checksums), 3):
                file.seek(snapshot._offsets[0] + page * snapshot.arenas[0].stride + 5)
                file.write(b"\xa5\x5a")

    def _state(self):
        return getattr(self, "found", None)

    def lookup(self):
        self.found = [self._get(self.it, name, tokens) for name, tokens in PROMPTS]

    def save(self):
        self.it.save(Path(folder().name) / "again")


class SavedBlocks(SavedPrefix):
    """The same of a full `PrefixCache`; a session holds the blocks that were read."""

    def _build(self):
        cache = super()._build()
        self.session = cache.open_session(TEXT[8:50], "other")
        return cache

    def _fresh(self):
        return PrefixCache(30, SIZE, LAYERS, 1, DIM)

    @staticmethod
    def _put(cache, tokens, name=None):
        cache.store(tokens, 0, pairs(name, tokens, SIZE, 1, DIM), name)

    @staticmethod
    def _get(cache, name, tokens):
        length, found = cache.lookup(tokens, name)
        for block in found:
            cache.release(block.index)
        return length

    def _state(self):
        texts, stats = super()._state()
        stats = dataclasses.replace(stats, bookkeeping_bytes=0)
        return texts, self.it.references().sum(), stats

    @staticmethod
    def _kept(state):
        """All but the counters: a lookup that found its blocks and could not hold them has counted them as used."""
        return state[:2]

    def _check(self):
        self.it.check()
        for name, tokens, blocks, slots in self._texts():
            waits = slots.records(blocks)["waits"]
            expected = pairs(name, tokens, SIZE, 1, DIM)
            for i, block in enumerate(blocks.tolist()):
                got = read_block(self.it._store, block, (DIM, DIM))
                assert waits[i] or np.array_equal(got, expected[i]), "K of others"

    def lookup(self):
        self.it.lookup(TEXT[:200])

    def open_session(self):
        self.it.open_session(PROMPTS[1][1][:130])

    def store_longer_and_evict(self):
        self._put(self.it, TEXT[:240])

    def store_and_evict(self):
        self._put(self.it, TEXT[300:600])

    def evict(self):
        self.it.evict(12)

    def save(self):
        self.it.save(Path(folder().name) / "again")

    def clear(self):
        self.it.clear()

    def get_block(self):
        self.it.get_block(3)


class LoadBlocks(SavedBlocks):
    """Empty but for a session from before."""

    def _build(self):
        super()._build()
        cache = self._fresh()
        self._put(cache, TEXT[:30])
        self.session = cache.open_session(TEXT[:30])
        cache.clear()
        return cache

    def load(self):
        self.it.load(self.file)


class LoadBeside(LoadBlocks):
    """Two caches from one file: both are loaded, or neither."""

    def _fresh(self):
        cache = super()._fresh()
        cache.other = PrefixCache(20, SIZE, LAYERS, 1, DIM)
        return cache

    def _save(self):
        cache = self._fresh()
        for name, tokens in PROMPTS:
            self._put(cache, tokens, name)
            self._put(cache.other, tokens, name)
        cache.save(self.file, beside=[cache.other])

    def _state(self):
        return super()._state(), len(self.it.other), self.it.other.references().sum()

    @staticmethod
    def _kept(state):
        return LoadBlocks._kept(state[0]), *state[1:]

    def _check(self):
        super()._check()
        self.it.other.check()

    def load(self):
        self.it.load(self.file, beside=[self.it.other])


class DamagedBlocks(DamagedPrefix, SavedBlocks):
    _state = DamagedPrefix._state
    _kept = staticmethod(Subject._kept)
    lookup = DamagedPrefix.lookup
    save = DamagedPrefix.save
