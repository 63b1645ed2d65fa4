"""A network without an engine: naive attention over every token, and states in an array, in pieces."""

from __future__ import annotations

import numpy as np
from oracles.engine import dense_attention


def chosen_tokens(rows, keys, most):
    """The tokens that an indexer chooses for each of the last queries, in float64; of equal scores the first."""
    products = np.maximum(np.einsum("qhd,td->qht", rows.queries.astype(np.float64), keys[:, 0].astype(np.float64)), 0)
    scores, first = np.einsum("qht,qh->qt", products, rows.weights), len(keys) - len(rows.queries) + 1
    return [np.sort(np.argsort(-row[: first + i], kind="stable")[:most]) for i, row in enumerate(scores)]


def run_dense(model, tokens, chunk=None, regime=None):
    """The logits of every token, `(n, vocab)`; pieces of `chunk` tokens. `regime`: if not that of the text."""
    kept, indexed, chosen = ([[] for _ in range(model.config.num_layers)] for _ in range(3))
    options = [attention and attention.options() for attention in model.attention]
    states = [each and np.zeros((1, each.size), np.float32) for each in getattr(model, "recurrences", ())]
    regime = model.regime(len(tokens)) if regime is None else regime

    def attend(layer, queries, keys, values, _=None, rows=None):
        owner, latent = model.attention[layer].kv_layer, model.attention[layer].latent
        values = keys[..., :latent] if latent else values
        if owner is None:
            kept[layer].append((keys.copy(), values.copy()))
        keys, values = (np.concatenate(rows) for rows in zip(*kept[layer if owner is None else owner], strict=True))
        if (index := model.attention[layer].index) is None:
            return dense_attention(queries, keys, values, **options[layer]).astype(np.float32)
        if index.own:
            indexed[layer].append(rows.keys)
            chosen[0] = chosen_tokens(rows, np.concatenate(indexed[layer]), index.most)
        found = (
            dense_attention(query[None], keys[some], values[some], **options[layer])
            for query, some in zip(queries, chosen[0], strict=True)
        )
        return np.concatenate(list(found)).astype(np.float32)

    def recur(layer, inputs):
        zero, count = np.zeros(1, np.int64), np.array([len(inputs[0])])
        return model.recurrences[layer].run(inputs, states[layer], zero, count)

    rows, step, more = [], chunk or len(tokens), {"recur": recur} if states else {}
    for first in range(0, len(tokens), step):
        piece = tokens[first : first + step]
        rows.append(model.forward(piece, np.arange(first, first + len(piece)), attend, "all", regime=regime, **more))
    return np.concatenate(rows)
