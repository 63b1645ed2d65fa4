"""Layers whose queries see a window: a cache of their own, which keeps little more than the newest tokens.

Layers of one window form a group. While the text runs, blocks before the window leave the group's cache:

    text            0 ............................................ 8,191
    other layers    0 ............................................ 8,191       num_blocks grows with the text
    window of 512   .......................... 7,600 .............. 8,191      num_blocks does not

A place says where a group has its tokens: the id of a sequence, and the text position of its first token. A change
works on places of its own and leaves the committed ones readable; the `LiveSequence` commits all groups in one step.
A text may be cut to a position whose window is still there: `SPARE` tokens before the window stay for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.calibration.residual import AttendPiece
from kvcache.core.memory import total
from kvcache.errors import InvalidOperationError
from kvcache.networks.protocols import Float32, LayerAttention, Model, layer_attention
from kvcache.paged.cache import PagedKvCache

__all__ = ["GroupPlan", "LayerGroups", "Pages", "Place", "Places", "WindowLayers", "Windows", "num_pages"]

SPARE = 64  # tokens before the window that stay, so that rejected guesses can be cut off
_SHARE = 4  # cached blocks of the layers that keep all tokens per cached page of a window


class Place(NamedTuple):
    """The tokens of a text from `first` on, which sequence `seq_id` of a group's cache has.

    `first` is a multiple of the block size, so that a token has the same slot of its block in every group.
    """

    seq_id: int
    first: int


Places = tuple[Place, ...]


class Pages(NamedTuple):
    """Blocks of a group's cache that hold the tokens from `first` on, a multiple of the block size."""

    first: int
    blocks: npt.NDArray[np.int32]


_NO_PAGES = Pages(0, np.empty(0, np.int32))


class GroupPlan(NamedTuple):
    """The layers of one window, ascending, and the blocks of their cache."""

    window: int
    layers: tuple[int, ...]
    num_blocks: int


class LayerGroups(NamedTuple):
    """The layers that keep all tokens, ascending, and the groups of those that keep a window."""

    whole: tuple[int, ...]
    windows: tuple[GroupPlan, ...]

    @classmethod
    def of(cls, model: Model, block_size: int, chunk: int) -> LayerGroups:
        """The groups of a network. Where every layer has a window, a cache without layers keeps the tokens of prefixes.

        A group has blocks for two windows and two pieces: those before a change, and those of the change.
        """
        positions, layers = model.config.max_position_embeddings, dict[int, list[int]]()
        for layer, each in enumerate(layer_attention(model)):
            layers.setdefault(each.window or 0, []).append(layer)
        whole = layers.pop(0, [])
        piece, most = -(-chunk // block_size) + 1, 2 * (-(-positions // block_size) + 1)
        plans = [
            GroupPlan(window, tuple(layers[window]), min(2 * (_num_kept(window, block_size) + piece), most))
            for window in sorted(layers)
        ]
        return cls(tuple(whole), tuple(plans))


def num_pages(window: int, block_size: int, blocks: int) -> int:
    """The pages of one window beside a prefix cache of `blocks` blocks: a quarter, but at least two windows."""
    return max(2 * _num_kept(window, block_size), blocks // _SHARE) if blocks else 0


def _num_kept(window: int, block_size: int) -> int:
    """The most blocks that a group keeps of a text between two changes, but for the newest piece."""
    return -(-(window - 1 + SPARE) // block_size) + 1


class WindowLayers:
    """The layers of one window, and the cache of their newest tokens.

    Args:
        window: a query sees itself and the `window - 1` tokens before it.
        layers: of the network, ascending.
        attention: how each layer of the network attends.
        cache: K and V of these layers, with `num_window_blocks` blocks or more. Its sequences 0 and 1 are those of the
            engine's text.
    """

    def __init__(
        self, window: int, layers: Sequence[int], attention: Sequence[LayerAttention], cache: PagedKvCache
    ) -> None:
        self.window, self.layers, self.cache = window, tuple(layers), cache
        self.attention = attention
        self._options = {layer: (own, attention[layer].options()) for own, layer in enumerate(layers)}

    def first_seen(self, pos: int) -> int:
        """The first token that the query at `pos` sees."""
        return max(0, pos - self.window + 1)

    # -- a change -------------------------------------------------------------------------------------------

    def expect(self, place: Place, pos: int) -> None:
        """Raise InvalidOperationError if a token that the query at `pos` sees has left."""
        if pos and self.first_seen(pos) < place.first:
            raise InvalidOperationError(
                f"pos: expected at least {place.first + self.window - 1}, got {pos}: the layers with a window of "
                f"{self.window} keep the tokens from {place.first} on; go back to 0 or reset, and run the text again"
            )

    def begin(self, place: Place, stop: int, pos: int) -> Place:
        """Where a change continues at `pos` a text of `stop` tokens: at `place`, or at a fork that ends at `pos`."""
        if pos == stop:
            return place
        return self._fork(place, pos - place.first) if pos > place.first else self.empty(1 - place.seq_id, pos)

    def extend(self, place: Place, committed: Place, pos: int, count: int) -> Place:
        """Append `count` tokens at `pos`, and drop blocks that no query from `pos` on sees.

        A committed place is forked before anything of it is dropped.
        """
        size = self.cache.block_size
        kept = -(-(self.window - 1 + SPARE) // size) * size  # whole blocks: a fork then shares full ones alone
        first = max(0, pos - kept) // size * size
        if first > place.first and place == committed:
            place = self._fork(place, pos - place.first)
        if first > place.first:
            self.cache.apply_streaming_llm(place.seq_id, 0, pos - first)
            place = Place(place.seq_id, first)
        self.cache.append(place.seq_id, count)
        return place

    def adopt(self, place: Place, pages: Pages, stop: int) -> Place:
        """A place of a text of `stop` tokens, beside `place`, whose last tokens lie in blocks that are in use.

        Raises:
            InvalidOperationError: `pages` lack tokens that the next query sees.
        """
        if self.first_seen(stop) < pages.first or pages.first + len(pages.blocks) * self.cache.block_size < stop:
            raise InvalidOperationError(
                f"share: expected the {stop - self.first_seen(stop)} tokens before {stop} for the layers with a window "
                f"of {self.window}, got {len(pages.blocks)} blocks from token {pages.first} on"
            )
        fresh = self.empty(1 - place.seq_id, pages.first)
        if len(pages.blocks):
            self.cache.free(fresh.seq_id)
            self.cache.adopt(fresh.seq_id, pages.blocks, stop - pages.first)
        return fresh

    def empty(self, seq_id: int, pos: int) -> Place:
        """Make a sequence empty; its first token will be `pos`."""
        self._free(seq_id)
        self.cache.allocate(seq_id, 0)
        return Place(seq_id, pos)

    def restore(self, place: Place, stop: int) -> None:
        """Return to the place of a text of `stop` tokens; may be called at any time, and takes no memory."""
        self._free(1 - place.seq_id)
        if place.seq_id in self.cache:
            self.cache.truncate(place.seq_id, stop - place.first)

    def piece(self, place: Place, count: int) -> AttendPiece:
        """The `attend` of a piece of `count` tokens, which `extend` has appended."""
        seq_ids, query_lens = np.array([place.seq_id], np.uint64), np.array([count])
        starts = np.array([place.first])

        def attend(layer: int, queries: Float32, keys: Float32, values: Float32) -> Float32:
            own, options = self._options[layer]
            self.cache.write(own, place.seq_id, keys, values)
            mixed: Float32 = self.cache.attention(
                own, queries, seq_ids, query_lens=query_lens, starts=starts, **options
            )
            return mixed

        return attend

    def check(self, place: Place, stop: int) -> None:
        """Verify the invariants of the place of a text of `stop` tokens; AssertionError says what is wrong."""
        self.cache.check()
        held = self.cache.get_sequence(place.seq_id)
        assert held is not None, f"window {self.window}: sequence {place.seq_id} is gone from the cache"
        assert held.num_tokens == stop - place.first, (
            f"window {self.window}: expected tokens {place.first} to {stop}, got {held.num_tokens} tokens"
        )
        assert place.first <= self.first_seen(stop), f"window {self.window}: the next query's window has left"
        assert place.first % self.cache.block_size == 0, f"window {self.window}: {place.first} begins no block"
        assert 1 - place.seq_id not in self.cache, f"window {self.window}: a replaced sequence was not freed"

    def _fork(self, place: Place, count: int) -> Place:
        fork = 1 - place.seq_id
        self._free(fork)
        self.cache.fork(place.seq_id, fork)
        self.cache.truncate(fork, count)
        return Place(fork, place.first)

    def _free(self, seq_id: int) -> None:
        if seq_id in self.cache:
            self.cache.free(seq_id)


class Windows:
    """All groups of layers with a window, of one text; there may be none.

    Args:
        groups: in the order of their windows.
        make_cache: `make_cache(num_blocks=, layers=)` makes a cache of some layers in the engine's formats.

    Attributes:
        working: the places of the change that runs, or the committed ones.
    """

    def __init__(self, groups: Iterable[WindowLayers], make_cache: Callable[..., PagedKvCache]) -> None:
        self.groups = tuple(groups)
        self.working: Places = tuple(group.empty(0, 0) for group in self.groups)
        self._make_cache = make_cache
        self._group_of = {layer: i for i, group in enumerate(self.groups) for layer in group.layers}

    @classmethod
    def of(cls, plan: LayerGroups, model: Model, make_cache: Callable[..., PagedKvCache]) -> Windows:
        """The groups of a network, with caches of their own."""
        attention = layer_attention(model)
        groups = [
            WindowLayers(
                group.window, group.layers, attention,
                make_cache(num_blocks=group.num_blocks, layers=group.layers),
            )
            for group in plan.windows
        ]  # fmt: skip
        return cls(groups, make_cache)

    def enlarged(self, blocks: int) -> Windows:
        """Groups with empty caches, each with room for the pages of a prefix cache of `blocks` blocks."""
        groups = []
        for group in self.groups:
            num_blocks = group.cache.total_blocks + num_pages(group.window, group.cache.block_size, blocks)
            cache = self._make_cache(num_blocks=num_blocks, layers=group.layers)
            groups.append(WindowLayers(group.window, group.layers, group.attention, cache))
        return Windows(groups, self._make_cache)

    def __contains__(self, layer: int) -> bool:
        return layer in self._group_of

    def first(self, places: Places, layer: int) -> int:
        """The first token of which a layer has K and V."""
        return places[self._group_of[layer]].first if layer in self._group_of else 0

    def expect(self, places: Places, pos: int) -> None:
        """Raise InvalidOperationError if a token that the queries at `pos` see has left."""
        for group, place in self._with(places):
            group.expect(place, pos)

    def begin(self, places: Places, stop: int, pos: int) -> None:
        """Begin a change that cuts the text of `stop` tokens to `pos`, which `expect` allows."""
        self.working = tuple(group.begin(place, stop, pos) for group, place in self._with(places))

    def extend(self, places: Places, pos: int, count: int) -> None:
        """Append `count` tokens at `pos` to the places of the change; `places` are the committed ones."""
        self.working = tuple(
            group.extend(place, committed, pos, count)
            for (group, place), committed in zip(self._with(self.working), places, strict=True)
        )

    def adopt(self, places: Places, pages: Sequence[Pages], stop: int) -> None:
        """Begin a change to a text of `stop` tokens, whose windows lie in `pages`, one for each group."""
        pages = pages or [_NO_PAGES] * len(self.groups)
        self.working = tuple(
            group.adopt(place, each, stop) for (group, place), each in zip(self._with(places), pages, strict=True)
        )

    def restore(self, places: Places, stop: int) -> None:
        """End a change: `places` are those of the text of `stop` tokens. Takes no memory."""
        self.working = places
        for group, place in self._with(places):
            group.restore(place, stop)

    def piece(self, count: int) -> dict[int, AttendPiece]:
        """For each layer the `attend` of a piece of `count` tokens, which `extend` has appended."""
        attends = [group.piece(place, count) for group, place in self._with(self.working)]
        return {layer: attends[i] for layer, i in self._group_of.items()}

    def memory(self) -> dict[str, int]:
        """Bytes of K and V, "kv", and of the "bookkeeping"."""
        return total(*[group.cache.memory() for group in self.groups])

    def check(self, places: Places, stop: int) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        for group, place in self._with(places):
            group.check(place, stop)

    def _with(self, places: Places) -> Iterable[tuple[WindowLayers, Place]]:
        return zip(self.groups, places, strict=True)
