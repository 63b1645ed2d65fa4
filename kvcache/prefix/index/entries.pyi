from collections.abc import Hashable
from typing import Any

from kvcache.prefix.index.prefixes import PrefixIndex
from kvcache.prefix.index.slots import Claim

class EntryIndex(PrefixIndex):
    def has_entry(self, tokens: Any, name: Hashable = None) -> bool: ...
    def lease(self, tokens: Any, name: Hashable = None, least: int = 1, whole: bool = False) -> Claim | None: ...
    def remove(self, tokens: Any, name: Hashable = None) -> Claim | None: ...
