"""The stored tokens that each query of a batch sees, as calls of `PagedKvCache.attention`.

Without holes in the mask one call says it all: the queries of a row are its last tokens, and those of its left padding
see nothing. Otherwise each query sees the stored tokens `low` to `high` of its row; queries whose `high` rises one by
one, under one width of the window, are a run: one entry of a call, which ends at the last of these tokens. Calls have
one width of the window each.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.integrations.transformers.rows import Rows

__all__ = ["Call", "calls_for"]

Int64 = npt.NDArray[np.int64]


class Call(NamedTuple):
    """Arguments of one call of `PagedKvCache.attention`.

    Attributes:
        queries: indices of the queries among `(batch, n)`, flattened; None: all of them.
        rows: the row of each entry.
        ids, lens, starts, window, causal: `seq_ids`, `query_lens` and so on.
        shown: where each entry's sequence is to end; None: at its last token.
    """

    queries: Int64 | None
    rows: Int64
    ids: npt.NDArray[np.uint64]
    lens: Int64 | None
    shown: Int64 | None = None
    starts: Int64 | None = None
    window: int | None = None
    causal: bool = True


def calls_for(rows: Rows, n: int, causal: bool, window: int | None) -> list[Call]:
    """The calls for the `n` last tokens of each row as queries; a query that is in none of them sees nothing."""
    key = n, causal, window
    if key not in rows.plans:
        rows.plans[key] = _plan(rows, n, causal, window)
    plan: list[Call] = rows.plans[key]
    return plan


def _plan(rows: Rows, n: int, causal: bool, window: int | None) -> list[Call]:
    every = np.arange(rows.batch)
    if not causal:
        return [Call(None, every, rows.ids, np.full(rows.batch, n), causal=False)]
    if window is not None and rows.length <= window:
        window = None
    starts = None if window is None else rows.first
    if rows.positions is None:
        lens = np.minimum(rows.length - rows.first, n)
        if (lens == n).all():
            return [Call(None, every, rows.ids, None if n == 1 else lens, None, starts, window)]
        queries = np.concatenate([np.arange((row + 1) * n - lens[row], (row + 1) * n) for row in every])
        return [Call(queries, every, rows.ids, lens, None, starts, window)]
    hidden = rows.hidden is not None and bool(rows.hidden[:, rows.length - n :].any())
    if not hidden and window is None:
        return [Call(None, every, rows.ids, None if n == 1 else np.full(rows.batch, n))]
    return _runs(rows, n, window)


def _runs(rows: Rows, n: int, window: int | None) -> list[Call]:
    at = np.arange(rows.length - n, rows.length)
    found: dict[int, list[tuple[int, int, int, int]]] = {}  # width -> (row, first query, queries, tokens shown)
    for row in range(rows.batch):
        positions = rows.positions_of(row)
        high = np.searchsorted(positions, at, "right")
        low = np.zeros(n, np.int64) if window is None else np.searchsorted(positions, at - window + 1)
        width = np.where(low == 0, 0, high - low)  # 0: no limit
        begins = (high[:-1] == low[:-1]) | (np.diff(high) != 1) | (np.diff(width) != 0)  # a run, at the next query
        edges = np.concatenate([[0], np.flatnonzero(begins) + 1, [n]])
        for start, stop in pairwise(edges.tolist()):
            if high[start] > low[start]:
                run = row, row * n + start, stop - start, int(high[stop - 1])
                found.setdefault(int(width[start]), []).append(run)
    calls = []
    for limit, runs in found.items():
        each, starts, lens, shown = np.array(runs, np.int64).T
        queries = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, lens, strict=True)])
        calls.append(Call(queries, each, rows.ids[each], lens, shown, None, limit or None))
    return calls
