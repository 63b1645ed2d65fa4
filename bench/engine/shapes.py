"""Networks of other kinds than Llama as random GGUF files: windows, experts, layers that keep a state, a latent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.support.checkpoints import ALIGNMENT, Stored, stored_as, vocabulary_of, write_file

__all__ = ["SHAPES", "VOCABULARY", "Shape"]

VOCABULARY = 32000
_INDEX_SIZES = "head_count", "key_length", "top_k"
Tensors = Iterator[tuple[str, tuple[int, ...]]]  # names in a file, and shapes


class Shape(NamedTuple):
    """A network of one kind.

    Attributes:
        what: its sizes in words.
        context: tokens behind which a decode step is measured.
        metadata: of its GGUF file, without the vocabulary.
        tensors: yields `(name in the file, shape)`.
    """

    what: str
    context: int
    metadata: dict[str, Any]
    tensors: Callable[[], Tensors]

    def write(self, path: Path) -> Path:
        """Write random float16 matrices and float32 vectors."""
        metadata = {
            **self.metadata, "general.name": "random", "general.alignment": ALIGNMENT, "general.file_type": 1,
            **vocabulary_of(VOCABULARY),
        }
        return write_file(path, metadata, self._stored)

    def _stored(self) -> Iterator[Stored]:
        rng = np.random.default_rng(0)
        for name, shape in self.tensors():
            if name.endswith("ssm_a"):  # -exp(A_log)
                yield stored_as(name, -np.ones(shape, np.float32))
            elif len(shape) == 1:
                yield stored_as(name, np.ones(shape, np.float32))
            elif ("conv" in name and shape[-1] < 32) or name.endswith("gate_inp.weight"):  # taps of a convolution
                yield stored_as(name, rng.standard_normal(shape, np.float32))
            else:
                scale = np.float32(shape[-1] ** -0.5)
                yield stored_as(name, (rng.standard_normal(shape, np.float32) * scale).astype(np.float16))


def _outside(hidden: int) -> Tensors:
    """Yield the tensors before and behind the layers, with an output matrix apart from the embedding."""
    yield "token_embd.weight", (VOCABULARY, hidden)
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (VOCABULARY, hidden)


def _tied(hidden: int, norm: str = "output_norm") -> Tensors:
    """Yield the tensors before and behind the layers, if the output matrix is the embedding."""
    yield "token_embd.weight", (VOCABULARY, hidden)
    yield f"{norm}.weight", (hidden,)


def _norms(at: str, size: int, *names: str) -> Tensors:
    for name in names:
        yield f"{at}{name}.weight", (size,)


def _attention(at: str, hidden: int, heads: int, kv_heads: int, dim: int, query_parts: int = 1) -> Tensors:
    """Yield projections, and norms of queries and keys."""
    yield f"{at}attn_q.weight", (query_parts * heads * dim, hidden)
    yield f"{at}attn_k.weight", (kv_heads * dim, hidden)
    yield f"{at}attn_v.weight", (kv_heads * dim, hidden)
    yield f"{at}attn_output.weight", (hidden, heads * dim)
    yield from _norms(at, dim, "attn_q_norm", "attn_k_norm")


def _mlp(at: str, hidden: int, inner: int) -> Tensors:
    yield f"{at}ffn_gate.weight", (inner, hidden)
    yield f"{at}ffn_up.weight", (inner, hidden)
    yield f"{at}ffn_down.weight", (hidden, inner)


def _with_experts(at: str, hidden: int, experts: int, expert: int) -> Tensors:
    """Experts that a bias helps to choose, and one for all rows beside them."""
    yield f"{at}ffn_gate_inp.weight", (experts, hidden)
    yield f"{at}exp_probs_b.bias", (experts,)
    for part, shape in (("gate", (expert, hidden)), ("up", (expert, hidden)), ("down", (hidden, expert))):
        yield f"{at}ffn_{part}_exps.weight", (experts, *shape)
        yield f"{at}ffn_{part}_shexp.weight", shape


def _metadata(architecture: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a file: sizes by their names without the architecture."""
    return {"general.architecture": architecture, **{f"{architecture}.{key}": size for key, size in sizes.items()}}


def _sizes(
    context: int, hidden: int, layers: int, heads: int, kv_heads: int | list[int], inner: int, base: float
) -> dict[str, Any]:
    """The sizes that all networks have."""
    return {
        "context_length": context, "embedding_length": hidden, "block_count": layers, "feed_forward_length": inner,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads, "rope.freq_base": base,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }


def _gemma3(hidden: int, layers: int, heads: int, kv_heads: int, dim: int, inner: int, window: int) -> Shape:
    def tensors() -> Tensors:
        yield from _tied(hidden)
        for i in range(layers):
            at = f"blk.{i}."
            yield from _norms(at, hidden, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
            yield from _attention(at, hidden, heads, kv_heads, dim)
            yield from _mlp(at, hidden, inner)

    sizes = _sizes(32768, hidden, layers, heads, kv_heads, inner, 1e6) | {
        "attention.key_length": dim, "attention.value_length": dim, "attention.sliding_window": window,
    }
    what = f"Gemma 3: hidden {hidden}, {layers} layers (5 of 6 with a window of {window}), {heads} + {kv_heads} heads"
    return Shape(what, 4096, _metadata("gemma3", sizes), tensors)


def _experts(
    hidden: int, layers: int, heads: int, kv_heads: int, dim: int, experts: int, used: int, inner: int
) -> Shape:
    def tensors() -> Tensors:
        yield from _outside(hidden)
        for i in range(layers):
            at = f"blk.{i}."
            yield from _norms(at, hidden, "attn_norm", "ffn_norm")
            yield from _attention(at, hidden, heads, kv_heads, dim)
            yield f"{at}ffn_gate_inp.weight", (experts, hidden)
            yield f"{at}ffn_gate_exps.weight", (experts, inner, hidden)
            yield f"{at}ffn_up_exps.weight", (experts, inner, hidden)
            yield f"{at}ffn_down_exps.weight", (experts, hidden, inner)

    sizes = _sizes(8192, hidden, layers, heads, kv_heads, 4 * inner, 1e6) | {
        "attention.key_length": dim, "attention.value_length": dim, "expert_count": experts,
        "expert_used_count": used, "expert_feed_forward_length": inner,
    }
    what = f"Qwen3-MoE: hidden {hidden}, {layers} layers, {used} of {experts} experts, {heads} + {kv_heads} heads"
    return Shape(what, 1024, _metadata("qwen3moe", sizes), tensors)


def _qwen35(hidden: int, layers: int, heads: int, kv_heads: int, dim: int, key_heads: int, inner: int) -> Shape:
    """Three of four layers have the gated delta rule, with as many key heads as value heads, of 128 channels."""
    size, taps = 128, 4

    def tensors() -> Tensors:
        yield from _tied(hidden)
        for i in range(layers):
            at = f"blk.{i}."
            yield from _norms(at, hidden, "attn_norm", "post_attention_norm")
            yield from _mlp(at, hidden, inner)
            if (i + 1) % 4 == 0:
                yield from _attention(at, hidden, heads, kv_heads, dim, 2)
                continue
            yield f"{at}attn_qkv.weight", (3 * key_heads * size, hidden)
            yield f"{at}attn_gate.weight", (key_heads * size, hidden)
            yield f"{at}ssm_conv1d.weight", (3 * key_heads * size, taps)
            for name in ("ssm_alpha", "ssm_beta"):
                yield f"{at}{name}.weight", (key_heads, hidden)
            yield f"{at}ssm_dt.bias", (key_heads,)
            yield f"{at}ssm_a", (key_heads,)
            yield f"{at}ssm_norm.weight", (size,)
            yield f"{at}ssm_out.weight", (hidden, key_heads * size)

    sizes = _sizes(32768, hidden, layers, heads, kv_heads, inner, 1e7) | {
        "attention.key_length": dim, "attention.value_length": dim, "rope.dimension_count": dim // 4,
        "rope.dimension_sections": [11, 11, 10, 0], "full_attention_interval": 4, "ssm.conv_kernel": taps,
        "ssm.state_size": size, "ssm.group_count": key_heads, "ssm.time_step_rank": key_heads,
        "ssm.inner_size": key_heads * size,
    }
    what = f"Qwen3.5: hidden {hidden}, {layers} layers (3 of 4 with {key_heads} states of 128 x 128)"
    return Shape(what, 1024, _metadata("qwen35", sizes), tensors)


def _lfm2(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, attending: tuple[int, ...]) -> Shape:
    """The layers `attending` attend, the others have a convolution of three tokens."""

    def tensors() -> Tensors:
        yield from _tied(hidden, "token_embd_norm")
        for i in range(layers):
            at = f"blk.{i}."
            yield from _norms(at, hidden, "attn_norm", "ffn_norm")
            yield from _mlp(at, hidden, inner)
            if i in attending:
                yield from _attention(at, hidden, heads, kv_heads, hidden // heads)
            else:
                yield f"{at}shortconv.conv.weight", (hidden, 3)
                yield f"{at}shortconv.in_proj.weight", (3 * hidden, hidden)
                yield f"{at}shortconv.out_proj.weight", (hidden, hidden)

    kv_heads_of = [kv_heads * (i in attending) for i in range(layers)]
    sizes = _sizes(32768, hidden, layers, heads, kv_heads_of, inner, 1e6) | {
        "attention.layer_norm_rms_epsilon": 1e-5, "shortconv.l_cache": 3, "vocab_size": VOCABULARY,
    }
    what = f"LFM2.5: hidden {hidden}, {layers} layers ({layers - len(attending)} with convolutions)"
    return Shape(what, 1024, _metadata("lfm2", sizes), tensors)


def _kimi(hidden: int, layers: int, heads: int, inner: int, experts: int, used: int, expert: int) -> Shape:
    """Three of four layers have Kimi delta attention, the others latent attention; the first has no experts."""
    size, taps, latent, shared = 128, 4, 512, 64

    def tensors() -> Tensors:
        yield from _outside(hidden)
        for i in range(layers):
            at = f"blk.{i}."
            yield from _norms(at, hidden, "attn_norm", "ffn_norm")
            yield f"{at}attn_output.weight", (hidden, heads * size)
            if (i + 1) % 4 == 0:
                yield f"{at}attn_q.weight", (heads * (size + shared), hidden)
                yield f"{at}attn_kv_a_mqa.weight", (latent + shared, hidden)
                yield f"{at}attn_kv_a_norm.weight", (latent,)
                yield f"{at}attn_k_b.weight", (heads, latent, size)
                yield f"{at}attn_v_b.weight", (heads, size, latent)
            else:
                for part in "qkv":
                    yield f"{at}attn_{part}.weight", (heads * size, hidden)
                    yield f"{at}ssm_conv1d_{part}.weight", (1, heads * size, 1, taps)
                for part in "fg":
                    yield f"{at}ssm_{part}_a.weight", (size, hidden)
                    yield f"{at}ssm_{part}_b.weight", (heads * size, size)
                yield f"{at}ssm_beta.weight", (heads, hidden)
                yield f"{at}ssm_a", (1, 1, heads, 1)
                yield f"{at}ssm_dt.bias", (heads * size,)
                yield f"{at}ssm_norm.weight", (size,)
            yield from _with_experts(at, hidden, experts, expert) if i else _mlp(at, hidden, inner)

    kv_heads = [int((i + 1) % 4 == 0) for i in range(layers)]
    sizes = _sizes(32768, hidden, layers, heads, kv_heads, inner, 1e4) | {
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.kv_lora_rank": latent,
        "attention.key_length": latent + shared, "attention.value_length": latent,
        "attention.key_length_mla": size + shared, "attention.value_length_mla": size,
        "rope.dimension_count": shared, "ssm.conv_kernel": taps, "kda.head_dim": size, "leading_dense_block_count": 1,
        "expert_count": experts, "expert_used_count": used, "expert_shared_count": 1,
        "expert_feed_forward_length": expert, "expert_gating_func": 2, "expert_weights_scale": 2.446,
        "vocab_size": VOCABULARY,
    }
    what = f"Kimi-Linear: hidden {hidden}, {layers} layers (3 of 4 with {heads} states of {size} x {size}), {used} of "
    return Shape(f"{what}{experts} experts", 1024, _metadata("kimi-linear", sizes), tensors)


class _Index(NamedTuple):
    """The indexers of a network: heads, channels of each, and how many tokens they choose."""

    heads: int
    dim: int
    chosen: int


def _latent(
    hidden: int, layers: int, heads: int, inner: int, experts: int, used: int, expert: int, plain: int = 192,
    value: int = 256, index: _Index | None = None,
) -> Shape:
    """Latent attention; an MLP in the first layer, in the others experts and one for all rows beside them."""
    queries, latent, turned = 768, 512, 64

    def tensors() -> Tensors:
        yield from _outside(hidden)
        for i in range(layers):
            at = f"blk.{i}."
            for name, size in (("attn", hidden), ("ffn", hidden), ("attn_q_a", queries), ("attn_kv_a", latent)):
                yield f"{at}{name}_norm.weight", (size,)
            yield f"{at}attn_q_a.weight", (queries, hidden)
            yield f"{at}attn_q_b.weight", (heads * (plain + turned), queries)
            yield f"{at}attn_kv_a_mqa.weight", (latent + turned, hidden)
            yield f"{at}attn_k_b.weight", (heads, latent, plain)
            yield f"{at}attn_v_b.weight", (heads, value, latent)
            yield f"{at}attn_output.weight", (hidden, heads * value)
            if index is not None:
                yield f"{at}indexer.attn_q_b.weight", (index.heads * index.dim, queries)
                yield f"{at}indexer.attn_k.weight", (index.dim, hidden)
                yield f"{at}indexer.proj.weight", (index.heads, hidden)
                yield f"{at}indexer.k_norm.weight", (index.dim,)
                yield f"{at}indexer.k_norm.bias", (index.dim,)
            yield from _with_experts(at, hidden, experts, expert) if i else _mlp(at, hidden, inner)

    sizes = _sizes(32768, hidden, layers, heads, 1, inner, 1e6) | {
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.q_lora_rank": queries, "attention.kv_lora_rank": latent,
        "attention.key_length": latent + turned, "attention.value_length": latent,
        "attention.key_length_mla": plain + turned, "attention.value_length_mla": value,
        "rope.dimension_count": turned, "leading_dense_block_count": 1, "expert_count": experts,
        "expert_used_count": used, "expert_shared_count": 1, "expert_feed_forward_length": expert,
        "expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.8, "vocab_size": VOCABULARY,
    }
    what = f"hidden {hidden}, {layers} layers, {heads} heads, a latent, {used} of {experts} experts"
    if index is None:
        return Shape(f"GLM-4.7-Flash: {what}", 4096, _metadata("deepseek2", sizes), tensors)
    sizes |= {f"attention.indexer.{name}": size for name, size in zip(_INDEX_SIZES, index, strict=True)}
    what = f"DeepSeek V3.2, smaller: {what}, {index.heads} heads of indexers that choose {index.chosen} tokens"
    return Shape(what, 4096, _metadata("deepseek32", sizes), tensors)


SHAPES = {
    "gemma3": _gemma3(1152, 12, 4, 1, 256, 6912, 512),
    "experts": _experts(1024, 12, 16, 4, 64, 32, 4, 768),
    "qwen35": _qwen35(1024, 24, 8, 2, 256, 16, 3584),  # the shape of Qwen3.5-0.8B
    "lfm2": _lfm2(2048, 16, 32, 8, 8192, (2, 5, 8, 10, 12, 14)),  # of LFM2.5-1.2B
    "kimi": _kimi(1024, 16, 16, 3584, 16, 2, 512),
    "latent": _latent(2048, 3, 20, 10240, 64, 4, 1536),  # three layers of GLM-4.7-Flash
    "indexed": _latent(1024, 8, 16, 3584, 16, 2, 512, 128, 128, _Index(16, 128, 2048)),  # 16 of 64 heads of indexers
}
