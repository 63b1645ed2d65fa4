"""The masks of many texts at once, in threads and without the GIL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcache.grammar.matcher import Matcher
from kvcache.kernels.threads import get_num_threads

__all__ = ["MaskBatch"]


class MaskBatch:
    """Computes masks. It has as many threads as the kernels."""

    def __init__(self) -> None:
        self._executor: Any = None
        self._threads = 0

    def prepare(self, due: Sequence[tuple[Matcher, Sequence[int]]]) -> None:
        """Prepare matchers, each for its place and for those behind its draft tokens, which may follow.

        A single mask is left to its matcher.
        """
        if sum(1 + len(draft) for _, draft in due) < 2:
            return
        from llguidance import LLExecutor

        if self._executor is None or self._threads != get_num_threads():
            self._threads = get_num_threads()
            self._executor = LLExecutor(self._threads)
        starts = np.cumsum([0, *(1 + len(draft) for _, draft in due)]).tolist()
        rows = np.zeros((starts[-1], max(matcher.num_words for matcher, _ in due)), np.uint32)
        jobs = [(matcher.state, start, list(draft)) for (matcher, draft), start in zip(due, starts, strict=False)]
        place = rows.ctypes.data, rows.shape[1] * rows.itemsize, len(rows)
        try:
            if alone := [(state, start) for state, start, draft in jobs if not draft]:
                self._executor.unsafe_compute_mask_ptr(alone, *place)
            if drafted := [job for job in jobs if job[2]]:
                self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)
        except (ValueError, RuntimeError):  # one is at fault: each asks for its own mask then, and fails alone
            return
        for (matcher, draft), start in zip(due, starts, strict=False):
            matcher.prepare(rows[start : start + 1 + len(draft)], draft)
