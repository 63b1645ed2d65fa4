"""The demo model in PyTorch (Llama architecture), and its export to the Hugging Face layout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn


@dataclass
class Config:
    """Shape of the model; the defaults are the demo model."""

    vocab_size: int = 4096
    hidden_size: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 704
    context: int = 2048
    rope_theta: float = 10000.0
    eps: float = 1e-5


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in the rotate-half convention of the Hugging Face Llama."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention and MLP.  Master weights and the residual stream are f32; products run in ``dtype``."""

    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        h, d = c.hidden_size, c.head_dim

        def matrix(rows: int, cols: int, zero: bool = False) -> nn.Parameter:
            # Matrices that write to the residual stream start at zero: every block starts as the identity.
            return nn.Parameter(torch.zeros(rows, cols) if zero else torch.randn(rows, cols) * cols**-0.5)

        self.q_proj = matrix(c.heads * d, h)
        self.k_proj = matrix(c.kv_heads * d, h)
        self.v_proj = matrix(c.kv_heads * d, h)
        self.o_proj = matrix(h, c.heads * d, zero=True)
        self.gate_proj = matrix(c.intermediate_size, h)
        self.up_proj = matrix(c.intermediate_size, h)
        self.down_proj = matrix(h, c.intermediate_size, zero=True)
        self.input_norm = nn.Parameter(torch.ones(h))
        self.post_norm = nn.Parameter(torch.ones(h))

    def forward(self, x, cos, sin, dtype):
        c = self.c
        b, t, _ = x.shape
        y = rms_norm(x, self.input_norm, c.eps).to(dtype)
        # One product for q, k and v: a third of the calls, and a wider product is faster.
        qkv = F.linear(y, torch.cat((self.q_proj, self.k_proj, self.v_proj)).to(dtype))
        qkv = qkv.view(b, t, c.heads + 2 * c.kv_heads, c.head_dim).transpose(1, 2)
        q, k, v = qkv.split((c.heads, c.kv_heads, c.kv_heads), dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = c.heads // c.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(b, t, c.heads * c.head_dim)
        x = x + F.linear(y, self.o_proj.to(dtype))
        y = rms_norm(x, self.post_norm, c.eps).to(dtype)
        gate, up = F.linear(y, torch.cat((self.gate_proj, self.up_proj)).to(dtype)).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down_proj.to(dtype))


class Demo(nn.Module):
    """Token ids to logits, with tied input and output embeddings."""

    def __init__(self, c: Config, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.c, self.dtype = c, dtype
        # Small: with tied embeddings and identity blocks every token would otherwise predict itself.
        self.embed = nn.Parameter(torch.randn(c.vocab_size, c.hidden_size) * 0.02)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.Parameter(torch.ones(c.hidden_size))
        freq = c.rope_theta ** -(torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        angle = torch.outer(torch.arange(c.context).float(), freq)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: torch.Tensor, last: int = 0) -> torch.Tensor:
        """Logits at every position, or only at the ``last`` few."""
        t = ids.shape[1]
        cos, sin = self.cos[:t], self.sin[:t]
        x = F.embedding(ids, self.embed)
        for block in self.blocks:
            x = block(x, cos, sin, self.dtype)
        x = rms_norm(x[:, -last:], self.norm, self.c.eps).to(self.dtype)
        return F.linear(x, self.embed.to(self.dtype))

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats of ids[:, 1:] given the tokens before."""
        logits = self(ids[:, :-1])
        return F.cross_entropy(logits.float().view(-1, self.c.vocab_size), ids[:, 1:].reshape(-1))


# fields of `Config` -> their names in config.json
_CONFIG_NAMES = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "intermediate_size": "intermediate_size", "context": "max_position_embeddings", "rope_theta": "rope_theta",
    "eps": "rms_norm_eps",
}
_BLOCK_NAMES = {
    **{f"{name}_proj": f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"{name}_proj": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
}


def hf_name(name: str) -> str:
    """The Hugging Face name of a parameter."""
    if name == "embed":
        return "model.embed_tokens.weight"
    if name == "norm":
        return "model.norm.weight"
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{_BLOCK_NAMES[part]}"


def export(model: Demo, tok, out: Path) -> None:
    """Write config, bf16 weights and tokenizer in the layout that LlamaForCausalLM loads."""
    c = model.c
    out.mkdir(parents=True, exist_ok=True)
    eot = tok.token_to_id("<|endoftext|>")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: getattr(c, field) for field, key in _CONFIG_NAMES.items()},
        "hidden_act": "silu",
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    generation = {"bos_token_id": eot, "eos_token_id": eot, "do_sample": False}
    tok_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": c.context,
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    for name, data in (("config", config), ("generation_config", generation), ("tokenizer_config", tok_config)):
        (out / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")
    tok.save(str(out / "tokenizer.json"), pretty=False)
    weights = {hf_name(n): p.detach().to(torch.bfloat16).contiguous() for n, p in model.named_parameters()}
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})


def load(path: Path, dtype: torch.dtype = torch.float32) -> Demo:
    """Load the exported (bf16-rounded) model, with products in ``dtype``."""
    h = json.loads((path / "config.json").read_text())
    model = Demo(Config(**{field: h[key] for field, key in _CONFIG_NAMES.items()}), dtype)
    weights = load_file(str(path / "model.safetensors"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[hf_name(name)].float())
    return model.eval()
