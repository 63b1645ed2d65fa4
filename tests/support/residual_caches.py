"""`PagedKvCache` with a residual, small."""

from kvcache import PagedKvCache

LAYERS, HEADS, DIM = 2, 2, 8


def make(length, firsts, *, dtype="q2", num_blocks=400, block_size=4, latent=None, **options):
    sizes = {"latent": latent} if latent else {"num_heads": HEADS, "head_dim": DIM}
    return PagedKvCache(
        num_blocks, block_size, **sizes, num_layers=LAYERS, dtype=dtype, residual_length=length,
        first_tokens=firsts, **options,
    )


def run(cache, seq_id, keys, values, start, stop):
    """Append the tokens [start, stop) and write them."""
    cache.append(seq_id, stop - start)
    for layer in range(cache.num_layers):
        cache.write(layer, seq_id, keys[layer, start:stop], values[layer, start:stop])
