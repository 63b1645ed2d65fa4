"""`PageReader`: it delivers the content of pages that the index names already, from a file or a tier."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["PageReader"]

Int32 = npt.NDArray[np.int32]


class PageReader(Protocol):
    """Fills the slots of pages. Called with the cache's lock held; a failure to deliver is no exception.

    A page is known by its id; `Slots.of` says where its slots are, for each group of layers.
    """

    def fetch(self, pages: Int32) -> Int32:
        """Fill the slots of pages; the pages that have their content now, which may include others that wait."""
