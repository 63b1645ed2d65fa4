"""Systems of `PagedKvCache` for `reentry.py`: sequences, forks, handles, and prefixes over them."""

from contextlib import contextmanager

import numpy as np
import numpy.random  # now, not where a handler may run
from systems.calling_arguments import ArgumentWrapper
from systems.prefix import DIM, SIZE, PrefixCalls
from systems.system import System, pure, release

from kvcache import EvictionStrategy, PagedKvCache, PrefixCache


def rows(tag, positions, layer):
    """K and V that identify their token: the last digit of the sequence's id, the position in the text, the layer."""
    k = np.full((len(positions), 1, DIM), tag, np.float32)
    k[..., 1] = np.reshape(positions, (-1, 1))
    k[..., 2] = layer
    return k, k.copy()


class PagedSystem(PrefixCalls, System):
    """Sequences, forks of them (ids that end alike), blocks adopted (ids from 100 on), a prefix cache over these."""

    rare = ("prefix_save", "prefix_load")

    def _build(self):
        self.forks = 1000
        self.cache = PagedKvCache(70, SIZE, 1, DIM, num_layers=2, dtype="f32")
        for seq, n in ((1, 9), (2, 14), (3, 22)):
            self.cache.allocate(seq, n)
            for layer in range(2):
                self.cache.write(layer, seq, *rows(seq, range(n), layer))
        self._start(PrefixCache.over(self.cache, 20))
        self.prefix.adopt(self._text(3, 20), self.cache.get_sequence(3).block_ids)
        self.prefix.adopt(self._text(1, 8), self.cache.get_sequence(1).block_ids, "b")
        self._open(self.prefix.open_session, ArgumentWrapper(), tag=3, length=13)
        self.found += self.prefix.lookup(self._text(3, 8))[1]
        for source, target in ((1, 11), (3, 13), (2, 12)):
            self.cache.fork(source, target)
        self.cache.keep_tokens(2, range(0, 14, 2))
        self.handles = [self.cache.handle(3), self.cache.handle(11)]
        self.live = self.handles[0].block_table_mut()

    def _seq(self):
        return self.random.choice((1, 2, 3, 11, 12, 13, 21, 22, 23, 101, 103))

    @contextmanager
    def _kept(self, seq):
        """The blocks of a fork of a sequence that no other call uses."""
        self.forks += 1
        fork = self.forks
        self.cache.fork(seq, fork)
        try:
            self.cache.pin(fork)
            info = self.cache.get_sequence(fork)
            yield list(info.block_ids)
        finally:
            self.cache.free(fork)

    def _new(self, source):
        return source + self.random.choice((10, 20, 30))

    # -- sequences

    def allocate(self, wrap):
        self.cache.allocate(wrap.integer(self._new(self._seq())), wrap.integer(self.random.choice((0, 3, 9))))

    def allocate_batch(self, wrap):
        ids = [self._new(self._seq()) for _ in range(3)]
        self.cache.allocate_batch(wrap.array(ids), wrap.array([1, 5, 8]))

    def adopt(self, wrap):
        with self._kept(3) as blocks:
            self.cache.adopt(wrap.integer(103), wrap.array(blocks[:3]), wrap.integer(11))

    def adopt_found(self, wrap):
        session = self.random.choice(self.sessions)
        self.cache.adopt(100 + session.tag, wrap.array(session.shared_blocks), session.num_tokens)

    def fork(self, wrap):
        seq = self._seq()
        self.cache.fork(wrap.integer(seq), wrap.integer(self._new(seq)))

    def fork_batch(self, wrap):
        self.cache.fork_batch(wrap.array([1, 3, 1]), wrap.array([41, 43, 51]))

    def swap(self, wrap):
        tag = self.random.choice((1, 2, 3))
        self.cache.swap(wrap.integer(tag), wrap.integer(tag + 10))

    def _freed(self, ids):
        table = self.cache._table
        gone = [(seq, table.uid(seq)) for seq in ids]

        def kept():
            return all(uid < 0 or table.uid(seq) != uid for seq, uid in gone)

        return kept, f"a sequence of {ids} is there that was freed"

    @release
    def free(self, wrap):
        seq = self._seq()
        promise = self._freed([seq])
        self.cache.free(wrap.integer(seq))
        self.promises.append(promise)

    @release
    def free_batch(self, wrap):
        ids = [1, 11] if self.random.random() < 0.5 else [3, 12]
        promise = self._freed(ids)
        self.cache.free_batch(wrap.array(ids))
        self.promises.append(promise)

    def append(self, wrap):
        self.cache.append(wrap.integer(self._seq()), wrap.integer(self.random.choice((0, 1, 6))))

    def append_batch(self, wrap):
        self.cache.append_batch(wrap.array([1, 11, 3, 2]))

    def append_batch_of_counts(self, wrap):
        self.cache.append_batch(wrap.array([1, 11, 3, 2]), wrap.array([5, 0, 2, 1]))

    def truncate_batch(self, wrap):
        self.cache.truncate_batch(wrap.array([2, 3]), wrap.array([3, 7]))

    def reorder(self, wrap):
        self.cache.reorder(wrap.array([1, 11]), wrap.array(self.random.choice(([1, 0], [1, 1], [0, 0]))))

    def grow(self, wrap):
        if self.cache.total_blocks < 90:
            self.cache.grow(wrap.integer(2))

    def truncate(self, wrap):
        self.cache.truncate(wrap.integer(self._seq()), wrap.integer(self.random.choice((0, 3, 7))))

    def keep_tokens(self, wrap):
        self.cache.keep_tokens(wrap.integer(self._seq()), wrap.array(range(0, self.random.choice((4, 7)), 2)))

    def apply_streaming_llm(self, wrap):
        return self.cache.apply_streaming_llm(wrap.integer(self._seq()), wrap.integer(2), wrap.integer(4))

    def compact(self, wrap):
        self.cache.compact(wrap.integer(self._seq()))

    @pure
    def contains(self, wrap):
        return wrap.integer(3) in self.cache, self.cache.num_sequences, self.cache.sequence_ids()

    @pure
    def get_sequence(self, wrap):
        return [str(self.cache.get_sequence(wrap.integer(seq))) for seq in (1, 3, 99)]

    @pure
    def block_table(self, wrap):
        return self.cache.block_table(wrap.array([1, 2, 3]))

    @pure
    def reference_counts(self, wrap):
        return self.cache.reference_counts(wrap.array([0, 1, 2, 69]))

    @pure
    def reports(self, wrap):
        it = self.cache
        return (
            it.total_blocks,
            it.used_memory_bytes,
            it.eviction_threshold,
            str(it.eviction_strategy),
            it.needs_eviction,
        )

    @pure
    def stats(self, wrap):
        stats = self.cache.stats()
        return stats.total_allocations, stats.total_frees, stats.total_forks, stats.peak_blocks_used

    @pure
    def texts(self, wrap):
        return str(self.cache), repr(self.cache), repr(self.handles[0])

    @pure
    def check(self, wrap):
        self.cache.check()

    def copy_blocks(self, wrap):
        with self._kept(3) as blocks:
            self.cache.copy_blocks(wrap.array(blocks), wrap.array(blocks))

    # -- who leaves

    def with_eviction_strategy(self, wrap):
        kinds = (EvictionStrategy.LRU(), EvictionStrategy.LongestFirst(), EvictionStrategy.Priority(4))
        self.cache.with_eviction_strategy(self.random.choice(kinds))

    def with_eviction_threshold(self, wrap):
        self.cache.with_eviction_threshold(wrap.number(0.8))

    def set_priority(self, wrap):
        self.cache.set_priority(wrap.integer(self._seq()), wrap.integer(2))

    def pin(self, wrap):
        self.cache.pin(wrap.integer(self._seq()))

    def unpin(self, wrap):
        self.cache.unpin(wrap.integer(self._seq()))

    @pure
    def select_eviction_target(self, wrap):
        return self.cache.select_eviction_target()

    def evict(self, wrap):
        return self.cache.evict()

    def evict_to_threshold(self, wrap):
        return self.cache.evict_to_threshold(wrap.number(0.3))

    # -- K and V

    def write(self, wrap):
        seq, layer = self._seq(), self.random.randrange(2)
        k, v = rows(seq % 10, self._anywhere(self.random.choice((1, 6))), layer)
        start = self.random.choice((None, wrap.integer(0), wrap.integer(3)))
        self.cache.write(wrap.integer(layer), wrap.integer(seq), wrap.array(k), wrap.array(v), start)

    @staticmethod
    def _anywhere(n):
        """The positions that rows identify; other calls may have evicted tokens meanwhile."""
        return [-1] * n

    def write_doubles(self, wrap):
        k, v = rows(1, self._anywhere(4), 1)
        self.cache.write(1, 1, wrap.array(k.astype(np.float64)), wrap.array(v.astype(np.float64)), 0)

    def write_batch(self, wrap):
        k, v = (np.concatenate(sides) for sides in zip(*(rows(tag, [-1], 0) for tag in (3, 1, 3)), strict=True))
        self.cache.write_batch(wrap.integer(0), wrap.array([3, 11, 103]), wrap.array(k), wrap.array(v))

    def write_ragged(self, wrap):
        parts = [rows(tag, self._anywhere(n), 0) for tag, n in ((3, 2), (1, 0), (2, 1))]
        k, v = (np.concatenate(sides) for sides in zip(*parts, strict=True))
        self.cache.write_ragged(0, wrap.array([3, 11, 2]), wrap.array([2, 0, 1]), wrap.array(k), wrap.array(v))

    def read(self, wrap):
        return self.cache.read(wrap.integer(self.random.randrange(2)), wrap.integer(self._seq()), wrap.integer(0))

    def _queries(self, n):
        return np.random.default_rng(1).standard_normal((n, 2, DIM)).astype(np.float32)

    def _mixed(self, out):
        assert np.isfinite(out).all()
        # What lies in channel 0 is the last digit of a sequence, or 0 if nothing was written.
        assert out[..., 0].min() >= -1e-4
        assert out[..., 0].max() <= 3 + 1e-4
        return out

    def attention(self, wrap):
        ids = self.random.choice(([1, 3], [2, 11]))
        return self._mixed(self.cache.attention(wrap.integer(0), wrap.array(self._queries(2)), wrap.array(ids)))

    def attention_with_all(self, wrap):
        q = self._queries(7)
        out = self.cache.attention(
            1, wrap.array(q), wrap.array([3, 1, 13]), query_lens=wrap.array([4, 2, 1]), scale=wrap.number(0.3),
            sink_queries=wrap.array(q), out=np.empty_like(q), return_scores=True, context_lens=wrap.array([9, 3, 20]),
            return_lse=True, window=wrap.integer(6), softcap=wrap.number(3.0), sinks=wrap.array(np.full(2, -2.0)),
            starts=wrap.array([0, 7, 2]),
        )
        self._mixed(out[0])
        return out

    def attention_of_trees(self, wrap):
        out = self.cache.attention(
            1, wrap.array(self._queries(7)), wrap.array([3, 1, 13]), query_lens=wrap.array([4, 2, 1]),
            mask=wrap.array([-1, 0, 0, 1, -1, -1, -1]), return_scores="head",
        )
        self._mixed(out[0])
        return out

    # -- handles

    def handle(self, wrap):
        self.handles.append(self.cache.handle(wrap.integer(self._seq())))

    @release
    def drop_handle(self, wrap):
        self.handles.pop()

    def handle_clone(self, wrap):
        self.handles.append(self.handles[0].clone_handle())

    def handle_reads(self, wrap):
        it = self.random.choice(self.handles)
        return it.kv_cache(wrap.integer(1)), it.key_cache(0), it.value_cache(wrap.integer(0))

    @pure
    def handle_reports(self, wrap):
        it = self.handles[0]
        table = it.block_table
        return str(it.stats()), it.num_tokens, it.is_valid, it.cache_id, table.physical_blocks, table.sequence_length

    @pure
    def live_table(self, wrap):
        return self.live.physical_blocks, self.live.sequence_length, self.live.num_blocks, self.live.free_tokens

    def live_resize(self, wrap):
        self.live.sequence_length = wrap.integer(self.random.choice((20, 22, 25)))

    def live_extend(self, wrap):
        self.handles[0].block_table_mut().extend_sequence(1)

    # -- prefixes over them

    def prefix_adopt(self, wrap):
        tag = self.random.choice((1, 3))
        with self._kept(tag + 10 * self.random.randrange(2)) as blocks:
            text = self._text(tag, SIZE * len(blocks))
            return self.prefix.adopt(wrap.tokens(text), wrap.array(blocks), wrap.name("b"))

    def prefix_insert(self, wrap):
        k, v = rows(2, self._anywhere(SIZE), 0)
        layers = [k.swapaxes(0, 1).reshape(-1)] * 2
        text = wrap.tokens(self._text(2, 8))
        return self.prefix.insert(text, wrap.integer(0), wrap.items(layers), wrap.items(layers), wrap.name("b"))

    def prefix_store(self, wrap):
        k, v = rows(2, self._anywhere(SIZE), 0)
        layers = [k.swapaxes(0, 1).reshape(-1)] * 2
        block = wrap.items([wrap.items([wrap.array(x) for x in layers]), wrap.items(layers)])
        return self.prefill.store_blocks(wrap.tokens(self._text(2, 13)), 0, wrap.items([block, (layers, layers)]))

    # -- the end

    def _verify(self):
        cache = self.cache
        cache.check()
        self.prefix.check()
        for seq in cache.sequence_ids():
            runs, starts = cache._table.runs(seq), cache._table.run_positions(seq)
            positions = np.concatenate(
                [np.arange(at, at + int(run["stop"]) - int(run["first"])) for run, at in zip(runs, starts, strict=True)]
                or [np.empty(0)]
            )
            for layer in range(2):
                for side in cache._store.read(layer, runs):
                    tags = side[:, 0, [0, 3, 4, 5, 6, 7]]
                    assert seq >= 1000 or np.isin(tags, (0, seq % 10)).all(), (
                        f"sequence {seq} has rows of {np.unique(tags)}"
                    )
                    if seq < 100:
                        told = side[:, 0, 1]
                        right = (told == positions) | (told == -1) | (side[:, 0, 0] == 0)
                        assert right.all(), f"sequence {seq} has the tokens {told}, expected {positions}"
        for session in self.sessions:
            for block in session.block_indices:
                held = self.prefix.get_block(block)
                assert held.token_ids[0] // 1000 == session.tag, "a block of another text"
                assert all(np.isin(layer[3::DIM], (0, session.tag)).all() for layer in held.keys), (
                    "rows of another text"
                )

    def _finish(self):
        cache = self.cache
        self._let_go()
        self.handles.clear()
        cache.free_batch(cache.sequence_ids())
        assert cache.used_block_count == len(self.prefix)
        self.prefix.clear()
        self.prefix.check()
        cache.check()
        assert cache.free_block_count == cache.total_blocks, "blocks are lost"
        cache.allocate(5, cache.total_blocks * SIZE)
        assert not any(cache.read(layer, 5)[0].any() for layer in range(2)), "fresh tokens are not zero"
        cache.free(5)
