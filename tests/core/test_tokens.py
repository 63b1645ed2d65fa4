"""Conversion of token ids: accepted types, copies, and refused values."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest

from kvcache.support.token_ids import as_tokens


def test_uint32_arrays_are_not_copied() -> None:
    tokens = np.arange(5, dtype=np.uint32)
    assert as_tokens(tokens) is tokens
    tokens.flags.writeable = False
    assert as_tokens(tokens) is tokens


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 2**32 - 1],
        (1, 2, 2**32 - 1),
        [np.int64(1), np.uint8(2), np.uint32(2**32 - 1)],
        np.array([1, 2, 2**32 - 1]),
        np.array([1, 2, 2**32 - 1], dtype=np.uint64),
        np.array([1, 2, 2**32 - 1], dtype=">u4"),
        np.array([1, 0, 2, 0, 2**32 - 1, 0], dtype=np.uint32)[::2],
        array.array("L", [1, 2, 2**32 - 1]),
        memoryview(np.array([1, 2, 2**32 - 1], dtype=np.uint32)),
    ],
)
def test_integer_array_likes(tokens: Any) -> None:
    ids = as_tokens(tokens)
    assert ids.dtype == np.uint32
    assert ids.dtype.isnative
    assert ids.flags.c_contiguous
    assert ids.tolist() == [1, 2, 2**32 - 1]


@pytest.mark.parametrize("tokens", [[], (), range(0), np.zeros(0, np.int8)])
def test_no_tokens(tokens: Any) -> None:
    assert as_tokens(tokens).shape == (0,)


@pytest.mark.parametrize(
    "tokens",
    [[True], [1.0], ["1"], [None], [[1]], [np.bool_(True)], [np.float32(1)], np.zeros(2), np.zeros(2, bool), ["ab"]],
)
def test_non_integers_are_a_type_error(tokens: Any) -> None:
    with pytest.raises(TypeError, match=r"expected .* got"):
        as_tokens(tokens)


@pytest.mark.parametrize("tokens", [None, 5, "abc", {1, 2}, np.zeros((2, 2), np.uint32), np.uint32(3)])
def test_non_sequences_are_refused(tokens: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"expected .* got"):
        as_tokens(tokens)


@pytest.mark.parametrize(
    "tokens",
    [[-1], [2**32], [2**70], [-(2**70)], np.array([-1]), np.array([2**32]), np.array([-1], np.int8), [np.int64(-1)]],
)
def test_ids_out_of_range_are_a_value_error(tokens: Any) -> None:
    with pytest.raises(ValueError, match=r"tokens: expected ids in \[0, 2\*\*32\), got"):
        as_tokens(tokens)
