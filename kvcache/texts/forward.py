"""One pass of the network over the next tokens of texts: one attention call per layer, one product per matrix."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from kvcache.errors import SpillError
from kvcache.networks.hidden_rows import HiddenRows
from kvcache.networks.protocols import Attend, Float32, IndexRows, Model, draft_layers, layer_attention
from kvcache.support.arguments import hash_of, short
from kvcache.texts.behind import is_behind, name_of_space
from kvcache.texts.kinds.base import Lens
from kvcache.texts.pool import Pool
from kvcache.texts.text import Text
from kvcache.texts.text_adapter import is_adapted, name_of_adapted

__all__ = ["Forward", "expect_own", "is_tied"]

_computed, _base = attrgetter("computed"), attrgetter("base")
Watch = Callable[[Text, int, Float32], None]


class Forward:
    """Runs pieces of texts, whose sequences have room for them, through a network.

    Rows do not depend on one another: the logits of a text have the same bits in any company and in any pieces.

    Args:
        model: the network.
        pool: K and V of all layers.

    Attributes:
        pool: see above.
        regime_of: the regime by the number of tokens, see `protocols.Model`; None: there is one regime.
        watch: called with a text that runs alone, a layer and its queries, when these have attended; None: nothing is.
    """

    def __init__(self, model: Model, pool: Pool) -> None:
        self._model, self.pool, self._vocab_size = model, pool, model.config.vocab_size
        self._drafts = draft_layers(model) > 0
        self._width: int = getattr(model.config, "hidden_size", 0)
        self._selects = bool(getattr(model, "selects_rows", False))
        attention = layer_attention(model)
        self.watch: Watch | None = None
        self._shares = any(each is not None and each.kv_layer is not None for each in attention)
        regime: Callable[[int], int] | None = getattr(model, "regime", None)
        several = regime is not None and regime(1) != regime(model.config.max_position_embeddings)
        self.regime_of = regime if several else None

    def regime(self, num_tokens: int) -> int:
        """The regime of a text of `num_tokens`."""
        return 0 if self.regime_of is None else self.regime_of(num_tokens)

    def space_of(self, text: Text) -> Hashable:
        """The namespace of cached prefixes of a text's regime, with its adapter, behind what it stands behind."""
        name = text.namespace if text.adapter is None else text.adapter.space(text.namespace)
        own = name if self.regime_of is None else (text.regime, name)
        return own if text.prefix is None else text.prefix.space(own)

    def name_of(self, space: Any) -> Hashable:
        """The caller's name of a namespace of cached prefixes."""
        own = name_of_space(space)
        return name_of_adapted(own if self.regime_of is None else own[1])

    def run(self, pieces: Sequence[tuple[Text, int, int]], again: bool = True) -> list[Float32]:
        """Run pieces of one regime and one `head`, `(text, its next tokens, rows of logits)`: those of the last tokens.

        Args:
            again: whether they may run a second time, in the room of cached prefixes that have left a full disk.

        Returns:
            For each piece its logits, float32 `(rows, vocab_size)`; without `head` its rows `(rows, hidden_size)`.
        """
        texts, counts, wanted_rows = zip(*pieces, strict=True)
        own = [text.next_tokens(count) for text, count, _ in pieces]
        tokens = own[0] if len(own) == 1 else np.concatenate(own)
        starts = np.fromiter(map(_computed, texts), np.int64, len(texts))
        bases = np.fromiter(map(_base, texts), np.int64, len(texts))
        lens, due = np.array(counts), np.array(wanted_rows)
        stops, ends = lens.cumsum(), due.cumsum()
        positions = np.arange(len(tokens)) + (bases + starts - (stops - lens)).repeat(lens)
        adapted: list[tuple[Text, int, int]] = []
        for text, stop, count in zip(texts, stops.tolist(), counts, strict=True):
            if text.adapter is not None:
                adapted.append((text, stop, count))
            if text.prefix is not None and text.computed < len(text.prefix.places):
                positions[stop - count : stop] = text.places_of(text.computed, count)
        rows = np.arange(ends[-1]) + (stops - ends).repeat(due)
        wanted: Any = rows
        if not len(rows):
            wanted = "none"
        elif len(rows) == 1 and rows[0] == len(tokens) - 1:
            wanted = "last"
        elif not self._selects or len(rows) == len(tokens):
            wanted = "all"
        attend, places = self.pool.attend(texts, lens)
        if self.watch is not None:
            attend = _watched(attend, self.watch, texts[0])
        if self._shares and len(rows) < len(tokens):
            attend = self._attend_by_rows(attend, texts, lens, due)
        if self.regime_of is not None:
            places = places | {"regime": texts[0].regime}
        if not texts[0].head:
            places = places | {"head": False}
        if adapted:
            places = places | {"adapters": _adapters_of(adapted)}
        hidden = self._hidden(texts, stops - lens) if self._drafts else None
        if hidden is not None:
            places = places | {"hidden": hidden}
        try:
            logits = self._model.forward(tokens, positions, attend, wanted, **places)
        except SpillError as error:
            frees = not all(each.is_empty for each in self.pool.prefixes)
            self.pool.clear()  # what is cached may have the same pages
            if again and frees and error.is_full and all(self.pool.nearest(t, t.computed) == t.computed for t in texts):
                return self.run(pieces, again=False)
            raise
        width = self._vocab_size if texts[0].head else self._width
        expected = (len(tokens) if isinstance(wanted, str) and wanted == "all" else len(rows), width)
        if logits.shape != expected:
            raise ValueError(f"model.forward: expected logits of shape {expected}, got {logits.shape}")
        if hidden is not None:
            for text, stop, length, count in zip(texts, stops, counts, np.maximum(due, 1), strict=True):
                text.hidden = text.computed + length - int(count), hidden.rows[stop - count : stop].copy()
        if len(rows) < len(logits):
            logits = logits[rows]
        if len(pieces) == 1:
            return [logits]
        return [logits[end - count : end] for end, count in zip(ends.tolist(), due.tolist(), strict=True)]

    def _hidden(self, texts: Sequence[Text], starts: Lens) -> HiddenRows:
        """The hidden rows of the tokens before those of a pass; zeros behind a cached prefix."""
        before = np.zeros((len(texts), self._width), np.float32)
        for row, text in zip(before, texts, strict=True):
            if (known := text.hidden_before()) is not None:
                row[:] = known
        return HiddenRows(starts, before)

    def draft(
        self, texts: Sequence[Text], tokens: Sequence[int], hidden: Float32, ahead: int
    ) -> tuple[Float32, Float32]:
        """Run a token of each text through the MTP layer; see `Transformer.draft`.

        There is room for `ahead + 1` tokens behind what each has computed; those before the last one ran so too.
        """
        lens = np.ones(len(texts), np.int64)
        positions = np.fromiter(map(_computed, texts), np.int64, len(texts)) + ahead
        attend, _ = self.pool.attend(texts, lens)
        found: tuple[Float32, Float32] = self._model.draft(  # type: ignore[attr-defined]
            np.array(tokens, np.uint32), positions, attend, hidden
        )
        return found

    def _attend_by_rows(self, attend: Attend, texts: Sequence[Text], lens: Lens, due: Lens) -> Attend:
        """`attend` of a pass, which also takes the queries of its last `due` rows alone, of layers without K and V."""
        some, num_rows, fewer = [text for text, count in zip(texts, due, strict=True) if count], int(lens.sum()), attend
        if some:
            fewer, _ = self.pool.attend(some, due[due > 0])

        def attend_either(
            layer: int, queries: Float32, keys: Float32 | None, values: Float32 | None, sinks: Float32 | None = None,
            index: IndexRows | None = None, /
        ) -> Float32:
            call = attend if keys is not None or len(queries) == num_rows else fewer
            return call(layer, queries, keys, values, sinks, *(() if index is None else (index,)))

        return attend_either


def is_tied(space: Any) -> bool:
    """Whether a namespace of cached prefixes is that of texts behind a compressed prefix, or with an adapter."""
    inner = space[1] if isinstance(space, tuple) and len(space) == 2 else space  # of a regime
    return is_behind(space) or is_adapted(inner)


def expect_own(namespace: Hashable) -> None:
    """Raise unless a caller may give this namespace: TypeError without a hash, ValueError for what names a prefix."""
    hash_of(namespace, "namespace")  # raises here rather than in the middle of a step
    if isinstance(namespace, tuple) and (is_behind(namespace) or is_adapted(namespace)):
        raise ValueError(f"namespace: expected none that a prefix or an adapter names, got {short(namespace)}")


def _adapters_of(pieces: Sequence[tuple[Text, int, int]]) -> list[tuple[int, int, Any]]:
    """The adapters of a pass, as `protocols.Model` takes them.

    Args:
        pieces: texts, with the end of their rows and the number of these.

    Raises:
        InvalidOperationError: one is not loaded any more.
    """
    found: list[tuple[int, int, Any]] = []
    for text, stop, count in pieces:
        if text.adapter is None:
            continue
        text.adapter.loaded.expect_loaded()
        first, prepared = stop - count + max(0, text.adapter.start - text.computed), text.adapter.loaded.prepared
        if found and found[-1][1:] == (first, prepared):
            found[-1] = found[-1][0], stop, prepared
        elif first < stop:
            found.append((first, stop, prepared))
    return found


def _watched(attend: Attend, watch: Watch, text: Text) -> Attend:
    """`attend` of a text that runs alone, which shows its queries."""

    def attend_and_show(
        layer: int, queries: Float32, keys: Float32 | None, values: Float32 | None, sinks: Float32 | None = None,
        index: IndexRows | None = None, /
    ) -> Float32:
        mixed = attend(layer, queries, keys, values, sinks, *(() if index is None else (index,)))
        watch(text, layer, queries)
        return mixed

    return attend_and_show
