"""A network without an engine: naive attention over every token, and states in an array, in pieces."""

from __future__ import annotations

import numpy as np
from oracles.engine import dense_attention


def run_dense(model, tokens, chunk=None, regime=None):
    """The logits of every token, `(n, vocab)`; pieces of `chunk` tokens. `regime`: if not that of the text."""
    kept = [[] for _ in range(model.config.num_layers)]
    options = [attention and attention.options() for attention in model.attention]
    states = [each and np.zeros((1, each.size), np.float32) for each in getattr(model, "recurrences", ())]
    regime = model.regime(len(tokens)) if regime is None else regime

    def attend(layer, queries, keys, values, *_):
        owner, latent = model.attention[layer].kv_layer, model.attention[layer].latent
        values = keys[..., :latent] if latent else values
        if owner is None:
            kept[layer].append((keys.copy(), values.copy()))
        keys, values = (np.concatenate(rows) for rows in zip(*kept[layer if owner is None else owner], strict=True))
        return dense_attention(queries, keys, values, **options[layer]).astype(np.float32)

    def recur(layer, inputs):
        zero, count = np.zeros(1, np.int64), np.array([len(inputs[0])])
        return model.recurrences[layer].run(inputs, states[layer], zero, count)

    rows, step, more = [], chunk or len(tokens), {"recur": recur} if states else {}
    for first in range(0, len(tokens), step):
        piece = tokens[first : first + step]
        rows.append(model.forward(piece, np.arange(first, first + len(piece)), attend, "all", regime=regime, **more))
    return np.concatenate(rows)
