"""The table of storage formats: what it says is true, and nobody has another one."""

import re

import numpy as np
import pytest
from places import PROJECT

import kvcache
from kvcache.core.store import BlockStore
from kvcache.kernels import kernels
from kvcache.kernels.kernels import FORMATS
from kvcache.lists.manager_config import FORMAT_OF_BITS, KVCacheConfig

NAMES = list(FORMATS)
SOURCES = [
    path
    for folder in ("kvcache", "bench", "ckernels")
    for path in sorted((PROJECT / folder).rglob("*"))
    if path.suffix in {".py", ".pyx", ".pxd", ".pyi", ".c", ".h"} and path.name != "kvc_formats.h"
]


def test_the_table():
    """Names are unique, fit the four bytes that a saved cache has for them, and quantised ones differ in their bits."""
    assert [line.name for line in FORMATS.values()] == NAMES
    assert all(re.fullmatch(r"[a-z][a-z0-9]{0,3}", name) for name in NAMES)
    bits = [line.bits for line in FORMATS.values() if line.quantised]
    assert len(set(bits)) == len(bits)
    assert all(line.quantised for line in FORMATS.values() if line.fitted)
    assert {bits: FORMATS[name].bits for bits, name in FORMAT_OF_BITS.items()} == {2: 2, 3: 3, 4: 4, 8: 8}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block_size", [5, 16])
def test_a_row_takes_its_bits(name, block_size):
    """And a scale and a minimum, two bytes each, where it is quantised."""
    line = FORMATS[name]
    layout = kernels.Layout(block_size, 2, 64, name)
    assert layout.key_head_bytes == block_size * (64 * line.bits // 8 + 4 * line.quantised)


@pytest.mark.parametrize("name", NAMES)
def test_rotation_is_for_quantised_formats(name):
    """The others are stored as they are, whatever is asked for."""
    assert BlockStore(1, 1, 4, 1, 64, name, name, True).rotated == (FORMATS[name].quantised,) * 2


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_value(name):
    """The message says what fits, and that is true of both signs."""
    store, row = BlockStore(1, 1, 4, 1, 8, name, name), np.zeros((1, 1, 8), np.float32)
    largest = np.float32(eval(FORMATS[name].largest))
    for sign in (1, -1):
        row[0, 0, 3] = sign * largest
        store.check_values(row, row)
        row[0, 0, 3] = sign * largest * np.float32(1.001)
        with pytest.raises(ValueError, match=re.escape(FORMATS[name].largest)):
            store.check_values(row, row)


@pytest.mark.parametrize("name", ["f64", "", "F32", None, 4, ["q7"], np.array(["q4", "q8"])])
def test_what_is_no_format(name):
    """The message lists those that there are."""
    with pytest.raises(ValueError, match=re.escape("key_dtype: expected one of " + ", ".join(NAMES))):
        BlockStore(1, 1, 4, 1, 8, name)


def test_the_documents_list_them():
    """Tables and docstrings that name formats name all of them, and no others."""
    tables = (PROJECT / "bench" / "pages" / "formats.md").read_text(encoding="utf-8")
    table = tables.split("\n| format | bytes/token |")[1].split("\n\n")[0]
    assert re.findall(r"^\| (\w+) \|", table, re.MULTILINE) == NAMES
    for described in (kvcache.PagedKvCache, kvcache.PrefixCacheConfig):
        line = next(line for line in described.__doc__.splitlines() if "dtype: storage format" in line)
        assert re.findall(r'"(\w+)"', line) == NAMES
    bits = re.search(r"quantization_bits: .*?: ([\d, or]+)\.", KVCacheConfig.__doc__)
    assert sorted(map(int, re.findall(r"\d+", bits[1]))) == sorted(FORMAT_OF_BITS)


def test_nobody_else_has_a_table():
    """No list of all quantised names, and no name that is taken apart to learn what it is."""
    listed = r"\W+".join(re.escape(name) for name in NAMES if FORMATS[name].quantised)
    taken_apart = r"""\w\[0\] *[=!]= *["']q["']|startswith\(["']q["']\)"""
    others = []
    for path in SOURCES:
        code = re.sub(r'""".*?"""|/\*.*?\*/', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        if re.search(rf"\b{listed}\b|{taken_apart}", code):
            others.append(path.relative_to(PROJECT))
    assert not others


@pytest.mark.one_build
@pytest.mark.parametrize(
    ("spelling", "name"),
    [("fp16", "f16"), (np.float16, "f16"), (np.dtype(np.float32), "f32"), ("torch.float16", "f16"), ("q8_0", "q8"),
     ("q5_1", "q5")],
)
def test_the_names_of_other_libraries_are_answered(spelling, name):
    with pytest.raises(ValueError, match=f"^dtype: expected one of f32, .*; kvcache calls it '{name}'$"):
        kvcache.PagedKvCache(4, 4, 1, 8, dtype=spelling)
    with pytest.raises(ValueError, match=r"^dtype: expected one of f32, f16, .*, got 'bf16'$"):
        kvcache.PagedKvCache(4, 4, 1, 8, dtype="bf16")
