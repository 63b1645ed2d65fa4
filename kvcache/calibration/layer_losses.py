"""`dtype="auto:4.0"`: formats of each layer within a budget of bits, by what a network loses if a layer is packed.

A few layers of a network make most of the loss, and other texts name the same ones. So each layer is packed in q2 by
itself, first its keys, then its values, and the KL divergence of the next token from that of unpacked ones is its loss.
Losses of layers add up, and they follow the squared rounding error, a constant per format. Bits are then given one step
after another where they take most off the loss.
"""

from __future__ import annotations

import heapq
import logging
import math
import sys
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.calibration.passes import new_cache, run_piece
from kvcache.calibration.residual import FIRSTS
from kvcache.core.calibration import Calibration
from kvcache.kernels.kernels import FORMATS
from kvcache.networks.protocols import Float32, Model, draft_layers, latent_layers
from kvcache.support.arguments import short

__all__ = ["budget_of", "formats_within", "measure_losses"]

# The loss of a layer in each format over that in q2: SmolLM2, keys and values alike within a third. The
# squared errors of q5, q6 and q8 are 1/4.27, 1/17.64 and 1/289 of q4's: they have 31, 63 and 255 steps for its 15.
_SHARES = {"q2": 1.0, "q3": 0.22, "q4": 0.045, "q5": 0.045 / 4.27, "q6": 0.045 / 17.64, "q8": 0.045 / 289}
_TOKENS, _RESIDUAL = 512, 64  # without a residual, V counts for too much: of what is near
_PREFIX = "auto:"

logger = logging.getLogger("kvcache")


def budget_of(dtype: Any) -> float | None:
    """The bits per value of "auto:BITS"; None: another format.

    Raises:
        ValueError: no number.
    """
    if not isinstance(dtype, str) or not dtype.startswith(_PREFIX):
        return None
    try:
        return float(dtype.removeprefix(_PREFIX))
    except ValueError:
        raise ValueError(f'dtype: expected a number of bits after "{_PREFIX}", got {short(dtype)}') from None


def formats_within(losses: Float32, head_dim: int, bits: float, drafts: int = 0) -> tuple[list[str], list[str]]:
    """Formats of K and V of each layer, with at most `bits` bits per value on average, scales included.

    Args:
        losses: `(num_layers, 2)`, as `measure_losses` returns them; `(num_layers, 1)`: K and V are one row.
        drafts: how many of the last layers predict draft tokens alone. Others have the formats that they have without
            these, which have the one of fewest bits among them.

    Raises:
        ValueError: fewer bits than q2 has, more than q8 has, or NaN.
    """
    steps = sorted(_SHARES, key=lambda name: FORMATS[name].bits)
    cost = {name: FORMATS[name].bits + 32 / head_dim for name in steps}  # a scale and a minimum in f16
    least, most = cost[steps[0]], cost[steps[-1]]
    if not least <= bits <= most:
        raise ValueError(f"dtype: expected {least:g} (q2) to {most:g} bits (q8) at head_dim {head_dim}, got {bits:g}")
    losses = losses[: len(losses) - drafts]
    chosen = np.zeros(losses.shape, np.int64)
    left = losses.size * (bits - cost[steps[0]]) + 1e-9
    waiting: list[_Step] = []
    for layer, side in np.ndindex(losses.shape):
        _add(waiting, losses, layer, side, 0, steps, cost)
    while waiting:
        step = heapq.heappop(waiting)
        if step.bits <= left:
            left -= step.bits
            chosen[step.layer, step.side] = step.format
            _add(waiting, losses, step.layer, step.side, step.format, steps, cost)
    chosen = np.concatenate([chosen, chosen.min(axis=0, keepdims=True).repeat(drafts, axis=0)])
    return [steps[i] for i in chosen[:, 0]], [steps[i] for i in chosen[:, -1]]


class _Step(NamedTuple):
    """One layer's K (side 0) or V (side 1) in the next format; the first ones take most off the loss per bit."""

    gain: float  # negative
    layer: int
    side: int
    format: int
    bits: float


def _add(
    waiting: list[_Step], losses: Float32, layer: int, side: int, now: int, steps: list[str], cost: dict[str, float]
) -> None:
    if now + 1 < len(steps):
        before, after = steps[now], steps[now + 1]
        bits = cost[after] - cost[before]
        gain = float(losses[layer, side]) * (_SHARES[before] - _SHARES[after]) / bits
        heapq.heappush(waiting, _Step(-gain, layer, side, now + 1, bits))


def measure_losses(model: Model, calibration: Calibration, tokens: NDArray[np.uint32]) -> Float32:
    """The KL divergence that each layer causes alone in q2, its keys and its values: float32 `(num_layers, 2)`.

    Where V is a part of K, the first of both is that of the row, and the second one 0. Those of MTP layers are 0.

    Args:
        calibration: of the keys.
        tokens: of a text; 512 of its middle are used. The first 16 of these are read unpacked and count for nothing.
    """
    start, count = max(0, len(tokens) - _TOKENS) // 2, model.config.num_layers
    text, sides = tokens[start : start + _TOKENS], 1 if latent_layers(model) else 2
    show = sys.stderr is not None and sys.stderr.isatty()

    def run(packed: int, side: int) -> NDArray[np.float64]:
        """Log-probabilities with one layer packed; -1: none."""
        formats = [["f16"] * count, ["f16"] * count]
        if packed >= 0:
            for each in formats[side : side + 3 - sides]:
                each[packed] = "q2"
        cache = new_cache(
            model, len(text), key_dtype=formats[0], value_dtype=formats[1], calibration=calibration,
            residual_length=_RESIDUAL, first_tokens=FIRSTS,
        )
        cache.allocate(0, 0)
        rows = run_piece(model, cache, text, 0, "all", len(text))[FIRSTS:].astype(np.float64)
        rows -= rows.max(axis=1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
        return rows

    exact = run(-1, 0)
    likely, losses, began = np.exp(exact), np.zeros((count, 2), np.float32), perf_counter()
    measured = count - draft_layers(model)
    for layer, side in np.ndindex(measured, sides):
        losses[layer, side] = max(0.0, float((likely * (exact - run(layer, side))).sum(axis=1).mean()))
        if layer == side == 0:
            seconds = (perf_counter() - began) * measured * sides
            logger.info("calibrating: the losses of %d layers take about %d s", measured, math.ceil(seconds))
        if show:
            done = sides * layer + side + 1
            print(f"\rmeasuring layers: {done} of {measured * sides}", end="", file=sys.stderr, flush=True)
    if show:
        print(file=sys.stderr)
    return losses
