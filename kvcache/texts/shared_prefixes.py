"""`SharedPrefixes`: behind how many cached tokens a text can continue in all groups, and what it needs for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from kvcache.prefix.prefix_stats import PrefixCacheStats
from kvcache.texts.group import CachedStart, Group
from kvcache.texts.text import Text, Tokens
from kvcache.texts.whole import WholeLayers

__all__ = ["Arrived", "SharedPrefixes"]

Arrived = Callable[[Text, int], None]


class SharedPrefixes:
    """The cached prefixes of all groups.

    Args:
        groups: the first one has the index, which says how many tokens are cached at most.

    Attributes:
        gone: texts that continued before the end of their cached prefix, since a group lacked what they needed there,
            by the reason that the group gives.
        gone_tokens: the tokens between the two.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self.gone, self.gone_tokens = {group.reason: 0 for group in groups[1:]}, 0

    def longest(self, text: Text) -> int:
        """How many tokens of a text are cached."""
        if not text.shares:
            return 0
        tokens, space = text.tokens, text.space
        return self.longest_of(tokens, self._groups[0].longest(tokens, text.num_tokens, space), space)

    def longest_of(self, tokens: Tokens, stop: int, space: object) -> int:
        """The longest prefix of at most `stop` tokens that every group but the first one has."""
        before, others = -1, self._groups[1:]
        while before != stop and others:
            before = stop
            for group in others:
                stop = group.longest(tokens, stop, space)
        return stop

    @contextmanager
    def hold(
        self, text: Text, most: int, arrived: Arrived | None = None, again: bool = False
    ) -> Iterator[tuple[int, list[CachedStart]]]:
        """The longest prefix of a text that every group has, at most `most` tokens and all but the last; held.

        Args:
            arrived: see `Pool.start`.
            again: whether the text has been looked up before, and is not to be counted twice.

        Yields:
            The number of its tokens, and what each group has of them.
        """
        tokens, space, others = text.tokens[:most], text.space, self._groups[1:]
        with ExitStack() as session:
            first = self._groups[0].hold(tokens, text.num_tokens - 1, space, session, again)
            assert first is not None
            if arrived is not None:
                arrived(text, first.cached)
            cached = first.stop
            while True:
                with ExitStack() as held:
                    stop = self.longest_of(text.tokens, first.stop, space)
                    if stop < first.stop and (first := self._shorter(text, stop, first)).stop < stop:
                        continue
                    starts = [group.hold(text.tokens, stop, space, held, again) for group in others]
                    if None not in starts:
                        break_at = self._parting(cached, stop)
                        if stop < cached and not again:
                            self.gone[self._lacking(text.tokens, cached, space)] += 1
                            self.gone_tokens += cached - stop
                        yield stop, [first._replace(parting=break_at or first.parting), *filter(None, starts)]
                        return

    def pin(self, text: Text, most: int) -> tuple[int, ExitStack]:
        """Hold the longest prefix of full blocks as `hold` finds it, until the stack is closed; it is not counted.

        Returns:
            The number of its tokens, and the stack.
        """
        size, whole = self._groups[0].caches[0].block_size, False
        while not whole:  # the beginning of a block is not held
            most -= most % size
            with self.hold(text, most, again=True) as (stop, _):
                most, whole = stop, stop % size == 0
        with ExitStack() as held:
            with self.hold(text, most, again=True) as (stop, _):
                for group in self._groups if stop else ():
                    group.hold(text.tokens[:stop], stop, text.space, held, True)
            return stop, held.pop_all()

    def _shorter(self, text: Text, stop: int, start: CachedStart) -> CachedStart:
        """The start of the first group with `stop` tokens, or fewer where it cannot go on after these."""
        whole = self._groups[0]
        assert isinstance(whole, WholeLayers)
        return whole.cached_start(text.tokens, stop, text.space, start.blocks)._replace(cached=start.cached)

    def _lacking(self, tokens: Tokens, stop: int, space: object) -> str:
        """The reason of the group that has the shortest prefix."""
        return min(self._groups[1:], key=lambda group: group.longest(tokens, stop, space)).reason

    def _parting(self, cached: int, stop: int) -> int:
        """Where two texts part and a group lacks what the next such text needs; 0: none does."""
        at = cached // self._groups[0].caches[0].block_size * self._groups[0].caches[0].block_size
        return at if stop < at else 0

    def close_sessions(self) -> None:
        """Release all that is held; for an owner whose calls have ended."""
        for group in self._groups:
            for cache in group.prefixes:
                cache.close_sessions()

    def counted(self, stats: PrefixCacheStats) -> PrefixCacheStats:
        """`stats` without the tokens that were found and ran again; the reasons of other groups count these texts."""
        if not self._groups[1:]:
            return stats
        hit = stats.hit_tokens - self.gone_tokens
        reasons = {**stats.miss_reasons, **self.gone}
        rate = hit / stats.lookup_tokens if stats.lookup_tokens else 0.0
        return replace(stats, hit_rate=rate, hit_tokens=hit, miss_reasons=reasons)
