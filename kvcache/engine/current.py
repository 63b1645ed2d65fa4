"""`CurrentText`: the one text of an engine, extended by running tokens. A failing call leaves it unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.engine.held_texts import HeldTexts
from kvcache.engine.text_rows import common_tokens
from kvcache.errors import InvalidOperationError, KvCacheError, OutOfMemoryError
from kvcache.networks.protocols import Float32, Logits
from kvcache.paged.cache import PagedKvCache
from kvcache.texts.behind import Behind
from kvcache.texts.block_index import CachedStart, PartStart
from kvcache.texts.forward import Forward
from kvcache.texts.pool import Pool
from kvcache.texts.seen_parts import SeenPart, SeenParts, TextKey
from kvcache.texts.settings import CacheSettings
from kvcache.texts.shared_prefixes import Arrived
from kvcache.texts.text import Text, Tokens
from kvcache.texts.text_adapter import TextAdapter

__all__ = ["CurrentText", "Share"]

Share = Callable[[PagedKvCache, int], int]

_NO_TOKENS = np.empty(0, np.uint32)


class CurrentText:
    """The text of an `InferenceEngine`. A change runs on a successor, which takes its place in one step.

    The successor has the same sequence where all that it drops can be computed without; otherwise the text moves to a
    fork first, which shares its blocks. The text and its fork have the numbers 0 and 1.

    Args:
        settings: of the caches.
        num_blocks: of the layers that keep all tokens.

    Attributes:
        text: the text as the last completed call has left it.
        pool, forward: its memory, and the passes of the network.
        chunk: the most tokens of a pass; pieces end at its multiples, so that after a cached prefix they are those of a
            cold run.
        version: increases with every change, so that an iterator can detect changes by other calls.
    """

    def __init__(self, settings: CacheSettings, num_blocks: int) -> None:
        self.settings, self.chunk, self.version = settings, settings.piece, 0
        self._reclaim: Callable[[OutOfMemoryError], bool] | None = None
        self.move(settings.pool(num_blocks))

    def move(self, pool: Pool) -> None:
        """Become an empty text in another pool."""
        text = _empty(pool, 0)
        forward = Forward(self.settings.model, pool)
        self.__dict__.update(pool=pool, forward=forward, text=text, version=self.version + 1)  # in one step
        self.reclaim = self._reclaim

    pool: Pool
    forward: Forward
    text: Text

    @property
    def reclaim(self) -> Callable[[OutOfMemoryError], bool] | None:
        """See `InferenceEngine`."""
        return self._reclaim

    @reclaim.setter
    def reclaim(self, function: Callable[[OutOfMemoryError], bool] | None) -> None:
        self._reclaim = self.pool.counted.reclaim = function

    @property
    def cache(self) -> PagedKvCache:
        """The cache of the layers that keep all tokens, or of all layers that evict."""
        return self.pool.counted.caches[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of the text, evicted ones and those of its prefix included: the position of the next token."""
        return self.text.base + self.text.computed

    # -- it becomes another text ------------------------------------------------------------------------------

    def clear(
        self, prefix: Behind | None = None, least: int = 0, adapter: TextAdapter | None = None
    ) -> dict[TextKey, int]:
        """Become an empty text, perhaps behind a prefix, or with an adapter. Without parts it cannot run out of blocks.

        The texts that a prefix names parts of run now; a failure leaves an empty text behind nothing.

        Args:
            least: tokens of the request, which decide the regime of these.

        Returns:
            How many tokens of each of these texts did not run.
        """
        if not isinstance(prefix, SeenParts):
            self._become(prefix, adapter=adapter)
            return {}
        try:
            with HeldTexts(self.pool, prefix) as held:
                self._become(None)
                for part in prefix.texts:
                    self._run_seen(part, held, max(least, prefix.num_tokens))
                self._become(prefix, held.starts(prefix), max(least, prefix.num_tokens))
                return held.cached
        except BaseException:
            self._become(None)
            raise

    def _become(
        self, prefix: Behind | None, parts: Sequence[Sequence[PartStart]] = (), least: int = 0,
        adapter: TextAdapter | None = None,
    ) -> None:
        text = Text(_NO_TOKENS, prefix=prefix, adapter=adapter)
        text.least, text.regime = least, self.forward.regime(least)
        self._end_old(text)
        text.moved(0, 0, self.pool.empty(0, parts))

    def _run_seen(self, part: SeenPart, held: HeldTexts, least: int) -> None:
        """Run the text of a part, behind what it shares with the text that ran before it, and hold it."""
        text, tokens = self.text, part.tokens
        pos = min(common_tokens([text.tokens, tokens]), len(tokens) - 1) if text.prefix is part.behind else 0
        group = self.cache.residual_length
        pos -= pos % group if group else 0  # tokens of a group are packed together
        if pos and self.pool.may_cut(text, pos):
            self.pool.cut(text, pos)
            text.num_tokens = pos
        else:
            pos = 0
            self._become(part.behind, held.starts(part.behind), least)
        self.extend(tokens[pos:], self.text.base + pos, whole=least)
        held.add(part, self.text, pos)

    def _end_old(self, text: Text) -> None:
        """End the text, and what an exception has left; take another one, which has no sequence yet."""
        self.text = text
        self.version += 1
        self.pool.settle()

    def start(self, text: Text, arrived: Arrived | None = None, parts: Sequence[Sequence[PartStart]] = ()) -> int:
        """Become a text with its longest cached prefix; returns the number of tokens that the index has of it.

        Args:
            arrived: see `Pool.start`.
            parts: that it sees, of each group.
        """
        self._end_old(text)
        try:
            with ExitStack() as held:
                found, starts = self.pool.shared.hold(text, text.num_tokens, held, arrived, parts=parts)
                self.pool.begin(text, found, starts, 0)
                return starts[0].cached
        except Exception:
            self.clear()
            raise

    def start_again(self, arrived: Arrived) -> None:
        """Begin the text again with cached blocks that reach past what it has computed, if there are any."""
        text = self.text
        self.pool.keep(text, text.computed)
        if text.prefix is not None and text.prefix.parts:  # its parts are held by the sequence that it has
            return
        with ExitStack() as held:
            found, starts = self.pool.shared.hold(text, text.num_tokens, held, arrived, again=True)
            if found > text.computed:
                old = copy(text)
                self.pool.begin(text, found, starts, 1 - text.seq_id)
                self.version += 1
                self.pool.drop(old)

    def replace(self, share: Share) -> None:
        """Become the sequence that `share(cache, id)` creates; `share` returns its number of tokens.

        The old sequence is freed afterwards. Raises what `share` raises, and ValueError if its result is wrong.
        """
        groups, cache, fresh, places = self.pool.groups, self.cache, 1 - self.text.seq_id, list[Any]()
        try:
            num_tokens = share(cache, fresh)
            made = cache.get_sequence(fresh)
            if made is None or made.num_tokens != num_tokens:
                held = "no sequence" if made is None else f"{made.num_tokens} tokens"
                raise ValueError(f"share: expected sequence {fresh} of {num_tokens!r} tokens, got {held}")
            if cache.residual_length or cache.first_tokens:
                cache.unpack(fresh)  # what it shares is read packed
            start = CachedStart(num_tokens)
            places = [() if cache in group.caches else group.begin(fresh, num_tokens, start) for group in groups]
        except Exception:
            with suppress(KvCacheError):  # `share` may have failed before it created the sequence
                for group in groups:
                    group.free(fresh, None)
            raise
        text = Text(np.zeros(num_tokens, np.uint32))
        text.is_known, text.shares = not num_tokens, False
        text.moved(fresh, num_tokens, tuple(places))
        old, self.text = self.text, text
        self.version += 1
        self.pool.drop(old)

    # -- it grows ---------------------------------------------------------------------------------------------

    def extend(self, tokens: Tokens, pos: int, logits: Logits = "last", whole: int = 0) -> Float32:
        """Cut the text to `pos` tokens, then run new ones at positions `pos`, `pos + 1`, ...

        Where positions depend on the length of a text (longrope), one that enters another regime runs again from its
        start. All K and V of a text are of one regime, so that its logits are those of a cold run.

        Args:
            tokens: at least one.
            pos: at most `num_tokens`, and not within the prefix.
            logits: "last", or "all" for at most `chunk` tokens.
            whole: tokens of the whole text, where more are to follow; they decide the regime.

        Returns:
            float32 `(1 or len(tokens), vocab_size)`.

        A layer with a state has that after the last token alone, and states that are cached: from the nearest position
        that has one, tokens run again.

        Raises:
            InvalidOperationError: tokens that the first new one reads have left; the tokens before `pos` are not known,
                as after `InferenceEngine.begin`, and positions depend on the length, or a state is to be made again.
        """
        if pos < self.text.base:
            least = self.text.base
            raise InvalidOperationError(f"pos: expected {least} or more, behind the prefix, or reset, got {pos}")
        pos -= self.text.base
        text, forward, end = self.text, self.forward, pos + len(tokens)
        regime = forward.regime(max(whole, text.base + end, text.least))
        if regime != text.regime and isinstance(text.prefix, SeenParts):  # what it stands behind runs again too
            tokens, pos = np.concatenate([text.tokens[:pos], tokens]), 0
            self.clear(text.prefix, max(whole, text.base + end))
            return self.extend(tokens, self.text.base, logits, whole)
        if forward.regime_of is not None and pos and not text.is_known:
            raise InvalidOperationError(
                f"pos: expected 0, since positions of this network depend on the length of the text, and the tokens "
                f"before {pos} are not known, got {pos}"
            )
        start = self.pool.nearest(text, pos) if regime == text.regime or not pos else 0
        self.pool.expect(text, start)
        if start < pos and not text.is_known:
            raise InvalidOperationError(
                f"pos: expected 0, since the state of this network's layers after {pos} tokens is not there, and these "
                f"tokens are not known, got {pos}"
            )
        if start < pos:
            tokens, logits = np.concatenate([text.tokens[start:pos], tokens]), "last"
        if start == text.computed and not self._needs_fork(end):
            return self._run_in_place(tokens, start, regime, logits)
        if start < text.computed and not self.pool.has_room(text, start, end - start, beside=True):
            self.pool.expect_room(text, start, end - start, beside=False)
            self.pool.cut(text, start)
            text.num_tokens, text.is_known = start, text.is_known or not start
            self.version += 1
            return self._run_in_place(tokens, start, regime, logits)
        return self._run_beside(tokens, start, regime, logits)

    def with_token(self, token: int, most: int) -> Text | None:
        """The text with one token that is to run, if it may run with up to `most` draft tokens; None: it may not."""
        text, end = self.text, self.text.computed + 1 + most
        if not text.computed or not text.is_known or text.prefix is not None or self.forward.regime(end) != text.regime:
            return None
        if self.pool.nearest(text, text.computed) < text.computed or self.pool.loses(text, end, self.chunk):
            return None
        return self._continued(np.array([token], np.uint32), text.computed, text.regime)

    def extend_drafted(self, longer: Text, draw: Callable[[Float32], int]) -> bool:
        """Run the last token of a text that `with_token` made, and its draft tokens; whether there was room.

        Args:
            draw: called with the logits `(1 + draft tokens, vocab_size)`; how many draft tokens stay.
        """
        text, count = self.text, 1 + len(longer.draft)
        try:
            self.pool.append([(text, count)])
            longer.moved(text.seq_id, text.computed, text.places)  # a window may have left tokens behind
            rows = self.forward.run([(longer, count, count)])[0]
        except OutOfMemoryError:
            self.pool.cut(text, text.computed)
            return False
        except Exception:
            self.pool.cut(text, text.computed)
            raise
        held = draw(rows)
        for token in longer.draft[:held].tolist():
            longer.add(token)
        self.pool.ran(longer, 1 + held, count - 1 - held)
        self.text = longer
        self.version += 1
        self.pool.compact(longer)
        return True

    def shorten(self, count: int) -> None:
        """Drop the last tokens of the text, which were run as draft tokens."""
        text, pos = self.text, self.text.computed - count
        self.pool.cut(text, pos)
        text.num_tokens = pos
        self.version += 1

    def _needs_fork(self, end: int) -> bool:
        """Whether a failure would lose something; where there is no room for a fork, f16 rows stay packed then."""
        text, count = self.text, end - self.text.computed
        return self.pool.loses(text, end, self.chunk) and self.pool.has_room(text, text.computed, count, beside=True)

    def _run_in_place(self, tokens: Tokens, pos: int, regime: int, logits: Logits) -> Float32:
        text = self.text
        if len(tokens) > self.chunk:
            # Find out now whether all tokens fit, rather than after most of the work.
            self.pool.expect_room(text, pos, len(tokens), beside=False)
        try:
            first = self._count(pos, pos + len(tokens), logits)
            self.pool.append([(text, first)])
            longer = self._continued(tokens, pos, regime)
            rows = self._run(longer, logits, first)
        except Exception:
            self.pool.cut(text, pos)
            raise
        self.text = longer
        self.version += 1
        self.pool.compact(longer)
        return rows

    def _run_beside(self, tokens: Tokens, pos: int, regime: int, logits: Logits) -> Float32:
        """Move the text to a fork, and run its successor in its place."""
        text, spare = self.text, copy(self.text)
        self.pool.fork(text, spare, text.computed, 1 - text.seq_id)
        self.text = spare
        longer = self._continued(tokens, pos, regime)
        longer.moved(text.seq_id, text.computed, text.places)
        try:
            self.pool.cut(longer, pos)
            if len(tokens) > self.chunk:
                self.pool.expect_room(longer, pos, len(tokens), beside=False)
            rows = self._run(longer, logits)
        except Exception:
            self.pool.drop(longer)
            self._renumber()
            raise
        self.text = longer
        self.version += 1
        self.pool.drop(spare)
        self.pool.compact(longer)
        return rows

    def _renumber(self) -> None:
        """Give the text its other number, if there is memory for that."""
        with suppress(MemoryError):
            old, text = self.text, copy(self.text)
            self.pool.fork(old, text, old.computed, 1 - old.seq_id)
            self.text = text
            self.pool.drop(old)

    def _continued(self, tokens: Tokens, pos: int, regime: int) -> Text:
        """The text with these tokens from `pos` on."""
        longer = self.text.continued(tokens, pos)
        if regime != longer.regime or not pos:
            longer.regime, longer.is_known = regime, longer.is_known or not pos
            longer.space = self.forward.space_of(longer)
        return longer

    def _count(self, pos: int, end: int, logits: Logits) -> int:
        """Tokens of the pass that begins at `pos`."""
        return end - pos if logits == "all" else min(end - pos, self.chunk - pos % self.chunk, self.text.most_rows)

    def _run(self, text: Text, logits: Logits, has_room: int = 0) -> Float32:
        """Run what remains of a text, at least a token; for `has_room` tokens there is room already."""
        while True:
            count = has_room or self._count(text.computed, text.num_tokens, logits)
            if not has_room:
                self.pool.append([(text, count)])
            is_last = text.computed + count == text.num_tokens
            rows = self.forward.run([(text, count, count if logits == "all" else int(is_last))])[0]
            self.pool.ran(text, count)
            if is_last:
                return rows
            has_room = 0

    def run_part(self, count: int, logits: Logits) -> Float32:
        """Run the next tokens of a text that `start` began; a failure leaves those that were computed before."""
        text = self.text
        try:
            self.pool.append([(text, count)])
            rows = self.forward.run([(text, count, int(logits == "last"))])[0]
            self.pool.ran(text, count)
        except Exception:
            self.pool.cut(text, text.computed)
            raise
        self.version += 1
        return rows

    # -- after an exception, and reports ------------------------------------------------------------------------

    def mend(self) -> None:
        """Restore the state after the last completed call; may run after an interrupt between any two lines."""
        text, self.forward.watch = self.text, None
        self.pool.release_held()
        if not self.pool.settle(text):
            self.text = _empty(self.pool, 0)
            self.version += 1
        if self.text.seq_id:  # an exception ended a change beside it
            self._renumber()

    def positions(self, layer: int, head: int | None = None) -> NDArray[np.int64]:
        """The text positions of the tokens whose K and V a KV head has, ascending, `(n,)`; None: any head."""
        return self.pool.positions(self.text, layer, head)

    def check(self) -> None:
        """Verify the invariants; AssertionError names the fault."""
        self.pool.check([self.text])


def _empty(pool: Pool, seq_id: int) -> Text:
    """An empty text with a sequence."""
    text = Text(_NO_TOKENS)
    text.moved(seq_id, 0, pool.empty(seq_id))
    return text
