"""Runs over windows of text that are kept in a folder, so that a later call goes on where one was stopped."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.quality.divergence import Divergence, Logits, compare

__all__ = ["Windows"]


class Windows:
    """Measurements of windows, by the tokens of the window and the name of the run.

    Args:
        folder: of a file for each window; None: nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def measure(
        self,
        window: npt.NDArray[np.uint32],
        groups: list[dict[str, Logits]],
        named: Callable[[str, Logits], Logits],
    ) -> dict[str, Divergence]:
        """The runs of a window, those that are not kept.

        Args:
            groups: runs, each group with its reference at first.
            named: wraps a run that is about to be called.
        """
        path = None if self._folder is None else self._folder / f"{sha256(window.tobytes()).hexdigest()[:16]}.npz"
        found: dict[str, Divergence] = {}
        if path is not None and path.exists():
            with np.load(path) as arrays:
                for key in arrays.files:
                    name, field = key.split("|")
                    getattr(found.setdefault(name, Divergence()), field).append(arrays[key])
        before = len(found)
        for runs in groups:
            reference = next(iter(runs))
            missing = [name for name in runs if name not in found]
            if missing:
                some = {name: named(name, runs[name]) for name in {reference: None} | dict.fromkeys(missing)}
                found.update(compare(some[reference], some, [window]))
        if path is not None and len(found) > before:
            arrays = {f"{name}|{field}": kept[0] for name, one in found.items() for field, kept in vars(one).items()}
            np.savez(path, **arrays)  # type: ignore[arg-type]  # of any number of arrays
        return found
