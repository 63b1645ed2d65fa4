"""What a `BatchEngine` reports."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BatchStats"]


@dataclass(frozen=True, slots=True)
class BatchStats:
    """A snapshot of the counters; a request of several samples counts once for each.

    Attributes:
        waiting, running: requests without and with memory.
        finished: requests that have ended, for any reason.
        steps: passes of the network.
        prefilled_tokens: tokens that ran, but for those that were drawn and ran once.
        new_tokens: tokens that were drawn.
        cached_tokens: tokens of prompts that did not run, since their K and V were cached.
        preemptions: how often a request gave up its memory and began again.
        guessed_tokens, accepted_tokens: tokens that were guessed, and those of them that were drawn.
        free_blocks, claimed_blocks, cached_blocks: blocks without a reference, of running requests, and of the prefix
            index alone; together all blocks.
    """

    waiting: int
    running: int
    finished: int
    steps: int
    prefilled_tokens: int
    new_tokens: int
    cached_tokens: int
    preemptions: int
    guessed_tokens: int
    accepted_tokens: int
    free_blocks: int
    claimed_blocks: int
    cached_blocks: int
