"""Layers whose queries see a window: a cache of their own, which keeps little more than the newest tokens.

Layers of one window form a group. While a text runs, blocks before the window leave the group's cache:

    text            0 ............................................ 8,191
    other layers    0 ............................................ 8,191       num_blocks grows with the text
    window of 512   .......................... 7,600 .............. 8,191      num_blocks does not

The first token of a text in the cache is a multiple of the block size, so that a token has the same slot of its block
in every group. A text may be cut to a position whose window is still there. What stays is counted by tokens of a text;
where its first ones run again among the parts that it sees, they are further apart in the request, and fewer are seen.

Windows of cached prefixes are kept where prompts and texts end, and where two texts part. Pages are found by the exact
tokens of the page, in a namespace of the hash of all tokens before it. So texts share the pages of the tokens that they
share, a page needs no page before it, and the least recently used one leaves first.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvalidOperationError, OutOfMemoryError
from kvcache.networks.protocols import LayerAttention, is_causal
from kvcache.paged.cache import PagedKvCache
from kvcache.paged.queried import QueriedSequences
from kvcache.prefix.index.prefix_index import PrefixIndex
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.support.machine_memory import as_memory
from kvcache.texts.block_index import CachedStart, filled
from kvcache.texts.cache_arguments import CacheArguments
from kvcache.texts.kinds.base import Ids, LayerCall, LayerKind, Lens, Named, PagesOf, calls_of
from kvcache.texts.kinds.part_layers import PartLayers
from kvcache.texts.kinds.part_sequences import MISSING, Own
from kvcache.texts.seen_parts import SeenParts
from kvcache.texts.text import Text, Tokens
from kvcache.tiers.source import TierSource
from kvcache.tiers.tiers import Tiers
from kvcache.tiers.windows import WindowSource

__all__ = ["WINDOW", "WindowLayers", "num_pages"]

_SHARE = 4  # cached blocks of the layers that keep all tokens per cached page of a window


def _num_kept(kept: int, block_size: int) -> int:
    """The most blocks that a group has between two passes for `kept` tokens of a text, and one that a token begins."""
    return -(-kept // block_size) + 2


def num_pages(kept: int, block_size: int, blocks: int, share: int = _SHARE) -> int:
    """The pages of one window beside a prefix cache of `blocks` blocks: a share of them, but at least two windows."""
    return max(2 * _num_kept(kept, block_size), blocks // share) if blocks else 0


class WindowPlace(NamedTuple):
    """The place of a text in the layers of a window.

    Attributes:
        first: the position of its first token in the cache, a multiple of the block size; None: it is just changing,
            and is the number of computed tokens less those in the cache.
        parts: the sequences of the parts that it sees.
    """

    first: int | None
    parts: tuple[int, ...] = ()


class WindowLayers(PartLayers):
    """The layers of one window, or of chunks of one size, and the cache of their newest tokens.

    Args:
        window: a query sees itself and the `window - 1` tokens before it.
        spare: a text can be cut by so many tokens: what is seen from there stays.
        layers: of the network, ascending, with K and V of their own.
        attention: how each layer of the network attends.
        cache: K and V of these layers.
        pages: the cached windows; None: nothing is cached.
        most_piece: the most tokens of a pass.
        own_ids: the sequences that texts may have; None: all of the cache.
        chunked: whether a query sees those of its own chunk of `window` positions instead.
        most_blocks: the cache may grow to so many where texts see parts of many others; None: it has all.

    Attributes:
        ends: the window of the last multiple of this is kept too, where the text still has it.
    """

    reason = "window"

    def __init__(
        self, window: int, spare: int, layers: Sequence[int], attention: Sequence[LayerAttention | None],
        cache: PagedKvCache, pages: PrefixCache | None, most_piece: int, own_ids: Sequence[int] | None = None,
        chunked: bool = False, most_blocks: int | None = None,
    ) -> None:
        super().__init__(layers, attention, cache)
        self.window, self.pages = window, pages
        self._most_blocks = max(cache.total_blocks, most_blocks or 0)
        self.prefixes = () if pages is None else (pages,)
        self._size, self._most_piece, self.own_ids = cache.block_size, most_piece, own_ids
        self._kept = -(-(window - 1 + spare) // self._size) * self._size  # a fork then shares full blocks alone
        self._spare, self.chunked = self._kept - window + 1, chunked
        self._calls = calls_of(layers, attention)
        self.layers = tuple(self._calls)
        self.ends = 1

    def first_seen(self, pos: int) -> int:
        """The first token that the query at `pos` sees."""
        return pos // self.window * self.window if self.chunked else max(0, pos - self.window + 1)

    def _first_kept(self, computed: int) -> int:
        """The first token that stays of a text of so many tokens: the begin of a block."""
        return self.first_seen(max(0, computed - self._spare)) // self._size * self._size

    # -- a text begins --------------------------------------------------------------------------------------

    def has_room(self, text: Text, found: int, start: CachedStart, running: Sequence[Text]) -> bool:
        size, first, spare = self._size, start.first // self._size, len(running)
        most = self._most_of(sys.maxsize)
        needed = min(-(-text.num_tokens // size) - first, most) - (found // size - first) + spare
        claimed = len(start.blocks) + spare * (most + 1)
        if None in start.parts:  # those texts run before it, one after another at least
            taken, missing = self.part_blocks(text.prefix), self.missing_texts(text, start)
            needed += sum(taken[key] for key in missing) + self._most_of(max(missing.values()))
        for each in (*running, text):
            if each.prefix is not None and each.prefix.parts:
                claimed += sum(self.part_blocks(each.prefix).values())
        if self.has_blocks(self.cache, needed, claimed):
            return True
        idle = 0 if self.pages is None else self.pages.idle_blocks
        return not running and self._grow(needed - self.cache.free_block_count - idle)

    def _most_of(self, num_tokens: int) -> int:
        """The most blocks of a text of so many tokens, in a pass too."""
        size = self._size
        return min(-(-num_tokens // size) + 1, _num_kept(self._kept, size) + -(-self._most_piece // size))

    def _grow(self, blocks: int) -> bool:
        """Add blocks for parts of cached texts, if there may be as many; whether there are."""
        left = self._most_blocks - self.cache.total_blocks
        if not 0 < blocks <= left:
            return False
        try:
            self.cache.grow(min(left, max(blocks, self.cache.total_blocks // 2)))  # a copy of all: few of them
        except MemoryError:
            return False
        return True

    def make_room(self, cache: PagedKvCache, error: OutOfMemoryError) -> bool:
        lacking = error.requested - error.available
        return super().make_room(cache, error) or (bool(self._seen.ids) and self._grow(lacking))

    def expect_parts(self, text: Text, prefix: SeenParts) -> None:
        longest = max((len(each.tokens) for each in prefix.texts), default=0)
        needed = sum(self.part_blocks(prefix).values()) + self._most_of(text.num_tokens) + self._most_of(longest)
        if needed > self._most_blocks:
            raise OutOfMemoryError(needed, self._most_blocks)

    def begin(self, seq_id: int, found: int, start: CachedStart) -> WindowPlace:
        """Start a sequence of the window of `found` tokens.

        Raises:
            InvalidOperationError: `start` lacks tokens that the next query sees.
        """
        if self.first_seen(found) < start.first or start.first + len(start.blocks) * self._size < found:
            raise InvalidOperationError(
                f"share: expected the {found - self.first_seen(found)} tokens before {found} for the layers with a "
                f"window of {self.window}, got {len(start.blocks)} blocks from token {start.first} on"
            )
        self.cache.adopt(seq_id, start.blocks, found - start.first)
        return WindowPlace(start.first, self._seen.adopt(start.parts) if start.parts else ())

    def fork(self, text: Text, index: int, seq_id: int) -> WindowPlace:
        self.cache.fork(text.seq_id, seq_id)
        return WindowPlace(self.first_of(text, index), self._seen.fork(text.places[index].parts))

    def first_of(self, text: Text, index: int) -> int:
        first: int = text.places[index].first
        return first

    # -- parts ----------------------------------------------------------------------------------------------

    def part_ids(self, place: WindowPlace) -> tuple[int, ...]:
        return place.parts

    def with_parts(self, place: WindowPlace, ids: tuple[int, ...]) -> WindowPlace:
        return place._replace(parts=ids)

    def first_needed(self, length: int, gap: int) -> int:
        first = self.first_seen(length + gap)
        return length if first >= length else first // self._size * self._size

    def hold_end(self, tokens: Tokens, gap: int, space: Any, held: ExitStack) -> CachedStart | None:
        return self._hold(tokens, self.first_needed(len(tokens), gap), space, held)

    def keep_end(self, text: Text, index: int) -> None:
        size, stop = self._size, text.computed
        start = stop // size * size
        first = text.places[index].first
        if self.pages is None or not text.shares or first is None or not start < stop <= text.shares_to:
            return
        with suppress(MemoryError):  # of the system: it is not cached then
            blocks = self.cache.block_table(np.array([text.seq_id], np.uint64)).block_ids
            last = blocks[(start - first) // size :]
            if self.cache.reference_counts(last) == 1:
                ((page, name),) = _pages(text.tokens[:stop], size, start // size, text.space)
                self.pages.adopt(filled(page, size), last, name)

    @property
    def window_of_parts(self) -> int:
        return self.window

    def own_sequences(self, texts: Sequence[Text], index: int, ids: Ids, lens: Lens) -> QueriedSequences:
        starts, firsts = np.array([self.first_of(text, index) for text in texts]), None
        if any(text.prefix is not None and len(text.prefix.places) for text in texts):
            found = [self._firsts(text, index, count) for text, count in zip(texts, lens.tolist(), strict=True)]
            firsts = np.concatenate(found)
        return QueriedSequences(ids, lens, starts=starts, firsts=firsts).kept()

    def own_rows(self, texts: Sequence[Text], index: int, ids: Ids) -> Own:
        starts = np.array([self.first_of(text, index) for text in texts])
        return Own(ids, starts, np.concatenate([self._firsts(text, index, 1) for text in texts]))

    def _firsts(self, text: Text, index: int, count: int) -> NDArray[np.int64]:
        """How many of the tokens that a text has in the cache lie before the window of each of its next tokens."""
        first = self.first_of(text, index)
        held = text.places_of(first, text.computed - first + count)
        return np.searchsorted(held, held[len(held) - count :] - self.window + 1)

    # -- a pass ---------------------------------------------------------------------------------------------

    def append(self, texts: Sequence[Text], index: int, ids: Ids, counts: Lens) -> None:
        for text in texts:
            first = self._first_kept(text.computed)
            if first > self.first_of(text, index):
                place = text.places[index]
                text.places = (*text.places[:index], place._replace(first=None), *text.places[index + 1 :])
                self.cache.apply_streaming_llm(text.seq_id, 0, text.computed - first)
                text.places = (*text.places[:index], place._replace(first=first), *text.places[index + 1 :])
        self.append_to(self.cache, ids, counts)

    def attend(self, texts: Sequence[Text], index: int, ids: Ids, lens: Lens) -> tuple[LayerCall, dict[str, Any]]:
        starts = np.array([text.places[index].first for text in texts])
        sequences = QueriedSequences(ids, lens, starts=starts).kept()
        return partial(self.cache.write_and_attend, sequences, self._calls), {}

    # -- going back -----------------------------------------------------------------------------------------

    def loses(self, text: Text, index: int, end: int, chunk: int) -> bool:
        """The last one of several chunks drops what the first one sees."""
        last = (end - 1) // chunk * chunk
        return last > text.computed and self._first_kept(last) > self.first_of(text, index)

    def lacks(self, text: Text, index: int, pos: int) -> str | None:
        first = self.first_of(text, index)
        if not pos or self.first_seen(pos) >= first:
            return None
        least = -(-first // self.window) * self.window if self.chunked else first + self.window - 1
        return (
            f"pos: expected at least {least}, got {pos}: the layers with a window of "
            f"{self.window} keep the tokens from {first} on; go back to 0 or reset, and run the text again"
        )

    def cut(self, text: Text, index: int, pos: int) -> WindowPlace:
        place: WindowPlace = text.places[index]
        first = place.first
        if first is None:
            held = self.cache.get_sequence(text.seq_id)
            assert held is not None
            first = text.computed - held.num_tokens
        self.cache.truncate(text.seq_id, max(0, pos - first))
        first = min(first, pos)  # of an empty sequence: where the next token is its first
        return place if first == place.first else place._replace(first=first)

    # -- cached windows -------------------------------------------------------------------------------------

    def longest(self, tokens: Tokens, stop: int, space: Any) -> int:
        """The longest prefix of at most `stop` tokens whose window is cached; it may end inside a page."""
        if all(self._holds(*page) for page in self._window(tokens, stop, space)):
            return stop
        best = run = 0
        for i, page in enumerate(_pages(tokens[: stop // self._size * self._size], self._size, 0, space), 1):
            run = run + 1 if self._holds(*page) else 0
            if run >= i - self.first_seen(i * self._size) // self._size:
                best = i * self._size
        return best

    def hold(self, tokens: Tokens, stop: int, space: Any, held: ExitStack) -> CachedStart | None:
        return self._hold(tokens[:stop], self._first_page(stop) * self._size, space, held)

    def _hold(self, tokens: Tokens, first: int, space: Any, held: ExitStack) -> CachedStart | None:
        """Hold the pages of tokens from `first` on."""
        blocks = []
        for page, name in _pages(tokens, self._size, first // self._size, space) if first < len(tokens) else ():
            assert self.pages is not None
            session = held.enter_context(self.pages.open_session(page, name))
            if session.num_tokens < len(page):
                return None
            blocks.append(session.shared_blocks[0])
        return CachedStart(len(tokens), first, np.array(blocks, np.int64))

    def keep(self, text: Text, index: int, stop: int, ends: bool = False) -> None:
        """Cache the full pages of the window of the first `stop` tokens, as far as the text has them.

        The window is that of the last of these: a prompt that is cached whole runs it again.
        """
        place = text.places[index].first
        if self.pages is None or not text.shares or place is None:
            return
        size, tokens = self._size, text.tokens[:stop]
        stop = len(tokens) // size * size
        with suppress(MemoryError):  # of the system: they are not cached then
            blocks = self.cache.block_table([text.seq_id]).block_ids
            first = self.first_seen(max(0, min(stop - 1, len(tokens) // self.ends * self.ends))) // size
            pages = _pages(tokens[:stop], size, first, text.space)
            for i, (ids, name) in enumerate(pages, first - place // size):
                if i >= 0:  # after a prefix that ended inside a page, the text may begin a page later
                    self.pages.adopt(ids, blocks[i : i + 1], name)

    def leave(self, tokens: Tokens, start: int, space: Any, at_once: bool) -> None:
        if self.pages is not None:
            leave = self.pages.discard if at_once else self.pages.demote
            for page, name in _pages(tokens, self._size, -(-start // self._size), space):
                leave(page, name)

    # -- tiers ----------------------------------------------------------------------------------------------

    def connect(self, tiers: Tiers, name: Named, index: TierSource) -> WindowSource | None:
        if self.pages is None:
            return None
        source = tiers.window_source(f"{name(self.cache.calibration)}, layers {self.layers}", self.first_seen)
        self.pages.source, self.ends = source, index.format.group_tokens
        return source

    def offered(self, text: Text) -> Sequence[PagesOf]:
        most = min(text.computed, text.shares_to)
        ends = {min(length, most) // self.ends * self.ends for length in (text.num_prompt, most)}
        return [partial(self._pages_of, text.tokens[:end], end, text.space) for end in sorted(ends - {0})]

    def _pages_of(self, tokens: Tokens, stop: int, space: Any, index: PrefixIndex) -> dict[int, int]:
        found = {}
        for number, (page, name) in enumerate(self._window(tokens, stop, space), self._first_page(stop)):
            match = index.find(page, name)
            if match.length < self._size:
                return {}
            found[number] = int(match.pages[0])
        return found

    def take(self, tokens: Tokens, stop: int, space: Any, bodies: dict[int, memoryview]) -> None:
        assert self.pages is not None
        source = self.pages.source
        assert isinstance(source, WindowSource)
        for number, (page, name) in enumerate(self._window(tokens, stop, space), self._first_page(stop)):
            if number in bodies:
                source.arrived = {name: bodies[number]}
                with self.pages.open_again(page, name):
                    source.arrived = {}

    def _first_page(self, stop: int) -> int:
        return self.first_seen(stop) // self._size

    def _window(self, tokens: Tokens, stop: int, space: Any) -> Iterator[tuple[Tokens, Hashable]]:
        return _pages(tokens[:stop], self._size, self._first_page(stop), space)

    def _holds(self, page: Tokens, name: Hashable) -> bool:
        return self.pages is not None and self.pages.peek(page, name) == len(page)

    # -- reports --------------------------------------------------------------------------------------------

    def positions(self, text: Text, index: int, layer: int, head: int | None) -> NDArray[np.int64]:
        first = self.first_of(text, index)
        own = text.places_of(first, text.computed - first)
        parts = [self._seen.stored[each][1] for each in text.places[index].parts if each != MISSING]
        return np.sort(np.concatenate([*parts, own])) if parts else own

    def check(self, texts: Sequence[Text], index: int) -> None:
        cache = self.cache
        cache.check()
        _, claimed = self.check_parts(texts, index)
        for text in texts:
            first, held = text.places[index].first, cache.get_sequence(text.seq_id)
            assert held is not None, f"{text}: its window of {self.window} is gone"
            assert first is not None, f"{text}: where its window of {self.window} begins is not known"
            assert held.num_tokens == text.computed - first, f"{text}: {held.num_tokens} tokens from {first} on"
            assert 0 <= first <= self.first_seen(text.computed), f"{text}: its window of {self.window} has left"
            assert first % cache.block_size == 0, f"{text}: {first} begins no block"
            claimed.update(int(block) for block in held.block_ids)
        for pages in self.prefixes:
            pages.check()
            assert self.own_ids is not None or pages.pinned_blocks == 0, f"window {self.window}: pages are held"
            idle, free = pages.idle_blocks, cache.free_block_count
            assert free + idle + len(claimed) == cache.total_blocks or self.own_ids is not None, (
                f"window {self.window}: {free} free, {len(claimed)} claimed and {idle} cached blocks are not all of "
                f"{cache.total_blocks}"
            )


def _pages(tokens: Tokens, size: int, first: int, space: Any) -> Iterator[tuple[Tokens, Hashable]]:
    """The pages of `tokens` from page `first` on, the last one perhaps in part, each with its namespace."""
    before = blake2b(tokens[: first * size].tobytes(), digest_size=32)
    for start in range(first * size, len(tokens), size):
        page = tokens[start : start + size]
        yield page, (space, before.digest())
        before.update(page.tobytes())


def _of(made: CacheArguments, left: Sequence[int]) -> list[tuple[int, ...]]:
    """The layers with a window, by their sizes.

    Layers that see all positions and have other sizes than the first such layer have a window of all positions. Where
    tokens see later ones a text runs whole, and keeps all of them.
    """
    if not is_causal(made.model):
        return []
    whole, found = None, dict[tuple[Any, ...], tuple[int, ...]]()
    for layer in left:
        each = made.attention_of(layer)
        sizes = each.num_kv_heads or 0, each.head_dim or 0, each.latent or 0
        if made.has_kv(layer) and each.window is None and sizes == (whole or sizes):
            whole = sizes
        elif made.has_kv(layer):
            own = made.window_of(layer), each.chunked, *sizes
            found[own] = (*found.get(own, ()), layer)
    return [found[sizes] for sizes in sorted(found)]


def _num_blocks(made: CacheArguments, window: int, blocks: int, cached: int) -> int:
    """The blocks of a window's cache; see `LayerKind.nbytes`.

    There is room for the windows of all texts that run, the pieces of a pass, and some cached pages. With many texts
    there are never more than `blocks`, so that a window takes no more memory than all tokens would.
    """
    load, size, kept = made.load, made.block_size, window - 1 + made.load.spare
    piece = -(-load.piece // size) + 1
    if load.texts:
        return min(blocks, load.texts * _num_kept(kept, size) + piece + num_pages(kept, size, blocks, 16))
    most = 2 * (-(-made.model.config.max_position_embeddings // size) + 1)
    return min(2 * (_num_kept(kept, size) + piece), most) + num_pages(kept, size, cached)


def _nbytes(made: CacheArguments, layers: Sequence[int], blocks: int, cached: int) -> int:
    return _num_blocks(made, made.window_of(layers[0]), blocks, cached) * made.block_bytes(layers)


def _most_blocks(made: CacheArguments, layers: Sequence[int], blocks: int, cached: int) -> int:
    """The blocks to which a window's cache may grow for parts of cached texts: all that the counted layers have more.

    With a limit of memory as many as it leaves: windows of several sizes may grow by the same number, all at once.
    """
    own = _num_blocks(made, made.window_of(layers[0]), blocks, cached)
    limit = made.max_memory_bytes if made.cached_limit is None else made.cached_limit
    if limit is None:
        return own + blocks
    left = as_memory(limit, "max_memory_bytes") - made.kv_bytes(blocks, cached)
    return own + max(0, min(blocks, left // sum(map(made.block_bytes, made.layers["window"]))))


def _make(made: CacheArguments, layers: Sequence[int], blocks: int, cached: int | None) -> WindowLayers:
    window, load, pages = made.window_of(layers[0]), made.load, None
    chunked = made.attention_of(layers[0]).chunked
    cache = made.make_cache(**made.options(layers, _num_blocks(made, window, blocks, cached or 0)))
    if made.shares(cached):
        most = None if cached is None else num_pages(window - 1 + load.spare, made.block_size, cached)
        pages = PrefixCache.over(cache, most)
    own_ids = None if load.texts else (0, 1)
    return WindowLayers(
        window, load.spare, layers, made.attention, cache, pages, load.piece, own_ids, chunked,
        _most_blocks(made, layers, blocks, cached or 0),
    )


WINDOW = LayerKind("window", _of, _nbytes, _make)
