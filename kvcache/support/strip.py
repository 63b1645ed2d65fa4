"""Blocks as a strip of HTML, for notebooks: `_repr_html_` of the caches."""

from __future__ import annotations

import html
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

__all__ = ["bar", "strip"]

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
    runs = [(state, sum(1 for _ in run)) for state, run in groupby(int(cell.max()) for cell in cells)]
    return _drawn(title, names, runs, np.bincount(states, minlength=len(names)).tolist())


def bar(title: str, unit: str, used: int, total: int) -> str:
    """`strip` of what has no blocks, or more of them than a list should name: `used` of `total` of some unit."""
    counts = [max(0, total - used), used]
    return _drawn(title, (f"{unit} free", f"{unit} used"), [(1, counts[1]), (0, counts[0])], counts)


def _drawn(title: str, names: Sequence[str], runs: Sequence[tuple[int, int]], counts: Sequence[int]) -> str:
    """HTML with `runs`, a state and a length each, from left to right, and how many there are of each state."""
    bars, left, width = [], 0.0, _WIDTH / max(1, sum(length for _, length in runs))
    for state, length in runs:
        if length:
            at, wide = f'x="{left:.1f}" width="{width * length:.1f}"', f'height="{_HEIGHT}" fill="{_COLOURS[state]}"'
            bars.append(f"<rect {at} {wide}/>")
        left += width * length
    legend = " ".join(
        f'<span style="color:{colour}">&#9632;</span>&nbsp;{count}&nbsp;{html.escape(name)}'
        for name, count, colour in zip(names, counts, _COLOURS, strict=False)
    )
    picture = f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{"".join(bars)}</svg>'
    return f"<div><code>{html.escape(title)}</code><br/>{picture}<br/>{legend}</div>"
