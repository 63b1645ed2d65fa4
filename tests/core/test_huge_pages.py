"""Memory of pools and weights begins at huge pages, and `memory()` says how much lies on them."""

import os
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvcache import PagedKvCache
from kvcache.errors import OutOfMemoryError
from kvcache.kernels.fresh import zeros
from kvcache.kernels.matrix import Matrix
from kvcache.support.huge_pages import HUGE_PAGE, huge_bytes, span_of
from kvcache.support.mapped import MappedMemory

SMAPS = """\
100000000-100a00000 rw-p 00000000 00:00 0
Size:              10240 kB
AnonHugePages:      6144 kB
VmFlags: rd wr mr
100a00000-100c00000 ---p 00000000 00:00 0   [a name: 12-34 ]
AnonHugePages:         0 kB
7f0000000000-7f0000800000 rw-p 00000000 00:00 0
AnonHugePages:      8192 kB
"""


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], 0),
        ([(0x100000000, HUGE_PAGE - 1)], 0),  # too small for one
        ([(0x100000000, 10 << 20)], 6 << 20),
        ([(0x100000000, 4 << 20)], 4 << 20),  # a part, which could have them all
        ([(0x100000000 + 64 * 1024 * i, 64 * 1024 - 64) for i in range(160)], 6 << 20),  # with gaps of alignment
        ([(0x100A00000, HUGE_PAGE)], 0),
        ([(0x7F0000200000, 4 << 20), (0x100000000, 10 << 20)], 10 << 20),
        ([(0x200000000, 10 << 20)], 0),
    ],
)
def test_huge_pages_of_mappings(tmp_path, spans, expected):
    path = tmp_path / "smaps"
    path.write_text(SMAPS)
    assert huge_bytes(spans, str(path)) == expected


def test_a_system_that_does_not_say(tmp_path):
    assert huge_bytes([(0x100000000, 10 << 20)], str(tmp_path / "absent")) == 0


ALIGNED = HUGE_PAGE if os.name == "posix" else 65536  # where large maps begin


@pytest.mark.parametrize("size", [2 * HUGE_PAGE - 1, 2 * HUGE_PAGE, 5 * HUGE_PAGE + 12_345])
def test_new_memory_is_zero_and_begins_at_a_huge_page(size):
    array = zeros(size)
    assert (array.dtype, array.shape) == (np.uint8, (size,))
    assert not array.any()
    array[:] = 255  # to its last byte
    assert size < 2 * HUGE_PAGE or array.ctypes.data % ALIGNED == 0
    part = array[-3:]
    del array
    assert part.tolist() == [255] * 3  # a view keeps the memory


def test_memory_that_the_system_refuses():
    for make in (zeros, MappedMemory):
        with pytest.raises(OutOfMemoryError):
            make(1 << 46)
    with pytest.raises(OutOfMemoryError):
        Matrix(1 << 23, 1 << 23, "f32")


def test_many_maps_lie_apart_and_come_back():
    """Each begins at a huge page, however many there are, and none overlaps another."""
    arrays = [zeros(2 * HUGE_PAGE + 65536 * i) for i in range(4)]
    for i, array in enumerate(arrays):
        array[:] = i + 1
    assert [int(array.min()) for array in arrays] == [int(array.max()) for array in arrays] == [1, 2, 3, 4]
    spans = sorted(span_of(array) for array in arrays)
    assert all(start % ALIGNED == 0 for start, _ in spans)
    between = int(os.name == "posix")  # one that none may read
    assert all(a + size + between <= b for (a, size), (b, _) in pairwise(spans))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/smaps")
def test_memory_says_what_is_huge(rng):
    matrix = Matrix(2048, 1024, "f32")
    cache = PagedKvCache(256, 16, 4, 64)
    cache.allocate(1, 256 * 16)
    keys, values = rng.standard_normal((2, 256 * 16, 4, 64), dtype=np.float32)
    cache.write(0, 1, keys, values)
    told, weights = cache.memory()["huge"], huge_bytes(matrix.spans())
    assert 0 <= told <= cache.memory()["kv"]
    assert 0 <= weights <= matrix.nbytes
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text(encoding="ascii"):
        assert (told, weights) == (0, 0)
