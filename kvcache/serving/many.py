"""One call over many texts: each is queued when there is room, and all are waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvcache.errors import QueueFullError
from kvcache.serving.progress import Progress, shown
from kvcache.serving.request import Pending

__all__ = ["run_all"]

Item = TypeVar("Item")
Submitted = TypeVar("Submitted", bound=Pending)


def run_all(
    items: Sequence[Item], submit: Callable[[Item], Submitted], wait_for_any: Callable[[], None], progress: Progress
) -> list[Submitted]:
    """Submit all items and wait for all; if one fails, or the call is interrupted, those that run are cancelled.

    Args:
        submit: queues an item. QueueFullError: there is no room now.
        wait_for_any: waits until something ends, where others fill the queue.
        progress: as of `BatchEngine.generate_batch`.
    """
    pending: list[Submitted] = []
    done = 0
    try:
        with shown(progress, len(items)) as show:
            while done < len(items):
                try:
                    while len(pending) < len(items):
                        pending.append(submit(items[len(pending)]))
                except QueueFullError:
                    if done == len(pending):
                        wait_for_any()
                        continue
                first = pending[done]
                first.wait(lambda first=first: first.is_finished)  # type: ignore[misc]
                first.raise_error()
                done += 1
                show(done)
    except BaseException:
        for each in pending[done:]:
            each.cancel()
        raise
    return pending
