"""BlockStore: the memory of every layer, and the kernels over it.

It knows bytes and runs, nothing of references and sequences; those are the pool's and the tables'.
Values are checked here, once, before the first byte changes.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint16_t
from libc.string cimport memcmp, memcpy

from kvcache.core.knownkeys cimport known_keys
from kvcache.core.kvrows cimport STEP, KvRows
from kvcache.core.layouts cimport Layouts
from kvcache.core.page_summaries cimport PageSummaries
from kvcache.core.spill cimport Spill
from kvcache.kernels cimport kernels
from kvcache.kernels.kernels cimport kvc_format, kvc_head_keys, kvc_layout, kvc_run
from kvcache.kernels.spill_units cimport KVC_TO_CHANGE, KVC_TO_READ, KVC_TO_REPLACE
from kvcache.support.mapped cimport MappedMemory
from kvcache.support.recycled cimport new_floats

import numpy as np

from kvcache.core.runs import RUN
from kvcache.errors import InvalidOperationError
from kvcache.support.arguments import as_count

__all__ = ["BlockStore"]

cdef object MOST = 2**31 - 1    # blocks
cdef int64_t HELD = 64          # runs whose blocks are held at once
cdef size_t APART = 1 << 16     # bytes between blocks that spill and what stays: a multiple of all systems' pages

cnp.import_array()


cdef class BlockStore:
    """K and V of `num_blocks` blocks in `num_layers` layers.

    Args:
        num_layers, num_blocks: how many; the memory is mapped at once and touched when first written.
        block_size: tokens per block, 1 to 256.
        num_heads: KV heads.
        head_dim: a multiple of 8, at most 512, with `latent` 576.
        key_dtype, value_dtype: storage formats, of `kernels.FORMATS`: one, or a list or tuple of one for each layer.
        rotate: "auto" or True: rows of quantised formats are stored under a Hadamard rotation; False: never.
        value_head_dim: `head_dim` of V alone; None: that of K.
        separate_layers: a block holds K and V of one layer, whichever: there is one arena, and the store's `num_layers`
            is at most 1. Writes, reads and attention still name the layer whose keys they are.
        latent: V is the first `value_head_dim` channels of K, of one KV head, and takes no memory of its own.
        calibration: of keys; a `Calibration` of these layers, heads and channels, or None. With `latent` V lacks the
            first channels of its centres too.
        spill: `(folder, limit)`: at most `limit` bytes of the blocks are in memory, the others in a file of this
            folder, see `Spill`; None: all are in memory.
        index: `(layers, channels, format)`: so many index layers follow the `num_layers`, whose rows are keys of one
            head of these channels and in this format, for indexers; with `latent`. None: there are none.

    Raises:
        ValueError: a size or format that is not supported.
        OutOfMemoryError: the system refuses the memory (in bytes).
    """

    def __cinit__(self, num_layers, num_blocks, block_size, num_heads, head_dim, key_dtype="f32",
                  value_dtype="f32", rotate="auto", value_head_dim=None, bint separate_layers=False, bint latent=False,
                  index=None, calibration=None, spill=None):
        self.layouts = Layouts(num_layers, block_size, num_heads, head_dim, key_dtype, value_dtype, rotate,
                               value_head_dim, separate_layers, latent, index)
        self.layout, self.num_layers = self.layouts.first, self.layouts.num_layers
        self.num_named, self.separate = self.layouts.num_named, separate_layers
        self.known = known_keys(calibration, self.layouts)
        self.spills = spill is not None
        self._take(self.memory_for(num_blocks), num_blocks)
        if spill is not None:
            self.spill = Spill(spill[0], spill[1], self.memory, self.layouts, num_blocks)
            self.spilled = self.spill.c

    @property
    def calibration(self):
        """The `Calibration` of the keys, or None."""
        return self.known.calibration

    @property
    def key_dtype(self):
        """The storage format of K; a tuple of one for each layer where they differ."""
        return self.layouts.key_dtype

    @property
    def index(self):
        """`(layers, channels, format)` of the index layers, or None."""
        return self.layouts.index

    @property
    def value_dtype(self):
        """The storage format of V; a tuple of one for each layer where they differ."""
        return self.layouts.value_dtype

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
        """Channels per head of K and of queries."""
        return self.layout.head_dim

    @property
    def value_head_dim(self):
        """Channels per head of V and of what attention returns."""
        return self.layout.value_head_dim

    @property
    def latent(self):
        """Whether V is the first channels of K."""
        return self.layout.latent == 1

    @property
    def block_bytes(self):
        """Bytes of K and V of one block in all layers."""
        return int(self.layouts.starts[self.num_layers])

    @property
    def layer_bytes(self):
        """Bytes of K and V of one block in each layer."""
        return [int(self.layouts.of[layer].block_bytes) for layer in range(self.num_layers)]

    @property
    def nbytes(self):
        """Bytes of K and V of all blocks in all layers."""
        return self.block_bytes * self.num_blocks

    @property
    def span(self):
        """The address of the memory, and its bytes; asked for without the lock too."""
        with cython.critical_section(self):
            return <size_t>self.memory.bytes, self.memory.nbytes

    @property
    def summaries(self):
        """The `PageSummaries`, or None; asked for without the lock too."""
        with cython.critical_section(self):
            return self.page_summaries

    @property
    def bookkeeping(self):
        """Bytes of bookkeeping, in proportion to the number of blocks."""
        return sizeof(uint16_t) * self.num_blocks + (0 if self.spill is None else self.spill.nbytes)

    @property
    def rotated(self):
        """`(keys, values)`: whether rows are stored under a Hadamard rotation, in any layer."""
        return self.layouts.rotated

    # -- rows -----------------------------------------------------------------------------------------------

    def check_values(self, keys, values):
        """Raise unless every value can be stored, in the first layer.

        Raises:
            ValueError: NaN, an infinity, or a magnitude that the format cannot hold; names where.
        """
        self.check_values_(KvRows(keys, values), 0)

    def check_rows(self, KvRows rows not None, int64_t layer):
        """`check_values` of rows for a layer."""
        self.check_values_(rows, self.named_layer(layer))

    def write(self, layer, runs, keys, values):
        """Store rows at `runs`.

        Args:
            layer: in [0, num_layers).
            runs: dtype `RUN` `(r,)`.
            keys, values: `(n, num_heads, head_dim)`, of V `value_head_dim`, as `KvRows` takes them, n the slots in
                `runs`.

        Raises:
            IndexError, ValueError: no such layer; runs outside the arena, another number of rows; values that
                the format cannot hold.
        """
        cdef const kvc_run[::1] view = self.runs_(runs, keys.shape[0])
        cdef KvRows rows = KvRows(keys, values)
        cdef int64_t number = self.named_layer(layer)
        self.check_values_(rows, number)
        if view.shape[0]:
            with nogil:
                self.write_(number, &view[0], view.shape[0], rows, 0, 1)
            self.expect_good_()

    def read(self, layer, runs):
        """The rows at `runs` (dtype `RUN`) as `(keys, values)`, float32, of the shapes that `write` takes.

        Raises:
            IndexError, ValueError: no such layer; runs outside the arena.
        """
        n = int(runs["stop"].astype(np.int64).sum() - runs["first"].astype(np.int64).sum())
        cdef const kvc_run[::1] view = self.runs_(runs, n)
        cdef int64_t number = self.named_layer(layer)
        keys, values = self.new_rows(number, n, 0), self.new_rows(number, n, 1)
        if n:
            self.read_(number, &view[0], view.shape[0], keys, values)
        return keys, values

    def read_side(self, layer, runs, int side):
        """`read` of the keys alone, side 0, or of the values alone, side 1."""
        n = int(runs["stop"].astype(np.int64).sum() - runs["first"].astype(np.int64).sum())
        cdef const kvc_run[::1] view = self.runs_(runs, n)
        cdef int64_t number = self.named_layer(layer)
        rows = self.new_rows(number, n, side)
        if n:
            self.read_(number, &view[0], view.shape[0], None if side else rows, rows if side else None)
        return rows

    def copy_blocks(self, sources, targets):
        """Copy whole blocks in every layer, in order.

        Args:
            sources, targets: int32 `(n,)` block ids in range; the owner has checked them.
        """
        cdef const int32_t[::1] src = sources
        cdef const int32_t[::1] dst = targets
        if src.shape[0]:
            with nogil:
                self.copy_(&src[0], &dst[0], src.shape[0])
            self.expect_good_()

    def move_slots(self, moves, BlockStore source=None):
        """Move tokens bit for bit in every layer, in order.

        Args:
            moves: int32 `(n, 5)`: source block, source slot, target block, target slot, tokens; in range, the owner
                has checked them.
            source: where they come from, a store of the same layers and layout; by default this one.
        """
        cdef const int32_t[:, ::1] view = moves
        cdef BlockStore other = self if source is None else source
        cdef int64_t i, layer
        if not self.same_layout(other):
            raise ValueError("source: expected a store of the same layers and layout, got another")
        with nogil:
            for layer in range(self.num_layers):
                for i in range(view.shape[0]):
                    self._move(layer, other, &view[i, 0])
        for i in range(view.shape[0]):
            self.written_slots[view[i, 2]] = max(self.written_slots[view[i, 2]], <uint16_t>(view[i, 3] + view[i, 4]))
            self.forget_(view[i, 2], view[i, 3], view[i, 3] + view[i, 4])
        other.expect_good_()
        self.expect_good_()

    def same_layout(self, BlockStore other not None):
        """Whether blocks of both stores have the same layout."""
        return (self.num_layers == other.num_layers and self.num_named == other.num_named
                and self.known.same(other.known)
                and memcmp(&self.layout, &other.layout, sizeof(self.layout)) == 0
                and memcmp(self.layouts.of, other.layouts.of, self.num_layers * sizeof(self.layout)) == 0)

    def raw(self, int64_t layer):
        """The packed bytes of one layer, uint8 `(num_blocks, layer_bytes[layer])`: the memory itself, read-only.

        Not of a store that spills, whose `page` has those of one block.
        """
        assert self.spill is None
        cdef unsigned char *base = self.layer_base(layer)
        cdef cnp.npy_intp shape[2]
        shape[0], shape[1] = self.num_blocks, <cnp.npy_intp>self.layouts.of[layer].block_bytes
        cdef cnp.ndarray view = cnp.PyArray_SimpleNewFromData(2, shape, cnp.NPY_UINT8, base)
        cnp.set_array_base(view, self.memory)
        view.flags.writeable = False
        return view

    def page(self, int64_t block):
        """The packed bytes of a block in range, one uint8 array `(layer_bytes[layer],)` per layer: a copy."""
        cdef kvc_run run = kvc_run(<int32_t>block, 0, 0)
        cdef cnp.ndarray copied
        cdef unsigned char *target
        cdef size_t size
        cdef int64_t layer
        copies = []
        for layer in range(self.num_layers):
            copied = np.empty(self.layouts.of[layer].block_bytes, np.uint8)
            target, size = <unsigned char *>cnp.PyArray_DATA(copied), self.layouts.of[layer].block_bytes
            with nogil:
                self.hold_(layer, &run, 1, KVC_TO_READ)
                memcpy(target, self.layer_base_(layer) + block * size, size)
                self.release_(layer, &run, 1, KVC_TO_READ)
            copies.append(copied)
        self.expect_good_()
        return copies

    def replace(self, int64_t block, list arrays):
        """The inverse of `page`, of arrays of these sizes; any bytes are safe to read and to attend over."""
        cdef kvc_run run = kvc_run(<int32_t>block, 0, 0)
        cdef cnp.ndarray array
        cdef const unsigned char *source
        cdef size_t size
        cdef int64_t layer
        for layer in range(self.num_layers):
            array = arrays[layer]
            source, size = <const unsigned char *>cnp.PyArray_DATA(array), self.layouts.of[layer].block_bytes
            with nogil:
                self.hold_(layer, &run, 1, KVC_TO_REPLACE)
                memcpy(self.layer_base_(layer) + block * size, source, size)
                self.release_(layer, &run, 1, KVC_TO_REPLACE)
        self.written_slots[block] = <uint16_t>self.layout.block_size
        self.forget_(<int32_t>block, 0, self.layout.block_size)

    def overwrite(self, int64_t block):
        """The packed bytes of a block, one uint8 array `(layer_bytes[layer],)` per layer, to be written at once.

        Any bytes are safe to read and to attend over. Not of a store that spills, which has `replace`.
        """
        assert self.spill is None
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"block: expected an int in [0, {<int32_t>self.num_blocks}), got {block}")
        cdef cnp.npy_intp size
        cdef cnp.ndarray view
        cdef int64_t layer
        views = []
        for layer in range(self.num_layers):
            size = <cnp.npy_intp>self.layouts.of[layer].block_bytes
            view = cnp.PyArray_SimpleNewFromData(1, &size, cnp.NPY_UINT8, self.layer_base(layer) + block * size)
            cnp.set_array_base(view, self.memory)
            views.append(view)
        self.written_slots[block] = <uint16_t>self.layout.block_size
        self.forget_(<int32_t>block, 0, self.layout.block_size)
        return views

    def reserve_summaries(self):
        """Make room for the summaries of keys that attention to `top_tokens` needs; once, until blocks are added.

        Raises:
            OutOfMemoryError: the system refuses the memory (in bytes).
        """
        if self.page_summaries is not None:
            return
        summaries = PageSummaries(self.layouts, self.num_blocks)
        with cython.critical_section(self):
            self.page_summaries = summaries

    def check_summaries(self):
        """Verify that the summaries of keys are those of the stored keys; AssertionError: naming which are not."""
        if self.page_summaries is not None:
            self.page_summaries.check(PageSummaries(self.layouts, self.num_blocks), <size_t>self.arena, self.spill)

    # -- below the shell ------------------------------------------------------------------------------------

    cdef int64_t hold_(self, int64_t layer, const kvc_run *runs, int64_t num_runs, int use) noexcept nogil:
        return 0 if self.spilled == NULL else self.spill.hold_(0 if self.separate else layer, runs, num_runs, use)

    cdef void release_(self, int64_t layer, const kvc_run *runs, int64_t num_runs, int use) noexcept nogil:
        if self.spilled != NULL:
            self.spill.release_(0 if self.separate else layer, runs, num_runs, use)

    cdef int expect_good_(self) except -1:
        return 0 if self.spill is None else self.spill.raise_fault_()

    cdef void forget_faults_(self) noexcept nogil:
        if self.spilled != NULL:
            self.spill.forget_faults_()

    cdef int expect_room_(self) except -1:
        return 0 if self.spill is None else self.spill.expect_room_()

    cdef void trim_(self) noexcept nogil:
        if self.spilled != NULL:
            self.spill.trim_()

    cdef int64_t named_layer(self, int64_t layer) except -1:
        if not 0 <= layer < self.num_named:
            raise IndexError(f"layer: expected an int in [0, {self.num_named}), got {layer}")
        return layer

    cdef int64_t attended_layer(self, int64_t layer) except -1:
        self.named_layer(layer)
        if self.layouts.index is not None and layer >= self.num_named - self.layouts.index[0]:
            raise IndexError(f"layer: expected one with K and V, got the index layer {layer}")
        return layer

    cdef unsigned char *base_(self, int64_t layer) noexcept nogil:
        return self.arena if self.separate else self.layer_base_(layer)

    cdef const kvc_head_keys *known_(self, int64_t layer) noexcept nogil:
        return NULL if self.known.heads == NULL else self.known.heads + layer * self.layout.num_heads

    cdef MappedMemory memory_for(self, num_blocks):
        if self.spill is not None:
            raise InvalidOperationError("grow: expected a cache without spill, got one with it")
        num_blocks = as_count(num_blocks, "num_blocks", 0, MOST)    # a Python int: no product wraps around
        apart = APART if self.spills else 0
        return MappedMemory(self.block_bytes * num_blocks + apart + int(sizeof(uint16_t)) * num_blocks, self.spills)

    cdef void _take(self, MappedMemory memory, int32_t num_blocks):
        cdef size_t blocks = self.layouts.starts[self.num_layers] * <size_t>num_blocks
        with cython.critical_section(self):
            self.memory, self.arena, self.num_blocks = memory, memory.bytes, num_blocks
        if self.spills:
            blocks = (blocks + APART - 1) // APART * APART
        self.written_slots = <uint16_t *>(memory.bytes + blocks)    # behind the blocks, whose sizes are even

    cdef void move_to(self, MappedMemory memory, int32_t num_blocks):
        cdef MappedMemory old = self.memory
        cdef const uint16_t *written = self.written_slots
        cdef size_t size, first, offset
        cdef int32_t layer, block, count = self.num_blocks
        self._take(memory, num_blocks)
        with cython.critical_section(self):
            self.page_summaries = None    # of fewer blocks
        with nogil:
            for layer in range(self.num_layers):
                size, first = self.layouts.of[layer].block_bytes, self.layouts.starts[layer] * <size_t>count
                for block in range(count):
                    if written[block]:    # the others are zero
                        offset = block * size
                        memcpy(self.layer_base_(layer) + offset, old.bytes + first + offset, size)
                old.give_back(first, first + size * <size_t>count)
            memcpy(self.written_slots, written, count * sizeof(uint16_t))

    cdef int dim_(self, int64_t layer, int side) noexcept nogil:
        cdef const kvc_layout *layout = self.layouts.of_(layer)
        return layout.value_head_dim if side else layout.head_dim

    cdef object new_rows(self, int64_t layer, int64_t n, int side):
        return new_floats((n, self.layout.num_heads, self.dim_(layer, side)))

    cdef const kvc_run[::1] runs_(self, object runs, int64_t num_slots):
        if runs.dtype != RUN or runs.ndim != 1:
            raise ValueError(f"runs: expected dtype {RUN} (n,), got {runs.dtype} {runs.shape}")
        cdef const kvc_run[::1] view = np.ascontiguousarray(runs)
        cdef int64_t i, slots = 0
        for i in range(view.shape[0]):
            if not 0 <= view[i].block < self.num_blocks or not view[i].first < view[i].stop <= self.layout.block_size:
                raise ValueError(
                    f"runs: expected slots of {<int32_t>self.num_blocks} blocks of {self.layout.block_size} slots, "
                    f"got {view[i].first} to {view[i].stop} of {view[i].block}"
                )
            slots += view[i].stop - view[i].first
        if num_slots >= 0 and slots != num_slots:
            raise ValueError(f"runs: expected {num_slots} slots, one per row, got {slots}")
        return view

    cdef unsigned char *layer_base(self, int64_t layer) except NULL:
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer: expected an int in [0, {self.num_layers}), got {layer}")
        return self.layer_base_(layer)

    cdef unsigned char *layer_base_(self, int64_t layer) noexcept nogil:
        return self.arena + self.layouts.starts[layer] * <size_t>self.num_blocks

    cdef void copy_(self, const int32_t *sources, const int32_t *targets, int64_t n) noexcept nogil:
        cdef size_t size
        cdef unsigned char *base
        cdef int64_t i, layer
        for layer in range(self.num_layers):
            base, size = self.layer_base_(layer), self.layouts.of[layer].block_bytes
            for i in range(n):
                if self.spilled != NULL:
                    self._copy_held(layer, sources[i], targets[i])
                else:
                    memcpy(base + targets[i] * size, base + sources[i] * size, size)
        for i in range(n):    # the copy includes slots behind the tokens of the sequence
            self.written_slots[targets[i]] = self.written_slots[sources[i]]
            self.forget_(targets[i], 0, self.layout.block_size)

    cdef void clear_new_(self, const kvc_run *runs, int64_t num_runs, int64_t count) noexcept nogil:
        cdef int64_t run = num_runs, layer
        cdef int block, first, stop
        while count > 0:
            run -= 1
            block, stop = runs[run].block, runs[run].stop
            first = <int>max(<int64_t>runs[run].first, stop - count)
            count -= stop - first
            if first < self.written_slots[block]:  # clears all slots behind as well: the next tokens cost nothing
                for layer in range(self.num_layers):
                    self._clear(layer, block, first, self.written_slots[block] - first)
                self.forget_(block, first, self.written_slots[block])
            self.written_slots[block] = <uint16_t>stop

    cdef void _clear(self, int64_t layer, int32_t block, int first, int count) noexcept nogil:
        cdef kvc_run run = kvc_run(block, 0, 0)
        if self.spilled != NULL and first == 0 and self.spill.blank_(layer, block):
            return
        self.hold_(layer, &run, 1, KVC_TO_CHANGE)
        kernels.clear_slots(&self.layouts.of[layer], self.layer_base_(layer), block, first, count)
        self.release_(layer, &run, 1, KVC_TO_CHANGE)

    cdef void _copy_held(self, int64_t layer, int32_t source, int32_t target) noexcept nogil:
        cdef size_t size = self.layouts.of[layer].block_bytes
        cdef unsigned char *base = self.layer_base_(layer)
        cdef kvc_run src = kvc_run(source, 0, 0), dst = kvc_run(target, 0, 0)
        cdef bint is_there = self.hold_(layer, &src, 1, KVC_TO_READ) == 0
        self.hold_(layer, &dst, 1, KVC_TO_REPLACE)
        if is_there:
            memcpy(base + target * size, base + source * size, size)
            self.release_(layer, &dst, 1, KVC_TO_REPLACE)
        else:
            self.spill.spoil_(layer, &dst, 1)
        self.release_(layer, &src, 1, KVC_TO_READ)

    cdef void _move(self, int64_t layer, BlockStore other, const int32_t *move) noexcept nogil:
        cdef kvc_run src = kvc_run(move[0], 0, 0), dst = kvc_run(move[2], 0, 0)
        cdef bint is_there = other.hold_(layer, &src, 1, KVC_TO_READ) == 0
        self.hold_(layer, &dst, 1, KVC_TO_CHANGE)
        if is_there:
            kernels.copy_slots(&self.layouts.of[layer], other.layer_base_(layer), move[0], move[1],
                               self.layer_base_(layer), move[2], move[3], move[4])
        if is_there or self.spilled == NULL:
            self.release_(layer, &dst, 1, KVC_TO_CHANGE)
        else:
            self.spill.spoil_(layer, &dst, 1)
        other.release_(layer, &src, 1, KVC_TO_READ)

    cdef void note_written_(self, int64_t layer, const kvc_run *runs, int64_t num_runs) noexcept nogil:
        cdef int64_t i
        for i in range(num_runs):
            self.written_slots[runs[i].block] = max(self.written_slots[runs[i].block], runs[i].stop)
            if self.page_summaries is not None:
                self.page_summaries.forget_(0 if self.separate else layer, runs[i].block, runs[i].first, runs[i].stop)

    cdef void forget_(self, int32_t block, int first, int stop) noexcept nogil:
        if self.page_summaries is not None:
            self.page_summaries.forget_(-1, block, first, stop)

    cdef int check_values_(self, KvRows rows, int64_t layer) except -1:
        cdef const kvc_layout *layout = self.layouts.of_(layer)
        cdef int64_t bad, row
        cdef kvc_format format
        cdef int side
        for side in range(2):
            if rows.num_heads != self.layout.num_heads or rows.dims[side] != self.dim_(layer, side):
                raise ValueError(f"{'values' if side else 'keys'}: expected shape (n, {self.layout.num_heads}, "
                                 f"{self.dim_(layer, side)}), got {np.shape(rows.values if side else rows.keys)}")
        if rows.count == 0:
            return 0
        if self.layout.latent and not rows.has_values_in_keys():
            raise ValueError(f"values: expected the first {self.dim_(layer, 1)} channels of keys with latent, "
                             "got others")
        for side in range(1 if self.layout.latent else 2):
            format = layout.value_format if side else layout.key_format
            with nogil:
                bad = rows.first_bad(side, format)
                if bad < 0 and side == 0 and self.known.most_key > 0 and kernels.kvc_format_of(format).bits != 32:
                    bad = rows.first_above(self.known.most_key)
            if bad >= 0:
                row = bad // (self.layout.num_heads * self.dim_(layer, side))
                value = rows.rows(side, row, 1).data[bad % (self.layout.num_heads * self.dim_(layer, side))]
                name, dtype = "values" if side else "keys", kernels.kvc_format_of(format).name.decode()
                most = kernels.kvc_format_of(format).largest.decode()
                if side == 0 and 0 < self.known.most_key < 65504 and kernels.kvc_format_of(format).bits != 32:
                    most = f"{self.known.most_key} beside the centres of the calibration"
                raise ValueError(f"{name}: expected values that {dtype} can hold, up to {most}, "
                                 f"got {np.float32(value)} in row {row}")
        return 0

    cdef void write_(self, int64_t layer, const kvc_run *runs, int64_t num_runs, KvRows rows, int64_t first,
                     int threads) noexcept nogil:
        cdef int64_t at, count, i
        self.note_written_(layer, runs, num_runs)
        if self.spilled == NULL:
            self._write_held(layer, runs, num_runs, rows, first, threads)
            return
        at = 0
        while at < num_runs:
            count = min(HELD, num_runs - at)
            self.hold_(layer, runs + at, count, KVC_TO_CHANGE)
            self._write_held(layer, runs + at, count, rows, first, threads)
            self.release_(layer, runs + at, count, KVC_TO_CHANGE)
            for i in range(at, at + count):
                first += runs[i].stop - runs[i].first
            at += count

    cdef void _write_held(self, int64_t layer, const kvc_run *runs, int64_t num_runs, KvRows rows, int64_t first,
                          int threads) noexcept nogil:
        cdef kvc_run part
        cdef int64_t i, n, row = first
        cdef unsigned char *base = self.base_(layer)
        cdef const kvc_head_keys *known = self.known_(layer)
        cdef const kvc_layout *layout = self.layouts.of_(layer)
        if rows.plain:
            kernels.write_runs(layout, base, runs, num_runs, rows.rows(0, first, rows.count - first),
                               rows.rows(1, first, rows.count - first), known, threads)
            return
        for i in range(num_runs):    # in pieces that end with tiles
            part = runs[i]
            while part.first < runs[i].stop:
                part.stop = <uint16_t>min(<int>runs[i].stop, (part.first // STEP + 1) * STEP)
                n = part.stop - part.first
                kernels.write_runs(layout, base, &part, 1, rows.rows(0, row, n), rows.rows(1, row, n), known, 1)
                row += n
                part.first = part.stop

    cdef int read_(self, int64_t layer, const kvc_run *runs, int64_t num_runs, cnp.ndarray keys,
                   cnp.ndarray values) except -1:
        cdef cnp.ndarray one = values if keys is None else keys, other = keys if values is None else values
        cdef float *to[2]
        cdef int64_t at, i, count, side
        cdef size_t token_stride = cnp.PyArray_STRIDE(one, 0) // sizeof(float)
        cdef size_t head_stride = cnp.PyArray_STRIDE(one, 1) // sizeof(float)
        if cnp.PyArray_STRIDE(one, 0) != cnp.PyArray_STRIDE(other, 0) \
                or cnp.PyArray_STRIDE(one, 1) != cnp.PyArray_STRIDE(other, 1):
            self.read_(layer, runs, num_runs, keys, None)
            return self.read_(layer, runs, num_runs, None, values)
        to[0] = to[1] = NULL
        if keys is not None:
            to[0] = <float *>cnp.PyArray_DATA(keys)
        if values is not None:
            to[1] = <float *>cnp.PyArray_DATA(values)
        with nogil:
            at = 0
            while at < num_runs:
                count = num_runs if self.spilled == NULL else min(HELD, num_runs - at)
                self.hold_(layer, runs + at, count, KVC_TO_READ)
                kernels.read_runs(self.layouts.of_(layer), self.base_(layer), runs + at, count, to[0], to[1],
                                  token_stride, head_stride, self.known_(layer))
                self.release_(layer, runs + at, count, KVC_TO_READ)
                for i in range(at, at + count):
                    for side in range(2):
                        if to[side] != NULL:
                            to[side] += (runs[i].stop - runs[i].first) * token_stride
                at += count
        return self.expect_good_()
