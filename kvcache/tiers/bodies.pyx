"""The bodies of values: blocks of a store, copied out and in, and the hash that their MACs begin with."""

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kvcache.core.store cimport BlockStore
from kvcache.kernels cimport kernels
from kvcache.kernels.kernels cimport kvc_run
from kvcache.kernels.spill_units cimport KVC_TO_READ, KVC_TO_REPLACE

KEY_WORDS = 262


def copy_out(BlockStore store not None, blocks, out):
    """Copy the bytes of blocks, all layers of one after all of another, into a buffer.

    Args:
        blocks: int32 `(n,)`.
        out: a writable buffer of `n * store.block_bytes` bytes.

    Raises:
        IndexError, ValueError: blocks that the store does not have; another size of the buffer.
    """
    cdef const int32_t[::1] c_blocks = _checked(store, blocks)
    cdef unsigned char[::1] c_out = out
    cdef size_t size
    cdef int64_t i, layer
    _check_size(store, c_blocks.shape[0], c_out.shape[0], "out")
    if c_out.shape[0] == 0:
        return
    cdef unsigned char *at = &c_out[0]
    cdef kvc_run run
    with nogil:
        for i in range(c_blocks.shape[0]):
            run = kvc_run(c_blocks[i], 0, 0)
            for layer in range(store.num_layers):
                size = store.layouts.of[layer].block_bytes
                store.hold_(layer, &run, 1, KVC_TO_READ)
                memcpy(at, store.layer_base_(layer) + <size_t>c_blocks[i] * size, size)
                store.release_(layer, &run, 1, KVC_TO_READ)
                at += size
    store.expect_good_()


def copy_in(BlockStore store not None, blocks, data):
    """The inverse of `copy_out`: any bytes are safe to read and to attend over."""
    cdef const int32_t[::1] c_blocks = _checked(store, blocks)
    cdef const unsigned char[::1] c_data = data
    cdef size_t size
    cdef int64_t i, layer
    _check_size(store, c_blocks.shape[0], c_data.shape[0], "data")
    if c_data.shape[0] == 0:
        return
    cdef const unsigned char *at = &c_data[0]
    cdef kvc_run run
    with nogil:
        for i in range(c_blocks.shape[0]):
            run = kvc_run(c_blocks[i], 0, 0)
            for layer in range(store.num_layers):
                size = store.layouts.of[layer].block_bytes
                store.hold_(layer, &run, 1, KVC_TO_REPLACE)
                memcpy(store.layer_base_(layer) + <size_t>c_blocks[i] * size, at, size)
                store.release_(layer, &run, 1, KVC_TO_REPLACE)
                at += size
            store.written_slots[c_blocks[i]] = <uint16_t>store.layout.block_size
            store.forget_(c_blocks[i], 0, store.layout.block_size)


def digest(key, data):
    """The sums of NH over the bytes of a buffer (ckernels/kvc_digest.c), 32 bytes for each 1024 of them or a part.

    Args:
        key: uint32 `(KEY_WORDS,)`.
    """
    cdef const uint32_t[::1] c_key = key
    cdef const unsigned char[::1] c_data = data
    if c_key.shape[0] != KEY_WORDS:
        raise ValueError(f"key: expected {KEY_WORDS} words, got {c_key.shape[0]}")
    out = np.empty(4 * ((c_data.shape[0] + 1023) // 1024), np.uint64)
    cdef uint64_t[::1] c_out = out
    if c_data.shape[0]:
        with nogil:
            kernels.digest(c_data.shape[0], &c_data[0], &c_key[0], &c_out[0])
    return out.tobytes()


cdef const int32_t[::1] _checked(BlockStore store, object blocks):
    cdef const int32_t[::1] found = blocks
    cdef Py_ssize_t i
    for i in range(found.shape[0]):
        if not 0 <= found[i] < store.num_blocks:
            raise IndexError(f"blocks: expected ints in [0, {<int32_t>store.num_blocks}), got {found[i]}")
    return found


cdef int _check_size(BlockStore store, int64_t count, int64_t size, str name) except -1:
    cdef int64_t expected = count * <int64_t>store.layouts.starts[store.num_layers]
    if size != expected:
        raise ValueError(f"{name}: expected {expected} bytes, got {size}")
    return 0
