"""The ceilings of the machine: bytes per second of scattered blocks and of narrowing, FMA and byte products per second.

`ceilings.c` is compiled for this machine into a temporary folder. Without a C compiler NumPy measures the ceilings,
which are then lower than the machine's; `kind` reports this.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvcache
from bench.support.common import timed

__all__ = ["BlockReader", "byte_products", "fma", "huge_array", "kind", "last_level_bytes", "narrow"]

Bytes = npt.NDArray[np.uint8]

FLAGS = ["-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
FMA_ROUNDS = 200_000  # 3.2 million FMA instructions: a millisecond or two
HALVES = ("avx2", "avxvnni")  # levels whose registers have 32 bytes, where CPUs may have wider ones
PIECE = 4096  # bytes that a reader reads from a block at once; smaller blocks are read whole


@cache
def _library() -> Any:
    """The compiled ceilings, or None."""
    folder = tempfile.mkdtemp(prefix="ceilings-")
    target = Path(folder, "ceilings.so")
    source = Path(__file__).with_name("ceilings.c")
    for extra in (["-fopenmp"], []):
        command = [*shlex.split(os.environ.get("CC", "cc")), *FLAGS, *extra, str(source), "-o", str(target)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        library = _loaded(target)
        library.ceiling_read.restype = ctypes.c_uint64
        library.ceiling_read.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 4 + [ctypes.c_int]
        library.ceiling_narrow.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64]
        library.ceiling_fma.restype = ctypes.c_float
        library.ceiling_fma.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_int]
        library.ceiling_fma_flop.restype = ctypes.c_int64
        library.ceiling_fma_flop.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_int]
        library.ceiling_dot.restype = library.ceiling_dot_ops.restype = ctypes.c_int64
        library.ceiling_dot.argtypes = library.ceiling_dot_ops.argtypes = [ctypes.c_int64, ctypes.c_int]
        library.parallel = bool(extra)
        return library
    return None


def _loaded(target: Path) -> ctypes.CDLL:
    """The library, whose threads do not spin after their work: OpenMP reads the variable when it is loaded."""
    before = os.environ.get("GOMP_SPINCOUNT")
    os.environ["GOMP_SPINCOUNT"] = "0"
    try:
        return ctypes.CDLL(str(target))
    finally:
        if before is None:
            del os.environ["GOMP_SPINCOUNT"]
        else:
            os.environ["GOMP_SPINCOUNT"] = before


def kind() -> str:
    """The way in which the ceilings are measured."""
    library = _library()
    if library is None:
        return "ceilings by NumPy (no C compiler): lower than the machine's"
    return "ceilings in C" + ("" if library.parallel else ", one thread (no OpenMP)")


def last_level_bytes() -> int:
    """The size of the last-level cache, 32 MiB if the system does not report it."""
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]])
    return max(sizes)


def huge_array(size: int) -> Bytes:
    """`size` bytes, in huge pages if the system has them, with every page touched."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array.fill(1)
    return array


class BlockReader:
    """Reads blocks of a buffer in scattered order, as fast as a plain loop can.

    Args:
        buffer: bytes, shared between readers.
        order: block numbers of a cache, in the order in which attention reads them.
        block_bytes: bytes of one block.
        layers: number of caches of that shape, one after the other; each `run` reads the next one.
        threads: threads of the loop.

    Attributes:
        nbytes: bytes of one `run`.
    """

    def __init__(self, buffer: Bytes, order: npt.NDArray[Any], block_bytes: int, layers: int, threads: int) -> None:
        self._buffer, self._bytes, self._threads = buffer, block_bytes, threads
        span = int(order.max() + 1) * block_bytes
        self._offsets = [(order.astype(np.int64) * block_bytes + i * span) for i in range(layers)]
        assert span * layers <= buffer.nbytes, "expected a buffer that holds all layers"
        self._turn = 0
        self.nbytes = block_bytes * len(order)
        self._piece = PIECE if block_bytes % PIECE == 0 else block_bytes
        self._distance = 0
        if _library() is not None:
            self._distance = min((0, 1, 2, 4), key=self._trial)

    def _trial(self, distance: int) -> float:
        self._distance = distance
        return min(timed(self.run) for _ in range(3))

    def run(self) -> object:
        """Read every block of the next layer once."""
        self._turn = (self._turn + 1) % len(self._offsets)
        offsets, library = self._offsets[self._turn], _library()
        if library is None:
            words = self._buffer.view(np.uint64) if self._buffer.nbytes % 8 == 0 else self._buffer
            step = self._bytes // words.itemsize
            return sum(int(words[at : at + step].max()) for at in (offsets // words.itemsize).tolist())
        return library.ceiling_read(
            self._buffer.ctypes.data, offsets.ctypes.data, len(offsets), self._bytes, self._piece, self._distance,
            self._threads,
        )


def fma(threads: int) -> tuple[Any, float]:
    """`(run, FLOP of one run)`: only fused multiply-adds of float32, on this many threads and the level's registers."""
    library = _library()
    if library is None:
        a = np.ones((1024, 1024), np.float32)
        return lambda: np.dot(a, a), 2.0 * 1024**3
    how = FMA_ROUNDS, threads, int(kvcache.simd_level() in HALVES)
    return lambda: library.ceiling_fma(*how), float(library.ceiling_fma_flop(*how))


def byte_products(threads: int) -> tuple[Any, float] | None:
    """`(run, operations of one run)`: only dot products of bytes, on this many threads; None without a compiler."""
    library = _library()
    if library is None:
        return None
    return lambda: library.ceiling_dot(FMA_ROUNDS, threads), float(library.ceiling_dot_ops(FMA_ROUNDS, threads))


def narrow(source: Bytes, target: Bytes) -> Any:
    """A function that reads all of `source` and writes half as many bytes to `target`, on one thread."""
    library = _library()
    if library is None:
        floats, halves = source.view(np.float32), target.view(np.float16)[: source.nbytes // 4]
        return lambda: np.copyto(halves, floats, casting="same_kind")
    return lambda: library.ceiling_narrow(source.ctypes.data, target.ctypes.data, source.nbytes)
