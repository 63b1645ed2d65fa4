"""Naive implementations for the tests of the engine: slow, short and simple."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.core.attention_call import AttentionCall
from kvcache.errors import OutOfMemoryError, SequenceNotFoundError
from kvcache.paged.queried import QueriedSequences


class DenseKvCache:
    """The part of `PagedKvCache` that the engine uses, with one float32 array per sequence and layer.

    A fork copies. Memory is counted in blocks, without sharing.
    """

    residual_length = first_tokens = 0

    def __init__(
        self, num_blocks: int, block_size: int, num_heads: int, head_dim: int, *, num_layers: int, **_: Any
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_layers, self.row = num_layers, (num_heads, head_dim)
        self.sequences: dict[int, list[NDArray[np.float32]]] = {}

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _tokens(self, seq_id: int) -> int:
        if seq_id not in self.sequences:
            raise SequenceNotFoundError(seq_id)
        return self.sequences[seq_id][0].shape[1]

    @property
    def total_blocks(self) -> int:
        return self.num_blocks

    @property
    def total_memory_bytes(self) -> int:
        return 0

    @property
    def free_block_count(self) -> int:
        return self.num_blocks - sum(self._blocks(self._tokens(seq_id)) for seq_id in self.sequences)

    def _resize(self, seq_id: int, num_tokens: int) -> None:
        needed = self._blocks(num_tokens) - self._blocks(self._tokens(seq_id))
        if needed > self.free_block_count:
            raise OutOfMemoryError(needed, self.free_block_count)
        layers = []
        for old in self.sequences[seq_id]:
            new = np.full((2, num_tokens, *self.row), np.nan, np.float32)
            kept = min(num_tokens, old.shape[1])
            new[:, :kept] = old[:, :kept]
            layers.append(new)
        self.sequences[seq_id] = layers

    def allocate(self, seq_id: int, num_tokens: int) -> None:
        assert seq_id not in self.sequences
        self.sequences[seq_id] = [np.empty((2, 0, *self.row), np.float32) for _ in range(self.num_layers)]
        self._resize(seq_id, num_tokens)

    def append_batch(self, seq_ids: Sequence[int], counts: Sequence[int]) -> None:
        for seq_id, count in zip(seq_ids, counts, strict=True):  # an engine has one text
            self._resize(int(seq_id), self._tokens(int(seq_id)) + int(count))

    def adopt(self, seq_id: int, block_ids: Sequence[int], num_tokens: int) -> None:
        assert len(block_ids) == num_tokens == 0, "nothing is shared here"
        self.allocate(seq_id, 0)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self.sequences

    def sequence_ids(self) -> list[int]:
        return sorted(self.sequences)

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        assert num_tokens <= self._tokens(seq_id)
        self._resize(seq_id, num_tokens)

    def fork(self, source: int, target: int) -> None:
        self.allocate(target, self._tokens(source))
        self.sequences[target] = [layer.copy() for layer in self.sequences[source]]

    def free(self, seq_id: int) -> None:
        self._tokens(seq_id)
        del self.sequences[seq_id]

    def get_sequence(self, seq_id: int) -> Any:
        return SimpleNamespace(num_tokens=self._tokens(seq_id)) if seq_id in self.sequences else None

    def block_table(self, seq_ids: Sequence[int]) -> Any:
        return SimpleNamespace(block_ids=np.arange(sum(self._blocks(self._tokens(seq_id)) for seq_id in seq_ids)))

    def reference_counts(self, block_ids: NDArray[Any]) -> NDArray[np.int32]:
        return np.ones(len(block_ids), np.int32)

    def check(self) -> None:
        assert self.free_block_count >= 0

    def write_and_attend(
        self, sequences: QueriedSequences, calls: Mapping[int, tuple[int, AttentionCall, bool]], layer: int,
        queries: NDArray[Any], keys: NDArray[Any], values: NDArray[Any], _: Any = None, /,
    ) -> NDArray[np.float32]:
        layer, call, writes = calls[layer]
        assert writes, "the naive cache keeps every layer's own K and V"
        assert sequences.lens is not None
        (seq_id,), (count,) = sequences.ids.tolist(), sequences.lens.tolist()
        assert len(keys) == len(values) == count <= self._tokens(seq_id)
        start = self._tokens(seq_id) - len(keys)
        self.sequences[seq_id][layer][0, start:] = keys
        self.sequences[seq_id][layer][1, start:] = values
        options = {"scale": call.scale, "window": call.window, "softcap": call.softcap, "sinks": call.sinks}
        options["chunked"] = call.chunked
        return self.attention(layer, queries, [seq_id], query_lens=[count], **options)

    def attention(
        self, layer: int, queries: NDArray[Any], seq_ids: Sequence[int], *, query_lens: Sequence[int], **options: Any
    ) -> NDArray[np.float32]:
        out = np.empty_like(queries)
        row = 0
        for seq_id, count in zip(seq_ids, query_lens, strict=True):
            keys, values = self.sequences[seq_id][layer]
            out[row : row + count] = dense_attention(queries[row : row + count], keys, values, **options)
            row += count
        return out


def dense_attention(
    queries: NDArray[Any],
    keys: NDArray[Any],
    values: NDArray[Any],
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: NDArray[Any] | None = None,
    chunked: bool = False,
) -> NDArray[np.float64]:
    """Causal attention in float64, with the last query at the last position: `(n, heads, head_dim)`."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (np.repeat(rows.astype(np.float64), group, axis=1) for rows in (keys, values))
    scores = np.einsum("qhd,khd->hqk", queries.astype(np.float64), keys)
    scores *= queries.shape[2] ** -0.5 if scale is None else scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    own, each = np.arange(len(keys) - len(queries), len(keys))[:, None], np.arange(len(keys))
    apart = own // window != each // window if chunked else own - each >= (window or np.inf)
    scores[:, (own < each) | apart] = -np.inf
    extra = np.full((len(scores), 1, 1), -np.inf) if sinks is None else sinks.astype(np.float64)[:, None, None]
    most = np.maximum(scores.max(axis=2, keepdims=True), extra)
    weights = np.exp(scores - most)
    weights /= weights.sum(axis=2, keepdims=True) + np.exp(extra - most)
    return np.einsum("hqk,khd->qhd", weights, values)


def sampling_distribution(
    logits: Sequence[float],
    history: Sequence[int],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    repetition_penalty: float,
    min_p: float = 0.0,
    logit_bias: tuple[tuple[int, float], ...] = (),
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    num_drawn: int = 0,
) -> list[float]:
    """The probability of each token, in the steps of the documentation of SamplingParams."""
    logits = list(map(float, logits))
    for token, bias in logit_bias:
        logits[token] += bias
    for token in set(history):
        logits[token] = logits[token] / repetition_penalty if logits[token] > 0 else logits[token] * repetition_penalty
    for token in set(drawn := list(history)[len(history) - num_drawn :]):
        logits[token] -= presence_penalty + frequency_penalty * drawn.count(token)
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if temperature < 1e-6:
        return [float(token == ranked[0]) for token in range(len(logits))]
    if top_k:
        ranked = ranked[:top_k]
    weights = {token: math.exp((logits[token] - logits[ranked[0]]) / temperature) for token in ranked}
    total = math.fsum(weights.values())
    nucleus, mass = [], 0.0
    for token in ranked:
        nucleus.append(token)
        mass += weights[token] / total
        if mass >= top_p:
            break
    kept = {token for token in nucleus if weights[token] >= min_p * weights[ranked[0]]}
    total = math.fsum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]
