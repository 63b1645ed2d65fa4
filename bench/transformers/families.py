"""Families of transformers with the cache, each on a tiny random model: `python -m bench.transformers.families`.

A family's own default configuration is shrunk by `SIZES`; 24 greedy tokens behind prompts with left padding by
"kvcache" and `PagedCache` in f32 are compared with those by "eager" and `DynamicCache`.
"""

from __future__ import annotations

import math
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM, DynamicCache, logging
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from bench.transformers.models import with_large_weights
from kvcache.integrations.transformers import PagedCache

__all__ = ["OUTCOMES", "Outcome", "main", "try_family"]

OUTCOMES = {
    "packed": "the same tokens; all attention reads packed blocks",
    "partly": "the same tokens; a part of the layers has dense K and V, or keeps states of transformers' own",
    "dense": "the same tokens by dense K and V",
    "raises": "an error with a name",
    "wrong": "other tokens or logits",
    "no cache": "the model keeps nothing in a cache",
    "not tried": "eager attention with DynamicCache does not run on a shrunk configuration",
}
LAYERS, TOKENS, LONGEST, VOCABULARY = 4, 24, 21, 61
BOUND = 1e-4  # of the range of logits
MOST_WEIGHTS = 50_000_000
SECONDS = 60

_VALUES = {
    0: (
        "pad_token_id",
    ),
    1: (
        "bos_token_id", "n_group", "n_groups", "topk_group", "num_expert_group", "first_k_dense_replace",
        "decoder_start_token_id",
    ),
    2: (
        "eos_token_id", "num_key_value_heads", "num_experts_per_tok", "num_experts_per_token", "moe_k",
        "moe_topk", "num_kv_heads", "linear_num_key_heads", "swa_num_key_value_heads", "num_kv_shared_layers",
        "interleave_moe_layer_step", "n_head_kv", "index_topk_blocks", "o_groups", "cla_share_factor",
        "zero_expert_num",
    ),
    4: (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads",
        "encoder_attention_heads", "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts",
        "linear_num_value_heads", "swa_num_attention_heads", "qk_rope_head_dim", "index_n_heads",
        "mamba_n_heads", "rotary_dim", "laurel_rank", "adapter_rank", "linear_num_heads", "hc_lowrank",
        "mamba_num_heads", "n_mamba_heads", "num_decoder_attention_heads", "num_encoder_attention_heads",
        "index_block_size", "gated_norm_rank", "time_step_rank", "mamba_dt_rank", "loop_gate_rank",
        "hc_sinkhorn_iters",
    ),
    6: (
        "sliding_window", "window_size", "local_attention", "sliding_window_size", "attention_window_size",
        "keep_window_size",
    ),
    8: (
        "head_dim", "kv_channels", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim",
        "linear_key_head_dim", "linear_value_head_dim", "index_head_dim", "index_topk", "linear_head_dim",
        "swa_head_dim", "mamba_d_state", "mamba_d_head", "mamba_chunk_size", "chunk_size", "state_size",
        "ssm_state_size", "mamba_head_dim", "hidden_size_per_layer_input", "attention_chunk_size", "d_rel",
        "dim_head", "d_kv", "o_lora_rank", "swa_v_head_dim", "router_hidden_size", "query_pre_attn_scalar",
        "block_size",
    ),
    12: (
        "qk_head_dim",
    ),
    16: (
        "moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size", "rel_extent",
        "global_head_dim", "shared_intermediate_size", "moe_shared_expert_intermediate_size",
        "shared_experts_intermediate_size",
    ),
    32: (
        "hidden_size", "d_model", "n_embd", "mamba_d_ssm", "word_embed_proj_dim", "embedding_size", "lru_width",
        "input_size", "emb_dim", "embedding_dim", "input_embedding_size", "output_embedding_size",
        "ple_embed_dim", "backbone_hidden_size",
    ),
    40: (
        "intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "d_ff", "dim_ff",
        "dff", "intermediate_size_mlp", "ffn_hidden_size", "feed_forward_size", "dense_intermediate_size",
    ),
    VOCABULARY: (
        "vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "unpadded_vocab_size",
    ),
    128: (
        "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length",
        "max_target_positions", "ngram_vocab_size_base", "context_length",
    ),
}
SIZES = {name: value for value, names in _VALUES.items() for name in names}
DEPTHS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_decoder_layers",
    "num_encoder_layers", "num_blocks",
)
LEFT = ("id2label", "label2id", "per_layer_config", "transformers_version")  # of a configuration, not settings
# What the tables cannot know: settings beside them, by family.
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_d_head": 16, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {
        name: {"rope_type": "default", "rope_theta": 10000.0} for name in ("full_attention", "sliding_attention")
    }},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "dory": {"num_hidden_layers": 8, "n_input_layers": 2, "n_recurrent_layers": 4, "n_output_layers": 2,
             "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2},
    "glm5_next": {"text_config": {"index_kpool": 4}},
    "granitemoehybrid": {"mamba_d_head": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
                         "num_local_experts": 4},
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 16},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl": {"text_config": {"head_dim": 8}},
    "inkling2": {"vision_config": {"text_hidden_size": 32}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "ministral": {"head_dim": 8},
    "mpt": {"max_seq_len": 128},
    "muse_spark": {"audio_config": {"out_hidden_size": 32}, "vision_config": {"out_hidden_size": 32}},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {"indexer_compress_ratio": 2, "indexer_budget": 8, "indexer_n_heads": 4,
                       "indexer_kv_heads": 1, "indexer_head_dim": 8},
}
for _kind, _parts in {"glm46v": 4, "glm4v": 4, "glm4v_moe": 2, "qwen2_5_vl": 4, "qwen2_vl": 4}.items():
    OWN[_kind] = {"text_config": {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [_parts - 2, 1, 1],
    }}}
OWN["cohere_compass"] = {"text_config": OWN["cohere_compass_text"]}
OWN["step3p7"] = {"text_config": {"sliding_window": 6}}
OWN["qwen4_exp"] = {"text_config": OWN["qwen4_exp_text"]}


class Outcome(NamedTuple):
    """The result of a family.

    Attributes:
        kind: one of `OUTCOMES`.
        why: the reasons for dense K and V, the error, or the difference of logits over their range.
    """

    kind: str
    why: str = ""


def shrunk(kind: str) -> Any:
    """A family's default configuration in small."""
    default = CONFIG_MAPPING[kind]()
    small = _small(default.to_dict())
    for name, value in OWN.get(kind, {}).items():
        small[name] = small[name] | value if isinstance(small.get(name), dict) else value
    return type(default)(**small)


def _small(values: dict[str, Any]) -> dict[str, Any]:
    depth = next((values[name] for name in DEPTHS if isinstance(values.get(name), int)), 0)
    lists = {name: each for name, each in values.items() if isinstance(each, list) and depth and len(each) == depth}
    kept = _kept_layers(lists, depth)
    small: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and "model_type" in value:
            small[name] = _small(value)
        elif name in DEPTHS:
            small[name] = LAYERS
        elif isinstance(value, dict) and "mrope_section" in value:
            small[name] = value | {"mrope_section": [2, 1, 1]}
        elif name in lists:
            small[name] = [value[layer] for layer in kept]
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            small[name] = SIZES[name] if name.endswith("_id") else min(value, SIZES[name])
        elif name not in LEFT and not name.startswith("_"):
            small[name] = value
    if "kv_lora_rank" in values and "num_key_value_heads" in small:  # latent K and V are made for each head
        small["num_key_value_heads"] = small["num_attention_heads"]
        if values.get("head_dim") == values.get("qk_rope_head_dim"):
            small["head_dim"] = SIZES["qk_rope_head_dim"]
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if name in values:
            small[name] = SIZES[name]
    return small


def _kept_layers(lists: dict[str, list[Any]], depth: int) -> list[int]:
    """The layers that stay: one of each kind of what the lists say, then the first."""
    first: dict[str, int] = {}
    for layer in range(depth):
        first.setdefault(str([each[layer] for each in lists.values()]), layer)
    kept = list(first.values())[:LAYERS]
    kept += [layer for layer in range(depth) if layer not in kept][: LAYERS - len(kept)]
    return sorted(kept)


def make_model(kind: str) -> Any:
    """A tiny random model of a family, with attention that is not flat."""
    config = shrunk(kind)
    maker = AutoModelForCausalLM if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForMultimodalLM
    with torch.device("meta"):
        count = sum(weight.numel() for weight in maker.from_config(config).parameters())
    if count > MOST_WEIGHTS:
        raise ValueError(f"{kind}: expected at most {MOST_WEIGHTS} weights, got {count}")
    torch.manual_seed(0)
    model = maker.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    return with_large_weights(model)


def _generate(model: Any, cache: Any) -> Any:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (2, LONGEST), generator=draw)
    mask = torch.ones_like(ids)
    ids[1, : LONGEST // 3], mask[1, : LONGEST // 3] = 0, 0
    return model.generate(
        ids, attention_mask=mask, cache=cache, max_new_tokens=TOKENS, do_sample=False, output_logits=True,
        return_dict_in_generate=True, eos_token_id=None, pad_token_id=0,
    )


def try_family(kind: str) -> Outcome:
    """Generate by both caches and compare."""
    try:
        model = make_model(kind)
        dynamic = DynamicCache(config=model.config)
        want = _generate(model, dynamic)
        logits = torch.stack(want.logits).float()
        if not torch.isfinite(logits).all() or logits.max() == logits.min():
            return Outcome("not tried", "logits that are not finite, or all the same")
        if dynamic.get_seq_length() == 0:
            return Outcome("no cache")
    except Exception as error:
        return Outcome("not tried", _first_line(error))
    try:
        try:
            model.set_attn_implementation("kvcache")
        except ValueError as error:
            if "kvcache" not in str(error):
                raise
        cache = PagedCache(model.config, dtype="f32")
        got = _generate(model, cache)
        cache.check()
    except Exception as error:
        return Outcome("raises", _first_line(error))
    gap = _gap(got, want)
    if gap >= BOUND and _supports_sdpa(model):  # where eager and sdpa differ, in what rows of padding hold
        model.set_attn_implementation("sdpa")
        gap = _gap(got, _generate(model, DynamicCache(config=model.config)))
    return _served(cache) if gap < BOUND else Outcome("wrong", f"{gap:.1e}")


def _supports_sdpa(model: Any) -> bool:
    return bool(getattr(model, "_supports_sdpa", False))


def _gap(got: Any, want: Any) -> float:
    """The largest difference of logits over their range; infinite for other tokens."""
    if not torch.equal(got.sequences, want.sequences):
        return math.inf
    ours, theirs = torch.stack(got.logits).float(), torch.stack(want.logits).float()
    return float((ours - theirs).abs().max() / (theirs.max() - theirs.min()))


def _served(cache: PagedCache) -> Outcome:
    stats = cache.stats()
    own = sorted({type(layer).__name__ for layer in cache.layers} - {"PagedLayer", "DummyLayer"})
    reasons = [*stats.dense_calls, *own]
    if not stats.packed_calls:
        return Outcome("dense", "; ".join(reasons))
    return Outcome("partly" if reasons else "packed", "; ".join(reasons))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:160]}"


@contextmanager
def _within(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after some seconds."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"expected an end within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main(families: Iterable[str]) -> int:
    """Try families, print a row for each; 1 if one of them is wrong."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    counts: Counter[str] = Counter()
    for kind in families:
        with _within(SECONDS):
            outcome = try_family(kind)
        counts[outcome.kind] += 1
        print(f"| {kind} | {outcome.kind} | {outcome.why} |", flush=True)
    for name, meaning in OUTCOMES.items():
        print(f"{counts[name]:4} {name}: {meaning}")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    every = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    raise SystemExit(main(sys.argv[1:] or every))
