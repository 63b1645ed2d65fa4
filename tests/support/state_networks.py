"""Small networks whose layers attend, keep a state, or do neither: in NumPy, with the same bits in any company."""

from types import SimpleNamespace

import numpy as np

from kvcache.networks.protocols import LayerAttention

WIDTH, HEADS, KV_HEADS, DIM, VOCABULARY, POSITIONS = 16, 4, 2, 8, 250, 400
FULL = LayerAttention()

# By name, each layer: how it attends, the size of its state, or None.
KINDS = {
    "one of each": (16, FULL, None, 32),
    "states alone": (16, None, 48),
    "behind a window": (FULL, LayerAttention(window=20), 16),
    "neither": (None, FULL),
}


class Decay:
    """A recurrence of which each row counts, and their order: `state = (a * state + row) / (1 + |row|)`.

    It counts the rows that ran, and fails once, after `countdown` rows.
    """

    def __init__(self, rng, size):
        self.size, self.rates = size, rng.uniform(0.5, 0.99, size).astype(np.float32)
        self.rows, self.countdown = 0, -1

    def run(self, rows, slots, index, lens):
        (x,) = rows
        assert slots.flags.c_contiguous
        assert slots.dtype == np.float32
        assert len(set(index.tolist())) == len(index) == len(lens)
        assert len(x) == lens.sum()
        found, at = np.empty((len(x), WIDTH), np.float32), 0
        for slot, count in zip(index.tolist(), lens.tolist(), strict=True):
            for row in x[at : at + count]:
                self.countdown -= 1
                if self.countdown == -1:
                    raise InterruptedError("as planned")
                wide = np.resize(row, self.size)
                slots[slot] = (self.rates * slots[slot] + wide) / (1 + np.abs(wide))
                found[at] = slots[slot][:WIDTH] - slots[slot][-WIDTH:] * row
                at += 1
        self.rows += len(x)
        return found


class StateNetwork:
    """A network with the given layers."""

    selects_rows = True

    def __init__(self, kind, seed=0):
        rng, layers = np.random.default_rng(seed), KINDS[kind]
        self.attention = tuple(each if isinstance(each, LayerAttention) else None for each in layers)
        self.recurrences = tuple(Decay(rng, each) if isinstance(each, int) else None for each in layers)
        self.config = SimpleNamespace(
            num_layers=len(layers), num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, vocab_size=VOCABULARY,
            max_position_embeddings=POSITIONS,
        )
        self.fingerprint = f"{kind} {seed}"
        self.embedding = rng.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
        self.places = rng.standard_normal((POSITIONS, WIDTH)).astype(np.float32) / 2
        self.wide = rng.standard_normal((len(layers), WIDTH, 64)).astype(np.float32) / 4
        self.back = rng.standard_normal((len(layers), 32, WIDTH)).astype(np.float32) / 4

    def forward(self, tokens, positions, attend, logits, *, recur=None):
        x = self.embedding[tokens] + self.places[positions]
        for layer, matrix in enumerate(self.wide):
            if self.recurrences[layer] is not None:
                mixed = times(recur(layer, (times(x, matrix[:, :WIDTH]),)), self.back[layer, :WIDTH])
            elif self.attention[layer] is not None:
                heads = times(x, matrix).reshape(len(x), 8, DIM)
                mixed = attend(layer, heads[:, :4], heads[:, 4:6], heads[:, 6:]).reshape(len(x), 32)
                mixed = times(mixed, self.back[layer])
            else:
                mixed = times(np.tanh(times(x, matrix[:, :32])), self.back[layer])
            x = x + np.tanh(mixed)
        if isinstance(logits, str):
            logits = {"all": slice(None), "last": slice(-1, None), "none": slice(0, 0)}[logits]
        return times(x[logits], np.ascontiguousarray(self.embedding.T))


def times(x, matrix):
    """A product whose rows do not depend on one another: the columns of `x` one after another."""
    found = np.zeros((len(x), matrix.shape[1]), np.float32)
    for i, row in enumerate(matrix):
        found += x[:, i : i + 1] * row
    return found
