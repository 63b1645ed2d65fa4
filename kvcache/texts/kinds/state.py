"""Layers that keep a state of fixed size per text, such as a convolution's last rows or a delta rule's matrix.

    slots      0 [text 7]  1 [free]  2 [text 3]         one array per layer; a running text changes its slot in place
    cached     . . . s . . . . . . . s . . s . . .      states after exact prefixes of texts (cached_states.py)

A state cannot go back. A text whose pass has failed has none, and runs again from a cached state or from its start.
Draft tokens run on a copy of a layer's state, one layer at a time; those that were drawn then run once more on the
state itself. Where a state is kept in the middle of a piece, the piece runs in two parts. None of that changes a bit,
since a `Recurrence` runs token by token.

States are kept where other texts will continue: `Text.keep_at`, ends of texts, and `spacing` tokens apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from math import lcm
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvalidOperationError, OutOfMemoryError
from kvcache.networks.protocols import Float32, Recurrence
from kvcache.support.arguments import as_bytes
from kvcache.texts.block_index import CachedStart
from kvcache.texts.cache_arguments import CacheArguments
from kvcache.texts.cached_states import CachedStates, page_shape
from kvcache.texts.kinds.base import Ids, LayerCall, LayerKind, Layers, Lens, Named, PagesOf
from kvcache.texts.text import Text, Tokens
from kvcache.tiers.source import TierSource
from kvcache.tiers.tiers import Tiers
from kvcache.tiers.windows import WindowSource

__all__ = ["STATE", "StateLayers", "page_bytes"]

_LEAST_STATES = 8  # that are cached, unless a limit says otherwise
_STATES_ALONE = 64  # the same, of a network without K and V
_SPACING = 64  # tokens between states that are kept in any text, where states are small
_SPACING_ALONE = 1024  # the same, of a network without K and V
_VOID = -1  # tokens of a state that a pass has changed and not completed
_BEFORE_END = 4  # tokens of a prompt behind its state, where nothing is known of the next request
Rows = tuple[Float32, ...]


class _Part(NamedTuple):
    """Rows that run together in a pass, of some texts: where they are, their slots, and what follows.

    Attributes:
        rows: of the pass.
        slots, lens: see `Recurrence.run`.
        drafts: whether they run on copies.
        pages: by slot, the page that takes the state behind these rows.
    """

    rows: slice | NDArray[np.int64]
    slots: NDArray[np.int64]
    lens: NDArray[np.int64]
    drafts: bool = False
    pages: tuple[tuple[int, int], ...] = ()


class StateLayers(Layers):
    """The layers that keep a state.

    The place of a text is its slot.

    Args:
        recurrences: of these layers.
        num_slots: the most texts.
        cached: states of prefixes; None: none are kept.
        unit: states are kept after multiples of this number of tokens, where the other layers can go on.
        spacing: tokens between states that are kept whatever the text; 0: none are.
        one_text: whether the texts are those of an engine with one text, which runs again what it needs.

    Attributes:
        ends: states are kept after the last multiple of this too, a multiple of `unit`: where the groups of tiers end.
    """

    reason, exact = "state", True

    def __init__(
        self, recurrences: Mapping[int, Recurrence], num_slots: int, cached: CachedStates | None = None, unit: int = 1,
        spacing: int = 0, one_text: bool = False,
    ) -> None:
        self.layers, self.cached, self.unit, self.spacing = tuple(recurrences), cached, unit, spacing
        self.ends = unit
        self._recurrences, self._one_text = dict(recurrences), one_text
        self._slots = {layer: _aligned(num_slots, each.size) for layer, each in recurrences.items()}
        self._free = [*range(num_slots)][::-1]
        self._owned: dict[int, int] = {}  # the slot of each sequence
        self._at = np.full(num_slots, _VOID, np.int64)  # how many tokens led to the state in each slot
        self._drafts: dict[int, dict[int, Rows]] = {}  # by slot and layer, the rows of draft tokens of the last pass
        self._pages: dict[int, list[tuple[int, int]]] = {}  # by slot, lengths and pages of the pass that runs
        self._due: dict[int, list[int]] = {}  # by slot, lengths at its end, or among its drafts, that are to be kept
        self._last: dict[int, int] = {}  # by sequence, the length of the state that the next one of an answer replaces
        self.prefixes = () if cached is None else (cached.index,)

    # -- a text begins --------------------------------------------------------------------------------------

    def has_room(self, text: Text, found: int, start: CachedStart, running: Sequence[Text]) -> bool:
        return bool(self._free)

    def begin(self, seq_id: int, found: int, start: CachedStart) -> int:
        """Start with the state of `found` tokens.

        Raises:
            InvalidOperationError: `start` has none.
            OutOfMemoryError: there is no slot.
        """
        if found and (self.cached is None or found != start.stop or not len(start.blocks)):
            raise InvalidOperationError(
                f"share: expected the state after {found} tokens for the layers that keep one, got K and V alone"
            )
        states = None if not found or self.cached is None else self.cached.read(start.blocks)
        slot = self._take(seq_id)
        for i, layer in enumerate(self.layers):
            self._slots[layer][slot] = 0 if states is None else states[i]
        self._at[slot] = found
        return slot

    def _take(self, seq_id: int) -> int:
        if not self._free:
            raise OutOfMemoryError(1, 0, "states")
        slot: int = self._free.pop()
        self._owned[seq_id] = slot
        self._at[slot] = _VOID
        return slot

    def fork(self, text: Text, index: int, seq_id: int) -> int:
        source, slot = self._slot(text, index), self._take(seq_id)
        for states in self._slots.values():
            states[slot] = states[source]
        self._at[slot] = self._at[source]
        return slot

    def _slot(self, text: Text, index: int) -> int:
        slot: int = text.places[index]
        return slot

    # -- a pass ---------------------------------------------------------------------------------------------

    def attend(self, texts: Sequence[Text], index: int, ids: Ids, lens: Lens) -> tuple[LayerCall, dict[str, Any]]:
        parts: list[_Part] = []
        slots = np.array([text.places[index] for text in texts])
        ends = np.array([min(text.computed + n, text.num_tokens) for text, n in zip(texts, lens.tolist(), strict=True)])

        def recur(layer: int, rows: Rows) -> Float32:
            if layer == self.layers[0]:
                self._expect_states(texts, index)
                parts[:] = self._parts(texts, slots, lens)
                self._at[slots] = _VOID
            found = self._run(layer, rows, parts)
            if layer == self.layers[-1]:
                self._at[slots] = ends
            return found

        return _attend_nothing, {"recur": recur}

    def _expect_states(self, texts: Sequence[Text], index: int) -> None:
        """Make the states right that a failed pass has left, of texts that begin, or go on behind a cached state."""
        for text in texts:
            if self._at[self.cut(text, index, text.computed)] != text.computed:
                raise InvalidOperationError(f"{text}: expected its state after {text.computed} tokens, got none")

    def _parts(self, texts: Sequence[Text], slots: NDArray[np.int64], lens: Lens) -> list[_Part]:
        """The parts of a pass: all rows, or fewer where states are kept between them, or some are of draft tokens."""
        self._forget_pass()
        cuts: list[list[tuple[int, int]]] = []  # of each text: rows up to a state that is kept, and its page
        for text, slot, count in zip(texts, slots.tolist(), lens.tolist(), strict=True):
            end = min(text.computed + count, text.num_tokens)
            places = self._places(text, text.computed, text.computed + count)
            pages = self._begin_pages(text, [length for length in places if length < end])
            if places:
                self._pages[slot], self._due[slot] = pages, [length for length in places if length >= end]
            cuts.append([*((length - text.computed, page) for length, page in pages), (end - text.computed, -1)])
        firsts = lens.cumsum() - lens
        if all(len(each) == 1 and each[0][0] == n for each, n in zip(cuts, lens.tolist(), strict=True)):
            return [_Part(slice(None), slots, lens)]
        found = []
        for turn in range(max(map(len, cuts))):
            some = [i for i, each in enumerate(cuts) if len(each) > turn]
            begins = [cuts[i][turn - 1][0] if turn else 0 for i in some]
            found.append(_part(firsts, slots, some, begins, [cuts[i][turn] for i in some]))
        drafted = [i for i, each in enumerate(cuts) if each[-1][0] < lens[i]]
        if drafted:
            ends = [(int(lens[i]), -1) for i in drafted]
            found.append(_part(firsts, slots, drafted, [cuts[i][-1][0] for i in drafted], ends)._replace(drafts=True))
        return found

    def _run(self, layer: int, rows: Rows, parts: Sequence[_Part]) -> Float32:
        recurrence, states = self._recurrences[layer], self._slots[layer]
        if len(parts) == 1:
            return recurrence.run(rows, states, parts[0].slots, parts[0].lens)
        results: Float32 | None = None
        for part in parts:
            own = tuple(np.ascontiguousarray(each[part.rows]) for each in rows)
            if part.drafts:
                places = np.arange(len(part.slots))
                found = recurrence.run(own, _copied(states, part.slots), places, part.lens)
                self._note_drafts(layer, own, part)
            else:
                found = recurrence.run(own, states, part.slots, part.lens)
            if results is None:
                results = np.empty((len(rows[0]), *found.shape[1:]), np.float32)
            results[part.rows] = found
            for slot, page in part.pages:
                self._write_page(page, layer, states[slot])
        assert results is not None
        return results

    def _note_drafts(self, layer: int, rows: Rows, part: _Part) -> None:
        """Remember the rows of draft tokens, to run those that are drawn."""
        stop = 0
        for slot, count in zip(part.slots.tolist(), part.lens.tolist(), strict=True):
            self._drafts.setdefault(slot, {})[layer] = tuple(each[stop : stop + count] for each in rows)
            stop += count

    def ran(self, text: Text, index: int, before: int) -> None:
        """Run the draft tokens that were drawn, and cache the states that were to be kept."""
        slot, stop = self._slot(text, index), text.computed
        drafts, at = self._drafts.pop(slot, {}), int(self._at[slot])
        for length, page in self._pages.pop(slot, ()):
            if self.cached is not None:
                self.cached.end(page, text.tokens[:length], text.space)
                self._replace_last(text, length)
        due = [length for length in self._due.pop(slot, ()) if length <= stop]
        for length in sorted({*due, stop}):
            self._replay(slot, drafts, int(self._at[slot]) - at, length - at)
            if length in due:
                self._keep_slot(text, index, length)

    def _replay(self, slot: int, drafts: Mapping[int, Rows], first: int, stop: int) -> None:
        """Run the rows of draft tokens from `first` to `stop` on the state itself."""
        if stop <= first or not drafts:
            return
        end, self._at[slot] = self._at[slot] + stop - first, _VOID
        index, lens = np.array([slot]), np.array([stop - first])
        for layer, rows in drafts.items():
            own = tuple(np.ascontiguousarray(each[first:stop]) for each in rows)
            self._recurrences[layer].run(own, self._slots[layer], index, lens)
        self._at[slot] = end

    # -- going back -----------------------------------------------------------------------------------------

    def nearest(self, text: Text, index: int, pos: int) -> int:
        """The last position, at most `pos`, whose state is in the slot or cached; 0 if there is none."""
        if self._at[self._slot(text, index)] == pos:
            return pos
        if self.cached is None or not text.is_known:
            return 0
        return self.cached.longest(text.tokens, min(pos, text.shares_to), text.space)

    def cut(self, text: Text, index: int, pos: int) -> int:
        slot = self._slot(text, index)
        at = int(self._at[slot])
        if at == pos or (slot in self._drafts and 0 <= at < pos):  # draft tokens that were drawn run in `ran`
            return slot
        self._at[slot] = _VOID
        with ExitStack() as held:
            known = text.is_known and pos <= text.shares_to
            start = self.hold(text.tokens, pos, text.space, held) if known else None
            if start is not None:
                states = None if not pos or self.cached is None else self.cached.read(start.blocks)
                for i, layer in enumerate(self.layers):
                    self._slots[layer][slot] = 0 if states is None else states[i]
                self._at[slot] = pos
        return slot

    def free(self, seq_id: int, place: Any) -> None:
        slot = self._owned.pop(seq_id, None)
        self._last.pop(seq_id, None)
        if slot is not None:
            self._drop_pages(slot)
            self._free.append(slot)

    def settle(self, text: Text | None, index: int) -> bool:
        self._forget_pass()
        if self.cached is not None:
            self.cached.settle()
        self._owned = {} if text is None else {text.seq_id: self._slot(text, index)}
        self._free = sorted({*range(len(self._at))} - {*self._owned.values()}, reverse=True)
        self._last = {each: length for each, length in self._last.items() if each in self._owned}
        return text is not None

    # -- cached states --------------------------------------------------------------------------------------

    def longest(self, tokens: Tokens, stop: int, space: Any) -> int:
        return 0 if self.cached is None else self.cached.longest(tokens, stop, space)

    def hold(self, tokens: Tokens, stop: int, space: Any, held: ExitStack) -> CachedStart | None:
        if not stop:
            return CachedStart(0)
        page = None if self.cached is None else self.cached.hold(tokens, stop, space, held)
        return None if page is None else CachedStart(stop, stop, page)

    def keep(self, text: Text, index: int, stop: int, ends: bool = False) -> None:
        """Cache the state of a text that has just `stop` tokens, where the other layers can go on after them."""
        if stop and ends and stop % self.unit == 0 and self._at[self._slot(text, index)] == stop:
            self._keep_slot(text, index, stop)

    def _places(self, text: Text, start: int, stop: int) -> list[int]:
        """The lengths from behind `start` up to `stop` after which the state of a text is kept, ascending."""
        if self.cached is None or not text.shares:
            return []
        unit, found = self.unit, set[int]()
        for length in text.keep_at:
            if length >= text.num_prompt:  # all of a prompt is of no use to the same prompt, whose last token runs
                length = text.num_prompt - (1 if text.parts_at else _BEFORE_END)
            found.update((length // unit * unit, length // self.ends * self.ends))
        if self.spacing:
            found.update(range(start - start % self.spacing, stop + 1, self.spacing))
        if self.ends > 1:  # the end of a prompt, or of an answer, is seldom such a place: the last one before it
            found.add(max(stop, text.num_prompt) // self.ends * self.ends)
            found.add(text.num_prompt // self.ends * self.ends)
        stop = min(stop, text.shares_to)
        return sorted(length for length in found if start < length <= stop)

    def _begin_pages(self, text: Text, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Begin pages for the states after `lengths` tokens: each length that there is room for, and its page."""
        if self.cached is None:
            return []
        pages = [(length, self.cached.begin(text.tokens[:length], text.space)) for length in lengths]
        return [(length, page) for length, page in pages if page >= 0]

    def _write_page(self, page: int, layer: int, state: Float32) -> None:
        if self.cached is not None:
            self.cached.write(page, self.layers.index(layer), state)

    def _keep_slot(self, text: Text, index: int, length: int) -> None:
        """Cache the state in a text's slot."""
        if self.cached is not None and text.shares and 0 < length <= text.shares_to:
            slot = self._slot(text, index)
            rows = [states[slot] for states in self._slots.values()]
            if self.cached.store(text.tokens[:length], text.space, rows):
                self._replace_last(text, length)

    def _replace_last(self, text: Text, length: int) -> None:
        """Keep the last state of an answer alone, beside those that texts have continued from."""
        if self.cached is None or length <= text.num_prompt or (self.spacing and length % self.spacing == 0):
            return
        before, self._last[text.seq_id] = self._last.get(text.seq_id, 0), length
        if before and before < length:
            self.cached.forget(text.tokens[:before], text.space)

    def _forget_pass(self) -> None:
        """Drop what a pass has left that did not end."""
        self._drafts.clear()
        self._due.clear()
        for slot in list(self._pages):
            self._drop_pages(slot)

    def _drop_pages(self, slot: int) -> None:
        self._drafts.pop(slot, None)
        self._due.pop(slot, None)
        for _, page in self._pages.pop(slot, ()):
            if self.cached is not None:
                self.cached.drop(page)

    def leave(self, tokens: Tokens, start: int, space: Any, at_once: bool) -> None:
        if self.cached is not None:
            self.cached.leave(tokens, start, space, at_once)

    # -- tiers ----------------------------------------------------------------------------------------------

    def connect(self, tiers: Tiers, name: Named, index: TierSource) -> WindowSource | None:
        if self.cached is None:
            return None
        self.ends = index.format.group_tokens
        own = f"states of layers {self.layers} beside {blake2b(index.context).hexdigest()}"
        self.cached.index.source = source = tiers.state_source(own, self.ends)
        return source

    def offered(self, text: Text) -> Sequence[PagesOf]:
        tokens = text.tokens[: min(text.computed, text.shares_to)]
        return [] if self.cached is None else self.cached.offered(tokens, text.space, self.ends)

    def take(self, tokens: Tokens, stop: int, space: Any, bodies: dict[int, memoryview]) -> None:
        if self.cached is not None:
            self.cached.take(tokens, stop, space, bodies, self.ends)

    # -- reports --------------------------------------------------------------------------------------------

    def positions(self, text: Text, index: int, layer: int, head: int | None) -> NDArray[np.int64]:
        """None: a state has no K and V."""
        return np.empty(0, np.int64)

    def memory(self, texts: Sequence[Text], index: int) -> list[dict[str, int]]:
        own = {"kv": sum(states.nbytes for states in self._slots.values()), "bookkeeping": self._at.nbytes}
        return [own, *([] if self.cached is None else self.cached.memory())]

    def check(self, texts: Sequence[Text], index: int) -> None:
        owned = {text.seq_id: self._slot(text, index) for text in texts}
        assert self._owned == owned, f"slots of sequences, {self._owned}, and those of texts, {owned}, differ"
        slots = [*self._free, *owned.values()]
        assert sorted(slots) == [*range(len(self._at))], f"free and owned slots {sorted(slots)} are not all"
        for text in texts:
            at = int(self._at[self._slot(text, index)])
            assert at == text.computed or self._one_text, f"{text}: its state is that after {at} tokens"
        if self.cached is not None:
            self.cached.check()


def _attend_nothing(
    layer: int, queries: Float32, keys: Float32 | None, values: Float32 | None, /, *_: Any
) -> Float32:
    raise InvalidOperationError(f"attend: expected a layer with attention, got layer {layer}, which keeps a state")


def _part(
    firsts: NDArray[np.int64], slots: NDArray[np.int64], some: Sequence[int], begins: Sequence[int],
    ends: Sequence[tuple[int, int]],
) -> _Part:
    """Rows of some texts of a pass, from `begins` to `ends` within each, with the pages behind them."""
    spans = zip(some, begins, ends, strict=True)
    rows = [np.arange(firsts[i] + first, firsts[i] + end) for i, first, (end, _) in spans]
    lens = np.array([len(each) for each in rows])
    pages = tuple((int(slots[i]), page) for i, (_, page) in zip(some, ends, strict=True) if page >= 0)
    return _Part(np.concatenate(rows), slots[some], lens, False, pages)


def _copied(states: Float32, slots: NDArray[np.int64]) -> Float32:
    copies = _aligned(len(slots), states.shape[1])
    copies[:] = states[slots]
    return copies


def _aligned(num_slots: int, size: int) -> Float32:
    """Zeros `(num_slots, size)` that begin at a multiple of 64 bytes; memory that nobody writes takes none."""
    numbers = np.zeros(num_slots * size + 16, np.float32)
    first = -numbers.ctypes.data % 64 // 4
    return numbers[first : first + num_slots * size].reshape(num_slots, size)


def page_bytes(recurrences: Mapping[int, Recurrence]) -> int:
    """Bytes of a cached state."""
    heads, dim = page_shape(max((each.size for each in recurrences.values()), default=1))
    return 8 * heads * dim * len(recurrences)


def _of(made: CacheArguments, left: Sequence[int]) -> list[tuple[int, ...]]:
    layers = tuple(layer for layer in left if layer in made.recurrences)
    return [layers] if layers else []


def _num_slots(made: CacheArguments) -> int:
    """The most texts that have a state: as fit a quarter of `max_memory_bytes`, at least one."""
    if not made.load.texts:
        return 2
    if made.max_memory_bytes is None:
        return made.load.texts
    share = as_bytes(made.max_memory_bytes, "max_memory_bytes") // 4 // _state_bytes(made)
    return max(1, min(made.load.texts, share))


def _state_bytes(made: CacheArguments) -> int:
    return 4 * sum(each.size for each in made.recurrences.values())


def _num_pages(made: CacheArguments, blocks: int) -> int:
    """The most cached states beside a prefix cache of `blocks` blocks."""
    size = page_bytes(made.recurrences)
    if not blocks:
        return 0
    if made.max_state_bytes is not None:
        return made.max_state_bytes // size
    kv = blocks * made.block_bytes(made.whole)
    return max(_LEAST_STATES, kv // size) if kv else _STATES_ALONE


def _nbytes(made: CacheArguments, layers: Sequence[int], blocks: int, cached: int) -> int:
    pages = _num_pages(made, blocks if made.load.texts else cached)
    return _num_slots(made) * _state_bytes(made) + pages * page_bytes(made.recurrences)


def _make(made: CacheArguments, layers: Sequence[int], blocks: int, cached: int | None) -> StateLayers:
    sizes = [each.size for each in made.recurrences.values()]
    pages = _num_pages(made, blocks if cached is None else cached) if made.shares(cached) else 0
    unit = (made.storage.residual_length or made.block_size) if made.keeps_f16 else 1
    if made.layers["window"]:  # which are cached in whole blocks
        unit = lcm(unit, made.block_size)
    per_token = -(-made.block_bytes(made.whole) // made.block_size)
    # As far apart as K and V of as many bytes are long.
    spacing = max(_SPACING, page_bytes(made.recurrences) // per_token) if per_token else _SPACING_ALONE
    return StateLayers(
        made.recurrences, _num_slots(made), CachedStates(sizes, pages) if pages else None, unit,
        -(-spacing // unit) * unit, one_text=not made.load.texts,
    )


STATE = LayerKind("state", _of, _nbytes, _make)
