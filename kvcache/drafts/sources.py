"""The sources of draft tokens that an engine is asked for, and the settings of their caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvcache.drafts.draft_heads import DraftHeads
from kvcache.drafts.draft_network import DraftNetwork
from kvcache.drafts.drafter import Drafter
from kvcache.drafts.ngrams import NGrams
from kvcache.drafts.proposer import Proposer
from kvcache.networks.protocols import Model, draft_layers
from kvcache.support.arguments import as_bytes, short
from kvcache.support.exclusions import expect
from kvcache.texts.forward import Forward
from kvcache.texts.kv_settings import Settings
from kvcache.texts.settings import CacheSettings, Load

__all__ = ["SOURCE_NAMES", "DraftSources", "each_source"]

_NAMED: dict[str, Callable[[Forward], Proposer]] = {"ngram": lambda _: NGrams(), "mtp": DraftHeads}
SOURCE_NAMES = (*_NAMED, "auto")
_FILL = 128  # rows by which families fill embeddings to sizes that differ: Qwen2.5 has 151,936 and 152,064


class DraftSources:
    """The sources that the argument `draft` of an engine names.

    Args:
        draft: None, one of `SOURCE_NAMES`, a network, or several of these, in the order in which they are asked.
        model: the engine's network.
        load: of the engine.
        block_size: of its cache.

    Raises:
        TypeError, ValueError: another kind; a network of another vocabulary (one that differs by up to 128 rows has the
            tokens of the network, and fills of its own behind them); "mtp" for a network without such a layer.
    """

    def __init__(self, draft: Any, model: Model, load: Load, block_size: int) -> None:
        self._sources, self._vocab_size = list[Any](), model.config.vocab_size
        known = [name for name in _NAMED if name != "mtp" or draft_layers(model)]
        for each in each_source(draft):
            if isinstance(each, str) and each not in SOURCE_NAMES:
                raise ValueError(f"draft: expected {', '.join(SOURCE_NAMES)} or a network, got {short(each)}")
            if isinstance(each, str) and each not in (*known, "auto"):
                raise ValueError(f"draft: expected a network with an MTP layer for {each}, got {short(model)}")
            if not isinstance(each, str) and not hasattr(each, "forward"):
                raise TypeError(f"draft: expected None, a name or a network, got {type(each).__name__}")
            names = known if isinstance(each, str) and each == "auto" else [each]
            self._sources += [name for name in names if name not in self._sources]
        networks = [each for each in self._sources if not isinstance(each, str)]
        own = Load(2 * max(load.texts, 1), load.piece, load.drafts, load.prompts, 1, load.default_tokens, 1)
        self._settings = {id(each): _settings_of(each, own, block_size, self._vocab_size) for each in networks}

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return not self._sources

    def split(self, settings: CacheSettings) -> CacheSettings:
        """The settings of the engine with its share of `max_memory_bytes`: each cache has as many tokens.

        ValueError: it evicts tokens, which no network follows.
        """
        sizes = [each.block_bytes(each.whole) for each in self._settings.values()]
        if self._sources not in ([], ["ngram"]):
            expect("draft: of a network", self._sources, settings.features)
        if settings.max_memory_bytes is None or not sizes:
            return settings
        limit, own = as_bytes(settings.max_memory_bytes, "max_memory_bytes"), settings.block_bytes(settings.whole)
        return replace(settings, max_memory_bytes=limit * own // max(1, own + sum(sizes)))

    def drafter(self, forward: Forward, most: int, clock: Callable[[], float]) -> Drafter:
        """The sources, over the passes and the memory of the engine."""
        found = [
            _NAMED[each](forward) if isinstance(each, str)
            else DraftNetwork(self._settings[id(each)], forward.pool.total_blocks, self._vocab_size)
            for each in self._sources
        ]
        return Drafter(found, most, clock)


def each_source(draft: Any) -> Sequence[Any]:
    """The sources that an argument `draft` names, one by one."""
    return () if draft is None else tuple(draft) if isinstance(draft, (tuple, list)) else (draft,)


def _settings_of(model: Model, load: Load, block_size: int, vocab_size: int) -> CacheSettings:
    if abs(model.config.vocab_size - vocab_size) > _FILL:
        expected = f"a vocabulary of {vocab_size} tokens, or up to {_FILL} more or less"
        raise ValueError(f"draft: expected {expected}, got {model.config.vocab_size}")
    return CacheSettings.of(model, load, Settings("f16", block_size=block_size, residual_length=0))
