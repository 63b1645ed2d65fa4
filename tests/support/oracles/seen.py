"""Texts that see parts of cached texts, as a dense pass with an explicit mask in float64: nothing is cached or merged.

Each cached text stands in the pass once for each place that it is seen at, at the positions of that place. Distances
within it are those of its own text, so its rows are the same; no query is turned, and windows are of positions. Where
queries grow with positions, as in Ministral 3, those of cached texts grow by the positions in their own text.
"""

from __future__ import annotations

import numpy as np

from kvcache.networks.protocols import layer_attention


class MaskedTexts:
    """The rows of a pass: their tokens, positions, and which rows each of them sees."""

    def __init__(self, model):
        self.model, self.attention = model, layer_attention(model)
        self.begin()

    def begin(self):
        self.tokens, self.positions, self.shifts, self.sees, self.known = [], [], [], [], {}

    def add(self, tokens, prefix=None, shift=0):
        """Add a text and what it stands behind, moved by `shift`; its rows."""
        key = tokens.tobytes(), None if prefix is None else prefix.name, shift
        if key in self.known:
            return self.known[key]
        parts = [] if prefix is None else prefix.parts
        seen = [self.add(part.tokens, part.behind, part.offset + shift)[part.indices] for part in parts]
        rows = np.arange(len(self.tokens), len(self.tokens) + len(tokens))
        places = [] if prefix is None else prefix.places.tolist()
        base = 0 if prefix is None else prefix.num_tokens - len(places)
        for i, token in enumerate(tokens.tolist()):
            self.tokens.append(token)
            self.shifts.append(shift)
            self.positions.append(shift + (places[i] if i < len(places) else base + i))
            before = [part for part, each in zip(seen, parts, strict=True) if i >= each.since]
            self.sees.append(np.concatenate([*before, rows[: i + 1]]))
        self.known[key] = rows
        return rows

    def growth(self):
        """By how much the queries of rows are to grow again."""
        positions, grown = np.array(self.positions), []
        for each in (positions - self.shifts, positions):
            factors = self.model.config.rope.query_factors(each)
            grown.append(np.ones(len(each)) if factors is None else factors)
        return grown[0] / grown[1]

    def logits(self, rows):
        """The logits of some rows, `(rows, vocab_size)`."""
        mask = np.zeros((len(self.tokens), len(self.tokens)), bool)
        for row, seen in enumerate(self.sees):
            mask[row, seen] = True
        count = mask.sum(axis=1)
        assert (count == [len(each) for each in self.sees]).all(), "a row sees another one twice"

        grown = self.growth()
        distances = np.subtract.outer(self.positions, self.positions)

        def attend(layer, queries, keys, values, *_):
            attention, group = self.attention[layer], queries.shape[1] // keys.shape[1]
            values = keys[:, :, : attention.latent] if values is None else values
            q, k, v = (each.astype(np.float64) for each in (queries, keys, values))
            q = q * grown[:, None, None]
            scale = q.shape[2] ** -0.5 if attention.scale is None else attention.scale
            scores = np.einsum("nhd,mhd->hnm", q, np.repeat(k, group, axis=1)) * scale
            if attention.softcap is not None:
                scores = attention.softcap * np.tanh(scores / attention.softcap)
            near = mask if attention.window is None else mask & (distances < attention.window)
            most = np.where(near, scores, -np.inf).max(axis=2, keepdims=True)
            weights = np.where(near, np.exp(np.minimum(scores - most, 0)), 0)
            sums = weights.sum(axis=2, keepdims=True)
            if attention.sinks is not None:
                sums += np.exp(np.asarray(attention.sinks, np.float64)[:, None, None] - most)
            weights /= sums
            return np.einsum("hnm,mhd->nhd", weights, np.repeat(v, group, axis=1)).astype(np.float32)

        tokens, positions = np.array(self.tokens, np.uint32), np.array(self.positions)
        regime = getattr(self.model, "regime", None)
        places = {} if regime is None else {"regime": regime(int(positions.max()) + 1)}
        return self.model.forward(tokens, positions, attend, "all", **places)[rows]


def seen_logits(model, own, prefix):
    """The logits of all tokens of a text behind a `SeenParts`."""
    texts = MaskedTexts(model)
    return texts.logits(texts.add(own, prefix))


def seen_positions(prefix, count):
    """For each of the first `count` tokens of a text the positions that it sees, with repetitions."""
    texts = MaskedTexts.__new__(MaskedTexts)
    texts.begin()
    rows = texts.add(np.zeros(count, np.uint32), prefix)
    return [[texts.positions[seen] for seen in texts.sees[row]] for row in rows]
