"""`Tiers`: where the blocks of prefix caches go beyond the memory of a process, and where they come back from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any
from weakref import finalize

from kvcache.support.arguments import as_bytes, as_count, as_finite
from kvcache.support.copies import refuse_copies
from kvcache.tiers.keys import as_secret
from kvcache.tiers.links import Link, TierStats
from kvcache.tiers.lookups import Reader
from kvcache.tiers.protocol import Tier
from kvcache.tiers.source import GROUP_TOKENS, TierSource
from kvcache.tiers.values import wrapping
from kvcache.tiers.windows import StateSource, WindowSource
from kvcache.tiers.writing import WriteBehind

__all__ = ["Tiers"]

_MOST_TIERS = 8
_AT_EXIT = 5.0  # seconds for the queues of an object that nobody closed


class Tiers:
    """Tiers in order of speed, for engines and prefix caches: `PrefixCachedEngine(engine, blocks, tiers=Tiers([...]))`.

    A prompt is looked up in the tiers while it runs: it jumps ahead where fetched blocks reach past it, and the tokens
    and logits are those of an engine without tiers. Nothing that a tier does, fails to do, or returns can raise an
    exception in a request, or make one wait but for `deadline` and `head_start`. After three failures in a row a tier
    is passed over for ten seconds.

    Writes are queued. Another thread writes a group of 64 tokens when it is evicted, and when `after_uses` requests had
    it. When the queue is full they are dropped. Threads begin at the first use. Of the memory of values, which all
    tiers of a process share, 64 MB are kept for the next ones.

    Args:
        tiers: objects with the protocol `Tier`, the fastest first, at most eight.
        secret: 16 to 64 bytes, for those tiers that have no attribute `secret`. All machines that share values need the
            same one. One keyed hash names a value, another one proves it. Whoever can write to a tier without this
            secret can delete values. They cannot make a value that is read, or tell which texts are stored.
        after_uses: how many requests of one cache have a group of tokens when it is written. 1: it is written at the
            end of the first one.
        encrypt: whether values are encrypted, with AES-256-GCM and a key for each namespace. It takes the package
            `cryptography` (extra `encryption`), and one more copy of a value that is read.
        queue_bytes: the most bytes of K and V that wait to be written to one tier, an int or a text such as "1GiB".
        deadline: seconds that a lookup of a `PrefixCache` waits for tiers, since it cannot compute meanwhile.
        head_start: seconds that a prompt of an engine waits for tiers before it runs; in a `BatchEngine` all wait.

    Raises:
        ImportError: `encrypt` without the package.
        TypeError, ValueError: no tier, or more than eight; an object without the methods of one; no secret; numbers out
            of range.
    """

    def __init__(
        self,
        tiers: Iterable[Tier],
        *,
        secret: bytes | None = None,
        after_uses: int = 2,
        encrypt: bool = False,
        queue_bytes: int | str = 256 << 20,
        deadline: float = 0.25,
        head_start: float = 0.0,
    ) -> None:
        if not isinstance(tiers, Iterable):
            raise TypeError(f"tiers: expected a list of tiers, got {type(tiers).__name__}")
        given = list(tiers)
        if not 1 <= len(given) <= _MOST_TIERS:
            raise ValueError(f"tiers: expected 1 to {_MOST_TIERS}, got {len(given)}")
        common = None if secret is None else as_secret(secret)
        uses = as_count(after_uses, "after_uses", 1)
        most = as_bytes(queue_bytes, "queue_bytes")
        self.deadline = as_finite(deadline, "deadline", 0.0)
        self.head_start = as_finite(head_start, "head_start", 0.0)
        self._links = [Link(_checked(tier), _secret(tier, common), uses, encrypt=bool(encrypt)) for tier in given]
        for link in self._links:
            wrapping(link.secret, link.encrypt, b"")  # ImportError now rather than on another thread
        self._writers = [WriteBehind(link, most) for link in self._links]
        self._reader = Reader(self._links)
        self._finalizer = finalize(self, _close, self._reader, self._writers, _AT_EXIT)

    def source(self, model: str, *, waits: bool = True, group_tokens: int = GROUP_TOKENS) -> TierSource:
        """A `Source` for one `PrefixCache`; each cache needs one of its own.

        Args:
            model: a name of all that K and V depend on beside the tokens and the cache's format, such as a hash of the
                weights.
            waits: whether lookups wait for the tiers, up to `deadline`.
            group_tokens: of a value, in whole blocks, one at least.
        """
        if not isinstance(model, str):
            raise TypeError(f"model: expected a str, got {type(model).__name__}")
        deadline = self.deadline if waits else 0.0
        return TierSource(self._links, self._writers, self._reader, model, deadline, self, group_tokens)

    def window_source(self, model: str, first_seen: Callable[[int], int]) -> WindowSource:
        """The source of a prefix cache of layers with a window; see `WindowSource`."""
        return WindowSource(self._links, self._writers, self._reader, model, self, first_seen)

    def state_source(self, model: str, group_tokens: int) -> StateSource:
        """The source of the cached states of layers that keep one; see `StateSource`."""
        return StateSource(self._links, self._writers, self._reader, model, self, group_tokens)

    def stats(self) -> list[TierStats]:
        """The counters of each tier now."""
        return [link.stats(each.queued_bytes) for link, each in zip(self._links, self._writers, strict=True)]

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until the queues are empty, or `timeout`; False if values wait, or were lost since the last call."""
        end = monotonic() + as_finite(timeout, "timeout", 0.0)
        whole = [writer.flush(max(0.0, end - monotonic())) for writer in self._writers]
        return all(whole)

    def close(self, timeout: float = 5.0) -> bool:
        """`flush`, drop what is left, and end the threads; returns what `flush` does. Caches go on without tiers."""
        seconds = as_finite(timeout, "timeout", 0.0)
        self._finalizer.detach()
        return _close(self._reader, self._writers, seconds)

    def __enter__(self) -> Tiers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    __reduce_ex__ = refuse_copies("make another one over the same tiers")

    def __repr__(self) -> str:
        return f"Tiers({', '.join(repr(link.tier) for link in self._links)})"


def _checked(tier: Any) -> Any:
    """A tier; TypeError for an object without the three methods."""
    missing = [name for name in ("get_many", "put_many", "contains_many") if not callable(getattr(tier, name, None))]
    if missing:
        raise TypeError(f"tiers: expected objects with {missing[0]}, got {type(tier).__name__}")
    return tier


def _secret(tier: Any, common: bytes | None) -> bytes:
    own = getattr(tier, "secret", None)
    if own is None and common is None:
        raise ValueError(f"secret: expected one for {type(tier).__name__}, which has none, got None")
    return as_secret(common if own is None else own)


def _close(reader: Reader, writers: list[WriteBehind], timeout: float) -> bool:
    end = monotonic() + timeout
    reader.close()
    whole = [writer.close(max(0.0, end - monotonic())) for writer in writers]
    return all(whole)
