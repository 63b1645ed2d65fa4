"""Tiny random models of many architectures of transformers, and runs of them beside `DynamicCache`."""

import inspect
from itertools import pairwise

import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from bench.transformers.models import with_large_weights

COMMON = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0}
ROUTED |= {"first_k_dense_replace": 1}
WINDOW = {"sliding_window": 6}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2}
GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "n_inner": 40, "n_ctx": 128, "rotary_dim": 4}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}

# Model type -> settings beside COMMON. Of all of them every attention call with a cache reads packed blocks.
PACKED = {
    "apertus": {},
    "arcee": {},
    "biogpt": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": MIXED,
    "dots1": MOE | ROUTED,
    "ernie4_5": {},
    "exaone4": MIXED | {"sliding_window_pattern": 2},
    "gemma": {},
    "gemma2": MIXED | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": MIXED | {"query_pre_attn_scalar": 8},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt_oss": MOE | MIXED,
    "granite": {},
    "granitemoe": MOE,
    "helium": {},
    "hunyuan_v1_dense": {},
    "llama": {},
    "ministral": MIXED,
    "mistral": WINDOW,
    "mixtral": MOE,
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": MIXED,
    "olmoe": MOE,
    "opt": {"ffn_dim": 40, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": WINDOW,
    "phimoe": MOE,
    "qwen2": {},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 16},
    "qwen3": MIXED | {"use_sliding_window": True},
    "qwen3_moe": MOE,
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": WINDOW,
    "gemma3n_text": MIXED | {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 61, "laurel_rank": 4}
    | {"hidden_size_per_layer_input": 8, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": MIXED | {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 61, "global_head_dim": 16}
    | {"hidden_size_per_layer_input": 8},
    "jamba": MOE | {"mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
    | {"use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen3_next": MOE | {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2}
    | {"linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    | {"shared_expert_intermediate_size": 16},
}

# Models with an attention of their own, or with layers of other kinds: the same logits by dense K and V.
DENSE = {
    "bloom": {"n_layer": 3},
    "deepseek_v3": MOE | ROUTED | MLA | {"num_key_value_heads": 4, "head_dim": 4},
    "diffllama": {},
    "falcon": {"head_dim": None, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8},
    "llama4_text": MOE | {"attention_chunk_size": 8, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 3, "expansion_ratio": 2},
    "xglm": {"d_model": 32, "num_layers": 3, "attention_heads": 4, "ffn_dim": 40},
}

# Since 5.24 transformers registers the attention of these two, so it reads packed blocks.
(PACKED if Version(transformers.__version__) >= Version("5.24") else DENSE).update(codegen=GPT, gptj=GPT)


def make_model(kind, attention=None, dtype=torch.float32, seed=0, **settings):
    """A random model of an architecture, in inference; with transformers' `sdpa` where it has it."""
    torch.manual_seed(seed)
    values = COMMON | PACKED.get(kind, {}) | DENSE.get(kind, {}) | settings
    config = AutoConfig.for_model(kind, **{name: value for name, value in values.items() if value is not None})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if attention or not model._supports_sdpa:
        model.set_attn_implementation(attention or "eager")
    return with_large_weights(model)


def left_padded(lengths, total, vocabulary=61, seed=0):
    """`(ids, mask)` of rows with `lengths` tokens, at their end."""
    ids = torch.randint(3, vocabulary, (len(lengths), total), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(total)[None] >= total - torch.tensor(lengths)[:, None]
    return ids * mask, mask.long()


@torch.no_grad()
def logits_of(model, cache, ids, mask, prefill, steps=1):
    """Logits of all tokens of `ids`, of which the first `prefill` run at once, the others `steps` at a time."""
    takes = inspect.signature(model.forward).parameters
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    rows, edges = [], [0, *range(prefill, ids.shape[1], steps), ids.shape[1]]
    for start, stop in pairwise(edges):
        given = {"position_ids": positions[:, start:stop]} if "position_ids" in takes else {}
        out = model(
            ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True, **given
        )
        rows.append(out.logits.float())
    return torch.cat(rows, 1)


def difference(got, want, mask):
    """The largest difference of logits of unmasked tokens, over their range."""
    got, want = got[mask.bool()], want[mask.bool()]
    return float((got - want).abs().max() / (want.max() - want.min()))


def dynamic(model):
    """transformers' own cache."""
    return DynamicCache(config=model.config)
