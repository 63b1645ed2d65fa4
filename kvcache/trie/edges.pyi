from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.trie.trie import TokenTrie

class Edges(NamedTuple):
    roots: NDArray[np.int64]
    parents: NDArray[np.int64]
    ends: NDArray[np.int64]
    marked: NDArray[np.bool_]
    stamps: NDArray[np.int64]
    tokens: NDArray[np.uint32]
    values: NDArray[np.int32]

def edges_of(trie: TokenTrie, roots: Iterable[int]) -> Edges: ...
