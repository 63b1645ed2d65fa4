"""Write-behind: values wait in a bounded queue, from which a thread writes them to one tier."""

from __future__ import annotations

import os
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
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
        key, tokens: of its value.
        value: its bytes, to be sealed; the body stands in its place.
        form, wrapping: of the value.
        again: whether to replace the value under the key.
        lost: called if the value was not written.
    """

    key: bytes
    tokens: npt.NDArray[np.uint32]
    value: memoryview
    form: ValueFormat
    wrapping: Wrapping
    again: bool
    lost: Callable[[], None]


class WriteBehind:
    """The queue and the thread of one tier. No call waits for the tier but `flush` and `close`.

    Callers use single operations of compiled objects: an interrupt leaves no lock taken, and nothing counted twice.

    Args:
        most_bytes: of the values in the queue.
    """

    def __init__(self, link: Link, most_bytes: int) -> None:
        self._link, self._most_bytes = link, most_bytes
        self._queue: deque[Written] = deque()
        self._writing: list[Written] = []  # for a moment some are in the queue too
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._closed = False
        self._process = -1  # in which the thread runs

    @property
    def queued_bytes(self) -> int:
        """Bytes of the values in the queue, and of those that are being written."""
        return sum(item.form.value_bytes for item in (*self._queue, *self._writing))

    def room(self) -> int:
        """Bytes that the queue still takes; 0 after `close`."""
        return 0 if self._closed else self._most_bytes - self.queued_bytes

    def offer(self, item: Written) -> None:
        """Queue a group, for which there is room."""
        if self._process != os.getpid():  # a forked process has no thread of its parent
            start_new_thread(self._run, ())
            self._process = os.getpid()
        self._queue.append(item)
        self._wake.put(None)

    def flush(self, timeout: float) -> bool:
        """Wait until the queue is empty, for so many seconds at most; whether it is."""
        end = monotonic() + timeout
        self._wake.put(None)
        while self.queued_bytes and monotonic() < end:
            sleep(_POLL)
        return not self.queued_bytes

    def close(self, timeout: float) -> bool:
        """Accept nothing more, `flush`, drop the rest and end the thread; whether everything was written."""
        self._closed = True
        whole = self.flush(timeout)
        with suppress(IndexError):
            while True:
                self._drop(self._queue.popleft())
        self._wake.put(None)
        return whole

    def _run(self) -> None:
        while True:
            self._wake.get()
            while self._queue:
                while self._link.pause and not self._closed:
                    sleep(min(self._link.pause, _PAUSED))
                self._write_some()
            if self._closed:
                return

    def _write_some(self) -> None:
        """Write what one call of the tier takes."""
        size = 0
        with suppress(IndexError):  # `close` drops what is queued
            while not size or size + self._queue[0].form.value_bytes <= _AT_ONCE:
                self._writing.append(self._queue[0])
                self._writing[-1] = self._queue.popleft()
                size += self._writing[-1].form.value_bytes
        written = False
        try:
            written = not self._link.pause and self._write(self._writing)
        except Exception as error:
            self._link.failed(error)
        while self._writing:
            if not written:
                self._drop(self._writing[-1])
            self._writing.pop()

    def _write(self, items: list[Written]) -> bool:
        link = self._link
        there = link.contains([item.key for item in items])
        if there is None:
            return False
        missing = [item for item, known in zip(items, there, strict=True) if item.again or not known]
        link.count("present", len(items) - len(missing))
        if not missing:
            return True
        for each in missing:
            each.wrapping.seal(each.form, each.key, each.tokens, each.value)
        values = [(each.key, each.value) for each in missing]
        if not link.put(values):
            return False
        link.count("stored", len(values))
        link.count("bytes_written", sum(len(value) for _, value in values))
        return True

    def _drop(self, item: Written) -> None:
        self._link.count("dropped")
        item.lost()
