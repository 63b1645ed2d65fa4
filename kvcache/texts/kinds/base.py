"""`Layers`: layers that keep tokens in one way, and the verbs that the pool calls on each group of them.

One verb serves many texts and one alone. A text has one sequence id in all groups, and in `Text.places` what each group
knows of it beside that: a tuple, so that a text changes in one step. `Pool` calls the verbs of all groups in turn:

    admission   has_room, begin            a text gets a sequence, perhaps of a cached prefix
    a pass      append, attend, ran        room for tokens, the network's attention, what no later query reads leaves
    going back  nearest, lacks, loses, fork, cut   rollback, wrong drafts, after an exception
    sharing     longest, hold, keep        where a text can continue behind cached tokens
    tiers       connect, offered, take     what a text needs there behind its blocks
    the end     free, settle

A kind defines what it does; what most kinds do not do, or do alike, stands here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.core.attention_call import AttentionCall
from kvcache.core.calibration import Calibration
from kvcache.errors import OutOfMemoryError, SpillError
from kvcache.networks.protocols import Attend, LayerAttention
from kvcache.paged.cache import PagedKvCache
from kvcache.prefix.index.prefix_index import PrefixIndex
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.texts.block_index import BlockIndex, CachedStart
from kvcache.texts.cache_arguments import CacheArguments
from kvcache.texts.text import Text, Tokens
from kvcache.tiers.source import TierSource
from kvcache.tiers.tiers import Tiers
from kvcache.tiers.windows import WindowSource

if TYPE_CHECKING:
    from kvcache.texts.kinds.part_sequences import PartRows

__all__ = ["Ids", "LayerCall", "LayerKind", "Layers", "Lens", "Named", "PagesOf", "calls_of"]

_SHARE = 16  # cached blocks leave a full disk by this part of all blocks at a time
Ids = NDArray[np.uint64]
Lens = NDArray[np.int64]
# `(layer, queries, keys, values, sink_queries)` of the network's layer, to its outputs.
LayerCall = Attend
Named = Callable[[Calibration | None], str]
# The blocks behind a prefix by their page in tiers, of their index, whose lock is held; empty unless all are cached.
PagesOf = Callable[[PrefixIndex], dict[int, int]]


class Layers(ABC):
    """Layers that keep tokens in one way.

    Attributes:
        layers: of the network, ascending; those that read K and V of another one are in its group.
        caches: the paged caches of K and V.
        prefixes: the prefix caches that `longest` and `hold` search, in the order of saved files.
        index: finds cached prefixes by the blocks of these layers; None: they name none.
        reason: what `miss_reasons` calls a text that begins early because these layers lack what it needs; empty: they
            need nothing beside the blocks of the index.
        is_counted: whether their blocks bound how many tokens there are in all; those of one group of a pool do.
        exact: whether texts go on from kept places alone; these are then kept where texts end.
        unit: these places are multiples of this.
        pages: the prefix cache whose blocks are those of `caches`, evicted where a sequence needs them.
        own_ids: the ids of sequences that may be of texts; None: all of the caches.
        held: the ids of sequences that a call holds, beside those of texts.
        reclaim: called with the OutOfMemoryError where there are too few blocks; whether it has freed some.
    """

    layers: Sequence[int] = ()
    caches: Sequence[PagedKvCache] = ()
    prefixes: Sequence[PrefixCache] = ()
    pages: PrefixCache | None = None
    index: BlockIndex | None = None
    reason = ""
    is_counted = False
    exact = False
    unit = 1
    own_ids: Sequence[int] | None = None
    held: set[int] = set()  # noqa: RUF012  of kinds that hold none
    reclaim: Callable[[OutOfMemoryError], bool] | None = None

    def blocks_for(self, num_tokens: int) -> int:
        """The blocks of `num_tokens` tokens, if they are counted; 0: a text has room for all that it may keep."""
        return 0

    @property
    def total_blocks(self) -> int:
        """Blocks in all, if they are counted."""
        return 0

    def count(self) -> dict[str, int]:
        """How many blocks are "free", "claimed" and "cached", if they are counted."""
        return {}

    @abstractmethod
    def has_room(self, text: Text, found: int, start: CachedStart, running: Sequence[Text]) -> bool:
        """Whether all tokens of a text have room behind its first `found`, which `start` has, with those that run."""

    @abstractmethod
    def begin(self, seq_id: int, found: int, start: CachedStart) -> Any:
        """Start a sequence of `found` cached tokens, which are shared, not copied; returns its place."""

    # -- a pass ---------------------------------------------------------------------------------------------

    def append(self, texts: Sequence[Text], index: int, ids: Ids, counts: Lens) -> None:
        """Make room for new tokens of texts, all or nothing; drops what no query from the next token on reads.

        Args:
            index: which of `Text.places` is this group's.

        Raises:
            OutOfMemoryError: there are too few blocks.
        """

    @abstractmethod
    def attend(self, texts: Sequence[Text], index: int, ids: Ids, lens: Lens) -> tuple[LayerCall, dict[str, Any]]:
        """The attention of these layers for one pass over the next `lens` tokens; keyword arguments of the network."""

    def attend_behind(
        self, texts: Sequence[Text], index: int, ids: Ids, lens: Lens, rows: PartRows | None
    ) -> LayerCall:
        """The same where some texts stand behind something: `rows` see parts of cached texts; None: no row does."""
        return self.attend(texts, index, ids, lens)[0]

    def ran(self, text: Text, index: int, before: int) -> None:
        """Pack or evict what no query from `text.computed` on reads; the tokens from `before` on have run."""

    def compact(self, text: Text, index: int) -> None:
        """Free blocks that a text does not need."""

    def expect_room(self, text: Text, index: int, pos: int, count: int, beside: bool) -> None:
        """Raise OutOfMemoryError unless a text that is cut to `pos` has room for `count` more tokens.

        Args:
            beside: a copy of the text keeps its tokens meanwhile.
        """

    # -- going back -----------------------------------------------------------------------------------------

    def loses(self, text: Text, index: int, end: int, chunk: int) -> bool:
        """Whether running the text up to `end`, in chunks, drops what a rollback to `text.computed` needs."""
        return False

    def nearest(self, text: Text, index: int, pos: int) -> int:
        """The last position, at most `pos`, from which a text can run on."""
        return pos

    def lacks(self, text: Text, index: int, pos: int) -> str | None:
        """The message of an error if a token that the query at `pos` reads has left; None: all are there."""
        return None

    @abstractmethod
    def cut(self, text: Text, index: int, pos: int) -> Any:
        """Cut the sequence of a text to `pos` tokens, where it lacks nothing; returns the place then."""

    @abstractmethod
    def fork(self, text: Text, index: int, seq_id: int) -> Any:
        """Start a sequence that shares all that a text has; returns its place."""

    def free(self, seq_id: int, place: Any) -> None:
        """End a sequence, if there is one."""
        for cache in self.caches:
            if seq_id in cache:
                cache.free(seq_id)

    def settle(self, text: Text | None, index: int) -> bool:
        """Free all sequences but that of a text, which is cut to what was computed; whether it has one."""
        self.free_others(() if text is None else (text.seq_id,))
        if text is None or not all(text.seq_id in cache for cache in self.caches):
            return False
        place = self.cut(text, index, text.computed)
        text.places = (*text.places[:index], place, *text.places[index + 1 :])
        self.ran(text, index, 0)
        return True

    def free_others(self, kept: Collection[int]) -> None:
        """Free the sequences of the caches that are not `kept`."""
        for cache in self.caches:
            for each in map(int, cache.sequence_ids() if self.own_ids is None else self.own_ids):
                if each not in kept and each in cache:
                    cache.free(each)

    # -- cached prefixes ------------------------------------------------------------------------------------

    def longest(self, tokens: Tokens, stop: int, space: Any) -> int:
        """The longest prefix of at most `stop` cached tokens after which this group can go on."""
        return stop

    def hold(self, tokens: Tokens, stop: int, space: Any, held: ExitStack) -> CachedStart | None:
        """Hold what a text needs to go on after `stop` tokens, until `held` closes; None: it is not there."""
        return CachedStart(stop)

    def keep(self, text: Text, index: int, stop: int, ends: bool = False) -> None:
        """Cache what another text needs to go on after the first `stop` tokens, as far as it is there.

        Args:
            ends: whether these are all tokens that the text has computed, and it is about to lose its sequence.
        """

    def leave(self, tokens: Tokens, start: int, space: Any, at_once: bool) -> None:
        """Let what is cached of a text alone, behind its first `start` tokens, leave before all else; or now."""

    # -- tiers ----------------------------------------------------------------------------------------------

    def connect(self, tiers: Tiers, name: Named, index: TierSource) -> WindowSource | None:
        """Take from tiers what texts need behind their blocks; returns the source of its pages. None: there are none.

        Args:
            name: names all that K and V depend on, with the calibration of a cache.
            index: the source of the blocks.
        """
        return None

    def offered(self, text: Text) -> Sequence[PagesOf]:
        """The prefixes of a text, ascending, whose pages go into tiers when it ends."""
        return ()

    def take(self, tokens: Tokens, stop: int, space: Any, bodies: dict[int, memoryview]) -> None:
        """Cache what has arrived from tiers for a text that goes on after `stop` tokens, by pages."""

    # -- reports --------------------------------------------------------------------------------------------

    @abstractmethod
    def positions(self, text: Text, index: int, layer: int, head: int | None) -> NDArray[np.int64]:
        """The text positions of the tokens whose K and V a KV head of a layer has, ascending; None: any head."""

    def memory(self, texts: Sequence[Text], index: int) -> list[dict[str, int]]:
        """Reports of bytes, whose sum is the group's."""
        own: list[PagedKvCache | PrefixCache] = [*self.caches, *self.prefixes]
        return [each.memory() for each in own]

    @abstractmethod
    def check(self, texts: Sequence[Text], index: int) -> None:
        """Verify the invariants; AssertionError says what is wrong."""

    # -- blocks, for the kinds ------------------------------------------------------------------------------

    def append_to(self, cache: PagedKvCache, ids: Ids, counts: Lens) -> None:
        """Append to many sequences; makes room as far as that is needed and possible."""
        while True:
            try:
                cache.append_batch(ids, counts)
                return
            except OutOfMemoryError as error:
                if not self.make_room(cache, error):
                    raise
            except SpillError as error:
                if not error.is_full or self.pages is None or not self.pages.evict(cache.total_blocks // _SHARE + 1):
                    raise

    def make_room(self, cache: PagedKvCache, error: OutOfMemoryError) -> bool:
        """Whether blocks were freed that an append lacked: cached ones, by another thread, by `reclaim`."""
        if self.pages is not None and self.pages.evict(error.requested - error.available):
            return True
        return cache.free_block_count > error.available or (self.reclaim is not None and self.reclaim(error))

    def has_blocks(self, cache: PagedKvCache, needed: int, claimed: int, promised: int = 0) -> bool:
        """Whether `needed` blocks are free or can be freed by evicting those that no sequence refers to.

        Args:
            claimed: the most blocks that have other references, or will have. Where that is enough to know, none are
                counted.
            promised: the number of these that are not taken yet.
        """
        free = cache.free_block_count
        if needed + promised <= free or needed <= cache.total_blocks - claimed:
            return True
        return self.pages is not None and needed + promised - free <= self.pages.idle_blocks


class LayerKind(NamedTuple):
    """A kind of layers, as the rows of `KINDS` have it.

    Attributes:
        name: of the kind.
        of: called with the arguments of an engine and the layers that no kind before it has: those of each group.
        nbytes: called with the arguments, the layers of a group, the blocks of the counted layers, and those that the
            prefix cache may have: the bytes of the group and its cached pages.
        make: called with the arguments, the layers of a group, the blocks of the counted layers, and the most blocks of
            the prefix cache, see `CacheSettings.pool`: the group.
    """

    name: str
    of: Callable[[CacheArguments, Sequence[int]], Sequence[tuple[int, ...]]]
    nbytes: Callable[[CacheArguments, Sequence[int], int, int], int]
    make: Callable[[CacheArguments, Sequence[int], int, int | None], Layers]


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
