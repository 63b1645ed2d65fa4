"""The types of what `PagedKvCache.attention` returns: mypy checks this file, and each result is of the type stated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args, get_origin

import numpy as np
import numpy.typing as npt
import pytest

from kvcache import PagedKvCache

if TYPE_CHECKING:
    from typing_extensions import assert_type
else:

    def assert_type(value, kind):
        """True if a value has such a type, as far as a running program knows it."""
        if get_origin(kind) is tuple:
            for item, part in zip(value, get_args(kind), strict=True):
                assert_type(item, part)
        elif kind is not Any:
            kind = get_origin(kind) or kind
            kind = getattr(kind, "__value__", kind)  # NumPy's aliases are of a kind of their own from Python 3.12 on
            assert isinstance(value, get_origin(kind) or kind)


pytestmark = pytest.mark.one_build
Float32 = npt.NDArray[np.float32]


class Output:
    """An array behind DLPack."""

    def __init__(self, array: Float32) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[Any, Any]:
        return self.array.__dlpack_device__()


def test_results_have_their_types() -> None:
    cache = PagedKvCache(4, 16, 2, 32, value_head_dim=16)
    cache.allocate(1, 20)
    queries = np.zeros((1, 4, 32), np.float32)
    assert_type(cache.attention(0, queries, [1]), Float32)
    assert_type(cache.attention(0, queries, [1], return_scores=False, return_lse=False, window=3), Float32)
    assert_type(cache.attention(0, queries, [1], return_scores=True), tuple[Float32, Float32])
    assert_type(cache.attention(0, queries, [1], return_scores="head", scale=1.0), tuple[Float32, Float32])
    assert_type(cache.attention(0, queries, [1], return_lse=True), tuple[Float32, Float32])
    assert_type(cache.attention(0, queries, [1], return_scores=True, return_lse=True), tuple[Float32, Float32, Float32])

    out = Output(np.zeros((1, 4, 16), np.float32))
    assert_type(cache.attention(0, queries, [1], out=out), Output)
    assert_type(cache.attention(0, queries, [1], out=out, return_scores="head"), tuple[Output, Float32])
    assert_type(cache.attention(0, queries, [1], out=out, return_lse=True, causal=False), tuple[Output, Float32])
    both = cache.attention(0, queries, [1], out=out, return_scores=True, return_lse=True)
    assert_type(both, tuple[Output, Float32, Float32])
    either: Float32 | None = np.zeros((1, 4, 16), np.float32) if len(queries) else None
    assert_type(cache.attention(0, queries, [1], out=either), Float32)

    flag = bool(len(queries))
    assert_type(cache.attention(0, queries, [1], return_scores=flag), Any)
    options: dict[str, Any] = {"return_lse": flag, "window": 2}
    assert_type(cache.attention(0, queries, [1], **options), Any)

    assert_type(cache.read(0, 1), tuple[Float32, Float32])
    pair: tuple[Float32, Float32] = np.zeros((20, 2, 32), np.float32), np.zeros((20, 2, 16), np.float32)
    assert_type(cache.read(0, 1, out=pair), tuple[Float32, Float32])


def test_mistakes_are_seen() -> None:
    """Each line has a mistake that mypy reports: its `unused-ignore` would report a line without one."""
    cache = PagedKvCache(4, 16, 2, 32)
    cache.allocate(1, 20)
    queries = np.zeros((1, 4, 32), np.float32)
    with pytest.raises(ValueError, match=r"^return_scores: expected"):
        cache.attention(0, queries, [1], return_scores="heads")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unexpected keyword"):
        cache.attention(0, queries, [1], windows=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"^window: expected an int"):
        cache.attention(0, queries, [1], window="all")  # type: ignore[call-overload]
    out: Float32 = np.zeros((1, 4, 32), np.float32)
    out = cache.attention(0, queries, [1], return_lse=True)  # type: ignore[assignment]
    assert len(out) == 2
