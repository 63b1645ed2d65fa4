"""`PrefixKvCache`: the documented cases, and a state machine against sets of whole keys."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracle_trie import NaivePrefixKv, Tokens

from kvcache._sequences import RUN
from kvcache._store import BlockStore
from kvcache.errors import OutOfMemoryError
from kvcache.kv_cache import CachedKvState, KvCache
from kvcache.prefix import PrefixCacheConfig, PrefixKvCache


def live_cache(num_layers: int, kv_dim: int, num_tokens: int) -> KvCache:
    """The documented fixture: key[d] = layer * 1000 + t + 0.01 d, value[d] the same with 0.02."""
    cache = KvCache(num_layers, 128, kv_dim)
    d = np.arange(kv_dim)
    for t in range(num_tokens):
        for layer in range(num_layers):
            cache.store_kv(layer, layer * 1000.0 + t + 0.01 * d, layer * 1000.0 + t + 0.02 * d)
        cache.advance()
    return cache


def config(**changes: object) -> PrefixCacheConfig:
    values: dict[str, object] = {"max_entries": 64, "max_memory_bytes": 16 * 2**20, "min_prefix_len": 1}
    return PrefixCacheConfig(**(values | changes))  # type: ignore[arg-type]


def state(num_tokens: int, fill: float = 1.0, kv_dim: int = 2, num_layers: int = 1) -> CachedKvState:
    rows = [np.full(num_tokens * kv_dim, fill, np.float32)] * num_layers
    return CachedKvState(rows, rows, num_tokens)


def stored(num_tokens: int = 5, **changes: object) -> PrefixKvCache:
    cache = PrefixKvCache(config(**changes))
    cache.store(range(num_tokens), live_cache(2, 4, num_tokens), num_tokens, 4, 2)
    return cache


def matched(cache: PrefixKvCache, tokens: list[int]) -> int | None:
    hit = cache.lookup(tokens)
    assert hit is None or hit[0] == hit[1].seq_len
    cache.check()
    return hit and hit[0]


# ---------------------------------------------------------------------- the documented cases


def test_case_1_and_2_a_stored_prompt_and_a_longer_one() -> None:
    cache = stored()
    assert len(cache) == 1
    assert matched(cache, list(range(5))) == 5
    assert matched(cache, list(range(10))) == 5


def test_case_3_4_and_5_nothing_to_find() -> None:
    assert matched(stored(), [100, 200, 300]) is None
    cache = PrefixKvCache(config())
    assert matched(cache, [1, 2, 3]) is None
    assert matched(cache, []) is None
    assert cache.misses == 2


@pytest.mark.parametrize("partial", [False, True])
def test_case_6_a_fork(partial: bool) -> None:
    cache = PrefixKvCache(config(partial_matches=partial))
    cache.store_snapshot([0, 1, 2, 3, 4], state(5))
    cache.store_snapshot([0, 1, 2, 10, 11], state(5))
    assert len(cache) == 2
    assert matched(cache, [0, 1, 2, 3, 4]) == 5
    assert matched(cache, [0, 1, 2, 10, 11]) == 5
    assert matched(cache, [0, 1, 2]) == (3 if partial else None)


def test_case_7_and_8_limits() -> None:
    cache = PrefixKvCache(config(max_entries=2))
    for i in range(3):
        cache.store_snapshot([i, i], state(2))
    assert len(cache) == 2
    cache = PrefixKvCache(config(max_memory_bytes=64))
    for i in range(5):
        cache.store_snapshot([i, i], state(2))
        assert cache.memory_usage <= 64
    assert len(cache) == 2


def test_case_9_clear_resets() -> None:
    cache = stored()
    cache.lookup(range(5))
    cache.clear()
    assert cache.is_empty
    assert (len(cache), cache.memory_usage, cache.hits, cache.misses, cache.hit_tokens) == (0, 0, 0, 0, 0)


def test_case_10_restore() -> None:
    cache, source, target = stored(), live_cache(2, 4, 5), KvCache(2, 128, 4)
    hit = cache.lookup(range(5))
    assert hit is not None
    PrefixKvCache.restore(hit[1], target)
    assert target.seq_len == 5
    for layer in range(2):
        np.testing.assert_array_equal(target.get_keys(layer), source.get_keys(layer))
        np.testing.assert_array_equal(target.get_values(layer), source.get_values(layer))


def test_case_11_memory_is_the_floats_held() -> None:
    cache = PrefixKvCache(config())
    assert cache.memory_usage == 0
    cache.store_snapshot([1, 2], state(2, kv_dim=4))
    assert cache.memory_usage == 64


def test_case_12_counters() -> None:
    cache = PrefixKvCache(config())
    assert (cache.hits, cache.misses) == (0, 0)
    cache.lookup([1, 2])
    cache.store_snapshot([1, 2], state(2))
    cache.lookup([1, 2])
    assert (cache.hits, cache.misses) == (1, 1)
    cache.lookup([99, 100])
    assert (cache.hits, cache.misses) == (1, 2)


@pytest.mark.parametrize("partial", [False, True])
def test_case_13_and_14_short_prefixes(partial: bool) -> None:
    cache = PrefixKvCache(config(min_prefix_len=5, partial_matches=partial))
    cache.store_snapshot([1, 2, 3], state(3))
    assert cache.is_empty
    cache.store_snapshot(range(10), state(10))
    assert len(cache) == 1
    assert matched(cache, [0, 1, 2]) is None
    assert matched(cache, [0, 1, 2, 3, 4, 99]) == (5 if partial else None)


def test_case_15_and_17_contents() -> None:
    cache = PrefixKvCache(config())
    assert cache.is_empty
    cache.store_snapshot([1, 2, 3, 4], state(4, 1.0))
    assert not cache.is_empty
    cache.store_snapshot([1, 2, 5, 6], state(4, 3.0))
    assert len(cache) == 2
    for tokens, first, last in (([1, 2, 3, 4], 1.0, 1.0), ([1, 2, 5, 6], 1.0, 3.0)):
        hit = cache.lookup(tokens)
        assert hit is not None
        assert hit[0] == 4
        # KV is a function of the tokens: the shared first rows are those stored first.
        assert (hit[1].keys[0][0], hit[1].keys[0][-1]) == (first, last)


@pytest.mark.parametrize(
    ("stored_key", "asked", "common"),
    [
        ([], [], 0),
        ([1, 2, 3], [], 0),
        ([], [1, 2, 3], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 2, 4], 2),
        ([1, 2, 3], [4, 5, 6], 0),
        ([1, 2], [1, 2, 3, 4], 2),
    ],
)
def test_case_16_common_prefixes(stored_key: list[int], asked: list[int], common: int) -> None:
    cache = PrefixKvCache(config())
    cache.store_snapshot(stored_key, state(len(stored_key)))
    assert matched(cache, asked) == (common or None)


def test_exact_lru() -> None:
    cache = PrefixKvCache(config(max_entries=2))
    for tokens in ([1, 1], [2, 2]):
        cache.store_snapshot(tokens, state(2))
    cache.lookup([1, 1])
    cache.store_snapshot([3, 3], state(2))
    assert [matched(cache, t) for t in ([1, 1], [2, 2], [3, 3])] == [2, None, 2]


def test_nested_keys() -> None:
    cache = PrefixKvCache(config(partial_matches=False))
    cache.store_snapshot([1, 2, 3], state(3))
    cache.store_snapshot(range(1, 9), state(8))
    assert matched(cache, [1, 2, 3, 4, 5, 6]) == 3
    assert matched(cache, list(range(1, 9))) == 8
    cache.store_snapshot([1, 2, 3], state(3))
    assert len(cache) == 2


def test_defaults() -> None:
    cache = PrefixKvCache()
    cache.store_snapshot([1, 2, 3], state(3))
    assert cache.is_empty
    cache.store_snapshot([1, 2, 3, 4], state(4))
    assert matched(cache, [1, 2, 3, 4]) == 4
    assert cache.config == PrefixCacheConfig(256, 536_870_912, 4, True, "f32")


# ---------------------------------------------------------------------- what it does better


def test_shared_prefixes_are_stored_once() -> None:
    cache = PrefixKvCache(config())
    system = list(range(1000, 1100))
    for user in range(20):
        cache.store_snapshot([*system, user, user], state(102))
    assert cache.memory_usage == (100 + 20 * 2) * 16
    assert matched(cache, [*system, 77]) == 100
    assert cache.stats().hit_tokens == 100


def test_what_can_never_fit_is_refused_and_evicts_nothing() -> None:
    cache = PrefixKvCache(config(max_memory_bytes=64))
    cache.store_snapshot([1, 2], state(2))
    cache.store_snapshot([3, 4], state(2))
    with pytest.raises(OutOfMemoryError) as caught:
        cache.store_snapshot(range(10, 15), state(5))
    assert (caught.value.requested, caught.value.available, caught.value.unit) == (80, 64, "bytes")
    assert len(cache) == 2
    with pytest.raises(OutOfMemoryError):
        PrefixKvCache(config(max_entries=0)).store_snapshot([1], state(1))


def test_a_held_state_stays_valid_and_counts_until_it_is_let_go() -> None:
    cache = PrefixKvCache(config(max_memory_bytes=64))
    cache.store_snapshot([1, 2], state(2, 1.0))
    hit = cache.lookup([1, 2])
    assert hit is not None
    _, held = hit
    del hit
    cache.store_snapshot([3, 4], state(2, 2.0))
    cache.store_snapshot([5, 6], state(2, 3.0))  # [1, 2] leaves, its memory cannot: [3, 4] must go too.
    cache.check()
    assert (len(cache), cache.memory_usage) == (1, 64)
    with pytest.raises(OutOfMemoryError) as caught:
        cache.store_snapshot([7, 8, 9], state(3))
    assert caught.value.available == 32
    assert len(cache) == 1
    rows = held.keys[0]
    assert rows.tolist() == [1.0] * 4
    del held
    gc.collect()
    assert cache.memory_usage == 64  # The rows are a view, and keep what they show.
    assert rows.tolist() == [1.0] * 4
    del rows
    assert cache.memory_usage == 32
    cache.store_snapshot([7, 8], state(2))
    cache.check()
    assert len(cache) == 2


def test_rows_are_read_only() -> None:
    hit = stored().lookup(range(5))
    assert hit is not None
    with pytest.raises(ValueError, match="read-only"):
        hit[1].keys[0][0] = 7


def test_namespaces_never_share() -> None:
    cache = PrefixKvCache(config())
    cache.store_snapshot([1, 2, 3], state(3, 1.0), namespace=("model", "a"))
    assert cache.lookup([1, 2, 3]) is None
    assert cache.lookup([1, 2, 3], namespace="modela") is None
    cache.store_snapshot([1, 2, 3], state(3, 2.0, kv_dim=4, num_layers=3))
    hit = cache.lookup([1, 2, 3])
    assert hit is not None
    assert (hit[1].kv_dim, hit[1].num_layers, hit[1].values[2][0]) == (4, 3, 2.0)
    again = cache.lookup([1, 2, 3], namespace=("model", "a"))
    assert again is not None
    assert again[1].keys[0][0] == 1.0
    assert cache.remove([1, 2, 3], namespace=("model", "a"))
    assert cache.lookup([1, 2, 3], namespace=("model", "a")) is None
    assert len(cache) == 1
    cache.check()


def test_remove() -> None:
    cache = PrefixKvCache(config())
    cache.store_snapshot([1, 2, 3], state(3))
    cache.store_snapshot([1, 2], state(2))
    assert not cache.remove([1])
    assert not cache.remove([])
    assert cache.remove([1, 2, 3])
    assert cache.memory_usage == 2 * 16
    assert cache.remove([1, 2])
    assert not cache.remove([1, 2])
    assert cache.memory_usage == 0
    cache.check()


def test_half_precision_takes_half_the_memory() -> None:
    cache = PrefixKvCache(config(dtype="f16"))
    cache.store_snapshot([1, 2], state(2, 0.1, kv_dim=4))
    assert cache.memory_usage == 32
    hit = cache.lookup([1, 2])
    assert hit is not None
    assert hit[1].keys[0].dtype == np.float32
    assert hit[1].keys[0][0] == np.float32(np.float16(0.1))
    with pytest.raises(ValueError, match="finite"):
        cache.store_snapshot([3], state(1, 1e6, kv_dim=4))


def test_bad_snapshots_change_nothing() -> None:
    cache = stored()
    for tokens, snapshot in [
        ([7, 8], state(3)),
        ([7, 8], state(2, np.nan)),
        ([7, 8], state(2, np.inf)),
        ([7, 8], state(2, kv_dim=3)),
        ([7, 2**32], state(2)),
    ]:
        with pytest.raises(ValueError, match="expected"):
            cache.store_snapshot(tokens, snapshot)
    with pytest.raises(ValueError, match="expected 24 floats"):
        cache.store(range(6), live_cache(2, 4, 5), 6, 4, 2)
    with pytest.raises(IndexError):
        cache.store(range(5), live_cache(2, 4, 5), 5, 4, 3)
    cache.check()
    assert len(cache) == 1


def test_restore_refuses_what_does_not_fit() -> None:
    hit = stored().lookup(range(5))
    assert hit is not None
    for target in (KvCache(2, 128, 3), KvCache(1, 128, 4), KvCache(2, 4, 4)):
        with pytest.raises(ValueError, match="expected"):
            PrefixKvCache.restore(hit[1], target)
        assert target.seq_len == 0


# ---------------------------------------------------------------------- formats

BITS = {"f32": 32, "f16": 16, "q8": 8, "q4": 4, "q3": 3, "q2": 2}
PAIRS = [*((name, name) for name in BITS), ("f32", "f16"), ("f32", "q2"), ("q8", "q4"), ("q3", "f16")]


def head_bytes(name: str, head_dim: int) -> int:
    """One row of one head: codes of exactly so many bits; quantised ones have a scale and a minimum in f16."""
    return -(-head_dim * BITS[name] // 8) + (4 if name[0] == "q" else 0)


def noise(num_tokens: int, kv_dim: int, seed: int = 0, num_layers: int = 2) -> CachedKvState:
    rows = np.random.default_rng(seed).standard_normal((2, num_layers, num_tokens * kv_dim)).astype(np.float32)
    return CachedKvState(rows[0], rows[1], num_tokens)


def round_trip(snapshot: CachedKvState, head_dim: int, *formats: str, rotate: bool | str = "auto") -> CachedKvState:
    """What is left of a state that a store of its own has held, token by token."""
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


@pytest.mark.parametrize("head_dim", [8, 32, 40, 128, 256])
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
    """n prompts over one system prompt of p tokens cost p and the sum of their suffixes."""
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
        if name[0] != "q":
            bound = {"f32": 0, "f16": 2**-11 + 1e-9}[name] * np.maximum(np.abs(rows), 2**-14)
        else:
            # Half a step; the rest is for scale and minimum in f16. Rotated, a row errs as a whole.
            bound = spread / (2 ** BITS[name] - 1) / 2 + 2**-10 * np.abs(rows).max(axis=1, keepdims=True) * 2
        error = np.abs(np.reshape(after, (-1, 32)) - rows)
        if name[0] == "q" and rotate:
            assert np.sqrt((error**2).mean()) <= bound.mean()
        elif name in ("q4", "q3", "q2"):  # fitted: a row errs less in the mean, a value at its ends may err more
            assert (np.sqrt((error**2).mean(axis=1)) <= bound[:, 0]).all()
        else:
            assert (error <= bound).all()


def test_a_row_that_is_one_head() -> None:
    for kv_dim in (8, 40, 256):
        cache = PrefixKvCache(config(dtype="q4"))
        cache.store_snapshot([1, 2], noise(2, kv_dim))
        assert cache.memory_usage == 2 * 2 * 2 * head_bytes("q4", kv_dim)


@pytest.mark.parametrize("kv_dim", [4, 12, 264, 1024])
def test_a_row_that_must_be_cut_asks_for_head_dim(kv_dim: int) -> None:
    cache = PrefixKvCache(config(value_dtype="q8"))
    cache.store_snapshot([1, 2], noise(2, 64), namespace="other")
    with pytest.raises(ValueError, match="expected head_dim to be set"):
        cache.store_snapshot([1, 2], noise(2, kv_dim))
    assert len(cache) == 1
    cache.check()


def test_settings_that_cannot_be_honoured_raise() -> None:
    for changes in (
        {"dtype": "q5"},
        {"key_dtype": "f64"},
        {"value_dtype": "Q4"},
        {"dtype": "q4", "head_dim": 12},
        {"dtype": "q4", "head_dim": 264},
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
        with pytest.raises(ValueError, match="head_dim to divide kv_dim 96"):
            cache.store_snapshot([1], noise(1, 96))
    with pytest.raises(ValueError, match="power of two"):
        PrefixKvCache(config(dtype="q4", rotate=True)).store_snapshot([1], noise(1, 24))


@pytest.mark.parametrize("dtype", ["f16", "q8", "q4", "q3", "q2"])
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
    """One tile of 16 tokens: five are held, the others are packed anew by every store."""
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


# ---------------------------------------------------------------------- against the naive twin

TEXT = st.lists(st.integers(0, 2), max_size=9).map(tuple)
KV_DIM, LAYERS = 32, 2


def kv_of(root: int, tokens: Tokens) -> CachedKvState:
    """KV that depends on the whole text before each token, as it does in a model."""
    numbers = [int("1" + "".join(map(str, tokens[:n])), 4) + root * 10**6 for n in range(1, len(tokens) + 1)]
    keys = np.sin(np.add.outer(numbers, np.arange(KV_DIM))).astype(np.float32).reshape(-1)
    return CachedKvState([keys, keys + 1], [-keys, -keys - 1], len(tokens))


class PrefixMachine(RuleBasedStateMachine):
    @initialize(
        entries=st.integers(1, 5), tokens=st.integers(4, 30), shortest=st.integers(0, 3), partial=st.booleans(),
        formats=st.sampled_from(PAIRS), head_dim=st.sampled_from([8, 32]),
    )  # fmt: skip
    def start(
        self, entries: int, tokens: int, shortest: int, partial: bool, formats: tuple[str, str], head_dim: int
    ) -> None:
        self.formats, self.head_dim = formats, head_dim
        self.slot_bytes = LAYERS * KV_DIM // head_dim * sum(head_bytes(name, head_dim) for name in formats)
        limits = PrefixCacheConfig(
            entries, tokens * self.slot_bytes + 7, shortest, partial,
            key_dtype=formats[0], value_dtype=formats[1], head_dim=head_dim,
        )  # fmt: skip
        self.cache = PrefixKvCache(limits)
        self.naive = NaivePrefixKv(entries, tokens, shortest, partial)
        self.states: list[tuple[CachedKvState, CachedKvState]] = []  # as held, and as it must be

    @rule(root=st.integers(0, 1), tokens=TEXT)
    def store(self, root: int, tokens: Tokens) -> None:
        if self.naive.store(root, tokens):
            self.cache.store_snapshot(tokens, kv_of(root, tokens), namespace=root)
        else:
            with pytest.raises(OutOfMemoryError):
                self.cache.store_snapshot(tokens, kv_of(root, tokens), namespace=root)

    @rule(root=st.integers(0, 1), tokens=TEXT, hold=st.booleans())
    def lookup(self, root: int, tokens: Tokens, hold: bool) -> None:
        length = self.naive.lookup(root, tokens)
        hit = self.cache.lookup(tokens, namespace=root)
        assert (hit[0] if hit else 0) == length
        if hit and hold:
            expected = round_trip(kv_of(root, tokens[:length]), self.head_dim, *self.formats)
            self.states.append((hit[1], expected))
            self.naive.held.append(set(self.naive.slots(root, tokens[:length])))

    @precondition(lambda self: self.states)
    @rule(i=st.integers(0, 9))
    def let_go(self, i: int) -> None:
        i %= len(self.states)
        del self.states[i], self.naive.held[i]

    @rule(root=st.integers(0, 1), tokens=TEXT)
    def remove(self, root: int, tokens: Tokens) -> None:
        assert self.cache.remove(tokens, namespace=root) == self.naive.remove(root, tokens)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        assert len(self.cache) == self.naive.num_entries()
        assert self.cache.memory_usage == self.naive.num_used() * self.slot_bytes
        for held, expected in self.states:
            assert_same(held, expected)


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
