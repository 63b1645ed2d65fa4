"""`Link`: one tier of a `Tiers`, with what was counted and measured of it. A call of a link never raises."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import RLock
from time import monotonic
from typing import Any, TypeVar

from kvcache.support.arguments import short
from kvcache.tiers.protocol import Buffer, Tier

__all__ = ["FAILURES", "PAUSE", "Link", "Measured", "TierStats", "without_secrets"]

logger = logging.getLogger("kvcache")

FAILURES = 3  # in a row, after which a tier is passed over
PAUSE = 10.0  # seconds for which it is
_USER, _QUERY = re.compile(r"://[^/\s@]*@"), re.compile(r"(?<=\w)\?[^\s\"'),]+")
_FORGET = 60.0  # seconds after which a measurement is too old to decide by

Result = TypeVar("Result")


@dataclass(frozen=True)
class TierStats:
    """The counters of one tier.

    Attributes:
        name: the class of the tier.
        hits: values that were fetched and accepted.
        misses: lookups that ended at a value that the tier does not have.
        wrong: values that were fetched and are not what belongs under their key.
        declined: lookups that did not fetch, since computing is faster.
        late: values that arrived when they were of no use any more, and lookups for which the tiers were too busy.
        passed: lookups and stores that passed over the tier, after failures.
        stored: values that were written.
        present: values that were not written, since the tier has them.
        dropped: values that were not written: the queue was full, or the write failed.
        errors: calls of the tier that raised.
        bytes_read, bytes_written: of values.
        queued_bytes: of values that wait to be written.
        seconds_per_call: of a round trip, a moving mean of the least; None: not measured in the last minute.
        bytes_per_second: of a fetch, the same.
    """

    name: str
    hits: int
    misses: int
    wrong: int
    declined: int
    late: int
    passed: int
    stored: int
    present: int
    dropped: int
    errors: int
    bytes_read: int
    bytes_written: int
    queued_bytes: int
    seconds_per_call: float | None
    bytes_per_second: float | None


class Measured:
    """A moving mean that is forgotten when it was not measured for a minute.

    Args:
        up, down: weight of a measurement above the mean, and below it.
    """

    def __init__(self, up: float = 0.3, down: float = 0.3) -> None:
        self._mean, self._at, self._up, self._down = 0.0, -_FORGET, up, down

    @property
    def mean(self) -> float | None:
        """The mean; None: not measured in the last minute."""
        return self._mean if monotonic() - self._at < _FORGET else None

    def add(self, value: float) -> None:
        """Measured once more."""
        before = self.mean
        if before is not None:
            value = before + (self._up if value > before else self._down) * (value - before)
        self._mean = value
        self._at = monotonic()


class Link:
    """One tier.

    Args:
        tier: the store.
        secret: of its keys and values.
        encrypt: whether values are encrypted.
        after_uses: how many requests have a group of tokens before it is written.

    Attributes:
        tier, secret, encrypt, after_uses: see above.
        name: the class of the tier.
        counts: the counters of `TierStats`, by name.
        latency: seconds of a round trip.
        rate: bytes per second of a fetch.
    """

    COUNTED = (
        "hits", "misses", "wrong", "declined", "late", "passed", "stored", "present", "dropped", "errors",
        "bytes_read", "bytes_written",
    )

    def __init__(self, tier: Tier, secret: bytes, after_uses: int, *, encrypt: bool = False) -> None:
        self.tier, self.secret, self.after_uses, self.encrypt = tier, secret, after_uses, encrypt
        self.name = type(tier).__name__
        self.counts = dict.fromkeys(self.COUNTED, 0)
        # The first call also connects, and a fetch takes a round trip and more: the least one counts most.
        self.latency, self.rate = Measured(0.1, 1.0), Measured()
        self._lock = RLock()
        self._failures, self._closed_until, self._told = 0, 0.0, -PAUSE
        self._knows_sizes = False
        with suppress(TypeError, ValueError):  # a callable without a signature
            self._knows_sizes = "most_bytes" in inspect.signature(tier.get_many).parameters

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self.counts[name] += by

    @property
    def pause(self) -> float:
        """Seconds for which the tier is passed over from now on, after failures; 0: it is used."""
        return max(0.0, self._closed_until - monotonic())

    def contains(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Which keys have values; None: the call failed."""

        def ask(keys: Sequence[bytes]) -> list[bool]:
            found = self.tier.contains_many(keys)
            return list(map(bool, found)) if isinstance(found, list) else found

        began = monotonic()
        found: list[bool] | None = self._call(ask, keys, len(keys))
        if found is not None:
            self.latency.add(monotonic() - began)
        return found

    def get(self, keys: Sequence[bytes], size: int) -> list[Buffer | None] | None:
        """The values of keys, unchecked, and empty where they have another size; None: the call failed."""

        def fetch(keys: Sequence[bytes]) -> list[Buffer | None]:
            tier: Any = self.tier
            found = tier.get_many(keys, most_bytes=size) if self._knows_sizes else tier.get_many(keys)
            if isinstance(found, list):  # what is longer is not kept until it is its turn to be checked
                found = [b"" if each is not None and _size(each) != size else each for each in found]
            return found  # type: ignore[no-any-return]

        began = monotonic()
        values: list[Buffer | None] | None = self._call(fetch, keys, len(keys))
        if values is not None and (known := self.latency.mean) is not None and monotonic() - began < known:
            self.latency.add(monotonic() - began)
        return values

    def put(self, items: Sequence[tuple[bytes, Buffer]]) -> bool:
        """Write values; whether the call succeeded."""
        return self._call(self.tier.put_many, items, None) is not None

    def _call(self, function: Callable[[Any], Any], argument: Any, length: int | None) -> Any:
        try:
            result = function(argument)
            if length is None:
                result = True
            elif not isinstance(result, list) or len(result) != length:
                raise TypeError(f"{self.name}: expected a list of {length} items, got {type(result).__name__}")
        except BaseException as error:  # a store may raise SystemExit; the thread is that of all tiers
            self.failed(error)
            return None
        with self._lock:
            failures, self._failures = self._failures, 0
        if failures >= FAILURES:
            logger.info("%s answers again after %d failures", self.name, failures)
        return result

    def failed(self, error: BaseException) -> None:
        """Count a failure; pass the tier over after several of them."""
        with self._lock:
            self.counts["errors"] += 1
            self._failures += 1
            failures = self._failures
            if failures >= FAILURES:
                self._closed_until = monotonic() + PAUSE
        level = logging.WARNING if failures == FAILURES else logging.DEBUG
        logger.log(level, "%s failed %d times in a row: %s", self.name, failures, _described(error))

    def wrong(self) -> None:
        """Count a value that is not what belongs under its key; log one in ten seconds."""
        self.count("wrong")
        with self._lock:
            tell = monotonic() - self._told >= PAUSE
            self._told = monotonic() if tell else self._told
        level = logging.WARNING if tell else logging.DEBUG
        logger.log(level, "%s: a value is not what belongs under its key; it is a miss", self.name)

    def stats(self, queued_bytes: int) -> TierStats:
        """The counters now."""
        with self._lock:
            return TierStats(
                name=self.name, **self.counts, queued_bytes=queued_bytes, seconds_per_call=self.latency.mean,
                bytes_per_second=self.rate.mean,
            )


def _size(value: object) -> int:
    """The bytes of a value; -1 for an object that has none."""
    return memoryview(value).nbytes if isinstance(value, (bytes, bytearray, memoryview)) else -1


def without_secrets(text: str) -> str:
    """A text whose addresses have no names with passwords, and no queries, which may be signed."""
    return _QUERY.sub("?..", _USER.sub("://..@", text))


def _described(error: BaseException) -> str:
    """The class and the text of an error, in one line; a server or a store decides what its text is."""
    try:
        return f"{type(error).__name__}: {short(without_secrets(str(error)))}"
    except BaseException:
        return type(error).__name__
