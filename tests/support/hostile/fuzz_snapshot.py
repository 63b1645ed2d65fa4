"""Saved caches with every kind of damage: the result is SnapshotError, or fewer but correct K and V.

    python -m hostile.fuzz_snapshot --mutations 100000 [--seed 0]

Half of the mutations are accidental damage: flipped bits, bytes overwritten, removed or inserted, sections swapped or
repeated, counts at their extremes. After them every lookup must return a prefix of the cached rows, bit for bit; every
row identifies its text (contents.py). The other half are forgeries: the same mutations with corrected checksums. Such a
file may contain anything, so the only requirement is SnapshotError, or a cache that keeps its invariants and limits and
remains usable. The process has a memory limit, so code that trusts a count of the file fails here.
"""

import argparse
import collections
import itertools
import logging
import os
import random
import struct
import sys
import tempfile
import zlib

import numpy as np
from hostile.limited_process import limit_memory
from saved_caches import DIM, HEADS, SIZE, get, put

from kvcache import PrefixCache, PrefixCacheConfig, PrefixKvCache, SnapshotError

ROOM = 1 << 29  # bytes that the process may allocate in addition
EXTREMES = (0, 1, 2, 0x7F, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
NAMES = (None, "tenant", ("tenant", 2))


class Original:
    """A cache, possibly with others in the same file, the file, and the rows of each cache for each text."""

    def __init__(self, make, path):
        self.make = make
        rng = np.random.default_rng(0)
        common = rng.integers(0, 50, 70)
        self.texts = []
        for i, cut in enumerate((70, 64, 30, 30, 3, 0)):
            self.texts.append((NAMES[i % 3], [*common[:cut].tolist(), *rng.integers(0, 50, 5 + 7 * i).tolist()]))
        caches = make()
        for cache in caches:
            for name, tokens in self.texts:
                put(cache, name, tokens)
        # Every text in every namespace: a miss must still be a miss after any damage.
        self.texts = [(name, tokens) for name in (*NAMES, "nobody") for _, tokens in self.texts]
        self.full = [[look(cache, name, tokens) for name, tokens in self.texts] for cache in caches]
        caches[0].save(path, model="fuzz", **beside(caches))
        with open(path, "rb") as file:
            self.data = file.read()


def originals(folder):
    """Both kinds, plain and packed, and two caches in one file."""

    def blocks(**formats):
        return PrefixCache(64, SIZE, 2, HEADS, DIM, **formats)

    kinds = [
        lambda: [PrefixKvCache(PrefixCacheConfig(min_prefix_len=1))],
        lambda: [PrefixKvCache(PrefixCacheConfig(min_prefix_len=1, dtype="q4", head_dim=DIM))],
        lambda: [blocks(dtype="f16")],
        lambda: [blocks(key_dtype="q8", value_dtype="q3")],
        lambda: [blocks(dtype="q4"), blocks(dtype="f16")],
    ]
    return [Original(kind, os.path.join(folder, "original")) for kind in kinds]


def beside(caches):
    return {"beside": caches[1:]} if len(caches) > 1 else {}


def look(cache, name, tokens):
    """`(length, rows)`: all K and V of the match, float32 `(sides and layers, length, HEADS * DIM)`."""
    length, keys, values = get(cache, name, tokens)
    return length, np.reshape(keys + values, (4, length, HEADS * DIM))


# -- damage -------------------------------------------------------------------------------------------------


def somewhere(rng, data):
    """A random position, in half of the cases in the header or the tables."""
    return rng.randrange(len(data) if rng.random() < 0.5 else min(len(data), 2200))


def flip(rng, data):
    for _ in range(rng.choice((1, 1, 1, 2, 8, 64))):
        at = somewhere(rng, data)
        data[at] ^= 1 << rng.randrange(8)


def overwrite(rng, data):
    at, length = somewhere(rng, data), rng.choice((1, 4, 16, 64, 4096))
    filler = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length)))
    data[at : at + length] = filler[: len(data) - at]


def truncate(rng, data):
    del data[somewhere(rng, data) :]


def lengthen(rng, data):
    data += rng.choice((bytes, rng.randbytes))(rng.choice((1, 64, 4096, 10000)))


def insert(rng, data):
    at = somewhere(rng, data)
    data[at:at] = rng.randbytes(rng.choice((1, 4, 16, 64, 4096)))


def delete(rng, data):
    at = somewhere(rng, data)
    del data[at : at + rng.choice((1, 4, 16, 64, 4096))]


def swap(rng, data):
    """Swap two sections of one length: entries of a table, pages."""
    length = rng.choice((4, 16, 64, 256, 1024, 4096))
    one, other = (somewhere(rng, data) // length * length for _ in range(2))
    if max(one, other) + length <= len(data):
        data[one : one + length], data[other : other + length] = data[other : other + length], data[one : one + length]


def repeat(rng, data):
    """Overwrite a section with another one."""
    length = rng.choice((4, 16, 64, 256, 1024, 4096))
    one, other = (somewhere(rng, data) // length * length for _ in range(2))
    data[other : other + length] = data[one : one + length][: len(data) - other]


def count(rng, data):
    """Set a number of the header, of an arena or of a segment to one of its extremes."""
    size, at = rng.choice(((4, 8), (4, 12), (8, 16), (8, 24), (8, 32), (8, 40), (8, 48), (4, 56), (4, 60), (4, 64)))
    if rng.random() < 0.5:
        size = rng.choice((4, 8))
        at = rng.randrange(128, min(len(data) - 8, 128 + 64 + 16 * 20), 4)
    value = rng.choice((*EXTREMES, len(data), rng.randrange(100)))
    data[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")


MUTATIONS = (flip, overwrite, truncate, lengthen, insert, delete, swap, repeat, count)


def repair(rng, data):
    """Correct the checksums, mostly also the length, and some checksums of pages."""
    if len(data) < 128:
        return
    if rng.random() < 0.8:
        data[16:24] = len(data).to_bytes(8, "little")
    segments, tokens, pages, names = struct.unpack("<4Q", data[24:56])
    arenas, _, model = struct.unpack("<3I", data[56:68])
    end = 128 + 64 * arenas + 16 * segments + 4 * tokens + 4 * pages + names + model
    if end <= len(data) and rng.random() < 0.5 and pages:
        # The replaced page gets a valid checksum, so nothing can detect it.
        at = 128 + 64 * arenas + 16 * segments + 4 * tokens
        page_bytes = int.from_bytes(data[128 + 28 : 128 + 36], "little")
        first = -(-end // 4096) * 4096
        if page_bytes > 0 and first + page_bytes <= len(data):
            data[first : first + page_bytes] = rng.choice((b"\xff" * page_bytes, rng.randbytes(page_bytes)))
            data[at : at + 4] = zlib.crc32(data[first : first + page_bytes]).to_bytes(4, "little")
    data[68:72] = zlib.crc32(data[128 : min(end, len(data))]).to_bytes(4, "little")
    data[124:128] = zlib.crc32(data[:124]).to_bytes(4, "little")


# -- what must hold -----------------------------------------------------------------------------------------


def loaded(original, path):
    """New caches with the contents of the file; none if it was refused, in which case they must be empty."""
    caches = original.make()
    try:
        caches[0].load(path, model="fuzz", **beside(caches))
    except SnapshotError:
        for cache in caches:
            assert len(cache) == 0
            cache.check()
        return []
    return caches


def damage(original, path):
    """After accidental damage the file is refused, or a part of the original rows is loaded."""
    caches = loaded(original, path)
    if not caches:
        return "refused"
    lost = False
    for cache, texts in zip(caches, original.full, strict=True):
        for (name, tokens), (full, want) in zip(original.texts, texts, strict=True):
            length, rows = look(cache, name, tokens)
            assert length <= full, "more than there was"
            np.testing.assert_array_equal(rows, want[:, :length])
            lost |= length < full
        cache.check()
    return "a part is lost" if lost else "all is found"


def forgery(original, path):
    """After damage with valid checksums the file is refused, or the caches are valid."""
    caches = loaded(original, path)
    if not caches:
        return "refused"
    for cache in caches:
        cache.check()
        for name, tokens in original.texts:
            look(cache, name, tokens)
        cache.check()
        put(cache, "new", [7] * 20)
        assert look(cache, "new", [7] * 20)[0] == 20
        cache.check()
    return "loaded"


def fuzz(mutations, seed, folder):
    """Run the mutations; returns how often each kind had each outcome."""
    outcomes = collections.Counter()
    rng = random.Random(seed)
    cases = itertools.cycle(originals(folder))
    path = os.path.join(folder, "mutant")
    for number in range(mutations):
        original, data = next(cases), None
        # Depends only on the seed and the number, so that a single mutation can be repeated.
        rng.seed(f"{seed} {number}")
        data = bytearray(original.data)
        mutation = rng.choice(MUTATIONS)
        mutation(rng, data)
        forged = rng.random() < 0.5
        if forged:
            repair(rng, data)
        with open(path, "wb") as file:
            file.write(data)
        try:
            outcome = (forgery if forged else damage)(original, path)
        except BaseException:
            print(f"mutation {number} of seed {seed}: {mutation.__name__}", file=sys.stderr)
            raise
        outcomes["forgery" if forged else "damage", mutation.__name__, outcome] += 1
    return outcomes


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mutations", type=int, default=100_000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (default: %(default)s)")
    options = parser.parse_args()
    limit_memory(ROOM)
    logging.disable()  # damage is logged
    with tempfile.TemporaryDirectory() as folder:
        outcomes = fuzz(options.mutations, options.seed, folder)
    columns = ("refused", "a part is lost", "all is found", "loaded")
    print(f"{'':22}" + "".join(f"{column:>16}" for column in columns))
    for kind, mutation in itertools.product(("damage", "forgery"), MUTATIONS):
        numbers = [outcomes[kind, mutation.__name__, column] for column in columns]
        print(f"{f'{kind}, {mutation.__name__}':22}" + "".join(f"{number:16}" for number in numbers))
    print(f"{outcomes.total()} mutations, seed {options.seed}: no crash, no wrong row")
    return 0


if __name__ == "__main__":
    sys.exit(main())
