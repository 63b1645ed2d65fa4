"""Systems of `PrefixCache` for `reentry.py`; `PrefixCalls` serves other systems that have one."""

import numpy as np
from contents import pairs
from systems.calling_arguments import ArgumentWrapper
from systems.system import System, pure, release

from kvcache import PrefixAwarePrefill, PrefixCache

SIZE = 4  # of blocks
DIM = 8


class PrefixCalls:
    """The calls of a `PrefixCache`, `self.prefix`, for a system that may have other calls.

    Attributes:
        sessions, found: what is held, by sessions and by lookups.
    """

    def _start(self, prefix):
        self.prefix, self.prefill = prefix, PrefixAwarePrefill(prefix)
        self.sessions, self.found = [], []

    def _text(self, tag=None, length=None):
        tag = tag or self.random.choice((1, 2, 3))
        length = length or self.random.choice((3, 8, 13, 22))
        return tag * 1000 + np.arange(length, dtype=np.uint32)

    def prefix_lookup(self, wrap):
        matched, blocks = self.prefix.lookup(wrap.tokens(self._text()), wrap.name(self.random.choice((None, "b"))))
        self.found += blocks
        return matched, [[block.index, block.token_ids] for block in blocks]

    @release
    def prefix_release(self, wrap):
        self.prefix.release(wrap.integer(self.found.pop().index))

    def prefix_read_found(self, wrap):
        block = self.random.choice(self.found)
        return block.keys, block.values, block.memory_bytes

    def prefix_open_session(self, wrap):
        return self._open(self.prefix.open_session, wrap, wrap.name("b")).block_indices

    def _open(self, call, wrap, *name, tag=None, length=None):
        tag = tag or self.random.choice((1, 2, 3))
        session = call(wrap.tokens(self._text(tag, length)), *name)
        session.tag = tag
        self.sessions.append(session)
        return session

    def prefix_prepare(self, wrap):
        return self._open(lambda text: self.prefill.prepare(text)[0], wrap).matched_prefix_len

    def _closed(self, session):
        claim = session.claim
        self.promises.append((lambda: claim.released, "a session is open that was closed"))

    @release
    def prefix_close_session(self, wrap):
        session = self.sessions.pop()
        self.prefix.close_session(session)
        self._closed(session)

    @release
    def prefix_release_session(self, wrap):
        session = self.sessions.pop(0)
        self.prefill.release_session(session)
        self._closed(session)

    @release
    def prefix_leave_session(self, wrap):
        with self.sessions.pop() as session:
            pass
        self._closed(session)

    @release
    def prefix_drop_session(self, wrap):
        self.sessions.pop()

    def prefix_evict(self, wrap):
        return self.prefix.evict(wrap.integer(self.random.choice((1, 3))))

    def prefix_clear(self, wrap):
        self.prefix.clear()

    def prefix_save(self, wrap):
        self.prefix.save(self.path / f"{type(self).__name__}", "m")

    def prefix_load(self, wrap):
        self.prefix_save(wrap)
        self.prefix.clear()
        return self.prefix.load(self.path / f"{type(self).__name__}", "m")

    @pure
    def prefix_get_block(self, wrap):
        block = self.prefix.get_block(wrap.integer(self.random.randrange(12)))
        return block and (block.index, block.token_ids, block.keys)

    @pure
    def prefix_reports(self, wrap):
        it = self.prefix
        return it.block_ids(), it.pinned_blocks, it.references(), str(it.stats()), str(self.prefill.stats())

    @pure
    def prefix_sizes(self, wrap):
        it = self.prefix
        return len(it), it.is_empty, it.capacity, it.hits, it.misses, it.evictions, it.hit_rate, it.memory_bytes

    @pure
    def prefix_check(self, wrap):
        self.prefix.check()

    def _let_go(self):
        self.sessions.clear()
        self.found.clear()
        slots = self.prefix._slots
        for block in range(self.prefix._pool.num_blocks):
            while slots.is_looked_up(block):
                self.prefix.release(block)
        assert self.prefix.pinned_blocks == 0
        assert (slots.counts(references=True) <= 1).all()


class BlocksSystem(PrefixCalls, System):
    """A `PrefixCache` with blocks of its own, whose K and V identify their tokens and namespace."""

    rare = ("prefix_save", "prefix_load")
    slow = 1

    def _build(self):
        self._start(PrefixCache(14, SIZE, 2, 1, DIM))
        for tag, length, name in ((3, 20, None), (1, 8, "b"), (2, 9, None)):
            text = self._text(tag, length)
            self.prefix.store(text, 0, self._pairs(text, name), name)
        self._open(self.prefix.open_session, ArgumentWrapper(), tag=3, length=13)
        self.found += self.prefix.lookup(self._text(3, 8))[1]

    @staticmethod
    def _pairs(text, name):
        return pairs(name, text, SIZE, 1, DIM)

    def prefix_insert(self, wrap):
        text, name = self._text(length=8), self.random.choice((None, "b"))
        keys, values = self._pairs(text, name)[1]
        keys, values = ([wrap.array(layer) for layer in side] for side in (keys, values))
        return self.prefix.insert(wrap.tokens(text), wrap.integer(SIZE), wrap.items(keys), values, wrap.name(name))

    def prefix_store(self, wrap):
        text, name = self._text(), self.random.choice((None, "b"))
        blocks = [wrap.items([wrap.items(side) for side in pair]) for pair in self._pairs(text, name)]
        return self.prefix.store(wrap.tokens(text), wrap.integer(0), wrap.items(blocks), wrap.name(name))

    def prefix_store_blocks(self, wrap):
        text = self._text()
        return self.prefill.store_blocks(wrap.tokens(text), 0, self._pairs(text, "b"), wrap.name("b"))

    def _verify(self):
        self.prefix.check()
        for name in (None, "b"):
            for tag in (1, 2, 3):
                text = self._text(tag, 22)
                matched, blocks = self.prefix.lookup(text, name)
                expected = self._pairs(text, name)
                for block, (keys, values) in zip(blocks, expected, strict=False):
                    for got, want in zip([*block.keys, *block.values], [*keys, *values], strict=True):
                        np.testing.assert_array_equal(got, want)
                    self.prefix.release(block.index)

    def _finish(self):
        self._let_go()
        self.prefix.clear()
        self.prefix.check()
        pool = self.prefix._pool
        assert pool.num_free == pool.num_blocks, "blocks are lost"
        text = self._text(1, 20)
        assert self.prefix.store(text, 0, self._pairs(text, None)) == 5
