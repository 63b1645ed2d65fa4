"""Write-behind: values wait in a bounded queue, from which a thread writes them to one tier."""

from __future__ import annotations

import os
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from time import monotonic, sleep
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.tiers.links import Link
from kvcache.tiers.values import ValueFormat, Wrapping

__all__ = ["WriteBehind", "Written"]

_AT_ONCE, _MOST = 8 << 20, 256  # bytes and number of the values in one call of a tier
_POLL, _PAUSED = 5e-4, 0.1  # seconds: `flush` looks this often, and so does a thread while its tier pauses


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
        return sum([len(item.value) for item in (*self._queue, *self._writing)])

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
            try:
                self._write_queued()
            except Exception as error:  # such as a thread that cannot start
                self._link.failed(error)
                while self._writing:
                    self._drop(self._writing[-1])
                    self._writing.pop()
            if self._closed:
                return

    def _wait_out(self) -> None:
        """Wait while the tier is passed over."""
        while self._link.pause and not self._closed:
            sleep(min(self._link.pause, _PAUSED))

    def _write_queued(self) -> None:
        """Write what is queued: the values of a call are prepared while those of the one before are sent."""
        ready: _Call | None = None
        while self._queue or ready is not None:
            self._wait_out()
            following = self._take()
            if ready is not None:
                self._put(ready)
            if following is not None:
                following.join()
            ready = following

    def _take(self) -> _Call | None:
        """Take from the queue what one call writes, and begin to prepare it; None: the queue is empty."""
        items: list[Written] = []
        size, before = 0, len(self._writing)
        with suppress(IndexError):  # `close` drops what is queued
            while len(items) < _MOST and (not items or size + len(self._queue[0].value) <= _AT_ONCE):
                self._writing.append(self._queue[0])
                self._writing[-1] = item = self._queue.popleft()
                items.append(item)
                size += len(item.value)
        del self._writing[before + len(items) :]
        if not items:
            return None
        call = _Call(self._link, items)
        call.start()
        return call

    def _put(self, call: _Call) -> None:
        """Write the values of one call, which leave the list of those that are being written."""
        link, stored = self._link, False
        self._wait_out()
        if call.values and not link.pause and link.put(call.values):
            link.count("stored", len(call.values))
            link.count("bytes_written", sum(len(value) for _, value in call.values))
            stored = True
        for item in () if stored else call.items:
            self._drop(item)
        del self._writing[: call.taken]

    def _drop(self, item: Written) -> None:
        self._link.count("dropped")
        item.lost()


class _Call(Thread):
    """Prepares what one call writes: asks which values the tier has, and completes the others.

    Attributes:
        taken: groups, of which some may be there.
        items: those that are not there, or are written again.
        values: by key; empty after an error.
    """

    def __init__(self, link: Link, items: list[Written]) -> None:
        super().__init__(name="kvcache seal", daemon=True)
        self.taken, self.items, self._link = len(items), items, link
        self.values: list[tuple[bytes, memoryview]] = []

    def run(self) -> None:
        link = self._link
        there = None if link.pause else link.contains([item.key for item in self.items])
        if there is None:
            return
        self.items = [item for item, known in zip(self.items, there, strict=True) if item.again or not known]
        link.count("present", self.taken - len(self.items))
        try:
            for each in self.items:
                each.wrapping.seal(each.form, each.key, each.tokens, each.value)
        except Exception as error:
            link.failed(error)
        else:
            self.values = [(each.key, each.value) for each in self.items]
