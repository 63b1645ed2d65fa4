"""The thread that steps an engine as long as there is work."""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from kvcache.serving.batch import BatchEngine

__all__ = ["StepThread"]


class StepThread:
    """Steps an engine until `stop`, or until the engine is dropped; sleeps without work.

    Args:
        engine: not kept alive.
    """

    def __init__(self, engine: BatchEngine) -> None:
        self._woken: SimpleQueue[None] = SimpleQueue()  # may be used from signal handlers
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=_run, args=(ref(engine), self._woken, self._stopping), name="kvcache-serving", daemon=True
        )
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


def _run(engine_of: ref[BatchEngine], woken: SimpleQueue[None], stopping: threading.Event) -> None:
    while True:
        engine = engine_of()
        if engine is None:
            return
        busy = engine._step_or_fail()
        del engine
        if not busy:
            if stopping.is_set():
                return
            with suppress(Empty):  # a second later it looks whether the engine was dropped
                woken.get(timeout=1.0)
