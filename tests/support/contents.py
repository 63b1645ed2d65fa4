"""K and V that identify their text: a row depends on the namespace and on every token up to its own.

So rows of other tokens, of another position or of another namespace are detected at once.
"""

import zlib

import numpy as np

from kvcache import CachedKvState

LAYERS = 2


def rows(name, tokens, kv_dim, layers=LAYERS):
    """`(keys, values)`, each a list of float32 `(len(tokens), kv_dim)`: multiples of 1/512, which are exact in f16."""
    seeds, seed = [], zlib.crc32(repr(name).encode())
    for token in tokens:
        seed = zlib.crc32(int(token).to_bytes(4, "little"), seed)
        seeds.append(seed)
    seeds = np.array(seeds, np.uint64)[:, None]
    channel = np.arange(kv_dim, dtype=np.uint64)

    def side(which, layer):
        mixed = (seeds * (2 * channel + 3 + which) + 7 * layer) >> np.uint64(5)
        return ((mixed % 1024).astype(np.float32) - 512) / 512

    return tuple([side(which, layer) for layer in range(layers)] for which in range(2))


def state(name, tokens, kv_dim, layers=LAYERS):
    """The rows as a state for a `PrefixKvCache`."""
    return CachedKvState(*rows(name, tokens, kv_dim, layers), len(tokens))


def pairs(name, tokens, block_size, heads, dim, layers=LAYERS):
    """The rows as blocks for a `PrefixCache`: per block `(keys, values)`, per layer [head][position][dim], flat."""
    keys, values = rows(name, tokens, heads * dim, layers)
    blocks = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        sides = []
        for side in (keys, values):
            cut = [layer[start : start + block_size].reshape(block_size, heads, dim) for layer in side]
            sides.append([layer.swapaxes(0, 1).reshape(-1) for layer in cut])
        blocks.append(tuple(sides))
    return blocks
