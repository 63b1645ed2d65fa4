"""Layouts of the layers of a store; see core/layouts.pxd."""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free

from kvcache.kernels cimport kernels
from kvcache.kernels.kernels cimport KVC_MAX_HEAD_DIM, KVC_MOST_CHANNELS, kvc_format, kvc_layout

from kvcache.errors import OutOfMemoryError
from kvcache.support.arguments import as_count, as_integer, short

__all__ = ["Layouts"]

cdef object MOST_LAYERS = 2**16, MOST_HEADS = 2**31 - 1


def _codes(dtype, num_layers, name):
    """The number of the format of each layer; of a store without layers one."""
    if not isinstance(dtype, (list, tuple)):
        return [kernels.format_code(dtype, name)] * max(1, num_layers)
    if len(dtype) != num_layers or not num_layers:
        raise ValueError(f"{name}: expected one format, or one for each of {num_layers} layers, got {short(dtype)}")
    return [kernels.format_code(each, name) for each in dtype]


def _named(dtype):
    """A format, or a tuple of them where layers differ. NumPy has strings of its own."""
    if not isinstance(dtype, (list, tuple)):
        return str(dtype)
    return str(dtype[0]) if len(set(dtype)) == 1 else tuple([str(each) for each in dtype])


def _head_dim(value, name, latent):
    value, most = as_integer(value, name), KVC_MAX_HEAD_DIM if latent else KVC_MOST_CHANNELS
    if value % 8 != 0 or not 8 <= value <= most:
        raise ValueError(f"{name}: expected a multiple of 8, at most {most}, got {value}")
    return value


def _rotation(rotate, head_dim, quantised, name, latent):
    """1 where rows of this format are stored rotated: quantised ones, unless `rotate` is False."""
    power_of_two = head_dim % 16 == 0 if latent else head_dim & (head_dim - 1) == 0
    if rotate is True and not power_of_two:
        needed = "a multiple of 16" if latent else "a power of two"
        raise ValueError(f"{name}: expected {needed} for rotate=True, got {head_dim}")
    if not (isinstance(rotate, bool) or (isinstance(rotate, str) and rotate == "auto")):
        raise ValueError(f'rotate: expected True, False or "auto", got {short(rotate)}')
    return int(bool(rotate) and quantised and power_of_two)


cdef class Layouts:
    """The layouts of a store; arguments and errors are those of `BlockStore`."""

    def __cinit__(self, num_layers, block_size, num_heads, head_dim, key_dtype, value_dtype, rotate, value_head_dim,
                  bint separate, bint latent, index=None):
        # Callers that take one `dtype` for both give the same object twice.
        names = ("dtype", "dtype") if key_dtype is value_dtype else ("key_dtype", "value_dtype")
        num_layers = self.num_named = as_count(num_layers, "num_layers", 0, MOST_LAYERS)
        if separate:
            for dtype, name in ((key_dtype, names[0]), (value_dtype, names[1])):
                if isinstance(dtype, (list, tuple)):
                    raise ValueError(f"{name}: expected one format with separate_layers, got {short(dtype)}")
            num_layers = min(1, num_layers)
        keys = _codes(key_dtype, num_layers, names[0])
        values = _codes(value_dtype, num_layers, names[1])
        block_size = as_count(block_size, "block_size", 1, 256)
        num_heads = as_count(num_heads, "num_heads", 1, MOST_HEADS)
        head_dim = _head_dim(head_dim, "head_dim", latent)
        value_dim = head_dim if value_head_dim is None else _head_dim(value_head_dim, "value_head_dim", latent)
        if latent:
            if num_heads != 1 or value_dim > head_dim:
                raise ValueError(f"latent: expected one KV head, and V as a part of its {head_dim} channels, "
                                 f"got {num_heads} heads, {value_dim} channels")
            if keys != values:
                raise ValueError(f"value_dtype: expected {key_dtype}, as of keys, with latent, got {value_dtype}")
        cdef kvc_format key, value
        cdef int32_t layer
        sizes = [(head_dim, value_dim)] * max(1, num_layers)
        self.key_dtype, self.value_dtype = _named(key_dtype), _named(value_dtype)
        if index is not None:
            more, dim, dtype = self._index(index, num_layers, latent and not separate)
            self.index, num_layers = (more, dim, dtype), num_layers + more
            keys, values, sizes = ([*each, *[new] * more] for each, new in (
                (keys, kernels.format_code(dtype, "index_dtype")), (values, kernels.format_code(dtype, "index_dtype")),
                (sizes, (dim, dim)),
            ))
            self.num_named = num_layers
        self.num_layers = num_layers
        self.of = <kvc_layout *>calloc(<size_t>num_layers + 1, sizeof(kvc_layout))
        self.starts = <size_t *>calloc(<size_t>num_layers + 1, sizeof(size_t))
        if self.of == NULL or self.starts == NULL:
            raise MemoryError(f"no memory for {num_layers} layers")
        for layer in range(max(1, num_layers)):
            key, value = <kvc_format><int>keys[layer], <kvc_format><int>values[layer]
            head_dim, value_dim = sizes[layer]
            rotated = (
                _rotation(rotate, head_dim, kernels.kvc_format_of(key).quantised, "head_dim", latent),
                _rotation(rotate, value_dim, kernels.kvc_format_of(value).quantised, "value_head_dim", latent),
            )
            if latent:    # both sides are the same rows
                rotated = (rotated[0] and rotated[1],) * 2
            if kernels.layout_init(&self.of[layer], block_size, num_heads, head_dim, value_dim, key, value,
                                   rotated[0], rotated[1], latent) != 0:
                raise ValueError(f"head_dim: expected one for {key_dtype} and {value_dtype}, got {head_dim}, "
                                 f"{value_dim}")
            if self.of[layer].block_bytes > (<size_t>1 << 62) - self.starts[layer]:
                raise OutOfMemoryError(<object>self.starts[layer] + self.of[layer].block_bytes, 2**62, "bytes")
            if layer < num_layers:
                self.starts[layer + 1] = self.starts[layer] + self.of[layer].block_bytes
        self.first = self.of[0]

    def _index(self, index, num_layers, bint is_possible):
        """The number of index layers, their channels and their format."""
        more, dim, dtype = index
        more = as_count(more, "index_layers", 1, MOST_LAYERS)
        if not is_possible or not num_layers:
            raise ValueError(f"index_layers: expected 0 without layers of latent rows, got {more}")
        return more, _head_dim(dim, "index_dim", False), dtype

    def __dealloc__(self):
        free(self.of)
        free(self.starts)

    @property
    def rotated(self):
        """`(keys, values)`: whether rows are stored under a Hadamard rotation, in any layer."""
        cdef bint keys = self.first.rotate_keys, values = self.first.rotate_values
        cdef int32_t layer
        for layer in range(self.num_layers):
            keys, values = keys or self.of[layer].rotate_keys, values or self.of[layer].rotate_values
        return keys, values

    cdef const kvc_layout *of_(self, int64_t layer) noexcept nogil:
        return &self.of[layer if self.num_named == self.num_layers else 0]
