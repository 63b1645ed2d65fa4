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
    salts: dict[int, str | None]
    def __init__(
        self, page_size: int, salt_of: Callable[[Hashable], tuple[int, str | None]], capacity: int
    ) -> None: ...
    def __len__(self) -> int: ...
    def take(self, most: int) -> Noted: ...
    def restart(self, spaces: Collection[int]) -> None: ...
    @property
    def is_full(self) -> bool: ...
    @property
    def dropped(self) -> int: ...
    @property
    def num_spaces(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def check(self) -> None: ...
