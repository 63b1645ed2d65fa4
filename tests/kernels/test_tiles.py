"""Tiles of AMX that the system refuses. Their bits are those of every level: `tests/ckernels`, test_digests.py.

Where the CPU has no tiles, builds for tests emulate them (KVCACHE_EVEX=1, KVCACHE_DEBUG=1, KVCACHE_SANITIZE=1).
"""

import subprocess
import sys

import pytest

from kvcache import simd_levels, use_simd
from kvcache.kernels.kernels import bf16_order

# The system refuses tiles while the alternative stack of signals of a thread is too small for their registers.
REFUSED = """
import ctypes
import numpy as np
from kvcache import PagedKvCache, use_simd
from kvcache.kernels.kernels import bf16_order
from kvcache.kernels.matrix import Matrix

class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(4096)
libc = ctypes.CDLL(None)
assert libc.sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None) == 0
rng = np.random.default_rng(1)
x = rng.standard_normal((33, 64)).astype(np.float32)
quantised, words = Matrix(40, 64, "q4_0"), Matrix(40, 64, "bf16")
quantised.put(0, x[:1].repeat(40, axis=0)), words.put(0, x[:1].repeat(40, axis=0))
cache = PagedKvCache(8, 16, 2, 32, dtype="q8")
cache.allocate(0, 33)
cache.write(0, 0, x.reshape(33, 2, 32), x.reshape(33, 2, 32))
answers = []
for level in ("amx", "avx512"):
    with use_simd(level):
        out = [quantised.multiply(x), words.multiply(x, activations="bf16")]
        out.append(quantised.multiply(x, activations="bf16"))
        out.append(cache.attention(0, x.reshape(33, 2, 32), [0], query_lens=[33]))
        answers.append((bf16_order(), *(each.tobytes() for each in out)))
assert answers[0] == answers[1]
assert libc.sigaltstack(ctypes.byref(Stack(None, 2, 0)), None) == 0    # 2: none from now on
with use_simd("amx"):
    assert (bf16_order(), words.multiply(x, activations="bf16").tobytes()) == (answers[0][0], answers[0][2])
print(answers[0][0])
"""


@pytest.mark.skipif("amx" not in simd_levels(), reason="needs AMX, or AVX-512 and a build for tests")
def test_tiles_that_the_system_refuses():
    """Everything is as at avx512, without a word; and stays so, for bits of bf16 would change."""
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    with use_simd("avx512"):
        assert done.stdout.strip() == bf16_order() != "tiles"
    with use_simd("amx"):
        assert bf16_order() == "tiles"
