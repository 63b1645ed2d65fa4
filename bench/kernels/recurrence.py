"""Cases of `bench kernels`: the recurrence of layers with a state, beside the arithmetic peak of the machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from bench.support.blas import set_threads
from bench.support.ceilings import fma
from bench.support.common import Candidate, Case, share_of
from bench.support.rates import Columns
from kvcache.kernels.layers import scan, scan_floats

__all__ = ["RECURRENCE", "recurrence_cases"]

SCAN, PEAK = "scan", "FMA peak"
RECURRENCE = Columns((SCAN,), ceilings=lambda _: (PEAK,), unit="GFLOP/s")


class Heads(NamedTuple):
    """Heads of one layer; `operations` on the units of a fused multiply-add for each number of a state and token."""

    what: str
    heads: int
    groups: int
    size: int
    dim: int
    operations: int
    skips: bool = False
    by_channel: bool = False


KINDS = (
    Heads("gated delta rule, 16 heads of 128 x 128", 16, 16, 128, 128, 4),  # k @ S, decay, outer product, q @ S
    Heads("Kimi delta attention, 16 heads of 128 x 128", 16, 16, 128, 128, 4, by_channel=True),
    Heads("Mamba2, 48 heads of 128 x 64", 48, 1, 128, 64, 3, True),  # decay, outer product, q @ S
)


def recurrence_cases(tokens: Sequence[int], threads: Sequence[int]) -> Iterator[Case]:
    """One text of each number of `tokens`; the peak is the time of its fused multiply-adds."""
    for kind in KINDS:
        for count in threads:
            for n in tokens:
                least = 0.8 if kind.by_channel else 0.85
                claims = (share_of(least, SCAN, PEAK),) if n > 1 and not kind.skips else ()
                yield Case(f"{kind.what}, {n} tokens, {count} thr", partial(_candidates, kind, n, count), claims)


def _candidates(kind: Heads, n: int, threads: int) -> Iterator[Candidate]:
    set_threads(threads)
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) * np.float32(kind.size**-0.5)

    size = scan_floats(kind.heads, kind.size, kind.dim)
    memory = np.zeros(size + 15, np.float32)  # a state begins at a multiple of 64 bytes, as those of engines do
    first = -memory.ctypes.data // 4 % 16
    slots = memory[first : first + size].reshape(1, size)
    both, values = normal(n, 2 * kind.groups, kind.size), normal(n, kind.heads, kind.dim)
    decays = np.full((n, kind.heads, kind.size) if kind.by_channel else (n, kind.heads), 0.9, np.float32)
    steps = np.full((n, kind.heads), 0.9, np.float32)
    skip = np.ones(kind.heads, np.float32) if kind.skips else None
    index, lens = np.array([0]), np.array([n])
    keys, queries = both[:, kind.groups :], both[:, : kind.groups]
    work = 2.0 * kind.operations * kind.size * kind.dim * kind.heads * n
    run = partial(scan, keys, queries, values, decays, steps, skip, slots, 0, index, lens, False)
    yield Candidate(SCAN, run, facts={"work": work})
    peak, flop = fma(threads)
    yield Candidate(PEAK, peak, flop / work, facts={"work": work})
