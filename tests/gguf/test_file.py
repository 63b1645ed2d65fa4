"""The header of a GGUF file: what is read, and what is refused. Hostile files: tests/networks/test_hostile_gguf.py."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf_files import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    array,
    entry,
    pack,
    string,
    tensor,
    write,
)

from kvcache.errors import CheckpointError
from kvcache.gguf import GgufFile
from kvcache.gguf import file as module

pytestmark = pytest.mark.one_build


@pytest.fixture
def save(tmp_path):
    def save_bytes(content):
        (tmp_path / "x.gguf").write_bytes(content)
        return tmp_path / "x.gguf"

    return save_bytes


SCALARS = {
    "u8": (U8, 200), "i8": (I8, -100), "u16": (U16, 60000), "i16": (I16, -30000), "u32": (U32, 2**32 - 1),
    "i32": (I32, -(2**31)), "u64": (U64, 2**64 - 1), "i64": (I64, -(2**63)), "f64": (F64, 0.1), "yes": (BOOL, True),
    "no": (BOOL, False), "text": (STRING, "ünï"), "nothing": (STRING, ""),
}


def test_metadata_of_the_package(tmp_path):
    """Every kind of value, as the gguf package writes it and reads it."""
    arrays = {"numbers": (ARRAY, [1, 2, 3], I32), "texts": (ARRAY, ["a", "", "ß"], STRING), "ends": (ARRAY, [0.5], F32)}
    path = write(tmp_path / "x.gguf", "llama", SCALARS | arrays | {"epsilon": (F32, 1e-5)}, {})
    found = GgufFile(path).metadata
    assert {key: found[key] for key in SCALARS} == {key: content for key, (_, content) in SCALARS.items()}
    assert all(type(found[key]) is type(content) for key, (_, content) in SCALARS.items())
    assert found["epsilon"] == 1e-5  # not 9.99999974737875e-06
    assert found["texts"] == ["a", "", "ß"]
    np.testing.assert_array_equal(found["numbers"], np.array([1, 2, 3], np.int32), strict=True)
    reader = gguf.GGUFReader(path)
    keys = {key for key in reader.fields if not key.startswith("GGUF.")}
    assert set(found) == keys


@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_texts_that_are_no_unicode(save, monkeypatch, chunk):
    """A description in another encoding is no error: its entry is bytes."""
    monkeypatch.setattr(module, "_CHUNK", chunk)
    latin, texts = "naïve".encode("latin-1"), ["a", b"\xff\xfe", "ß", b"\xc3"]
    entries = [entry("general.description", STRING, string(latin)), entry("t", ARRAY, array(STRING, texts))]
    found = GgufFile(save(pack([*entries, entry("n", U8, 7)]))).metadata
    assert found == {"general.description": latin, "t": texts, "n": 7}


def test_tensors_of_the_package(tmp_path, rng):
    matrix, vector = rng.standard_normal((3, 5), np.float32), np.arange(7, dtype=np.float16)
    quantised = gguf.quants.quantize(rng.standard_normal((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    path = write(tmp_path / "x.gguf", "llama", {}, {"m": matrix, "v": vector, "q": (quantised, "Q8_0")})
    file = GgufFile(path)
    assert [(name, *info[:2]) for name, info in file.items()] == [
        ("m", "F32", (3, 5)), ("v", "F16", (7,)), ("q", "Q8_0", (2, 64)),
    ]
    for name, content in (("m", matrix), ("v", vector), ("q", quantised)):
        stored = np.empty(file[name].stop - file[name].start, np.uint8)
        file.read([stored], name)
        assert stored.tobytes() == content.tobytes()
    assert len(file) == 3


def test_version_2_and_an_alignment(save):
    entries = [entry("general.alignment", U32, 8)]
    tensors = [tensor("a", [3]), tensor("b", [1], offset=16)]
    file = GgufFile(save(pack(entries, tensors, bytes(20), version=2, align=8)))
    assert file["b"].start - file["a"].start == 16


def test_a_header_of_many_chunks(save, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 7)
    texts = [f"token {i}" for i in range(100)]
    assert GgufFile(save(pack([entry("t", ARRAY, array(STRING, texts))]))).metadata["t"] == texts


def test_an_empty_file_of_entries(save):
    file = GgufFile(save(pack()))
    assert (file.metadata, list(file)) == ({}, [])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header: expected 4 bytes at 0, got a file of 0: truncated"),
        (b"GGU", "header: expected 4 bytes at 0"),
        (b"GGML" + bytes(20), "magic: expected GGUF, got b'GGML'"),
        (pack(version=1), "version: expected 2 or 3, little-endian, got 1"),
        (pack(version=3 << 24), "version: expected .*, got a big-endian file"),
        (pack(num_entries=1), "metadata: expected 8 bytes at 24, got a file of 24: truncated"),
        (pack(num_entries=2**16 + 1), "entries: expected at most 65536, got 65537"),
        (pack(num_tensors=2**60), f"tensors: expected at most 65536, got {2**60}"),
        (pack([entry("a", U8, 1)] * 2), "a: expected each key once"),
        (pack([entry("a", 13, b"")]), "a: expected a known kind of value, got 13"),
        (pack([entry("a", BOOL, b"\2")]), "a: expected 0 or 1, got 2"),
        (pack([entry("a", STRING, b"\xff")]), "a: expected 8 bytes at"),
        (pack([entry("a", STRING, array(U8, [])[4:])]), None),
        (pack([entry(b"\xff", U8, 1)]), r"metadata: expected UTF-8, got b'\\xff'"),
        (pack([], [tensor(b"\xff", [4])]), r"tensors: expected UTF-8, got b'\\xff'"),
        (pack([entry("k" * 70000, U8, 1)]), "metadata: expected a string of at most 65535 bytes, got 70000"),
        (pack([entry("a", ARRAY, array(U8, [], 2**60))]), f"a: expected {2**60} bytes at"),
        (pack([entry("a", ARRAY, array(STRING, [], 2**60))]), f"a: expected {2**63} bytes at"),
        (pack([entry("a", ARRAY, array(ARRAY, [], 1))]), "a: expected an array of numbers, .*, got kind 9"),
        (pack([entry("general.alignment", U32, 24)]), "general.alignment: expected a power of two, got 24"),
        (pack([entry("general.alignment", STRING, "32")]), "general.alignment: expected a power of two, got '32'"),
        (pack([], [tensor("t", [])]), "t: expected 1 to 4 dimensions, got 0"),
        (pack([], [tensor("t", [1] * 5)]), "t: expected 1 to 4 dimensions, got 5"),
        (pack([], [tensor("t", [4], 99)]), "t: expected a known type, got type 99"),
        (pack([], [tensor("t", [0])]), r"t: expected sizes that fit memory, got shape \(0,\)"),
        (pack([], [tensor("t", [2**40, 2**40])]), "t: expected sizes that fit memory"),
        (pack([], [tensor("t", [33], 8)]), "t: expected rows of a multiple of 32 values for Q8_0, got 33"),
        (pack([], [tensor("t", [4])], bytes(15)), "t: expected bytes up to .*: truncated"),
        (pack([], [tensor("t", [4], offset=32)], bytes(64)), "t: expected offset 0, got 32"),
        (pack([], [tensor("t", [4]), tensor("u", [4], offset=16)], bytes(64)), "u: expected offset 32, got 16"),
        (pack([], [tensor("t", [4]), tensor("t", [4], offset=32)], bytes(64)), "t: expected each tensor once"),
    ],
)
def test_refused(save, content, message):
    path = save(content)
    if message is None:
        assert GgufFile(path).metadata == {"a": ""}
        return
    with pytest.raises(CheckpointError, match=f"x.gguf: {message}"):
        GgufFile(path)


def test_a_header_beyond_the_limit(save, monkeypatch):
    monkeypatch.setattr(module, "MAX_HEADER_BYTES", 100)
    with pytest.raises(CheckpointError, match="expected a header of at most 100 bytes"):
        GgufFile(save(pack([entry("a", ARRAY, array(U8, [0] * 200))])))


PARTS = [
    pack([entry("split.no", U16, 0), entry("split.count", U16, 3), entry("a", U8, 1)], [tensor("t", [4])], b"\1" * 16),
    pack([entry("split.no", U16, 1), entry("split.count", U16, 3), entry("a", U8, 2)]),
    pack([entry("split.no", U16, 2), entry("split.count", U16, 3)], [tensor("v", [1]), tensor("u", [2], 0, 32)],
         b"\2" * 4 + bytes(28) + b"\3" * 8),
]


def save_parts(folder, parts=PARTS, count=3):
    for i, part in enumerate(parts, 1):
        (folder / f"x-{i:05d}-of-{count:05d}.gguf").write_bytes(part)
    return folder / f"x-00001-of-{count:05d}.gguf"


def test_a_file_that_was_split(tmp_path):
    """The metadata of the first file, and the tensors of all; the second has none."""
    file = GgufFile(save_parts(tmp_path))
    assert file.metadata == {"split.no": 0, "split.count": 3, "a": 1}
    assert [(name, info.shape, info.part) for name, info in file.items()] == [
        ("t", (4,), 0), ("v", (1,), 2), ("u", (2,), 2),
    ]
    for name, byte, size in (("t", 1, 16), ("v", 2, 4), ("u", 3, 8)):
        stored = np.empty(size, np.uint8)
        file.read([stored], name)
        assert (stored == byte).all()
    half = np.empty(4, np.uint8)
    file.read([half], "u", 4)
    assert (half == 3).all()


def part(number, count=3, tensors=(), data=b"", **more):
    entries = [entry("split.no", U16, number), entry("split.count", U16, count)]
    return pack(entries + [entry(key.replace("__", "."), I32, value) for key, value in more.items()], tensors, data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({1: part(2)}, r"x-00002-of-00003.gguf: split.no: expected 1, got 2"),
        ({1: part(0)}, r"x-00002-of-00003.gguf: split.no: expected 1, got 0"),
        ({1: pack()}, r"x-00002-of-00003.gguf: split.no: expected 1, got None"),
        ({2: part(2, 4)}, r"x-00003-of-00003.gguf: split.count: expected 3, got 4"),
        ({2: pack([entry("split.no", STRING, "2")])}, r"x-00003-of-00003.gguf: split.no: expected 2, got '2'"),
        ({1: part(1, 3, [tensor("t", [4])], bytes(16))}, "x-00002-of-00003.gguf: t: expected each tensor once"),
        ({1: part(1, 3, [tensor("w", [4])], bytes(15))}, "x-00002-of-00003.gguf: w: expected .*: truncated"),
        ({1: b"GGML"}, "x-00002-of-00003.gguf: magic: expected GGUF"),
        ({0: part(1)}, "x-00001-of-00003.gguf: split.no: expected 0, that of the first file, got 1"),
        ({0: part(0, 2)}, "x-00001-of-00003.gguf: split.count: expected a file named NAME-00001-of-00002.gguf"),
        ({0: part(0, 513)}, "split.count: expected a whole number up to 512, got 513"),
        ({0: pack([entry("split.count", STRING, "3")])}, "split.count: expected a whole number up to 512, got '3'"),
        ({0: pack([entry("split.count", I32, -1)])}, "split.count: expected a whole number up to 512, got -1"),
        ({0: part(0, split__tensors__count=9)}, "x-00001-of-00003.gguf: split.tensors.count: expected 2, got 9"),
    ],
)
def test_parts_that_do_not_belong_together(tmp_path, changes, message):
    path = save_parts(tmp_path, [changes.get(i, content) for i, content in enumerate(PARTS)])
    with pytest.raises(CheckpointError, match=message):
        GgufFile(path)


def test_a_part_that_is_missing_or_too_long(tmp_path, monkeypatch):
    path = save_parts(tmp_path)
    together = sum(part.header_bytes for part in GgufFile(path)._parts)
    monkeypatch.setattr(module, "MAX_HEADER_BYTES", together)
    assert len(GgufFile(path)) == 3
    monkeypatch.setattr(module, "MAX_HEADER_BYTES", together - 1)
    with pytest.raises(CheckpointError, match=r"x-00003-of-00003.gguf: expected a header of at most \d+ bytes"):
        GgufFile(path)
    (tmp_path / "x-00003-of-00003.gguf").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected a GGUF file, got none at .*x-00003-of-00003.gguf"):
        GgufFile(path)


def test_one_part_of_one(save):
    assert GgufFile(save(pack([entry("split.count", U16, 1), entry("split.no", U16, 0)]))).metadata["split.count"] == 1


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="path: expected a GGUF file, got none at"):
        GgufFile(tmp_path / "nowhere.gguf")


def test_a_file_that_becomes_shorter(save):
    path = save(pack([], [tensor("t", [64])], bytes(256)))
    file = GgufFile(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"t: expected 256 bytes at \d+, got a truncated file"):
        file.read([bytearray(256)], "t")
