"""A naive `CacheManager`: a list of entries per layer, which is searched for the entry to evict."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil


@dataclass
class NaiveEntry:
    position: int
    key: object
    value: object
    score: float = 0.0


def pyramid(budget, layers):
    """Largest remainders; then each layer without an entry gets one from the largest."""
    quotas = [Fraction(2 * budget * (layers - i), layers * (layers + 1)) for i in range(layers)]
    budgets = [int(q) for q in quotas]
    for i in sorted(range(layers), key=lambda i: (budgets[i] - quotas[i], i))[: budget - sum(budgets)]:
        budgets[i] += 1
    while budget >= layers and 0 in budgets:
        most = max(i for i in range(layers) if budgets[i] == max(budgets))
        budgets[most] -= 1
        budgets[budgets.index(0)] += 1
    return budgets


class NaiveCacheManager:
    """`policy` is ("H2O", fraction), ("SlidingWindow", window, sink) or ("PyramidKV", layers, fraction)."""

    def __init__(self, max_seq_len, policy):
        self.max_seq_len, self.policy = max_seq_len, policy
        self.layers = {}
        self.seen = {}  # rows ever appended, per layer

    def share(self, budget, layer):
        if self.policy[0] == "PyramidKV":
            return pyramid(budget, self.policy[1])[layer]
        rank = sorted(self.layers).index(layer)
        return budget // len(self.layers) + (rank < budget % len(self.layers))

    def shrink(self, entries, budget):
        if self.policy[0] == "SlidingWindow":
            _, window, sink = self.policy
            if sink + window > budget:
                # The newest entry stays first, then the sinks, then the rest of the window.
                sink = min(sink, max(budget - 1, 0))
                window = budget - sink
            if len(entries) > sink + window:
                del entries[sink : len(entries) - window]
            return
        recent = ceil(Fraction(str(self.policy[-1])) * budget)
        while len(entries) > budget:
            older = entries[: len(entries) - recent]
            entries.remove(min(older, key=lambda entry: (entry.score, entry.position)))

    def append(self, keys, values, layer):
        if len(keys) == 0:
            return
        self.layers.setdefault(layer, [])
        for key, value in zip(keys, values, strict=True):
            position = self.seen.get(layer, 0)
            self.seen[layer] = position + 1
            self.layers[layer].append(NaiveEntry(position, key, value))
            self.shrink(self.layers[layer], self.share(self.max_seq_len, layer))
        for other, entries in self.layers.items():
            self.shrink(entries, self.share(self.max_seq_len, other))

    def evict(self, budget, layer=None):
        if layer is not None:
            if layer in self.layers and len(self.layers[layer]) > budget:
                self.shrink(self.layers[layer], budget)
            return
        if len(self.entries()) <= budget:
            return
        # Each layer starts with its share; the rest goes, one by one, to the lowest layer with more entries.
        kept = {i: min(len(self.layers[i]), self.share(budget, i)) for i in sorted(self.layers)}
        while sum(kept.values()) < budget:
            kept[next(i for i in kept if kept[i] < len(self.layers[i]))] += 1
        for i, count in kept.items():
            if len(self.layers[i]) > count:
                self.shrink(self.layers[i], count)

    def entries(self, layer=None):
        if layer is not None:
            return list(self.layers.get(layer, []))
        return [entry for i in sorted(self.layers) for entry in self.layers[i]]

    def add_scores(self, scores, layer=None):
        for entry, score in zip(self.entries(layer), scores, strict=True):
            entry.score += score
