"""Layers with a state in float64, one token after another, as their definitions say."""

from __future__ import annotations

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def softplus(x):
    return np.logaddexp(0, np.asarray(x, np.float64))


def convolution(x, weight, bias=None, state=None, silu=False):
    """Rows `(n, channels)` by `weight` `(taps, channels)`; the state is the last rows. Returns rows and state."""
    x, taps = np.asarray(x, np.float64), len(weight)
    before = np.zeros((taps - 1, x.shape[1])) if state is None else state
    rows = np.concatenate([before, x])
    out = np.array([(rows[i : i + taps] * weight).sum(axis=0) for i in range(len(x))]).reshape(x.shape)
    out = out if bias is None else out + bias
    return out * sigmoid(out) if silu else out, rows[len(rows) - (taps - 1) :]


def scan(keys, queries, values, decays, steps, skip=None, state=None, tiled=False):
    """Rows through a matrix `(size, dim)` per head: Mamba2 with a `skip`, else the gated delta rule.

    Decays are those of heads, `(n, heads)`, or of the rows of each matrix, `(n, heads, size)`.
    """
    n, heads, dim = values.shape
    groups, size = keys.shape[1:]
    state = np.zeros((heads, size, dim)) if state is None else state.copy()
    out = np.empty(values.shape)
    for t in range(n):
        for h in range(heads):
            group = h % groups if tiled else h // (heads // groups)
            key, query = keys[t, group].astype(np.float64), queries[t, group].astype(np.float64)
            kept, value = state[h] * np.float64(decays[t, h]).reshape(-1, 1), values[t, h].astype(np.float64)
            added = value if skip is not None else value - key @ kept
            state[h] = kept + np.outer(key, float(steps[t, h]) * added)
            out[t, h] = query @ state[h] + (0 if skip is None else float(skip[h]) * value)
    return out, state
