"""Write-behind: values wait in a bounded queue, from which a thread writes them to one tier."""

from __future__ import annotations

import os
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Iterator
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

_AT_ONCE = 8 << 20  # bytes of values in one call of a tier
_ASKED = 256  # values of which one call asks whether the tier has them
_POLL, _PAUSED = 0.002, 0.1  # seconds: `flush` looks this often, and so does a thread while its tier pauses


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
            while self._queue:
                self._wait_out()
                self._write_some()
            if self._closed:
                return

    def _wait_out(self) -> None:
        """Wait while the tier is passed over."""
        while self._link.pause and not self._closed:
            sleep(min(self._link.pause, _PAUSED))

    def _write_some(self) -> None:
        """Write what is queued, as far as one call of the tier tells whether it has it."""
        with suppress(IndexError):  # `close` drops what is queued
            while len(self._writing) < _ASKED:
                self._writing.append(self._queue[0])
                self._writing[-1] = self._queue.popleft()
        try:
            self._write(self._writing)
        except Exception as error:
            self._link.failed(error)
        while self._writing:
            self._drop(self._writing[-1])
            self._writing.pop()

    def _write(self, items: list[Written]) -> None:
        """Write items, which leave the list: a call's values are sealed while those of the one before are sent."""
        link = self._link
        there = None if link.pause else link.contains([item.key for item in items])
        if there is None:
            return
        missing = [item for item, known in zip(items, there, strict=True) if item.again or not known]
        link.count("present", len(items) - len(missing))
        items[:] = missing
        sealing: _Seal | None = None
        for some in _calls(missing):
            following = _Seal(some)
            following.start()
            if sealing is not None:
                self._put(sealing)
            sealing = following
        if sealing is not None:
            self._put(sealing)

    def _put(self, sealing: _Seal) -> None:
        """Write the values of one call, which leave the list of those that are being written."""
        link = self._link
        sealing.join()
        self._wait_out()
        if sealing.error is not None:
            link.failed(sealing.error)
        elif not link.pause and link.put(sealing.values):
            link.count("stored", len(sealing.items))
            link.count("bytes_written", sum(len(value) for _, value in sealing.values))
            del self._writing[: len(sealing.items)]
            return
        for item in sealing.items:
            self._drop(item)
            del self._writing[0]

    def _drop(self, item: Written) -> None:
        self._link.count("dropped")
        item.lost()


class _Seal(Thread):
    """Completes the values of one call, while those of the call before are sent.

    Attributes:
        items: see above.
        values: by key.
        error: what was raised.
    """

    def __init__(self, items: list[Written]) -> None:
        super().__init__(name="kvcache seal", daemon=True)
        self.items = items
        self.error: Exception | None = None
        self.values = [(each.key, each.value) for each in items]

    def run(self) -> None:
        try:
            for each in self.items:
                each.wrapping.seal(each.form, each.key, each.tokens, each.value)
        except Exception as error:
            self.error = error


def _calls(items: list[Written]) -> Iterator[list[Written]]:
    """Items of 8 MB of values each, or one."""
    some: list[Written] = []
    size = 0
    for item in items:
        if some and size + item.form.value_bytes > _AT_ONCE:
            yield some
            some, size = [], 0
        some.append(item)
        size += item.form.value_bytes
    if some:
        yield some
