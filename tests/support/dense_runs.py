"""A network without an engine: naive attention over every token, and states in an array, in pieces."""

from __future__ import annotations

import numpy as np
from oracles.engine import dense_attention


def chosen_tokens(rows, keys, most):
    """The tokens that an indexer chooses for each of the last queries, in float64; of equal scores the first."""
    products = np.maximum(np.einsum("qhd,td->qht", rows.queries.astype(np.float64), keys[:, 0].astype(np.float64)), 0)
    scores, first = np.einsum("qht,qh->qt", products, rows.weights), len(keys) - len(rows.queries) + 1
    return [np.sort(np.argsort(-row[: first + i], kind="stable")[:most]) for i, row in enumerate(scores)]


class IndexedAttention:
    """Attention of a network in float64, over the tokens that indexers choose in layers that have some.

    Attributes:
        keys: those of the indexers of each layer.
    """

    def __init__(self, model):
        self.attention, self.keys, self.chosen = model.attention, [[] for _ in model.attention], None

    def __call__(self, layer, queries, keys, values, rows=None):
        index, options = self.attention[layer].index, self.attention[layer].options()
        if index is None:
            return dense_attention(queries, keys, values, **options).astype(np.float32)
        if index.own:
            self.keys[layer].append(rows.keys)
            self.chosen = chosen_tokens(rows, np.concatenate(self.keys[layer]), index.most)
        found = (
            dense_attention(query[None], keys[some], values[some], **options)
            for query, some in zip(queries, self.chosen, strict=True)
        )
        return np.concatenate(list(found)).astype(np.float32)


def run_dense(model, tokens, chunk=None, regime=None):
    """The logits of every token, `(n, vocab)`; pieces of `chunk` tokens. `regime`: if not that of the text."""
    kept, attention = [[] for _ in range(model.config.num_layers)], IndexedAttention(model)
    states = [each and np.zeros((1, each.size), np.float32) for each in getattr(model, "recurrences", ())]
    regime = model.regime(len(tokens)) if regime is None else regime

    def attend(layer, queries, keys, values, _=None, rows=None):
        owner, latent = model.attention[layer].kv_layer, model.attention[layer].latent
        values = keys[..., :latent] if latent else values
        if owner is None:
            kept[layer].append((keys.copy(), values.copy()))
        keys, values = (np.concatenate(rows) for rows in zip(*kept[layer if owner is None else owner], strict=True))
        return attention(layer, queries, keys, values, rows)

    def recur(layer, inputs):
        zero, count = np.zeros(1, np.int64), np.array([len(inputs[0])])
        return model.recurrences[layer].run(inputs, states[layer], zero, count)

    rows, step, more = [], chunk or len(tokens), {"recur": recur} if states else {}
    for first in range(0, len(tokens), step):
        piece = tokens[first : first + step]
        rows.append(model.forward(piece, np.arange(first, first + len(piece)), attend, "all", regime=regime, **more))
    return np.concatenate(rows)
