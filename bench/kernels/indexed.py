"""Decode steps of one layer with an indexer, of the sizes of DeepSeek V3.2, beside the same layer over all tokens.

The layer is whole but for its MLP, which has 64 channels: projections, the indexer, its choice, attention. Its weights
are random, in q8, as are the rows that the cache has of the tokens before the step.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from kvcache import PagedKvCache
from kvcache.engine import ModelConfig, Transformer
from kvcache.networks.protocols import Attend
from kvcache.networks.weights import Weights
from kvcache.paged.queried import QueriedSequences

__all__ = ["LATENT", "indexed_models", "indexed_times"]

CONFIG = {
    "model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"], "hidden_size": 7168,
    "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 1, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "index_n_heads": 64,
    "index_head_dim": 128, "index_topk": 2048, "intermediate_size": 64, "vocab_size": 64, "first_k_dense_replace": 1,
    "max_position_embeddings": 163840, "num_nextn_predict_layers": 0, "tie_word_embeddings": True,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
}
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "index_n_heads": 4}
LATENT, INDEX_DIM = (512, 64), 128  # channels of a row, and of a key of the indexer


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of the network."""
    layer, latent, hidden = "model.layers.0.", sum(LATENT), config["hidden_size"]
    heads, queries, index_heads = (config[name] for name in ("num_attention_heads", "q_lora_rank", "index_n_heads"))
    yield "model.embed_tokens.weight", (64, hidden)
    yield "model.norm.weight", (hidden,)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{layer}{name}.weight", (hidden,)
    for name, shape in {
        "q_a_proj": (queries, hidden), "q_b_proj": (heads * 192, queries), "kv_a_proj_with_mqa": (latent, hidden),
        "kv_b_proj": (heads * 256, LATENT[0]), "o_proj": (hidden, heads * 128), "q_a_layernorm": (queries,),
        "kv_a_layernorm": (LATENT[0],), "indexer.wq_b": (index_heads * INDEX_DIM, queries),
        "indexer.wk": (INDEX_DIM, hidden), "indexer.weights_proj": (index_heads, hidden),
        "indexer.k_norm": (INDEX_DIM,),
    }.items():
        yield f"{layer}self_attn.{name}.weight", shape
    yield f"{layer}self_attn.indexer.k_norm.bias", (INDEX_DIM,)
    for name, shape in (("gate", (64, hidden)), ("up", (64, hidden)), ("down", (hidden, 64))):
        yield f"{layer}mlp.{name}_proj.weight", shape


def write(folder: Path, config: dict[str, Any]) -> None:
    """Write `config.json` and `model.safetensors`, in bf16."""
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    at, rng = 0, np.random.default_rng(0)
    for name, shape in shapes(config):
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, shape in shapes(config):
            rows = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
            rows = rows if len(shape) > 1 else np.ones(shape, np.float32)
            file.write((rows.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def indexed_models(small: bool = False) -> tuple[Transformer, Transformer]:
    """The network, and the same one whose queries attend to all tokens; `small`: of other sizes, to try it."""
    with tempfile.TemporaryDirectory() as place:
        write(Path(place), CONFIG | (SMALL if small else {}))
        config = ModelConfig.from_pretrained(place)
        weights = Weights.from_pretrained(place, config, "q8")
    return Transformer(config, weights), Transformer(replace(config, index=None), weights)


def indexed_times(
    models: tuple[Transformer, Transformer], context: int, rounds: int, dtype: str, index_dtype: str
) -> tuple[list[float], list[float]]:
    """Seconds of a step over all tokens, and over those that are chosen, round by round, in turn."""
    rng = np.random.default_rng(0)
    cache = PagedKvCache(
        -(-context // 16) + 1, 16, latent=LATENT, dtype=dtype, index_layers=1, index_dim=INDEX_DIM,
        index_dtype=index_dtype,
    )
    cache.allocate(0, context)
    for start in range(0, context, 4096):
        count = min(4096, context - start)
        for layer, channels in ((0, sum(LATENT)), (1, INDEX_DIM)):
            cache.write(layer, 0, rng.standard_normal((count, 1, channels), np.float32), start=start)
    sequences, token = QueriedSequences([0], [1]).kept(), np.zeros(1, np.uint32)

    def step(model: Transformer) -> float:
        begin = perf_counter()
        cache.append(0, 1)
        model.forward(token, np.array([context]), attend_of(cache, sequences, model), "last")
        ended = perf_counter() - begin
        cache.truncate(0, context)
        return ended

    for model in models:
        step(model)
    chosen, dense = zip(*([step(model) for model in models] for _ in range(rounds)), strict=True)
    return list(dense), list(chosen)


def attend_of(cache: PagedKvCache, sequences: QueriedSequences, model: Transformer) -> Attend:
    """The attention of an engine in this layer."""
    own = model.attention[0]
    assert own is not None, "it attends"
    calls, most = {0: (0, own.call(), True)}, 0 if own.index is None else own.index.most

    def attend(layer: int, queries: Any, keys: Any, values: Any, _: Any = None, rows: Any = None, /) -> Any:
        chosen = None if rows is None else cache.write_and_choose(sequences, 1, *rows, most)
        return cache.write_and_attend(sequences, calls, layer, queries, keys, values, None, chosen)

    return attend
