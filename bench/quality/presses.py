"""The same policies in kvpress, on transformers: which tokens survive, and the perplexity of the continuation.

kvpress evicts once, after the prompt, separately for each KV head. So here the engine runs the prompt in one piece too,
and the continuation evicts nothing more; both caches grow during it. A window keeps the same tokens in both, so its
perplexity must be the same. With observed attention, both keep the tokens with the most attention, averaged over the
queries that saw a token; H2O has one list for all heads of a layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.quality.network import log_softmax
from bench.quality.prompts import LENGTH, Prompt
from kvcache import EvictionPolicy, InferenceEngine, PagedKvCache
from kvcache.demo import DIRECTORY
from kvcache.engine import Transformer
from kvcache.networks.protocols import cached_sizes

__all__ = ["HEADER", "PERCENT", "measure", "rows"]

PERCENT, SINKS = 20, 4
HEADER = ["policy", "kvcache", "perplexity", "kvpress", "perplexity", "survivors in common"]


def measure(model: Transformer, prompts: list[Prompt]) -> list[dict[str, Any]] | str:
    """A row per policy, or the reason why nothing can be compared."""
    try:
        import kvpress
        import torch
        from transformers import DynamicCache, LlamaForCausalLM
    except ImportError as error:
        return f"not compared: {error}"
    theirs = LlamaForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32, attn_implementation="eager").eval()
    layers, found = model.config.num_layers, []
    pairs = (
        ("everything", None, None),
        ("window and sinks", "StreamingLLMPress", lambda n: EvictionPolicy.SlidingWindow(n - SINKS, SINKS)),
        ("attention drawn", "ObservedAttentionPress", lambda n: EvictionPolicy.H2O(0.0)),
    )
    for name, press_name, policy in pairs:
        nats, common, count = np.zeros(2), [], 0
        for prompt in prompts:
            head, tokens = prompt.continuation.start, prompt.tokens[: prompt.continuation.stop]
            budget = round(head * PERCENT / 100)
            kept = None
            if policy is not None:
                engine = InferenceEngine(model, prefill_chunk=LENGTH, eviction_policy=policy(budget), kv_budget=budget)
                engine.prefill_from_pos(tokens[:head], 0)
                kept = [engine.kept_positions(layer) for layer in range(layers)]
            nats[0] += _nats(_run(model, tokens, head, kept), tokens[head:])
            cache = DynamicCache()
            with torch.no_grad():
                ids = torch.tensor(tokens.astype(np.int64))[None]
                if press_name is None or kept is None:
                    first = theirs(ids[:, :head], past_key_values=cache).logits[0, -1:]
                else:
                    keys = _watch(theirs, ids[:, :head], DynamicCache())
                    press = getattr(kvpress, press_name)(compression_ratio=1 - budget / head)
                    with press(theirs):
                        first = theirs(ids[:, :head], past_key_values=cache).logits[0, -1:]
                    common.append(np.mean([_overlap(keys[i], cache.layers[i].keys, kept[i]) for i in range(layers)]))
                places = torch.arange(head, len(tokens) - 1)[None]
                rest = theirs(ids[:, head:-1], past_key_values=cache, position_ids=places).logits[0]
                nats[1] += _nats(torch.cat([first, rest]).numpy(), tokens[head:])
            count += len(tokens) - head
        own, press_perplexity = np.exp(nats / count)
        found.append({
            "policy": name, "ours": "all" if policy is None else str(policy(budget)), "perplexity": float(own),
            "press": press_name or "none", "press_perplexity": float(press_perplexity),
            "common": float(np.mean(common)) if common else 1.0,
        })
    return found


def _run(model: Transformer, tokens: np.ndarray, head: int, kept: list[np.ndarray] | None) -> np.ndarray:
    """Logits of the continuation over the kept tokens of the prompt; as in kvpress, nothing is evicted after it."""
    config = model.config
    layers = range(config.num_layers)
    blocks = config.num_layers * (len(tokens) // 16 + 2)
    cache = PagedKvCache(blocks, 16, *cached_sizes(model), dtype="f32")
    for layer in layers:
        cache.allocate(layer, 0)
    rows = []
    for piece, start, logits in ((tokens[:head], 0, "last"), (tokens[head:-1], head, "all")):
        for layer in layers:
            cache.append(layer, len(piece))

        def attend(layer: int, queries: Any, keys: Any, values: Any) -> Any:
            cache.write(0, layer, keys, values)
            return cache.attention(0, queries, [layer], query_lens=[len(queries)])

        rows.append(model.forward(piece, np.arange(start, start + len(piece)), attend, logits))
        for layer in layers if start == 0 and kept is not None else ():
            cache.keep_tokens(layer, kept[layer])
    return np.concatenate(rows)


def _nats(logits: np.ndarray, targets: np.ndarray) -> float:
    return -float(log_softmax(logits.astype(np.float64))[np.arange(len(targets)), targets].sum())


def _watch(network: Any, ids: Any, cache: Any) -> list[Any]:
    """The keys of all tokens, which identify the kept ones later."""
    network(ids, past_key_values=cache)
    return [layer.keys.clone() for layer in cache.layers]


def _overlap(everything: Any, kept: Any, ours: np.ndarray) -> float:
    """The share of our kept tokens of a layer that kvpress kept too, mean over its KV heads."""
    shares = []
    for before, after in zip(everything[0].numpy(), kept[0].numpy(), strict=True):
        rows = {row.tobytes() for row in after}
        theirs = [i for i, row in enumerate(before) if row.tobytes() in rows]
        shares.append(len(np.intersect1d(ours, theirs)) / len(ours))
    return float(np.mean(shares))


def rows(found: list[dict[str, Any]]) -> list[list[str]]:
    """The rows of the table."""
    return [
        [
            f["policy"], f["ours"], f"{f['perplexity']:.4f}", f["press"], f"{f['press_perplexity']:.4f}",
            f"{100 * f['common']:.1f} %",
        ]
        for f in found
    ]
