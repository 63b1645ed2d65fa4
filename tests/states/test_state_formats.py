"""`PrefixKvCache` in every format: bytes per token, rows after a round trip, settings that are refused."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from prefix_states import BITS, PAIRS, assert_same, config, head_bytes, matched, round_trip, state

from kvcache.kernels.kernels import FORMATS
from kvcache.states.cached_state import CachedKvState
from kvcache.states.kv_cache import KvCache
from kvcache.states.prefix_kv_cache import PrefixKvCache


def noise(num_tokens: int, kv_dim: int, seed: int = 0, num_layers: int = 2) -> CachedKvState:
    rows = np.random.default_rng(seed).standard_normal((2, num_layers, num_tokens * kv_dim)).astype(np.float32)
    return CachedKvState(rows[0], rows[1], num_tokens)


@pytest.mark.parametrize("head_dim", [8, 32, 40, 128, 256, 512])
@pytest.mark.parametrize(("key", "value"), PAIRS)
def test_what_a_token_costs(key: str, value: str, head_dim: int) -> None:
    cache = PrefixKvCache(config(key_dtype=key, value_dtype=value, head_dim=head_dim))
    for n in (1, 63, 65):
        cache.store_snapshot([n] * n, noise(n, 2 * head_dim), namespace=n)
    token = 2 * 2 * (head_bytes(key, head_dim) + head_bytes(value, head_dim))
    assert cache.memory_usage == (1 + 63 + 65) * token
    cache.check()


@pytest.mark.parametrize(("key", "value"), PAIRS)
def test_system_prompt_once_at_every_format(key: str, value: str) -> None:
    """n prompts over one system prompt of p tokens take the memory of p tokens and of their suffixes."""
    cache = PrefixKvCache(config(key_dtype=key, value_dtype=value, head_dim=64))
    system, suffixes = list(range(1000, 1300)), [1, 20, 7, 64, 33]
    for user, n in enumerate(suffixes):
        cache.store_snapshot([*system, *[user] * n], noise(300 + n, 128, seed=user))
    token = 2 * 2 * (head_bytes(key, 64) + head_bytes(value, 64))
    assert cache.memory_usage == (300 + sum(suffixes)) * token
    hit = cache.lookup([*system, 0])
    assert hit is not None
    assert hit[0] == 301
    assert_same(hit[1], round_trip(noise(301, 128, seed=0), 64, key, value))
    cache.check()


@pytest.mark.parametrize("rotate", [False, "auto"])
@pytest.mark.parametrize(("key", "value"), PAIRS)
def test_restore_is_the_round_trip_of_the_format(key: str, value: str, rotate: bool | str) -> None:
    cache, target = (
        PrefixKvCache(config(key_dtype=key, value_dtype=value, head_dim=32, rotate=rotate)),
        KvCache(2, 128, 96),
    )
    source = noise(70, 96)
    cache.store_snapshot(range(70), source)
    hit = cache.lookup(range(70))
    assert hit is not None
    PrefixKvCache.restore(hit[1], target)
    got = target.snapshot()
    assert_same(got, round_trip(source, 32, key, value, rotate=rotate))
    for name, after, before in ((key, got.keys, source.keys), (value, got.values, source.values)):
        rows = np.reshape(before, (-1, 32))
        spread = np.ptp(rows, axis=1, keepdims=True)
        if not FORMATS[name].quantised:
            bound = {"f32": 0, "f16": 2**-11 + 1e-9}[name] * np.maximum(np.abs(rows), 2**-14)
        else:
            # Half a step, and the rounding of scale and minimum to f16. In a rotated row every channel has the error.
            bound = spread / (2 ** BITS[name] - 1) / 2 + 2**-10 * np.abs(rows).max(axis=1, keepdims=True) * 2
        error = np.abs(np.reshape(after, (-1, 32)) - rows)
        if FORMATS[name].quantised and rotate:
            assert np.sqrt((error**2).mean()) <= bound.mean()
        elif FORMATS[name].fitted:  # smaller errors in the mean, larger ones of extremes
            assert (np.sqrt((error**2).mean(axis=1)) <= bound[:, 0]).all()
        else:
            assert (error <= bound).all()


def test_a_row_that_is_one_head() -> None:
    for kv_dim in (8, 40, 256, 512):
        cache = PrefixKvCache(config(dtype="q4"))
        cache.store_snapshot([1, 2], noise(2, kv_dim))
        assert cache.memory_usage == 2 * 2 * 2 * head_bytes("q4", kv_dim)


@pytest.mark.parametrize("kv_dim", [4, 12, 520, 1024])
def test_a_row_that_must_be_cut_asks_for_head_dim(kv_dim: int) -> None:
    cache = PrefixKvCache(config(value_dtype="q8"))
    cache.store_snapshot([1, 2], noise(2, 64), namespace="other")
    with pytest.raises(ValueError, match="head_dim: expected an int"):
        cache.store_snapshot([1, 2], noise(2, kv_dim))
    assert len(cache) == 1
    cache.check()


def test_settings_that_cannot_be_honoured_raise() -> None:
    for changes in (
        {"dtype": "q7"},
        {"key_dtype": "f64"},
        {"value_dtype": "Q4"},
        {"dtype": "q4", "head_dim": 12},
        {"dtype": "q4", "head_dim": 520},
        {"dtype": "q4", "head_dim": 0},
        {"dtype": "q4", "head_dim": -8},
        {"dtype": "q4", "head_dim": 24, "rotate": True},
        {"rotate": "yes"},
        {"max_entries": -1},
        {"max_memory_bytes": -1},
        {"min_prefix_len": -1},
    ):
        with pytest.raises(ValueError, match="expected"):
            config(**changes)
    for dtype in ("f32", "q4"):
        cache = PrefixKvCache(config(dtype=dtype, head_dim=64))
        with pytest.raises(ValueError, match="head_dim: expected a divisor of kv_dim 96"):
            cache.store_snapshot([1], noise(1, 96))
    with pytest.raises(ValueError, match="power of two"):
        PrefixKvCache(config(dtype="q4", rotate=True)).store_snapshot([1], noise(1, 24))


@pytest.mark.parametrize("dtype", [name for name in FORMATS if name != "f32"])
def test_what_a_format_cannot_hold_changes_nothing(dtype: str) -> None:
    token = 2 * head_bytes(dtype, 8)
    cache = PrefixKvCache(config(key_dtype=dtype, value_dtype="f32", max_memory_bytes=10 * token + 320))
    cache.store_snapshot(range(10), state(10, kv_dim=8))
    for bad in (1e6, -1e6, np.nan, np.inf):
        with pytest.raises(ValueError, match="expected"):
            cache.store_snapshot(range(20, 30), state(10, bad, kv_dim=8))
    assert matched(cache, list(range(10))) == 10


@pytest.mark.parametrize("dtype", ["q8", "q3"])
def test_held_states_keep_their_bytes(dtype: str) -> None:
    """Through evictions, growth, and new neighbours in the same tile."""
    token = 2 * 2 * head_bytes(dtype, 32)
    cache = PrefixKvCache(config(dtype=dtype, max_memory_bytes=300 * token))
    held = []
    for i in range(60):
        cache.store_snapshot([i] * 7, noise(7, 32, seed=i))
        hit = cache.lookup([i] * (1 + i % 7))
        assert hit is not None
        held.append((hit[1], round_trip(noise(7, 32, seed=i), 32, dtype, dtype)))
        del held[: max(0, len(held) - 20)]
        for got, want in held:
            n = got.seq_len * 32
            assert_same(got, CachedKvState([k[:n] for k in want.keys], [v[:n] for v in want.values], got.seq_len))
    cache.check()


def test_states_are_read_while_neighbours_are_written() -> None:
    """One tile of 16 tokens: five are held, and every store packs the others again."""
    cache = PrefixKvCache(config(dtype="q3", max_entries=2))
    cache.store_snapshot([1] * 5, noise(5, 256))
    hit = cache.lookup([1] * 5)
    assert hit is not None
    want, done, wrong = round_trip(noise(5, 256), 256, "q3", "q3"), threading.Event(), []

    def read() -> None:
        while not done.is_set():
            wrong.extend(not np.array_equal(a, b) for a, b in zip(hit[1].keys, want.keys, strict=True))

    reader = threading.Thread(target=read)
    reader.start()
    others = [noise(10, 256, seed=i) for i in range(10)]
    for i in range(1000):
        cache.store_snapshot([2 + i] * 10, others[i % 10])
    done.set()
    reader.join()
    assert wrong
    assert not any(wrong)
