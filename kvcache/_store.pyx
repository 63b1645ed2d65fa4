"""BlockStore: the arena of every layer, and the kernels over it.

It knows bytes and runs, nothing of ids, references or sequences' names; those are the table's and the pool's.
Values are checked here, once, before the first byte changes: what a format cannot hold never gets in.
"""

cimport numpy as cnp
from libc.math cimport sqrt
from libc.stdint cimport int32_t, int64_t, uint16_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy

from kvcache cimport _kernels
from kvcache._batch cimport BatchTable
from kvcache._kernels cimport kvc_format, kvc_run, kvc_seq
from kvcache._records cimport Sequence
from kvcache._table cimport SequenceTable

import numpy as np

from kvcache._arrays import as_floats, as_indices
from kvcache._seq_ids import as_seq_ids
from kvcache._sequences import RUN
from kvcache.errors import OutOfMemoryError

__all__ = ["FORMATS", "BlockStore"]

cnp.import_array()

cdef extern from "sys/mman.h" nogil:
    void *mmap(void *addr, size_t length, int prot, int flags, int fd, long offset)
    int munmap(void *addr, size_t length)
    int madvise(void *addr, size_t length, int advice)
    int PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_ANONYMOUS, MADV_HUGEPAGE
    void *MAP_FAILED

FORMATS = {"f32": 0, "f16": 1, "q8": 2, "q4": 3, "q3": 4, "q2": 5}


cdef inline bint is_plain(object x, int dtype, int ndim):
    """A C-contiguous, aligned array of this type, which needs no conversion."""
    return (cnp.PyArray_CheckExact(x) and cnp.PyArray_TYPE(<cnp.ndarray>x) == dtype
            and cnp.PyArray_NDIM(<cnp.ndarray>x) == ndim and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>x))


def _format(name, what):
    if name not in FORMATS:
        raise ValueError(f"expected {what} to be one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]


def _rotation(rotate, head_dim, quantised):
    """1 where rows of this format are stored rotated: quantised ones, unless `rotate` is False."""
    power_of_two = head_dim & (head_dim - 1) == 0
    if rotate is True and not power_of_two:
        raise ValueError(f"expected a head_dim that is a power of two for rotate=True, got {head_dim}")
    if rotate not in (True, False, "auto"):
        raise ValueError(f'expected rotate to be True, False or "auto", got {rotate!r}')
    return int(bool(rotate) and quantised and power_of_two)


cdef class BlockStore:
    """K and V of `num_blocks` blocks in `num_layers` layers.

    Args:
        num_layers, num_blocks: how many; the memory is mapped at once and touched when first written.
        block_size: tokens per block, 1 to 256.
        num_heads: KV heads.
        head_dim: a multiple of 8, at most 256.
        key_dtype, value_dtype: storage formats, keys of `FORMATS`.
        rotate: "auto" or True: rows of quantised formats are stored under a Hadamard rotation; False: never.

    Raises:
        ValueError: a size or format that is not supported.
        OutOfMemoryError: the system refuses the memory (in bytes).
    """

    def __init__(self, num_layers, num_blocks, block_size, num_heads, head_dim, key_dtype="f32",
                 value_dtype="f32", rotate="auto"):
        cdef kvc_format key_format = <kvc_format><int>_format(key_dtype, "key_dtype")
        cdef kvc_format value_format = <kvc_format><int>_format(value_dtype, "value_dtype")
        if not 1 <= block_size <= 256:
            raise ValueError(f"expected 1 <= block_size <= 256, got {block_size}")
        if head_dim % 8 != 0 or not 8 <= head_dim <= 256:
            raise ValueError(f"expected head_dim to be a multiple of 8, at most 256, got {head_dim}")
        if num_heads < 1 or num_layers < 1 or num_blocks < 0:
            raise ValueError(
                f"expected num_heads >= 1, num_layers >= 1, num_blocks >= 0, "
                f"got {num_heads}, {num_layers}, {num_blocks}"
            )
        if _kernels.layout_init(&self.layout, block_size, num_heads, head_dim, key_format, value_format,
                                _rotation(rotate, head_dim, key_dtype[0] == "q"),
                                _rotation(rotate, head_dim, value_dtype[0] == "q")) != 0:
            raise ValueError(f"expected a supported layout, got head_dim {head_dim} with {key_dtype} and {value_dtype}")
        self.num_layers, self.num_blocks = num_layers, num_blocks
        self.key_dtype, self.value_dtype = key_dtype, value_dtype
        size = int(self.layout.block_bytes) * num_blocks * num_layers
        cdef void *arena = MAP_FAILED
        if size < 1 << 62:
            self.arena_bytes = size
            # A mapping of no bytes is an error to the system and nothing unusual to us.
            arena = mmap(NULL, max(size, 1), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
        if arena == MAP_FAILED:
            raise OutOfMemoryError(size, 0, "bytes")
        madvise(arena, max(self.arena_bytes, <size_t>1), MADV_HUGEPAGE)
        self.arena = <unsigned char *>arena
        self.reached = <uint16_t *>calloc(max(num_blocks, 1), sizeof(uint16_t))
        if self.reached == NULL:
            raise OutOfMemoryError(2 * num_blocks, 0, "bytes")

    def __dealloc__(self):
        if self.arena != NULL:
            munmap(self.arena, max(self.arena_bytes, <size_t>1))
        free(self.reached)
        free(self.scratch)
        free(self.seqs)

    # -- shape ----------------------------------------------------------------------------------------------

    @property
    def block_size(self):
        """Tokens per block."""
        return self.layout.block_size

    @property
    def num_heads(self):
        """KV heads."""
        return self.layout.num_heads

    @property
    def head_dim(self):
        """Channels per head."""
        return self.layout.head_dim

    @property
    def block_bytes(self):
        """Bytes of K and V of one block in all layers."""
        return int(self.layout.block_bytes) * self.num_layers

    @property
    def nbytes(self):
        """Bytes of K and V of all blocks in all layers."""
        return self.block_bytes * self.num_blocks

    @property
    def bookkeeping(self):
        """Bytes beside the K and V that grow with the number of blocks."""
        return sizeof(uint16_t) * self.num_blocks

    @property
    def rotated(self):
        """`(keys, values)`: whether rows are stored under a Hadamard rotation."""
        return bool(self.layout.rotate_keys), bool(self.layout.rotate_values)

    # -- rows -----------------------------------------------------------------------------------------------

    def represent(self, keys, values):
        """Raise unless every value can be stored.

        Raises:
            ValueError: NaN, an infinity, or a magnitude that the format cannot hold; names where.
        """
        self.represent_(keys, values)

    def write(self, layer, runs, keys, values):
        """Store rows at `runs`.

        Args:
            layer: in [0, num_layers).
            runs: dtype `RUN` `(r,)`.
            keys, values: float32 `(n, num_heads, head_dim)`, n the slots in `runs`.

        Raises:
            IndexError, ValueError: no such layer; runs outside the arena, another number of rows; values that
                the format cannot hold.
        """
        cdef unsigned char *base = self.layer_base(layer)
        cdef const kvc_run[::1] view = self._runs(runs, keys.shape[0])
        cdef const float[:, :, ::1] k = keys
        cdef const float[:, :, ::1] v = values
        self.represent_(k, v)
        if view.shape[0]:
            with nogil:
                _kernels.write_runs(&self.layout, base, &view[0], view.shape[0], &k[0, 0, 0], &v[0, 0, 0])

    def read(self, layer, runs):
        """The rows at `runs` (dtype `RUN`) as `(keys, values)`, float32 `(n, num_heads, head_dim)` each.

        Raises:
            IndexError, ValueError: no such layer; runs outside the arena.
        """
        cdef unsigned char *base = self.layer_base(layer)
        n = int(runs["stop"].astype(np.int64).sum() - runs["first"].astype(np.int64).sum())
        cdef const kvc_run[::1] view = self._runs(runs, n)
        keys, values = self._rows(n), self._rows(n)
        cdef float[:, :, ::1] k = keys
        cdef float[:, :, ::1] v = values
        if n:
            with nogil:
                _kernels.read_runs(&self.layout, base, &view[0], view.shape[0], &k[0, 0, 0], &v[0, 0, 0])
        return keys, values

    def read_side(self, layer, runs, int side):
        """`read` of the keys alone, side 0, or of the values alone, side 1."""
        cdef unsigned char *base = self.layer_base(layer)
        n = int(runs["stop"].astype(np.int64).sum() - runs["first"].astype(np.int64).sum())
        cdef const kvc_run[::1] view = self._runs(runs, n)
        rows = self._rows(n)
        cdef float[:, :, ::1] x = rows
        if n:
            with nogil:
                _kernels.read_runs(&self.layout, base, &view[0], view.shape[0], NULL if side else &x[0, 0, 0],
                                   &x[0, 0, 0] if side else NULL)
        return rows

    def attend(self, layer, runs, queries, scale=None, out=None, bint return_scores=False):
        """`attend_sequences` for the tokens at one list of runs (dtype `RUN`), whatever sequence they are of."""
        cdef unsigned char *base = self.layer_base(layer)
        cdef const kvc_run[::1] view = self._runs(runs, None)
        cdef cnp.ndarray q = self.queries_(queries, "queries")
        if q.shape[1] == 0 or q.shape[1] % self.layout.num_heads:
            raise ValueError(f"expected a multiple of {self.layout.num_heads} query heads, got {q.shape[1]}")
        cdef cnp.ndarray result = self.result_(out, q)
        cdef int64_t tokens = int(runs["stop"].astype(np.int64).sum() - runs["first"].astype(np.int64).sum())
        if q.shape[0] > tokens:
            raise ValueError(f"expected at most {tokens} queries, one per token, got {q.shape[0]}")
        self.reserve_seqs(1)
        self.seqs[0].runs = &view[0] if view.shape[0] else NULL
        self.seqs[0].num_runs, self.seqs[0].num_tokens = view.shape[0], tokens
        self.seqs[0].sink_tokens, self.seqs[0].num_queries, self.seqs[0].hidden_tokens = 0, q.shape[0], 0
        cdef cnp.ndarray scores = np.zeros(tokens, np.float32) if return_scores else None
        cdef double factor = 1.0 / sqrt(<double>self.layout.head_dim) if scale is None else scale
        self.attend_(base, 1, q, None, <float>factor, result, scores, None)
        return (result, scores) if return_scores else result

    def copy_blocks(self, sources, targets):
        """Copy whole blocks in every layer, in order.

        Args:
            sources, targets: int32 `(n,)` block ids in range; the owner has checked them.
        """
        cdef const int32_t[::1] src = sources
        cdef const int32_t[::1] dst = targets
        cdef Py_ssize_t size = self.layout.block_bytes
        cdef unsigned char *base
        cdef int64_t i, layer
        for layer in range(self.num_layers):
            base = self.layer_base(layer)
            with nogil:
                for i in range(src.shape[0]):
                    memcpy(base + dst[i] * size, base + src[i] * size, size)
        for i in range(src.shape[0]):
            self.reached[dst[i]] = self.reached[src[i]]

    def move_slots(self, moves, BlockStore source=None):
        """Move tokens bit for bit in every layer, in order.

        Args:
            moves: int32 `(n, 5)`: source block, source slot, target block, target slot, tokens; in range, the owner
                has checked them.
            source: where they come from, a store of the same layers and layout; by default this one.
        """
        cdef const int32_t[:, ::1] view = moves
        cdef BlockStore other = self if source is None else source
        cdef const unsigned char *src
        cdef unsigned char *dst
        cdef int64_t i, layer
        if not self.same_layout(other):
            raise ValueError("expected a store of the same layers and layout, got another")
        for layer in range(self.num_layers):
            src, dst = other.layer_base(layer), self.layer_base(layer)
            with nogil:
                for i in range(view.shape[0]):
                    _kernels.copy_slots(&self.layout, src, view[i, 0], view[i, 1], dst, view[i, 2], view[i, 3],
                                        view[i, 4])
        for i in range(view.shape[0]):
            self.reached[view[i, 2]] = max(self.reached[view[i, 2]], <uint16_t>(view[i, 3] + view[i, 4]))

    def same_layout(self, BlockStore other not None):
        """Whether a block of the one is a block of the other, byte for byte."""
        return (self.num_layers == other.num_layers
                and memcmp(&self.layout, &other.layout, sizeof(self.layout)) == 0)

    def raw(self, int64_t layer):
        """The packed bytes of one layer, uint8 `(num_blocks, layout.block_bytes)`: the memory itself, read-only."""
        cdef cnp.npy_intp shape[2]
        shape[0], shape[1] = self.num_blocks, <cnp.npy_intp>self.layout.block_bytes
        cdef cnp.ndarray view = cnp.PyArray_SimpleNewFromData(2, shape, cnp.NPY_UINT8, self.layer_base(layer))
        cnp.set_array_base(view, self)
        view.flags.writeable = False
        return view

    def overwrite(self, int64_t block):
        """The packed bytes of a block, one uint8 array `(layout.block_bytes,)` per layer, to be written at once.

        Any bytes are safe to read and to attend over; what they mean is up to whoever writes them.
        """
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"expected a block in [0, {self.num_blocks}), got {block}")
        cdef cnp.npy_intp size = <cnp.npy_intp>self.layout.block_bytes
        cdef cnp.ndarray view
        cdef int64_t layer
        views = []
        for layer in range(self.num_layers):
            view = cnp.PyArray_SimpleNewFromData(1, &size, cnp.NPY_UINT8, self.layer_base(layer) + block * size)
            cnp.set_array_base(view, self)
            views.append(view)
        self.reached[block] = <uint16_t>self.layout.block_size
        return views

    # -- sequences of a table -------------------------------------------------------------------------------

    def write_sequence(self, SequenceTable table not None, layer, uint64_t seq_id, start, keys, values):
        """Store rows at tokens `start`.. of a sequence, copying shared blocks first; an access.

        Args:
            keys, values: float32 `(n, num_heads, head_dim)`; `start + n` at most the sequence's length.

        Raises:
            as `write`, and OutOfMemoryError: too few blocks are free for the copies.
        """
        cdef unsigned char *base = self.layer_base(layer)
        cdef const float[:, :, ::1] k = keys
        cdef const float[:, :, ::1] v = values
        cdef int64_t first = start, count = k.shape[0], num_runs
        cdef int32_t row = table.row_of(seq_id)
        self.represent_(k, v)
        table.own_(row, first, first + count)
        self.carry_out(table)
        num_runs = table.slice_(row, first, first + count)
        if num_runs:
            with nogil:
                _kernels.write_runs(&self.layout, base, table.cut, num_runs, &k[0, 0, 0], &v[0, 0, 0])
        table.touch_(row)

    def write_batch(self, SequenceTable table not None, layer, const uint64_t[::1] seq_ids, keys, values):
        """Store one row each at the last tokens of many sequences, an access to each, in this order.

        Args:
            keys, values: float32 `(len(seq_ids), num_heads, head_dim)`.

        Raises:
            as `write_sequence`; ValueError also for a sequence without tokens or named twice. All or nothing,
            but for copies of shared blocks, which change no sequence's content.
        """
        cdef unsigned char *base = self.layer_base(layer)
        cdef const float[:, :, ::1] k = keys
        cdef const float[:, :, ::1] v = values
        cdef int64_t i, n = seq_ids.shape[0], last
        cdef int32_t row
        self.represent_(k, v)
        rows = np.empty(n, np.int32)
        cdef int32_t[::1] row_view = rows
        for i in range(n):
            row_view[i] = table.row_of(seq_ids[i])
            if table.seqs[row_view[i]].num_tokens == 0:
                raise ValueError(f"expected sequences with tokens, got an empty one: {seq_ids[i]}")
        if len(np.unique(rows)) != n:
            raise ValueError("expected each sequence once, got one twice")
        for i in range(n):
            last = table.seqs[row_view[i]].num_tokens
            table.own_(row_view[i], last - 1, last)
            self.carry_out(table)
        for i in range(n):
            row = row_view[i]
            last = table.seqs[row].num_tokens
            table.slice_(row, last - 1, last)
            _kernels.write_runs(&self.layout, base, table.cut, 1, &k[i, 0, 0], &v[i, 0, 0])
            table.touch_(row)

    def read_sequence(self, SequenceTable table not None, layer, uint64_t seq_id, start, stop):
        """Tokens `start`..`stop` of a sequence as `(keys, values)`, float32 `(n, num_heads, head_dim)` each."""
        cdef unsigned char *base = self.layer_base(layer)
        cdef int64_t num_runs = table.slice_(table.row_of(seq_id), start, stop)
        keys, values = self._rows(stop - start), self._rows(stop - start)
        cdef float[:, :, ::1] k = keys
        cdef float[:, :, ::1] v = values
        if num_runs:
            with nogil:
                _kernels.read_runs(&self.layout, base, table.cut, num_runs, &k[0, 0, 0], &v[0, 0, 0])
        return keys, values

    def attend_sequences(self, SequenceTable table not None, int64_t layer, queries, seq_ids, query_lens, scale,
                         sink_queries, out, bint return_scores, context_lens=None, bint return_lse=False):
        """softmax(q K^T scale) V over the blocks of several sequences, causal, in one call; counts as an access.

        Args:
            queries: `(total_queries, num_query_heads, head_dim)`, num_query_heads a multiple of num_heads.
            seq_ids, query_lens: integers `(n,)`; None is one query each. A sequence's queries stand on its last
                tokens.
            scale: a number, or None for `head_dim ** -0.5`.
            sink_queries: like `queries`, for the tokens before a StreamingLLM hole; or None.
            out: float32, C-contiguous, like `queries`, written; or None for a new array.
            return_scores: also return each token's attention mass, float32 `(total tokens seen,)`.
            context_lens: integers `(n,)`, how many of its first tokens each sequence shows; None is all.
            return_lse: also return the logarithm of each row's sum of exp(score), float32
                `(total_queries, num_query_heads)`.

        Raises:
            SequenceNotFoundError, IndexError, TypeError, ValueError: before anything has changed.
        """
        cdef unsigned char *base = self.layer_base(layer)
        cdef cnp.ndarray q = self.queries_(queries, "queries")
        cdef cnp.ndarray sinks = None
        if q.shape[1] == 0 or q.shape[1] % self.layout.num_heads:
            raise ValueError(f"expected a multiple of {self.layout.num_heads} query heads, got {q.shape[1]}")
        if sink_queries is not None:
            sinks = self.queries_(sink_queries, "sink_queries")
            if sinks.shape[0] != q.shape[0] or sinks.shape[1] != q.shape[1]:
                raise ValueError(f"expected sink_queries of shape {queries.shape}, got {np.shape(sink_queries)}")
        cdef cnp.ndarray result = self.result_(out, q)
        cdef int64_t i, n, tokens = 0
        if is_plain(seq_ids, cnp.NPY_UINT64, 1):
            n = (<cnp.ndarray>seq_ids).shape[0]
        else:
            seq_ids = as_seq_ids(seq_ids)
            n = len(seq_ids)
        cdef uint64_t *id = <uint64_t *>cnp.PyArray_DATA(<cnp.ndarray>seq_ids)
        self.reserve_seqs(n)
        self.describe_(table, id, n, query_lens, context_lens, q.shape[0])
        cdef cnp.ndarray scores = None, lse = None
        if return_scores:
            for i in range(n):
                tokens += self.seqs[i].num_tokens - self.seqs[i].hidden_tokens
            scores = np.zeros(tokens, np.float32)
        if return_lse:
            lse = cnp.PyArray_EMPTY(2, q.shape, cnp.NPY_FLOAT32, 0)
        cdef double factor = 1.0 / sqrt(<double>self.layout.head_dim) if scale is None else scale
        self.attend_(base, n, q, sinks, <float>factor, result, scores, lse)
        for i in range(n):
            table.touch_(table.row_of(id[i]))
        if return_lse:
            return (result, scores, lse) if return_scores else (result, lse)
        return (result, scores) if return_scores else result

    def carry_out(self, SequenceTable table not None):
        """Copy what the table's copy-on-write has ordered. Takes no memory: the tables name the copies already."""
        cdef size_t size = self.layout.block_bytes
        cdef unsigned char *base
        cdef int64_t i, layer
        if table.num_copies == 0:
            return
        for layer in range(self.num_layers):
            base = self.layer_base(layer)
            for i in range(table.num_copies):
                memcpy(base + table.copy_dst[i] * size, base + table.copy_src[i] * size, size)
        for i in range(table.num_copies):    # what lies behind the tokens that are kept has come along
            self.reached[table.copy_dst[i]] = self.reached[table.copy_src[i]]
        table.num_copies = 0

    def hand_out(self, SequenceTable table not None, uint64_t seq_id, int64_t count):
        """The last `count` tokens of a sequence are new: they read as zeros until they are written."""
        self.carry_out(table)
        self.hand_out_(&table.seqs[table.row_of(seq_id)], count)

    def hand_out_batch(self, BatchTable table not None, int64_t n, const int64_t[::1] counts=None):
        """`hand_out` for the `n` sequences of the table's last batch call, of `counts[i]` or one token each."""
        cdef int64_t i
        self.carry_out(table)
        for i in range(n):
            self.hand_out_(&table.seqs[table.picked[i]], 1 if counts is None else counts[i])

    # A change of the table and what it means for the bytes, in one call: an interrupt cannot come in between.

    def allocate(self, SequenceTable table not None, uint64_t seq_id, int64_t count):
        """`table.allocate`, of tokens that read as zeros."""
        table.allocate(seq_id, count)
        self.hand_out(table, seq_id, count)

    def append(self, SequenceTable table not None, uint64_t seq_id, int64_t count):
        """`table.append`, of tokens that read as zeros."""
        table.append(seq_id, count)
        self.hand_out(table, seq_id, count)

    def allocate_batch(self, BatchTable table not None, seq_ids, const int64_t[::1] counts):
        """`table.allocate_batch`, of tokens that read as zeros."""
        table.allocate_batch(seq_ids, counts)
        self.hand_out_batch(table, counts.shape[0], counts)

    def append_batch(self, BatchTable table not None, seq_ids):
        """`table.append_batch`, of tokens that read as zeros."""
        self.hand_out_batch(table, table.append_batch(seq_ids))

    def compact(self, SequenceTable table not None, seq_id):
        """`table.compact`, and the moves that it orders."""
        self.move_slots(table.compact(seq_id))

    # -- below the shell ------------------------------------------------------------------------------------

    def _rows(self, n):
        return np.empty((n, self.layout.num_heads, self.layout.head_dim), np.float32)

    def _runs(self, runs, rows):
        if runs.dtype != RUN or runs.ndim != 1:
            raise ValueError(f"expected runs of dtype {RUN}, got {runs.dtype}")
        cdef const kvc_run[::1] view = np.ascontiguousarray(runs)
        cdef int64_t i, slots = 0
        for i in range(view.shape[0]):
            if not 0 <= view[i].block < self.num_blocks or not view[i].first < view[i].stop <= self.layout.block_size:
                raise ValueError(f"expected runs inside {self.num_blocks} blocks of {self.layout.block_size} slots")
            slots += view[i].stop - view[i].first
        if rows is not None and slots != rows:
            raise ValueError(f"expected as many rows as slots, got {rows}")
        return view

    cdef unsigned char *layer_base(self, int64_t layer) except NULL:
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"expected a layer in [0, {self.num_layers}), got {layer}")
        return self.arena + <size_t>layer * <size_t>self.num_blocks * self.layout.block_bytes

    cdef void hand_out_(self, const Sequence *seq, int64_t count) noexcept nogil:
        cdef int64_t run = seq.num_runs, layer
        cdef size_t arena = <size_t>self.num_blocks * self.layout.block_bytes
        cdef int block, first, stop
        while count > 0:
            run -= 1
            block, stop = seq.runs[run].block, seq.runs[run].stop
            first = <int>max(<int64_t>seq.runs[run].first, stop - count)
            count -= stop - first
            if first < self.reached[block]:  # all that lies behind at once: the next tokens of this block are free
                for layer in range(self.num_layers):
                    _kernels.clear_slots(&self.layout, self.arena + layer * arena, block, first,
                                         self.reached[block] - first)
            self.reached[block] = <uint16_t>stop

    cdef int represent_(self, const float[:, :, ::1] keys, const float[:, :, ::1] values) except -1:
        cdef int64_t n = keys.shape[0] * keys.shape[1] * keys.shape[2], bad = -1, row
        if keys.shape[0] != values.shape[0] or keys.shape[1] != self.layout.num_heads \
                or keys.shape[2] != self.layout.head_dim or values.shape[1] != keys.shape[1] \
                or values.shape[2] != keys.shape[2]:
            raise ValueError(f"expected rows of shape ({self.layout.num_heads}, {self.layout.head_dim})")
        if n == 0:
            return 0
        for what, name in ((0, "keys"), (1, "values")):
            with nogil:
                if what == 0:
                    bad = _kernels.check_representable(&keys[0, 0, 0], n, self.layout.key_format)
                else:
                    bad = _kernels.check_representable(&values[0, 0, 0], n, self.layout.value_format)
            if bad >= 0:
                row = bad // (keys.shape[1] * keys.shape[2])
                value = np.asarray(keys if what == 0 else values).reshape(-1)[bad]
                dtype = self.key_dtype if what == 0 else self.value_dtype
                raise ValueError(f"expected {name} that {dtype} can hold, got {value} in row {row}")
        return 0

    cdef int reserve_seqs(self, int64_t count) except -1:
        if count <= self.seqs_capacity:
            return 0
        cdef kvc_seq *seqs = <kvc_seq *>realloc(self.seqs, count * sizeof(kvc_seq))
        if seqs == NULL:
            raise MemoryError(f"no memory for {count} sequences")
        self.seqs, self.seqs_capacity = seqs, count
        return 0

    cdef cnp.ndarray queries_(self, object queries, str name):
        """`(n, heads, head_dim)` float32, as it is where it is that already."""
        if not is_plain(queries, cnp.NPY_FLOAT32, 3) or (<cnp.ndarray>queries).shape[2] != self.layout.head_dim:
            queries = as_floats(queries, (None, None, self.layout.head_dim), name)
        return queries

    cdef cnp.ndarray result_(self, object out, cnp.ndarray q):
        if out is None:
            return cnp.PyArray_EMPTY(3, q.shape, cnp.NPY_FLOAT32, 0)
        if not is_plain(out, cnp.NPY_FLOAT32, 3) or not cnp.PyArray_ISWRITEABLE(<cnp.ndarray>out) \
                or not cnp.PyArray_SAMESHAPE(<cnp.ndarray>out, q):
            raise ValueError(f"expected out to be C-contiguous, writeable float32 of shape {np.shape(q)}")
        cdef char *first = <char *>cnp.PyArray_DATA(<cnp.ndarray>out)
        cdef char *other = <char *>cnp.PyArray_DATA(q)
        if first < other + cnp.PyArray_NBYTES(q) and other < first + cnp.PyArray_NBYTES(<cnp.ndarray>out):
            raise ValueError("expected out apart from queries, got the same memory")
        return out

    cdef int describe_(self, SequenceTable table, const uint64_t *ids, int64_t n, object query_lens,
                       object context_lens, int64_t num_queries) except -1:
        """Fill `seqs` and check that the queries add up."""
        cdef const int64_t[::1] lens
        cdef int64_t i, total = n
        for i in range(n):
            table.describe(table.row_of(ids[i]), 1, &self.seqs[i])
            self.seqs[i].hidden_tokens = 0
        if context_lens is not None:
            lens = as_indices(context_lens, "context_lens")
            if lens.shape[0] != n:
                raise ValueError(f"expected {n} context_lens, got {lens.shape[0]}")
            for i in range(n):
                if not 0 <= lens[i] <= self.seqs[i].num_tokens:
                    raise ValueError(f"expected context_lens up to {self.seqs[i].num_tokens} for sequence {ids[i]}, "
                                     f"got {lens[i]}")
                self.seqs[i].hidden_tokens = self.seqs[i].num_tokens - lens[i]
        if query_lens is not None:
            lens = as_indices(query_lens, "query_lens")
            if lens.shape[0] != n:
                raise ValueError(f"expected {n} query_lens, got {lens.shape[0]}")
            total = 0
            for i in range(n):
                self.seqs[i].num_queries = lens[i]
                total += lens[i]
        for i in range(n):
            if not 0 <= self.seqs[i].num_queries <= self.seqs[i].num_tokens:
                raise ValueError(f"expected 0 to {self.seqs[i].num_tokens} queries for sequence {ids[i]}, "
                                 f"got {self.seqs[i].num_queries}")
        if total != num_queries:
            raise ValueError(f"expected {total} queries, got {num_queries}")
        return 0

    cdef int attend_(self, unsigned char *base, int64_t num_seqs, cnp.ndarray queries, cnp.ndarray sink_queries,
                     float scale, cnp.ndarray out, cnp.ndarray scores, cnp.ndarray lse) except -1:
        cdef int heads = <int>queries.shape[1], threads = _kernels.num_threads()
        if queries.shape[0] == 0 or num_seqs == 0:
            return 0
        cdef size_t size = _kernels.attend_scratch_bytes(&self.layout, self.seqs, num_seqs, heads, threads)
        if size > self.scratch_bytes:
            free(self.scratch)
            self.scratch_bytes = 0
            self.scratch = malloc(size)
            if self.scratch == NULL:
                raise OutOfMemoryError(size, 0, "bytes")
            self.scratch_bytes = size
        cdef const float *q = <const float *>cnp.PyArray_DATA(queries)
        cdef const float *sinks = NULL
        cdef float *mass = NULL
        cdef float *logs = NULL
        if sink_queries is not None:
            sinks = <const float *>cnp.PyArray_DATA(sink_queries)
        if scores is not None:
            mass = <float *>cnp.PyArray_DATA(scores)
        if lse is not None:
            logs = <float *>cnp.PyArray_DATA(lse)
        cdef float *to = <float *>cnp.PyArray_DATA(out)
        with nogil:
            _kernels.attend(&self.layout, base, self.seqs, num_seqs, heads, scale, q, sinks, to, mass, logs,
                            self.scratch, threads)
        return 0
