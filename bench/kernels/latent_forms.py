"""Cases of `bench kernels`: latent attention in its two forms, absorbed and with K and V of each head.

Absorbed, each query meets the latents themselves: a key and a value are longer than those of a head, and all heads read
one row. In the other form a pass first makes K and V of every head of all tokens before it, or keeps them instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt

from bench.support.blas import set_threads
from bench.support.common import Candidate, Case
from bench.support.rates import Columns
from bench.support.scattered import scatter
from kvcache.kernels.matrix import Matrix
from kvcache.networks.latent import times_heads
from kvcache.paged.cache import PagedKvCache

__all__ = ["ABSORBED", "KEPT", "LATENT", "MADE", "Forms", "latent_cases", "latent_title"]

Float32 = npt.NDArray[np.float32]

HEADS, LATENT_SIZE, TURNED, PLAIN, VALUE = 20, 512, 64, 192, 256  # GLM-4.7-Flash
ABSORBED, MADE, KEPT, MAKING = "absorbed", "K and V of heads", "the same, kept", "making them"
LATENT = Columns((ABSORBED, MADE, KEPT, MAKING), rivals=(ABSORBED,))
BLOCK = 16


def latent_title() -> str:
    """The title of the table; it says how much more memory K and V of each head take."""
    more = HEADS * (PLAIN + TURNED + VALUE) / (LATENT_SIZE + TURNED)
    return f"9. Latent attention in two forms; K and V of each head, if kept, take {more:.1f} times the memory"


class Forms:
    """A layer of latent attention over one text, from queries and latents to the results of all heads.

    Args:
        context: tokens, the queries' own among them.
        rows: queries, of the last tokens.
        dtype: storage format of latents, and of K and V of heads.
        weights: format of the matrices of each head, as of `Matrix`.

    Attributes:
        queries: `(rows, HEADS, PLAIN + TURNED)`, turned.
        latents: `(context, LATENT_SIZE)`; `turned`, `(context, TURNED)`, are the keys' other channels.
    """

    def __init__(self, context: int, rows: int, dtype: str, weights: str = "q8_0") -> None:
        rng = np.random.default_rng(0)
        self.queries = rng.standard_normal((rows, HEADS, PLAIN + TURNED), np.float32)
        self.latents = rng.standard_normal((context, LATENT_SIZE), np.float32)
        self.turned = rng.standard_normal((context, TURNED), np.float32)
        scale = np.float32(LATENT_SIZE**-0.5)
        keys = rng.standard_normal((HEADS, PLAIN, LATENT_SIZE), np.float32) * scale
        values = rng.standard_normal((HEADS, VALUE, LATENT_SIZE), np.float32) * scale
        self._absorbing = [_matrix(each.T, weights) for each in keys]
        self._values = [_matrix(each, weights) for each in values]
        self._both = _matrix(np.concatenate([keys, values], axis=1).reshape(-1, LATENT_SIZE), weights)
        self._rows, self._context = np.array([rows]), context
        blocks, sequence = -(-context // BLOCK), np.array([1], np.uint64)
        self._short = PagedKvCache(blocks, BLOCK, latent=(LATENT_SIZE, TURNED), dtype=dtype)
        self._long = PagedKvCache(blocks, BLOCK, HEADS, PLAIN + TURNED, value_head_dim=VALUE, dtype=dtype)
        for cache in (self._short, self._long):
            scatter(cache, sequence, [context])
        self._short.write(0, 1, np.concatenate([self.latents, self.turned], axis=1)[:, None], None)
        self._keys = np.empty((context, HEADS, PLAIN + TURNED), np.float32)
        self.make()

    def absorbed(self) -> Float32:
        """Attention over the latents; `(rows, HEADS, VALUE)`."""
        rows = len(self.queries)
        queries = np.empty((rows, HEADS, LATENT_SIZE + TURNED), np.float32)
        queries[:, :, :LATENT_SIZE] = times_heads(self.queries[:, :, :PLAIN], self._absorbing, "int8")
        queries[:, :, LATENT_SIZE:] = self.queries[:, :, PLAIN:]
        return times_heads(self._attend(self._short, queries), self._values, "int8")

    def make(self) -> None:
        """K and V of each head of all tokens, written to a cache of theirs."""
        both = self._both.multiply(self.latents).reshape(self._context, HEADS, PLAIN + VALUE)
        self._keys[:, :, :PLAIN], self._keys[:, :, PLAIN:] = both[:, :, :PLAIN], self.turned[:, None]
        self._long.write(0, 1, self._keys, both[:, :, PLAIN:])

    def kept(self) -> Float32:
        """Attention over K and V of each head as they were made last; as `absorbed`."""
        return self._attend(self._long, self.queries)

    def made(self) -> Float32:
        """K and V of each head made for the queries, and attention over them; as `absorbed`."""
        self.make()
        return self.kept()

    def _attend(self, cache: PagedKvCache, queries: Float32) -> Float32:
        return cache.attention(0, queries, [1], query_lens=self._rows, scale=(PLAIN + TURNED) ** -0.5)


def _matrix(weights: Float32, dtype: str) -> Matrix:
    matrix = Matrix(*weights.shape, dtype)
    matrix.put(0, weights)
    return matrix


def latent_cases(
    contexts: Iterable[int], rows: Iterable[int], dtypes: Iterable[str], threads: Iterable[int]
) -> Iterator[Case]:
    """Both forms for each number of queries."""
    for context, dtype, count, n in product(contexts, dtypes, threads, rows):
        yield Case(f"{n} rows over {context // 1024}k, {dtype}, {count} thr", partial(_forms, context, n, dtype, count))


def _forms(context: int, rows: int, dtype: str, threads: int) -> Iterator[Candidate]:
    set_threads(threads)
    forms = Forms(context, rows, dtype)
    for name, run in ((ABSORBED, forms.absorbed), (MADE, forms.made), (KEPT, forms.kept), (MAKING, forms.make)):
        yield Candidate(name, run)
