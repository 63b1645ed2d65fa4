"""Write-behind: values wait in a bounded queue, from which a thread writes them to one tier."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from queue import SimpleQueue
from time import monotonic, sleep
from typing import NamedTuple

from kvcache.tiers.links import Link
from kvcache.tiers.process_thread import ProcessThread

__all__ = ["WriteBehind", "Written"]

_AT_ONCE = 24 << 20  # bytes of values in one call of a tier: nodes of a cluster wait for the last one at its end
_ASKED = 256  # values of which one call asks whether the tier has them
_POLL, _PAUSED = 5e-4, 0.1  # seconds: `flush` looks this often, and so does a thread while its tier pauses


class Written(NamedTuple):
    """A group of tokens to be written to a tier.

    Attributes:
        key, value: under which key the tier gets which bytes.
        again: whether to replace the value under the key.
        lost: called if the value was not written.
    """

    key: bytes
    value: memoryview
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
        self._queue: list[Written] = []  # not a deque, which no thread may copy while another one takes from it
        self._writing: list[Written] = []  # for a moment some are in the queue too
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._closed, self._told = False, 0  # values that were not written, as the last `flush` has told
        self._thread = ProcessThread()

    @property
    def queued_bytes(self) -> int:
        """Bytes of the values in the queue, and of those that are being written."""
        return sum([len(item.value) for item in [*self._queue, *self._writing]])

    def room(self) -> int:
        """Bytes that the queue still takes; 0 after `close`."""
        return 0 if self._closed else self._most_bytes - self.queued_bytes

    def offer(self, item: Written) -> None:
        """Queue a group, for which there is room."""
        try:
            self._thread.begin(self._run)
        except RuntimeError as error:
            self._link.failed(error)
            self._drop(item)
            return
        self._queue.append(item)
        self._wake.put(None)

    def flush(self, timeout: float) -> bool:
        """Wait until the queue is empty, for `timeout` seconds at most; whether all since the last call was written."""
        end = monotonic() + timeout
        self._wake.put(None)
        while self.queued_bytes and monotonic() < end:
            sleep(_POLL)
        told, self._told = self._told, self._link.counts["dropped"]
        return not (self._told > told or self.queued_bytes)

    def close(self, timeout: float) -> bool:
        """Accept nothing more, `flush`, drop the rest and end the thread; whether `flush` did."""
        self._closed = True
        whole = self.flush(timeout)
        with suppress(IndexError):
            while True:
                self._drop(self._queue.pop(0))
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
                self._writing[-1] = self._queue.pop(0)
        try:
            self._write(self._writing)
        except BaseException as error:
            self._link.failed(error)
        while self._writing:
            self._drop(self._writing[-1])
            self._writing.pop()

    def _write(self, items: list[Written]) -> None:
        """Write items, which leave the list."""
        link = self._link
        there = None if link.pause else link.contains([item.key for item in items])
        if there is None:
            return
        missing = [item for item, known in zip(items, there, strict=True) if item.again or not known]
        link.count("present", len(items) - len(missing))
        items[:] = missing
        while items:
            self._put(_call(items))

    def _put(self, items: list[Written]) -> None:
        """Write the values of one call, which leave the list of those that are being written."""
        link = self._link
        self._wait_out()
        if not link.pause and link.put([(item.key, item.value) for item in items]):
            link.count("stored", len(items))
            link.count("bytes_written", sum(len(item.value) for item in items))
            del self._writing[: len(items)]
            return
        for item in items:
            self._drop(item)
            del self._writing[0]

    def refuse(self) -> None:
        """Note that a value is not written."""
        self._link.count("dropped")

    def _drop(self, item: Written) -> None:
        self.refuse()
        item.lost()


def _call(items: list[Written]) -> list[Written]:
    """The first of items: as many as one call writes, or one."""
    ends = accumulate(len(item.value) for item in items)
    return items[: max(1, sum(end <= _AT_ONCE for end in ends))]
