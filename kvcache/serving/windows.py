"""Layers with a window, of all texts that run: pools of their own, which hold little more than the newest tokens.

As `kvcache.engine.windows` has it for one text: layers of one window form a group with a pool of blocks, and blocks
before the window leave it while a text runs. A text has the same sequence id in each pool. `Work.firsts` says which of
its tokens is the first one that a group still has.

Windows stay cached where prompts and texts end, where a text gives up its sequence, where two texts part, and where
another one waits for a prefix of this one. A text continues at the longest prefix whose windows are there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.calibration.residual import AttendPiece
from kvcache.core.arguments import as_bytes
from kvcache.core.memory import total
from kvcache.core.store import BlockStore
from kvcache.engine.cached_windows import CachedWindows
from kvcache.engine.windows import LayerGroups, Pages, Place, WindowLayers
from kvcache.networks.protocols import Float32, Model, layer_attention
from kvcache.paged.cache import PagedKvCache
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.serving.budget import MOST
from kvcache.serving.work import Work

__all__ = ["WindowPools", "num_blocks_with_windows", "num_window_blocks"]

_SHARE = 16  # blocks of the layers that keep all tokens per cached page of a window, beside what running texts need


def num_window_blocks(kept: int, block_size: int, blocks: int, max_running: int) -> int:
    """The blocks of a group's pool beside `blocks` of the layers that keep all tokens.

    There is room for the windows of `max_running` texts, the piece of a step, and some cached pages; never more than
    `blocks`, so that a network with windows takes no more memory than one without.

    Args:
        kept: tokens of a text that stay.
    """
    each = _num_kept(kept, block_size)
    return min(blocks, max_running * each + -(-MOST // block_size) + 1 + max(2 * each, blocks // _SHARE))


def _num_kept(kept: int, block_size: int) -> int:
    """The most blocks that a group has between two steps for `kept` tokens of a text, and one that a token begins."""
    return -(-kept // block_size) + 2


def num_blocks_with_windows(
    num_blocks: int | None, max_memory_bytes: int | str, groups: LayerGroups, spare: int, max_running: int, most: int,
    settings: Callable[[Sequence[int]], tuple[Any, ...]],
) -> int:  # fmt: skip
    """As `num_blocks_within`, where groups of layers with windows have pools too, within the same bytes.

    Args:
        spare: tokens before a window that stay.
        most: the most blocks that all texts can use.
        settings: those of the `BlockStore` of some layers, from the block size on.

    Raises:
        ValueError: the bytes are too few for one block.
    """
    limit = as_bytes(max_memory_bytes, "max_memory_bytes")

    def block_bytes(layers: Sequence[int]) -> int:
        return BlockStore(len(layers), 0, *settings(layers)).block_bytes

    block_size, size = settings(groups.whole)[0], block_bytes(groups.whole)
    pages = [(group.window + spare, block_bytes(group.layers)) for group in groups.windows]

    def needed(blocks: int) -> int:
        return blocks * size + sum(
            num_window_blocks(kept, block_size, blocks, max_running) * each for kept, each in pages
        )

    if limit < needed(1):
        raise ValueError(f"max_memory_bytes: expected at least {needed(1)}, the bytes of one block, got {limit}")
    count = bisect_right(range(most + 1), limit, key=needed) - 1
    return count if num_blocks is None else min(count, num_blocks)


def has_room(cache: PagedKvCache, prefixes: PrefixCache, needed: int, claimed: int) -> bool:
    """Whether so many blocks are free, or would be if all that no sequence refers to were evicted.

    Args:
        claimed: at most so many blocks have other references. Where that is enough to know, none are counted.
    """
    free = cache.free_block_count
    return needed <= free or needed <= cache.total_blocks - claimed or needed - free <= prefixes.idle_blocks


class WindowPools:
    """All groups of layers with a window; there may be none.

    Args:
        groups: each with the pool of its blocks.
        spare: tokens before a window that stay.

    Attributes:
        cached: the windows of prefixes.
    """

    def __init__(self, groups: Sequence[WindowLayers] = (), spare: int = 0) -> None:
        self.groups, self.cached, self._spare = tuple(groups), CachedWindows(groups, None), spare
        self._places = [
            {layer: (own, group.attention[layer].options()) for own, layer in enumerate(group.layers)}
            for group in self.groups
        ]

    @classmethod
    def of(
        cls, plan: LayerGroups, spare: int, model: Model, blocks: int, block_size: int, max_running: int,
        make_cache: Callable[..., PagedKvCache],
    ) -> WindowPools:  # fmt: skip
        """The groups of a network, beside `blocks` of the layers that keep all tokens.

        Args:
            make_cache: `make_cache(num_blocks=, layers=)` makes a cache of some layers in the engine's formats.
        """
        attention, groups = layer_attention(model), []
        for group in plan.windows:
            num_blocks = num_window_blocks(group.window + spare, block_size, blocks, max_running)
            cache = make_cache(num_blocks=num_blocks, layers=group.layers)
            groups.append(WindowLayers(group.window, group.layers, attention, cache))
        return cls(groups, spare)

    def __contains__(self, layer: int) -> bool:
        return any(layer in places for places in self._places)

    # -- texts begin and end --------------------------------------------------------------------------------

    @contextmanager
    def hold(self, work: Work, stop: int) -> Iterator[tuple[int, list[Pages]]]:
        """The longest prefix of at most `stop` tokens of a work whose windows are cached; their pages, held."""
        with self.cached.hold(work.tokens, stop, work.space) as found:
            yield found

    def have_room(self, num_tokens: int, found: int, pages: Sequence[Pages], spare: int) -> bool:
        """Whether a text of `num_tokens` may begin after its first `found`, whose windows lie in `pages`."""
        for group, cache, each in zip(self.groups, self.cached.caches, pages, strict=True):
            size = group.cache.block_size
            first = each.first // size
            most = _num_kept(group.window + self._spare, size) + -(-MOST // size)
            needed = min(-(-num_tokens // size) - first, most) - (found // size - first)
            if not has_room(group.cache, cache, needed + spare, len(each.blocks) + spare * (most + 1)):
                return False
        return True

    def start(self, work: Work, seq_id: int, found: int, pages: Sequence[Pages]) -> None:
        """Give a work a sequence in each pool, of the windows before token `found`."""
        for group, each in zip(self.groups, pages, strict=True):
            if len(each.blocks):
                group.cache.adopt(seq_id, each.blocks, found - each.first)
            else:
                group.cache.allocate(seq_id, 0)
        work.firsts = tuple(each.first for each in pages)

    def fork(self, leader: Work, follower: Work, seq_id: int) -> None:
        """Give a follower the windows of its leader."""
        for group in self.groups:
            group.cache.fork(leader.seq_id, seq_id)
        follower.firsts = leader.firsts

    def free(self, seq_id: int) -> None:
        """Free a sequence in each pool that has it."""
        for group in self.groups:
            if seq_id in group.cache:
                group.cache.free(seq_id)

    # -- while they run -------------------------------------------------------------------------------------

    def slide(self, work: Work) -> None:
        """Free the blocks of a work that no query from its next token on sees."""
        for i, group in enumerate(self.groups):
            size, firsts = group.cache.block_size, work.firsts
            assert firsts is not None
            kept = -(-(group.window + self._spare) // size) * size
            first = max(0, work.computed - kept) // size * size
            if first > firsts[i]:
                work.firsts = None  # for `mend`: nobody knows until the next line but one
                group.cache.apply_streaming_llm(work.seq_id, 0, work.computed - first)
                work.firsts = (*firsts[:i], first, *firsts[i + 1 :])

    def truncate(self, work: Work) -> None:
        """Cut a work to what was computed."""
        for group, first in zip(self.groups, work.firsts or (), strict=True):
            group.cache.truncate(work.seq_id, work.computed - first)

    def keep(self, work: Work, stop: int) -> None:
        """Cache the windows of the first `stop` tokens of a work, as far as it has them."""
        if work.shares and work.firsts is not None and self.groups:
            places = [Place(work.seq_id, first) for first in work.firsts]
            with suppress(MemoryError):  # of the system: they are not cached then
                self.cached.keep(work.tokens[:stop], places, work.space)

    def pieces(self, works: Sequence[Work], seq_ids: NDArray[np.uint64], lens: Any) -> dict[int, AttendPiece]:
        """For each layer with a window the `attend` of pieces of `lens` tokens, for which there is room."""
        attends: dict[int, AttendPiece] = {}
        for i, group in enumerate(self.groups):
            starts = np.array([0 if work.firsts is None else work.firsts[i] for work in works])
            attend = self._piece(group.cache, self._places[i], starts, seq_ids, lens)
            attends |= dict.fromkeys(group.layers, attend)
        return attends

    @staticmethod
    def _piece(
        cache: PagedKvCache, places: dict[int, tuple[int, Any]], starts: NDArray[np.int64],
        seq_ids: NDArray[np.uint64], lens: Any,
    ) -> AttendPiece:  # fmt: skip
        def attend(layer: int, queries: Float32, keys: Float32, values: Float32) -> Float32:
            own, options = places[layer]
            cache.write_ragged(own, seq_ids, lens, keys, values)
            mixed: Float32 = cache.attention(own, queries, seq_ids, query_lens=lens, starts=starts, **options)
            return mixed

        return attend

    # -- after an exception, and reports --------------------------------------------------------------------

    def lost(self, work: Work) -> bool:
        """Whether a work that runs has lost a window."""
        return work.firsts is None or not all(work.seq_id in group.cache for group in self.groups)

    def settle(self, running: Sequence[Work]) -> None:
        """Free sequences that no work has, and cut the others to what was computed."""
        owned = {work.seq_id for work in running}
        for group in self.groups:
            for each in group.cache.sequence_ids():
                if int(each) not in owned:
                    group.cache.free(each)
        for work in running:
            self.truncate(work)

    def memory(self) -> dict[str, int]:
        """Bytes of K and V, "kv", of "bookkeeping" and of "scratch"."""
        return total(*[group.cache.memory() for group in self.groups], self.cached.memory())

    def check(self, running: Sequence[Work]) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        self.cached.check()
        for i, (group, cached) in enumerate(zip(self.groups, self.cached.caches, strict=True)):
            cache, claimed = group.cache, set[int]()
            cache.check()
            assert cached.pinned_blocks == 0, f"window {group.window}: pages are held that no work uses"
            ids = [int(each) for each in cache.sequence_ids()]
            assert ids == sorted(work.seq_id for work in running), f"window {group.window}: {ids} are not the works"
            for work in running:
                first, held = (work.firsts or (-1,) * len(self.groups))[i], cache.get_sequence(work.seq_id)
                assert held is not None, f"{work}: its window of {group.window} is gone"
                assert held.num_tokens == work.computed - first, f"{work}: {held.num_tokens} tokens from {first} on"
                assert 0 <= first <= group.first_seen(work.computed), f"{work}: its window of {group.window} has left"
                assert first % cache.block_size == 0, f"{work}: {first} begins no block"
                claimed.update(int(block) for block in held.block_ids)
            idle, free = cached.idle_blocks, cache.free_block_count
            assert free + idle + len(claimed) == cache.total_blocks, (
                f"window {group.window}: {free} free, {len(claimed)} claimed and {idle} cached blocks are not all of "
                f"{cache.total_blocks}"
            )
