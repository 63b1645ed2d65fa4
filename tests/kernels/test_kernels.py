"""Storage kernels: writing and reading rows, limits of formats, copying slots; levels and threads."""

import os
import platform
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
from blocks import Scattered, copy_guarded, guarded
from oracles.kernels import to_format
from places import PROJECT

from kvcache.kernels import kernelcalls, kernels

BLOCK_SIZES = [1, 5, 15, 16, 17, 33, 256]
DIMS = [8, 16, 24, 40, 64, 72, 96, 120, 128, 136, 256, 264, 512]


def halves():
    return np.arange(65536, dtype=np.uint16).view(np.float16)


def write_read(rows, name):
    """One row per slot through a single head."""
    layout = kernels.Layout(1, 1, rows.shape[1], name, name)
    arena = np.zeros(len(rows) * layout.block_bytes, np.uint8)
    runs = [(i, 0, 1) for i in range(len(rows))]
    rows = np.ascontiguousarray(rows[:, None, :], np.float32)
    keys, values = np.empty_like(rows), np.empty_like(rows)
    kernelcalls.write(layout, arena, runs, rows, rows)
    kernelcalls.read(layout, arena, runs, keys, values)
    np.testing.assert_array_equal(keys.view(np.uint32), values.view(np.uint32))
    return keys[:, 0]


def test_all_halves_come_back_bit_for_bit():
    expected = halves().astype(np.float32).reshape(-1, 8)
    got = write_read(expected, "f16")
    nan = np.isnan(expected)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])
    assert np.isnan(got[nan]).all()


def test_floats_round_to_the_nearest_half_ties_to_even(rng):
    finite = np.sort(halves()[np.isfinite(halves())].astype(np.float64))
    middles = (finite[1:] + finite[:-1]) / 2
    around = np.concatenate([np.nextafter(middles.astype(np.float32), np.float32(x)) for x in (-np.inf, np.inf)])
    random = rng.integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate([middles.astype(np.float32), around, random[np.isfinite(random)], [65519.99, 65520, 1e-45]])
    x = np.resize(x.astype(np.float32), (len(x) + 7) // 8 * 8)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(write_read(x.reshape(-1, 8), "f16").ravel().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("formats", [("f32", "f16"), ("f16", "f32")])
def test_rows_are_read_as_the_format_stores_them(rng, block_size, formats):
    for dim in DIMS:
        s = Scattered(
            rng,
            [1, 40, 0],
            block_size=block_size,
            heads=3,
            dim=dim,
            key_format=formats[0],
            value_format=formats[1],
            holes=block_size > 1,
        )
        for i in range(3):
            np.testing.assert_array_equal(s.read_keys[i], to_format(s.keys[i], formats[0]))
            np.testing.assert_array_equal(s.read_values[i], to_format(s.values[i], formats[1]))


def test_one_side_can_be_written_and_read_alone(rng):
    s = Scattered(rng, [20])
    more = rng.standard_normal(s.keys[0].shape).astype(np.float32)
    kernelcalls.write(s.layout, s.arena, s.runs[0], None, more)
    keys, values = np.empty_like(more), np.empty_like(more)
    kernelcalls.read(s.layout, s.arena, s.runs[0], keys, None)
    kernelcalls.read(s.layout, s.arena, s.runs[0], None, values)
    np.testing.assert_array_equal(keys, s.keys[0])
    np.testing.assert_array_equal(values, more)


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("name", ["f32", "f16"])
def test_write_and_read_stay_inside_their_arrays(rng, at_end, name):
    for dim in DIMS:
        layout = kernels.Layout(5, 1, dim, name, name)
        arena = guarded(2 * layout.block_bytes, np.uint8, at_end=at_end)
        rows = copy_guarded(rng.standard_normal((7, 1, dim)).astype(np.float32), at_end=at_end)
        keys, values = (
            guarded(rows.shape, np.float32, at_end=at_end),
            guarded(rows.shape, np.float32, at_end=at_end),
        )
        runs = [(1, 0, 5), (0, 3, 5)]
        kernelcalls.write(layout, arena, runs, rows, rows)
        kernelcalls.read(layout, arena, runs, keys, values)
        np.testing.assert_array_equal(keys, values)


BEYOND_F32 = [float(np.nextafter(np.float32(2.0**96), np.float32(np.inf))), -1e38, 3.4e38]


@pytest.mark.parametrize("name", ["f16", "f32", "q4"])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 15, 16, 17, 31, 33, 100])
def test_check_names_the_first_value_that_does_not_fit(name, n):
    x = copy_guarded(np.full(n, 65519.996 if name != "f32" else 2.0**96, np.float32))
    x[::2] *= -1
    assert kernelcalls.check(x, name) == -1
    bad = [np.nan, np.inf, -np.inf] + ([65520.0, -65520.0, 1e30] if name != "f32" else BEYOND_F32)
    for value in bad:
        for i in range(n):
            y = copy_guarded(x)
            y[i], y[i + 1 :: 3] = value, np.nan
            assert kernelcalls.check(y, name) == i


@pytest.mark.parametrize("name", kernels.FORMATS)
@pytest.mark.parametrize(("slot", "count"), [(0, 16), (3, 1), (5, 9), (0, 0)])
def test_slots_copied_onto_themselves_stay(rng, name, slot, count):
    layout = kernels.Layout(16, 2, 8, name, name)
    arena = rng.integers(0, 256, 2 * layout.block_bytes).astype(np.uint8)
    before = arena.copy()
    kernelcalls.copy(layout, arena, 1, slot, 1, slot, count)
    np.testing.assert_array_equal(arena, before)


@pytest.mark.parametrize("name", ["f32", "f16"])
@pytest.mark.parametrize(("src", "dst"), [((0, 3), (1, 6)), ((0, 2), (0, 5)), ((1, 5), (1, 1)), ((1, 0), (0, 10))])
def test_copied_slots_are_the_same_bits_and_touch_no_others(rng, name, src, dst):
    layout = kernels.Layout(17, 2, 24, name, name)
    arena = np.zeros(2 * layout.block_bytes, np.uint8)
    rows = rng.standard_normal((34, 2, 24)).astype(np.float32)
    runs = [(0, 0, 17), (1, 0, 17)]
    kernelcalls.write(layout, arena, runs, rows, -rows)
    before, after = (np.empty_like(rows) for _ in range(2)), (np.empty_like(rows) for _ in range(2))
    before, after = tuple(before), tuple(after)
    kernelcalls.read(layout, arena, runs, *before)
    kernelcalls.copy(layout, arena, *src, *dst, 7)
    kernelcalls.read(layout, arena, runs, *after)
    for old, new in zip(before, after, strict=True):
        expected = old.copy()
        start, stop = src[0] * 17 + src[1], dst[0] * 17 + dst[1]
        expected[stop : stop + 7] = old[start : start + 7]
        np.testing.assert_array_equal(new, expected)


@pytest.mark.parametrize("sizes", [(0, 1, 8), (257, 1, 8), (16, 0, 8), (16, 1, 0), (16, 1, 12), (16, 1, 520)])
def test_invalid_layouts_are_refused(sizes):
    with pytest.raises(ValueError, match="expected block_size"):
        kernels.Layout(*sizes)


LAYOUT = kernels.Layout(4, 1, 8)
ARENA = np.zeros(2 * LAYOUT.block_bytes, np.uint8)
ROW = np.zeros((1, 1, 8), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: kernels.Layout(4, 1, 8, "f64"), ValueError, "key_format: expected one of .* got 'f64'"),
        (
            lambda: kernelcalls.write(LAYOUT, ARENA, [(2, 0, 1)], ROW, ROW),
            IndexError,
            "runs: expected slots of 2 blocks",
        ),
        (
            lambda: kernelcalls.read(LAYOUT, ARENA, [(-1, 0, 1)], ROW, ROW),
            IndexError,
            "runs: expected slots of 2 blocks",
        ),
        (lambda: kernelcalls.read(LAYOUT, ARENA, [(0, 2, 1)], ROW, ROW), IndexError, "of 4 slots, got .*2.*1"),
        (lambda: kernelcalls.read(LAYOUT, ARENA, [(0, 4, 5)], ROW, ROW), IndexError, "of 4 slots"),
        (
            lambda: kernelcalls.write(LAYOUT, ARENA, [(0, 0, 2)], ROW, ROW),
            ValueError,
            "expected C-contiguous float32",
        ),
        (lambda: kernelcalls.write(LAYOUT, ARENA, [(0, 0, 1)], ROW + 0j, ROW), ValueError, "got complex64"),
        (
            lambda: kernelcalls.write(LAYOUT, ARENA[None], [], ROW, ROW),
            ValueError,
            "expected a one-dimensional uint8",
        ),
        (lambda: kernelcalls.copy(LAYOUT, ARENA, 0, 0, 2, 0, 1), IndexError, "expected slots of 2 blocks"),
        (lambda: kernelcalls.copy(LAYOUT, ARENA, 0, 3, 1, 0, 2), IndexError, "got 2 from 3 of 0"),
        (lambda: kernelcalls.clear(LAYOUT, ARENA, 1, 0, 5), IndexError, "got 5 from 0 of 1"),
        (lambda: kernelcalls.attend(LAYOUT, ARENA, [], ROW[0], 1.0), ValueError, "queries: expected"),
        (lambda: kernelcalls.attend(LAYOUT, ARENA, [([], 1, 0)], ROW, 1.0, threads=0), ValueError, "threads >= 1"),
        (
            lambda: kernelcalls.attend(LAYOUT, ARENA, [([], 1, 0)], ROW, 1.0, scratch=lambda n: np.empty(n - 1, "u1")),
            ValueError,
            "scratch: expected",
        ),
    ],
)
def test_sizes_that_would_crash_are_refused(call, error, message):
    """The private functions check sizes, so that a wrong test fails instead of crashing."""
    with pytest.raises(error, match=message):
        call()


def test_block_bytes_are_the_rows_rounded_up_to_a_cache_line():
    layout = kernels.Layout(5, 3, 24, "f32", "f16")
    assert (layout.key_head_bytes, layout.value_head_bytes) == (5 * 24 * 4, 5 * 24 * 2)
    assert layout.block_bytes == -(-3 * 5 * 24 * 6 // 64) * 64


# ---- Levels and threads.


def test_levels_are_named_by_the_table_in_use():
    levels = kernels.simd_levels()
    assert levels[-1] == "scalar"
    before = kernels.simd_level()
    for level in levels:
        with kernels.use_simd(level):
            assert kernels.simd_level() == level
    assert kernels.simd_level() == before


@pytest.mark.parametrize("level", ["sse9", "", None, 3, "AVX2"])
def test_an_unknown_level_is_refused_and_the_message_names_the_known(level):
    with pytest.raises(ValueError, match="scalar"), kernels.use_simd(level):
        pass


def test_threads_can_be_set():
    before = kernels.get_num_threads()
    assert before >= 1
    try:
        kernels.set_num_threads(3)
        assert kernels.get_num_threads() == 3
    finally:
        kernels.set_num_threads(before)


@pytest.mark.parametrize(
    ("n", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (10**6, ValueError),
        (1.5, TypeError),
        (True, TypeError),
        ("2", TypeError),
    ],
)
def test_odd_numbers_of_threads_are_refused(n, error):
    with pytest.raises(error, match="expected"):
        kernels.set_num_threads(n)


def ask(code, **environ):
    return subprocess.run(
        [sys.executable, "-c", f"from kvcache.kernels import kernels as k; {code}"],
        text=True,
        capture_output=True,
        env={**os.environ, **environ},
        check=False,
    )


@pytest.mark.one_build
@pytest.mark.exhaustive
def test_the_environment_chooses_level_and_threads():
    got = ask("print(k.simd_level(), k.get_num_threads())", KVCACHE_SIMD="scalar", KVCACHE_NUM_THREADS="3")
    assert got.stdout.split() == ["scalar", "3"]


@pytest.mark.exhaustive
@pytest.mark.one_build
@pytest.mark.parametrize(
    ("name", "value"),
    [("KVCACHE_SIMD", "sse9"), ("KVCACHE_NUM_THREADS", "none"), ("KVCACHE_NUM_THREADS", "0")],
)
def test_an_environment_that_cannot_be_honoured_fails_the_import(name, value):
    got = ask("pass", **{name: value})
    assert got.returncode != 0
    assert name in got.stderr
    assert "ValueError" in got.stderr


@pytest.mark.one_build
def test_levels_are_one_list(monkeypatch):
    """kvc_dispatch.c asks for each level of levels.py, each file of kernels is compiled, and parts exist."""
    folder = PROJECT / "ckernels"
    if not (folder / "levels.py").exists():
        pytest.skip("the sources of a clone")
    levels = runpy.run_path(str(folder / "levels.py"))
    names = [level.name for level in levels["LEVELS"]]
    asked = re.findall(r"KNOWN\((\w+), KVC_HAVE_|NAMED\(\"scalar\", (\w+), |KNOWN\((scalar), 1", (
        folder / "kvc_dispatch.c").read_text())
    assert {"".join(each) for each in asked} == {*names}
    files = {*folder.glob("kvc_*.c")}
    sources = levels["sources_of"]
    parts = {each: {folder / os.path.basename(path) for path in sources(each, str(folder))}
             for each in ("once", *names)}
    assert set().union(*parts.values()) == files
    assert not any(parts["once"] & parts[name] for name in names)
    assert {level.needs for level in levels["LEVELS"]} <= {"", *names}
    flags = levels["flags_of_levels"]
    others = {"neon", "i8mm"} if sys.platform == "linux" else {"neon", "i8mm", "amx"}
    if not levels["compiles"]([]):  # no compiler is no compiler that knows the flags of a level
        others |= {level.name for level in levels["LEVELS"] if level.needs}
    assert [*flags("x86_64", True, ["-O1"])] == [name for name in names if name not in others]
    assert flags("x86_64", True, ["-O1"])["scalarfma"] == ["-O1", "-mfma"]
    assert [*flags("riscv64", True, [])] == ["scalar"]
    monkeypatch.setenv("CC", "no-such-compiler")
    assert [*flags("aarch64", False, [])] == ["scalar", "neon"]


@pytest.mark.exhaustive
@pytest.mark.one_build
def test_levels_that_a_build_has(monkeypatch):
    """A developer's build has what the CPU runs best, others all; KVCACHE_LEVELS names levels, with spaces or not."""
    setuptools = pytest.importorskip("setuptools")
    pytest.importorskip("Cython")
    if not (PROJECT / "setup.py").exists() or platform.machine() != "x86_64":
        pytest.skip("the levels of a clone on x86-64")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(PROJECT)

    def built(levels, *arguments):
        monkeypatch.setattr(sys, "argv", ["setup.py", *arguments])
        monkeypatch.setenv("KVCACHE_LEVELS", levels)
        return runpy.run_path("setup.py")["BUILT"]

    every = built("", "bdist_wheel")
    assert {"scalar", "avx2", "avx512"} <= {*every}
    assert every == built(" all", "--inplace") == built("avx2,all")
    assert {"scalar", kernels.best_level()} <= {*built("", "--inplace")}
    assert built(" avx2 ,", "--inplace") == built("avx2", "bdist_wheel") == ["scalar", "scalarfma", "avx2"]
    with pytest.raises(SystemExit, match=r"KVCACHE_LEVELS: expected all, or some of .*avx2, .*scalar, got sse9"):
        built("avx2, sse9")
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", "linux-x86_64")
    assert built("", "--inplace") == every
