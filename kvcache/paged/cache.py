"""`PagedKvCache`: K and V of many sequences in blocks, written, read and attended over in place.

Blocks of fixed size and a table per sequence are the design of PagedAttention (Kwon et al., SOSP 2023,
sections 4.1 to 4.3); sharing and copy-on-write follow its section 4.4.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from kvcache.core.arguments import REQUIRED, as_indices, as_integer, as_output, as_pair
from kvcache.core.calibration import Calibration
from kvcache.core.copying import refuse_copies
from kvcache.core.layer_formats import Formats
from kvcache.core.layer_formats import unpacked as unpacked_dtypes
from kvcache.core.locks import CallLock
from kvcache.core.memory import num_blocks_within
from kvcache.core.rowformat import Format, RowFormats, stored_dtypes
from kvcache.core.store import BlockStore
from kvcache.errors import SequenceNotFoundError
from kvcache.eviction import EvictionStrategy
from kvcache.paged import attending, eviction, reports, unpacked
from kvcache.paged.attention import SequenceAttention
from kvcache.paged.blocks import PagedBlocks
from kvcache.paged.evictor import Evictor
from kvcache.paged.handle import PagedKvCacheHandle
from kvcache.paged.reports import read_only
from kvcache.paged.residual import ResidualSequences
from kvcache.paged.residual_attention import ResidualAttention
from kvcache.paged.seq_ids import as_seq_id, as_seq_ids
from kvcache.paged.sequences import PagedSequences
from kvcache.paged.shown import as_html, describe, describe_settings
from kvcache.paged.spans import as_lengths, refuse, row_block
from kvcache.paged.tables import BlockTables

__all__ = ["PagedKvCache"]

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
_INT64 = np.dtype(np.int64)
Pair = TypeVar("Pair", bound=tuple[Any, Any])


class PagedKvCache:
    """K and V of many sequences in blocks of fixed size, shared between forks, attended in place.

    Args:
        num_blocks: blocks in all; their memory is mapped now and touched when first written. It may be left out if
            `max_memory_bytes` is given.
        block_size: tokens per block, 1 to 256.
        num_heads: KV heads; queries may have any multiple of it.
        head_dim: channels per head, a multiple of 8, at most 512; `value_head_dim` names those of V apart.
        num_layers: layers; every block holds its tokens' K and V of all of them.
        separate_layers: a sequence, and so a block, holds tokens of one layer. A text has a sequence for each layer, so
            its layers may keep different tokens. Every call names the sequence's layer. All layers have one format.
        dtype: storage format, "f32", "f16", "q8", "q6", "q4", "q3" or "q2"; `key_dtype`, `value_dtype` name them apart.
            The quantised ones keep a scale and a minimum in f16 per token and head, and codes of exactly that
            many bits. A list or tuple has one for each layer. A `Format` in Python is applied to what is written, and
            stored in f32.
        rotate: whether quantised rows are stored under a Hadamard rotation, which spreads outlier channels
            (QuaRot, arXiv 2404.00456, section 4): "auto" where their head_dim is a power of two, True, or False.
        eviction_strategy: which sequence is evicted first, by default `EvictionStrategy.LRU()`.
        eviction_threshold: share of blocks in use from which `needs_eviction` is true, clamped to [0, 1].
        calibration: a `Calibration` of the keys of these layers, heads and channels. Keys are stored less their centre,
            which `read` adds to tokens that were written, and quantised with feedback. Attention returns what it would
            over the keys of `read`, log-sum-exps and masses too. A layer with a centre takes no softcap and no
            sink_queries, whose scores would tell the constant: ValueError.
        residual_length: tokens per group of KIVI's residual, 0 to 256. A query reads its own group of the text in f16,
            and all earlier ones packed. Each sequence keeps f16 rows from the group on in which its last `append`
            began; their memory grows with the sequences. Evicted tokens still count where a group begins and ends, so
            a group that lost some is shorter. 0: all tokens are read packed.
        first_tokens: first tokens of each text that every query reads in f16, at most `residual_length` if that is not
            0, and 256. 16 suit a calibration: their keys are far from the centre of all others. `read` returns packed
            rows, and blocks that `adopt` shares are read packed, unless `unpack` gives f16 rows. `copy_blocks` and
            `max_memory_bytes` exclude both: ValueError.
        max_memory_bytes: the most bytes of K and V of all blocks, an int or a text such as "4GiB"; with `num_blocks`
            the lower limit counts. ValueError: too few for one block.

    Every call can raise these errors, and has then changed nothing.

    Raises:
        SequenceNotFoundError: a sequence that does not exist.
        InvalidOperationError: the id of a new sequence is taken.
        OutOfMemoryError: too few blocks are free, the copies of shared ones counted; the system refuses memory.
        IndexError: a layer or a token out of range.
        TypeError, ValueError: an argument of another kind, shape or range; a sequence that a batch names twice; values
            that the format cannot hold.

    Calls on one cache are serialised; the kernels run without the GIL. A call inside another one on the same thread
    (from a signal handler or a finaliser) raises InvalidOperationError; `free` and `free_batch` take effect when the
    outer call ends.
    """

    def __init__(
        self,
        num_blocks: int | None = None,
        block_size: int = REQUIRED,
        num_heads: int = REQUIRED,
        head_dim: int = REQUIRED,
        *,
        num_layers: int = 1,
        dtype: Formats | Format = "f16",
        key_dtype: Formats | Format | None = None,
        value_dtype: Formats | Format | None = None,
        rotate: bool | str = "auto",
        value_head_dim: int | None = None,
        eviction_strategy: EvictionStrategy | None = None,
        eviction_threshold: float = 0.9,
        max_memory_bytes: int | str | None = None,
        calibration: Calibration | None = None,
        separate_layers: bool = False,
        residual_length: int = 0,
        first_tokens: int = 0,
    ) -> None:
        lock = CallLock()  # of a residual: it comes before those of its parts
        length, firsts = as_lengths(residual_length, first_tokens, max_memory_bytes)
        formats = dtype if key_dtype is None else key_dtype, dtype if value_dtype is None else value_dtype
        dtypes = stored_dtypes(formats, calibration, "calibration")
        settings = block_size, num_heads, head_dim, *dtypes, rotate, value_head_dim, bool(separate_layers)
        total = num_blocks_within(num_blocks, max_memory_bytes, num_layers, *settings)
        store = BlockStore(num_layers, total, *settings, calibration)
        self._blocks = PagedBlocks(store, RowFormats(*formats))
        self._store, self._pool, self._lock = store, self._blocks.pool, self._blocks.lock
        self._table = BlockTables(self._pool, store.block_size)
        self._blocks.holders.append(self._table.references)
        self._sequences: PagedSequences | ResidualSequences = PagedSequences(self._lock, store, self._table)
        self._attention: SequenceAttention | ResidualAttention = SequenceAttention(self._lock, store, self._table)
        self._residual: ResidualSequences | None = None
        if length or firsts:
            rows = PagedKvCache(
                0, row_block(length, firsts), store.num_heads, store.head_dim, num_layers=store.num_named,
                key_dtype=unpacked_dtypes(store.key_dtype), value_dtype=unpacked_dtypes(store.value_dtype),
                value_head_dim=store.value_head_dim, separate_layers=separate_layers,
            )  # fmt: skip
            self._residual = ResidualSequences(lock, self._sequences, self._table, rows, length, firsts)
            self._sequences = self._residual
            self._attention = ResidualAttention(self._residual, self._attention)
        self._evictor = Evictor(self._lock, self._table)
        self._threshold = 0.0
        self.with_eviction_strategy(eviction_strategy or EvictionStrategy.LRU())
        self.with_eviction_threshold(eviction_threshold)

    # -- shape and memory -----------------------------------------------------------------------------------

    num_layers = read_only(lambda self: self._store.num_named, "Layers.")
    separate_layers = read_only(lambda self: self._store.separate, "Whether each sequence is of one layer.")
    num_heads = read_only(lambda self: self._store.num_heads, "KV heads.")
    head_dim = read_only(lambda self: self._store.head_dim, "Channels per head of K and of queries.")
    value_head_dim = read_only(lambda self: self._store.value_head_dim, "Channels per head of V and of the output.")
    block_size = read_only(lambda self: self._store.block_size, "Tokens per block.")
    key_dtype = read_only(lambda self: self._store.key_dtype, "Format that stores K; a tuple where layers differ.")
    value_dtype = read_only(lambda self: self._store.value_dtype, "Format that stores V; a tuple where layers differ.")
    formats = read_only(lambda self: self._blocks.formats, "The formats of K and V that are written in Python.")
    calibration = read_only(lambda self: self._store.calibration, "The `Calibration` of the keys, or None.")
    total_blocks = read_only(lambda self: self._pool.num_blocks, "Blocks in all.")
    free_block_count = read_only(lambda self: self._pool.num_free, "Blocks without a reference.")
    used_block_count = read_only(lambda self: self._pool.num_used, "Blocks with references; a shared one counts once.")
    block_memory_bytes = read_only(lambda self: self._store.block_bytes, "Bytes of K and V of a block in all layers.")
    residual_length = read_only(lambda self: self._residual.length if self._residual else 0, "Tokens of a group, or 0.")
    first_tokens = read_only(lambda self: self._residual.firsts if self._residual else 0, "Those read unpacked by all.")
    total_memory_bytes = read_only(
        lambda self: self._store.nbytes + reports.unpacked_bytes(self)[0], "Bytes of K and V of all blocks."
    )
    used_memory_bytes = read_only(
        lambda self: self._store.block_bytes * self._pool.num_used + reports.unpacked_bytes(self)[1],
        "Bytes of K and V of the blocks in use.",
    )
    utilization = read_only(
        lambda self: self._pool.num_used / max(self._pool.num_blocks, 1), "Used blocks over all; 0.0 without blocks."
    )

    @property
    def blocks(self) -> PagedBlocks:
        """The blocks, the references on them and their lock, for caches that share them."""
        return self._blocks

    # -- sequences start and end ----------------------------------------------------------------------------

    def allocate(self, seq_id: int, num_tokens: int) -> None:
        """Start a sequence with room for `num_tokens` tokens, 0 allowed; unwritten tokens read as zeros."""
        self._sequences.allocate(as_seq_id(seq_id), as_integer(num_tokens, "num_tokens"))

    def allocate_batch(self, seq_ids: npt.ArrayLike, num_tokens: npt.ArrayLike) -> None:
        """`allocate` for many sequences, of `num_tokens[i]` tokens each, all or nothing."""
        # Copies: both are read several times, and a finaliser may run in between.
        ids, counts = as_seq_ids(seq_ids).copy(), as_indices(num_tokens, "num_tokens").copy()
        self._sequences.allocate_batch(ids, counts)

    def adopt(self, seq_id: int, block_ids: npt.ArrayLike, num_tokens: int) -> None:
        """Start a sequence whose first tokens lie in blocks that are in use already: shared, not copied.

        Args:
            block_ids: integers `(ceil(num_tokens / block_size),)`; the last block may be covered in part, and is
                then copied by the first append. BlockNotFoundError: one is not in use.
        """
        ids, count = self._blocks.as_ids(block_ids), as_integer(num_tokens, "num_tokens")
        self._sequences.adopt(as_seq_id(seq_id), ids, count)

    def fork(self, src_seq: int, dst_seq: int) -> None:
        """Start `dst_seq` with the tokens of `src_seq`: every block shared until one of them writes to it."""
        self._sequences.fork(as_seq_id(src_seq, "src_seq"), as_seq_id(dst_seq, "dst_seq"))

    def fork_batch(self, src_seqs: npt.ArrayLike, dst_seqs: npt.ArrayLike) -> None:
        """`fork` for many pairs, all or nothing; one source may have many forks."""
        self._sequences.fork_batch(as_seq_ids(src_seqs, "src_seqs").copy(), as_seq_ids(dst_seqs, "dst_seqs").copy())

    def swap(self, first_seq: int, second_seq: int) -> None:
        """Exchange the ids and handles of two sequences, for example to return to a fork; takes no memory."""
        self._sequences.swap(as_seq_id(first_seq, "first_seq"), as_seq_id(second_seq, "second_seq"))

    def free(self, seq_id: int) -> None:
        """End a sequence and release its blocks.

        Inside another call of this cache on the same thread it takes effect when that call ends.
        """
        self._sequences.free(as_seq_id(seq_id))

    def free_batch(self, seq_ids: npt.ArrayLike) -> None:
        """`free` for many sequences, all or nothing."""
        self._sequences.free_batch(as_seq_ids(seq_ids).copy())

    # -- tokens come and go ---------------------------------------------------------------------------------

    def append(self, seq_id: int, num_new_tokens: int) -> None:
        """Add `num_new_tokens` tokens, which read as zeros until written; a shared tail block is copied first."""
        self._sequences.append(as_seq_id(seq_id), as_integer(num_new_tokens, "num_new_tokens"))

    def append_batch(self, seq_ids: npt.ArrayLike, counts: npt.ArrayLike | None = None) -> None:
        """`append` for many sequences, all or nothing: `counts[i]` tokens each, 0 allowed, by default one."""
        if counts is None:
            self._sequences.append_batch(as_seq_ids(seq_ids))
        else:
            self._sequences.append_batch(as_seq_ids(seq_ids).copy(), as_indices(counts, "counts").copy())

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, as after a rejected draft in speculative decoding."""
        self._sequences.truncate(as_seq_id(seq_id), as_integer(num_tokens, "num_tokens"))

    def truncate_batch(self, seq_ids: npt.ArrayLike, num_tokens: npt.ArrayLike) -> None:
        """`truncate` for many sequences, to `num_tokens[i]` tokens each, all or nothing."""
        self._sequences.truncate_batch(as_seq_ids(seq_ids).copy(), as_indices(num_tokens, "num_tokens").copy())

    def reorder(self, seq_ids: npt.ArrayLike, rows: npt.ArrayLike) -> None:
        """Give each sequence `seq_ids[i]` the tokens that `seq_ids[rows[i]]` has, as a step of beam search does.

        All or nothing. Blocks are shared until one of their holders writes to them, so this needs no free ones, and
        tokens that no row names are gone. Ids, handles, priorities, pins and accesses stay with the sequences.

        Args:
            seq_ids: each sequence once.
            rows: integers `(len(seq_ids),)`, indices of `seq_ids`; some may repeat, others be left out. IndexError:
                one is out of range.
        """
        self._sequences.reorder(as_seq_ids(seq_ids).copy(), as_indices(rows, "rows").copy())

    def keep_tokens(self, seq_id: int, indices: npt.ArrayLike) -> None:
        """Evict all tokens of a sequence but those at `indices` (ascending, among those alive).

        Blocks that hold none of them are freed; nothing is moved (see `compact`).
        """
        self._sequences.keep(as_seq_id(seq_id), as_indices(indices, "indices"))

    def apply_streaming_llm(self, seq_id: int, sink_tokens: int, window_tokens: int) -> int:
        """Keep exactly the first `sink_tokens` and the last `window_tokens` tokens; returns how many it dropped.

        Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023), section 3.
        """
        sinks, window = as_integer(sink_tokens, "sink_tokens"), as_integer(window_tokens, "window_tokens")
        return self._sequences.stream(as_seq_id(seq_id), sinks, window)

    def compact(self, seq_id: int) -> None:
        """Move scattered tokens into as few blocks as they need, bit for bit.

        Without shared blocks they move within the sequence's own blocks; with shared ones to fresh blocks.
        """
        self._sequences.compact(as_seq_id(seq_id))

    # -- K and V; attention: see paged/attending.py -------------------------------------------------------

    def write(
        self, layer: int, seq_id: int, keys: npt.ArrayLike, values: npt.ArrayLike, start: int | None = None
    ) -> None:
        """Store K and V of consecutive tokens in one layer; shared blocks are copied for this sequence first.

        Args:
            keys, values: `(num_tokens, num_heads, head_dim)`, of V `value_head_dim`: arrays, or tensors with the buffer
                protocol or DLPack. float32, float16, float64 and bfloat16 (of DLPack or ml_dtypes) are read in place,
                with any strides of tokens and heads (head-major too), and converted a few tokens at a time. Only what
                has the channels of a head apart is copied first.
            start: index of the first token; by default they are the sequence's last tokens.
        """
        rows = self._blocks.as_rows(keys, values)
        layer, first = as_integer(layer, "layer"), None if start is None else as_integer(start, "start")
        self._sequences.write(layer, as_seq_id(seq_id), first, rows)

    def write_batch(self, layer: int, seq_ids: npt.ArrayLike, keys: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """`write_ragged` of the last token of each of many sequences, none of them empty.

        Args:
            keys, values: `(len(seq_ids), num_heads, head_dim)`.
        """
        ids = as_seq_ids(seq_ids)
        self._sequences.write_batch(as_integer(layer, "layer"), ids, self._blocks.as_rows(keys, values))

    def write_ragged(
        self, layer: int, seq_ids: npt.ArrayLike, lens: npt.ArrayLike, keys: npt.ArrayLike, values: npt.ArrayLike
    ) -> None:
        """`write` of the last `lens[i]` tokens of each of many sequences, 0 allowed, all or nothing.

        Args:
            keys, values: `(sum(lens), num_heads, head_dim)`, the sequences one after another.
        """
        ids, counts = as_seq_ids(seq_ids).copy(), as_indices(lens, "lens").copy()
        self._sequences.write_batch(as_integer(layer, "layer"), ids, self._blocks.as_rows(keys, values), counts)

    @overload
    def read(self, layer: int, seq_id: int, start: int = 0, stop: int | None = None) -> tuple[Float32, Float32]: ...
    @overload
    def read(self, layer: int, seq_id: int, start: int = 0, stop: int | None = None, *, out: Pair) -> Pair: ...
    def read(self, layer: int, seq_id: int, start: int = 0, stop: int | None = None, *, out: Any = None) -> Any:
        """`(keys, values)` of tokens `start`..`stop`, float32 `(n, num_heads, head_dim)` each, of V `value_head_dim`.

        `out`: a pair of such arrays, or tensors, with any strides of tokens and heads: written and returned.
        """
        first, last = as_integer(start, "start"), None if stop is None else as_integer(stop, "stop")
        keys, values = as_pair(out, "out")
        layer, seq_id = as_integer(layer, "layer"), as_seq_id(seq_id)
        rows = self._sequences.read(layer, seq_id, first, last, keys=as_output(keys), values=as_output(values))
        return rows if out is None else (keys, values)

    attention = attending.attention

    def write_and_attend(
        self, layer: int, seq_ids: npt.ArrayLike, lens: npt.ArrayLike, keys: npt.ArrayLike, values: npt.ArrayLike,
        queries: npt.ArrayLike, *, scale: float | None = None, window: int | None = None, softcap: float | None = None,
        sinks: npt.ArrayLike | None = None, starts: npt.ArrayLike | None = None,
    ) -> Float32:  # fmt: skip
        """`write_ragged` of the newest tokens, and `attention` of their queries: what a layer does in a pass.

        Args:
            queries: `(sum(lens), num_query_heads, head_dim)`; other arguments as of these two.
        """
        ids = as_seq_ids(seq_ids).copy()
        if isinstance(lens, np.ndarray) and lens.dtype is _INT64:  # called once per layer of a step
            counts: Int64 = np.ascontiguousarray(lens).copy()
        else:
            counts = as_indices(lens, "lens").copy()
        number = layer if type(layer) is int and -1 < layer < 2**30 else as_integer(layer, "layer")
        self._sequences.write_batch(number, ids, self._blocks.as_rows(keys, values), counts)
        mixed: Float32 = self._attention.over(
            number, queries, ids, counts, scale, None, None, False, None, False, window, softcap, sinks, starts, True,
            None, 0,
        )  # fmt: skip
        return mixed

    # -- tokens that a residual or `first_tokens` keeps unpacked: see paged/unpacked.py -----------------------

    unpacked_tokens, read_unpacked = unpacked.unpacked_tokens, unpacked.read_unpacked
    unpack, pack, reserve_unpacked = unpacked.unpack, unpacked.pack, unpacked.reserve_unpacked

    # -- eviction, which callers start: see paged/eviction.py -------------------------------------------------

    eviction_strategy = read_only(lambda self: self._evictor.strategy, "Which sequence is evicted first.")
    eviction_threshold = read_only(lambda self: self._threshold, "See `needs_eviction`.")
    needs_eviction = read_only(
        lambda self: self.utilization >= self._threshold, "Whether `utilization` is at least `eviction_threshold`."
    )
    with_eviction_strategy, with_eviction_threshold = eviction.with_eviction_strategy, eviction.with_eviction_threshold
    set_priority, pin, unpin = eviction.set_priority, eviction.pin, eviction.unpin
    select_eviction_target, evict = eviction.select_eviction_target, eviction.evict
    evict_to_threshold = eviction.evict_to_threshold

    # -- blocks ---------------------------------------------------------------------------------------------

    def grow(self, num_blocks: int) -> None:
        """Add `num_blocks` free blocks; sequences, forks, handles and prefix caches over this cache stay as they are.

        Every block keeps its id and its K and V, bit for bit. It costs a copy of the blocks that were ever written,
        layer by layer, during which other calls wait; each old layer is given back to the system once it is copied, so
        the memory in use rises by one layer at most. OutOfMemoryError, MemoryError: nothing has changed.
        """
        self._sequences.grow(as_integer(num_blocks, "num_blocks"), self._blocks.reserves)

    def copy_blocks(self, sources: npt.ArrayLike, targets: npt.ArrayLike) -> None:
        """Copy the K and V of whole blocks, all layers, in order; BlockNotFoundError: one is not in use."""
        refuse("copy_blocks", self.residual_length, self.first_tokens)
        self._blocks.copy(sources, targets)

    def reference_counts(self, block_ids: npt.ArrayLike) -> Int32:
        """References of sequences and prefix caches on each of these blocks, int32 `(n,)`; 0 where it is free."""
        ids = self._blocks.as_ids(block_ids)
        with self._lock:
            return self._pool.ref_counts()[ids]

    def check(self) -> None:
        """Verify every invariant of tables and pool, and that each block has as many references as are held on it.

        Raises:
            AssertionError: naming what is wrong.
        """
        with self._lock:
            self._blocks.check()
            self._table.check()
        if self._residual is not None:
            self._residual.check()

    # -- reports: see paged/reports.py ----------------------------------------------------------------------

    num_sequences = read_only(lambda self: len(self._table), "Sequences alive.")

    def __contains__(self, seq_id: int) -> bool:
        """Whether there is such a sequence; takes no memory."""
        seq_id = as_seq_id(seq_id)
        with self._lock:
            return seq_id in self._table

    def handle(self, seq_id: int) -> PagedKvCacheHandle:
        """A handle on one sequence."""
        seq_id = as_seq_id(seq_id)
        with self._lock:
            if seq_id not in self._table:
                raise SequenceNotFoundError(seq_id)
            return PagedKvCacheHandle(self, seq_id, self._table.uid(seq_id))

    sequence_ids, get_sequence, block_table = reports.sequence_ids, reports.get_sequence, reports.block_table
    stats, memory = reports.stats, reports.memory
    _repr_html_ = as_html
    __reduce_ex__ = refuse_copies("`fork` copies a sequence")

    def __str__(self) -> str:
        return describe(self)

    def __repr__(self) -> str:
        return describe_settings(self)
