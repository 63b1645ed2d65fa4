"""A request never gets K and V of other tokens or of another namespace: in every cache, in memory and from a file.

Every test comes in a pair: where nothing may be shared, nothing is; where it may, it is, so that the first half is no
matter of a cache that finds nothing. K and V say of which text and namespace they are (contents.py).
"""

import functools
import itertools
import zlib

import numpy as np
import pytest
from contents import LAYERS, pairs, rows, state
from pace import FAST

from kvcache import PagedKvCache, PrefixCache, PrefixCacheConfig, PrefixKvCache
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams

SIZE, HEADS, DIM = 4, 2, 8
# Names that a join, a repr, a hash or a conversion would mistake for each other. (1 and True are one name in Python.)
NAMES = (None, "None", "", b"", "a", b"a", "a/b", ("a", "b"), ("a/b",), (("a", "b"),), "1", 1, -1, -2, ())


class Entries:
    """`PrefixKvCache`."""

    def __init__(self, folder):
        self.path = folder / "cache"
        self.cache = PrefixKvCache(PrefixCacheConfig(min_prefix_len=1))

    def put(self, name, tokens):
        self.cache.store_snapshot(tokens, state(name, tokens, HEADS * DIM), namespace=name)

    def get(self, name, tokens):
        """The number of tokens that are found; AssertionError if their K and V are of another text."""
        hit = self.cache.lookup(tokens, namespace=name)
        if hit is None:
            return 0
        want = rows(name, tokens[: hit[0]], HEADS * DIM)
        np.testing.assert_array_equal(np.concatenate(hit[1].keys + hit[1].values), np.reshape(want, -1))
        return hit[0]


class Blocks:
    """`PrefixCache` with blocks of its own."""

    def __init__(self, folder):
        self.path = folder / "cache"
        self.cache = PrefixCache(5000, SIZE, LAYERS, HEADS, DIM)

    def put(self, name, tokens):
        self.cache.store(tokens, 0, pairs(name, tokens, SIZE, HEADS, DIM), namespace=name)

    def get(self, name, tokens):
        length, blocks = self.cache.lookup(tokens, namespace=name)
        for block, want in zip(blocks, pairs(name, tokens[:length], SIZE, HEADS, DIM), strict=True):
            np.testing.assert_array_equal(np.concatenate(block.keys + block.values), np.reshape(want, -1))
            self.cache.release(block.index)
        return length


class Paged:
    """`PrefixCache` over the blocks of a `PagedKvCache`: sequences share them, a partly matched one too."""

    def __init__(self, folder):
        self.path = folder / "cache"
        self.paged = PagedKvCache(5000, SIZE, HEADS, DIM, num_layers=LAYERS, dtype="f32")
        self.cache = PrefixCache.over(self.paged)

    def put(self, name, tokens):
        with self.cache.open_session(tokens, name) as session:
            self.paged.adopt(0, session.shared_blocks, session.num_tokens)
            start = session.num_tokens
            self.paged.append(0, len(tokens) - start)
            for layer, (keys, values) in enumerate(zip(*rows(name, tokens, HEADS * DIM), strict=True)):
                new = (x[start:].reshape(-1, HEADS, DIM) for x in (keys, values))
                self.paged.write(layer, 0, *new, start=start)
            self.cache.adopt(tokens, self.paged.get_sequence(0).block_ids, name)
        self.paged.free(0)

    def get(self, name, tokens):
        with self.cache.open_session(tokens, name) as session:
            self.paged.adopt(0, session.shared_blocks, session.num_tokens)
            for layer, want in enumerate(zip(*rows(name, tokens[: session.num_tokens], HEADS * DIM), strict=True)):
                for got, side in zip(self.paged.read(layer, 0), want, strict=True):
                    np.testing.assert_array_equal(got.reshape(-1, HEADS * DIM), side)
        self.paged.free(0)
        return session.num_tokens


class FromFile:
    """Another cache, saved and loaded before each lookup."""

    def __init__(self, tier, folder):
        self.tier, self.folder, self.dirty = tier, folder, True
        self.kept = tier(folder)

    def put(self, name, tokens):
        self.kept.put(name, tokens)
        self.dirty = True

    def get(self, name, tokens):
        if self.dirty:
            self.kept.cache.save(self.kept.path)
            self.loaded, self.dirty = self.tier(self.folder), False
            self.loaded.cache.load(self.kept.path)
        length = self.loaded.get(name, tokens)
        self.loaded.cache.check()
        return length


TIERS = [Entries, Blocks, Paged, *(functools.partial(FromFile, tier) for tier in (Entries, Blocks, Paged))]
TIER_IDS = ["entries", "blocks", "paged", "saved entries", "saved blocks", "saved paged"]
in_every_tier = pytest.mark.parametrize("tier", TIERS, ids=TIER_IDS)


@in_every_tier
def test_every_namespace_finds_its_own_and_nothing_else(tmp_path, tier):
    """Each namespace in turn: before it has stored a text it finds nothing of it, although all others have it."""
    cache, text = tier(tmp_path), [5, 6, 7, 8] * 4
    for i, name in enumerate(NAMES):
        for other in NAMES[i:]:
            assert cache.get(other, text) == 0
        cache.put(name, text)
        for other in NAMES[: i + 1]:
            assert cache.get(other, text) == len(text)


@in_every_tier
def test_no_part_of_a_block_crosses_a_namespace(tmp_path, tier):
    """Within one namespace a tail is shared to the token; across namespaces not a single token is."""
    cache, text = tier(tmp_path), list(range(16))
    cache.put("a", text)
    for cut in range(1, 16):
        asked = [*text[:cut], 99, 99, 99, 99]
        assert cache.get("b", asked) == 0
        assert cache.get("a", asked) in (cut, cut // SIZE * SIZE)  # a lookup of blocks gives whole ones


@in_every_tier
def test_what_has_left_one_namespace_stays_in_the_other(tmp_path, tier):
    cache, text = tier(tmp_path), [3] * 16
    cache.put("a", text)
    cache.put("b", text)
    kept = cache.kept if isinstance(cache, FromFile) else cache
    if isinstance(kept, Entries):
        assert kept.cache.remove(text, namespace="a")
    else:
        while kept.get("a", text):
            kept.get("b", text)  # so that the blocks of a are older
            assert kept.cache._index.evict(1)
    assert (cache.get("a", text), cache.get("b", text)) == (0, 16)


# -- the engine ---------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.mark.parametrize("options", [{}, {"dtype": "q4", "residual_length": 48}], ids=["f32", "residual"])
@pytest.mark.parametrize("saved", [False, True], ids=["in memory", "from a file"])
def test_an_engine_prefills_all_of_a_prompt_that_another_namespace_has(tmp_path, network, saved, options):
    """This includes the group that the prompt ends in, which is kept in full."""
    cached = PrefixCachedEngine(InferenceEngine(network, **options), 256, strict=True)
    prompt = np.arange(100, 172)
    want = cached.generate(prompt, GREEDY, namespace="a")
    if saved:
        cached.save(tmp_path / "cache")
        cached = PrefixCachedEngine(InferenceEngine(network, **options), 256, strict=True)
        assert cached.load(tmp_path / "cache") == 4
    for name, new in (("b", 72), ("a", 8), (None, 72), ("b", 8), ((b"a",), 72), ("a", 8)):
        before = cached.inner.prefill_token_count
        assert cached.generate(prompt, GREEDY, namespace=name) == want
        assert cached.inner.prefill_token_count - before == new
        cached.check()


# -- tokens that hashes take for each other -----------------------------------------------------------------

CANDIDATES = np.random.default_rng(0).integers(0, 50_000, (300_000, SIZE)).astype(np.uint64)
ORIGINAL = ([137, 12, 7, 7], [309, 357, 7, 7])  # the original returned K and V of one for the other


def fnv_folded(blocks):
    """A 64-bit FNV-1a over token ids, its halves folded together: the edge key of the original."""
    value = np.full(len(blocks), 0xCBF29CE484222325, np.uint64)
    for column in blocks.T:
        value = (value ^ column) * np.uint64(0x100000001B3)
    return (value >> np.uint64(32)) ^ (value & np.uint64(0xFFFFFFFF))


def polynomial(blocks):
    value = np.zeros(len(blocks), np.uint64)
    for column in blocks.T:
        value = (value * np.uint64(31) + column) & np.uint64(0xFFFFFFFF)
    return value


def checksum(blocks):
    return np.array([zlib.crc32(block) for block in blocks.astype("<u4")], np.uint64)


def half_of_pythons_hash(blocks):
    return np.array([hash(tuple(block)) & 0xFFFFFFFF for block in blocks.tolist()], np.uint64)


def total(blocks):
    return blocks.sum(axis=1)


def slot_of_children(blocks):
    """The slots of these texts below the first root in a table of children of 4096 slots."""
    value = blocks[:, 0].copy()
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        value = (value ^ (value >> np.uint64(33))) * np.uint64(factor)
    return (value ^ (value >> np.uint64(33))) & np.uint64(4095)


HASHES = [fnv_folded, polynomial, checksum, half_of_pythons_hash, total, slot_of_children]


@functools.cache
def colliding(hashes):
    """Pairs of blocks that begin with different tokens and have the same hash; no block is in two pairs."""
    keys = hashes(CANDIDATES)
    order = np.argsort(keys, kind="stable")
    found, seen = [], set()
    for i in np.flatnonzero(keys[order][1:] == keys[order][:-1]).tolist():
        pair = CANDIDATES[order[i : i + 2]].tolist()
        firsts = {pair[0][0], pair[1][0]}
        if len(firsts) == 2 and not firsts & seen and len(found) < 50:
            found.append(pair)
            seen |= firsts
    return found


@pytest.mark.exhaustive
@pytest.mark.one_build
def test_the_search_finds_what_collided_in_the_original():
    """Verify that the search for collisions finds known ones."""
    keys = fnv_folded(np.array(ORIGINAL, np.uint64))
    assert keys[0] == keys[1]
    for hashes in HASHES:
        assert len(colliding(hashes)) >= 4, hashes.__name__
        for pair in colliding(hashes):
            keys = hashes(np.array(pair, np.uint64))
            assert keys[0] == keys[1]


@in_every_tier
@pytest.mark.parametrize("hashes", HASHES, ids=lambda hashes: hashes.__name__)
def test_blocks_of_one_hash_are_two_blocks(tmp_path, tier, hashes):
    """A block stored behind one of a pair is found behind that one, not behind the other."""
    cache, after = tier(tmp_path), [1, 2, 3, 4]
    found = [*colliding(hashes)[: 2 if FAST else 50], ORIGINAL]
    for one, _ in found:
        cache.put("n", one + after)
    for one, other in found:
        assert cache.get("n", one + after) == 8
        assert cache.get("n", other + after) == 0
    for _, other in found:
        cache.put("n", other + after)
    for text in itertools.chain(*found):
        assert cache.get("n", text + after) == 8
