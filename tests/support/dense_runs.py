"""A network without an engine: naive attention over every token, in pieces."""

from __future__ import annotations

import numpy as np
from oracles.engine import dense_attention

from kvcache.networks.protocols import layer_attention


def run_dense(model, tokens, chunk=None, regime=None):
    """The logits of every token, `(n, vocab)`; pieces of `chunk` tokens. `regime`: if not that of the text."""
    kept = [[] for _ in range(model.config.num_layers)]
    options = [attention.options() for attention in layer_attention(model)]
    regime = model.regime(len(tokens)) if regime is None else regime

    def attend(layer, queries, keys, values, *_):
        kept[layer].append((keys.copy(), values.copy()))
        keys, values = (np.concatenate(rows) for rows in zip(*kept[layer], strict=True))
        return dense_attention(queries, keys, values, **options[layer]).astype(np.float32)

    rows, step = [], chunk or len(tokens)
    for first in range(0, len(tokens), step):
        piece = tokens[first : first + step]
        rows.append(model.forward(piece, np.arange(first, first + len(piece)), attend, "all", regime=regime))
    return np.concatenate(rows)
