"""Hostile values for arguments: numbers, arrays, and objects that violate their protocols."""

import array
import decimal
import fractions

import numpy as np

__all__ = ["VALUES"]


class Lying:
    """Responds to every method that a conversion may call with an error or with nonsense."""

    def __init__(self, **answers):
        self.answers = answers

    def _answer(self, name):
        found = self.answers.get(name, TypeError)
        if isinstance(found, type) and issubclass(found, BaseException):
            raise found(name)
        return found

    def __array__(self, dtype=None, copy=None):
        return self._answer("array")

    def __index__(self):
        return self._answer("index")

    def __float__(self):
        return self._answer("float")

    def __len__(self):
        return self._answer("len")

    def __iter__(self):
        return iter(self._answer("iter"))

    def __getitem__(self, key):
        return self._answer("item")


def ring():
    """A list that contains itself."""
    items = []
    items.append(items)
    return items


def read_only(x):
    x.flags.writeable = False
    return x


def floats(*shape):
    return np.ones(shape, np.float32)


def masked(x, mask):
    return np.ma.array(x, mask=mask)


# name -> function that makes the value, called for each call, since a call may consume or change the value.
VALUES = {
    "None": lambda: None,
    "Ellipsis": lambda: ...,
    "a slice": lambda: slice(1),
    "a type": lambda: int,
    "True": lambda: True,
    "numpy True": lambda: np.bool_(True),
    "-1": lambda: -1,
    "0": lambda: 0,
    "3": lambda: 3,
    "2**31": lambda: 2**31,
    "2**32": lambda: 2**32,
    "2**62": lambda: 2**62,
    "2**63": lambda: 2**63,
    "2**64": lambda: 2**64,
    "-2**31": lambda: -(2**31),
    "-2**63": lambda: -(2**63),
    "-2**64": lambda: -(2**64),
    "10**30": lambda: 10**30,
    "10**5000": lambda: 10**5000,
    "uint64 2**64 - 1": lambda: np.uint64(2**64 - 1),
    "int8 -1": lambda: np.int8(-1),
    "uint8 8": lambda: np.uint8(8),
    "uint8 200": lambda: np.uint8(200),
    "int8 2": lambda: np.int8(2),
    "2.5": lambda: 2.5,
    "1.0": lambda: 1.0,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: -float("inf"),
    "1e300": lambda: 1e300,
    "-0.0": lambda: -0.0,
    "float32 nan": lambda: np.float32("nan"),
    "float16 1": lambda: np.float16(1),
    "1j": lambda: 1j,
    "a fraction": lambda: fractions.Fraction(5, 2),
    "a decimal": lambda: decimal.Decimal("sNaN"),
    "a date": lambda: np.datetime64("2020-01-01"),
    "no date": lambda: np.datetime64("NaT"),
    "a duration": lambda: np.timedelta64(3, "s"),
    "empty text": lambda: "",
    "text": lambda: "f32\0",
    "digits": lambda: "1",
    "a surrogate": lambda: "\ud800",
    "bytes": lambda: b"1",
    "a bytearray": lambda: bytearray(b"abcd"),
    "a memoryview": lambda: memoryview(b"abcdabcd"),
    "an object": object,
    "a dict": lambda: {0: 1},
    "a set": lambda: {1, 2},
    "a generator": lambda: (i for i in range(3)),
    "a range": lambda: range(3),
    "a range down": lambda: range(3, -3, -1),
    "an empty list": list,
    "an empty tuple": tuple,
    "a ring": ring,
    "a ragged list": lambda: [[1.0], [2.0, 3.0]],
    "a deep list": lambda: [[[[[[1.0]]]]]],
    "a list of None": lambda: [None, None],
    "a list of text": lambda: ["a", "b"],
    "a list of bools": lambda: [True],
    "a list of floats": lambda: [1.0, 2.0],
    "a list of ints": lambda: [0, 1, 2],
    "a list of -1": lambda: [-1, -2],
    "a list of 2**64": lambda: [2**64, 1],
    "a list of 10**30": lambda: [10**30],
    "a list of nan": lambda: [float("nan")],
    "a list of a masked value": lambda: [1, np.ma.masked],
    "a list of masked arrays": lambda: [masked([1.0], [True])],
    "an array.array": lambda: array.array("d", [1.0, 2.0]),
    "0-d int": lambda: np.array(1),
    "0-d float": lambda: np.array(0.5),
    "0-d masked int": lambda: masked(np.int64(1), True),
    "masked": lambda: np.ma.masked,
    "empty floats": lambda: floats(0),
    "empty ints": lambda: np.empty(0, int),
    "empty 3-d": lambda: floats(0, 2, 8),
    "objects": lambda: np.array([1, None, "x"], object),
    "objects of ints": lambda: np.array([1, 2], object),
    "bools": lambda: np.ones(2, bool),
    "texts": lambda: np.array(["a", "b"]),
    "complex": lambda: np.ones((4, 2, 8), complex),
    "dates": lambda: np.zeros(2, "M8[s]"),
    "durations": lambda: np.zeros(2, "m8[s]"),
    "records": lambda: np.zeros(2, [("a", "i4"), ("b", "f4")]),
    "voids": lambda: np.zeros(4, "V4"),
    "big-endian ints": lambda: np.arange(3, dtype=">i4"),
    "big-endian uint32": lambda: np.arange(3, dtype=">u4"),
    "big-endian uint64": lambda: np.arange(3, dtype=">u8"),
    "big-endian floats": lambda: np.ones((4, 2, 8), ">f4"),
    "every other int": lambda: np.arange(6)[::2],
    "ints backwards": lambda: np.arange(3)[::-1],
    "every other float": lambda: floats(8, 2, 8)[::2],
    "broadcast floats": lambda: np.broadcast_to(np.float32(1), (4, 2, 8)),
    "Fortran floats": lambda: np.asfortranarray(floats(4, 2, 8)),
    "read-only floats": lambda: read_only(floats(4, 2, 8)),
    "read-only ints": lambda: read_only(np.arange(3)),
    "unaligned floats": lambda: np.zeros(257, np.uint8)[1:].view("f4"),
    "masked floats": lambda: masked(floats(4, 2, 8), [[[True] * 8] * 2] * 4),
    "masked row": lambda: masked(floats(16), [True] * 16),
    "masked ints": lambda: masked(np.arange(3), [False, True, False]),
    "masked nothing": lambda: masked(np.arange(3), False),
    "a matrix": lambda: np.ones((2, 2)).view(np.matrix),
    "4-d floats": lambda: floats(1, 4, 2, 8),
    "2-d ints": lambda: np.ones((2, 2), int),
    "33-d floats": lambda: floats(*[1] * 32),
    "nan floats": lambda: floats(4, 2, 8) * np.nan,
    "inf floats": lambda: floats(4, 2, 8) * np.inf,
    "floats of 3e38": lambda: floats(4, 2, 8) * 3e38,
    "float64 of 1e300": lambda: np.full((4, 2, 8), 1e300),
    "longdoubles": lambda: np.ones((4, 2, 8), np.longdouble),
    "float16": lambda: np.ones((4, 2, 8), np.float16),
    "ints of 2**63": lambda: np.array([2**63], np.uint64),
    "ints of -1": lambda: np.array([-1, -1]),
    "int8": lambda: np.array([1, 2], np.int8),
    "row of floats": lambda: floats(16),
    "rows of nan": lambda: floats(16) * np.nan,
    "lying, all errors": Lying,
    "lying, AttributeError": lambda: Lying(array=AttributeError),
    "lying, RuntimeError": lambda: Lying(
        array=RuntimeError, index=ValueError, float=ValueError, len=ValueError, iter=ValueError
    ),
    "lying, array of text": lambda: Lying(array="x", index="x", float="x", len=3, iter=[1]),
    "lying, length": lambda: Lying(array=np.ones(3), index=2**70, float=1e400, len=5, iter=[]),
}
