"""Matrices of every format: of random weights, or of random codes where no floats are quantised."""

import numpy as np

from kvcache.kernels.matrix import MATRIX_FORMATS, Matrix


def bytes_of_scales(rng, line, shape):
    """Scales of a packed format, or minima, about 0.01 to 1 where they are floats, any where they are bytes."""
    if line.scales == "halves":
        return (rng.standard_normal(shape) * 10.0 ** rng.integers(-2, 1, shape)).astype(np.float16)
    if line.scales == "bytes" and not line.has_minima:
        return rng.integers(-128, 128, shape).astype(np.int8)
    low, high = {"nibbles": (0, 16), "e8m0": (118, 128), "e4m3": (0, 127)}.get(line.scales, (0, 256))
    return rng.integers(low, high, shape).astype(np.uint8)


def random_parts(rng, format, rows, columns):
    """Codes, scales, minima and units as `Matrix.put_codes` takes them, and what they stand for, in float32."""
    line, groups = MATRIX_FORMATS[format], -(-columns // MATRIX_FORMATS[format].channels)
    records = -(-columns // line.record)
    codes = rng.integers(0, 1 << line.bits, (rows, columns)).astype(np.uint8)
    codes = (codes ^ 128).view(np.int8) if line.bits == 8 else codes
    scales = bytes_of_scales(rng, line, (rows, groups))
    minima = bytes_of_scales(rng, line, (rows, groups)) if line.has_minima else None
    units = None
    if line.has_units:
        units = (rng.standard_normal((rows, records, 1 + line.has_minima)) * 0.01).astype(np.float16)
        units = units.astype(np.float32) if line.has_minima else units[..., 0].astype(np.float32) / 3
    return (codes, scales, minima, units), values_of(format, codes, scales, minima, units)


def values_of(format, codes, scales, minima=None, units=None):
    """The values of rows in parts, in float32, by the definition of each format (ckernels/kvc_matrix.h)."""
    line, columns = MATRIX_FORMATS[format], codes.shape[1]
    numbers = codes.astype(np.float32) - np.float32(0 if line.bits == 8 else line.zero)
    if line.numbers is not None:
        numbers = np.array(line.numbers, np.float32)[codes]
    unit = minimum_unit = np.ones(scales.shape, np.float32)
    if units is not None:
        own = np.repeat(units, line.record // line.channels, axis=1)[:, : scales.shape[1]]
        unit, minimum_unit = (own[..., 0], own[..., 1]) if line.has_minima else (own, own)
    wide = [np.repeat(unit * floats_of_scales(line, scales), line.channels, axis=1)[:, :columns]]
    if minima is not None:
        least = minimum_unit * floats_of_scales(line, minima)
        return wide[0] * numbers + np.repeat(least, line.channels, axis=1)[:, :columns]
    return wide[0] * numbers


def floats_of_scales(line, scales):
    """Scales as they are stored, in float32."""
    if line.scales == "e8m0":
        return np.ldexp(np.float32(1), scales.astype(np.int32) - 128)
    if line.scales == "e4m3":
        exponent, mantissa = scales >> 3, (scales & 7).astype(np.float32)
        normal = np.ldexp(8 + mantissa, exponent.astype(np.int32) - 11)
        return np.where(exponent, normal, mantissa / np.float32(1024)).astype(np.float32)
    return scales.astype(np.float32)


def fill(rng, matrix):
    """Normal weights, or random codes."""
    if MATRIX_FORMATS[matrix.format].quantises:
        matrix.put(0, rng.standard_normal(matrix.shape).astype(np.float32))
    else:
        matrix.put_codes(0, *random_parts(rng, matrix.format, *matrix.shape)[0])


def filled(rng, rows, columns, format):
    """A new matrix of them."""
    matrix = Matrix(rows, columns, format)
    fill(rng, matrix)
    return matrix
