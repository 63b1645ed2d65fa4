"""Tensors of other libraries: what is read and written in place, what is converted, and what is refused."""

import sys

import numpy as np
import pytest
from tensors import Bfloat16, Elsewhere, Forged, LikeTorch, Tensor, floats_of, words_of

from kvcache import CachedKvState, CacheManager, KvCache, KVCacheConfig, PagedKvCache, PrefixCache
from kvcache.kernels.grouped import multiply_groups
from kvcache.kernels.matrix import Matrix
from kvcache.support.arguments import BFLOAT16, as_floats, as_indices, as_output
from kvcache.support.dlpack import array_of, as_words

SHAPE = (5, 2, 16)
WORDS = np.arange(2**16, dtype=np.uint16)


def address(array):
    return array.__array_interface__["data"][0]


def filled(rng, **settings):
    cache = PagedKvCache(8, 4, 2, 16, dtype="f32", **settings)
    cache.allocate(1, 5)
    cache.write(0, 1, *rng.standard_normal((2, *SHAPE)).astype(np.float32))
    return cache


# -- read ---------------------------------------------------------------------------------------------------


def test_every_word_of_bfloat16():
    for tensor in (Bfloat16(WORDS), LikeTorch(WORDS), Bfloat16(np.repeat(WORDS, 2)[::2]), Bfloat16(unaligned(WORDS))):
        got = as_floats(tensor, (2**16,), "x")
        np.testing.assert_array_equal(got.view(np.uint32), WORDS.astype(np.uint32) << 16)
    array = WORDS.view(pytest.importorskip("ml_dtypes").bfloat16)
    for each in (array, array.reshape(256, 256).T):
        bits = each.view(np.uint16).astype(np.uint32) << 16
        got = as_floats(each, each.shape, "x")
        assert got.flags.c_contiguous
        np.testing.assert_array_equal(got.view(np.uint32), bits)


@pytest.mark.parametrize("kind", [Tensor, memoryview, lambda x: x])
def test_float32_is_read_in_place(kind, rng):
    array = rng.standard_normal(SHAPE).astype(np.float32)
    got = as_floats(kind(array), SHAPE, "x")
    assert (address(got), got.strides) == (address(array), array.strides)
    array.flags.writeable = False
    if kind is not Tensor or np.lib.NumpyVersion(np.__version__) >= "2.1.0":
        assert address(as_floats(kind(array), SHAPE, "x")) == address(array)


def test_an_axis_of_length_one_may_have_any_stride(rng):
    head_major = rng.standard_normal((2, 5, 16)).astype(np.float32)
    one = head_major[:, 3:4].swapaxes(0, 1)  # a token: heads are 5 rows apart
    assert as_floats(one, (1, 2, 16), "x").flags.c_contiguous
    single = head_major[:1].swapaxes(0, 1)  # one head, many tokens
    assert address(as_floats(single, (5, 1, 16), "x")) == address(head_major)


@pytest.mark.parametrize("kind", ["f16", "f64", "bfloat16", "head-major", "tensor, head-major", "buffer", "like torch"])
def test_rows_and_queries_of_any_kind(kind, rng):
    floats = floats_of(words_of(rng.standard_normal((3, *SHAPE))))  # exact in bfloat16
    floats = np.where(np.abs(floats) < 2**-14, 0, floats)  # and in f16
    make = {
        "f16": lambda x: x.astype(np.float16),
        "f64": lambda x: x.astype(np.float64),
        "bfloat16": lambda x: Bfloat16(words_of(x)),
        "head-major": lambda x: np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1),
        "tensor, head-major": lambda x: Bfloat16(np.ascontiguousarray(words_of(x).swapaxes(0, 1)).swapaxes(0, 1)),
        "buffer": lambda x: memoryview(x.astype(np.float16)),
        "like torch": lambda x: LikeTorch(words_of(x)),
    }[kind]
    plain, other = (PagedKvCache(8, 4, 2, 16, dtype="q8") for _ in range(2))
    for cache, convert in ((plain, lambda x: x), (other, make)):
        cache.allocate(1, 5)
        cache.write(0, 1, convert(floats[0]), convert(floats[1]))
        cache.append_batch([1])
        cache.write_batch(0, [1], convert(floats[2][:1]), convert(floats[2][1:2]))
    for got, want in zip(other.read(0, 1), plain.read(0, 1), strict=True):
        np.testing.assert_array_equal(got, want)
    want = plain.attention(0, floats[2], [1], query_lens=[5], sink_queries=floats[1])
    got = other.attention(0, make(floats[2]), [1], query_lens=[5], sink_queries=make(floats[1]))
    np.testing.assert_array_equal(got, want)


def test_the_other_caches_read_bfloat16(rng):
    words = words_of(rng.standard_normal((4, 8)))
    floats = floats_of(words)
    blocks = PrefixCache(1, 4, 1, 1, 8)
    blocks.insert(range(4), 0, [Bfloat16(words.reshape(-1))], [Bfloat16(words)])
    np.testing.assert_array_equal(blocks.get_block(0).keys[0], floats.reshape(-1))
    live = KvCache(1, 4, 8)
    live.store_kv(0, LikeTorch(words[0]), Bfloat16(words[1]))
    np.testing.assert_array_equal(live.get_keys(0), floats[0])
    np.testing.assert_array_equal(CachedKvState([Bfloat16(words)], [Bfloat16(words)], 4).values[0], floats.reshape(-1))
    one, two = (CacheManager(KVCacheConfig(8, 1, 8)) for _ in range(2))
    one.append(Bfloat16(words), LikeTorch(words))
    two.append(floats, floats)
    np.testing.assert_array_equal(one.get(range(4)), two.get(range(4)))


def test_a_tensor_is_let_go_of():
    words = np.zeros(8, np.uint16)
    before = sys.getrefcount(words)
    got = as_floats(Bfloat16(words), (8,), "x")
    assert sys.getrefcount(words) == before
    floats = np.zeros((1, 2, 16), np.float32)
    cache, before = filled(np.random.default_rng(0)), sys.getrefcount(floats)
    tensor = Tensor(floats)
    cache.attention(0, floats + 1, [1], out=tensor)
    del tensor
    assert sys.getrefcount(floats) == before
    assert got.base is None or got.base.base is None


def test_what_is_not_read(rng):
    cache = filled(rng)
    rows = rng.standard_normal(SHAPE).astype(np.float32)
    before = cache.read(0, 1)
    for wrong in (Elsewhere(rows), Tensor(rows.astype(np.int64)), Tensor(rows.astype(np.complex64)), memoryview(b"12")):
        with pytest.raises(TypeError, match=r"^keys: expected "):
            cache.write(0, 1, wrong, rows)
    with pytest.raises(ValueError, match=r"^values: expected shape"):
        cache.write(0, 1, rows, Bfloat16(words_of(rows)[:, :1]))
    with pytest.raises(ValueError, match=r"^keys: expected values that f32 can hold"):
        cache.write(0, 1, Bfloat16(np.full(SHAPE, 0x7F80, np.uint16)), rows)  # infinity
    np.testing.assert_array_equal(cache.read(0, 1), before)
    with pytest.raises(TypeError, match=r"^x: expected integers, got float32"):
        as_indices(Bfloat16(np.zeros(3, np.uint16)), "x")


# -- written ------------------------------------------------------------------------------------------------


def as_bytearray(shape):
    raw = bytearray(4 * int(np.prod(shape)))
    return memoryview(raw).cast("f", shape), np.frombuffer(raw, np.float32).reshape(shape)


OUTPUTS = {
    "array": lambda shape: (x := np.full(shape, 7, np.float32), x),
    "DLPack": lambda shape: (Tensor(x := np.full(shape, 7, np.float32)), x),
    "buffer": lambda shape: (memoryview(x := np.full(shape, 7, np.float32)), x),
    "bytes": as_bytearray,
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_attention_writes_to_memory_of_the_caller(kind, rng):
    cache, queries = filled(rng), rng.standard_normal((1, 4, 16)).astype(np.float32)
    want = cache.attention(0, queries, [1])
    out, memory = OUTPUTS[kind](queries.shape)
    assert cache.attention(0, queries, [1], out=out) is out
    np.testing.assert_array_equal(memory, want)
    out, memory = OUTPUTS[kind](queries.shape)
    got, scores, lse = cache.attention(0, queries, [1], out=out, return_scores=True, return_lse=True)
    assert got is out
    np.testing.assert_array_equal(memory, want)
    assert (scores.shape, lse.shape) == ((5,), (1, 4))


@pytest.mark.parametrize("kind", OUTPUTS)
def test_read_writes_to_memory_of_the_caller(kind, rng):
    cache = filled(rng)
    want = cache.read(0, 1, 1, 4)
    outs, memories = zip(*(OUTPUTS[kind]((3, 2, 16)) for _ in range(2)), strict=True)
    got = cache.read(0, 1, 1, 4, out=outs)
    assert all(a is b for a, b in zip(got, outs, strict=True))
    np.testing.assert_array_equal(memories, want)
    empty = OUTPUTS["array"]((0, 2, 16))[0]
    assert cache.read(0, 1, 2, 2, out=[empty, empty])[0] is empty


def test_read_writes_to_head_major_memory(rng):
    cache = filled(rng)
    want = cache.read(0, 1)
    both = np.full((2, 7, 16, 2), 7, np.float32)  # heads, tokens, channels, K or V: memory of each between the other's
    with pytest.raises(ValueError, match=r"^out: expected two writeable float32 .* got float32 \(5, 2, 16\)$"):
        cache.read(0, 1, out=tuple(both[:, 1:6, :, i].swapaxes(0, 1) for i in (0, 1)))
    both = np.full((2, 7, 2, 16), 7, np.float32)
    outs = tuple(both[:, 1:6, i].swapaxes(0, 1) for i in (0, 1))
    assert cache.read(0, 1, out=(Tensor(outs[0]), outs[1]))[1] is outs[1]
    for got, rows in zip(outs, want, strict=True):
        np.testing.assert_array_equal(got, rows)
    assert (both[:, [0, 6]] == 7).all()
    with pytest.raises(ValueError, match=r"got the same memory twice$"):
        cache.read(0, 1, out=(outs[0], both[:, 2:, 0].swapaxes(0, 1)))
    with pytest.raises(ValueError, match=r"^out: expected two writeable float32 arrays, "):
        cache.read(0, 1, out=(outs[0][::-1], outs[1]))


def unaligned(array):
    """A copy of an array that begins one byte behind an aligned address."""
    raw = bytearray(1 + array.nbytes)
    copy = np.frombuffer(raw, array.dtype, offset=1).reshape(array.shape)
    copy[...] = array
    assert not copy.flags.aligned
    return copy


def read_only(shape):
    array = np.zeros(shape, np.float32)
    array.flags.writeable = False
    return array


WRONG = {
    "another shape": lambda shape: np.zeros((*shape[:-1], 24), np.float32),
    "f64": np.zeros,
    "f16 tensor": lambda shape: Tensor(np.zeros(shape, np.float16)),
    "read-only": read_only,
    "read-only tensor": lambda shape: Tensor(read_only(shape)),
    "read-only buffer": lambda shape: memoryview(read_only(shape)),
    "strided": lambda shape: Tensor(np.zeros((*shape[:-1], 2 * shape[-1]), np.float32)[..., ::2]),
    "unaligned tensor": lambda shape: Tensor(unaligned(np.zeros(shape, np.float32))),
    "masked": lambda shape: np.ma.zeros(shape, np.float32),
    "elsewhere": lambda shape: Elsewhere(np.zeros(shape, np.float32)),
    "list": lambda shape: np.zeros(shape).tolist(),
    "number": lambda shape: 3.0,
}


@pytest.mark.parametrize("kind", WRONG)
def test_memory_that_cannot_be_written(kind, rng):
    cache, queries = filled(rng), rng.standard_normal((1, 4, 16)).astype(np.float32)
    with pytest.raises(ValueError, match=r"^out: expected C-contiguous, writeable float32 of shape \(1, 4, 16\), got "):
        cache.attention(0, queries, [1], out=WRONG[kind](queries.shape))
    good = np.full(SHAPE, 7, np.float32)
    for pair in ((WRONG[kind](SHAPE), good), (good, WRONG[kind](SHAPE))):
        with pytest.raises(
            ValueError, match=r"^out: expected two writeable float32 arrays, [KV] of shape \(5, 2, 16\), the channels "
        ):
            cache.read(0, 1, out=pair)
    assert (good == 7).all()
    cache.check()


def test_memory_that_is_used_twice(rng):
    cache, queries = filled(rng), rng.standard_normal((1, 4, 16)).astype(np.float32)
    with pytest.raises(ValueError, match=r"^out: expected memory apart from queries, got the same memory$"):
        cache.attention(0, queries, [1], out=Tensor(queries))
    both = np.zeros((6, 2, 16), np.float32)
    with pytest.raises(ValueError, match=r"^out: expected arrays with memory of their own, got the same memory twice$"):
        cache.read(0, 1, out=(both[:5], Tensor(both[1:])))
    for wrong in (both, (both,), (both, both, both), (None, both), 3):
        with pytest.raises(TypeError, match=r"^out: expected a pair of arrays, got "):
            cache.read(0, 1, out=wrong)
    assert (both == 0).all()


def test_what_an_output_is_instead(rng):
    cache, queries = filled(rng), rng.standard_normal((1, 4, 16)).astype(np.float32)
    with pytest.raises(ValueError, match=r", got float64 \(1, 4, 16\)$"):
        cache.attention(0, queries, [1], out=np.zeros((1, 4, 16)))
    with pytest.raises(ValueError, match=r", got list$"):
        cache.attention(0, queries, [1], out=[1])
    rows = np.zeros((9, 2, 16), np.float32)
    with pytest.raises(ValueError, match=r"^keys: expected at most 5 rows for sequence 1, got 9$"):
        cache.write(0, 1, rows, rows)


def test_words_are_the_same_memory_under_another_type(rng):
    """Any strides; no reference of a dtype is lost or left, and sizes have to agree."""
    rows = rng.integers(0, 2**16, (4, 3, 8)).astype(np.uint16)[:, ::-2, 1::2]
    before = sys.getrefcount(BFLOAT16)
    for _ in range(100):
        words = as_words(rows, BFLOAT16)
        back = as_words(words, np.dtype(np.uint16))
    assert (words.dtype, back.strides, address(back)) == (BFLOAT16, rows.strides, address(rows))
    assert np.array_equal(back, rows)
    assert np.array_equal(as_floats(words, rows.shape, "x"), as_floats(as_words(back, BFLOAT16), rows.shape, "x"))
    del words, back
    assert sys.getrefcount(BFLOAT16) == before
    for wrong in (np.float32, np.uint8):
        with pytest.raises(ValueError, match="words: expected 2 bytes without objects, got"):
            as_words(rows, np.dtype(wrong))
    with pytest.raises(ValueError, match="words: expected 8 bytes without objects, got"):
        as_words(np.zeros(2), np.dtype(object))


# -- forged -------------------------------------------------------------------------------------------------

# What no memory can have: products and sums beyond 64 bits, before the first address or behind the last one.
IMPOSSIBLE = {
    "strides": {"strides": (2**62, 1)},
    "strides whose bytes overflow": {"strides": (2**61, 1)},
    "strides whose bytes overflow to little": {"strides": (2**62 + 8, 1)},
    "strides whose sum overflows": {"shape": (2, 2, 2), "strides": (2**62, 2**62, 1)},
    "strides before the memory": {"strides": (-(2**56), 1)},
    "strides that are the least": {"strides": (-(2**63), 1)},
    "a negative stride at an early address": {"strides": (-8, 1), "data": 8},
    "a shape": {"shape": (2**62, 8), "strides": None},
    "a shape whose product overflows to 0": {"shape": (2**32, 2**32), "strides": None},
    "a shape whose product overflows to 8": {"shape": (2**61 + 1, 8), "strides": None},
    "a shape of one element": {"shape": (2**40, 2**40), "strides": (0, 0)},
    "a negative shape": {"shape": (-1, 8)},
    "two negative shapes": {"shape": (-4, -8), "strides": None},
    "a negative shape beside zero": {"shape": (0, -8)},
    "an offset": {"offset": 2**64 - 4},
    "an offset and a size": {"offset": 2**64 - 2**40, "data": 2**40 - 64},
    "no memory": {"data": 0},
    "no shape": {"shape": None},
    "a negative number of axes": {"ndim": -1},
    "many axes": {"ndim": 1000},
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_numbers_that_no_memory_can_have_are_refused(case, dtype):
    """By every function that reads or writes tensors, before an address is computed."""
    array = np.zeros((4, 8), dtype)
    forged, matrix = Forged(array, **IMPOSSIBLE[case]), Matrix(16, 8, "f32")

    def capsule():
        return forged.__dlpack__()

    rest = Forged(np.zeros((4, 16), dtype)).__dlpack__()
    message = "expected a tensor that memory can have, got "
    for read in (
        lambda: as_floats(forged, (4, 8), "x"),
        lambda: array_of(capsule(), BFLOAT16 if dtype == np.uint16 else None),
        lambda: matrix.multiply_tensors(capsule(), [rest]),
        lambda: matrix.multiply_tensors(Forged(array).__dlpack__(), [capsule()]),
        lambda: multiply_groups([matrix], [4], capsule(), rest),
        lambda: multiply_groups([matrix], [4], Forged(array).__dlpack__(), capsule()),
        lambda: filled(np.random.default_rng(0)).write(0, 1, forged, forged),
        lambda: KvCache(1, 8, 8).store_kv(0, forged, forged),
    ):
        with pytest.raises(ValueError, match=message):
            read()
    assert as_output(forged) is forged


def test_numbers_that_have_no_meaning_have_no_limit(rng):
    """Strides of axes of length 1, and of arrays without elements; strides of 0 and below it are ordinary ones."""
    array = rng.standard_normal((4, 8)).astype(np.float32)
    for numbers, want in (
        ({"shape": (1, 8), "strides": (2**63 - 1, 1)}, array[:1]),
        ({"shape": (1, 1), "strides": (-(2**63), 2**62)}, array[:1, :1]),
        ({"shape": (0, 8), "strides": (2**62, 2**62)}, array[:0]),
        ({"shape": (0, 8), "strides": (2**62, 2**62), "data": 0}, array[:0]),
        ({"strides": (0, 1)}, array[[0, 0, 0, 0]]),
        ({"strides": (-8, -1), "offset": 4 * 31}, array[::-1, ::-1]),
    ):
        forged = Forged(array, **numbers)
        np.testing.assert_array_equal(as_floats(forged, want.shape, "x"), want)
        np.testing.assert_array_equal(array_of(forged.__dlpack__()), want)
    matrix, out = Matrix(16, 8, "f32"), np.ones((1, 16), np.float32)
    one = Forged(array, shape=(1, 8), strides=(2**63 - 1, 1))
    matrix.multiply_tensors(one.__dlpack__(), [Tensor(out).__dlpack__()])
    assert not out.any()
    nothing = Forged(array, shape=(0, 2**40, 8), strides=(2**62, 2**62, 1))
    matrix.multiply_tensors(nothing.__dlpack__(), [Tensor(out[:0]).__dlpack__()])
    between = Forged(array, shape=(1, 8), offset=2)
    with pytest.raises(ValueError, match="x: expected aligned memory"):
        matrix.multiply_tensors(between.__dlpack__(), [Tensor(out).__dlpack__()])
