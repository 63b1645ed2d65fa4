from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.trie.nodes import NodeTable

class Edges(NamedTuple):
    parents: NDArray[np.int64]
    ends: NDArray[np.int64]
    marked: NDArray[np.bool_]
    stamps: NDArray[np.int64]
    tokens: NDArray[np.uint32]
    values: NDArray[np.int32]

def edges_of(trie: NodeTable, root: int) -> Edges: ...
