"""`Group`: layers that keep tokens in one way, and the verbs that the pool calls on each kind of them.

    whole       0 1 2 3 4 5 6 7 8 9      every token                            whole.py
    window      . . . . . . 6 7 8 9      the newest ones                        window.py
    evicting    0 . . 3 . . . 7 . 9      what a policy keeps, each layer its own evicting.py
    state                        10      numbers that all tokens made            state.py

One verb serves many texts and one alone. A text has one sequence id in all groups, and in `Text.places` what each group
knows of it beside that: a tuple, so that a text changes in one step. `Pool` calls the verbs of all groups in turn:

    admission   has_room, begin            a text gets a sequence, perhaps of a cached prefix
    a pass      append, attend, ran        room for tokens, the network's attention, what no later query reads leaves
    going back  nearest, expect, loses, fork, cut   rollback, wrong drafts, after an exception
    sharing     longest, hold, keep        where a text can continue behind cached tokens
    the end     free, settle
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.core.attention_call import AttentionCall
from kvcache.core.kvrows import KvRows
from kvcache.errors import OutOfMemoryError
from kvcache.networks.protocols import Attend, LayerAttention
from kvcache.paged.cache import PagedKvCache
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.texts.text import Text, Tokens

__all__ = [
    "CachedStart", "Group", "Ids", "LayerCall", "Lens", "append_within", "calls_of", "free_blocks",
    "free_within", "has_blocks", "settle_within",
]

Ids = NDArray[np.uint64]
Lens = NDArray[np.int64]
# `(layer, queries, keys, values, sink_queries)` of the network's layer, to its outputs.
LayerCall = Attend
Rows = Sequence[KvRows]
Reclaim = Callable[[OutOfMemoryError], bool]


class CachedStart(NamedTuple):
    """Cached tokens of a prefix, held for a text that is about to begin.

    Attributes:
        stop: how many tokens of the text they are.
        first: the text position of the first token in `blocks`, a multiple of the block size.
        blocks: the blocks of the tokens from there on, `(n,)`.
        rows, firsts: K and V of each layer that the text reads in f16: those of its last group, and its sink tokens.
        parting: after how many tokens the next such text could continue, if these were kept; 0: nothing is missing.
        cached: tokens that are cached of the text, at least `stop`.
    """

    stop: int
    first: int = 0
    blocks: NDArray[np.int64] = np.empty(0, np.int64)
    rows: Rows = ()
    firsts: Rows = ()
    parting: int = 0
    cached: int = 0


class Group(Protocol):
    """Layers that keep tokens in one way.

    Attributes:
        layers: of the network, ascending; those that read K and V of another one are in its group.
        caches: the paged caches of K and V.
        prefixes: the prefix caches over these, of what `longest` and `hold` find.
        reclaim: called with the OutOfMemoryError where there are too few blocks; whether it has freed some.
        reason: what `miss_reasons` calls a miss of this group.
    """

    reclaim: Reclaim | None

    @property
    def reason(self) -> str: ...

    @property
    def layers(self) -> Sequence[int]: ...
    @property
    def caches(self) -> Sequence[PagedKvCache]: ...
    @property
    def prefixes(self) -> Sequence[PrefixCache]: ...

    def blocks_for(self, num_tokens: int) -> int:
        """The blocks of `num_tokens` tokens; 0: a text has room for all that it may keep."""
        ...

    @property
    def total_blocks(self) -> int:
        """Blocks in all."""
        ...

    def count(self) -> dict[str, int]:
        """How many blocks are "free", "claimed" and "cached"."""
        ...

    def has_room(self, text: Text, found: int, start: CachedStart, running: Sequence[Text]) -> bool:
        """Whether all tokens of a text have room behind its first `found`, which `start` has, beside those that run."""
        ...

    def begin(self, seq_id: int, found: int, start: CachedStart) -> Any:
        """Start a sequence of `found` cached tokens, which are shared, not copied; returns its place."""
        ...

    def append(self, texts: Sequence[Text], index: int, ids: Ids, counts: Lens) -> None:
        """Make room for new tokens of texts, all or nothing; drops what no query from the next token on reads.

        Args:
            index: which of `Text.places` is this group's.

        Raises:
            OutOfMemoryError: there are too few blocks.
        """
        ...

    def attend(self, texts: Sequence[Text], index: int, ids: Ids, lens: Lens) -> tuple[LayerCall, dict[str, Any]]:
        """The attention of these layers for one pass over the next `lens` tokens; keyword arguments of the network."""
        ...

    def ran(self, text: Text, index: int, before: int) -> None:
        """Pack or evict what no query from `text.computed` on reads; the tokens from `before` on have run."""
        ...

    def loses(self, text: Text, index: int, end: int, chunk: int) -> bool:
        """Whether running the text up to `end`, in chunks, drops what a rollback to `text.computed` needs."""
        ...

    def compact(self, text: Text, index: int) -> None:
        """Free blocks that a text does not need."""
        ...

    def expect_room(self, text: Text, index: int, pos: int, count: int, beside: bool) -> None:
        """Raise OutOfMemoryError unless a text that is cut to `pos` has room for `count` more tokens.

        Args:
            beside: a copy of the text keeps its tokens meanwhile.
        """
        ...

    def nearest(self, text: Text, index: int, pos: int) -> int:
        """The last position, at most `pos`, from which a text can run on; that of other groups is `pos`."""
        ...

    def expect(self, text: Text, index: int, pos: int) -> None:
        """Raise InvalidOperationError if a token that the query at `pos` reads has left."""
        ...

    def cut(self, text: Text, index: int, pos: int) -> Any:
        """Cut the sequence of a text to `pos` tokens, which `expect` allows; returns the place then."""
        ...

    def fork(self, text: Text, index: int, seq_id: int) -> Any:
        """Start a sequence that shares all that a text has; returns its place."""
        ...

    def free(self, seq_id: int, place: Any) -> None:
        """End a sequence; nothing, if there is none."""
        ...

    def settle(self, texts: Sequence[Text], index: int) -> list[Text]:
        """Free sequences that no text has, and cut the others to what was computed; the texts that have lost theirs."""
        ...

    def longest(self, tokens: Tokens, stop: int, space: Any) -> int:
        """The longest prefix of at most `stop` tokens after which this group can go on, as far as is cached."""
        ...

    def hold(self, tokens: Tokens, stop: int, space: Any, held: ExitStack, again: bool) -> CachedStart | None:
        """Hold what a text needs to go on after `stop` tokens, until `held` closes; None: it is not there.

        The first group of a pool, which has the index, may return fewer tokens.

        Args:
            again: whether the text has been looked up before.
        """
        ...

    def keep(self, text: Text, index: int, stop: int, ends: bool = False) -> None:
        """Cache what another text needs to go on after the first `stop` tokens, as far as it is there.

        Args:
            ends: whether these are all tokens that the text has computed, and it is about to lose its sequence.
        """
        ...

    def positions(self, text: Text, index: int, layer: int, head: int | None) -> NDArray[np.int64]:
        """The text positions of the tokens whose K and V a KV head of a layer has, ascending; None: any head."""
        ...

    def memory(self, texts: Sequence[Text], index: int) -> list[dict[str, int]]:
        """Reports of bytes, whose sum is the group's."""
        ...

    def check(self, texts: Sequence[Text], index: int) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        ...


def calls_of(
    layers: Sequence[int], attention: Sequence[LayerAttention | None], return_lse: bool = False,
    top_tokens: int | None = None,
) -> dict[int, tuple[int, AttentionCall, bool]]:
    """For each layer that reads K and V of one of these: which of them, how it attends, and whether it writes them."""
    number_of = {layer: i for i, layer in enumerate(layers)}
    return {
        layer: (number_of[owner], each.call(return_lse, top_tokens), owner == layer)
        for layer, each in enumerate(attention)
        if each is not None and (owner := layer if each.kv_layer is None else each.kv_layer) in number_of
    }


def append_within(cache: PagedKvCache, ids: Ids, counts: Lens, reclaim: Reclaim) -> None:
    """Append to many sequences; frees blocks by `reclaim` as far as that needs it and can."""
    while True:
        try:
            cache.append_batch(ids, counts)
            return
        except OutOfMemoryError as error:
            if not reclaim(error):
                raise


def free_blocks(
    cache: PagedKvCache, prefixes: PrefixCache | None, reclaim: Reclaim | None, error: OutOfMemoryError
) -> bool:
    """Whether blocks were freed that an append lacked: by eviction of cached ones, by another thread, by `reclaim`."""
    if prefixes is not None and prefixes.evict(error.requested - error.available):
        return True
    if cache.free_block_count > error.available:
        return True
    return reclaim is not None and reclaim(error)


def has_blocks(
    cache: PagedKvCache, prefixes: Iterable[PrefixCache], needed: int, claimed: int, promised: int = 0
) -> bool:
    """Whether `needed` blocks are free, or would be if all that no sequence refers to were evicted.

    Args:
        claimed: the most blocks that have other references, or will have. Where that is enough to know, none are
            counted.
        promised: the number of these that are not taken yet.
    """
    free = cache.free_block_count
    if needed + promised <= free or needed <= cache.total_blocks - claimed:
        return True
    return needed + promised - free <= sum(each.idle_blocks for each in prefixes)


def free_within(cache: PagedKvCache, seq_id: int) -> None:
    """End a sequence, if there is one."""
    if seq_id in cache:
        cache.free(seq_id)


def settle_within(cache: PagedKvCache, owned: set[int], ids: Iterable[int] | None) -> None:
    """Free the sequences of a cache that are not `owned`; `ids` are those that may be freed, None: all."""
    for each in cache.sequence_ids() if ids is None else ids:
        if int(each) not in owned and int(each) in cache:
            cache.free(int(each))
