"""One pass of the network over the next tokens of many texts: one attention call per layer, one product per matrix."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from kvcache.networks.protocols import Attend, Float32, Model, layer_attention
from kvcache.serving.blocks import SharedBlocks
from kvcache.serving.evicting import EvictingTexts
from kvcache.serving.work import Work

__all__ = ["Forward"]


class Forward:
    """Runs pieces of many texts, whose sequences have room for them, through a network.

    Rows do not depend on one another: the logits of a text have the same bits in any company and in any pieces.

    Args:
        model: the network.
        blocks: K and V of all layers.

    Attributes:
        regime_of: of a text of so many tokens, see `protocols.Model`; None: there is one regime.
    """

    def __init__(self, model: Model, blocks: SharedBlocks) -> None:
        self._model, self._blocks = model, blocks
        attention = layer_attention(model)
        whole = [layer for layer in range(model.config.num_layers) if layer not in blocks.windows]
        self._whole = {layer: (own, attention[layer].options()) for own, layer in enumerate(whole)}
        self._selects = bool(getattr(model, "selects_rows", False))
        regime: Callable[[int], int] | None = getattr(model, "regime", None)
        several = regime is not None and regime(1) != regime(model.config.max_position_embeddings)
        self.regime_of = regime if several else None

    def name_of(self, space: Any) -> Hashable:
        """The caller's name of a namespace of the prefix cache, which has one for each regime."""
        name: Hashable = space if self.regime_of is None else space[1]
        return name

    def run(self, pieces: Sequence[tuple[Work, int]]) -> list[Float32]:
        """The logits that are due of each piece, `(work, number of its next tokens)`, all of one regime.

        Returns:
            For each piece float32 `(work.rows_due(count), vocab_size)`.
        """
        tokens = np.concatenate([work.next_tokens(n) for work, n in pieces])
        starts, lens = np.array([work.computed for work, _ in pieces]), np.array([n for _, n in pieces])
        due = np.array([work.rows_due(n) for work, n in pieces])
        stops, ends = np.cumsum(lens), np.cumsum(due)
        positions = np.arange(len(tokens)) + np.repeat(starts - (stops - lens), lens)
        rows = np.arange(ends[-1]) + np.repeat(stops - ends, due)
        places: dict[str, Any] = {"regime": pieces[0][0].regime} if self.regime_of is not None else {}
        wanted: Any = rows
        if not len(rows):
            wanted = "none"
        elif len(rows) == 1 and rows[0] == len(tokens) - 1:
            wanted = "last"
        elif not self._selects or len(rows) == len(tokens):
            wanted = "all"
        if isinstance(self._blocks, EvictingTexts):
            with self._blocks.attending(pieces) as (attend, more):
                logits = self._model.forward(tokens, positions, attend, wanted, **places, **more)
        else:
            logits = self._model.forward(tokens, positions, self._attend(pieces, lens), wanted, **places)
        expected = (len(tokens) if isinstance(wanted, str) and wanted == "all" else len(rows), self.vocab_size)
        if logits.shape != expected:
            raise ValueError(f"model.forward: expected logits of shape {expected}, got {logits.shape}")
        if len(rows) < len(logits):
            logits = logits[rows]
        return [logits[end - count : end] for end, count in zip(ends.tolist(), due.tolist(), strict=True)]

    def _attend(self, pieces: Sequence[tuple[Work, int]], lens: Any) -> Attend:
        """The `attend` of pieces of texts that share blocks."""
        cache, whole = self._blocks.cache, self._whole
        seq_ids = np.array([work.seq_id for work, _ in pieces], np.uint64)
        windowed = self._blocks.windows.pieces([work for work, _ in pieces], seq_ids, lens)

        def attend(
            layer: int, queries: Float32, keys: Float32, values: Float32, _: Float32 | None = None, /
        ) -> Float32:
            if layer in windowed:
                return windowed[layer](layer, queries, keys, values)
            own, options = whole[layer]
            cache.write_ragged(own, seq_ids, lens, keys, values)
            mixed: Float32 = cache.attention(own, queries, seq_ids, query_lens=lens, **options)
            return mixed

        return attend

    @property
    def vocab_size(self) -> int:
        """Length of a row of logits."""
        return self._model.config.vocab_size
