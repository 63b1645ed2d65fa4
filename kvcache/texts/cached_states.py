"""Cached states of layers that keep one per text, each at the exact tokens that lead to it, within a budget of bytes.

A state is a page of a `PrefixCache` for one token, the last one before it. The page's namespace names the length of the
text and a hash of all its tokens, so that a state needs no other page, and saved files and tiers have states as they
have blocks.

What leaves is worth least: GreedyDual-Size-Frequency (Cherkasova, "Improving WWW Proxies Performance with
Greedy-Dual-Size-Frequency Caching Policy", HPL-98-69, 1998), with the tokens that a state saves as its cost. All states
of a network have the same bytes, which therefore do not count.

    rank    age + uses * (tokens of the state - tokens of the next shorter state of its text)
    age     the rank of the state that left last
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.networks.protocols import Float32
from kvcache.paged.cache import PagedKvCache
from kvcache.prefix.index.prefix_index import PrefixIndex
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.texts.text import Tokens
from kvcache.tiers.windows import StateSource

__all__ = ["CachedStates", "name_of", "page_shape"]

_MOST_CHANNELS = 512  # of a head in a `PagedKvCache`
Name = tuple[Any, int, bytes]


def page_shape(size: int) -> tuple[int, int]:
    """Heads and channels of a page whose K and V together have room for `size` numbers."""
    half = -(-size // 2)
    dim = min(_MOST_CHANNELS, -(-half // 8) * 8)
    return -(-half // dim), dim


@dataclass(slots=True)
class _Entry:
    """A cached state: the tokens that it saves, how often a text continued from it, and its place in the heap."""

    saved: int
    uses: int = 1
    place: tuple[float, int] = (0.0, 0)


class CachedStates:
    """The states of layers after exact prefixes of texts.

    Args:
        sizes: the float32 numbers of the state of each layer.
        most: the most states.

    Attributes:
        index: the pages.
        most: see above.
    """

    def __init__(self, sizes: Sequence[int], most: int) -> None:
        self._sizes, self.most = tuple(sizes), most
        self._heads, self._dim = page_shape(max(sizes))
        self._paged = PagedKvCache(most, 1, self._heads, self._dim, num_layers=len(sizes), dtype="f32")
        self.index = PrefixCache.over(self._paged)
        self._numbers = count()
        self._begun: dict[int, Name] = {}  # by the sequence of a page that is being written
        self._entries: dict[Name, _Entry] = {}
        self._lengths: dict[Any, list[int]] = {}  # of the states in each namespace, ascending
        self._ranks: list[tuple[tuple[float, int], Name]] = []  # a heap, with places that entries had before
        self._held: dict[int, Name] = {}  # the state of each page that was held last
        self._holds: Counter[Name] = Counter()  # how often each is held now
        self._age, self._is_stale = 0.0, False  # whether an exception may have left any of these half changed

    # -- lookups --------------------------------------------------------------------------------------------

    def longest(self, tokens: Tokens, stop: int, space: Hashable) -> int:
        """The longest prefix of at most `stop` tokens whose state is cached."""
        self._sync()
        return max((name[1] for name in self._names(tokens, stop, space) if name in self._entries), default=0)

    def hold(self, tokens: Tokens, stop: int, space: Hashable, held: ExitStack) -> NDArray[np.int64] | None:
        """The page `(1,)` of the state after `stop` tokens, until `held` closes; None: it is not there."""
        name = name_of(tokens[:stop], space)
        if name not in self._entries:
            return None
        session = held.enter_context(self.index.open_session(tokens[stop - 1 : stop], name))
        if session.num_tokens == 0:  # it left, or the file that has it is damaged
            self._forget(name)
            return None
        self._entries[name].saved = stop - self.longest(tokens, stop - 1, space)
        self._held[session.shared_blocks[0]] = name
        self._holds[name] += 1
        held.callback(_let_go, self._holds, name)
        return np.array(session.shared_blocks, np.int64)

    def read(self, page: NDArray[np.int64]) -> list[Float32]:
        """The state of each layer in a page that is held, float32 `(size,)`; counts as a use."""
        number, name = next(self._numbers), self._held.get(int(page[0]))
        if name is not None and (entry := self._entries.get(name)) is not None:
            entry.uses += 1
            self._push(name, entry)
        self._paged.adopt(number, page, 1)
        try:
            rows = [self._paged.read(layer, number) for layer in range(len(self._sizes))]
        finally:
            self._paged.free(number)
        return [np.concatenate([k.ravel(), v.ravel()])[:size] for size, (k, v) in zip(self._sizes, rows, strict=True)]

    def _names(self, tokens: Tokens, stop: int, space: Hashable) -> Iterator[Name]:
        """The names of the prefixes of at most `stop` tokens of the lengths that states of this namespace have."""
        lengths = self._lengths.get(space, ())
        before, at = blake2b(digest_size=32), 0
        for length in lengths[: bisect_right(lengths, stop)]:
            if length > at:
                before.update(tokens[at:length].tobytes())
                at = length
                yield space, length, before.copy().digest()

    # -- a state is cached ------------------------------------------------------------------------------------

    def begin(self, tokens: Tokens, space: Hashable) -> int:
        """Begin a page for the state after `tokens`; its number, -1: it is cached, or there is no page for it."""
        self._sync()
        name, number = name_of(tokens, space), next(self._numbers)
        if name in self._entries or name in self._begun.values():
            return -1
        while not self._paged.free_block_count:
            if not self._evict():
                return -1
        try:
            self._paged.allocate(number, 1)
        except MemoryError:  # of the system
            return -1
        self._begun[number] = name
        return number

    def write(self, number: int, layer: int, state: Float32) -> None:
        """Write the state `(size,)` of a layer into a page that `begin` gave; one that is not finite is not kept."""
        if number not in self._begun:
            return
        half = self._heads * self._dim
        if len(state) < 2 * half:
            state = np.concatenate([state, np.zeros(2 * half - len(state), np.float32)])
        k, v = state[:half].reshape(1, self._heads, self._dim), state[half:].reshape(1, self._heads, self._dim)
        try:
            self._paged.write(layer, number, k, v)
        except (ValueError, MemoryError):
            self.drop(number)

    def end(self, number: int, tokens: Tokens, space: Hashable) -> None:
        """Cache the page of the state after `tokens`, which all layers have written, unless it was dropped."""
        if (name := self._begun.get(number)) is None:
            return
        saved = len(tokens) - self.longest(tokens, len(tokens), space)
        self.index.adopt(tokens[-1:], self._paged.block_table([number]).block_ids, name)
        self.drop(number)
        self._entries[name] = entry = _Entry(saved)
        insort(self._lengths.setdefault(space, []), len(tokens))
        self._push(name, entry)

    def drop(self, number: int) -> None:
        """Free a page that is not cached, if there is one."""
        self._begun.pop(number, None)
        if number in self._paged:
            self._paged.free(number)

    def settle(self) -> None:
        """Free all pages that are being written, after an exception too."""
        self._is_stale = True
        self._begun.clear()
        self._holds = Counter()  # holds of before count off the old one, however late they end
        for number in self._paged.sequence_ids():
            self._paged.free(int(number))

    def store(self, tokens: Tokens, space: Hashable, states: Sequence[Float32]) -> bool:
        """Cache the state `(size,)` of each layer after `tokens`; whether it is cached now."""
        number = self.begin(tokens, space)
        for layer, state in enumerate(states):
            self.write(number, layer, state)
        self.end(number, tokens, space)
        return name_of(tokens, space) in self._entries

    def offered(self, tokens: Tokens, space: Hashable, ends: int) -> list[Callable[[PrefixIndex], dict[int, int]]]:
        """For each cached state after a multiple of `ends`, its page by the number of the group that ends there."""
        self._sync()
        names = [each for each in self._names(tokens, len(tokens), space) if each in self._entries]
        found = [(name, length) for name in names if (length := name[1]) % ends == 0]
        return [partial(_page_of, tokens[length - 1 : length], name, length // ends - 1) for name, length in found]

    def take(self, tokens: Tokens, stop: int, space: Hashable, bodies: dict[int, memoryview], ends: int) -> None:
        """Cache the state after `stop` tokens, which has arrived from tiers, if there is room for it."""
        body, name = bodies.get(stop // ends - 1), name_of(tokens[:stop], space)
        if body is None:
            return
        self._sync()
        while name not in self._entries and not self._paged.free_block_count:
            if not self._evict():
                return
        source = self.index.source
        assert isinstance(source, StateSource)
        source.arrived = {name: body}
        with self.index.open_again(tokens[stop - 1 : stop], name):
            source.arrived = {}
        self._sync()

    def forget(self, tokens: Tokens, space: Hashable) -> None:
        """Drop the state after `tokens`, unless a text has continued from it."""
        name = name_of(tokens, space)
        entry = self._entries.get(name)
        if entry is not None and entry.uses == 1:
            self._forget(name)

    # -- states leave ---------------------------------------------------------------------------------------

    def leave(self, tokens: Tokens, start: int, space: Hashable, at_once: bool) -> None:
        """Let the states after more than `start` of these tokens leave before all others, until they are used; or now.

        Those that are held stay.
        """
        self._sync()
        for name in list(self._names(tokens, len(tokens), space)):
            entry = self._entries.get(name)
            if entry is None or name[1] <= start:
                continue
            if not at_once:
                self._push(name, entry, (0.0, next(self._numbers)))
            elif not self._holds[name]:
                self._forget(name)

    def _evict(self) -> bool:
        """Drop the state of the lowest rank that is not held; whether there was one."""
        kept, found = [], False
        while self._ranks and not found:
            place, name = heapq.heappop(self._ranks)
            entry = self._entries.get(name)
            if entry is None or entry.place != place:
                continue
            if self._holds[name]:
                kept.append((place, name))
                continue
            self._age, found = max(self._age, place[0]), True
            self._forget(name)
        for each in kept:
            heapq.heappush(self._ranks, each)
        return found

    def _forget(self, name: Name) -> None:
        self.index.forget(name)
        if self._entries.pop(name, None) is not None:
            lengths = self._lengths[name[0]]
            lengths.remove(name[1])
            if not lengths:
                del self._lengths[name[0]]

    def _push(self, name: Name, entry: _Entry, place: tuple[float, int] | None = None) -> None:
        entry.place = place or (self._age + entry.uses * max(1, entry.saved), next(self._numbers))
        heapq.heappush(self._ranks, (entry.place, name))
        if len(self._ranks) > 4 * len(self._entries) + 64:
            self._ranks = [(each.place, name) for name, each in self._entries.items()]
            heapq.heapify(self._ranks)

    def _sync(self) -> None:
        """Know the pages that the index has, where it was cleared or loaded, or an exception came between."""
        if len(self._entries) == len(self.index) and not self._is_stale:
            return
        names: list[Any] = [*self.index.namespace_tokens()]
        self._entries = {name: self._entries.get(name) or _Entry(name[1]) for name in names}
        self._lengths, self._ranks = {}, []
        for name, entry in self._entries.items():
            insort(self._lengths.setdefault(name[0], []), name[1])
            self._push(name, entry)
        self._is_stale = False

    # -- reports --------------------------------------------------------------------------------------------

    def memory(self) -> list[dict[str, int]]:
        """Reports of bytes, whose sum is that of the cache."""
        return [self._paged.memory(), self.index.memory()]

    def check(self) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        self._sync()
        self.index.check()
        self._paged.check()
        names: set[Any] = set(self.index.namespace_tokens())
        assert names == set(self._entries), "states: those of the index are not those that are known"
        assert len(self.index) + self._paged.free_block_count + len(self._begun) == self.most, (
            "states: cached, begun and free pages are not all"
        )
        lengths = sorted((repr(name[0]), name[1]) for name in self._entries)
        known = sorted((repr(space), each) for space, some in self._lengths.items() for each in some)
        assert lengths == known, "states: their lengths are not known"
        ranks = set(self._ranks)
        assert all((each.place, name) in ranks for name, each in self._entries.items()), "states: one has no rank"


def _let_go(holds: Counter[Name], name: Name) -> None:
    """Count a hold off."""
    holds[name] -= 1
    if holds[name] <= 0:
        del holds[name]


def _page_of(token: Tokens, name: Name, number: int, index: PrefixIndex) -> dict[int, int]:
    """The page of a state, of the index of the pages, whose lock is held; empty: it has left."""
    match = index.find(token, name)
    return {number: int(match.pages[0])} if match.length else {}


def name_of(tokens: Tokens, space: Hashable) -> Name:
    """The namespace of the page of the state after `tokens`."""
    return space, len(tokens), blake2b(tokens.tobytes(), digest_size=32).digest()
