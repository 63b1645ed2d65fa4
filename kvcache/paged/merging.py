"""Attention over a context in parts: each part attended alone, and the parts merged exactly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcache.kernels.functions import merge_parts
from kvcache.support.arguments import as_floats

__all__ = ["merge_attention"]

Float32 = npt.NDArray[np.float32]


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
    mixed, masses, rows = np.array(b, order="C"), np.array(lb, order="C"), np.arange(len(b) + 1)
    merge_parts(rows, rows[:-1], np.ascontiguousarray(a), np.ascontiguousarray(la), mixed, masses)
    return mixed, masses
