"""A network without one, which keeps what its queries are told: K and V say which token follows which text."""

from types import SimpleNamespace

import numpy as np

HEADS, KV_HEADS, DIM, LAYERS, VOCABULARY, TOKENS = 4, 2, 16, 2, 50, 400
KINDS = 997


class Teller:
    """K and V of a token depend on all that stands before it, and on whose text that is; it always says token 0.

    Attributes:
        told: what the query at (layer, position) was told.
        countdown: calls of `attend` after which it fails; -1: never.
    """

    config = SimpleNamespace(
        num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS,
    )  # fmt: skip

    def __init__(self):
        rng = np.random.default_rng(3)
        self.queries = rng.standard_normal((LAYERS, TOKENS, HEADS, DIM), np.float32)
        self.rows = rng.standard_normal((2, LAYERS, KINDS, KV_HEADS, DIM), np.float32)
        self.told, self.countdown = {}, -1
        self.expect((), None)

    def expect(self, text, owner):
        """What runs from now on is this text, and then zeros."""
        state = hash(owner) % KINDS
        self.kinds = np.empty(TOKENS, np.int64)
        for pos in range(TOKENS):
            state = (31 * state + (int(text[pos]) if pos < len(text) else 0) + 7 * pos + 1) % KINDS
            self.kinds[pos] = state
        self.told.clear()

    def forward(self, tokens, positions, attend, logits):
        for layer in range(LAYERS):
            if self.countdown == 0:
                raise InterruptedError("as planned")
            self.countdown -= 1
            keys, values = self.rows[:, layer, self.kinds[positions]]
            mixed = attend(layer, self.queries[layer, positions], keys, values)
            self.told.update({(layer, pos): row for pos, row in zip(positions.tolist(), mixed, strict=True)})
        scores = np.zeros(({"last": 1, "all": len(tokens), "none": 0}[logits], VOCABULARY), np.float32)
        scores[:, 0] = 1
        return scores
