"""Attention over a context in parts: each part attended alone, and the parts merged exactly."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvcache.core.arguments import as_floats, as_output, as_sinks
from kvcache.paged.blending import blend

__all__ = ["Parts", "merge_attention"]

Float32 = npt.NDArray[np.float32]

_NONE = np.float32(-1e30)  # the logarithm of nothing, as a number


def merge_attention(
    out_a: npt.ArrayLike, lse_a: npt.ArrayLike, out_b: npt.ArrayLike, lse_b: npt.ArrayLike
) -> tuple[Float32, Float32]:
    """Attention over two disjoint parts of a context, from the attention over each.

    With `o` the outputs and `l` the log-sum-exps of the parts, the whole is `(e^la oa + e^lb ob) / (e^la + e^lb)` with
    the log-sum-exp `log(e^la + e^lb)`: exact but for rounding, whatever cache or format the parts lie in. Source: Ye
    et al., "FlashInfer" (arXiv 2501.01005), section 2.2, after Milakov and Gimelshein (arXiv 1805.02867).

    Args:
        out_a, out_b: `(num_queries, num_query_heads, dim)`, from `PagedKvCache.attention(..., return_lse=True)`.
        lse_a, lse_b: `(num_queries, num_query_heads)`, from the same calls; -inf where a part had no token.

    Returns:
        `(out, lse)`, float32, shaped like those of the parts, and fit to be merged further.

    Raises:
        TypeError, ValueError: shapes that do not agree, or dtypes that are no floats.
    """
    a = as_floats(out_a, (None, None, None), "out_a")
    b = as_floats(out_b, a.shape, "out_b")
    la = as_floats(lse_a, a.shape[:2], "lse_a")
    lb = as_floats(lse_b, a.shape[:2], "lse_b")
    with np.errstate(invalid="ignore"):
        log_odds = la - lb
    log_odds[np.isneginf(la)] = -np.inf  # also where both are empty
    return blend(a, b, log_odds), np.logaddexp(la, lb)


class Attention(Protocol):
    """`SequenceAttention`, or what attends as it does."""

    def over(self, *args: Any, **options: Any) -> Any:
        """As of `SequenceAttention`."""


class Parts:
    """Groups of queries, each of which reads the unpacked tokens of one sequence and packed ones of another.

    Args:
        near: ids of the unpacked sequences, integers `(n,)`.
        far: ids of the packed ones.
        counts: queries of each.
        contexts: packed tokens that they see; None: all before each query, and itself.
        skipped: how many first ones of these each query reads unpacked: a number, or integers `(n,)`.
        causal: False: a query sees all unpacked tokens of its sequence.
    """

    def __init__(
        self, near: npt.ArrayLike, far: npt.ArrayLike, counts: npt.ArrayLike, contexts: npt.ArrayLike | None,
        skipped: npt.ArrayLike = 0, causal: bool = True,
    ) -> None:  # fmt: skip
        self._near, ids = np.array(near, np.uint64), np.array(far, np.uint64)
        self._counts, self._causal = np.array(counts, np.int64), causal
        shown = None if contexts is None else np.array(contexts, np.int64)
        # Of each number of tokens that are skipped: the queries (None: all), their groups, and what they read, if any.
        self._far: list[tuple[Any, npt.NDArray[np.int64], tuple[Any, ...], int]] = []
        if isinstance(skipped, int):
            if shown is None or shown.any():
                self._far.append((None, np.arange(len(ids)), (ids, self._counts, shown), skipped))
            return
        skips = np.array(skipped, np.int64)
        for skip in np.unique(skips if shown is None else skips[shown > 0]).tolist():
            one = skips == skip
            rows = None if one.all() else np.repeat(one, self._counts)
            what = ids[one], self._counts[one], None if shown is None else shown[one]
            self._far.append((rows, np.flatnonzero(one), what, skip))

    def attend(
        self, layer: int, near: Attention, far: Attention, queries: npt.NDArray[Any], *,
        scale: float | None = None, softcap: float | None = None, sinks: npt.ArrayLike | None = None, out: Any = None,
        return_lse: bool = False,
    ) -> tuple[Float32, Float32]:  # fmt: skip
        """Attend to both, and merge: outputs and log-sum-exps; without `return_lse` the latter are of no use.

        Args:
            near, far: attention over the unpacked and the packed tokens. The latter counts no access.
            sinks: they join the normaliser once, beside the unpacked tokens. All others are those of
                `PagedKvCache.attention`.
        """
        # Called once per layer of a step: in the order of the arguments, which takes half as long as by name.
        mixed, lse = near.over(layer, queries, self._near, self._counts, scale, None, out, False,
                               None, True, None, softcap, sinks, None, self._causal, None, 0)  # fmt: skip
        for rows, _, (ids, counts, contexts), skip in self._far:
            own = queries if rows is None else queries[rows]
            more, more_lse = far.over(layer, own, ids, counts, scale, None, None, False,
                                      contexts, True, None, softcap, None, None, True, None, skip, False)  # fmt: skip
            if out is None and rows is None and not return_lse:
                mixed = blend(more, mixed, more_lse - lse)
                continue
            which, to = ... if rows is None else rows, as_output(mixed)
            log_odds = more_lse - lse[which]
            lse[which] = np.logaddexp(more_lse, lse[which])
            to[which] = blend(more, to[which], log_odds)
        return mixed, lse

    def attend_with_masses(
        self, layer: int, near: Attention, far: Attention, queries: npt.NDArray[Any], by: Any, *,
        scale: float | None = None, softcap: float | None = None, sinks: npt.ArrayLike | None = None, out: Any = None,
    ) -> tuple[Any, Float32, Float32, dict[int, Float32]]:  # fmt: skip
        """As `attend`, and the attention mass on the tokens.

        What a query reads in the other part joins its normaliser as a sink. So each part returns its share of the
        output and of the masses, which add up. The unpacked tokens, which are few, are attended twice.

        Args:
            by: `return_scores` of `PagedKvCache.attention`.

        Returns:
            Outputs, log-sum-exps, the masses on all unpacked tokens, and those on the packed ones of each group that
            sees some, by its number.
        """

        def over_near(own_sinks: Float32 | None, masses: Any, to: Any) -> Any:
            return near.over(layer, queries, self._near, self._counts, scale, None, to, masses,
                             None, True, None, softcap, own_sinks, None, self._causal, None, 0)  # fmt: skip

        alone = over_near(None, False, None)[1]
        lse = alone if sinks is None else np.logaddexp(alone, as_sinks(sinks, queries.shape[:2]))
        lse = np.fmax(lse, _NONE)  # NaN too, of queries that are not finite
        shares: list[tuple[Any, Float32]] = []
        drawn: dict[int, Float32] = {}
        for rows, which, (ids, counts, contexts), skip in self._far:
            own, some = (queries, ...) if rows is None else (queries[rows], rows)
            share, drawn_there, total = far.over(layer, own, ids, counts, scale, None, None, by, contexts, True, None,
                                                 softcap, lse[some], None, True, None, skip, False)  # fmt: skip
            shares.append((some, share))
            lse[some] = total
            stop = 0
            for group, context in zip(which.tolist(), contexts.tolist(), strict=True):
                drawn[group], stop = drawn_there[..., stop : stop + context], stop + context
        with np.errstate(divide="ignore"):  # of queries that see no packed tokens
            rest = lse + np.log1p(-np.exp(np.minimum(alone - lse, 0.0)))
        mixed, masses, _ = over_near(np.fmax(rest, _NONE), by, out)
        to = as_output(mixed)
        for some, share in shares:
            to[some] += share
        return mixed, lse, masses, drawn
