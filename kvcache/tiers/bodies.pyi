import numpy as np
from numpy.typing import NDArray

from kvcache.core.store import BlockStore
from kvcache.tiers.protocol import Buffer

KEY_WORDS: int

def copy_out(store: BlockStore, blocks: NDArray[np.int32], out: Buffer | NDArray[np.uint8]) -> None: ...
def copy_in(store: BlockStore, blocks: NDArray[np.int32], data: Buffer | NDArray[np.uint8]) -> None: ...
def digest(key: NDArray[np.uint32], data: Buffer | NDArray[np.uint8]) -> bytes: ...
