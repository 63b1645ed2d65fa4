"""A compressed prefix in float64: K and V of the whole prefix, what heads keep of it, and dense attention over both."""

from __future__ import annotations

import numpy as np
from oracles.evicting import dense


class DensePrefix:
    """A prefix that has run; `kept` says what texts behind it see: for each layer and KV head the positions."""

    def __init__(self, network, tokens):
        config = network.config
        self.network, self.num_tokens, self.heads = network, len(tokens), config.num_kv_heads
        self.rows = [None] * config.num_layers
        self.kept = [[np.arange(0)] * self.heads for _ in self.rows]

        def note(layer, keys, values):
            self.rows[layer] = keys, values

        self.num_tokens, stop = 0, self.num_tokens
        self.run(tokens, note)
        self.num_tokens = stop
        self.kept = [[np.arange(stop)] * self.heads for _ in self.rows]

    def run(self, tokens, note=lambda *rows: None, show=lambda *rows: None):
        """Logits of tokens behind what is kept, `(n, vocab)`; `show` gets the queries, keys and values of layers."""
        tokens = np.asarray(tokens, np.uint32)

        def attend(layer, queries, keys, values):
            note(layer, keys, values)
            show(layer, queries, keys)
            group, parts = queries.shape[1] // self.heads, []
            for head, kept in enumerate(self.kept[layer]):
                rows = [each[:, head, None] for each in (keys, values)]
                if len(kept):
                    rows = [np.concatenate([old[kept, head, None], new])
                            for old, new in zip(self.rows[layer], rows, strict=True)]
                parts.append(dense(queries[:, head * group : (head + 1) * group], *rows)[0])
            return np.concatenate(parts, axis=1).astype(np.float32)

        return self.network.forward(tokens, self.num_tokens + np.arange(len(tokens)), attend, "all")

    def kvzip(self, tokens, part, sinks, prompt, later, suffix):
        """The scores of KVzip, `(layers, heads, n)`, one query and one key after another."""
        scores = np.zeros((len(self.rows), self.heads, self.num_tokens))
        for start in range(0, self.num_tokens, part):
            own = tokens[start : start + part]
            lead = [*later, *tokens[max(0, start - 8) : start]] if start else prompt
            front = min(sinks, start)
            seen = np.r_[np.arange(front), np.arange(start, start + len(own))]

            def show(layer, queries, keys, start=start, own=own, front=front, seen=seen):
                group = queries.shape[1] // self.heads
                for head in range(self.heads):
                    old = self.rows[layer][0][seen, head, None]
                    both = np.concatenate([old, keys[:, head, None]])
                    _, weights = dense(queries[:, head * group : (head + 1) * group], both, both)
                    best = weights[..., front : front + len(own)].max(axis=(0, 1))
                    scores[layer, head, start : start + len(own)] = best

            self.run([*lead, *suffix, *own], show=show)
        return scores


def best_of(scores, sinks, count):
    """For each layer and head the tokens whose scores are among the `count` highest, the first ones always."""
    ranked = sorted((-np.inf if at < sinks else -scores[i, j, at], i, j, at) for i, j, at in np.ndindex(scores.shape))
    kept = [[[] for _ in layer] for layer in scores]
    for _, i, j, at in ranked[:count]:
        kept[i][j].append(at)
    return [[sorted(head) for head in layer] for layer in kept]
