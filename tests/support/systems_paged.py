"""Systems of `PagedKvCache` for `reentry.py`: sequences, forks, handles, and prefixes over them."""

from contextlib import contextmanager

import numpy as np
import numpy.random  # now, not where a handler may run
from calling_arguments import Via
from system import System, pure, release
from systems_prefix import DIM, SIZE, PrefixCalls

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
        self._open(self.prefix.open_session, Via(), tag=3, length=13)
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

    def allocate(self, via):
        self.cache.allocate(via.integer(self._new(self._seq())), via.integer(self.random.choice((0, 3, 9))))

    def allocate_batch(self, via):
        ids = [self._new(self._seq()) for _ in range(3)]
        self.cache.allocate_batch(via.array(ids), via.array([1, 5, 8]))

    def adopt(self, via):
        with self._kept(3) as blocks:
            self.cache.adopt(via.integer(103), via.array(blocks[:3]), via.integer(11))

    def adopt_found(self, via):
        session = self.random.choice(self.sessions)
        self.cache.adopt(100 + session.tag, via.array(session.shared_blocks), session.num_tokens)

    def fork(self, via):
        seq = self._seq()
        self.cache.fork(via.integer(seq), via.integer(self._new(seq)))

    def fork_batch(self, via):
        self.cache.fork_batch(via.array([1, 3, 1]), via.array([41, 43, 51]))

    def swap(self, via):
        tag = self.random.choice((1, 2, 3))
        self.cache.swap(via.integer(tag), via.integer(tag + 10))

    def _freed(self, ids):
        table = self.cache._table
        gone = [(seq, table.uid(seq)) for seq in ids]

        def kept():
            return all(uid < 0 or table.uid(seq) != uid for seq, uid in gone)

        return kept, f"a sequence of {ids} is there that was freed"

    @release
    def free(self, via):
        seq = self._seq()
        promise = self._freed([seq])
        self.cache.free(via.integer(seq))
        self.promises.append(promise)

    @release
    def free_batch(self, via):
        ids = [1, 11] if self.random.random() < 0.5 else [3, 12]
        promise = self._freed(ids)
        self.cache.free_batch(via.array(ids))
        self.promises.append(promise)

    def append(self, via):
        self.cache.append(via.integer(self._seq()), via.integer(self.random.choice((0, 1, 6))))

    def append_batch(self, via):
        self.cache.append_batch(via.array([1, 11, 3, 2]))

    def truncate(self, via):
        self.cache.truncate(via.integer(self._seq()), via.integer(self.random.choice((0, 3, 7))))

    def keep_tokens(self, via):
        self.cache.keep_tokens(via.integer(self._seq()), via.array(range(0, self.random.choice((4, 7)), 2)))

    def apply_streaming_llm(self, via):
        return self.cache.apply_streaming_llm(via.integer(self._seq()), via.integer(2), via.integer(4))

    def compact(self, via):
        self.cache.compact(via.integer(self._seq()))

    @pure
    def contains(self, via):
        return via.integer(3) in self.cache, self.cache.num_sequences, self.cache.sequence_ids()

    @pure
    def get_sequence(self, via):
        return [str(self.cache.get_sequence(via.integer(seq))) for seq in (1, 3, 99)]

    @pure
    def block_table(self, via):
        return self.cache.block_table(via.array([1, 2, 3]))

    @pure
    def reference_counts(self, via):
        return self.cache.reference_counts(via.array([0, 1, 2, 69]))

    @pure
    def reports(self, via):
        it = self.cache
        return (
            it.total_blocks,
            it.used_memory_bytes,
            it.eviction_threshold,
            str(it.eviction_strategy),
            it.needs_eviction,
        )

    @pure
    def stats(self, via):
        stats = self.cache.stats()
        return stats.total_allocations, stats.total_frees, stats.total_forks, stats.peak_blocks_used

    @pure
    def texts(self, via):
        return str(self.cache), repr(self.cache), repr(self.handles[0])

    @pure
    def check(self, via):
        self.cache.check()

    def copy_blocks(self, via):
        with self._kept(3) as blocks:
            self.cache.copy_blocks(via.array(blocks), via.array(blocks))

    # -- who leaves

    def with_eviction_strategy(self, via):
        kinds = (EvictionStrategy.LRU(), EvictionStrategy.LongestFirst(), EvictionStrategy.Priority(4))
        self.cache.with_eviction_strategy(self.random.choice(kinds))

    def with_eviction_threshold(self, via):
        self.cache.with_eviction_threshold(via.number(0.8))

    def set_priority(self, via):
        self.cache.set_priority(via.integer(self._seq()), via.integer(2))

    def pin(self, via):
        self.cache.pin(via.integer(self._seq()))

    def unpin(self, via):
        self.cache.unpin(via.integer(self._seq()))

    @pure
    def select_eviction_target(self, via):
        return self.cache.select_eviction_target()

    def evict(self, via):
        return self.cache.evict()

    def evict_to_threshold(self, via):
        return self.cache.evict_to_threshold(via.number(0.3))

    # -- K and V

    def write(self, via):
        seq, layer = self._seq(), self.random.randrange(2)
        k, v = rows(seq % 10, self._anywhere(self.random.choice((1, 6))), layer)
        start = self.random.choice((None, via.integer(0), via.integer(3)))
        self.cache.write(via.integer(layer), via.integer(seq), via.array(k), via.array(v), start)

    @staticmethod
    def _anywhere(n):
        """The positions that rows identify; other calls may have evicted tokens meanwhile."""
        return [-1] * n

    def write_doubles(self, via):
        k, v = rows(1, self._anywhere(4), 1)
        self.cache.write(1, 1, via.array(k.astype(np.float64)), via.array(v.astype(np.float64)), 0)

    def write_batch(self, via):
        k, v = (np.concatenate(sides) for sides in zip(*(rows(tag, [-1], 0) for tag in (3, 1, 3)), strict=True))
        self.cache.write_batch(via.integer(0), via.array([3, 11, 103]), via.array(k), via.array(v))

    def read(self, via):
        return self.cache.read(via.integer(self.random.randrange(2)), via.integer(self._seq()), via.integer(0))

    def _queries(self, n):
        return np.random.default_rng(1).standard_normal((n, 2, DIM)).astype(np.float32)

    def _mixed(self, out):
        assert np.isfinite(out).all()
        # What lies in channel 0 is the last digit of a sequence, or 0 where nothing was written.
        assert out[..., 0].min() >= -1e-4
        assert out[..., 0].max() <= 3 + 1e-4
        return out

    def attention(self, via):
        ids = self.random.choice(([1, 3], [2, 11]))
        return self._mixed(self.cache.attention(via.integer(0), via.array(self._queries(2)), via.array(ids)))

    def attention_with_all(self, via):
        q = self._queries(7)
        out = self.cache.attention(
            1, via.array(q), via.array([3, 1, 13]), query_lens=via.array([4, 2, 1]), scale=via.number(0.3),
            sink_queries=via.array(q), out=np.empty_like(q), return_scores=True, context_lens=via.array([9, 3, 20]),
            return_lse=True,
        )  # fmt: skip
        self._mixed(out[0])
        return out

    # -- handles

    def handle(self, via):
        self.handles.append(self.cache.handle(via.integer(self._seq())))

    @release
    def drop_handle(self, via):
        self.handles.pop()

    def handle_clone(self, via):
        self.handles.append(self.handles[0].clone_handle())

    def handle_reads(self, via):
        it = self.random.choice(self.handles)
        return it.kv_cache(via.integer(1)), it.key_cache(0), it.value_cache(via.integer(0))

    @pure
    def handle_reports(self, via):
        it = self.handles[0]
        table = it.block_table
        return str(it.stats()), it.num_tokens, it.is_valid, it.cache_id, table.physical_blocks, table.sequence_length

    @pure
    def live_table(self, via):
        return self.live.physical_blocks, self.live.sequence_length, self.live.num_blocks, self.live.free_tokens

    def live_resize(self, via):
        self.live.sequence_length = via.integer(self.random.choice((20, 22, 25)))

    def live_extend(self, via):
        self.handles[0].block_table_mut().extend_sequence(1)

    # -- prefixes over them

    def prefix_adopt(self, via):
        tag = self.random.choice((1, 3))
        with self._kept(tag + 10 * self.random.randrange(2)) as blocks:
            text = self._text(tag, SIZE * len(blocks))
            return self.prefix.adopt(via.tokens(text), via.array(blocks), via.name("b"))

    def prefix_insert(self, via):
        k, v = rows(2, self._anywhere(SIZE), 0)
        layers = [k.swapaxes(0, 1).reshape(-1)] * 2
        text = via.tokens(self._text(2, 8))
        return self.prefix.insert(text, via.integer(0), via.items(layers), via.items(layers), via.name("b"))

    def prefix_store(self, via):
        k, v = rows(2, self._anywhere(SIZE), 0)
        layers = [k.swapaxes(0, 1).reshape(-1)] * 2
        block = via.items([via.items([via.array(x) for x in layers]), via.items(layers)])
        return self.prefill.store_blocks(via.tokens(self._text(2, 13)), 0, via.items([block, (layers, layers)]))

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
