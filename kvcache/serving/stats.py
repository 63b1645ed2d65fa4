"""The reports of a `BatchEngine`."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvcache.serving.request import Pending

__all__ = ["BatchStats", "Eviction", "Histogram", "NamespaceStats"]


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often a number of seconds was measured, by size.

    Attributes:
        bounds: ascending, in seconds.
        counts: of measurements up to each bound and above the one before; the last is of those above all bounds.
        total: the sum of all measurements, in seconds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    def __repr__(self) -> str:
        count = sum(self.counts)
        sums = zip((*self.bounds, math.inf), accumulate(self.counts), strict=True)
        half = next(bound for bound, below in sums if 2 * below >= count)
        return f"Histogram({count}{f', mean {self.total / count:.3g} s, half below {half:g} s' if count else ''})"


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """The counters of one namespace. A request that is preempted counts once; of several samples each counts.

    Attributes:
        cached_tokens: tokens whose K and V are cached now, those of running requests included.
        queries: requests that began.
        hits: those of them that found a part of their prompt.
        query_tokens: tokens of their prompts.
        hit_tokens: those of them that were cached.
        evicted_tokens: tokens that left the cache to make room.
        pinned_tokens: tokens that are pinned now; those of several pins count for each.
    """

    cached_tokens: int
    queries: int
    hits: int
    query_tokens: int
    hit_tokens: int
    evicted_tokens: int
    pinned_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Eviction:
    """Blocks that left the cache to make room.

    Attributes:
        namespace: of the text that they belong to.
        tokens: the text up to the end of the last block that left, uint32 `(n,)`.
        num_tokens: how many of the last of these tokens left.
        requests: those that took blocks in the same step, or else those that ran in it: the eviction was for one of
            them, or for several. Empty if the one that it was for has lost its place.
    """

    namespace: Hashable
    tokens: npt.NDArray[np.uint32]
    num_tokens: int
    requests: tuple[Pending, ...]


@dataclass(frozen=True, slots=True)
class BatchStats:
    """A snapshot of the counters; a request of several samples counts once for each.

    Attributes:
        waiting, running: requests without and with memory.
        finished: requests that have ended, for any reason.
        steps: passes of the network.
        prefilled_tokens: tokens that ran for requests with more than one token left to run: tokens of prompts, and
            those that run again after a preemption. Steps of decoding and their draft tokens do not count.
        new_tokens: tokens that were drawn.
        cached_tokens: tokens of prompts that did not run, since their K and V were cached.
        preemptions: how often a request gave up its memory and began again.
        draft_tokens, accepted_tokens: draft tokens that ran, and those of them that were drawn.
        free_blocks, claimed_blocks, cached_blocks: blocks without a reference, of running requests and pins, and of the
            prefix index alone; together all blocks.
        pinned_blocks: claimed blocks of pinned prefixes; those of several pins count for each.
        queued: the seconds from `submit` until the first token of a request ran.
        first_token: the seconds from `submit` until its first new token.
        gap: the seconds between two new tokens of a request; those of one step have none between them.
        events_told: blocks that `kv_events` told as stored or removed, those of snapshots too.
        events_dropped: those that it did not tell, since too many came at once; a snapshot followed.
        event_snapshots, event_replays: how often it told all blocks again, and what a reader had missed.
        hints: calls of `hint` that were taken.
        prefetched_tokens: tokens that were read from tiers for hints, before a request.
    """

    waiting: int
    running: int
    finished: int
    steps: int
    prefilled_tokens: int
    new_tokens: int
    cached_tokens: int
    preemptions: int
    draft_tokens: int
    accepted_tokens: int
    free_blocks: int
    claimed_blocks: int
    cached_blocks: int
    pinned_blocks: int
    queued: Histogram
    first_token: Histogram
    gap: Histogram
    events_told: int = 0
    events_dropped: int = 0
    event_snapshots: int = 0
    event_replays: int = 0
    hints: int = 0
    prefetched_tokens: int = 0
