"""The check of formats with a calibration: whether a network loses more than its formats promise."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcache.calibration.passes import new_cache, run_piece
from kvcache.core.calibration import Calibration
from kvcache.core.layer_formats import Formats
from kvcache.networks.protocols import Model

__all__ = ["check_formats", "divergence", "promised"]

# The KL divergence of the next token with a calibration, of SmolLM2 in windows of 2,048 tokens.
PROMISES = {"q8": 1.5e-5, "q6": 1.5e-4, "q5": 9e-4, "q4": 0.004, "q3": 0.018, "q2": 0.066}
_TIMES = 3.0  # the most that other networks and texts lose, over SmolLM2; real failures lose a hundred times as much
_FLOOR = 0.01  # what rounded activations add by themselves: 0.004 for SmolLM2
_TOKENS, _COUNTED = 512, 256

logger = logging.getLogger("kvcache")
Float64 = NDArray[np.float64]


def promised(dtypes: Sequence[Formats], num_layers: int) -> float:
    """The largest KL divergence that formats of K and V are to have: the mean of what their layers promise."""
    names = [name for dtype in dtypes for name in ([dtype] * num_layers if isinstance(dtype, str) else dtype)]
    return _TIMES * sum(PROMISES.get(name, 0.0) for name in names) / len(names) + _FLOOR


def divergence(
    model: Model, dtypes: Sequence[Formats], calibration: Calibration, residual_length: int, firsts: int,
    tokens: NDArray[np.uint32],
) -> float:
    """The KL divergence of the next token from that with K and V in f32: the mean over the second half of a text.

    Args:
        dtypes, calibration, residual_length, firsts: of an engine, see `Storage`.
    """

    def log_probabilities(key: Formats, value: Formats, known: Calibration | None, length: int, own: int) -> Float64:
        options = {"calibration": known, "residual_length": length, "first_tokens": own}
        cache = new_cache(model, len(tokens), key_dtype=key, value_dtype=value, **options)
        cache.allocate(0, 0)
        half = len(tokens) // 2
        run_piece(model, cache, tokens[:half], 0, "none", len(tokens))
        rows = run_piece(model, cache, tokens[half:], half, "all", len(tokens)).astype(np.float64)
        rows -= rows.max(axis=1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
        return rows

    exact = log_probabilities("f32", "f32", None, 0, 0)
    packed = log_probabilities(dtypes[0], dtypes[1], calibration, residual_length, firsts)
    return float((np.exp(exact) * (exact - packed)).sum(axis=1).mean())


def check_formats(
    model: Model, dtypes: Sequence[Formats], calibration: Calibration, residual_length: int, firsts: int,
    tokens: NDArray[np.uint32], path: Path | None,
) -> None:
    """Warn, with numbers, if K and V lose more than their formats promise, over 512 tokens of a text.

    Args:
        dtypes, calibration, residual_length, firsts: of an engine, see `Storage`.
        tokens: the last ones of a text; with fewer than 512 nothing is checked.
        path: a file of what was found before, by formats; it is measured once. None: measured now.
    """
    if len(tokens) < _TOKENS:
        return
    name = f"{calibration.fingerprint} {' / '.join(map(_name, dtypes))} {residual_length} {firsts}"
    known = {} if path is None else _kept(path)
    if name not in known:
        known[name] = divergence(model, dtypes, calibration, residual_length, firsts, tokens[-_TOKENS:])
        if path is not None:
            _keep(path, known)
    found, bound = known[name], promised(dtypes, model.config.num_layers)
    if not found <= bound:
        logger.warning(
            "K and V in %s lose more than they promise on this network: a KL divergence of %.2g, expected at most "
            "%.2g. More bits lose less, and `python -m bench quality --model` measures all formats",
            " / ".join(map(_name, dtypes)), found, bound,
        )


def _name(dtype: Formats) -> str:
    return dtype if isinstance(dtype, str) else " ".join(dtype)


def _kept(path: Path) -> dict[str, float]:
    """The numbers in a file; none if it is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): float(value) for name, value in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _keep(path: Path, found: dict[str, float]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found), encoding="utf-8")
    except OSError as error:
        logger.warning("the check of the formats is not kept: %s", error)
