"""The characters that byte-level vocabularies write bytes with: printable ones of Latin-1 stand for themselves."""

from __future__ import annotations

__all__ = ["byte_letters"]


def byte_letters() -> list[str]:
    """The character of each byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
