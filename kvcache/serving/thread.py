"""The thread that steps as long as there is work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from weakref import ref

__all__ = ["StepThread"]


class StepThread:
    """Steps until `stop`, or until its owner is dropped, and all work is done; sleeps without work.

    Args:
        owner: not kept alive.
        step: runs a step; whether there is work left.
        pause: seconds until there is some, as far as is known.
    """

    def __init__(self, owner: object, step: Callable[[], bool], pause: Callable[[], float]) -> None:
        self._woken: SimpleQueue[None] = SimpleQueue()  # may be used from signal handlers
        self._stopping = threading.Event()
        arguments = ref(owner), step, pause, self._woken, self._stopping
        self._thread = threading.Thread(target=_run, args=arguments, name="kvcache-serving", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether this is the thread."""
        return threading.current_thread() is self._thread

    def wake(self) -> None:
        """There is work."""
        self._woken.put(None)

    def stop(self) -> None:
        """End the thread when all work is done, and wait for that; from the thread itself, without waiting."""
        self._stopping.set()
        self.wake()
        if not self.is_current:
            self._thread.join()


def _run(
    owner: ref[object], step: Callable[[], bool], pause: Callable[[], float], woken: SimpleQueue[None],
    stopping: threading.Event,
) -> None:
    while True:
        if not step():
            if stopping.is_set() or owner() is None:
                return
            with suppress(Empty):  # a second later it looks whether the owner was dropped
                woken.get(timeout=min(1.0, max(0.001, pause())))
