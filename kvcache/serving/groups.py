"""Tokens of many texts that stay unpacked, beside the blocks that pack all tokens: a group of them for each text.

With a calibration every query reads the first tokens of its text in f16, so groups begin with them. Texts that begin
alike share them: they are found by the exact tokens, so that a text can continue behind a cached prefix, of which the
other blocks have packed tokens alone. Without them it runs from its start.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import count

from kvcache.core.memory import total
from kvcache.engine.residual import AttendPiece
from kvcache.networks.protocols import LayerAttention
from kvcache.paged.cache import PagedKvCache
from kvcache.prefix.blocks import PrefixCache
from kvcache.serving.work import Work

__all__ = ["Groups", "KnownFirsts"]


class KnownFirsts:
    """First tokens of texts, in blocks of a cache of unpacked tokens, found by the tokens.

    Args:
        rows: the cache; its blocks hold a divisor of `firsts` tokens.
        firsts: how many; 0: none.
        most: texts.
    """

    def __init__(self, rows: PagedKvCache, firsts: int, most: int) -> None:
        self._rows, self._firsts = rows, firsts
        self.cache = PrefixCache.over(rows, most * (firsts // rows.block_size)) if firsts else None

    def keep(self, work: Work) -> None:
        """Cache the first tokens of a work's group, which begins with them."""
        if self.cache is not None and work.shares and work.group >= 0 and work.computed >= self._firsts:
            with suppress(MemoryError):  # of the system: they are not cached then
                blocks = self._rows.block_table([work.group]).block_ids[: self._firsts // self._rows.block_size]
                self.cache.adopt(work.tokens[: self._firsts], blocks, (work.space, b""))

    def recall(self, work: Work, group: int) -> bool:
        """Begin a group with the first tokens of a work, if they are cached; whether they are."""
        if self.cache is None:
            return False
        with self.cache.open_session(work.tokens[: self._firsts], (work.space, b"")) as found:
            if found.num_tokens < self._firsts:
                return False
            self._rows.adopt(group, found.shared_blocks, self._firsts)
            return True


class Groups(ABC):
    """The group of every text that runs.

    Args:
        rows: their cache, of unpacked tokens, with room for the groups and the first tokens that stay cached.
        length: a text continues behind a cached prefix of a multiple of so many tokens.
        firsts: first tokens of the text that each query reads unpacked; 0: none.
        most: texts whose first tokens stay cached.
        attention: how each layer attends; none of them has a window.

    Attributes:
        known: the first tokens that are cached.
    """

    def __init__(
        self, rows: PagedKvCache, length: int, firsts: int, most: int, attention: Sequence[LayerAttention]
    ) -> None:  # fmt: skip
        self.length, self.firsts = length, firsts
        self._groups = rows
        self.known = KnownFirsts(rows, firsts, most)
        self._ids = count()
        self._options = [each.options() for each in attention]

    @abstractmethod
    def held(self, computed: int) -> int:
        """The tokens of the group of a text of which so many have run."""

    @abstractmethod
    def left(self, work: Work) -> int:
        """How many tokens fit behind the newest one of a work, in its group: guesses are not cut off across groups."""

    @abstractmethod
    def piece(self, cache: PagedKvCache, pieces: Iterable[tuple[Work, int]]) -> AttendPiece:
        """The `attend` of pieces of texts, for which `cache` has room; `next_group` of each is then its last group."""

    def begin(self, work: Work, found: int) -> tuple[int, int]:
        """`(found, group)`: behind how many of `found` cached tokens a work can continue, and its group, or -1."""
        found -= found % self.length
        if not self.firsts or not found:
            return found, -1
        group = next(self._ids)
        return (found, group) if found >= self.firsts and self.known.recall(work, group) else (0, -1)

    def group_at(self, work: Work, computed: int) -> int:
        """The group that a work keeps after a pass, where it has `computed` tokens; -1: none."""
        return work.next_group if self.held(computed) else -1

    def fork(self, work: Work, computed: int) -> int:
        """A copy of the group that a work keeps after this pass, or -1."""
        group = self.group_at(work, computed)
        if group < 0:
            return -1
        copy = next(self._ids)
        self._groups.fork(group, copy)
        self._groups.truncate(copy, self.held(computed))
        return copy

    def stop(self, group: int) -> None:
        """Free a group that a work had, or -1."""
        if group >= 0:
            self._groups.free(group)

    def settle(self, running: Iterable[Work]) -> list[Work]:
        """Free groups that no work has, and cut the others to what was computed; works whose group is missing."""
        works = list(running)
        for work in works:
            if not self.held(work.computed):
                work.group = -1
        lost = [work for work in works if work.group < 0 and self.held(work.computed)]
        owned = {work.group: work for work in works if work.group >= 0}
        for each in self._groups.sequence_ids():
            kept, info = owned.pop(int(each), None), self._groups.get_sequence(each)
            if kept is None:
                self._groups.free(each)
            elif info is None or info.num_tokens < self.held(kept.computed):  # a group before it
                lost.append(kept)
                self._groups.free(each)
            else:
                self._groups.truncate(each, self.held(kept.computed))
        return lost + list(owned.values())

    def memory(self) -> dict[str, int]:
        """Bytes of K and V, "kv", of "bookkeeping" and of "scratch"."""
        return total(self._groups.memory(), {} if self.known.cache is None else self.known.cache.memory())

    @property
    def nbytes(self) -> int:
        """Bytes of K and V."""
        return self._groups.total_memory_bytes

    def check(self, running: Iterable[Work]) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        self._groups.check()
        owned = {work.group: work for work in running if work.group >= 0}
        assert sorted(owned) == [int(each) for each in self._groups.sequence_ids()], "groups and works differ"
        for group, work in owned.items():
            held = self._groups.get_sequence(group)
            assert held is not None, f"{work}: its group is gone"
            assert held.num_tokens == self.held(work.computed), f"{work}: its group has {held.num_tokens} tokens"
        assert all(work.group >= 0 for work in running if self.held(work.computed)), "a work has no group"
