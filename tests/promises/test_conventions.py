"""Conventions of all public classes: one family of errors, snapshots as reports, `check`, conversion of input."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import house_rules
import numpy as np
import pytest
from house_rules import RULES, counted, exceptions

import kvcache
from kvcache import (
    BlockNotFoundError,
    CacheManager,
    InferenceEngine,
    InvalidOperationError,
    KvCache,
    KVCacheConfig,
    KvCacheError,
    OutOfMemoryError,
    PagedKvCache,
    PrefixCache,
    PrefixCacheConfig,
    PrefixCachedEngine,
    PrefixKvCache,
    SequenceNotFoundError,
    SnapshotError,
)
from kvcache.kernels.kernels import FORMATS


class Capsule:
    """A tensor of another library, exported by DLPack."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **kw: Any) -> Any:
        return self.array.__dlpack__(**kw)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class Convertible:
    """A tensor of another library, exported by `__array__`."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.array if dtype is None else self.array.astype(dtype)


def prefix_kv(key: Any, value: Any) -> tuple[Any, Any]:
    from kvcache import CachedKvState

    cache = PrefixKvCache(PrefixCacheConfig(min_prefix_len=1))
    cache.store_snapshot([1, 2], CachedKvState([key], [value], 2))
    hit = cache.lookup([1, 2])
    assert hit is not None
    return hit[1].keys[0], hit[1].values[0]


def live_kv(key: Any, value: Any) -> tuple[Any, Any]:
    cache = KvCache(1, 4, 8)
    cache.restore_from_snapshot([key], [value], 2)
    return cache.get_keys(0), cache.get_values(0)


def paged(key: Any, value: Any) -> tuple[Any, Any]:
    cache = PagedKvCache(2, 4, 1, 8, dtype="f32")
    cache.allocate(0, 2)
    cache.write(0, 0, key, value)
    return cache.read(0, 0)


def blocks(key: Any, value: Any) -> tuple[Any, Any]:
    cache = PrefixCache(2, 2, 1, 1, 8)
    cache.insert([1, 2], 0, [key], [value])
    block = cache.get_block(0)
    assert block is not None
    return block.keys[0], block.values[0]


def manager(key: Any, value: Any) -> tuple[Any, Any]:
    cache = CacheManager(KVCacheConfig(4, 1, 8, 8))
    cache.append(key, value)
    return cache.get([0, 1])


FACES = (prefix_kv, live_kv, paged, blocks, manager)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("kind", ["f16", "f64", "bfloat16", "dlpack", "array", "strided"])
def test_k_and_v_of_any_float_array(face: Any, kind: str) -> None:
    row = np.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 4, 6, 8, 10, 12, 14]], np.float32)
    if face is paged:
        row = row.reshape(2, 1, 8)
    convert = {
        "f16": lambda x: x.astype(np.float16),
        "f64": lambda x: x.astype(np.float64),
        "bfloat16": lambda x: x.astype(pytest.importorskip("ml_dtypes").bfloat16),
        "dlpack": Capsule,
        "array": Convertible,
        "strided": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    }[kind]
    for got, want in zip(face(convert(row), convert(-row)), (row, -row), strict=True):
        tolerance = 0.1 if face is manager else 0
        np.testing.assert_allclose(np.reshape(got, -1), want.reshape(-1), rtol=0, atol=tolerance)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39])
def test_k_and_v_that_are_not_finite(face: Any, bad: float) -> None:
    """1e39 is finite in float64 but in no storage format."""
    good = np.ones((2, 1, 8) if face is paged else (2, 8))
    worse = good.copy()
    worse[1, ..., 3] = bad
    face(good, good)
    for pair in ((worse, good), (good, worse)):
        with pytest.raises(ValueError, match="expected"):
            face(*pair)


@pytest.mark.parametrize("face", FACES)
def test_k_and_v_of_other_dtypes(face: Any) -> None:
    good = np.ones((2, 1, 8) if face is paged else (2, 8))
    for wrong in (good.astype(int), good.astype(complex), good.astype(str)):
        with pytest.raises(TypeError, match="float"):
            face(good, wrong)


def small_paged() -> PagedKvCache:
    cache = PagedKvCache(8, 4, 2, 8, num_layers=2)
    cache.allocate(1, 6)
    return cache


ROWS = np.ones((6, 2, 8), np.float32)
BLOCK = [np.ones(64, np.float32)] * 2
STATE = kvcache.CachedKvState([np.ones(4)], [np.ones(4)], 2)
INTEGERS: list[Any] = [
    lambda n: small_paged().allocate(n, 1),
    lambda n: small_paged().allocate(2, n),
    lambda n: small_paged().append(1, n),
    lambda n: small_paged().append(n, 1),
    lambda n: small_paged().free(n),
    lambda n: small_paged().fork(1, n),
    lambda n: small_paged().truncate(1, n),
    lambda n: small_paged().append_batch([1], [n]),
    lambda n: small_paged().truncate_batch([1], [n]),
    lambda n: small_paged().reorder([1], [n]),
    lambda n: small_paged().grow(n),
    lambda n: small_paged().write_ragged(0, [1], [n], ROWS[:2], ROWS[:2]),
    lambda n: small_paged().set_priority(1, n),
    lambda n: small_paged().apply_streaming_llm(1, n, 2),
    lambda n: small_paged().apply_streaming_llm(1, 2, n),
    lambda n: small_paged().write(n, 1, ROWS, ROWS),
    lambda n: small_paged().write(0, 1, ROWS, ROWS, start=n),
    lambda n: small_paged().write_batch(n, [1], ROWS[:1], ROWS[:1]),
    lambda n: small_paged().read(n, 1),
    lambda n: small_paged().read(0, 1, n),
    lambda n: small_paged().read(0, 1, 0, n),
    lambda n: small_paged().attention(n, ROWS[:1], [1]),
    lambda n: small_paged().attention(0, ROWS[:1], [1], query_lens=[n]),
    lambda n: small_paged().handle(1).key_cache(n),
    lambda n: KvCache(n, 4, 2),
    lambda n: KvCache(1, n, 2),
    lambda n: KvCache(1, 4, n),
    lambda n: KvCache(1, 4, 2, num_heads=n),
    lambda n: KvCache(1, 4, 2).store_kv(n, [1.0, 1.0], [1.0, 1.0]),
    lambda n: KvCache(1, 4, 2).get_keys(n),
    lambda n: KvCache(1, 4, 2).truncate(n),
    lambda n: KvCache(1, 4, 2).restore_from_snapshot([[1.0, 1.0]], [[1.0, 1.0]], n),
    lambda n: kvcache.CachedKvState([np.ones(4)], [np.ones(4)], n),
    lambda n: PrefixCacheConfig(max_entries=n),
    lambda n: PrefixCacheConfig(max_memory_bytes=n),
    lambda n: PrefixCacheConfig(min_prefix_len=n),
    lambda n: PrefixCacheConfig(head_dim=n),
    lambda n: PrefixKvCache().lookup([n]),
    lambda n: PrefixKvCache().store(range(4), KvCache(1, 4, 2), n, 2, 1),
    lambda n: PrefixKvCache().store(range(4), KvCache(1, 4, 2), 4, n, 1),
    lambda n: PrefixKvCache().store(range(4), KvCache(1, 4, 2), 4, 2, n),
    lambda n: PrefixCache(n, 4, 2, 2, 8),
    lambda n: PrefixCache(4, n, 2, 2, 8),
    lambda n: PrefixCache(4, 4, n, 2, 8),
    lambda n: PrefixCache(4, 4, 2, n, 8),
    lambda n: PrefixCache(4, 4, 2, 2, n),
    lambda n: PrefixCache(4, 4, 2, 2, 8).insert(range(4), n, BLOCK, BLOCK),
    lambda n: PrefixCache(4, 4, 2, 2, 8).release(n),
    lambda n: CacheManager(KVCacheConfig(4, 1, 8)).evict(n),
    lambda n: KVCacheConfig(n, 1, 8),
]


@pytest.mark.parametrize("call", INTEGERS, ids=range(len(INTEGERS)))
def test_invalid_counts(call: Any) -> None:
    """Fractions are not truncated, bools are not numbers, and integers beyond 64 bits are refused too."""
    for wrong in (1.5, np.float64(2), float("nan"), "1", object(), -(2**70)):
        with pytest.raises((TypeError, ValueError, IndexError, KvCacheError)):
            call(wrong)


@pytest.mark.parametrize("wrong", [None, 1, "x", [], {}])
def test_an_object_of_another_kind(wrong: Any) -> None:
    hit = PrefixKvCache(PrefixCacheConfig(min_prefix_len=1))
    hit.store_snapshot([1, 2], STATE)
    calls = [
        lambda: hit.store_snapshot([3, 4], wrong),
        lambda: hit.store([3, 4], wrong, 2, 2, 1),
        lambda: hit.restore(wrong, KvCache(1, 4, 2)),
        lambda: hit.restore(STATE, wrong),
        lambda: PrefixCache(4, 4, 2, 2, 8).close_session(wrong),
        lambda: CacheManager(wrong),
        lambda: small_paged().with_eviction_strategy(wrong),
        lambda: small_paged().attention(0, ROWS[:1], [1], scale=float("nan")),
        lambda: small_paged().attention(0, ROWS[:1], [1], scale=float("inf")),
    ]
    for call in calls if wrong is None else [*calls, lambda: PrefixKvCache(wrong)]:
        with pytest.raises((TypeError, ValueError), match="expected"):
            call()
    hit.check()
    assert len(hit) == 1


def test_one_family_of_errors() -> None:
    error = OutOfMemoryError(3, 2)
    assert (error.requested, error.available, error.unit) == (3, 2, "blocks")
    assert str(error) == "out of memory: requested 3 blocks, available 2"
    family = (OutOfMemoryError, SequenceNotFoundError, BlockNotFoundError, InvalidOperationError, SnapshotError)
    assert all(issubclass(kind, KvCacheError) for kind in family)
    assert issubclass(OutOfMemoryError, MemoryError)
    assert issubclass(SequenceNotFoundError, KeyError)
    assert not issubclass(KvCacheError, (ValueError, TypeError))
    assert str(SequenceNotFoundError(7)) == "sequence 7 not found"
    assert str(BlockNotFoundError(7)) == "block 7 not found"


def test_reports_are_snapshots() -> None:
    cache = PagedKvCache(4, 4, 1, 8)
    cache.allocate(0, 3)
    reports = (
        cache.stats(),
        cache.get_sequence(0),
        cache.handle(0).stats(),
        PrefixKvCache().stats(),
        PrefixCache(2, 2, 1, 1, 8).stats(),
        KvCache(1, 1, 1).stats(),
    )
    before = [dataclasses.replace(report) for report in reports]
    for report in reports:
        name = dataclasses.fields(report)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(report, name, 7)
    cache.append(0, 4)
    assert list(reports) == before


def test_every_class_with_state_has_check() -> None:
    engines = InferenceEngine, PrefixCachedEngine, kvcache.BatchEngine
    for kind in (PagedKvCache, CacheManager, PrefixKvCache, PrefixCache, KvCache, *engines):
        assert callable(kind.check)
        assert "AssertionError" in (inspect.getdoc(kind.check) or "")


@pytest.mark.parametrize("value", FORMATS)
@pytest.mark.parametrize("key", FORMATS)
def test_every_format_on_either_side(key: str, value: str) -> None:
    """All classes that store K and V return the same rows as a paged cache, in the same number of bytes."""
    from kvcache import CachedKvState

    rows = np.random.default_rng(0).standard_normal((2, 16, 2, 32)).astype(np.float32)
    table = PagedKvCache(1, 16, 2, 32, key_dtype=key, value_dtype=value)
    table.allocate(0, 16)
    table.write(0, 0, *rows)
    want = table.read(0, 0)
    trie = PrefixCache(1, 16, 1, 2, 32, key_dtype=key, value_dtype=value)
    trie.insert(range(16), 0, *([side.swapaxes(0, 1).reshape(-1)] for side in rows))
    block = trie.get_block(0)
    assert block is not None
    states = PrefixKvCache(PrefixCacheConfig(key_dtype=key, value_dtype=value, head_dim=32))
    states.store_snapshot(range(16), CachedKvState(*([side.reshape(-1)] for side in rows), 16))
    hit = states.lookup(range(16))
    assert hit is not None
    for side, name in enumerate(("keys", "values")):
        flat = getattr(block, name)[0].reshape(2, 16, 32).swapaxes(0, 1)
        np.testing.assert_array_equal(flat, want[side])
        np.testing.assert_array_equal(getattr(hit[1], name)[0].reshape(16, 2, 32), want[side])
    cost = sum(16 * 2 * (32 * FORMATS[name].bits // 8 + 4 * FORMATS[name].quantised) for name in (key, value))
    assert states.memory_usage == cost
    assert table.block_memory_bytes == trie.memory_bytes == cost


@pytest.mark.one_build
def test_no_module_uses_the_clock_or_random_numbers() -> None:
    """Recency is a counter; only sampling and seeds draw numbers. A chat template may ask for the date."""
    house = Path(kvcache.__file__).parent
    drawing, dated = house / "sampling" / "sampling.py", house / "engine" / "template_sandbox.py"
    shown = {house / "demo" / "run.py", house / "commands" / "chat.py", house / "commands" / "answer_view.py"}
    shown.add(house / "serving" / "engine_events.py")  # when a batch of events was made
    shown.add(house / "serving" / "batch.py")  # the clock that metrics and deadlines read
    shown.add(house / "server" / "forms.py")  # when an answer was made
    shown.add(house / "server" / "request_log.py")  # when a request ended, and how long it took
    for path in sorted(set(house.rglob("*.py")) - shown - {drawing, dated}):
        names = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        assert not names & {"time", "random", "datetime"}, path.name


@pytest.mark.one_build
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_house_rules(rule: Any) -> None:
    """No file breaks a rule but for what is on its list, and nothing is on a list that is mended."""
    found, listed = counted(rule()), counted(exceptions()[rule.__name__])
    assert sorted((found - listed).elements()) == [], "new: mend it"
    assert sorted((listed - found).elements()) == [], "mended: `python tests/support/house_rules.py` shortens the list"


@pytest.mark.one_build
def test_house_rules_see(monkeypatch: Any) -> None:
    """Each rule finds what it looks for in a file that breaks all of them."""
    bad = (
        "import kvcache.other as other\n"
        "class Parted:\n"
        "    QQQOf two modules.QQQ\n"
        "    save = other.save\n"
        "    first, second = other.first, len\n"
        "    size = property(lambda self: self._size)\n"
        "    def check(self, it):\n"
        "        return self._own, it._foreign, getattr(it, '_by_name'), it._replace()\n"
    ).replace("Q", '"')
    monkeypatch.setattr(house_rules, "sources", lambda *kinds, **_: [("kvcache/bad.py", bad)] if "py" in kinds else [])
    found = [rule().get("kvcache/bad.py") for rule in RULES[:4]]
    assert found[0] == ["Parted: other.first", "Parted: other.save"]
    assert found[1] == ["Parted.size"]
    assert found[2] == ["_by_name", "_foreign"]
    assert found[3] == ["Of two modules."]
