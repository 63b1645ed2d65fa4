"""`TieredWorks`: works that run while tiers are asked for their prompts, and begin again where more has arrived."""

from __future__ import annotations

from collections.abc import Container

from kvcache.engine.tiered import make_sources, take_windows, write_ends
from kvcache.networks.protocols import Model
from kvcache.paged.cache import PagedKvCache
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.serving.windows import WindowPools
from kvcache.serving.work import Work
from kvcache.tiers.lookups import Lookup
from kvcache.tiers.source import GROUP_TOKENS
from kvcache.tiers.tiers import Tiers

__all__ = ["TieredWorks"]


class TieredWorks:
    """The lookups of works in the tiers of a `BatchEngine`.

    Args:
        tiers: its tiers.
        model: its network.
        cache: its layers that keep all tokens.
        prefixes, windows: its prefix cache and its layers with a window; the tiers become the sources of both.
    """

    def __init__(
        self, tiers: Tiers, model: Model, cache: PagedKvCache, prefixes: PrefixCache, windows: WindowPools
    ) -> None:
        self._tiers, self._prefixes, self._windows = tiers, prefixes, windows
        self._group, self._firsts = cache.residual_length or 1, cache.first_tokens
        self._source = make_sources(tiers, model, cache, prefixes, windows.cached)
        self._lookups: dict[int, Lookup] = {}  # by the number of the work
        self._asked: set[int] = set()

    def begin(self, work: Work) -> None:
        """Ask the tiers for the prompt of a work that is about to begin, once."""
        number = work.key[1]
        if not work.shares or number in self._asked or work.num_tokens != work.num_prompt:
            return
        self._asked.add(number)
        tokens = work.tokens.copy()
        cached = self._windows.cached.longest(tokens, self._prefixes.peek(tokens, work.space), work.space)
        lookup = self._source.start(work.space, tokens, cached)
        if lookup is not None:
            self._lookups[number] = lookup
            lookup.wait(self._tiers.head_start)

    def arrived(self, work: Work, found: int) -> None:
        """Cache the windows that have arrived for a work of which `found` tokens are cached in the other layers."""
        lookup = self._lookups.get(work.key[1])
        if lookup is None or found < lookup.available(0):
            return
        if not take_windows(self._windows.cached, lookup, work.tokens, work.space):
            self._end(work.key[1])

    def reaches_past(self, work: Work) -> bool:
        """Whether blocks have arrived past what a work has computed; it finds them when it begins again."""
        lookup = self._lookups.get(work.key[1])
        if lookup is None or work.computed < self._firsts:  # these run in any case, since all read them unpacked
            return False
        if self._windows.groups and work.left_at >= 0:  # it has begun again, and there was no room for all of them
            self._end(work.key[1])
            return False
        ended, most = lookup.ended, min(lookup.available(work.computed), work.num_prompt - 1)
        ahead = most // self._group * self._group > max(work.computed, work.left_at)
        if not ahead and (ended or work.remaining == 1):
            self._end(work.key[1])
        lookup.reached = work.computed // self._source.format.group_tokens
        return ahead

    def ended(self, work: Work) -> None:
        """Offer what a work computed to the tiers, and end its lookup."""
        self._end(work.key[1])
        if work.shares and work.seq_id >= 0:
            tokens = work.tokens[: work.computed]
            self._windows.keep(work, work.computed)
            self._source.used(work.space, tokens)
            write_ends(self._windows.cached, tokens, work.num_prompt, work.space)

    def keep(self, numbers: Container[int]) -> None:
        """End the lookups of works that have ended, after an exception too."""
        for number in [number for number in self._lookups if number not in numbers]:
            self._end(number)
        self._asked = {number for number in self._asked if number in numbers}

    def _end(self, number: int) -> None:
        self._source.end(self._lookups.pop(number, None))

    def measured(self, count: int, seconds: float) -> None:
        """Note how long a step took that ran `count` tokens of prompts."""
        if count >= GROUP_TOKENS:
            self._source.computing.add(count / max(seconds, 1e-9))
