"""Sequences scattered over an arena, and arrays between unreadable pages, for tests of the kernels."""

import ctypes
import mmap
import os

import numpy as np
from oracles import kernels as oracle

from kvcache.kernels import kernelcalls, kernels


def _forbid(address, size):
    """Make pages unreadable."""
    if os.name == "nt":
        no_access, before = 1, ctypes.c_ulong()
        done = ctypes.windll.kernel32.VirtualProtect(
            ctypes.c_void_p(address), ctypes.c_size_t(size), no_access, ctypes.byref(before)
        )
    else:
        libc = ctypes.CDLL(None, use_errno=True)
        done = not libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), 0)
    if not done:
        raise OSError(ctypes.get_errno(), "the pages stay readable")


def guarded(shape, dtype, *, at_end=True):
    """A zeroed array between two unreadable pages, directly before one or directly after one."""
    page = mmap.PAGESIZE
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    inner = max(1, -(-size // page)) * page
    area = mmap.mmap(-1, inner + 2 * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for offset in (0, page + inner):
        _forbid(base + offset, page)
    start = page + (inner - size if at_end else 0)
    return np.frombuffer(area, np.dtype(dtype), int(np.prod(shape)), start).reshape(shape)


def copy_guarded(array, *, at_end=True):
    result = guarded(array.shape, array.dtype, at_end=at_end)
    result[...] = array
    return result


class Scattered:
    """Sequences of the given lengths in one arena, with blocks in random order, and their rows as written and as read.

    holes: each sequence has only some slots of every block, like scattered survivors of an eviction. rotate: of both
    sides, or a pair.
    """

    def __init__(
        self,
        rng,
        lengths,
        *,
        block_size=16,
        heads=2,
        dim=32,
        value_dim=None,
        key_format="f32",
        value_format=None,
        holes=False,
        empty=np.zeros,
        rotate=False,
        spread=1.0,
    ):
        value_format = value_format or key_format
        self.formats = key_format, value_format
        value_dim = dim if value_dim is None else value_dim
        turned = (rotate, rotate) if isinstance(rotate, bool) else rotate
        self.layout = kernels.Layout(block_size, heads, dim, *self.formats, *turned, value_head_dim=value_dim)
        tables = [list(self._spans(rng, n, block_size, holes)) for n in lengths]
        num_blocks = sum(map(len, tables)) + 2
        free = rng.permutation(num_blocks).tolist()
        self.arena = empty(num_blocks * self.layout.block_bytes, np.uint8)
        self.runs, self.keys, self.values, self.read_keys, self.read_values = [], [], [], [], []
        for n, table in zip(lengths, tables, strict=True):
            runs = [(free.pop(), *span) for span in table]
            keys, values = (rng.standard_normal((n, heads, d)).astype(np.float32) for d in (dim, value_dim))
            keys *= spread
            kernelcalls.write(self.layout, self.arena, runs, keys, values)
            got = np.full_like(keys, np.nan), np.full_like(values, np.nan)
            kernelcalls.read(self.layout, self.arena, runs, *got)
            for kept, new in zip(
                (self.runs, self.keys, self.values, self.read_keys, self.read_values),
                (runs, keys, values, *got),
                strict=True,
            ):
                kept.append(new)

    @staticmethod
    def _spans(rng, tokens, block_size, holes):
        while tokens:
            first = int(rng.integers(block_size)) if holes else 0
            stop = int(rng.integers(first, block_size)) + 1 if holes else block_size
            stop = min(stop, first + tokens)
            tokens -= stop - first
            yield first, stop


def guarded_attention(rng, name, dim, at_end, thread_counts):
    """Calls attention with all arrays guarded; yields `(sequence, queries, output, scores)` after each call."""

    def empty(size, dtype):
        return guarded(size, dtype, at_end=at_end)

    for block_size, tokens in ((1, 3), (16, 40), (5, 67)):
        s = Scattered(rng, [tokens], block_size=block_size, heads=2, dim=dim, key_format=name, empty=empty)
        for num_queries in (1, min(tokens, 20)):
            queries = copy_guarded(rng.standard_normal((num_queries, 6, dim)).astype(np.float32), at_end=at_end)
            out, scores = (empty(n, np.float32) for n in (queries.shape, tokens))
            for threads in thread_counts:
                kernelcalls.attend(
                    s.layout, s.arena, [(s.runs[0], num_queries, 2)], queries, 0.1, sink_queries=queries, out=out,
                    scores=scores, threads=threads, scratch=lambda n: empty(n, np.uint8),
                )
                yield s, queries, out, scores


def attend(s, num_queries, group=2, *, rng, sinks=None, scale=None, threads=1, spread=1.0, queries=None):
    """Output and scores of a call over all sequences of s, and those of the oracle; queries are drawn if not given."""
    heads, dim = s.layout.num_heads, s.layout.head_dim
    scale = dim**-0.5 if scale is None else scale
    if queries is None:
        queries = (spread * rng.standard_normal((sum(num_queries), heads * group, dim))).astype(np.float32)
    sink_queries = None if sinks is None else rng.standard_normal(queries.shape).astype(np.float32)
    sinks = sinks or [0] * len(num_queries)
    total = sum(map(len, s.keys))
    out, scores = np.full_like(queries, np.nan), np.full(total, np.nan, np.float32)
    kernelcalls.attend(
        s.layout,
        s.arena,
        list(zip(s.runs, num_queries, sinks, strict=True)),
        queries,
        scale,
        sink_queries=sink_queries,
        out=out,
        scores=scores,
        threads=threads,
    )
    expected, mass, at = [], [], 0
    for i, n in enumerate(num_queries):
        part = slice(at, at + n)
        o, m = oracle.attention(
            queries[part],
            s.read_keys[i],
            s.read_values[i],
            scale,
            sink_tokens=sinks[i],
            sink_queries=None if sink_queries is None else sink_queries[part],
        )
        expected.append(o), mass.append(m)
        at += n
    return out, scores, np.concatenate(expected), np.concatenate(mass)
