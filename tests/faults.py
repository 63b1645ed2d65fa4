"""Every allocation of every operation fails once: what `test_faults.py` runs in a process with `failing_malloc.c`.

For each operation of a scene, and n = 1, 2, 3, ... until nothing fails any more: build the object, let the n-th
allocation fail, call the operation. It raises a MemoryError and has changed nothing, or it did without the memory and
has done everything; either way all invariants hold, and the same call then works. Prints one line of counts.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import sys
import traceback
from pathlib import Path
from typing import ClassVar

import numpy as np

from kvcache import (
    CachedKvState,
    CacheManager,
    EvictionPolicy,
    KvCache,
    KVCacheConfig,
    PagedKvCache,
    PrefixCache,
    PrefixCacheConfig,
    PrefixKvCache,
)
from kvcache._entries import EntryTrie
from kvcache._heap import IndexedHeap
from kvcache._idmap import IdMap
from kvcache._pool import BlockPool
from kvcache._roster import Roster
from kvcache._trie import TokenTrie
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams, Transformer

LAYERS, HEADS, DIM, BLOCK = 2, 2, 16, 4
MODEL = Transformer.from_pretrained(Path(__file__).parent / "golden" / "llama")
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=3)


def rows(n, seed, *shape):
    return np.random.default_rng(seed).standard_normal((2, n, *shape)).astype(np.float32)


def plain(x):
    """Arrays as what can be compared, and reads as something when it differs."""
    if isinstance(x, np.ndarray):
        return (str(x.dtype), x.shape, x.tobytes())
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    return tuple(map(plain, x)) if isinstance(x, (list, tuple)) else x


class Scene:
    """An object in a state where its operations have something to do.

    Each method without a leading underscore, but those below, is an operation on `self.it`.
    """

    def __init__(self):
        self.it = self._build()

    def _check(self):
        self.it.check()

    @staticmethod
    def _kept(state):
        """What a call that failed may not have changed."""
        return state

    @classmethod
    def operations(cls):
        return [name for name in vars(cls) if not name.startswith("_")]


class Heap(Scene):
    def _build(self):
        heap = IndexedHeap()
        for id in range(8):
            heap.push(id, id % 3)
        return heap

    def _state(self):
        return sorted((id, self.it.key(id)) for id in range(900) if id in self.it)

    def push(self):
        self.it.push(800, 1.5)


class Ids(Scene):
    def _build(self):
        ids = IdMap()
        for id in range(64):
            ids[id * 977] = id
        return ids

    def _state(self):
        return [(key, self.it[key]) for key in self.it.keys_list()]

    def put(self):
        self.it[10**12] = 5


class Pool(Scene):
    def _build(self):
        pool = BlockPool(2000)
        pool.retain(pool.acquire(700)[:200])
        return pool

    def _state(self):
        it = self.it
        return plain([it.ref_counts(), it.num_free, it.total_allocations, it.total_frees, it.peak_used])

    def new(self):
        BlockPool(2000)

    def acquire(self):
        self.it.acquire(900)

    def retain(self):
        self.it.retain(list(range(600)))

    def release(self):
        self.it.release(list(range(600)))


def sequences(cache):
    """All that a `PagedKvCache` says of itself, without counting as an access."""
    table, stats = cache._table, cache.stats()
    seqs = {}
    for id in table.seq_ids():
        runs = table.runs(id)
        data = [cache._store.read(layer, runs) for layer in range(cache.num_layers)]
        seqs[id] = plain([table.info(id), runs, table.run_positions(id), data])
    counters = (stats.total_allocations, stats.total_frees, stats.total_evictions, stats.total_forks)
    return seqs, counters, cache.free_block_count, cache.select_eviction_target()


class Paged(Scene):
    """Forks that share their tails, a sequence with scattered survivors, and too few rows for one more."""

    def _build(self):
        cache = PagedKvCache(120, BLOCK, HEADS, DIM, num_layers=LAYERS, dtype="f32")
        for seq, n in ((1, 30), (2, 41), (3, 82)):
            cache.allocate(seq, n)
            for layer in range(LAYERS):
                cache.write(layer, seq, *rows(n, seq, HEADS, DIM))
        for seq in (11, 12, 13, 14):
            cache.fork(1, seq)
        cache.fork(3, 4)
        cache.keep_tokens(2, range(0, 41, 2))
        return cache

    def _state(self):
        return sequences(self.it)

    def new(self):
        PagedKvCache(900, BLOCK, HEADS, DIM, num_layers=LAYERS, dtype="q4").allocate(0, 100)

    def allocate(self):
        self.it.allocate(20, 50)

    def allocate_batch(self):
        self.it.allocate_batch(list(range(20, 50)), [1] * 30)

    def adopt(self):
        blocks = self.it.get_sequence(3).block_ids
        self.it.adopt(20, blocks, 82)

    def append(self):
        self.it.append(2, 70)

    def append_to_a_shared_tail(self):
        self.it.append(3, 70)

    def append_batch(self):
        self.it.append_batch([1, 11, 12, 13, 2, 4])

    def fork(self):
        self.it.fork(3, 20)

    def fork_batch(self):
        self.it.fork_batch([3, 1] * 5, list(range(20, 30)))

    def free(self):
        self.it.free(2)

    def free_batch(self):
        self.it.free_batch([2, 4, 11])

    def truncate(self):
        self.it.truncate(3, 30)

    def keep_tokens(self):
        self.it.keep_tokens(3, range(0, 82, 3))

    def compact(self):
        self.it.compact(2)

    def stream(self):
        self.it.apply_streaming_llm(3, 10, 50)

    def write(self):
        self.it.write(1, 3, *rows(82, 9, HEADS, DIM))

    def write_doubles(self):
        self.it.write(1, 2, *rows(15, 9, HEADS, DIM).astype(np.float64))

    def write_batch(self):
        self.it.write_batch(0, [1, 12, 3], *rows(3, 9, HEADS, DIM))

    def read(self):
        self.it.read(1, 3)

    def attention(self):
        queries = rows(25, 9, HEADS * 2, DIM)[0]
        self.it.attention(0, queries, [3, 2], query_lens=[15, 10], return_scores=True)

    def copy_blocks(self):
        self.it.copy_blocks(list(range(0, 30)), list(range(10, 40)))

    def evict(self):
        self.it.evict()

    def evict_to_threshold(self):
        self.it.evict_to_threshold(0.1)

    def reports(self):
        self.it.block_table([1, 2, 3, 4])
        assert self.it.handle(3).block_table.num_blocks
        self.it.stats()
        self.it.with_eviction_strategy(self.it.eviction_strategy)


class CompactShared(Paged):
    """Scattered survivors of which another sequence shares the blocks: they move to fresh ones."""

    def _build(self):
        cache = super()._build()
        cache.fork(2, 20)
        return cache

    def compact(self):
        self.it.compact(2)


def nodes(trie):
    """Cached sequences, pins and counters; not the shape, which may differ between equals."""
    paths = sorted((root, tokens.tolist(), values.tolist()) for root, tokens, values in map(trie.path, trie.leaf_ids()))
    pins = sum(trie.num_pins(id) for id in {*trie.leaf_ids(), *trie.roots()})
    return paths, pins, len(trie), trie.num_entries, trie.roots()


class Trie(Scene):
    def _build(self):
        trie = TokenTrie(BLOCK)
        self.root, other = trie.add_root(), trie.add_root()
        self.text = np.arange(1200, dtype=np.uint32)
        trie.insert(self.root, self.text, np.arange(300, dtype=np.int32))
        fork = np.r_[self.text[:600], self.text[:400]].astype(np.uint32)
        trie.insert(self.root, fork, np.arange(300, 550, dtype=np.int32))
        for i in range(20):
            trie.insert(other, [i] * 8, [600 + 2 * i, 601 + 2 * i])
        return trie

    def _state(self):
        return nodes(self.it)

    def insert_a_fork(self):
        self.it.insert(self.root, np.r_[self.text[:802], self.text[:798]], np.arange(700, 1100))

    def insert_longer(self):
        self.it.insert(self.root, np.r_[self.text, self.text[:800]], np.arange(700, 1200))

    def insert_many(self):
        self.it.insert(self.root, self.text[5:805], np.arange(700, 900))

    def lookup(self):
        self.it.lookup(self.root, self.text[:1100].tolist())

    def touch(self):
        self.it.touch(self.it.match(self.root, self.text)[0], 800)

    def evict_some(self):
        self.it.evict(400)

    def evict_all(self):
        self.it.evict(10_000)

    def remove(self):
        self.it.remove(self.root, self.text)

    def drop_root(self):
        self.it.drop_root(self.root)

    def clear(self):
        self.it.clear()

    def add_root(self):
        self.it.add_root()


class Entries(Scene):
    def _build(self):
        trie = EntryTrie()
        self.root = trie.add_root()
        for n in (400, 800, 600):
            node, _ = trie.insert(self.root, range(n), range(n))
            trie.mark(node)
        node, _ = trie.insert(self.root, [*range(300), *range(500)], range(1000, 1800))
        trie.mark(node)
        return trie

    def _state(self):
        return nodes(self.it)

    def evict_entry(self):
        self.it.evict_entry()

    def evict_entry_but_a_path(self):
        self.it.evict_entry(self.it.match(self.root, range(450))[0])

    def remove(self):
        self.it.remove(self.root, range(800))


class List(Scene):
    def _build(self):
        roster = Roster(True)
        roster.append(300, 300, 4, 100)
        roster.add_scores(np.arange(300) % 7.0)
        return roster

    def _state(self):
        return plain([self.it.positions(), self.it.scores(), self.it.next_position])

    def append(self):
        self.it.append(500, 400, 4, 100)

    def evict(self):
        self.it.evict(100, 4, 50)


class Prefix(Scene):
    """Almost full, with a shared stem, a state that somebody holds, and a second namespace."""

    formats = "f32"

    def _build(self):
        slot = 2 * LAYERS * 16 * 4 if self.formats == "f32" else 2 * LAYERS * (16 // 2 + 4)
        cache = PrefixKvCache(PrefixCacheConfig(max_entries=5, max_memory_bytes=700 * slot, dtype=self.formats))
        self.text = np.arange(2000, dtype=np.uint32)
        self._put(cache, self.text[:200])
        self._put(cache, np.r_[self.text[:100], self.text[:150]])
        self._put(cache, self.text[7:150], "other")
        self.held = cache.lookup(self.text[:180])
        return cache

    @staticmethod
    def _put(cache, tokens, name=None):
        layers = [np.cumsum(np.repeat(tokens.astype(np.float32) + i, 16)) / 1e6 for i in range(LAYERS)]
        cache.store_snapshot(tokens, CachedKvState(layers, layers, len(tokens)), name)

    def _state(self):
        it, content = self.it, {}
        for root, name in it._names.items():
            for leaf in it._trie.leaf_ids():
                top, tokens, slots = it._trie.path(leaf)
                if top == root:
                    arena = it._arena_of[root]
                    data = [arena.rows.read(s, layer, slots) for s in (0, 1) for layer in range(LAYERS)]
                    content[name, tokens.tobytes()] = plain([it._trie.is_marked(leaf), data])
        leases = sum(arena.num_leased() for arena in it._arenas.values())
        return content, it.stats(), leases, nodes(it._trie)[1:4]

    def store(self):
        self._put(self.it, self.text[50:250])

    def store_longer(self):
        self._put(self.it, self.text[:300])

    def store_and_evict(self):
        self._put(self.it, self.text[10:510])

    def store_in_a_new_namespace(self):
        self._put(self.it, self.text[:100], "new")

    def lookup(self):
        self.it.lookup(self.text[:190])

    def lookup_nothing(self):
        self.it.lookup(self.text[1000:])

    def read_what_is_held(self):
        _ = self.held[1].keys, self.held[1].values

    def restore(self):
        self.it.restore(self.held[1], KvCache(LAYERS, 300, 16))

    def remove(self):
        self.it.remove(self.text[:200])

    def clear(self):
        self.it.clear()


class PackedPrefix(Prefix):
    formats = "q4"
    store = Prefix.store
    store_longer = Prefix.store_longer
    store_and_evict = Prefix.store_and_evict
    read_what_is_held = Prefix.read_what_is_held


class Live(Scene):
    def _build(self):
        cache = KvCache(LAYERS, 400, 16)
        k, v = rows(300, 1, 16)
        cache.restore_from_snapshot([k] * LAYERS, [v] * LAYERS, 300)
        return cache

    def _state(self):
        snapshot = self.it.snapshot()
        return plain([snapshot.keys, snapshot.values, self.it._lengths])

    def store_kv(self):
        self.it.store_kv(1, np.ones(16), np.ones(16))

    def snapshot(self):
        self.it.snapshot()

    def restore(self):
        k, v = rows(350, 2, 16).astype(np.float64)
        self.it.restore_from_snapshot([k] * LAYERS, [v] * LAYERS, 350)


def block_cache(cache):
    """All that a `PrefixCache` says of itself."""
    index = cache._index
    stats = dataclasses.replace(cache.stats(), bookkeeping_bytes=0)  # memory may be there, and not in use
    counters = (stats, index.hit_tokens, index.lookup_tokens, dict(index.reasons), index.holds.counts)
    blocks = {}
    for root, name in index._names.items():
        for leaf in index.trie.leaf_ids():
            top, tokens, values = index.trie.path(leaf)
            if top == root:
                data = [cache.get_block(int(value)).keys for value in values]
                blocks[name, tokens.tobytes()] = plain([values, index.used[values], index.born[values], data])
    return blocks, plain(counters), plain(cache._pool.ref_counts()), nodes(index.trie)[1:3]


class Blocks(Scene):
    """A full cache; a session and a lookup hold some of it."""

    def _build(self):
        cache = PrefixCache(48, BLOCK, 1, 1, 8)
        self.text = np.arange(1000, dtype=np.uint32)
        self._put(cache, self.text[:80])
        self._put(cache, np.r_[self.text[:18], self.text[:22]], "b")
        self._put(cache, np.r_[self.text[:20], self.text[:40]])
        self.session = cache.open_session(self.text[:51])
        _, self.found = cache.lookup(self.text[:20])
        return cache

    @staticmethod
    def _put(cache, tokens, name=None, start=0):
        pairs = [([np.full(32, float(i))], [np.full(32, -float(i))]) for i in range(len(tokens) // BLOCK)]
        return cache.store(tokens, start, pairs[start // BLOCK :], name)

    def _state(self):
        return block_cache(self.it)

    @staticmethod
    def _kept(state):
        """All but how often and when: a lookup that found its blocks and cannot hold them has used them."""
        blocks, counters, references, held = state
        return {key: (value[0], value[3]) for key, value in blocks.items()}, counters[-1], references, held

    def store_and_evict(self):
        self._put(self.it, self.text[300:400])

    def store_on_and_evict(self):
        self._put(self.it, self.text[:120], None, 40)

    def store_in_a_new_namespace_and_evict(self):
        self._put(self.it, self.text[300:400], "c")

    def lookup(self):
        self.it.lookup(self.text[:60].tolist())

    def open_session(self):
        self.it.open_session(self.text[:63])

    def close_session(self):
        self.it.close_session(self.session)

    def release(self):
        self.it.release(self.found[0].index)

    def evict(self):
        self.it.evict(20)

    def clear(self):
        self.it.clear()

    def read(self):
        _ = self.it.get_block(3).keys


class Manager(Scene):
    policy = EvictionPolicy.H2O()

    def _build(self):
        manager = CacheManager(KVCacheConfig(400, HEADS, DIM, 4, self.policy))
        for layer in range(LAYERS):
            manager.append(*rows(350, layer, HEADS, DIM), layer_idx=layer)
        manager.update_attention_scores(np.arange(len(manager)) % 5.0)
        return manager

    def _state(self):
        it = self.it
        layers = {i: [it.positions(i), it.attention_scores(i), it.get(range(len(it._layers[i])), i)] for i in it.layers}
        return plain(layers), len(it)

    def append(self):
        self.it.append(*rows(1, 9, HEADS, DIM), layer_idx=1)

    def append_many(self):
        self.it.append(*rows(300, 9, HEADS, DIM), layer_idx=0)

    def append_to_a_new_layer(self):
        self.it.append(*rows(300, 9, HEADS, DIM), layer_idx=2)

    def get(self):
        self.it.get(np.arange(len(self.it))[::-1])

    def attention(self):
        self.it.attention(rows(100, 9, HEADS * 2, DIM)[0], 1, return_scores=True)

    def update_attention_scores(self):
        self.it.update_attention_scores(np.arange(len(self.it)) % 3.0)

    def evict(self):
        self.it.evict(100)


class Pyramid(Manager):
    policy = EvictionPolicy.PyramidKV(3)
    append_many = Manager.append_many
    append_to_a_new_layer = Manager.append_to_a_new_layer


class Engine(Scene):
    options: ClassVar[dict[str, object]] = {}

    def _build(self):
        engine = InferenceEngine(MODEL, prefill_chunk=16, num_blocks=40, **self.options)
        self.text = np.arange(3, 43, dtype=np.uint32)
        engine.prefill_from_pos(self.text, 0)
        return engine

    def _state(self):
        it = self.it
        seqs, _, free, _ = sequences(it.cache)
        content = [entry[3] for _, entry in sorted(seqs.items())]
        return content, free, it.num_tokens, it.prefill_token_count

    def prefill(self):
        self.it.prefill_from_pos(self.text[:37], 40)

    def go_back(self):
        self.it.prefill_from_pos(self.text[:20], 30)

    def decode_step(self):
        self.it.decode_step(7, 40)


class Evicting(Engine):
    """Without memory it compacts later, so the number of free blocks is not the same."""

    options: ClassVar[dict[str, object]] = {"eviction_policy": EvictionPolicy.H2O(), "kv_budget": 24}
    prefill = Engine.prefill
    decode_step = Engine.decode_step

    def _state(self):
        content, _, *rest = super()._state()
        return content, rest


class Served(Scene):
    """Requests give up the sequence before; what must stay is the prefix cache, and that the next one is right."""

    def _build(self):
        cached = PrefixCachedEngine(InferenceEngine(MODEL, prefill_chunk=16, num_blocks=12), 5, strict=True)
        self.text = np.arange(3, 63, dtype=np.uint32)
        cached.generate(self.text[:40], GREEDY)
        cached.generate(self.text[20:60], GREEDY)
        return cached

    def _state(self):
        return self.answer if hasattr(self, "answer") else None

    def _check(self):
        gc.collect()
        self.it.check()
        prefixes = self.it.prefix_cache.cache
        assert prefixes.references().sum() == len(prefixes), "something is pinned or lost"

    def generate(self):
        self.answer = self.it.generate(self.text[:50], GREEDY)

    def stream(self):
        self.answer = list(self.it.stream(self.text[20:55], GREEDY))


def run(scene, name, shim, width):
    """Fail allocation 1, 2, 3, ...; returns `(faults, failed calls, problems)`."""
    clean = scene()
    getattr(clean, name)()
    clean._check()
    after = clean._state()
    faults = failed = 0
    problems = []
    for n in range(1, 100_000):
        here = scene()
        before = here._state()
        operation = getattr(here, name)
        error = None
        gc.collect()
        gc.disable()
        shim.faults_arm(n, width)
        try:
            operation()
        except BaseException as caught:
            error = caught
        hits = shim.faults_disarm()
        gc.enable()
        try:
            trace = "" if error is None else "".join(traceback.format_tb(error.__traceback__)[-5:])
            # NumPy's reductions report a failed allocation by no exception at all, which Python makes a SystemError.
            numpys = isinstance(error, SystemError) and "without exception set" in str(error)
            if error is not None and not isinstance(error, MemoryError) and not numpys:
                raise AssertionError(f"a {type(error).__name__}, not a MemoryError") from error
            assert hits or error is None, "it failed without a fault"
            error = None
            here._check()
            # Of a prefix cache, what left to make room has left, whether or not that was enough.
            evicted = "evict" in name and issubclass(scene, (Prefix, Blocks))
            if not (trace and evicted):
                here_is, was = here._state(), before if trace else after
                kept = here._kept if trace else lambda state: state
                assert kept(here_is) == kept(was), "the state has changed"
            if trace:
                operation()
                here._check()
                assert evicted or here._kept(here._state()) == here._kept(after), "the second call did something else"
        except BaseException:
            problems.append(f"{scene.__name__}.{name}, allocation {n}: {traceback.format_exc()}it failed at\n{trace}")
        if not hits:
            return faults, failed, problems
        faults += hits
        failed += bool(trace)
    raise AssertionError(f"{scene.__name__}.{name}: no end of allocations")


SET_HANDLER = 304  # PyDataMem_SetHandler in NumPy's table of C functions, the same in every version


def load_shim():
    """The functions of `failing_malloc.c`, through which NumPy now allocates arrays."""
    shim, python = ctypes.CDLL(None), ctypes.pythonapi
    shim.faults_arm.argtypes = [ctypes.c_long, ctypes.c_long]
    shim.faults_disarm.restype = ctypes.c_long
    shim.faults_handler.restype = ctypes.c_void_p
    python.PyCapsule_GetPointer.restype = ctypes.c_void_p
    python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    python.PyCapsule_New.restype = ctypes.py_object
    python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    table = python.PyCapsule_GetPointer(np._core._multiarray_umath._ARRAY_API, None)
    functions = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))
    set_handler = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(functions[SET_HANDLER])
    set_handler(python.PyCapsule_New(shim.faults_handler(), b"mem_handler", None))
    return shim


def main(scene_name, width):
    shim = load_shim()
    scene = globals()[scene_name]
    gc.freeze()  # so that each gc.collect() looks at what the scene made, and not at all of NumPy
    operations, faults, failed, problems = scene.operations(), 0, 0, []
    for name in operations:
        if not callable(getattr(scene, name)):  # a setting of the scene
            continue
        more, bad, wrong = run(scene, name, shim, width)
        faults, failed, problems = faults + more, failed + bad, problems + wrong
    for problem in problems[:40]:
        print(problem)
    counts = f"{len(operations)} operations, {faults} faults, {failed} failed calls, {len(problems)} problems"
    print(f"{scene_name}: {counts}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
