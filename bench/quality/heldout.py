"""The text on which quality is measured: modules of CPython's standard library that the model was not trained on.

The text is not part of this project; every Python has it. `heldout.json` beside the demo model lists the files and
their digest in CPython 3.13.0, whose library the model was trained on. Another 3.x has slightly different versions of
these modules: figures differ in the third digit, and `Heldout.exact` is false.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvcache.demo import DIRECTORY

__all__ = ["Heldout", "find_library", "load"]

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Heldout:
    """All held-out files, concatenated, each after an end-of-text token.

    Attributes:
        tokens: uint32 `(n,)`.
        library: the folder of the files.
        exact: whether the files are those of CPython 3.13.0, byte for byte.
    """

    tokens: np.ndarray
    library: Path
    exact: bool

    def windows(self, length: int, total: int) -> list[np.ndarray]:
        """Windows of `length` tokens without overlap, spread evenly over the text: `total` tokens, or all."""
        count = min(-(-total // length), len(self.tokens) // length)
        room = len(self.tokens) - count * length
        return [self.tokens[(at := i * length + room * i // count) : at + length] for i in range(count)]

    def __str__(self) -> str:
        kind = "CPython 3.13.0" if self.exact else "another CPython than 3.13.0: figures differ in the third digit"
        return f"{len(self.tokens):,} held-out tokens from {self.library} ({kind})"


def find_library() -> Path:
    """The library of CPython 3.13.0 if pyenv has it, else of any 3.13 there, else of this Python."""
    versions = Path.home() / ".pyenv" / "versions"
    found = sorted(versions.glob("3.13.*/lib/python3.13"), key=lambda path: path.parts[-3] != "3.13.0")
    return next(iter(found), Path(sysconfig.get_path("stdlib")))


def load(tokenizer: Any, library: Path | None = None) -> Heldout:
    """Read and tokenise the held-out files; missing files are skipped.

    Raises:
        SystemExit: the folder has none of the files.
    """
    library = library or find_library()
    listed = json.loads((DIRECTORY / "heldout.json").read_text(encoding="utf-8"))
    paths = [library / name for name in listed["files"]]
    texts = [path.read_text(encoding="utf-8") for path in paths if path.exists()]
    if not texts:
        raise SystemExit(f"--library: expected the standard library of a Python, got {library}")
    digest = hashlib.sha256("".join(texts).encode()).hexdigest()
    start = tokenizer.token_to_id(END_OF_TEXT)
    ids = [token for text in texts for token in (start, *tokenizer.encode(text).ids)]
    return Heldout(np.array(ids, np.uint32), library, digest == listed["sha256_of_all_files_in_order"])
