"""The cached windows of texts: what a prefix needs of the layers with a window, so that a request can continue there.

A request may continue after `n` tokens if the layers that keep all tokens have these, and if the layers with a window
have the tokens that the next query sees. Windows are kept where prompts and answers end, and where two texts part.
Where a window has left, the request continues at the longest prefix whose windows are there.

Pages are found by the exact tokens of the page, in a namespace of the hash of all tokens before it. So texts share the
pages of the tokens that they share, a page needs no page before it, and the least recently used one leaves first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvcache.core.memory import total
from kvcache.engine.windows import Pages, Place, WindowLayers, num_pages
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.prefix.prefix_stats import PrefixCacheStats
from kvcache.tiers.windows import WindowSource

__all__ = ["CachedWindows"]

Tokens = NDArray[np.uint32]


class _Group:
    """The cached pages of the layers with one window.

    Attributes:
        ends: the window of the last multiple of this is kept too, where the text still has it.
    """

    def __init__(self, layers: WindowLayers, max_blocks: int | None) -> None:
        self.layers, self.size = layers, layers.cache.block_size
        self.ends = 1
        most = None if max_blocks is None else num_pages(layers.window, self.size, max_blocks)
        self.cache = PrefixCache.over(layers.cache, most)

    def longest(self, tokens: Tokens, stop: int, namespace: Hashable) -> int:
        """The longest prefix of at most `stop` tokens whose window is cached; it may end inside a page."""
        if all(self._holds(*page) for page in self._window(tokens, stop, namespace)):
            return stop
        best = run = 0
        for i, page in enumerate(_pages(tokens[: stop // self.size * self.size], self.size, 0, namespace), 1):
            run = run + 1 if self._holds(*page) else 0
            if run >= i - self.layers.first_seen(i * self.size) // self.size:
                best = i * self.size
        return best

    def hold(self, tokens: Tokens, stop: int, namespace: Hashable, held: ExitStack) -> Pages | None:
        """The pages of the window of the first `stop` tokens, in use until `held` closes; None: one was damaged."""
        blocks = []
        for page, name in self._window(tokens, stop, namespace):
            session = held.enter_context(self.cache.open_session(page, name))
            if session.num_tokens < len(page):
                return None
            blocks.append(session.shared_blocks[0])
        return Pages(self.layers.first_seen(stop) // self.size * self.size, np.array(blocks, np.int32))

    def keep(self, tokens: Tokens, place: Place, namespace: Hashable) -> None:
        """Cache the full pages of the window of `tokens`, the text at `place`, as far as it has them.

        The window is that of the last token: a prompt that is cached whole runs it again.
        """
        stop = len(tokens) // self.size * self.size
        blocks = self.layers.cache.block_table([place.seq_id]).block_ids
        first = self.layers.first_seen(max(0, min(stop - 1, len(tokens) // self.ends * self.ends))) // self.size
        pages = _pages(tokens[:stop], self.size, first, namespace)
        for i, (ids, name) in enumerate(pages, first - place.first // self.size):
            if i >= 0:  # after a prefix that ended inside a page, the text may begin a page later
                self.cache.adopt(ids, blocks[i : i + 1], name)

    def blocks(self, tokens: Tokens, stop: int, namespace: Hashable) -> dict[int, int]:
        """The blocks of the window of the first `stop` tokens, by page; empty unless all of them are cached."""
        found = {}
        for number, (page, name) in enumerate(self._window(tokens, stop, namespace), self._first_page(stop)):
            match = self.cache._cached.index.find(page, name)
            if match.length < self.size:
                return {}
            found[number] = int(match.pages[0])
        return found

    def take(self, tokens: Tokens, stop: int, namespace: Hashable, bodies: dict[int, memoryview]) -> None:
        """Cache the pages of the window of the first `stop` tokens that have arrived from tiers."""
        source = self.cache.source
        assert isinstance(source, WindowSource)
        for number, (page, name) in enumerate(self._window(tokens, stop, namespace), self._first_page(stop)):
            if number in bodies:
                source.arrived = {name: bodies[number]}
                with self.cache.open_again(page, name):
                    source.arrived = {}

    def _first_page(self, stop: int) -> int:
        return self.layers.first_seen(stop) // self.size

    def _window(self, tokens: Tokens, stop: int, namespace: Hashable) -> Iterator[tuple[Tokens, Hashable]]:
        return _pages(tokens[:stop], self.size, self._first_page(stop), namespace)

    def _holds(self, page: Tokens, name: Hashable) -> bool:
        return self.cache.peek(page, name) == len(page)


class CachedWindows:
    """The cached windows of all groups of layers; without groups every prefix has them.

    Args:
        groups: of the engine, with room for the pages.
        max_blocks: maximum number of blocks of the prefix cache; None: pages take all room that no text needs.

    Attributes:
        gone: requests that continued before the end of their cached prefix, since a window had left.
        gone_tokens: the tokens between the two.
    """

    def __init__(self, groups: Iterable[WindowLayers], max_blocks: int | None) -> None:
        self.groups = tuple(_Group(layers, max_blocks) for layers in groups)
        self.gone = self.gone_tokens = 0

    @property
    def caches(self) -> list[PrefixCache]:
        """The prefix cache of each group."""
        return [group.cache for group in self.groups]

    @contextmanager
    def hold(self, tokens: Tokens, stop: int, namespace: Hashable) -> Iterator[tuple[int, list[Pages]]]:
        """The longest prefix of at most `stop` tokens whose windows are cached, and their pages, which are held."""
        while True:
            with ExitStack() as held:
                found = self.longest(tokens, stop, namespace)
                pages = [group.hold(tokens, found, namespace, held) for group in self.groups]
                if None not in pages:
                    self.gone += found < stop
                    self.gone_tokens += stop - found
                    yield found, [each for each in pages if each is not None]
                    return

    def longest(self, tokens: Tokens, stop: int, namespace: Hashable) -> int:
        """The longest prefix of at most `stop` tokens whose windows are cached."""
        before = -1
        while before != stop:
            before = stop
            for group in self.groups:
                stop = group.longest(tokens, stop, namespace)
        return stop

    def keep(self, tokens: Tokens, places: Sequence[Place], namespace: Hashable) -> None:
        """Cache the windows of a text, which has its newest tokens at `places`, as far as there is room."""
        for group, place in zip(self.groups, places, strict=True):
            group.keep(tokens, place, namespace)

    def counted(self, stats: PrefixCacheStats) -> PrefixCacheStats:
        """`stats` without the tokens that were found and ran again; the reason "window" counts these requests."""
        if not self.groups:
            return stats
        hit = stats.hit_tokens - self.gone_tokens
        reasons = {**stats.miss_reasons, "window": self.gone}
        rate = hit / stats.lookup_tokens if stats.lookup_tokens else 0.0
        return replace(stats, hit_rate=rate, hit_tokens=hit, miss_reasons=reasons)

    def clear(self) -> None:
        """Drop every page."""
        for cache in self.caches:
            cache.clear()

    def memory(self) -> dict[str, int]:
        """Bytes of the "bookkeeping"; K and V lie in the engine's caches."""
        return total(*[cache.memory() for cache in self.caches])

    def check(self) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        for cache in self.caches:
            cache.check()


def _pages(tokens: Tokens, size: int, first: int, namespace: Hashable) -> Iterator[tuple[Tokens, Hashable]]:
    """The pages of `tokens` from page `first` on, the last one perhaps in part, each with its namespace."""
    before = blake2b(tokens[: first * size].tobytes(), digest_size=32)
    for start in range(first * size, len(tokens), size):
        page = tokens[start : start + size]
        yield page, (namespace, before.digest())
        before.update(page.tobytes())
