"""`EventStream`: the numbered batches of block events of a prefix cache, and those that are kept for late readers.

The first batch says that nothing is cached, and so does that with which a snapshot begins. A snapshot takes the place
of what was lost: where the ring was full, and where a reader asks for batches that are not kept any more. A replay that
cannot begin where it should begins with the last snapshot: its first event empties what the reader knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

from kvcache.prefix.events.event_batches import event_batches
from kvcache.prefix.events.kv_events import KvEvents
from kvcache.prefix.index.event_buffer import EventBuffer, Noted
from kvcache.prefix.prefix_cache import PrefixCache

__all__ = ["EventCounts", "EventStream"]

_AT_ONCE = 256  # records of a batch; other threads wait for the interpreter while one is encoded
_KEPT_BYTES = 64 << 20  # of batches, unless a snapshot has more


@dataclass(frozen=True)
class EventCounts:
    """The counters of a stream.

    Attributes:
        told: blocks that were told as stored or removed, those of snapshots too.
        dropped: blocks that were not told, since the ring was full; a snapshot followed.
        snapshots, replays: how many there were.
    """

    told: int = 0
    dropped: int = 0
    snapshots: int = 0
    replays: int = 0


class EventStream:
    """The batches of one cache.

    Args:
        ring, cache: what happens, and where; the cache is not kept alive.
        settings: see `KvEvents`.
        send: takes the number of a batch and its bytes.
        encode: makes them.
        clock: the seconds that batches carry.
        most_kept: batches for replays.
    """

    def __init__(
        self, ring: EventBuffer, cache: PrefixCache, settings: KvEvents, send: Callable[[int, bytes], object],
        encode: Callable[[Any], bytes], clock: Callable[[], float], most_kept: int,
    ) -> None:
        self._ring, self._cache, self._settings = ring, ref(cache), settings
        self._send, self._encode, self._clock = send, encode, clock
        self._most_kept = self._most = most_kept
        self._kept: deque[bytes] = deque()  # the newest batches, the last one of number `next_number - 1`
        self._kept_bytes, self._most_bytes = 0, _KEPT_BYTES  # both limits grow with a snapshot, all of which is kept
        self._base = 0  # number of the batch with which the last snapshot begins
        self._lost = False
        self._told = self._snapshots = self._replays = 0
        self.next_number = 0
        self._tell([{"type": "AllBlocksCleared"}])

    @property
    def is_alive(self) -> bool:
        """Whether the cache is still there."""
        return self._cache() is not None

    def counts(self) -> EventCounts:
        """The counters now."""
        return EventCounts(self._told, self._ring.dropped, self._snapshots, self._replays)

    # -- batches --------------------------------------------------------------------------------------------

    def tell(self) -> None:
        """Send what has happened since the last call. An error leads to a snapshot in the next call."""
        try:
            while len(self._ring) and not (self._ring.is_full or self._lost):
                self._tell_all(self._ring.take(_AT_ONCE))
            if self._ring.is_full or self._lost:
                self._tell_snapshot()
        except BaseException:
            self._lost = True
            raise

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """The kept batches from number `start` on, or from the last snapshot on if that is not kept, or lost.

        Their first event is then `AllBlocksCleared`, and the one before it is not needed.
        """
        self._replays += 1
        first = self.next_number - len(self._kept)
        if start < first:
            if self._base < first:
                self._tell_snapshot()
                first = self.next_number - len(self._kept)
            start = self._base
        return [(first + i, self._kept[i]) for i in range(max(0, start - first), len(self._kept))]

    def end(self) -> None:
        """Send what is left, and that nothing is cached any more."""
        self.tell()
        self._tell([{"type": "AllBlocksCleared"}])

    def _tell_snapshot(self) -> None:
        if (cache := self._cache()) is None:
            return
        noted = cache.event_snapshot()
        self._base, self._snapshots = self.next_number, self._snapshots + 1
        self._kept.clear()
        self._kept_bytes = 0
        for i in range(0, len(noted.events), _AT_ONCE):
            some = slice(i, i + _AT_ONCE)
            self._tell_all(Noted(noted.events[some], noted.tokens[some], noted.salts), trims=False)
        self._most_bytes = max(_KEPT_BYTES, 2 * self._kept_bytes)
        self._most = max(self._most_kept, 2 * len(self._kept))
        self._lost = False

    def _tell_all(self, noted: Noted, trims: bool = True) -> None:
        for batch in event_batches(noted, self._settings):
            self._tell(batch, trims)

    def _tell(self, events: list[dict[str, Any]], trims: bool = True) -> None:
        data = self._encode([self._clock(), events, self._settings.rank])
        self._told += sum(len(event.get("block_hashes", ())) for event in events)
        self._kept.append(data)
        self._kept_bytes += len(data)
        self.next_number += 1
        while trims and (len(self._kept) > self._most or self._kept_bytes > self._most_bytes):
            self._kept_bytes -= len(self._kept.popleft())
        self._send(self.next_number - 1, data)

    # -- reports --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify the invariants; AssertionError names the broken one."""
        assert self._kept_bytes == sum(map(len, self._kept)), "event stream: the bytes of kept batches do not add up"
        assert len(self._kept) <= self._most, "event stream: too many batches are kept"
        assert self._base < self.next_number, "event stream: a snapshot that was not sent"
        self._ring.check()
