"""Blocks as a strip of HTML, for notebooks: `_repr_html_` of the caches."""

from __future__ import annotations

import html
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

__all__ = ["strip"]

_WIDTH, _HEIGHT = 512, 14  # pixels; a cell for each block, or for several
_COLOURS = ("#e4e4e4", "#5b8def", "#f0a23c", "#3aa76d")


def strip(title: str, names: Sequence[str], states: npt.NDArray[np.integer]) -> str:
    """A line of text, a strip with a cell per block, and how many blocks are in each state.

    Args:
        title: the line of text.
        names: of the states, at most 4.
        states: the state of each block, an index into `names`. Where a cell stands for several blocks, it shows the
            highest one.
    """
    cells = np.array_split(states, min(len(states), _WIDTH)) if len(states) else []
    bars, left, width = [], 0.0, _WIDTH / max(1, len(cells))
    for state, run in groupby(int(cell.max()) for cell in cells):
        length = width * sum(1 for _ in run)
        bars.append(f'<rect x="{left:.1f}" width="{length:.1f}" height="{_HEIGHT}" fill="{_COLOURS[state]}"/>')
        left += length
    counts = np.bincount(states, minlength=len(names)).tolist()
    legend = " ".join(
        f'<span style="color:{colour}">&#9632;</span>&nbsp;{count}&nbsp;{html.escape(name)}'
        for name, count, colour in zip(names, counts, _COLOURS, strict=False)
    )
    picture = f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{"".join(bars)}</svg>'
    return f"<div><code>{html.escape(title)}</code><br/>{picture}<br/>{legend}</div>"
