"""Levels that have the bits of another one: amx, which multiplies tiles, of avx512, and avxvnni of avx2.

In every format, at sizes around those of a tile.

But for rows in bf16 that meet weights in bf16, which have an order of their own: test_matrix.py has its bits.

Where the CPU has no tiles, builds for tests emulate them (KVCACHE_EVEX=1, KVCACHE_DEBUG=1, KVCACHE_SANITIZE=1).
"""

import subprocess
import sys

import numpy as np
import pytest
from matrices import filled
from pace import half

from kvcache import PagedKvCache, get_num_threads, set_num_threads, simd_levels, use_simd
from kvcache.kernels.kernels import bf16_order, level_of_bits
from kvcache.kernels.matrix import MATRIX_FORMATS

pytestmark = [
    pytest.mark.skipif(
        not {"amx", "avxvnni"} & {*simd_levels()}, reason="needs AMX or AVX-VNNI, or AVX-512 and a build for tests"
    ),
]
TWINS = {"amx": "avx512", "avxvnni": "avx2"}
PACKED = [name for name, line in MATRIX_FORMATS.items() if line.packed]
# Rows and columns: of one panel, of part of one, of records that are not full, of more channels than a span has.
SHAPES = [(1, 1), (16, 64), (33, 70), (40, 1030), (17, 2100)]


@pytest.fixture(params=half([3, 1]))
def threads(request):
    before = get_num_threads()
    set_num_threads(request.param)
    yield request.param
    set_num_threads(before)


def assert_same_bits(function, *arguments, out=None, **options):
    """Compare what `function` returns at each level and its twin, a float32 array; `out`: what it adds to."""
    for pair in TWINS.items():
        if pair[0] not in simd_levels():
            continue
        answers = []
        for level in pair:
            also = {} if out is None else {"out": out.copy(), "add": True}
            with use_simd(level):
                answers.append(function(*arguments, **options, **also))
        np.testing.assert_array_equal(*map(np.isnan, answers))
        np.testing.assert_array_equal(*(np.where(np.isnan(x), np.float32(0), x).view(np.uint32) for x in answers))


def test_levels_name_the_one_whose_bits_they_have():
    assert {level: level_of_bits(level) for level in simd_levels()} == {
        level: TWINS.get(level, level) for level in simd_levels()
    }


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


@pytest.mark.parametrize("format", MATRIX_FORMATS)
@pytest.mark.parametrize("activations", ["int8", "exact"])
def test_products(rng, threads, format, activations):
    for shape in SHAPES:
        matrix = filled(rng, *shape, format)
        for n in (15, 16, 17, 31, 50):
            x = rng.standard_normal((n, shape[1])).astype(np.float32) * np.float32(10.0 ** rng.integers(-3, 4))
            bias = rng.standard_normal(shape[0]).astype(np.float32) if n % 2 else None
            first = rng.standard_normal((n, shape[0])).astype(np.float32)
            assert_same_bits(matrix.multiply, x, bias, activations=activations)
            assert_same_bits(matrix.multiply, x, bias, activations=activations, out=first)


@pytest.mark.parametrize("format", ["q8_0", "q4_0", "q6_k", "q2_k"])
@pytest.mark.parametrize("activations", ["int8", "exact"])
def test_more_rows_than_a_chunk_has(rng, format, activations):
    for n, shape in ((530, (33, 160)), (40, (16, 16_000))):
        matrix, x = filled(rng, *shape, format), rng.standard_normal((n, shape[1])).astype(np.float32)
        assert_same_bits(matrix.multiply, x, activations=activations)


@pytest.mark.parametrize("format", PACKED)
def test_values_far_out(rng, format):
    """The smallest and the largest floats, infinities and NaN, beside rows of ordinary ones."""
    matrix = filled(rng, 40, 100, format)
    x = rng.standard_normal((48, 100)).astype(np.float32)
    for i in range(0, 48, 2):
        x[i] *= np.float32(2.0) ** np.float32(rng.integers(-126, 127))
    x[3] = 0
    for i, value in enumerate((np.nan, np.inf, -np.inf, 3e38, 2.0**100, 1e-38, 2.0**99)):
        x[20 + i, rng.integers(100)] = value
    with np.errstate(over="ignore", invalid="ignore"):
        for activations in ("int8", "exact"):
            assert_same_bits(matrix.multiply, x, activations=activations)


def _attend(cache, ids, queries, lens, options):
    out, scores = cache.attention(0, queries, ids, query_lens=lens, return_scores=True, **options)
    return np.concatenate([out.ravel(), scores.ravel()])


@pytest.mark.parametrize("formats", half(["q8 q8", "q4 q4", "q6 q3", "q2 q6", "q3 q8", "f16 q8"]))
@pytest.mark.parametrize("dims", half([(64, 64), (72, 64), (96, 256), (32, 96), (128, 32)]))
def test_attention(rng, threads, formats, dims):
    """Sequences of few rows and of many beside each other: in blocks of 16 rows, and what is left of them."""
    heads, group, size = 2, 3, 32
    keys_as, values_as = formats.split()
    cache = PagedKvCache(
        160, size, heads, dims[0], key_dtype=keys_as, value_dtype=values_as, value_head_dim=dims[1]
    )
    lengths, counts = (5, 70, 300, 1100), (2, 6, 37, 101)
    for seq, n in enumerate(lengths):
        cache.allocate(seq, n)
        cache.write(0, seq, *(rng.standard_normal((n, heads, d)).astype(np.float32) for d in dims))
    cache.keep_tokens(2, np.flatnonzero(np.append(rng.random(299) < 0.8, True)))  # holes
    queries = rng.standard_normal((sum(counts), heads * group, dims[0])).astype(np.float32)
    queries[20] *= np.float32(1e-30)
    queries[40, 1, 3], queries[60, 2, 0] = np.nan, np.inf
    for options in ({}, {"window": 100, "softcap": 5.0}):
        with np.errstate(invalid="ignore"):
            assert_same_bits(_attend, cache, np.arange(4), queries, np.array(counts), options)


@pytest.mark.parametrize("dtype", ["q8", "q4"])
def test_sequences_that_share_blocks(rng, dtype):
    """Their rows meet the shared tokens together: blocks of 16 rows are of several sequences."""
    cache = PagedKvCache(64, 16, 2, 64, dtype=dtype)
    cache.allocate(0, 512)
    cache.write(0, 0, *(rng.standard_normal((512, 2, 64)).astype(np.float32) for _ in range(2)))
    for seq in range(1, 20):
        cache.fork(0, seq)
    queries = rng.standard_normal((20, 4, 64)).astype(np.float32)
    assert_same_bits(_attend, cache, np.arange(20), queries, np.ones(20, np.int64), {})
