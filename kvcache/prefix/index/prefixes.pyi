from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.prefix.index.slots import Claim, Slots
from kvcache.prefix.index.source import PageReader
from kvcache.trie.trie import TokenTrie

Int32 = NDArray[np.int32]

class Match(NamedTuple):
    length: int
    pages: Int32
    tail: int
    is_entry: bool

class Space:
    name: Hashable
    slots: Any  # Slots, of whatever kind the cache has
    root: int

class PrefixIndex:
    trie: TokenTrie
    kinds: list[Any]  # of Slots
    by_name: dict[Hashable, Space]
    by_root: dict[int, Space]
    clock: int
    hits: int
    misses: int
    hit_tokens: int
    lookup_tokens: int
    evictions: int
    def __init__(self, trie: TokenTrie, slots: Slots | None = None, most_ghosts: int | None = None) -> None: ...
    def __len__(self) -> int: ...
    def spaces(self) -> list[Space]: ...
    def space(self, name: Hashable) -> Space | None: ...
    def find(self, tokens: Any, name: Hashable = None) -> Match: ...
    def claim(self, tokens: Any, name: Hashable = None, whole: bool = False) -> Claim: ...
    def head(self, tokens: Any, name: Hashable = None) -> Claim | None: ...
    def lease(self, tokens: Any, name: Hashable = None, least: int = 1, whole: bool = False) -> Claim | None: ...
    def remove(self, tokens: Any, name: Hashable = None) -> Claim | None: ...
    def insert(
        self, tokens: Any, fresh: Claim, name: Hashable = None, head: Claim | None = None,
        source: PageReader | None = None,
    ) -> None: ...
    def evict(self, count: int = 1) -> Claim | None: ...
    def clear(self) -> None: ...
    def forget(self, tokens: Any, name: Hashable, page: int, least: int = -1) -> None: ...
    @property
    def reasons(self) -> dict[str, int]: ...
    @property
    def nbytes(self) -> int: ...
    def check(self) -> None: ...

def load(parts: Sequence[tuple[PrefixIndex, Iterable[tuple[Hashable, Any, Slots, Int32, PageReader]]]]) -> None: ...
