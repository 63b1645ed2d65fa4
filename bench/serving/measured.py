"""Measurements of a run in a file: a run that was interrupted continues with what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Measured"]


class Measured:
    """Values by name; each is measured once, and written to the file at once.

    Args:
        file: None keeps them in memory.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._values: dict[str, Any] = json.loads(file.read_text()) if file is not None and file.exists() else {}

    def get(self, name: str, measure: Callable[[], Any], count: int = 1) -> Any:
        """The value of a name, which JSON can hold; an empty one, or one of fewer than `count` items, is not kept."""
        if name not in self._values:
            value = measure()
            if not value or (count > 1 and len(value) < count):
                return value
            self.keep(name, value)
        return self._values[name]

    def found(self, name: str) -> Any:
        """The value of a name, or None."""
        return self._values.get(name)

    def keep(self, name: str, value: Any) -> None:
        """Give a name its value."""
        self._values[name] = value
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self._values, indent=1) + "\n")
