"""The errors of state, one small family under `KvCacheError`.

Bad input (a wrong shape, an unknown option) is a plain `TypeError`, `ValueError` or `IndexError`; these
classes are for requests that were well formed and could not be served. Every failing call is atomic: the
object is as it was before.
"""

from __future__ import annotations

__all__ = [
    "BlockNotFoundError",
    "CheckpointError",
    "InvalidOperationError",
    "KvCacheError",
    "OutOfMemoryError",
    "SequenceNotFoundError",
    "SnapshotError",
]


class KvCacheError(Exception):
    """Base of everything that a cache raises about its own state."""


class OutOfMemoryError(KvCacheError, MemoryError):
    """More was asked for than is free.

    Attributes:
        requested: what the call needed, in `unit`.
        available: what was free, in `unit`.
        unit: "blocks", "bytes" or "tokens".
    """

    def __init__(self, requested: int, available: int, unit: str = "blocks") -> None:
        super().__init__(requested, available, unit)
        self.requested = requested
        self.available = available
        self.unit = unit

    def __str__(self) -> str:
        return f"out of memory: requested {self.requested} {self.unit}, available {self.available}"


class SequenceNotFoundError(KvCacheError, KeyError):
    """No sequence has this id."""

    def __init__(self, seq_id: int) -> None:
        super().__init__(seq_id)
        self.seq_id = seq_id

    def __str__(self) -> str:
        return f"sequence {self.seq_id} not found"


class BlockNotFoundError(KvCacheError):
    """No block in use has this id."""

    def __init__(self, block_id: int) -> None:
        super().__init__(block_id)
        self.block_id = block_id

    def __str__(self) -> str:
        return f"block {self.block_id} not found"


class InvalidOperationError(KvCacheError):
    """The object is not in a state that allows this call."""


class SnapshotError(KvCacheError):
    """A saved cache or a snapshot does not fit, is damaged, or belongs to something else."""


class CheckpointError(KvCacheError, ValueError):
    """A model checkpoint cannot be used: damaged, incomplete, or of a kind that is not supported.

    The message names the file, the tensor or the option, and what was expected of it.
    """
