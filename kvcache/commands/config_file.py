"""Options of a command in a file of TOML, instead of on its command line, which counts more."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kvcache.support.arguments import short

__all__ = ["options_of"]


def options_of(path: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The options in a file by their places in the result of a parser, as texts where the parser reads them.

    Args:
        path: of a file such as `port = 8080`; names are those of options, with `-` or `_`.
        parser: of the command.

    Raises:
        ImportError: Python 3.10, which does not read TOML.
        OSError: no file that can be read.
        ValueError: no TOML, an unknown option, or a value of another kind.
    """
    if sys.version_info < (3, 11):
        raise ImportError("config: expected Python 3.11 or later, which reads TOML, got 3.10")
    import tomllib

    try:
        content = tomllib.loads(Path(path).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"config: expected TOML, got an error: {short(str(error))}") from None
    known, found = vars(parser.parse_args([])), {}
    for name, value in content.items():
        place = name.replace("-", "_")
        if place not in known or place in ("config", "parser"):
            raise ValueError(f"config: expected options of the command, got {short(name)}")
        found[place] = _read(name, value, known[place])
    return found


def _read(name: str, value: Any, default: Any) -> Any:
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"config: {name}: expected true or false, got {short(value)}")
        return value
    if isinstance(default, list):
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ValueError(f"config: {name}: expected a list of texts, got {short(value)}")
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"config: {name}: expected a text or a number, got {short(value)}")
    return str(value)
