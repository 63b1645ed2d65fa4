"""`PendingWrites`: the lengths of a `KvCache`, and what a call writes, all or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["PendingWrites"]

Float32 = npt.NDArray[np.float32]


class PendingWrites:
    """The lengths of a `KvCache`, and the pending writes of a call, which are completed after an interrupt.

    Attributes:
        lengths: tokens committed, and tokens written.
        due: `(rows, lengths)`: pairs of a view and what to write there, and the lengths afterwards; None: no write.
    """

    def __init__(self) -> None:
        self.lengths = (0, 0)
        self.due: tuple[list[tuple[Float32, Any]], tuple[int, int]] | None = None

    @property
    def committed(self) -> int:
        """Tokens committed."""
        return self.lengths[0]

    @property
    def written(self) -> int:
        """Tokens written: those committed and maybe the next one."""
        return self.lengths[1]

    def write(self, rows: list[tuple[Float32, Any]], lengths: tuple[int, int]) -> None:
        """Write rows, which are no views of the cache, and set the lengths."""
        self.due = rows, lengths  # once this is set, an interrupt cannot lose the change: the lock calls `finish`
        self.finish()

    def finish(self) -> None:
        """Write the rows that are due; may run a second time after an interrupt."""
        if self.due is not None:
            rows, lengths = self.due
            for place, row in rows:
                place[...] = row
            self.lengths = lengths
            self.due = None

    def check(self, most: int) -> None:
        """Verify both lengths, `most` tokens at most; AssertionError names the wrong one."""
        committed, written = self.lengths
        assert 0 <= committed <= most, f"kv cache: {committed} tokens committed of {most}"
        assert committed <= written <= committed + 1, f"kv cache: {written} tokens written, {committed} committed"
        assert written <= most, f"kv cache: {written} tokens written of {most}"
