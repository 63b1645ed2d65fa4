"""An engine over any network with the protocol, with the requested formats and pool."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from engines import GREEDY
from oracles.engine import dense_attention
from places import GOLDEN

from kvcache.engine import InferenceEngine, Transformer
from kvcache.paged.cache import PagedKvCache


class ToyNetwork:
    """Two layers of plain attention with learned positions; it shares only the protocol with `Transformer`."""

    def __init__(self):
        rng = np.random.default_rng(3)
        self.config = SimpleNamespace(
            num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=50, max_position_embeddings=64
        )
        self.embedding, self.places = (rng.standard_normal((n, 32)).astype(np.float32) for n in (50, 64))
        self.projections = rng.standard_normal((2, 32, 64)).astype(np.float32) / 4

    def forward(self, tokens, positions, attend, logits):
        x = self.embedding[tokens] + self.places[positions]
        for layer, matrix in enumerate(self.projections):
            heads = (x @ matrix).reshape(len(x), 8, 8)
            x = x + attend(layer, heads[:, :4], heads[:, 4:6], heads[:, 6:]).reshape(len(x), 32)
        rows = {"all": slice(None), "last": slice(-1, None), "none": slice(0, 0)}[logits]
        return x[rows] @ self.embedding.T


def toy_logits(network, tokens):
    """The logits of the same network without a cache."""
    stored = {}

    def attend(layer, queries, keys, values):
        stored[layer] = keys
        return dense_attention(queries, keys, values).astype(np.float32)

    return network.forward(np.array(tokens), np.arange(len(tokens)), attend, "last")[0]


def test_own_network(make):
    network = ToyNetwork()
    engine = make(network, prefill_chunk=5, block_size=4)
    tokens = list(range(17))
    for token in engine.stream(tokens, GREEDY):
        assert token == int(np.argmax(toy_logits(network, tokens)))
        tokens.append(token)
    assert len(tokens) == 27
    assert engine.config is network.config
    assert engine.tokenizer is None
    assert "ToyNetwork" in repr(engine)


@pytest.mark.parametrize("options", [{"dtype": "f16"}, {"key_dtype": "f16", "value_dtype": "q8"}], ids=str)
def test_formats_are_passed_on(network, options):
    cache = InferenceEngine(network, **options).cache
    assert (cache.key_dtype, cache.value_dtype) == ("f16", options.get("value_dtype", "f16"))


def test_default_pool_is_bounded(make):
    config = SimpleNamespace(**{**vars(ToyNetwork().config), "max_position_embeddings": 10**6})
    cache = make(SimpleNamespace(config=config)).cache
    assert cache.total_blocks == 8192 // 16 + 1


@pytest.mark.parametrize("name", ["llama_biases", "mistral_yarn", "qwen3_tied"])
def test_several_sequences_in_one_forward_pass(name):
    """A chunk of one sequence and steps of two others in one pass give the same results as separate passes."""
    network = Transformer.from_pretrained(GOLDEN / name)
    config = network.config
    rng = np.random.default_rng(4)
    texts = [rng.integers(0, config.vocab_size, n).astype(np.uint32) for n in (30, 17, 70)]
    counts = [13, 1, 1]
    cache = PagedKvCache(20, 16, config.num_kv_heads, config.head_dim, num_layers=config.num_layers, dtype="f32")

    def forward(seq_ids, tokens, positions, counts):
        def attend(layer, queries, keys, values):
            row = 0
            for seq_id, count in zip(seq_ids, counts, strict=True):
                cache.write(layer, seq_id, keys[row : row + count], values[row : row + count])
                row += count
            return cache.attention(layer, queries, seq_ids, query_lens=counts)

        return network.forward(np.concatenate(tokens), np.concatenate(positions), attend, "all")

    for seq_id, (text, count) in enumerate(zip(texts, counts, strict=True)):
        cache.allocate(seq_id, len(text) - count)
        forward([seq_id], [text[:-count]], [np.arange(len(text) - count)], [len(text) - count])
        cache.append(seq_id, count)
    tails = [text[-count:] for text, count in zip(texts, counts, strict=True)]
    places = [np.arange(len(text))[-count:] for text, count in zip(texts, counts, strict=True)]
    together = forward([0, 1, 2], tails, places, counts)
    for text, row in zip(texts, (12, 13, 14), strict=True):
        alone = InferenceEngine(network).prefill_from_pos(text, 0)
        np.testing.assert_allclose(together[row], alone, rtol=0, atol=1e-4)
