from collections.abc import Callable, Collection, Hashable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

EVENT: np.dtype[np.void]
KINDS: tuple[str, ...]

class Noted(NamedTuple):
    events: NDArray[Any]
    tokens: NDArray[np.uint32]
    salts: dict[int, str | None]

class EventBuffer:
    page_size: int
    capacity: int
    is_full: bool
    dropped: int
    num_spaces: int
    salts: dict[int, str | None]
    def __init__(
        self, page_size: int, salt_of: Callable[[Hashable], tuple[int, str | None]], capacity: int
    ) -> None: ...
    def __len__(self) -> int: ...
    def take(self, most: int) -> Noted: ...
    def restart(self, spaces: Collection[int]) -> None: ...
    @property
    def nbytes(self) -> int: ...
    def check(self) -> None: ...
