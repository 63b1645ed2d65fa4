"""The family of errors under `KvCacheError`.

Invalid arguments (a wrong shape, an unknown option) raise a plain `TypeError`, `ValueError` or `IndexError`. These
classes are for valid calls that cannot be carried out. A failing call is atomic: the object is unchanged.
"""

from __future__ import annotations

__all__ = [
    "BlockNotFoundError",
    "CheckpointError",
    "GrammarError",
    "InvalidOperationError",
    "KvCacheError",
    "OutOfMemoryError",
    "QueueFullError",
    "SequenceNotFoundError",
    "SnapshotError",
    "SpillError",
]


class KvCacheError(Exception):
    """Base class of the errors about the state of a cache."""


class OutOfMemoryError(KvCacheError, MemoryError):
    """A call needs more than is free.

    Attributes:
        requested: the amount the call needed, in `unit`.
        available: the amount that was free, in `unit`.
        unit: "blocks", "bytes" or "tokens".
        purpose: what it was for, such as "weights"; "": not told.
        idle: of a `PagedKvCache`, the blocks beside these that prefix caches alone hold.
        idle_of_each: the same of each prefix cache that holds some.
    """

    def __init__(self, requested: int, available: int, unit: str = "blocks") -> None:
        super().__init__(requested, available, unit)
        self.requested = requested
        self.available = available
        self.unit = unit
        self.purpose = ""
        self.idle_of_each: tuple[int, ...] = ()

    @property
    def idle(self) -> int:
        """See above."""
        return sum(self.idle_of_each)

    def __str__(self) -> str:
        text = f"out of memory: requested {self.requested} {self.unit}, available {self.available}"
        missing, caches = self.requested - self.available, len(self.idle_of_each)
        if not self.idle:
            return text
        if caches > 1:
            return f"{text}, and {self.idle} that {caches} PrefixCaches alone hold; evict of each frees its own"
        text += f", and {self.idle} that a PrefixCache alone holds; its evict"
        if missing <= self.idle:
            return f"{text}({missing}) frees as many"
        return f"{text}({self.idle}) frees these, {missing - self.idle} too few"


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


class QueueFullError(KvCacheError):
    """The queue of a `BatchEngine` is full.

    Attributes:
        max_queue: how many may wait.
        of: what waits: "requests", or "hints".
    """

    def __init__(self, max_queue: int, of: str = "requests") -> None:
        super().__init__(max_queue, of)
        self.max_queue, self.of = max_queue, of

    def __str__(self) -> str:
        return f"queue full: {self.max_queue} {self.of} wait; submit again when one of them has begun"


class SnapshotError(KvCacheError):
    """A saved cache or a snapshot is damaged, has other dimensions, or belongs to another model."""


class SpillError(KvCacheError):
    """A cache that spills cannot write what memory has no room for, or cannot read it as it was written.

    Attributes:
        folder: of the file.
        layer, block: what could not be read, a layer of the cache that spills and one of its blocks; -1: it is not one.
        reason: the words of the message that say what was expected and what was found.
        is_full: whether memory and the file have no room, and what is there can be read once some is freed.
    """

    def __init__(self, folder: str, layer: int, block: int, reason: str, is_full: bool = False) -> None:
        super().__init__(folder, layer, block, reason, is_full)
        self.folder, self.layer, self.block, self.reason, self.is_full = folder, layer, block, reason, is_full

    def __str__(self) -> str:
        where = f" layer {self.layer}, block {self.block}:" if self.block >= 0 else ""
        return f"spill: {self.folder}:{where} expected {self.reason}"


class CheckpointError(KvCacheError, ValueError):
    """A model checkpoint is damaged, incomplete or not supported.

    The message names the file, the tensor or the option, and the expected value.
    """


class GrammarError(KvCacheError, ValueError):
    """The grammar of a request is none, is not supported, or needs more than its limits."""
