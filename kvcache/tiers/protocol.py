"""`Tier`: a store of bytes by key, beyond the memory of this process: a directory, a Redis server, an object store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

__all__ = ["MOST_BYTES", "Buffer", "Tier"]

Buffer: TypeAlias = bytes | bytearray | memoryview

MOST_BYTES = 1 << 30  # of a value, for a caller that does not know better


class Tier(Protocol):
    """A store of values by key. Every method may raise anything, SystemExit too: `Tiers` counts it as misses.

    Each is called on one of the threads of `Tiers`, never on the thread of a request; several threads may call at once.
    A store may forget any value at any time. It may return any bytes: `Tiers` checks them. A key has 20 bytes.

    `get_many` may have a second parameter `most_bytes`, an int: the bytes of the values. It may return b"" in place of
    a longer one, without reading it.

    A tier may have an attribute `secret`, see `Tiers`.
    """

    def get_many(self, keys: Sequence[bytes]) -> list[Buffer | None]:
        """The value of each key; None where there is none."""

    def put_many(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        """Store values under their keys; another value under a key is replaced. They do not change after the call."""

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key has a value."""
