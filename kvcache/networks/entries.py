"""Typed reads of the entries of one JSON object; every error names the key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from kvcache.errors import CheckpointError
from kvcache.support.arguments import short

__all__ = ["Cap", "Entries", "Flag", "Number", "Only", "SameSize", "Size"]

_MAX_SIZE = 2**31 - 1  # of any one dimension: keeps products inside int64
_MAX_NUMBER = 1e30  # of any factor: keeps products inside float64


class Entries:
    """The entries of a JSON object. A null counts as absent; an absent entry has its default, or is an error.

    Args:
        values: the object.
        where: comes before each key in messages, e.g. "rope_scaling.".
        defaults: of absent keys; they come before the defaults that a call names.

    Attributes:
        where: see above.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "", defaults: Mapping[str, Any] | None = None) -> None:
        self._values, self.where, self._defaults = values, where, defaults or {}

    def __iter__(self) -> Iterator[str]:
        """The keys that are there."""
        return iter(self._values)

    def get(self, key: str) -> Any:
        """The value as it is: None if it is null, or absent and without a default."""
        return self._values.get(key, self._defaults.get(key))

    def has_default(self, key: str) -> bool:
        """Whether the defaults have the key, be it with None."""
        return key in self._defaults

    def default(self, key: str) -> Any:
        """The default of an absent key, or None."""
        return self._defaults.get(key)

    def _get(self, key: str, default: Any, accept: Callable[[Any], bool], expected: str) -> Any:
        value = self._values.get(key)
        if value is None:
            value = self._defaults.get(key, default)
            if value is None:
                raise CheckpointError(f"{self.where}{key}: expected {expected}, got nothing")
        if not accept(value):
            raise CheckpointError(f"{self.where}{key}: expected {expected}, got {short(value)}")
        return value

    def size(self, key: str, default: int | None = None, *, at_least: int = 1, most: int = _MAX_SIZE) -> int:
        """A whole number from `at_least` to `most`."""
        expected = "a positive whole number" if at_least == 1 else f"a whole number of at least {at_least}"
        expected += "" if most == _MAX_SIZE else f" up to {most}"
        found: int = self._get(key, default, lambda value: type(value) is int and at_least <= value <= most, expected)
        return found

    def number(self, key: str, default: float | None = None, *, at_least: float = 0.0) -> float:
        """A finite number of at least `at_least`."""

        def accept(value: Any) -> bool:
            return type(value) in (int, float) and at_least <= value <= _MAX_NUMBER

        return float(self._get(key, default, accept, f"a finite number of at least {at_least:g}"))

    def cap(self, key: str) -> float | None:
        """A positive number, or None for null and for an absent entry."""
        if self.get(key) is None:
            return None
        found = self.number(key)
        if not found:
            raise CheckpointError(f"{self.where}{key}: expected a positive number or null, got {found}")
        return found

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """`count` positive numbers."""
        found = self.get(key)
        if not isinstance(found, list) or len(found) != count:
            raise CheckpointError(f"{self.where}{key}: expected {count} numbers, got {short(found)}")
        if not all(type(value) in (int, float) and 0 < value <= _MAX_NUMBER for value in found):
            raise CheckpointError(f"{self.where}{key}: expected positive numbers, got {short(found)}")
        return tuple(float(value) for value in found)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        found: bool = self._get(key, default, lambda value: isinstance(value, bool), "true or false")
        return found


class Size(NamedTuple):
    """A whole number as data: its key, the default of an absent one, the least and the most that is accepted."""

    key: str
    default: int | None = None
    at_least: int = 1
    most: int = _MAX_SIZE

    def __call__(self, read: Entries) -> int:
        """The value, see `Entries.size`."""
        return read.size(self.key, self.default, at_least=self.at_least, most=self.most)


class SameSize(Size):
    """A whole number as data, which a file may have once or for each layer."""

    __slots__ = ()

    def __call__(self, read: Entries) -> int:
        """The value. Raises CheckpointError for layers that differ."""
        found = read.get(self.key)
        if not isinstance(found, list):
            return super().__call__(read)
        if not found or any(value != found[0] for value in found):
            raise CheckpointError(f"{read.where}{self.key}: expected one number for all layers, got {short(found)}")
        return Size(*self)(Entries({self.key: found[0]}, read.where))


class Number(NamedTuple):
    """A finite number as data."""

    key: str
    default: float | None = None

    def __call__(self, read: Entries) -> float:
        """The value, see `Entries.number`."""
        return read.number(self.key, self.default)


class Cap(NamedTuple):
    """A positive number or null as data; None where no default is known."""

    key: str

    def __call__(self, read: Entries) -> float | None:
        """The value, see `Entries.cap`."""
        return read.cap(self.key) if read.has_default(self.key) else None


class Flag(NamedTuple):
    """A flag as data."""

    key: str
    default: bool

    def __call__(self, read: Entries) -> bool:
        """The value, see `Entries.flag`."""
        return read.flag(self.key, self.default)


class Only(NamedTuple):
    """An entry of which one value is supported, which an absent one has; `where` ends the message's first part."""

    key: str
    value: bool | int | str
    where: str = ""

    def __call__(self, read: Entries) -> None:
        """Raise CheckpointError for another value."""
        found: Any = read.get(self.key)
        if isinstance(self.value, bool):
            found = read.flag(self.key, self.value)
        elif isinstance(self.value, int):
            found = read.size(self.key, self.value)
        if found != self.value:
            expected, got = (str(x).lower() if isinstance(x, bool) else x for x in (self.value, found))
            got = got if isinstance(found, bool) else short(found)
            raise CheckpointError(f"{read.where}{self.key}: expected {expected}{self.where}, got {got}")
