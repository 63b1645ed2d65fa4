"""States for a `PrefixKvCache`, and caches with states."""

from __future__ import annotations

import numpy as np

from kvcache.core.runs import RUN
from kvcache.core.store import BlockStore
from kvcache.kernels.kernels import FORMATS
from kvcache.states.cached_state import CachedKvState
from kvcache.states.prefix_config import PrefixCacheConfig
from kvcache.states.prefix_kv_cache import PrefixKvCache


def config(**changes: object) -> PrefixCacheConfig:
    values: dict[str, object] = {"max_entries": 64, "max_memory_bytes": 16 * 2**20, "min_prefix_len": 1}
    return PrefixCacheConfig(**(values | changes))  # type: ignore[arg-type]


def state(num_tokens: int, fill: float = 1.0, kv_dim: int = 2, num_layers: int = 1) -> CachedKvState:
    rows = [np.full(num_tokens * kv_dim, fill, np.float32)] * num_layers
    return CachedKvState(rows, rows, num_tokens)


def matched(cache: PrefixKvCache, tokens: list[int]) -> int | None:
    hit = cache.lookup(tokens)
    assert hit is None or hit[0] == hit[1].seq_len
    cache.check()
    return hit and hit[0]


BITS = {format.name: format.bits for format in FORMATS.values()}
PAIRS = [*((name, name) for name in BITS), ("f32", "f16"), ("f32", "q2"), ("q8", "q4"), ("q3", "f16")]


def head_bytes(name: str, head_dim: int) -> int:
    """One row of one head: codes of this many bits each; quantised formats add a scale and a minimum in f16."""
    return -(-head_dim * BITS[name] // 8) + (4 if FORMATS[name].quantised else 0)


def round_trip(snapshot: CachedKvState, head_dim: int, *formats: str, rotate: bool | str = "auto") -> CachedKvState:
    """A state after a round trip through a separate store, token by token."""
    n, heads = snapshot.seq_len, snapshot.kv_dim // head_dim
    store = BlockStore(snapshot.num_layers, n, 1, heads, head_dim, *formats, rotate)
    runs = np.array([(i, 0, 1) for i in range(n)], RUN)
    rows = []
    for layer, sides in enumerate(zip(snapshot.keys, snapshot.values, strict=True)):
        store.write(layer, runs, *(side.reshape(n, heads, head_dim) for side in sides))
        rows.append([side.reshape(-1) for side in store.read(layer, runs)])
    return CachedKvState([k for k, _ in rows], [v for _, v in rows], n)


def assert_same(got: CachedKvState, want: CachedKvState) -> None:
    for layer in range(want.num_layers):
        np.testing.assert_array_equal(got.keys[layer], want.keys[layer])
        np.testing.assert_array_equal(got.values[layer], want.values[layer])
