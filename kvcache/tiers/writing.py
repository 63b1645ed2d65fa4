"""Write-behind: values wait in a bounded queue, from which a thread writes them to one tier."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
from time import monotonic
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.tiers.links import Link
from kvcache.tiers.values import ValueFormat, Wrapping

__all__ = ["WriteBehind", "Written"]

_AT_ONCE = 8 << 20  # bytes of values in one call of a tier


class Written(NamedTuple):
    """A group of tokens to be written to a tier.

    Attributes:
        key, tokens, body: of its value.
        form, wrapping: of the value.
        again: whether to replace the value under the key.
        lost: called if the value was not written.
    """

    key: bytes
    tokens: npt.NDArray[np.uint32]
    body: memoryview
    form: ValueFormat
    wrapping: Wrapping
    again: bool
    lost: Callable[[], None]


class WriteBehind:
    """The queue and the thread of one tier. No call waits for the tier but `flush` and `close`.

    Args:
        most_bytes: of the bodies in the queue; further ones are dropped.
    """

    def __init__(self, link: Link, most_bytes: int) -> None:
        self._link, self._most_bytes = link, most_bytes
        self._changed = Condition()
        self._queue: deque[Written] = deque()
        self.queued_bytes = 0  # of the queue and of what is being written
        self._closed = False
        self._thread: Thread | None = None
        self._process = 0

    def room(self) -> int:
        """Bytes that the queue still takes; 0 after `close`."""
        return 0 if self._closed else self._most_bytes - self.queued_bytes

    def offer(self, item: Written) -> bool:
        """Queue a group; False, and it is dropped, if the queue is full."""
        with self._changed:
            if self._closed or item.body.nbytes > self.room():
                self._link.count("dropped")
                return False
            self._queue.append(item)
            self.queued_bytes += item.body.nbytes
            self._start()
            self._changed.notify_all()
            return True

    def flush(self, timeout: float) -> bool:
        """Wait until the queue is empty, for so many seconds at most; whether it is."""
        end = monotonic() + timeout
        with self._changed:
            while self.queued_bytes and (left := end - monotonic()) > 0:
                self._changed.wait(min(left, 0.5))
            return not self.queued_bytes

    def close(self, timeout: float) -> bool:
        """Accept nothing more, `flush`, drop the rest and end the thread; whether everything was written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        whole = self.flush(timeout)
        with self._changed:
            while self._queue:
                self._drop(self._queue.popleft())
            self._changed.notify_all()
        return whole

    def _start(self) -> None:
        if self._thread is None or self._process != os.getpid():  # a forked process has no thread of its parent
            self._process = os.getpid()
            self._thread = Thread(target=self._run, name=f"kvcache write {self._link.name}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while (pause := self._link.pause) or not self._queue:
                    if self._closed and (pause or not self._queue):
                        while self._queue:
                            self._drop(self._queue.popleft())
                        self._changed.notify_all()
                        return
                    self._changed.wait(pause or None)
                items: list[Written] = []
                size = 0
                while self._queue and (not items or size + self._queue[0].body.nbytes <= _AT_ONCE):
                    items.append(self._queue.popleft())
                    size += items[-1].body.nbytes
            written = False
            try:
                written = self._write(items)
            except Exception as error:
                self._link.failed(error)
            finally:
                with self._changed:
                    for item in items:
                        if written:
                            self.queued_bytes -= item.body.nbytes
                        else:
                            self._drop(item)
                    self._changed.notify_all()
                del items

    def _write(self, items: list[Written]) -> bool:
        link = self._link
        there = link.contains([item.key for item in items])
        if there is None:
            return False
        missing = [item for item, known in zip(items, there, strict=True) if item.again or not known]
        link.count("present", len(items) - len(missing))
        if not missing:
            return True
        values = [(each.key, each.wrapping.seal(each.form, each.key, each.tokens, each.body)) for each in missing]
        if not link.put(values):
            return False
        link.count("stored", len(values))
        link.count("bytes_written", sum(len(value) for _, value in values))
        return True

    def _drop(self, item: Written) -> None:
        self.queued_bytes -= item.body.nbytes
        self._link.count("dropped")
        item.lost()
