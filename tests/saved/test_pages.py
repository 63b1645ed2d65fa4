"""Pages of a file, read by one thread and checked by another, against slices of its bytes."""

import os
import threading
import zlib

import numpy as np
import pytest
from oracles import kernels as oracle

from kvcache import get_num_threads, set_num_threads
from kvcache.saved.pages import read_pages


@pytest.fixture(params=[1, 2])
def threads(request):
    before = get_num_threads()
    set_num_threads(request.param)
    yield request.param
    set_num_threads(before)


class Written:
    """A file of random pages."""

    def __init__(self, path, rng, count, most_parts=12, most_bytes=3000):
        self.lengths = [rng.integers(0, most_bytes, rng.integers(1, most_parts + 1)).tolist() for _ in range(count)]
        sizes = np.array([sum(parts) for parts in self.lengths], np.int64)
        self.offsets = np.cumsum(sizes + 7) - sizes
        self.content = rng.bytes(int((sizes + 7).sum()))
        path.write_bytes(self.content)
        self.checksums = np.array(
            [zlib.crc32(self.content[at : at + n]) for at, n in zip(self.offsets, sizes, strict=True)], np.uint32
        )
        self.path = path

    def arrays(self):
        return [[np.zeros(n, np.uint8) for n in parts] for parts in self.lengths]

    def compare(self):
        with open(self.path, "rb") as file:
            arrays = self.arrays()
            found = read_pages(file.fileno(), self.offsets, arrays, self.checksums)
        good, expected = oracle.read_pages(self.path.read_bytes(), self.offsets, self.lengths, self.checksums)
        assert found.tolist() == good
        for page, parts in enumerate(arrays):
            if good[page]:
                assert [part.tobytes() for part in parts] == expected[page]
        return good


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 200])
def test_any_number_of_pages(tmp_path, threads, count):
    assert all(Written(tmp_path / "file", np.random.default_rng(count), count).compare())


def test_damaged_and_missing_pages(tmp_path, threads):
    rng = np.random.default_rng(3)
    for _ in range(60):
        written = Written(tmp_path / "file", rng, int(rng.integers(1, 40)))
        damaged = bytearray(written.content)
        for _ in range(rng.integers(0, 5)):
            damaged[rng.integers(0, len(damaged))] ^= 1 << rng.integers(0, 8)
        written.path.write_bytes(damaged[: rng.integers(0, len(damaged) + 1)] if rng.random() < 0.5 else damaged)
        written.compare()


def test_more_arrays_than_one_system_call_takes(tmp_path, threads):
    written = Written(tmp_path / "file", np.random.default_rng(4), 3, most_parts=1, most_bytes=2)
    for page, parts in enumerate((1000, 1001, 5003)):
        written.lengths[page] = [i % 4 for i in range(parts)]
    sizes = np.array([sum(parts) for parts in written.lengths])
    written.offsets = np.cumsum(sizes) - sizes
    written.content = np.random.default_rng(5).bytes(int(sizes.sum()))
    written.path.write_bytes(written.content)
    written.checksums = np.array(
        [zlib.crc32(written.content[at : at + n]) for at, n in zip(written.offsets, sizes, strict=True)], np.uint32
    )
    assert written.compare() == [True] * 3


def test_what_cannot_be_read_is_not_good(tmp_path, threads):
    written = Written(tmp_path / "file", np.random.default_rng(6), 20)
    with open(written.path, "ab") as file:  # opened for writing only
        found = read_pages(file.fileno(), written.offsets, written.arrays(), written.checksums)
    assert not found.any()


@pytest.mark.parametrize("strikes", [1, 5, 20])
def test_what_is_raised_in_a_thread_comes_out_of_the_call(tmp_path, threads, monkeypatch, strikes):
    written = Written(tmp_path / "file", np.random.default_rng(7), 40)
    calls = []

    def interrupted(buffers):
        calls.append(threading.get_ident())
        if len(calls) == strikes:
            raise KeyboardInterrupt
        return oracle_checksum(buffers)

    def oracle_checksum(buffers):
        return zlib.crc32(b"".join(part.tobytes() for part in buffers))

    monkeypatch.setattr("kvcache.saved.pages.checksum", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read_pages(os.open(written.path, os.O_RDONLY), written.offsets, written.arrays(), written.checksums)
    assert len(calls) == strikes
    # Ctrl-C can interrupt only the interpreter's own thread.
    assert set(calls) == {threading.get_ident()}
    assert all(written.compare())


def test_many_callers_at_once(tmp_path, threads):
    """Calls of two threads each, under one GIL."""
    files = [Written(tmp_path / str(i), np.random.default_rng(i), 50) for i in range(6)]
    wrong = []

    def run(written):
        for _ in range(20):
            if not all(written.compare()):
                wrong.append(written.path)

    callers = [threading.Thread(target=run, args=(written,)) for written in files]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_wrong_arguments(tmp_path):
    written = Written(tmp_path / "file", np.random.default_rng(8), 4)
    frozen = np.zeros(3, np.uint8)
    frozen.flags.writeable = False
    with open(written.path, "rb") as file:
        for page in (["text"], [bytearray(3)], None):
            with pytest.raises(TypeError):
                read_pages(file.fileno(), written.offsets, [page] * 4, written.checksums)
        for page in ([frozen], [np.zeros(6, np.uint8)[::2]]):
            with pytest.raises(ValueError, match="pages: expected C-contiguous and writable arrays"):
                read_pages(file.fileno(), written.offsets, [page] * 4, written.checksums)
        with pytest.raises(ValueError, match="pages: expected 3 offsets and checksums, got 4 and 4"):
            read_pages(file.fileno(), written.offsets, written.arrays()[:3], written.checksums)
