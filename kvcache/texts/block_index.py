"""`BlockIndex`: finds the cached prefixes of texts, by the blocks of the layers that keep every token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.core.kvrows import KvRows
from kvcache.paged.cache import PagedKvCache
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.texts.behind import Part
from kvcache.texts.newest import NewestGroups
from kvcache.texts.text import NO_TOKEN, Text, Tokens

__all__ = ["BlockIndex", "CachedStart", "PartStart", "filled"]

Rows = Sequence[KvRows]


class PartStart(NamedTuple):
    """A part of a cached text, in blocks that are held, for a text that is about to begin behind it.

    Attributes:
        blocks: of the cached text, `(n,)`; in layers with a window those of its end.
        num_tokens: of the cached text, in these blocks.
        seen: the tokens among them that are seen, int64, ascending.
        before: how many tokens that are seen lie before these blocks.
        positions: those in the request of `seen`; None where no layer asks for them.
        firsts: K and V of each layer of its first tokens, where it has those that a request reads in f16; else empty.
    """

    blocks: NDArray[np.int64]
    num_tokens: int
    seen: NDArray[np.int64]
    before: int = 0
    positions: NDArray[np.int64] | None = None
    firsts: Rows = ()


class CachedStart(NamedTuple):
    """Cached tokens of a prefix, held for a text that is about to begin.

    Attributes:
        stop: how many tokens of the text they are.
        first: the text position of the first token in `blocks`, a multiple of the block size.
        blocks: the blocks of the tokens from there on, `(n,)`.
        rows, firsts: K and V of each layer that the text reads in f16: those of its last group, and its sink tokens.
        parting: after how many tokens the next such text could continue, if these were kept; 0: nothing is missing.
        cached: tokens that are cached of the text, at least `stop`.
        parts: of the texts that it sees parts of; None: one is not all there.
    """

    stop: int
    first: int = 0
    blocks: NDArray[np.int64] = np.empty(0, np.int64)
    rows: Rows = ()
    firsts: Rows = ()
    parting: int = 0
    cached: int = 0
    parts: Sequence[PartStart | None] = ()


class BlockIndex:
    """The cached prefixes of a pool. It stands beside the groups of layers: it says how many tokens are cached at most.

    Its cache is there even if it has no layers: its blocks are what prefixes are found by.

    Args:
        cache: K and V of the layers that keep every token.
        pages: the prefix cache over its blocks.
        newest: tokens of cached texts in f16, for caches with a residual or sink tokens; None: there are none.

    Attributes:
        cache, pages, newest: see above.
        prefixes: the prefix caches, in the order of saved files.
    """

    def __init__(self, cache: PagedKvCache, pages: PrefixCache, newest: NewestGroups | None = None) -> None:
        self.cache, self.pages, self.newest = cache, pages, newest
        self.prefixes = (pages,) if newest is None else (pages, newest.cache)

    def longest(self, tokens: Tokens, stop: int, space: Any) -> int:
        """The longest cached prefix of at most `stop` tokens."""
        return min(stop, self.pages.peek(tokens, space))

    def hold(self, tokens: Tokens, stop: int, space: Any, held: ExitStack, again: bool) -> CachedStart:
        """Look tokens up, which counts, and hold what is cached of at most `stop` of them until `held` closes.

        Args:
            again: whether the text has been looked up before.
        """
        look_up = self.pages.open_again if again else self.pages.open_session
        session = held.enter_context(look_up(tokens, space))
        blocks, found = np.array(session.shared_blocks, np.int64), session.num_tokens
        return self.start_of(tokens, min(stop, found), space, blocks)._replace(cached=found)

    def hold_whole(self, part: Part, space: Any, held: ExitStack, again: bool) -> CachedStart | None:
        """Look the cached text of a part up, and hold all of it until `held` closes; None: it is not all cached.

        Nor is a text with too few tokens for copies of those that a request reads in f16: it runs again.

        Args:
            space: its namespace.
            again: whether it has been looked up before.
        """
        tokens, count, firsts = part.tokens, len(part.tokens), list[KvRows]()
        if self.pages.peek(tokens, space) < count:
            return None
        if self.newest is not None and part.begins_within(self.cache.first_tokens):
            firsts = self.newest.recall_firsts(part.tokens, space)
            if not firsts:
                return None
        look_up = self.pages.open_again if again else self.pages.open_session
        session = held.enter_context(look_up(tokens, space))
        blocks = np.array(session.shared_blocks, np.int64)
        return CachedStart(count, 0, blocks, firsts=firsts) if session.num_tokens == count else None

    def start_of(self, tokens: Tokens, stop: int, space: Any, blocks: NDArray[np.int64]) -> CachedStart:
        """The first `stop` tokens in blocks that are held, as far as a text can go on after them.

        A token must read its own group in f16, and all read the sink tokens so. Copies of these are kept; where some of
        a group are missing it runs again, and where the sink tokens are, everything does.
        """
        length, num_firsts = self.cache.residual_length, self.cache.first_tokens
        rows: Rows = ()
        firsts: Rows = ()
        if num_firsts and stop >= (length or num_firsts):
            firsts = () if self.newest is None else self.newest.recall_firsts(tokens, space)
            stop = stop if firsts else 0
        elif num_firsts and not length:
            stop = 0
        begun, count, parting = stop % (length or 1), 0, 0
        if begun:
            if self.newest is not None:
                count, rows = self.newest.recall(tokens[:stop], space)
            stop += count - begun
            if self.newest is not None and count < begun:
                parting = stop - count + length
        return CachedStart(stop, 0, blocks, rows if count else (), firsts, parting)

    def keep(self, text: Text, stop: int, ends: bool = False, seen: bool = False) -> None:
        """Cache the full blocks of a text, by reference, and the tokens that another text reads in f16.

        Args:
            ends: whether the block in which the text ends is cached with what it has, so that others go on right there.
            seen: whether it is cached so for those that see parts of it.
        """
        if not text.shares:
            return
        if stop > text.shares_to:
            stop, ends, seen = text.shares_to, False, False
        cache, size, cached = self.cache, self.cache.block_size, 0
        full, tokens = stop // size, text.tokens[: stop // size * size]
        with suppress(MemoryError):  # of the system: the blocks are not cached then
            blocks = cache.block_table(np.array([text.seq_id], np.uint64)).block_ids.astype(np.int64)
            goes_on = ends and not cache.residual_length and not cache.first_tokens  # else where a group begins
            if (goes_on or seen) and stop % size and cache.reference_counts(blocks[full : full + 1]) == 1:
                full, tokens = full + 1, filled(text.tokens[:stop], size)
            cached = self.pages.adopt(tokens, blocks[:full], text.space)
        if cached == full and self.newest is not None:
            with suppress(MemoryError):
                self.newest.keep(text.seq_id, text.tokens[:stop], text.space)

    def memory(self) -> list[dict[str, int]]:
        """Reports of bytes."""
        return [self.pages.memory(), *([] if self.newest is None else [self.newest.memory()])]

    def check(self) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        self.pages.check()
        if self.newest is not None:
            self.newest.check()


def filled(tokens: Tokens, size: int) -> Tokens:
    """Tokens, and behind them what fills their last block."""
    whole = np.full(-(-len(tokens) // size) * size, NO_TOKEN, np.uint32)
    whole[: len(tokens)] = tokens
    return whole
