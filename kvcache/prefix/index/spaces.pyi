from collections.abc import Hashable
from typing import Any

class Space:
    name: Hashable
    slots: Any  # Slots, of whatever kind the cache has

class Spaces:
    def in_use(self) -> list[tuple[Space, int]]: ...
