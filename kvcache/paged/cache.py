"""`PagedKvCache`: K and V of many sequences in blocks, written, read and attended over in place.

Blocks of fixed size and a table per sequence are the design of PagedAttention (Kwon et al., SOSP 2023,
sections 4.1 to 4.3); sharing and copy-on-write follow its section 4.4.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Union, overload

import numpy as np
import numpy.typing as npt

from kvcache.core.attention_call import AttentionCall
from kvcache.core.calibration import Calibration
from kvcache.core.kvrows import KvRows
from kvcache.core.layer_formats import Formats
from kvcache.core.memory import as_spill_limit, num_blocks_within
from kvcache.core.rowformat import Format, RowFormats, stored_dtypes
from kvcache.core.store import BlockStore
from kvcache.errors import SequenceNotFoundError
from kvcache.eviction import EvictionStrategy
from kvcache.paged.attention import SequenceAttention
from kvcache.paged.blocks import PagedBlocks
from kvcache.paged.evictor import Evictor
from kvcache.paged.handle import PagedKvCacheHandle
from kvcache.paged.queried import QueriedSequences
from kvcache.paged.reports import CacheStats, CsrBlockTable, SeqId, SequenceInfo, SpillStats
from kvcache.paged.residual import Residual, as_lengths, refuse
from kvcache.paged.seq_ids import as_seq_id, as_seq_ids
from kvcache.paged.sequences import PagedSequences
from kvcache.paged.shown import as_html, describe, describe_settings
from kvcache.paged.tables import BlockTables
from kvcache.support.arguments import (
    REQUIRED,
    as_count,
    as_indices,
    as_integer,
    as_output,
    as_pair,
    as_path,
    as_share,
    as_stored,
    short,
)
from kvcache.support.copies import refuse_copies
from kvcache.support.huge_pages import huge_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AttentionOptions", "PagedKvCache"]

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Pair = TypeVar("Pair", bound=tuple[Any, Any])
Self = TypeVar("Self", bound="PagedKvCache")
Out = TypeVar("Out")
No = Literal[False]
Yes = Literal[True]
Scored = Literal[True, "head"]
Rows = Sequence[Union[tuple[npt.ArrayLike, npt.ArrayLike], KvRows]]  # noqa: UP007  # for Python 3.10 at run time


class AttentionOptions(TypedDict, total=False):
    """The options of `PagedKvCache.attention` that do not change what it returns."""

    query_lens: npt.ArrayLike | None
    scale: float | None
    sink_queries: npt.ArrayLike | None
    context_lens: npt.ArrayLike | None
    window: int | None
    chunked: bool
    softcap: float | None
    sinks: npt.ArrayLike | None
    starts: npt.ArrayLike | None
    causal: bool
    mask: npt.ArrayLike | None
    skip_tokens: int
    top_tokens: int | None
    tokens: npt.ArrayLike | None


class PagedKvCache:
    """K and V of many sequences in blocks of fixed size, shared between forks, attended in place.

    Args:
        num_blocks: blocks in all; their memory is mapped now and touched when first written. It may be left out if
            `max_memory_bytes` is given.
        block_size: tokens per block, 1 to 256.
        num_heads: KV heads; queries may have any multiple of it.
        head_dim: channels per head, a multiple of 8, at most 512; `value_head_dim` names those of V apart.
        latent: a pair of channels, of a latent and of the part that turns with the position, in place of `num_heads`,
            `head_dim` and `value_head_dim`: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) in
            its absorbed form. A token has one row of both, which all query heads read: as their key whole, as V its
            latent. `values` of writes are None. K and V have one format. Quantised rows are rotated in equal parts, of
            the largest power of two that divides both, from 16 on. Both together are at most 576.
        num_layers: layers; every block holds its tokens' K and V of all of them.
        separate_layers: a sequence, and so a block, holds tokens of one layer. A text has a sequence for each layer, so
            its layers may keep different tokens. Every call names the sequence's layer. All layers have one format.
        dtype: storage format, "f32", "f16", "q8", "q6", "q5", "q4", "q3" or "q2"; `key_dtype`, `value_dtype` name
            them apart. The quantised ones keep a scale and a minimum in f16 per token and head, and codes of exactly
            that many bits. A list or tuple has one for each layer. A `Format` in Python is applied to what is written,
            and stored in f32.
        rotate: whether quantised rows are stored under a Hadamard rotation, which spreads outlier channels
            (QuaRot, arXiv 2404.00456, section 4): "auto" where their head_dim is a power of two, True, or False.
        eviction_strategy: which sequence is evicted first, by default `EvictionStrategy.LRU()`.
        eviction_threshold: share of blocks in use from which `needs_eviction` is true, clamped to [0, 1].
        calibration: a `Calibration` of the keys of these layers, heads and channels. Keys are stored less their centre,
            which `read` adds to tokens that were written, and quantised with feedback; with `latent` so is V. Attention
            returns what it would over the rows of `read`, log-sum-exps and masses too. A layer with a centre takes no
            softcap and no sink_queries, whose scores would tell the constant: ValueError.
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
        index_layers: layers of keys for indexers, which choose the tokens of layers of `latent` rows (`choose_tokens`);
            calls name them behind the `num_layers`, and their blocks are those of the same tokens. A token has a key of
            `index_dim` channels, a multiple of 8, in each, in the format `index_dtype`. Without `calibration`,
            `residual_length` and `first_tokens`.

        spill: a folder, made if it is missing, for a file of what memory has no room for: `max_memory_bytes` are then
            those in memory, of `num_blocks` blocks in all, and both are needed. The file has no name and ends with the
            cache, in whichever way. The folder must belong to this user or to root, and nobody else may write to it.
            Results have the bits of a cache in memory. Blocks that were used longest ago leave memory; summaries for
            `top_tokens` and rows in f16 stay. See the guide `outgrown.md`. PermissionError, OSError: of the folder.

    Every call can raise these errors, and has then changed nothing.

    Raises:
        SpillError: with `spill`, what the call needs cannot be read back as it was written, or nothing more can be
            written. A call that adds tokens or writes K and V may have done so.
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
        latent: tuple[int, int] | None = None,
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
        index_layers: int = 0,
        index_dim: int = 128,
        index_dtype: str = "f16",
        spill: str | os.PathLike[str] | None = None,
    ) -> None:
        limit = None if spill is None else as_spill_limit(num_blocks, max_memory_bytes)
        most = max_memory_bytes if spill is None else None
        length, firsts = as_lengths(residual_length, first_tokens, most)
        index = (index_layers, index_dim, index_dtype) if as_count(index_layers, "index_layers", 0) else None
        if index is not None:
            refuse("index_layers", length, firsts)
        formats = dtype if key_dtype is None else key_dtype, dtype if value_dtype is None else value_dtype
        dtypes, written = stored_dtypes(formats, calibration, "calibration"), RowFormats(*formats)
        if latent is not None:
            num_heads, head_dim, value_head_dim = _latent_sizes(latent, num_heads, head_dim, value_head_dim)
            if written.pair[0] is not written.pair[1]:
                keys, values = map(short, formats)
                raise ValueError(f"value_dtype: expected {keys}, as of keys, with latent, got {values}")
        separate, has_latent = bool(separate_layers), latent is not None
        settings = block_size, num_heads, head_dim, *dtypes, rotate, value_head_dim, separate, has_latent, index
        total = num_blocks_within(num_blocks, most, num_layers, *settings)
        spilled = None if spill is None or limit is None else (as_path(spill, "spill"), limit)
        store = BlockStore(num_layers, total, *settings, calibration, spilled)
        self._blocks = PagedBlocks(store, written)
        self._store, self._pool, self._lock = store, self._blocks.pool, self._blocks.lock
        self._residual = Residual(store, length, firsts) if length or firsts else None
        self._table = BlockTables(self._pool, store.block_size, self._residual)
        self._blocks.holders.append(self._table.references)
        self._sequences = PagedSequences(self._lock, store, self._table)
        self._attention = SequenceAttention(self._lock, store, self._table)
        self._evictor = Evictor(self._lock, self._table)
        self._threshold = 0.0
        self.with_eviction_strategy(eviction_strategy or EvictionStrategy.LRU())
        self.with_eviction_threshold(eviction_threshold)

    # -- shape and memory -----------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Layers."""
        index = self._store.index
        return self._store.num_named - (0 if index is None else index[0])

    @property
    def separate_layers(self) -> bool:
        """Whether each sequence is of one layer."""
        return self._store.separate

    @property
    def num_heads(self) -> int:
        """KV heads."""
        return self._store.num_heads

    @property
    def head_dim(self) -> int:
        """Channels per head of K and of queries."""
        return self._store.head_dim

    @property
    def value_head_dim(self) -> int:
        """Channels per head of V and of the output."""
        return self._store.value_head_dim

    @property
    def latent(self) -> tuple[int, int] | None:
        """Channels of the latent and of the part that turns, or None."""
        store = self._store
        return (store.value_head_dim, store.head_dim - store.value_head_dim) if store.latent else None

    @property
    def index(self) -> tuple[int, int, str] | None:
        """The number of index layers, their channels and their format, or None."""
        return self._store.index

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._store.block_size

    @property
    def key_dtype(self) -> str | tuple[str, ...]:
        """Format that stores K; a tuple if layers differ."""
        return self._store.key_dtype

    @property
    def value_dtype(self) -> str | tuple[str, ...]:
        """Format that stores V; a tuple if layers differ."""
        return self._store.value_dtype

    @property
    def formats(self) -> RowFormats:
        """The formats of K and V that are written in Python."""
        return self._blocks.formats

    @property
    def calibration(self) -> Calibration | None:
        """The `Calibration` of the keys, or None."""
        return self._store.calibration

    @property
    def residual_length(self) -> int:
        """Tokens of a group, or 0."""
        return 0 if self._residual is None else self._residual.length

    @property
    def first_tokens(self) -> int:
        """First tokens that every query reads in f16."""
        return 0 if self._residual is None else self._residual.firsts

    @property
    def total_blocks(self) -> int:
        """Blocks in all."""
        return self._pool.num_blocks

    @property
    def free_block_count(self) -> int:
        """Blocks without a reference."""
        return self._pool.num_free

    @property
    def used_block_count(self) -> int:
        """Blocks with references; a shared one counts once."""
        return self._pool.num_used

    @property
    def utilization(self) -> float:
        """Used blocks over all; 0.0 without blocks."""
        return self._pool.num_used / max(self._pool.num_blocks, 1)

    @property
    def block_memory_bytes(self) -> int:
        """Bytes of K and V of a block in all layers."""
        return self._store.block_bytes

    @property
    def total_memory_bytes(self) -> int:
        """Bytes of K and V of all blocks, those of rows in f16 and of summaries for `top_tokens` included."""
        return self._store.nbytes + self._bytes_beside

    @property
    def _bytes_beside(self) -> int:
        """Bytes of summaries and of rows in f16."""
        summaries, residual = self._store.summaries, self._residual
        return (0 if summaries is None else summaries.nbytes) + (0 if residual is None else residual.store.nbytes)

    @property
    def used_memory_bytes(self) -> int:
        """Bytes of K and V of the blocks in use, those of rows in f16 included."""
        beside = 0 if self._residual is None else self._residual.used_bytes
        return self._store.block_bytes * self._pool.num_used + beside

    @property
    def spill(self) -> SpillStats | None:
        """With `spill`, what lies where and what was read and written; None without."""
        return None if self._store.spill is None else SpillStats.of(self._store)

    @property
    def blocks(self) -> PagedBlocks:
        """The blocks, the references on them and their lock, for caches that share them."""
        return self._blocks

    # -- sequences start and end ----------------------------------------------------------------------------

    def allocate(self, seq_id: int, num_tokens: int) -> None:
        """Start a sequence with room for `num_tokens` tokens, 0 allowed; unwritten tokens read as zeros."""
        self._blocks.run(self._sequences.allocate, as_seq_id(seq_id), as_integer(num_tokens, "num_tokens"))

    def allocate_batch(self, seq_ids: npt.ArrayLike, num_tokens: npt.ArrayLike) -> None:
        """`allocate` for many sequences, of `num_tokens[i]` tokens each, all or nothing."""
        # Copies: both are read several times, and a finaliser may run in between.
        ids, counts = as_seq_ids(seq_ids).copy(), as_indices(num_tokens, "num_tokens").copy()
        self._blocks.run(self._sequences.allocate_batch, ids, counts)

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
        self._blocks.run(self._sequences.append, as_seq_id(seq_id), as_integer(num_new_tokens, "num_new_tokens"))

    def append_batch(self, seq_ids: npt.ArrayLike, counts: npt.ArrayLike | None = None) -> None:
        """`append` for many sequences, all or nothing: `counts[i]` tokens each, 0 allowed, by default one."""
        if counts is None:
            self._blocks.run(self._sequences.append_batch, as_seq_ids(seq_ids))
        else:
            own, counted = as_seq_ids(seq_ids).copy(), as_indices(counts, "counts").copy()
            self._blocks.run(self._sequences.append_batch, own, counted)

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
        self._blocks.run(self._sequences.compact, as_seq_id(seq_id))

    # -- K and V ----------------------------------------------------------------------------------------------

    def write(
        self, layer: int, seq_id: int, keys: npt.ArrayLike, values: npt.ArrayLike | None = None,
        start: int | None = None,
    ) -> None:
        """Store K and V of consecutive tokens in one layer; shared blocks are copied for this sequence first.

        Args:
            keys, values: `(num_tokens, num_heads, head_dim)`, of V `value_head_dim`: arrays, or tensors with the buffer
                protocol or DLPack. float32, float16, float64 and bfloat16 (of DLPack or ml_dtypes) are read in place,
                with any strides of tokens and heads (head-major too), and converted a few tokens at a time. Only what
                has the channels of a head apart is copied first.
            start: index of the first token; by default they are the sequence's last tokens.
        """
        layer, first = as_integer(layer, "layer"), None if start is None else as_integer(start, "start")
        rows = self._rows(layer, keys, values)
        self._blocks.run(self._sequences.write, layer, as_seq_id(seq_id), first, rows)

    def write_batch(
        self, layer: int, seq_ids: npt.ArrayLike, keys: npt.ArrayLike, values: npt.ArrayLike | None = None
    ) -> None:
        """`write_ragged` of the last token of each of many sequences, none of them empty.

        Args:
            keys, values: `(len(seq_ids), num_heads, head_dim)`.
        """
        ids, layer = as_seq_ids(seq_ids), as_integer(layer, "layer")
        self._blocks.run(self._sequences.write_batch, layer, ids, self._rows(layer, keys, values))

    def write_ragged(
        self, layer: int, seq_ids: npt.ArrayLike, lens: npt.ArrayLike, keys: npt.ArrayLike,
        values: npt.ArrayLike | None = None,
    ) -> None:
        """`write` of the last `lens[i]` tokens of each of many sequences, 0 allowed, all or nothing.

        Args:
            keys, values: `(sum(lens), num_heads, head_dim)`, the sequences one after another.
        """
        ids, counts = as_seq_ids(seq_ids).copy(), as_indices(lens, "lens").copy()
        layer = as_integer(layer, "layer")
        self._blocks.run(self._sequences.write_batch, layer, ids, self._rows(layer, keys, values), counts)

    def _rows(self, layer: int, keys: Any, values: Any) -> KvRows:
        """The rows of a call for a layer; an index layer has keys alone."""
        if self.index is None or layer < self.num_layers:
            return self._blocks.as_rows(keys, values)
        if values is not None:
            raise ValueError("values: expected None of an index layer, got rows")
        given = as_stored(keys, (None, 1, self.index[1]), "keys")
        return KvRows(given, given)

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

    def read_layers(self, seq_id: int, start: int = 0, stop: int | None = None) -> list[tuple[Float32, Float32]]:
        """`read` for every layer: a list of `(keys, values)`."""
        first, last = as_integer(start, "start"), None if stop is None else as_integer(stop, "stop")
        seq_id, read = as_seq_id(seq_id), self._sequences.read
        return [read(layer, seq_id, first, last) for layer in range(self.num_layers)]

    @overload
    def attention(
        self, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, *,
        out: None = None, return_scores: No = False, return_lse: No = False, **options: Unpack[AttentionOptions],
    ) -> Float32: ...
    @overload
    def attention(
        self, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, *,
        out: None = None, return_scores: Scored, return_lse: No = False, **options: Unpack[AttentionOptions],
    ) -> tuple[Float32, Float32]: ...
    @overload
    def attention(
        self, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, *,
        out: None = None, return_scores: No = False, return_lse: Yes, **options: Unpack[AttentionOptions],
    ) -> tuple[Float32, Float32]: ...
    @overload
    def attention(
        self, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, *,
        out: None = None, return_scores: Scored, return_lse: Yes, **options: Unpack[AttentionOptions],
    ) -> tuple[Float32, Float32, Float32]: ...
    @overload
    def attention(
        self, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, *,
        out: Out, return_scores: No = False, return_lse: No = False, **options: Unpack[AttentionOptions],
    ) -> Out: ...
    @overload
    def attention(
        self, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, *,
        out: Out, return_scores: Scored, return_lse: No = False, **options: Unpack[AttentionOptions],
    ) -> tuple[Out, Float32]: ...
    @overload
    def attention(
        self, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, *,
        out: Out, return_scores: No = False, return_lse: Yes, **options: Unpack[AttentionOptions],
    ) -> tuple[Out, Float32]: ...
    @overload
    def attention(
        self, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, *,
        out: Out, return_scores: Scored, return_lse: Yes, **options: Unpack[AttentionOptions],
    ) -> tuple[Out, Float32, Float32]: ...
    @overload  # flags that only the running program knows
    def attention(
        self, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, *,
        out: Any = None, return_scores: bool | Literal["head"] = False, return_lse: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> Any: ...
    def attention(
        self,
        layer: int,
        queries: npt.ArrayLike,
        seq_ids: npt.ArrayLike,
        *,
        query_lens: npt.ArrayLike | None = None, scale: float | None = None,
        sink_queries: npt.ArrayLike | None = None, out: Any = None,
        return_scores: bool | Literal["head"] = False, context_lens: npt.ArrayLike | None = None,
        return_lse: bool = False, window: int | None = None, softcap: float | None = None,
        sinks: npt.ArrayLike | None = None, starts: npt.ArrayLike | None = None,
        causal: bool = True, mask: npt.ArrayLike | None = None, skip_tokens: int = 0,
        top_tokens: int | None = None, tokens: npt.ArrayLike | None = None, chunked: bool = False,
        firsts: npt.ArrayLike | None = None,
    ) -> Any:
        """softmax(q K^T scale) V straight over the blocks: decode, prefill chunks or both mixed in one call.

        Causal: the last query of a sequence has the position of its last token, the one before it the position before.

        A query has the same output and log-sum-exp, bit for bit, whatever else is in the call and however many threads
        run it: alone, in a chunk of a prompt or beside other sequences. They depend on the query, the tokens it sees,
        their text positions and the SIMD level; in quantised formats also on the slots of these tokens within their
        blocks (and on those of 1,023 tokens before them if some are missing in between). They do not depend on whether
        tokens before a window are stored.

        A query with a value that is not finite has NaN as its output and log-sum-exp, and adds nothing to attention
        masses.

        Sequences that follow one another and begin with the same blocks (forks, adopted prefixes) have these read once
        for all, which changes no bit: where a KV head has one or two query heads, a block a multiple of 16 tokens, and
        each sequence few queries, 256 shared tokens and more, and neither window, start, mask nor skipped or evicted
        tokens.

        With `residual_length` each query reads the tokens of its own group in f16, with `first_tokens` the first ones:
        what is attended there and in the packed rows is merged. With `residual_length` a sequence keeps f16 rows only
        from the group on in which its last `append` began, so it can have queries of these tokens alone: ValueError for
        more. With `context_lens` each sequence has one query at most, that of the last token that is shown. Queries
        with `causal=False` stand behind the text, in none of its groups: they read the first tokens in f16, and all
        others packed. `sink_queries`, `window`, `starts`, `mask` and `firsts` keep their defaults: ValueError.

        Args:
            queries: `(total_queries, num_query_heads, head_dim)`, num_query_heads a multiple of num_heads; query head h
                reads KV head h // (num_query_heads / num_heads). Read in place, and widened, as `write` reads rows.
            seq_ids: integers `(n,)`: the sequences to attend to, in the order of the queries.
            query_lens: integers `(n,)`: queries of each sequence, total_queries together; by default one each.
            scale: by default head_dim ** -0.5.
            sink_queries: of the shape of `queries`, used for the tokens before a StreamingLLM hole: the same queries
                under the RoPE of the shorter distance.
            out: float32, C-contiguous, of the shape of the result, or a tensor such as that: written and returned.
            return_scores: also return each token's attention mass, summed over queries and heads; "head": over queries
                and the query heads of each KV head.
            context_lens: integers `(n,)`: how many of its first tokens each sequence shows, by default all. Where a
                part of the context is attended elsewhere, `merge_attention` merges the parts. A sequence may then be
                named several times, with different queries. The output of a query that sees no token is 0.
            skip_tokens: how many tokens at the front of each sequence no query sees, as if a window had left them.
            firsts: integers `(total_queries,)`: the same of each query, beside `skip_tokens` and `window`; those of a
                sequence ascend. For sequences whose tokens have positions that are not their places in the sequence.
            return_lse: also return the log-sum-exp of each query's scores, which merging needs; -inf without tokens.
            window: the query at position p sees positions p - window + 1 to p. Tokens that no query sees are not read.
            chunked: it sees positions p // window * window to p instead: its own chunk of `window` positions.
            softcap: a score s, after the scale, becomes softcap * tanh(s / softcap); above 0.
            sinks: finite logits that join the normaliser of the softmax, and the log-sum-exp, alone: floats
                `(num_query_heads,)`, or `(total_queries, num_query_heads)`. Where two parts of a context are attended
                apart, each call may have the log-sum-exp of the other part here: outputs and masses of the two then add
                up.
            starts: integers `(n,)`: the text position of each sequence's first token, by default 0; above where the
                first ones were dropped.
            causal: False: every query sees all tokens that are shown, and `query_lens` has no limit. With `window` the
                query at position p sees positions p - window + 1 to p + window - 1, and `query_lens` has its limit.
            mask: integers `(total_queries,)`, a tree: each query's parent, the index of an earlier query of its
                sequence, or -1. A query sees the tokens before the queries', its ancestors' and its own; its position
                is the first behind those tokens plus the number of its ancestors. If each parent is the query before,
                bits are those without `mask`. Without `firsts`: ValueError.
            top_tokens: each KV head attends to the pages of 16 tokens that its query heads choose, to the first 16 and
                to the newest 64 to 79; by default, and where there are less than four times as many, to all. The
                mean and the variance of the keys of each page, kept beside the blocks (1/16 of packed K and V in q4),
                rank them. Those that are read hold 1.75 times `top_tokens` tokens, so that they have most of the best
                ones; all are attended. What is chosen is a function of the tokens that the query sees and of its
                position. The block size is a multiple of 16. Without evicted tokens, `latent`, `window`, `starts`,
                `mask`, `sink_queries`, `skip_tokens`, `firsts` and `return_scores`: ValueError.
            tokens: integers `(total_queries, num_heads, n)`: the tokens that each KV head attends to for a query, and
                no others: ascending, seen by the query, then -1 up to n. Without tokens the output is 0. For networks
                whose own indexer chooses (`choose_tokens`). Without `top_tokens`, what that excludes but for `latent`,
                `residual_length` and `first_tokens`: ValueError.

        Returns:
            float32 `(total_queries, num_query_heads, value_head_dim)`; a tuple if more is asked for, in this order:
            `return_scores`: float32 `(total tokens shown,)`, one sequence after another; "head": `(num_heads, ...)`;
            `return_lse`: float32 `(total_queries, num_query_heads)`, natural logarithms.
        """
        sequences = QueriedSequences(seq_ids, query_lens, context_lens, starts, mask, tokens, firsts)
        call = AttentionCall(
            scale, window, softcap, sinks, bool(causal), skip_tokens, return_scores, bool(return_lse), top_tokens,
            bool(chunked),
        )
        return self._attention.over(layer, queries, sequences, call, out, sink_queries)

    def write_and_attend(
        self, sequences: QueriedSequences, calls: Mapping[int, tuple[int, AttentionCall, bool]], layer: int,
        queries: npt.ArrayLike, keys: Any, values: Any, _: Any = None, chosen: Int32 | None = None,
        written: QueriedSequences | None = None, /,
    ) -> Float32:
        """`write_ragged` of the newest tokens, and `attention` of their queries: what a layer does in a pass.

        Args:
            sequences: with the number of new tokens of each as `query_lens`; `kept`, as the calls are.
            calls: for each layer of a network its layer here, how it attends, and whether it writes; if not, it has no
                keys and values, and reads those that another layer of the network has written.
            layer: of the network.
            queries: `(sum(query_lens), num_query_heads, head_dim)`; other arguments as of these two.
            chosen: what `write_and_choose` has returned.
            written: those that are written, where others are attended to.
        """
        number, call, writes = calls[layer]
        if not writes and (keys is not None or values is not None):
            raise ValueError(f"keys: expected None for layer {layer}, which reads K and V of another one, got rows")
        if writes:
            to = sequences if written is None else written
            self._sequences.write_batch(number, to.ids, self._blocks.as_rows(keys, values), to.lens)
        mixed: Float32 = self._attention.over(number, queries, sequences, call, chosen=chosen)
        return mixed

    def choose_tokens(
        self, layer: int, queries: npt.ArrayLike, weights: npt.ArrayLike, seq_ids: npt.ArrayLike, most: int, *,
        query_lens: npt.ArrayLike | None = None,
    ) -> Int32:
        """The tokens that an indexer chooses for each query, which `attention` takes as `tokens`.

        The score of a token is the sum over heads, in their order, of the weight times max(0, query . key). Of the
        tokens that a query sees, the `most` with the largest scores are chosen; of equal ones the first.
        Source: DeepSeek-AI, "DeepSeek-V3.2" (2025), section 2.1.

        Args:
            layer: an index layer.
            queries: `(total_queries, heads, index_dim)`, of any number of heads.
            weights: `(total_queries, heads)`.
            seq_ids, query_lens: as of `attention`.

        Returns:
            int32 `(total_queries, 1, n)`: ascending; -1 behind all tokens of a query that sees fewer. n is `most`, or
            the tokens that the cache has room for, if these are fewer.
        """
        layer, most = as_integer(layer, "layer"), as_count(most, "most", 1)
        most = min(most, max(1, self.total_blocks * self.block_size))
        self._expect_index(layer)
        chosen = self._attention.choose(layer, queries, weights, QueriedSequences(seq_ids, query_lens), most, True)
        assert chosen is not None
        return chosen

    def write_and_choose(
        self, sequences: QueriedSequences, layer: int, queries: Float32, weights: Float32, keys: Float32, most: int
    ) -> Int32 | None:
        """`write_ragged` of the newest tokens of an index layer, and `choose_tokens`; None: all queries choose all."""
        self._expect_index(layer)
        self._sequences.write_batch(layer, sequences.ids, self._rows(layer, keys, None), sequences.lens)
        return self._attention.choose(layer, queries, weights, sequences, most, False)

    def _expect_index(self, layer: int) -> None:
        first, count = self.num_layers, 0 if self.index is None else self.index[0]
        if not first <= layer < first + count:
            raise IndexError(f"layer: expected an index layer, in [{first}, {first + count}), got {layer}")

    # -- tokens with rows in f16 --------------------------------------------------------------------------------
    #
    # For texts that continue behind a cached prefix: its blocks are packed. The rows of its last group and of its first
    # tokens, read from the sequence that computed them and kept elsewhere, come back in the sequence that adopts them.

    def unpacked_tokens(self, seq_id: int) -> tuple[int, int, int]:
        """The tokens that have f16 rows, `(firsts, base, stop)`: those of [0, firsts) and of [base, stop), the newest.

        Raises:
            ValueError: the cache has no `residual_length` and no `first_tokens`; so for all of these methods.
        """
        self._expect_residual()
        seq_id = as_seq_id(seq_id)
        with self._lock:
            return self._table.span(seq_id)

    def read_unpacked(self, layer: int, seq_id: int) -> tuple[Float32, Float32]:
        """`(keys, values)` of the tokens of `unpacked_tokens`, first ones first, as `read` returns them."""
        self._expect_residual()
        return self._sequences.read_unpacked(as_integer(layer, "layer"), as_seq_id(seq_id))

    def unpack(self, seq_id: int, newest: Rows = (), firsts: Rows = ()) -> None:
        """Give a sequence f16 rows of its newest tokens and of its first ones; all others are read packed from now on.

        Args:
            newest: for each layer K and V `(n, num_heads, head_dim)` of the last n tokens, all of one group; empty:
                none. Without groups they are all tokens, at most `first_tokens`.
            firsts: those of the first `first_tokens` tokens, which come before the newest; empty: none.
        """
        residual = self._expect_residual()
        rows, ahead = self._as_rows(residual, newest, "newest"), self._as_rows(residual, firsts, "firsts")
        self._sequences.unpack(as_seq_id(seq_id), rows, ahead)

    def pack(self, seq_id: int, num_tokens: int) -> None:
        """Read the first `num_tokens` tokens packed from now on, but for `first_tokens`; frees their f16 rows."""
        self._expect_residual()
        self._sequences.pack(as_seq_id(seq_id), as_count(num_tokens, "num_tokens"))

    def reserve_unpacked(self, num_tokens: int) -> None:
        """Map f16 rows for `num_tokens` in all, now rather than when they are needed; touched when first written."""
        self._expect_residual()
        self._sequences.reserve_unpacked(as_count(num_tokens, "num_tokens"))

    def reserve_summaries(self) -> None:
        """Map the summaries of keys that `top_tokens` needs, now rather than in the first call; touched when made."""
        with self._lock:
            self._store.reserve_summaries()

    def _expect_residual(self) -> Residual:
        if self._residual is None:
            raise ValueError("residual_length: expected a cache with it or with first_tokens, got 0 and 0")
        return self._residual

    def _as_rows(self, residual: Residual, rows: Rows, name: str) -> list[KvRows]:
        """The rows of each layer as they are, without the `Format` of the cache."""
        found = [each if isinstance(each, KvRows) else self._blocks.as_given(*each) for each in rows]
        if len(found) not in (0, self.num_layers):
            raise ValueError(f"{name}: expected rows of {self.num_layers} layers, got {len(found)}")
        if len({each.count for each in found}) > 1:
            raise ValueError(f"{name}: expected as many tokens in each layer, got {[each.count for each in found]}")
        for layer, each in enumerate(found):
            residual.store.check_rows(each, layer)
        return found

    # -- eviction, which callers start --------------------------------------------------------------------------

    @property
    def eviction_strategy(self) -> EvictionStrategy:
        """Which sequence is evicted first."""
        return self._evictor.strategy

    @property
    def eviction_threshold(self) -> float:
        """See `needs_eviction`."""
        return self._threshold

    @property
    def needs_eviction(self) -> bool:
        """Whether `utilization` is at least `eviction_threshold`."""
        return self.utilization >= self._threshold

    def with_eviction_strategy(self: Self, strategy: EvictionStrategy) -> Self:
        """Choose which sequence is evicted first; returns the cache."""
        if not isinstance(strategy, EvictionStrategy):
            raise TypeError(f"strategy: expected an EvictionStrategy, got {type(strategy).__name__}")
        self._evictor.order_by(strategy)
        return self

    def with_eviction_threshold(self: Self, threshold: float) -> Self:
        """Set the share of blocks in use from which `needs_eviction` is true, clamped to [0, 1]; returns the cache."""
        self._threshold = min(1.0, max(0.0, as_share(threshold, "threshold")))
        return self

    def set_priority(self, seq_id: int, priority: int) -> None:
        """Set a priority in [0, levels): under `EvictionStrategy.Priority(levels)` the lowest is evicted first."""
        self._evictor.set_priority(as_seq_id(seq_id), as_integer(priority, "priority"))

    def pin(self, seq_id: int) -> None:
        """Never evict this sequence until it was unpinned as often as pinned."""
        self._evictor.pin(as_seq_id(seq_id))

    def unpin(self, seq_id: int) -> None:
        """Undo one `pin`; InvalidOperationError if the sequence is not pinned."""
        self._evictor.unpin(as_seq_id(seq_id))

    def select_eviction_target(self) -> SeqId | None:
        """The sequence that `evict` would take; None when there is none that is not pinned."""
        seq_id = self._evictor.victim()
        return None if seq_id is None else SeqId(seq_id)

    def evict(self) -> SeqId:
        """Free the eviction target and return its id; InvalidOperationError if all sequences are pinned."""
        return SeqId(self._evictor.evict())

    def evict_to_threshold(self, target_util: float) -> list[SeqId]:
        """Evict until `utilization` is at most `target_util`; the evicted ids, in order.

        Sequences whose blocks are all shared would free nothing and are evicted last. Pinned ones always stay, so the
        utilization may remain above the target.
        """
        return list(map(SeqId, self._evictor.evict_to(as_share(target_util, "target_util")).tolist()))

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
        """References of sequences and prefix caches on each of the blocks, int32 `(n,)`; 0 if it is free."""
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
            self._store.check_summaries()

    # -- reports ------------------------------------------------------------------------------------------------

    @property
    def num_sequences(self) -> int:
        """Sequences alive."""
        return len(self._table)

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
            return PagedKvCacheHandle(self, self._sequences, self._table, seq_id, self._table.uid(seq_id))

    def sequence_ids(self) -> list[SeqId]:
        """Every id, ascending."""
        with self._lock:
            return list(map(SeqId, self._table.seq_ids()))

    def get_sequence(self, seq_id: int) -> SequenceInfo | None:
        """A snapshot of one sequence, or None; not an access."""
        seq_id = as_seq_id(seq_id)
        with self._lock:
            return SequenceInfo.of(self._table, seq_id)

    def block_table(self, seq_ids: npt.ArrayLike) -> CsrBlockTable:
        """The block tables of several sequences as CSR arrays, with FlashInfer's names and layout."""
        ids = as_seq_ids(seq_ids)
        with self._lock:
            return CsrBlockTable(*self._table.csr(ids))

    def stats(self) -> CacheStats:
        """The counters now."""
        with self._lock:
            return CacheStats.of(self._pool, self._table, self._store, self._evictor.evictions)

    def memory(self) -> dict[str, int]:
        """Bytes: "kv" of all blocks, "bookkeeping" of tables, pools and eviction order, "scratch" of attention.

        "huge" are those of "kv" that lie on huge pages. With `spill` "kv" are the most of those in memory, and "disk"
        are those of the file.
        """
        beside = 0 if self._residual is None else self._residual.nbytes
        stores = [self._store] if self._residual is None else [self._store, self._residual.store]
        spill = self.spill
        kv = self._store.nbytes if spill is None else min(spill.max_memory_bytes, self._store.nbytes)
        return {
            "kv": kv + self._bytes_beside,
            "bookkeeping": self.stats().bookkeeping_bytes + beside,
            "scratch": self._attention.nbytes,
            "huge": huge_bytes(store.span for store in stores),
            **({} if spill is None else {"disk": spill.file_bytes}),
        }

    __reduce_ex__ = refuse_copies("`fork` copies a sequence")

    def __str__(self) -> str:
        return describe(self)

    def __repr__(self) -> str:
        return describe_settings(self)

    def _repr_html_(self) -> str:
        return as_html(self)


def _latent_sizes(
    latent: tuple[int, int], num_heads: Any, head_dim: Any, value_head_dim: int | None
) -> tuple[int, int, int]:
    """KV heads and the channels of K and V that `latent` stands for."""
    for name, value in (("num_heads", num_heads), ("head_dim", head_dim), ("value_head_dim", value_head_dim)):
        if value is not None:
            raise ValueError(f"{name}: expected None beside latent, got {value}")
    if not isinstance(latent, (tuple, list)) or len(latent) != 2:
        raise TypeError(f"latent: expected a pair of channels, got {short(latent)}")
    wide, turned = latent
    wide, turned = as_count(wide, "latent", 8, 576), as_count(turned, "latent", 0, 576)
    return 1, wide + turned, wide
