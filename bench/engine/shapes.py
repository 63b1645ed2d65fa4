"""Networks of other kinds than Llama as random GGUF files: windows, experts, layers that keep a state, a latent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.support.checkpoints import ALIGNMENT, Stored, stored_as, vocabulary_of, write_file

__all__ = ["POPULAR", "SHAPES", "VOCABULARY", "Shape", "values_of"]

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
        vocabulary: tokens.
        large: whether its files are written packed, without one of float16.
    """

    what: str
    context: int
    metadata: dict[str, Any]
    tensors: Callable[[], Tensors]
    vocabulary: int = VOCABULARY
    large: bool = False

    def write(self, path: Path) -> Path:
        """Write random float16 matrices and float32 vectors."""
        return write_file(path, self.entries(1), self._stored)

    def entries(self, file_type: int) -> dict[str, Any]:
        """The metadata of a file of this type, with its vocabulary."""
        return {
            **self.metadata, "general.name": "random", "general.alignment": ALIGNMENT,
            "general.file_type": file_type, **vocabulary_of(self.vocabulary),
        }

    def _stored(self) -> Iterator[Stored]:
        rng = np.random.default_rng(0)
        for name, shape in self.tensors():
            yield stored_as(name, values_of(rng, name, shape))


def values_of(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Random float16 values of a matrix, or the float32 values of what files never pack."""
    if name.endswith("ssm_a"):  # -exp(A_log)
        return -np.ones(shape, np.float32)
    if name == "rope_freqs.weight":  # a quarter of the channels turns
        return np.where(np.arange(shape[0]) < shape[0] // 4, 1.0, 1e30).astype(np.float32)
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    values = rng.standard_normal(shape, np.float32)
    if ("conv" in name and shape[-1] < 32) or name.endswith("gate_inp.weight"):  # taps of a convolution
        return values
    return (values * np.float32(shape[-1] ** -0.5)).astype(np.float16)


def _outside(hidden: int, vocabulary: int = VOCABULARY) -> Tensors:
    """Yield the tensors before and behind the layers, with an output matrix apart from the embedding."""
    yield from _tied(hidden, vocabulary=vocabulary)
    yield "output.weight", (vocabulary, hidden)


def _tied(hidden: int, norm: str = "output_norm", vocabulary: int = VOCABULARY) -> Tensors:
    """Yield the tensors before and behind the layers, if the output matrix is the embedding."""
    yield "token_embd.weight", (vocabulary, hidden)
    yield f"{norm}.weight", (hidden,)


def _norms(at: str, size: int, *names: str) -> Tensors:
    for name in names:
        yield f"{at}{name}.weight", (size,)


def _attention(
    at: str, hidden: int, heads: int, kv_heads: int, dim: int, query_parts: int = 1,
    norms: Sequence[str] = ("attn_q_norm", "attn_k_norm"),
) -> Tensors:
    """Yield projections, and norms of queries and keys."""
    yield f"{at}attn_q.weight", (query_parts * heads * dim, hidden)
    yield f"{at}attn_k.weight", (kv_heads * dim, hidden)
    yield f"{at}attn_v.weight", (kv_heads * dim, hidden)
    yield f"{at}attn_output.weight", (hidden, heads * dim)
    yield from _norms(at, dim, *norms)


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


def _llama(layers: int, vocabulary: int, hidden: int, heads: int, kv_heads: int, inner: int) -> Shape:
    def tensors() -> Tensors:
        yield from _tied(hidden, vocabulary=vocabulary)
        for i in range(layers):
            at = f"blk.{i}."
            yield from _norms(at, hidden, "attn_norm", "ffn_norm")
            yield from _attention(at, hidden, heads, kv_heads, hidden // heads, norms=())
            yield from _mlp(at, hidden, inner)

    sizes = _sizes(131072, hidden, layers, heads, kv_heads, inner, 5e5)
    sizes |= {"rope.dimension_count": hidden // heads, "vocab_size": vocabulary}
    what = f"Llama: hidden {hidden}, {layers} layers, {heads} + {kv_heads} heads"
    return Shape(what, 1024, _metadata("llama", sizes), tensors, vocabulary)


def _qwen3(
    layers: int, vocabulary: int, hidden: int = 2560, heads: int = 32, kv_heads: int = 8, dim: int = 128,
    inner: int = 9728,
) -> Shape:
    def tensors() -> Tensors:
        yield from _tied(hidden, vocabulary=vocabulary)
        for i in range(layers):
            at = f"blk.{i}."
            yield from _norms(at, hidden, "attn_norm", "ffn_norm")
            yield from _attention(at, hidden, heads, kv_heads, dim)
            yield from _mlp(at, hidden, inner)

    sizes = _sizes(32768, hidden, layers, heads, kv_heads, inner, 1e6)
    sizes |= {"attention.key_length": dim, "attention.value_length": dim}
    what = f"Qwen3: hidden {hidden}, {layers} layers, {heads} + {kv_heads} heads"
    return Shape(what, 1024, _metadata("qwen3", sizes), tensors, vocabulary)


def _experts(
    hidden: int, layers: int, heads: int, kv_heads: int, dim: int, experts: int, used: int, inner: int,
    vocabulary: int = VOCABULARY, context: int = 8192,
) -> Shape:
    def tensors() -> Tensors:
        yield from _outside(hidden, vocabulary)
        for i in range(layers):
            at = f"blk.{i}."
            yield from _norms(at, hidden, "attn_norm", "ffn_norm")
            yield from _attention(at, hidden, heads, kv_heads, dim)
            yield f"{at}ffn_gate_inp.weight", (experts, hidden)
            yield f"{at}ffn_gate_exps.weight", (experts, inner, hidden)
            yield f"{at}ffn_up_exps.weight", (experts, inner, hidden)
            yield f"{at}ffn_down_exps.weight", (experts, hidden, inner)

    sizes = _sizes(context, hidden, layers, heads, kv_heads, 4 * inner, 1e6) | {
        "attention.key_length": dim, "attention.value_length": dim, "expert_count": experts,
        "expert_used_count": used, "expert_feed_forward_length": inner,
    }
    what = f"Qwen3-MoE: hidden {hidden}, {layers} layers, {used} of {experts} experts, {heads} + {kv_heads} heads"
    return Shape(what, 1024, _metadata("qwen3moe", sizes), tensors, vocabulary)


def _qwen35(
    hidden: int, layers: int, heads: int, kv_heads: int, dim: int, key_heads: int, inner: int,
    value_heads: int | None = None, vocabulary: int = VOCABULARY,
) -> Shape:
    """Three of four layers have the gated delta rule, with heads of 128 channels, of keys as many as of values."""
    size, taps, states = 128, 4, value_heads or key_heads
    mixed = (2 * key_heads + states) * size  # rows of queries, keys and values

    def tensors() -> Tensors:
        yield from _tied(hidden, vocabulary=vocabulary)
        for i in range(layers):
            at = f"blk.{i}."
            yield from _norms(at, hidden, "attn_norm", "post_attention_norm")
            yield from _mlp(at, hidden, inner)
            if (i + 1) % 4 == 0:
                yield from _attention(at, hidden, heads, kv_heads, dim, 2)
                continue
            yield f"{at}attn_qkv.weight", (mixed, hidden)
            yield f"{at}attn_gate.weight", (states * size, hidden)
            yield f"{at}ssm_conv1d.weight", (mixed, taps)
            for name in ("ssm_alpha", "ssm_beta"):
                yield f"{at}{name}.weight", (states, hidden)
            yield f"{at}ssm_dt.bias", (states,)
            yield f"{at}ssm_a", (states,)
            yield f"{at}ssm_norm.weight", (size,)
            yield f"{at}ssm_out.weight", (hidden, states * size)

    sizes = _sizes(32768, hidden, layers, heads, kv_heads, inner, 1e7) | {
        "attention.key_length": dim, "attention.value_length": dim, "rope.dimension_count": dim // 4,
        "rope.dimension_sections": [11, 11, 10, 0], "full_attention_interval": 4, "ssm.conv_kernel": taps,
        "ssm.state_size": size, "ssm.group_count": key_heads, "ssm.time_step_rank": states,
        "ssm.inner_size": states * size,
    }
    what = f"Qwen3.5: hidden {hidden}, {layers} layers (3 of 4 with {states} states of 128 x 128)"
    return Shape(what, 1024, _metadata("qwen35", sizes), tensors, vocabulary)


def _gemma4(
    layers: int, vocabulary: int, shared: int, hidden: int = 2560, heads: int = 8, kv_heads: int = 2,
    inner: int = 10240, inputs: int = 256, window: int = 512,
) -> Shape:
    """Every sixth layer sees all tokens, with heads of 512 channels; the last `shared` use K and V of others."""
    slides = [(i + 1) % 6 != 0 for i in range(layers)]
    dims = [256 if each else 512 for each in slides]

    def tensors() -> Tensors:
        yield from _tied(hidden, vocabulary=vocabulary)
        yield "per_layer_token_embd.weight", (vocabulary, inputs * layers)
        yield "per_layer_model_proj.weight", (inputs * layers, hidden)
        yield "per_layer_proj_norm.weight", (inputs,)
        yield "rope_freqs.weight", (256,)
        for i, dim in enumerate(dims):
            at = f"blk.{i}."
            yield from _norms(
                at, hidden, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm"
            )
            yield from _norms(at, 1, "layer_output_scale")
            yield f"{at}attn_q.weight", (heads * dim, hidden)
            yield f"{at}attn_output.weight", (hidden, heads * dim)
            yield f"{at}attn_k.weight", (kv_heads * dim, hidden)  # files of the last layers have them too, unread
            yield f"{at}attn_v.weight", (kv_heads * dim, hidden)
            yield from _norms(at, dim, "attn_q_norm", "attn_k_norm")
            yield from _mlp(at, hidden, inner)
            yield f"{at}inp_gate.weight", (inputs, hidden)
            yield f"{at}proj.weight", (hidden, inputs)

    sizes = _sizes(32768, hidden, layers, heads, kv_heads, inner, 1e6) | {
        "attention.key_length": 512, "attention.value_length": 512, "attention.key_length_swa": 256,
        "attention.value_length_swa": 256, "attention.sliding_window": window,
        "attention.sliding_window_pattern": slides, "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": inputs, "rope.freq_base_swa": 1e4, "rope.dimension_count": 512,
        "rope.dimension_count_swa": 256, "final_logit_softcapping": 30.0,
    }
    what = f"Gemma 4: hidden {hidden}, {layers} layers (5 of 6 with a window of {window}), {heads} + {kv_heads} heads"
    return Shape(what, 1024, _metadata("gemma4", sizes), tensors, vocabulary)


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


class Popular(NamedTuple):
    """A network that people run.

    Attributes:
        name: as its makers write it.
        layers: how many it has.
        fewest: layers of the smallest network that has one of each kind, where its kinds are.
        vocabulary: tokens.
        make: from numbers of layers and of tokens, its shape.
    """

    name: str
    layers: int
    fewest: int
    vocabulary: int
    make: Callable[[int, int], Shape]

    def shape(self, layers: int | None = None, vocabulary: int | None = None) -> Shape:
        """Its shape, or one of fewer layers or tokens, which says so."""
        count, tokens = layers or self.layers, vocabulary or self.vocabulary
        what = self.name if count == self.layers else f"{self.name}, {count} of {self.layers} layers"
        if tokens != self.vocabulary:
            what += f", a vocabulary of {tokens:,}"
        return self.make(count, tokens)._replace(what=what, large=True)


POPULAR = {
    "llama-1b": Popular(
        "Llama-3.2-1B", 16, 1, 128256, lambda layers, tokens: _llama(layers, tokens, 2048, 32, 8, 8192)
    ),
    "qwen3-4b": Popular("Qwen3-4B", 36, 1, 151936, _qwen3),
    "qwen35-4b": Popular(
        "Qwen3.5-4B", 32, 4, 248320, lambda layers, tokens: _qwen35(2560, layers, 16, 4, 256, 16, 9216, 32, tokens)
    ),
    "gemma4-e4b": Popular(  # the last layer with K and V of its own sees all tokens
        "Gemma 4 E4B", 42, 12, 262144,
        lambda layers, tokens: _gemma4(layers, tokens, layers - 24 * layers // 42 // 6 * 6),
    ),
    "qwen3-30b-a3b": Popular(
        "Qwen3-30B-A3B", 48, 1, 151936,
        lambda layers, tokens: _experts(2048, layers, 32, 4, 128, 128, 8, 768, tokens, 40960),
    ),
}
