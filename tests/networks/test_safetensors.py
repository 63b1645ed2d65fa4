"""One file of tensors: every dtype and alignment, and false headers."""

from __future__ import annotations

import errno
import json
import os

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from posix_modules import needs_posix, resource
from tensor_files import NAMES, entry, pack, pack_arrays

from kvcache.errors import CheckpointError, KvCacheError
from kvcache.networks.files import MAX_JSON_BYTES
from kvcache.networks.safetensors import SafetensorsFile
from kvcache.support import regular_files as files

pytestmark = pytest.mark.one_build


@pytest.fixture
def write(tmp_path):
    def write_file(content):
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)
        return path

    return write_file


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
@pytest.mark.parametrize("padding", range(5))
def test_values_of_every_dtype_and_alignment(write, dtype, padding):
    rng = np.random.default_rng(0)
    array = rng.standard_normal((3, 5)).astype(dtype)
    header = {"w": entry(NAMES[np.dtype(dtype)], [3, 5], 0, array.nbytes)}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8 + padding)
    file = SafetensorsFile(write(pack(raw, array.tobytes())))
    found = file.read("w")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, array.astype(np.float32))


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
@pytest.mark.parametrize("shape", [(256, 3), (1, 5), (4, 1)])
def test_rows_are_read_as_they_are_stored(write, dtype, shape):
    array = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    file = SafetensorsFile(write(pack_arrays({"before": array[:1], "w": array})))
    words = array if array.dtype == np.float32 else array.view(np.uint16)
    for first, stop in ((0, shape[0]), (shape[0] // 2, shape[0]), (0, 1), (1, 1)):
        found = file.rows("w", first, stop)
        assert found.dtype == words.dtype
        np.testing.assert_array_equal(found, words[first:stop])


def test_special_values_keep_their_bits(write):
    bits = np.arange(2**16, dtype=np.uint16)
    arrays = {"b": bits.view(ml_dtypes.bfloat16), "h": bits.view(np.float16)}
    file = SafetensorsFile(write(pack_arrays(arrays)))
    for name, array in arrays.items():
        np.testing.assert_array_equal(file.read(name), array.astype(np.float32))


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
def test_values_do_not_follow_the_file(write, dtype):
    """A later write to the file does not change the values that were read."""
    array = np.arange(12).reshape(3, 4).astype(dtype)
    path = write(pack_arrays({"w": array}))
    file = SafetensorsFile(path)
    first, second = file.read("w"), file.read("w")
    assert not np.shares_memory(first, second)
    path.write_bytes(path.read_bytes()[: -array.nbytes] + b"\xff" * array.nbytes)
    np.testing.assert_array_equal(first, array.astype(np.float32))
    assert not np.array_equal(file.read("w"), first)


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
def test_a_file_that_is_cut_short_while_it_is_read(write, dtype):
    """At every length the result is the values, or an error that names file and tensor."""
    array = np.random.default_rng(0).standard_normal((9, 3)).astype(dtype)
    content = pack_arrays({"first": array, "second": array})
    path = write(content)
    file = SafetensorsFile(path)
    for size in range(len(content), len(content) - array.nbytes - 1, -1):
        os.truncate(path, size)
        np.testing.assert_array_equal(file.read("first"), array.astype(np.float32))
        if size < len(content):
            for read in (lambda: file.read("second"), lambda: file.rows("second", 0, 9)):
                with pytest.raises(CheckpointError, match=r"second: expected \d+ bytes at \d+, got a truncated file"):
                    read()


def test_a_read_that_fails_names_file_and_tensor(write, monkeypatch):
    file = SafetensorsFile(write(pack_arrays({"w": np.ones(3, np.float32)})))

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "read_at", fail)
    with pytest.raises(CheckpointError, match=r"safetensors: w: expected a readable file, got Input/output error"):
        file.read("w")


def test_empty_and_scalar_tensors(write):
    header = {
        "scalar": entry("F32", [], 0, 4),
        "none": entry("F16", [0, 7], 4, 4),
        "__metadata__": {"format": "pt"},
    }
    file = SafetensorsFile(write(pack(header, np.float32(2.5).tobytes())))
    assert sorted(file) == ["none", "scalar"]
    assert file.read("scalar") == 2.5
    assert file.read("none").shape == (0, 7)


GOOD = {"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 8, 12)}
HOSTILE = {
    "empty file": (b"", "truncated"),
    "seven bytes": (b"\0" * 7, "truncated"),
    "header longer than the file": (pack(GOOD, b"\0" * 12, length=1000), "truncated"),
    "header of 2**64 - 1 bytes": (pack(GOOD, b"\0" * 12, length=2**64 - 1), "truncated"),
    "not JSON": (pack(b"{"), "header: expected valid JSON"),
    "not UTF-8": (pack(b'{"\xff": 1}'), "header: expected valid JSON"),
    "UTF-16": (pack("{}".encode("utf-16")), "header: expected valid JSON"),
    "nested too deep": (pack(b"[" * 100_000), "header: expected valid JSON"),
    "number of 5000 digits": (pack(b'{"a": ' + b"9" * 5000 + b"}"), "header: expected valid JSON.*5000"),
    "fraction of millions of digits": (pack(b'{"a": 0.' + b"9" * 8_000_000 + b"}"), "header: .* JSON.*8000002"),
    "not a number": (pack(b'{"a": NaN}'), "header: expected valid JSON"),
    "an array": (pack([]), "expected a JSON object"),
    "duplicate tensor": (
        pack(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
             b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', b"\0" * 8),
        "keys: expected each once",
    ),
    "metadata of numbers": (pack({"__metadata__": {"a": 1}}), "__metadata__"),
    "tensor without dtype": (pack({"a": {"shape": [], "data_offsets": [0, 4]}}, b"\0" * 4), "a: expected dtype, shape"),
    "tensor with more": (pack({"a": {**entry("F32", [1], 0, 4), "x": 1}}, b"\0" * 4), "a: expected dtype, shape"),
    "unknown dtype": (pack({"a": entry("F31", [1], 0, 4)}, b"\0" * 4), "known dtype"),
    "dtype of a list": (pack({"a": entry(["F32"], [1], 0, 4)}, b"\0" * 4), "known dtype"),
    "negative size": (pack({"a": entry("F32", [-1], 0, 4)}, b"\0" * 4), "shape of whole numbers"),
    "fractional size": (pack({"a": entry("F32", [1.0], 0, 4)}, b"\0" * 4), "shape of whole numbers"),
    "true as a size": (pack({"a": entry("F32", [True], 0, 4)}, b"\0" * 4), "shape of whole numbers"),
    "too many dimensions": (pack({"a": entry("F32", [1] * 33, 0, 4)}, b"\0" * 4), "shape of whole numbers"),
    "size that overflows": (pack({"a": entry("F32", [2**32, 2**32], 0, 0)}), "fits memory"),
    "size that overflows beside a zero": (pack({"a": entry("F32", [0, 2**40, 2**40], 0, 0)}), "fits memory"),
    "three offsets": (pack({"a": {**entry("F32", [1], 0, 4), "data_offsets": [0] * 3}}, b""), "data_offsets"),
    "offsets backwards": (pack({"a": entry("F32", [1], 4, 0)}, b"\0" * 4), "data_offsets"),
    "span of another shape": (pack({"a": entry("F32", [2], 0, 4)}, b"\0" * 4), "a: expected 8 bytes"),
    "half bytes": (pack({"a": entry("F4", [3], 0, 1)}, b"\0"), "a: expected 2 bytes"),
    "overlap": (pack({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, b"\0" * 8), "b: .* got 4: overlaps"),
    "hole": (pack({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}), "b: .* got 8: leaves a hole"),
    "hole at the start": (pack({"a": entry("F32", [1], 4, 8)}, b"\0" * 8), "a: .* got 4: leaves a hole"),
    "data missing": (pack(GOOD, b"\0" * 11), "truncated"),
    "data left over": (pack(GOOD, b"\0" * 13), "left over"),
    "far offsets": (pack({"a": entry("F32", [2**40], 0, 2**42)}, b"\0" * 4), "truncated"),
}


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_file(write, content, message):
    with pytest.raises(CheckpointError, match=message) as raised:
        SafetensorsFile(write(content))
    assert "model.safetensors" in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_header_beyond_the_bound_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((2**40).to_bytes(8, "little"))
        file.truncate(2**40 + 8)  # sparse
    with pytest.raises(CheckpointError, match=f"at most {MAX_JSON_BYTES}"):
        SafetensorsFile(path)


def test_unloadable_dtype_is_named(write):
    file = SafetensorsFile(write(pack({"a": entry("F8_E4M3", [4], 0, 4)}, b"\0" * 4)))
    with pytest.raises(CheckpointError, match="a: expected F32, F16 or BF16, got F8_E4M3"):
        file.read("a")


def test_error_is_a_value_error_of_the_family():
    assert issubclass(CheckpointError, ValueError)
    assert issubclass(CheckpointError, KvCacheError)


@needs_posix
@pytest.mark.exhaustive
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_mutated_files_load_or_raise(tmp_path_factory, data):
    """A mutated file is refused with CheckpointError, or every tensor in it can be read."""
    rng = np.random.default_rng(1)
    arrays = {
        "one": rng.standard_normal((4, 3)).astype(np.float32),
        "two": rng.standard_normal(5).astype(np.float16),
        "three": rng.standard_normal((2, 2)).astype(ml_dtypes.bfloat16),
    }
    content = bytearray(pack_arrays(arrays))
    data_start = 8 + int.from_bytes(content[:8], "little")
    edits = data.draw(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=4))
    for position, value in edits:
        content[position] = value
    if data.draw(st.booleans()):
        start = data.draw(st.integers(0, len(content)))
        stop = data.draw(st.integers(start, min(start + 8, len(content))))
        content[start:stop] = data.draw(st.binary(max_size=8))
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        file = SafetensorsFile(path)
        total = 0
        for name in file:
            try:
                total += file.read(name).nbytes
            except CheckpointError:
                assert file[name].dtype not in ("F32", "F16", "BF16")
        assert total <= 2 * len(content)
        if bytes(content[:data_start]) == pack_arrays(arrays)[:data_start]:
            assert {name: file[name].shape for name in file} == {name: a.shape for name, a in arrays.items()}
    except CheckpointError:
        pass
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024, "a small file took 64 MiB"


@pytest.mark.exhaustive
@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=4),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["F32", "I64", "F4"]),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.fixed_dictionaries({"dtype": inner, "shape": inner, "data_offsets": inner})
            ),
            max_leaves=12,
        ),
        max_size=3,
    )
)
def test_any_json_header_loads_or_raises(tmp_path_factory, header):
    path = tmp_path_factory.getbasetemp() / "header.safetensors"
    path.write_bytes(pack(header, b"\0" * 16))
    try:
        file = SafetensorsFile(path)
        assert sum(file[name].stop - file[name].start for name in file) == 16
    except CheckpointError:
        pass
