"""Lookups of a `PrefixCache`: 32k cached tokens against a bound in microseconds, and any prompt over namespaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from bench.support.common import Candidate, Case, Table, at_most
from kvcache import PagedKvCache, PrefixAwarePrefill, PrefixCache

__all__ = ["tables"]

LENGTH, BLOCK = 32_768, 16
LOOKUP, PREPARE = 100e-6, 15e-6  # seconds at most
OURS, BOUND = "kvcache", "bound"


def long_prompt() -> tuple[PrefixCache, np.ndarray]:
    """A cache with one prompt, and that prompt."""
    paged = PagedKvCache(LENGTH // BLOCK, BLOCK, 1, 8)
    cache = PrefixCache.over(paged)
    tokens = np.random.default_rng(0).integers(0, 150_000, LENGTH, dtype=np.uint32)
    paged.allocate(0, LENGTH)
    cache.adopt(tokens, paged.block_table([0]).block_ids)
    return cache, tokens


def lookup_case() -> Iterator[Candidate]:
    """Each block is held until it is released by its index, which is not timed."""
    cache, tokens = long_prompt()
    held: list[int] = []

    def release() -> None:
        for block in held:
            cache.release(block)
        held[:] = range(LENGTH // BLOCK)

    yield Candidate(OURS, lambda: cache.lookup(tokens), before=release)
    yield Candidate(BOUND, seconds=LOOKUP)


def prepare_case() -> Iterator[Candidate]:
    """A session that is opened and released."""
    cache, tokens = long_prompt()
    prefill = PrefixAwarePrefill(cache)
    yield Candidate(OURS, lambda: prefill.release_session(prefill.prepare(tokens)[0]))
    yield Candidate(BOUND, seconds=PREPARE)


def namespaces_case(session: Callable[[PrefixCache], object], sizes: tuple[int, ...]) -> Iterator[Candidate]:
    """A block in each namespace, whose numbers are `sizes`."""
    row = [np.zeros(4 * 8, np.float32)]
    for size in sizes:
        cache = PrefixCache(size, 4, 1, 1, 8)
        for name in range(size):
            cache.insert([name % 7, 1, 2, 3], 0, row, row, namespace=name)
        yield Candidate(f"{size:,}", partial(session, cache))


def hit(cache: PrefixCache) -> None:
    """A prompt that is cached."""
    cache.close_session(cache.open_session([0, 1, 2, 3], 0))


def miss(cache: PrefixCache) -> None:
    """A prompt that no namespace has, and why: that is computed, too."""
    cache.close_session(cache.open_session([8, 8, 8, 8, 8], 0))


def tables(sizes: tuple[int, ...]) -> list[Table]:
    """Everything about lookups."""
    within = (at_most(1, OURS, BOUND),)
    spaces = (1, 1_000, 10_000 if sizes[-1] == 10_000 else 100_000)
    flat = (at_most(2, f"{spaces[-1]:,}", "1"),)
    return [
        Table(
            "Prefix cache: 32k cached tokens",
            (Case("lookup", lookup_case, within), Case("prepare and release", prepare_case, within)),
        ),
        Table(
            "Prefix cache: a session, by namespaces",
            tuple(Case(call.__name__, partial(namespaces_case, call, spaces), flat) for call in (hit, miss)),
            growth=True,
        ),
    ]
