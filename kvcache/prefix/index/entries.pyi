from collections.abc import Hashable
from typing import Any

from kvcache.prefix.index.prefixes import PrefixIndex
from kvcache.prefix.index.slots import Claim, Slots

class EntryIndex(PrefixIndex):
    def has_entry(self, tokens: Any, name: Hashable = None) -> bool: ...
    def lease(self, tokens: Any, name: Hashable = None, least: int = 1, whole: bool = False) -> Claim | None: ...
    def insert(
        self, tokens: Any, fresh: Claim, name: Hashable = None, head: Claim | None = None, slots: Slots | None = None,
        waits: bool = False, most_entries: int = -1,
    ) -> int: ...  # fmt: skip
    def remove(self, tokens: Any, name: Hashable = None) -> Claim | None: ...
