"""The options of a call of attention; see core/attention_call.pxd."""

cimport numpy as cnp
from libc.math cimport sqrt
from libc.stdint cimport int64_t

from kvcache.support.arguments import as_count, as_finite, as_sinks

__all__ = ["AttentionCall"]

# tanh(s / c) is s / c in float32 for all scores of ordinary size (below 2^40): beyond it there is no cap.
cdef double MOST_CAP = 2.0 ** 64
# Scores below it differ by nothing that a weight shows: a smaller cap is this one, whose inverse is a float.
cdef double LEAST_CAP = 2.0 ** -100
# The last text position: no sum of it with a number of tokens overflows.
cdef int64_t MOST_SKIPPED = 2 ** 62

cnp.import_array()


cdef class AttentionCall:
    """How queries attend, checked once for any number of calls. Arguments are those of `PagedKvCache.attention`.

    Raises:
        TypeError, ValueError: as `PagedKvCache.attention`, but for the shape of `sinks`, which each call checks.
    """

    def __cinit__(self, scale=None, window=None, softcap=None, sinks=None, bint causal=True, skip_tokens=0,
                  return_scores=False, bint return_lse=False, top_tokens=None, bint chunked=False):
        cdef double cap
        if scale is not None:
            self.scale = as_finite(scale, "scale")
            self.factor, self.has_factor = <float><double>self.scale, True
        if softcap is not None:
            self.softcap = as_finite(softcap, "softcap", 0.0, above=True)
            cap = self.softcap
            self.cap = <float>max(cap, LEAST_CAP) if cap <= MOST_CAP else 0.0
        self.return_scores, self.return_lse = _mass(return_scores), return_lse
        if window is not None:
            self.window = self.width = as_count(window, "window", 1)
        if type(skip_tokens) is not int or skip_tokens != 0:
            self.skip_tokens = as_count(skip_tokens, "skip_tokens", 0, MOST_SKIPPED)
        if chunked and not causal:
            raise ValueError("causal: expected True beside chunked, got False")
        if chunked and not self.width:
            raise ValueError("window: expected a number beside chunked, got None")
        self.causal, self.sinks, self.chunked = causal, sinks, chunked
        if top_tokens is not None:
            self.top_tokens = as_count(top_tokens, "top_tokens", 1)
            self.check_plain_("top_tokens")

    def kept(self):
        """The call, for later calls too: with a copy of `sinks`, which must be finite floats."""
        if self.sinks is not None and not self.is_kept:
            self.sinks = as_sinks(self.sinks, (None, None)).copy()
            self.sinks.flags.writeable = False
        self.is_kept = True
        return self

    cdef int check_plain_(self, str name) except -1:
        for other, fixed, value in (("window", None, self.window), ("causal", True, self.causal),
                                    ("skip_tokens", 0, self.skip_tokens), ("return_scores", 0, self.return_scores)):
            if value != fixed:
                raise ValueError(f"{other}: expected {fixed or None} beside {name}, got {value}")
        return 0

    cdef float factor_(self, int head_dim) noexcept:
        return self.factor if self.has_factor else <float>(1.0 / sqrt(<double>head_dim))

    cdef cnp.ndarray sinks_(self, cnp.ndarray queries):
        cdef cnp.ndarray own
        if self.sinks is None:
            return None
        if self.is_kept:
            own = self.sinks
            if own.shape[own.ndim - 1] == queries.shape[1] and (own.ndim == 1 or own.shape[0] == queries.shape[0]):
                return own
        return as_sinks(self.sinks, (queries.shape[0], queries.shape[1]))


cdef int _mass(object return_scores) except -1:
    if isinstance(return_scores, str):
        if return_scores != "head":
            raise ValueError(f'return_scores: expected False, True or "head", got {return_scores!r:.100}')
        return BY_HEAD
    return bool(return_scores)
