"""A naive engine that evicts: a list of tokens per layer, dense attention, and a sort."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from oracles.manager import NaiveCacheManager, NaiveEntry, pyramid


@dataclass
class Token(NaiveEntry):
    """One token of one layer: its position, K and V `(kv_heads, head_dim)`, and the attention mass on it."""

    drawn: float = 0.0


class DenseEvictingEngine:
    """`policy` as for `NaiveCacheManager`; `stored` maps keys and values to what the cache returns."""

    def __init__(self, network, policy, kv_budget, chunk, stored=lambda layer, keys, values: (keys, values)):
        self.network, self.policy, self.chunk, self.stored = network, policy, chunk, stored
        layers = network.config.num_layers
        self.budgets = pyramid(kv_budget * layers, layers) if policy[0] == "PyramidKV" else [kv_budget] * layers
        self.layers = [[] for _ in range(layers)]
        self.num_tokens = 0

    def positions(self, layer):
        return [token.position for token in self.layers[layer]]

    def extend(self, tokens):
        """Run tokens in pieces that end at multiples of `chunk`; float logits of every token `(n, vocab)`."""
        rows, tokens = [], np.asarray(tokens, np.uint32)
        while len(tokens):
            piece, tokens = np.split(tokens, [self.chunk - self.num_tokens % self.chunk])
            places = np.arange(self.num_tokens, self.num_tokens + len(piece))

            def attend(*args, places=places):
                return self.attend(*args, places)

            rows.append(self.network.forward(piece, places, attend, "all"))
            self.num_tokens += len(piece)
            manager = NaiveCacheManager(0, self.policy)
            for held, budget in zip(self.layers, self.budgets, strict=True):
                for token in held:  # the mean over the queries that could see it
                    token.score = token.drawn / (self.num_tokens - token.position)
                manager.shrink(held, budget)
        return np.concatenate(rows)

    def attend(self, layer, queries, keys, values, places):
        keys, values = self.stored(layer, keys, values)
        held = self.layers[layer]
        held += [Token(int(at), k, v) for at, k, v in zip(places, keys, values, strict=True)]
        out, weights = dense(queries, np.array([t.key for t in held]), np.array([t.value for t in held]))
        for token, mass in zip(held, weights.sum(axis=(0, 1)), strict=True):
            token.drawn += mass
        return out.astype(np.float32)


def dense(queries, keys, values):
    """Causal attention in float64: outputs `(n, heads, head_dim)` and weights `(heads, n, tokens)`."""
    n, heads, dim = queries.shape
    group = heads // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1).astype(float), np.repeat(values, group, axis=1).astype(float)
    logits = np.einsum("qhd,khd->hqk", queries.astype(float), keys) / np.sqrt(dim)
    before = len(keys) - n
    for i in range(n):
        logits[:, i, before + i + 1 :] = -np.inf
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, values), weights


class DenseStreamingEngine(DenseEvictingEngine):
    """StreamingLLM as in its paper (arXiv 2309.17453, section 3.2): positions are those inside the cache.

    For every chunk, queries and cached keys are rotated back from their text positions to 0, and then to their
    positions in the cache, all in float64.
    """

    def __init__(self, network, sinks, window, chunk, stored=lambda layer, keys, values: (keys, values)):
        super().__init__(network, ("SlidingWindow", window, sinks), sinks + window, chunk, stored)
        config = network.config
        self.frequencies = config.rope.frequencies(config.head_dim)

    def turn(self, rows, positions):
        """Rotate `(n, heads, dim)` by `positions` `(n,)`: a pair of channels is a complex number."""
        half = rows.shape[-1] // 2
        pairs = (rows[..., :half] + 1j * rows[..., half:].astype(float)) * np.exp(
            1j * np.asarray(positions, float)[:, None, None] * self.frequencies
        )
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    def attend(self, layer, queries, keys, values, places):
        keys, values = self.stored(layer, keys, values)
        held = self.layers[layer]
        held += [Token(int(at), k, v) for at, k, v in zip(places, keys, values, strict=True)]
        moved = np.arange(len(held)) - self.positions(layer)
        keys = self.turn(np.array([t.key for t in held]), moved)
        queries = self.turn(queries, moved[len(held) - len(queries) :])
        return dense(queries, keys, np.array([t.value for t in held]))[0].astype(np.float32)


class DensePolicyEngine(DenseEvictingEngine):
    """Evicts as a `Policy` says; every token knows which query gave it how much, `(kv_heads,)` each."""

    def __init__(self, network, policy, kv_budget, chunk):
        super().__init__(network, ("H2O", 0.5), kv_budget, chunk)
        self.own = policy
        self.seen = [{} for _ in self.layers]  # layer -> query position -> token position -> (kv_heads,)
        self.asking = [{} for _ in self.layers]  # layer -> query position -> the query, (heads, head_dim)
        divide = getattr(policy, "budgets", None)
        self.budgets = [10**6] * len(self.layers)  # the rule of the base class never evicts
        self.limits = divide(kv_budget, len(self.layers)) if divide else [kv_budget] * len(self.layers)

    def extend(self, tokens):
        rows, tokens = [], np.asarray(tokens, np.uint32)
        while len(tokens):
            piece, tokens = np.split(tokens, [self.chunk - self.num_tokens % self.chunk])
            rows.append(super().extend(piece))
            for layer in range(len(self.layers)):
                self.evict(layer)
        return np.concatenate(rows)

    def evict(self, layer):
        held = self.layers[layer]
        if len(held) > self.limits[layer]:
            scores, positions = self.scores(layer, held), np.array(self.positions(layer))
            kept = self.own.keep(layer, scores, positions, self.limits[layer], *self.reads(layer, held))
            held[:] = [held[i] for i in kept]

    def reads(self, layer, held):
        """Rows that the policy reads beside scores and positions, heads first."""
        found = []
        for name in ("key", "value"):
            if getattr(self.own, f"reads_{name}s", False):
                found.append(np.array([getattr(token, name) for token in held]).swapaxes(0, 1))
        if last := getattr(self.own, "reads_queries", 0):
            rows = np.array([self.asking[layer][query] for query in sorted(self.asking[layer])[-last:]])
            found.append(rows.reshape(len(rows), self.network.config.num_kv_heads, -1, rows.shape[-1]).swapaxes(0, 1))
        return found

    def scores(self, layer, held):
        last = getattr(self.own, "score_queries", 32)
        first = 0 if last is None else self.num_tokens - last
        heads = self.network.config.num_kv_heads
        found = np.zeros((heads, len(held)))
        for i, token in enumerate(held):
            queries = [q for q in self.seen[layer] if q >= max(first, token.position)]
            for query in queries:
                found[:, i] += self.seen[layer][query][token.position] / len(queries)
        return found

    def attend(self, layer, queries, keys, values, places):
        out = super().attend(layer, queries, keys, values, places)
        held = self.layers[layer]
        _, weights = dense(queries, np.array([t.key for t in held]), np.array([t.value for t in held]))
        by_head = weights.reshape(keys.shape[1], -1, len(queries), len(held)).sum(axis=1)
        for i, query in enumerate(places):
            self.seen[layer][int(query)] = {t.position: by_head[:, i, j] for j, t in enumerate(held)}
            self.asking[layer][int(query)] = queries[i].copy()
        return out


class DenseHeadsEngine(DensePolicyEngine):
    """As a `Policy` for each head says: a token is held by the heads that want it, and gone when none does."""

    def __init__(self, network, policy, kv_budget, chunk):
        super().__init__(network, policy, kv_budget, chunk)
        self.heads = [[set() for _ in range(network.config.num_kv_heads)] for _ in self.layers]  # positions

    def evict(self, layer):
        held, heads = self.layers[layer], self.heads[layer]
        if sum(map(len, heads)) > len(heads) * self.limits[layer]:
            own = [[i for i, token in enumerate(held) if token.position in head] for head in heads]
            scores = [row[at] for row, at in zip(self.scores(layer, held), own, strict=True)]
            positions = [np.array([held[i].position for i in at]) for at in own]
            reads = self.reads(layer, held)
            tokens = [list(rows) for rows in reads]
            for rows in tokens[: sum(getattr(self.own, f"reads_{name}", False) for name in ("keys", "values"))]:
                rows[:] = [row[at] for row, at in zip(rows, own, strict=True)]
            kept = self.own.keep(layer, scores, positions, self.limits[layer], *tokens)
            for head, at, stay in zip(heads, positions, kept, strict=True):
                head.intersection_update(at[np.asarray(stay)].tolist())
            held[:] = [token for token in held if any(token.position in head for head in heads)]

    def attend(self, layer, queries, keys, values, places):
        held, heads = self.layers[layer], self.heads[layer]
        held += [Token(int(at), k, v) for at, k, v in zip(places, keys, values, strict=True)]
        group, mixed = queries.shape[1] // len(heads), []
        for query in places:
            self.seen[layer][int(query)] = {token.position: np.zeros(len(heads)) for token in held}
        for number, head in enumerate(heads):
            head.update(places.tolist())
            own = [token for token in held if token.position in head]
            rows = [np.array([getattr(t, name)[number] for t in own])[:, None] for name in ("key", "value")]
            out, weights = dense(queries[:, number * group : (number + 1) * group], *rows)
            mixed.append(out)
            for i, query in enumerate(places):
                for token, mass in zip(own, weights[:, i].sum(axis=0), strict=True):
                    self.seen[layer][int(query)][token.position][number] = mass
        for i, query in enumerate(places):
            self.asking[layer][int(query)] = queries[i].copy()
        return np.concatenate(mixed, axis=1).astype(np.float32)
