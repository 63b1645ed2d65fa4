"""`SharedPrefixes`: behind how many cached tokens a text can continue in all groups, and what it needs for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.prefix.prefix_stats import PrefixCacheStats
from kvcache.texts.behind import Part, name_of_space
from kvcache.texts.block_index import BlockIndex, CachedStart, PartStart
from kvcache.texts.kinds.base import Layers
from kvcache.texts.kinds.part_layers import PartLayers
from kvcache.texts.text import Text, Tokens

__all__ = ["Arrived", "SharedPrefixes"]

Arrived = Callable[[Text, int], None]


class SharedPrefixes:
    """The cached prefixes of all groups.

    Args:
        groups: all.
        index: says how many tokens are cached at most; None: nothing is cached.
        block_size: tokens per block.

    Attributes:
        prefixes: the prefix caches: those of the index, and those of the groups, as they are saved in one file.
        gone: texts that continued before the end of their cached prefix, since a group lacked what they needed there,
            by the reason that the group gives.
        gone_tokens: the tokens between the two.
    """

    def __init__(self, groups: Sequence[Layers], index: BlockIndex | None, block_size: int) -> None:
        self._groups, self._index, self._block_size = groups, index, block_size
        self._with_pages = [group for group in groups if group.reason]
        own = () if index is None else index.prefixes
        self.prefixes: list[PrefixCache] = [*own, *(each for group in self._with_pages for each in group.prefixes)]
        self.gone, self.gone_tokens = {group.reason: 0 for group in self._with_pages}, 0

    def longest(self, text: Text) -> int:
        """How many tokens of a text are cached."""
        if self._index is None or not text.shares:
            return 0
        tokens, space = text.tokens, text.space
        most = min(text.num_tokens, text.shares_to)
        return self.longest_of(tokens, self._index.longest(tokens, most, space), space)

    def longest_of(self, tokens: Tokens, stop: int, space: object) -> int:
        """The longest prefix of at most `stop` tokens, which the index has, that every group has."""
        before = -1
        while before != stop and self._with_pages:
            before = stop
            for group in self._with_pages:
                stop = group.longest(tokens, stop, space)
        return stop

    def hold(
        self, text: Text, most: int, held: ExitStack, arrived: Arrived | None = None, again: bool = False,
        parts: Sequence[Sequence[PartStart | None]] = (),
    ) -> tuple[int, list[CachedStart]]:
        """Hold the longest prefix that every group has, at most `most` tokens and all but the last.

        Args:
            held: holds it until it is closed.
            arrived: see `Pool.start`.
            again: whether the text has been looked up before, and is not to be counted twice.
            parts: those that it sees, of each group, where these are held; empty: they are looked up.

        Returns:
            The number of its tokens, and what each group has of them.
        """
        tokens, space, index = text.tokens[: min(most, text.shares_to)], text.space, self._index
        most = min(text.num_tokens - 1, text.shares_to)
        first = CachedStart(0) if index is None else index.hold(tokens, most, space, held, again)
        if arrived is not None:
            arrived(text, first.cached)
        cached = first.stop
        while True:
            stop = self.longest_of(text.tokens, first.stop, space)
            if index is not None and stop < first.stop:
                first = index.start_of(text.tokens, stop, space, first.blocks)._replace(cached=first.cached)
                if first.stop < stop:
                    continue
            # Where two texts part, and a group lacks what the next such text needs.
            at = cached - cached % self._block_size
            start = first._replace(parting=at) if stop < at else first
            starts = [group.hold(text.tokens, stop, space, held) if group.reason else start for group in self._groups]
            if None not in starts:
                if text.prefix is not None:
                    found = parts or self.hold_parts(text, held, again)
                    starts = [each and each._replace(parts=own) for each, own in zip(starts, found, strict=True)]
                if stop < cached and not again:
                    lacking = min(self._with_pages, key=lambda each: each.longest(text.tokens, cached, space))
                    self.gone[lacking.reason] += 1
                    self.gone_tokens += cached - stop
                return stop, [*filter(None, starts)]

    def hold_parts(self, text: Text, held: ExitStack, again: bool = False) -> list[list[PartStart | None]]:
        """Hold the parts that a text sees, until `held` closes: for each group those whose cached texts are there."""
        prefix, own, found = text.prefix, name_of_space(text.space), list[list[PartStart | None]]()
        for part, gap in () if prefix is None else zip(prefix.parts, prefix.gaps, strict=True):
            starts = self.hold_text(part, gap, part.space(own), held, again)
            found.append([
                None if starts is None or not isinstance(group, PartLayers) else group.part_start(starts[i], part, gap)
                for i, group in enumerate(self._groups)
            ])
        return [[each[i] for each in found] for i in range(len(self._groups))]

    def hold_text(
        self, part: Part, gap: int, space: object, held: ExitStack, again: bool = False
    ) -> list[CachedStart] | None:
        """Hold what each group needs of the cached text of a part; None: something is not there.

        Args:
            gap: see `SeenParts`.
        """
        first = None if self._index is None else self._index.hold_whole(part, space, held, again)
        if first is None:
            return None
        found = [
            group.hold_end(part.tokens, gap, space, held) if group.reason and isinstance(group, PartLayers) else first
            for group in self._groups
        ]
        whole = [each for each in found if each is not None]
        return whole if len(whole) == len(found) else None

    def pin(self, text: Text, most: int) -> tuple[int, ExitStack]:
        """Hold the longest prefix of full blocks as `hold` finds it, until the stack is closed; it is not counted.

        Returns:
            The number of its tokens, and the stack.
        """
        while True:
            most -= most % self._block_size
            with ExitStack() as held:
                stop, _ = self.hold(text, most, held, again=True)
                if stop == most:
                    return stop, held.pop_all()
                most = stop

    def leave(self, text: Text, after: int, at_once: bool) -> tuple[Tokens, int] | None:
        """Let what a text alone has, behind its first `after` tokens, be evicted before all else; or forget it now.

        Returns:
            As `PrefixCache.demote`.
        """
        if self._index is None or not text.shares:
            return None
        pages = self._index.pages
        found = (pages.discard if at_once else pages.demote)(text.tokens, text.space, after)
        if found is not None:
            for group in self._with_pages:
                group.leave(*found, text.space, at_once)
        return found

    def close_sessions(self) -> None:
        """Release all that is held; for an owner whose calls have ended."""
        for cache in self.prefixes:
            cache.close_sessions()

    def counted(self, stats: PrefixCacheStats) -> PrefixCacheStats:
        """`stats` without the tokens that were found and ran again; the reasons of other groups count these texts."""
        if not self._with_pages:
            return stats
        hit = stats.hit_tokens - self.gone_tokens
        reasons = {**stats.miss_reasons, **self.gone}
        rate = hit / stats.lookup_tokens if stats.lookup_tokens else 0.0
        return replace(stats, hit_rate=rate, hit_tokens=hit, miss_reasons=reasons)
