"""Attention over sequences: the method of `PagedKvCache` about it, and the types of its results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvcache.paged.cache import PagedKvCache

__all__ = ["AttentionOptions", "attention"]

Float32 = npt.NDArray[np.float32]
Out = TypeVar("Out")
No = Literal[False]
Yes = Literal[True]
Scored = Literal[True, "head"]


class AttentionOptions(TypedDict, total=False):
    """The options of `PagedKvCache.attention` that do not change what it returns."""

    query_lens: npt.ArrayLike | None
    scale: float | None
    sink_queries: npt.ArrayLike | None
    context_lens: npt.ArrayLike | None
    window: int | None
    softcap: float | None
    sinks: npt.ArrayLike | None
    starts: npt.ArrayLike | None
    causal: bool
    mask: npt.ArrayLike | None
    skip_tokens: int


@overload
def attention(
    cache: PagedKvCache, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, *,
    out: None = None, return_scores: No = False, return_lse: No = False, **options: Unpack[AttentionOptions],
) -> Float32: ...
@overload
def attention(
    cache: PagedKvCache, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, *,
    out: None = None, return_scores: Scored, return_lse: No = False, **options: Unpack[AttentionOptions],
) -> tuple[Float32, Float32]: ...
@overload
def attention(
    cache: PagedKvCache, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, *,
    out: None = None, return_scores: No = False, return_lse: Yes, **options: Unpack[AttentionOptions],
) -> tuple[Float32, Float32]: ...
@overload
def attention(
    cache: PagedKvCache, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, *,
    out: None = None, return_scores: Scored, return_lse: Yes, **options: Unpack[AttentionOptions],
) -> tuple[Float32, Float32, Float32]: ...
@overload
def attention(
    cache: PagedKvCache, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, *,
    out: Out, return_scores: No = False, return_lse: No = False, **options: Unpack[AttentionOptions],
) -> Out: ...
@overload
def attention(
    cache: PagedKvCache, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, *,
    out: Out, return_scores: Scored, return_lse: No = False, **options: Unpack[AttentionOptions],
) -> tuple[Out, Float32]: ...
@overload
def attention(
    cache: PagedKvCache, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, *,
    out: Out, return_scores: No = False, return_lse: Yes, **options: Unpack[AttentionOptions],
) -> tuple[Out, Float32]: ...
@overload
def attention(
    cache: PagedKvCache, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, *,
    out: Out, return_scores: Scored, return_lse: Yes, **options: Unpack[AttentionOptions],
) -> tuple[Out, Float32, Float32]: ...
@overload  # flags that only the running program knows
def attention(
    cache: PagedKvCache, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, *,
    out: Any = None, return_scores: bool | Literal["head"] = False, return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any: ...
def attention(
    cache: PagedKvCache,
    layer: int,
    queries: npt.ArrayLike,
    seq_ids: npt.ArrayLike,
    *,
    query_lens: npt.ArrayLike | None = None, scale: float | None = None,
    sink_queries: npt.ArrayLike | None = None, out: Any = None,
    return_scores: bool | Literal["head"] = False, context_lens: npt.ArrayLike | None = None,
    return_lse: bool = False, window: int | None = None, softcap: float | None = None,
    sinks: npt.ArrayLike | None = None, starts: npt.ArrayLike | None = None,
    causal: bool = True, mask: npt.ArrayLike | None = None, skip_tokens: int = 0,
) -> Any:  # fmt: skip
    """softmax(q K^T scale) V straight over the blocks: decode, prefill chunks or both mixed in one call.

    Causal: the last query of a sequence has the position of its last token, the one before it the position before.

    A query has the same output and log-sum-exp, bit for bit, whatever else is in the call and however many threads
    run it: alone, in a chunk of a prompt or beside other sequences. They depend on the query, the tokens it sees,
    their text positions and the SIMD level; in quantised formats also on the slots of these tokens within their
    blocks (and on those of 1,023 tokens before them if some are missing in between). They do not depend on whether
    tokens before a window are stored.

    A query with a value that is not finite has NaN as its output and log-sum-exp, and adds nothing to attention masses.

    Sequences that follow one another and begin with the same blocks (forks, adopted prefixes) have these read once for
    all, which changes no bit: where a KV head has one or two query heads, a block a multiple of 16 tokens, and each
    sequence few queries, 256 shared tokens and more, and neither window, start, mask nor skipped or evicted tokens.

    With `residual_length` each query reads the tokens of its own group in f16, with `first_tokens` the first ones: what
    is attended there and in the packed rows is merged. With `residual_length` a sequence keeps f16 rows only from the
    group on in which its last `append` began, so it can have queries of these tokens alone: ValueError for more.
    `sink_queries`, `window`, `starts`, `causal`, `mask` and `skip_tokens` keep their defaults: ValueError. With
    `context_lens` each sequence has one query at most, that of the last token that is shown.

    Args:
        queries: `(total_queries, num_query_heads, head_dim)`, num_query_heads a multiple of num_heads; query head h
            reads KV head h // (num_query_heads / num_heads). Read in place, and widened, as `write` reads rows.
        seq_ids: integers `(n,)`: the sequences to attend to, in the order of the queries.
        query_lens: integers `(n,)`: queries of each sequence, total_queries together; by default one each.
        scale: by default head_dim ** -0.5.
        sink_queries: of the shape of `queries`, used for the tokens before a StreamingLLM hole: the same queries under
            the RoPE of the shorter distance.
        out: float32, C-contiguous, of the shape of the result, or a tensor such as that: written and returned.
        return_scores: also return each token's attention mass, summed over queries and heads; "head": over queries
            and the query heads of each KV head.
        context_lens: integers `(n,)`: how many of its first tokens each sequence shows, by default all. Where a part of
            the context is attended elsewhere, `merge_attention` merges the parts. A sequence may then be named several
            times, with different queries. The output of a query that sees no token is 0.
        skip_tokens: the first so many tokens of each sequence are seen by no query, as if a window had left them.
        return_lse: also return the log-sum-exp of each query's scores, which merging needs; -inf without tokens.
        window: the query at position p sees positions p - window + 1 to p. Tokens that no query sees are not read.
        softcap: a score s, after the scale, becomes softcap * tanh(s / softcap); above 0.
        sinks: finite logits that join the normaliser of the softmax, and the log-sum-exp, alone: floats
            `(num_query_heads,)`, or `(total_queries, num_query_heads)`. Where two parts of a context are attended
            apart, each call may have the log-sum-exp of the other part here: outputs and masses of the two then add up.
        starts: integers `(n,)`: the text position of each sequence's first token, by default 0; above where the first
            ones were dropped.
        causal: False: every query sees all tokens that are shown, and `query_lens` has no limit; without `window`.
        mask: integers `(total_queries,)`, a tree: each query's parent, the index of an earlier query of its sequence,
            or -1. A query sees the tokens before the queries', its ancestors' and its own; its position is the first
            behind those tokens plus the number of its ancestors. If each parent is the query before, bits are those
            without `mask`.

    Returns:
        float32 `(total_queries, num_query_heads, value_head_dim)`; a tuple if more is asked for, in this order:
        `return_scores`: float32 `(total tokens shown,)`, one sequence after another; "head": `(num_heads, ...)`;
        `return_lse`: float32 `(total_queries, num_query_heads)`, natural logarithms.
    """
    return cache._attention.over(layer, queries, seq_ids, query_lens, scale, sink_queries, out, return_scores,
                                 context_lens, bool(return_lse), window, softcap, sinks, starts, bool(causal),
                                 mask, skip_tokens)  # fmt: skip
