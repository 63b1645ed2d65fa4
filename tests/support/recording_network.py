"""A stand-in for a network: K and V identify the token and its text, and the results of attention are recorded."""

from types import SimpleNamespace

import numpy as np

from kvcache.networks.protocols import LayerAttention

HEADS, KV_HEADS, DIM, LAYERS, VOCABULARY, TOKENS = 4, 2, 16, 2, 50, 400
KINDS = 997
FULL = (LayerAttention(),) * LAYERS


class RecordingNetwork:
    """A network whose K and V depend on all tokens up to their own and on the namespace; it always predicts token 0.

    Args:
        attention: how each layer attends; by default two layers see all tokens.

    Attributes:
        outputs: (layer, position) -> the result of attention of that query.
        countdown: calls of `attend` after which it fails; -1: never.
    """

    def __init__(self, attention=FULL):
        rng, layers = np.random.default_rng(3), len(attention)
        self.attention = attention
        self.config = SimpleNamespace(
            num_layers=layers, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, vocab_size=VOCABULARY,
            max_position_embeddings=TOKENS,
        )
        self.queries = rng.standard_normal((layers, TOKENS, HEADS, DIM), np.float32)
        self.rows = rng.standard_normal((2, layers, KINDS, KV_HEADS, DIM), np.float32)
        self.outputs, self.countdown = {}, -1
        self.expect((), None)

    def expect(self, text, owner):
        """Expect this text, followed by zeros, in the next calls."""
        state = hash(owner) % KINDS
        self.kinds = np.empty(TOKENS, np.int64)
        for pos in range(TOKENS):
            state = (31 * state + (int(text[pos]) if pos < len(text) else 0) + 7 * pos + 1) % KINDS
            self.kinds[pos] = state
        self.outputs.clear()

    def layer_rows(self, layer, places, seen):
        """The queries at some positions, and K and V at others, in the sizes of a layer."""
        attention = self.attention[layer]
        owner = layer if attention.kv_layer is None else attention.kv_layer
        heads, dim = attention.num_kv_heads or KV_HEADS, attention.head_dim or DIM
        keys, values = self.rows[:, owner, self.kinds[seen], :heads, :dim]
        return self.queries[layer, places, :, :dim], keys, values

    def forward(self, tokens, positions, attend, logits):
        for layer in range(self.config.num_layers):
            if self.countdown == 0:
                raise InterruptedError("as planned")
            self.countdown -= 1
            queries, keys, values = self.layer_rows(layer, positions, positions)
            own = self.attention[layer].kv_layer is None
            mixed = attend(layer, queries, *((keys, values) if own else (None, None)))
            self.outputs.update({(layer, pos): row for pos, row in zip(positions.tolist(), mixed, strict=True)})
        scores = np.zeros(({"last": 1, "all": len(tokens), "none": 0}[logits], VOCABULARY), np.float32)
        scores[:, 0] = 1
        return scores


def same_outputs(model, expected, atol=0.0):
    """Every query that one network has had gave what it gave in another one, which has had it too."""
    places = list(model.outputs)
    found, want = (
        np.concatenate([outputs[place].ravel() for place in places]) if places else np.empty(0)
        for outputs in (model.outputs, expected.outputs)
    )
    np.testing.assert_allclose(found, want, rtol=0, atol=atol, err_msg=str(places))
