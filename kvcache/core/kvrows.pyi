from typing import Any

import numpy.typing as npt

class KvRows:
    count: int
    given: KvRows | None
    def __init__(self, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> None: ...
    def part(self, start: int, stop: int) -> KvRows: ...
