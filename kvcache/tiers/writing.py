"""Write-behind: values wait in a bounded queue, from which a thread writes them to one tier."""

from __future__ import annotations

import os
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import RLock
from time import monotonic, sleep
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.tiers.links import Link
from kvcache.tiers.values import ValueFormat, Wrapping

__all__ = ["WriteBehind", "Written"]

_AT_ONCE = 8 << 20  # bytes of values in one call of a tier
_POLL, _PAUSED = 0.001, 0.1  # seconds between two looks: of who flushes, and of a thread whose tier is passed over


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

    Callers use compiled locks and queues alone: an interrupt leaves none of them locked.

    Args:
        most_bytes: of the bodies in the queue; further ones are dropped.
    """

    def __init__(self, link: Link, most_bytes: int) -> None:
        self._link, self._most_bytes = link, most_bytes
        self._lock = RLock()
        self._queue: SimpleQueue[Written | None] = SimpleQueue()
        self.queued_bytes = 0  # of the queue and of what is being written
        self._closed = False
        self._process = -1  # in which the thread runs

    def room(self) -> int:
        """Bytes that the queue still takes; 0 after `close`."""
        return 0 if self._closed else self._most_bytes - self.queued_bytes

    def offer(self, item: Written) -> bool:
        """Queue a group; False, and it is dropped, if the queue is full."""
        if item.body.nbytes > self.room():
            self._link.count("dropped")
            return False
        if self._process != os.getpid():  # a forked process has no thread of its parent
            start_new_thread(self._run, ())
            self._process = os.getpid()
        self._add(item.body.nbytes)
        self._queue.put(item)
        return True

    def flush(self, timeout: float) -> bool:
        """Wait until the queue is empty, for so many seconds at most; whether it is."""
        end = monotonic() + timeout
        while self.queued_bytes and monotonic() < end:
            sleep(_POLL)
        return not self.queued_bytes

    def close(self, timeout: float) -> bool:
        """Accept nothing more, `flush`, drop the rest and end the thread; whether everything was written."""
        self._closed = True
        whole = self.flush(timeout)
        with suppress(Empty):
            while True:
                self._drop(self._queue.get_nowait())
        self._queue.put(None)
        return whole

    def _add(self, size: int) -> None:
        with self._lock:
            self.queued_bytes += size

    def _run(self) -> None:
        following: Written | None = None
        while True:
            first = self._queue.get() if following is None else following
            if first is None:
                return
            items, size, following = [first], first.body.nbytes, None
            with suppress(Empty):
                while size < _AT_ONCE and (following := self._queue.get_nowait()) is not None:
                    size += following.body.nbytes
                    if size <= _AT_ONCE:
                        items.append(following)
                        following = None
                if size < _AT_ONCE:
                    self._queue.put(None)  # the end, for the next turn
            while self._link.pause and not self._closed:
                sleep(min(self._link.pause, _PAUSED))
            written = False
            try:
                written = not self._link.pause and self._write(items)
            except Exception as error:
                self._link.failed(error)
            for item in items:
                if written:
                    self._add(-item.body.nbytes)
                else:
                    self._drop(item)
            del first, items, item

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

    def _drop(self, item: Written | None) -> None:
        if item is not None:
            self._add(-item.body.nbytes)
            self._link.count("dropped")
            item.lost()
