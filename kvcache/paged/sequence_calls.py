"""The sequences of a `PagedKvCache`: they start, grow, share blocks, lose tokens and end.

Blocks of fixed size and a table per sequence are the design of PagedAttention (Kwon et al., SOSP 2023,
sections 4.1 to 4.3); sharing and copy-on-write follow its section 4.4.
"""

from __future__ import annotations

from functools import partial

import numpy.typing as npt

from kvcache.core.arguments import as_indices, as_integer
from kvcache.core.store import BlockStore
from kvcache.errors import SequenceNotFoundError
from kvcache.paged.batch import BatchTable
from kvcache.paged.blocks import PagedBlocks
from kvcache.paged.reports import BlockId, CsrBlockTable, SeqId, SequenceInfo
from kvcache.paged.seq_ids import as_seq_id, as_seq_ids
from kvcache.paged.sequence_store import SequenceStore

__all__ = ["PagedSequences"]


class PagedSequences(PagedBlocks):
    """Sequences in blocks; who calls one by an id that is not there gets a `SequenceNotFoundError`."""

    def __init__(self, store: BlockStore) -> None:
        super().__init__(store)
        self._table = BatchTable(self._pool, store.block_size)
        self._sequences = SequenceStore(store, self._table)
        self._holders.append(self._table.references)

    # -- start and end --------------------------------------------------------------------------------------

    def allocate(self, seq_id: int, num_tokens: int) -> None:
        """Start a sequence with room for `num_tokens` tokens, 0 allowed; unwritten tokens read as zeros.

        Raises:
            InvalidOperationError: the id is taken.
            OutOfMemoryError: too few blocks are free.
        """
        seq_id, count = as_seq_id(seq_id), as_integer(num_tokens, "num_tokens")
        with self._lock:
            self._sequences.allocate(seq_id, count)

    def adopt(self, seq_id: int, block_ids: npt.ArrayLike, num_tokens: int) -> None:
        """Start a sequence whose first tokens lie in blocks that are in use already: shared, not copied.

        Args:
            block_ids: integers `(ceil(num_tokens / block_size),)`; the last block may be covered in part, and is
                then copied by the first append.

        Raises:
            InvalidOperationError: the id is taken.
            ValueError: the number of blocks does not fit `num_tokens`.
            BlockNotFoundError: a block is not in use.
        """
        seq_id, blocks, count = as_seq_id(seq_id), self._block_ids(block_ids), as_integer(num_tokens, "num_tokens")
        with self._lock:
            self._table.adopt(seq_id, blocks, count)

    def fork(self, src_seq: int, dst_seq: int) -> None:
        """Start `dst_seq` with the tokens of `src_seq`: every block shared until one of them writes to it.

        Raises:
            InvalidOperationError: `dst_seq` is taken.
            SequenceNotFoundError: there is no `src_seq`.
        """
        source, target = as_seq_id(src_seq), as_seq_id(dst_seq)
        with self._lock:
            self._table.fork(source, target)

    def swap(self, first_seq: int, second_seq: int) -> None:
        """Two sequences exchange their ids and handles: the way back to a fork. Takes no memory.

        Raises:
            SequenceNotFoundError: one of them is not there.
        """
        first, second = as_seq_id(first_seq), as_seq_id(second_seq)
        with self._lock:
            self._table.swap(first, second)

    def free(self, seq_id: int) -> None:
        """End a sequence and let go of its blocks.

        Called inside another call of this cache on the same thread (by a signal handler, by a finaliser), it is done
        when that call leaves.

        Raises:
            SequenceNotFoundError: no such sequence.
        """
        seq_id = as_seq_id(seq_id)
        if self._lock.inside and seq_id not in self._table:
            raise SequenceNotFoundError(seq_id)
        self._lock.when_free(partial(self._table.free, seq_id))

    # -- tokens come and go ---------------------------------------------------------------------------------

    def append(self, seq_id: int, num_new_tokens: int) -> None:
        """Room for `num_new_tokens` more tokens, zeros until written; a shared tail block is copied first.

        Raises:
            SequenceNotFoundError: no such sequence.
            OutOfMemoryError: too few blocks are free, the copy counted.
        """
        seq_id, count = as_seq_id(seq_id), as_integer(num_new_tokens, "num_new_tokens")
        with self._lock:
            self._sequences.append(seq_id, count)

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, as after a rejected draft in speculative decoding.

        Raises:
            SequenceNotFoundError, ValueError: no such sequence; not between 0 and its length.
        """
        seq_id, count = as_seq_id(seq_id), as_integer(num_tokens, "num_tokens")
        with self._lock:
            self._table.truncate(seq_id, count)

    def keep_tokens(self, seq_id: int, indices: npt.ArrayLike) -> None:
        """Evict all tokens of a sequence but those at `indices` (ascending, among those alive).

        Blocks that hold none of them are freed; nothing is moved (see `compact`).

        Raises:
            SequenceNotFoundError, IndexError, ValueError: no such sequence; out of range; not ascending.
        """
        seq_id, kept = as_seq_id(seq_id), as_indices(indices, "token indices")
        with self._lock:
            self._table.keep(seq_id, kept)

    def apply_streaming_llm(self, seq_id: int, sink_tokens: int, window_tokens: int) -> int:
        """Keep exactly the first `sink_tokens` and the last `window_tokens` tokens; the number that left.

        Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023), section 3.

        Raises:
            SequenceNotFoundError, ValueError: no such sequence; a negative count.
        """
        seq_id = as_seq_id(seq_id)
        sinks, window = as_integer(sink_tokens, "sink_tokens"), as_integer(window_tokens, "window_tokens")
        with self._lock:
            return self._table.stream(seq_id, sinks, window)

    def compact(self, seq_id: int) -> None:
        """Move scattered tokens into as few blocks as they need, bit for bit.

        Without shared blocks they move within the sequence's own blocks; with shared ones to fresh blocks.

        Raises:
            SequenceNotFoundError: no such sequence.
            OutOfMemoryError: too few blocks are free for the fresh ones.
        """
        seq_id = as_seq_id(seq_id)
        with self._lock:
            self._sequences.compact(seq_id)

    # -- many in one call -----------------------------------------------------------------------------------

    def allocate_batch(self, seq_ids: npt.ArrayLike, num_tokens: npt.ArrayLike) -> None:
        """Start many sequences with room for as many tokens each, all or nothing.

        Args:
            num_tokens: integers `(len(seq_ids),)`.

        Raises:
            InvalidOperationError, ValueError: an id is taken; one named twice; another number of lengths.
            OutOfMemoryError: too few blocks are free for all of them together.
        """
        # Copies: both are read several times, and a finaliser may run in between.
        ids, counts = as_seq_ids(seq_ids).copy(), as_indices(num_tokens, "token counts").copy()
        with self._lock:
            self._sequences.allocate_batch(ids, counts)

    def append_batch(self, seq_ids: npt.ArrayLike) -> None:
        """Room for one more token in each of many sequences, all or nothing.

        Raises:
            SequenceNotFoundError, ValueError: no such sequence; one named twice.
            OutOfMemoryError: too few blocks are free for all of them together.
        """
        ids = as_seq_ids(seq_ids)
        with self._lock:
            self._sequences.append_batch(ids)

    def fork_batch(self, src_seqs: npt.ArrayLike, dst_seqs: npt.ArrayLike) -> None:
        """`fork` for many pairs, all or nothing; one source may have many forks.

        Raises:
            InvalidOperationError, ValueError: a target is taken; one named twice; not as many sources as targets.
            SequenceNotFoundError: a source is not there.
        """
        sources, targets = as_seq_ids(src_seqs).copy(), as_seq_ids(dst_seqs).copy()
        with self._lock:
            self._table.fork_batch(sources, targets)

    def free_batch(self, seq_ids: npt.ArrayLike) -> None:
        """End many sequences, all or nothing; inside another call of this thread, as `free`, when that leaves.

        Raises:
            SequenceNotFoundError, ValueError: no such sequence; one named twice.
        """
        ids = as_seq_ids(seq_ids).copy()
        if not self._lock.inside:
            self._lock.when_free(partial(self._table.free_batch, ids))
            return
        numbers = ids.tolist()
        self._expect_each(numbers)
        # One by one: those that another release frees before it is their turn do not keep the others.
        for seq_id in numbers:
            self._lock.when_free(partial(self._table.free, seq_id))

    def _expect_each(self, ids: list[int]) -> None:
        # Inside of another call: without the table's scratch.
        for seq_id in ids:
            if seq_id not in self._table:
                raise SequenceNotFoundError(seq_id)
        if len(set(ids)) < len(ids):
            raise ValueError("expected each sequence once, got one twice")

    # -- which there are ------------------------------------------------------------------------------------

    @property
    def num_sequences(self) -> int:
        """Sequences alive."""
        return len(self._table)

    def __contains__(self, seq_id: int) -> bool:
        """Whether there is such a sequence; takes no memory."""
        seq_id = as_seq_id(seq_id)
        with self._lock:
            return seq_id in self._table

    def sequence_ids(self) -> list[SeqId]:
        """Every id, ascending."""
        with self._lock:
            return list(map(SeqId, self._table.seq_ids()))

    def get_sequence(self, seq_id: int) -> SequenceInfo | None:
        """A snapshot of one sequence, or None; not an access."""
        seq_id = as_seq_id(seq_id)
        with self._lock:
            return self._sequence_info(seq_id)

    def _sequence_info(self, seq_id: int) -> SequenceInfo | None:
        if seq_id not in self._table:
            return None
        tokens, position, last_access, count, priority, _, _ = self._table.info(seq_id)
        blocks = tuple(map(BlockId, self._table.blocks(seq_id).tolist()))
        return SequenceInfo(SeqId(seq_id), tokens, position, blocks, last_access, count, priority)

    def block_table(self, seq_ids: npt.ArrayLike) -> CsrBlockTable:
        """The block tables of several sequences as CSR arrays, as FlashInfer lays them out.

        Raises:
            SequenceNotFoundError: no such sequence.
        """
        ids = as_seq_ids(seq_ids)
        with self._lock:
            return CsrBlockTable(*self._table.csr(ids))

    def _check(self) -> None:
        super()._check()
        self._table.check()
