"""`Rows`: the rows of a batch as sequences of one `PagedKvCache`, and the text positions that each has stored.

    text        0  1  2  3  4  5  6  7      a row of left padding 3: tokens 0 to 2 are masked
    mask        .  .  .  1  1  1  1  1
    stored               3  4  5  6  7      first = 3; with a window of 4, once 8 tokens are there: first = 5

A masked token is seen by no query, so it is not stored. Under a window, tokens before it are dropped a block at a time.
While the stored positions of every row are all those from its first one on, `first` alone describes them; after a hole
in a mask or an eviction, `positions` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.errors import OutOfMemoryError
from kvcache.integrations.transformers.evicting import Eviction
from kvcache.integrations.transformers.pool import Kind, PagedPool, UInt64

__all__ = ["Rows"]

Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


class Rows:
    """The sequences of one cache in the blocks of one kind of layers.

    Args:
        pool, kind: where they lie.
        batch: rows.
        num_tokens: tokens of the first call, for the size of a new `PagedKvCache`.
        eviction: the policy; None: every token stays.

    Attributes:
        ids: of the sequences, uint64 `(batch,)`.
        length: tokens of the text so far, masked ones included.
        first: text position of the first stored token, int64 `(batch,)`; without a meaning beside `positions`.
        positions: text positions of the stored tokens, ascending, one int64 array per row; None: see above.
        hidden: bool `(batch, length)`, the tokens that were masked when they came; None: none.
        plans: what each query sees, kept while nothing changes: see `sight.py`.
    """

    def __init__(
        self, pool: PagedPool, kind: Kind, batch: int, num_tokens: int, eviction: Eviction | None = None
    ) -> None:
        # A quarter more than the first call needs: most calls after it append a few hundred tokens.
        wanted = batch * (-(-(num_tokens + num_tokens // 4) // pool.block_size) + 4)
        self.pool, self.kind, self.paged = pool, kind, pool.blocks_of(kind, wanted)
        self.ids = pool.new_ids(batch)
        self.paged.allocate_batch(self.ids, np.zeros(batch, np.int64))
        self.length = 0
        self.first: Int64 = np.zeros(batch, np.int64)
        self.positions: list[Int64] | None = None
        self.hidden: Bool | None = None
        self.eviction = eviction
        self.plans: dict[Any, Any] = {}
        self.dropped = 0  # tokens before this position are gone, but for those that an eviction policy keeps
        self.new = 0  # tokens of the last `extend`
        self.new_hidden: Bool | None = None  # which of them are masked
        if eviction is not None:
            self.positions = [np.empty(0, np.int64)] * batch

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return len(self.ids)

    def stored(self) -> Int64:
        """Stored tokens of each row."""
        if self.positions is None:
            return self.length - self.first
        return np.array([len(row) for row in self.positions], np.int64)

    def positions_of(self, row: int) -> Int64:
        """Text positions of a row's stored tokens."""
        if self.positions is None:
            return np.arange(self.first[row], self.length)
        return self.positions[row]

    def free(self) -> None:
        """Give the blocks back."""
        self.paged.free_batch(self.ids)

    def fork(self) -> Rows:
        """The same tokens in sequences of their own; blocks are shared."""
        new = Rows(self.pool, self.kind, 0, 0, None if self.eviction is None else self.eviction.copy())
        new.ids = self.pool.new_ids(self.batch)
        self.paged.fork_batch(self.ids, new.ids)
        new.length, new.first, new.dropped = self.length, self.first.copy(), self.dropped
        new.positions = None if self.positions is None else list(self.positions)
        new.hidden = self.hidden
        return new

    def adopt(self, blocks: list[Any], first: Int64, length: int, hidden: Bool | None) -> None:
        """Begin with tokens that are stored already: the blocks of each row, from its text position `first` on."""
        self.paged.free_batch(self.ids)
        self.ids = self.ids[:0]
        ids = self.pool.new_ids(len(blocks))
        for i, (seq_id, row) in enumerate(zip(ids, blocks, strict=True)):
            self.paged.adopt(int(seq_id), row, int(length - first[i]))
            self.ids = ids[: i + 1]
        self.first, self.length, self.hidden = first, length, hidden

    # -- tokens come and go ---------------------------------------------------------------------------------

    def extend(self, total: int, padding: Bool | None, *, trim: bool) -> None:
        """Room for the tokens up to `total`.

        Args:
            padding: bool `(batch, visible)` of the last `visible` tokens, False if one is masked; None: none is.
            trim: whether tokens before the window may go.
        """
        new = total - self.length
        hidden = None if padding is None else ~np.broadcast_to(padding[:, -new:], (self.batch, new))
        if hidden is not None and not hidden.any():
            hidden = None
        if trim:
            self._trim(self.pool.block_size)
        counts = np.full(self.batch, new) if hidden is None else new - hidden.sum(1)
        self._with_room(lambda: self.paged.append_batch(self.ids, counts))
        self._note(new, hidden)
        self.length, self.new, self.new_hidden = total, new, hidden
        self.plans.clear()

    def _note(self, new: int, hidden: Bool | None) -> None:
        if hidden is not None or self.hidden is not None:
            old = np.zeros((self.batch, self.length), np.bool_) if self.hidden is None else self.hidden
            more = np.zeros((self.batch, new), np.bool_) if hidden is None else hidden
            self.hidden = np.concatenate([old, more], 1)
        if self.positions is None and hidden is not None:
            count = hidden.sum(1)
            left = np.array([row[:n].all() for row, n in zip(hidden, count, strict=True)])
            if (left & ((count == 0) | (self.first == self.length))).all():
                self.first = self.first + count
            else:
                self.positions = [self.positions_of(row) for row in range(self.batch)]
        if self.positions is not None:
            added = np.arange(self.length, self.length + new)
            self.positions = [
                np.concatenate([row, added if hidden is None else added[~hidden[i]]])
                for i, row in enumerate(self.positions)
            ]

    def _with_room(self, call: Callable[[], None]) -> None:
        while True:
            try:
                return call()
            except OutOfMemoryError as error:
                self.pool.make_room(self.kind, error)

    def _trim(self, slack: int) -> None:
        """Drop tokens before the window, where a row has more than `slack` of them."""
        if self.kind.window is None:
            return
        start = self.length - self.kind.window + 1
        if start - self.dropped < slack:
            return
        for row in range(self.batch):
            positions = self.positions_of(row)
            kept = len(positions) - int(np.searchsorted(positions, start))
            self.paged.apply_streaming_llm(int(self.ids[row]), 0, kept)
            if self.positions is not None:
                self.positions[row] = positions[len(positions) - kept :]
        self.first, self.dropped = np.maximum(self.first, start), start
        self.plans.clear()

    def expect_past(self, count: int) -> None:
        """Raise RuntimeError if the next token, without the last `count` ones, has dropped tokens in its window."""
        window = self.kind.window
        if count and window is not None and self.dropped > max(0, self.length - count - window + 1):
            raise RuntimeError(
                "crop: expected a cache that records the past (activate_past_recording) from before its tokens "
                f"reached the window of {window}, got one that has dropped them"
            )

    def crop(self, count: int, *, trim: bool) -> None:
        """Remove the last `count` tokens, of which `expect_past` approves, then drop those before the window."""
        length = max(0, self.length - count)
        if count:
            kept = [int(np.searchsorted(self.positions_of(row), length)) for row in range(self.batch)]
            self.paged.truncate_batch(self.ids, np.array(kept, np.int64))
            if self.positions is not None:
                self.positions = [row[:n] for row, n in zip(self.positions, kept, strict=True)]
            self.first = np.minimum(self.first, length)
            self.hidden = None if self.hidden is None else self.hidden[:, :length]
            if self.eviction is not None:
                self.eviction.cut(kept, count)
            self.length = length
            self.plans.clear()
        if trim:
            self._trim(1)
            self.evict()

    def select(self, rows: Int64) -> None:
        """Let row i be what row `rows[i]` was; blocks are shared between copies."""
        if len(rows) == self.batch:
            self.paged.reorder(self.ids, rows)
        else:
            ids, sources, taken = self.pool.new_ids(len(rows)), [], np.zeros(self.batch, np.bool_)
            for i, row in enumerate(rows):
                if taken[row]:
                    sources.append((self.ids[row], ids[i]))
                else:
                    ids[i], taken[row] = self.ids[row], True
            if sources:
                self.paged.fork_batch(*np.array(sources, np.uint64).T.copy())
            gone = self.ids[~taken]
            self.ids = ids
            if len(gone):
                self.paged.free_batch(gone)
        self.first = self.first[rows]
        self.positions = None if self.positions is None else [self.positions[row] for row in rows]
        self.hidden = None if self.hidden is None else self.hidden[rows]
        if self.eviction is not None:
            self.eviction.select(rows)
        self.plans.clear()

    def evict(self) -> None:
        """Evict down to the budget of the policy, if there is one."""
        if self.eviction is None or self.positions is None:
            return

        def read(row: int) -> tuple[Float32, Float32]:
            return self.paged.read(0, int(self.ids[row]))  # a layer that evicts has a `PagedKvCache` of its own

        for row, kept in self.eviction.choose(self.positions, self.length, read):
            seq_id = int(self.ids[row])
            self.paged.keep_tokens(seq_id, kept)
            self.positions[row] = self.positions[row][kept]
            self.plans.clear()

    # -- K and V --------------------------------------------------------------------------------------------

    def agrees(self, padding: Bool | None, visible: int) -> bool:
        """True if a mask of the last `visible` tokens masks just those that are not stored.

        Raises:
            ValueError: it shows a token that was masked when it came, whose K and V are not here.
        """
        if self.hidden is None:
            return padding is None or bool(padding.all())
        hidden = self.hidden[:, self.length - visible :]
        if padding is None:
            padding = np.ones((1, visible), np.bool_)
        if (hidden & padding).any():
            raise ValueError(
                "attention_mask: expected the mask of earlier calls and more tokens, got one that shows a token which "
                "was masked then and is not stored"
            )
        return not (~padding & ~hidden).any()

    def write(self, slot: int, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        """Store K and V of the tokens of the last `extend`, `(batch, KV heads, new, channels)`."""
        if self.new == 1 and self.new_hidden is None:
            return self.paged.write_batch(slot, self.ids, keys[:, :, 0], values[:, :, 0])
        counts, pair = np.full(self.batch, self.new), []
        for states in (keys, values):
            rows = states.transpose(0, 2, 1, 3).reshape(-1, *states.shape[1::2])
            pair.append(rows if self.new_hidden is None else rows[~self.new_hidden.ravel()])
        if self.new_hidden is not None:
            counts = self.new - self.new_hidden.sum(1)
        self.paged.write_ragged(slot, self.ids, counts, *pair)

    def fork_up_to(self, ids: UInt64, counts: Int64) -> UInt64:
        """New sequences of the first `counts[i]` tokens of each sequence `ids[i]`, which may repeat."""
        forks = self.pool.new_ids(len(ids))
        self.paged.fork_batch(ids, forks)
        self.paged.truncate_batch(forks, counts)
        return forks

    def read(self, slot: int, which: int, total: int, visible: int) -> Float32:
        """K (`which` 0) or V of the text positions `total - visible` to `total`, zeros if none is stored.

        Returns:
            float32 `(batch, KV heads, visible, channels)`.

        Raises:
            RuntimeError: some of them were before the window, and are gone.
        """
        if total - visible < self.dropped:
            raise RuntimeError(
                f"states: expected positions from {self.dropped} on, for the window has dropped those before, got "
                f"{total - visible}"
            )
        out = np.zeros((self.batch, self.kind.heads, visible, self.kind.channels), np.float32)
        for row in range(self.batch):
            at = self.positions_of(row) - (total - visible)
            shown = (at >= 0) & (at < visible)
            out[row][:, at[shown]] = self.paged.read(slot, int(self.ids[row]))[which][shown].swapaxes(0, 1)
        return out
