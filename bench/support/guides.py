"""The classes and functions of the examples in `kvcache/guides/`, for benches and tests."""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["GUIDES", "definitions"]

GUIDES = Path(__file__).resolve().parents[2] / "kvcache" / "guides"  # of the repository: a wheel has none


def definitions(guide: str) -> dict[str, Any]:
    """The names that a guide's examples define by `class` and `def`; nothing else in them runs."""
    text = (GUIDES / guide).read_text(encoding="utf-8")
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        tree = ast.parse(block)
        kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
        for each in tree.body:
            if isinstance(each, kinds):
                with suppress(ImportError):  # of a package that another example needs
                    exec(compile(ast.Module([each], []), guide, "exec"), found)
    return found
