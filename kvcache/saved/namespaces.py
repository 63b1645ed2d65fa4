"""Namespaces as bytes: None, bools, ints, str, bytes and tuples of these.

None  N      int    i  u32 length, two's complement, little-endian      tuple  (  u32 count, the items
True  T      str    s  u32 length, UTF-8
False F      bytes  b  u32 length, the bytes
"""

from __future__ import annotations

import struct
from collections.abc import Hashable

__all__ = ["decode_namespace", "encode_namespace"]

_LENGTH = struct.Struct("<I")
_DEPTH = 16  # of tuples in tuples


def encode_namespace(name: Hashable, depth: int = 0) -> bytes:
    """A namespace as bytes.

    Raises:
        TypeError: not None, a bool, int, str or bytes, or a tuple of such, 16 deep at most.
    """
    if name is None or isinstance(name, bool):
        return {None: b"N", True: b"T", False: b"F"}[name]
    if isinstance(name, int):
        return _piece(b"i", int(name).to_bytes(name.bit_length() // 8 + 1, "little", signed=True))
    if isinstance(name, str):
        return _piece(b"s", str.encode(name, "utf-8", "surrogatepass"))
    if isinstance(name, bytes):
        return _piece(b"b", name)
    if isinstance(name, tuple) and depth < _DEPTH:
        return b"(" + _LENGTH.pack(len(name)) + b"".join(encode_namespace(part, depth + 1) for part in name)
    raise TypeError(
        f"namespace: expected None, bool, int, str, bytes or a tuple of them to save, got {type(name).__name__}"
    )


def _piece(tag: bytes, data: bytes) -> bytes:
    return tag + _LENGTH.pack(len(data)) + data


def decode_namespace(data: bytes) -> Hashable:
    """The namespace that these bytes say, all of them. ValueError: not what `encode_namespace` makes."""
    name, end = _decode(data, 0, 0)
    if end != len(data) or encode_namespace(name) != data:
        raise ValueError("namespace: expected the bytes of one, got others")
    return name


def _decode(data: bytes, at: int, depth: int) -> tuple[Hashable, int]:
    tag = data[at : at + 1]
    if tag in (b"N", b"T", b"F"):
        return {b"N": None, b"T": True, b"F": False}[tag], at + 1
    first = at + 1 + _LENGTH.size
    if tag not in (b"i", b"s", b"b", b"(") or first > len(data) or (tag == b"(" and depth >= _DEPTH):
        raise ValueError("namespace: expected the bytes of one, got others")
    (length,) = _LENGTH.unpack_from(data, at + 1)
    if length > len(data) - first:  # an item takes a byte or more
        raise ValueError(f"namespace: expected {length} bytes, got {len(data) - first}")
    if tag == b"(":
        parts = []
        for _ in range(length):
            part, first = _decode(data, first, depth + 1)
            parts.append(part)
        return tuple(parts), first
    piece = data[first : first + length]
    if tag == b"i":
        return int.from_bytes(piece, "little", signed=True), first + length
    return piece if tag == b"b" else piece.decode("utf-8", "surrogatepass"), first + length
