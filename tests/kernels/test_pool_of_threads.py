"""The pool of threads: every item once, thread numbers in range, any number of callers at once."""

import ctypes
import platform
import random
import sys
import threading
import time

import numpy as np
import pytest

from kvcache import get_num_threads, set_num_threads
from kvcache.kernels import kernelcalls
from kvcache.kernels.matrix import Matrix
from kvcache.support.cpus import available_cpus, has_quota


def check_run(count, num_threads, work):
    times, threads = kernelcalls.run_items(count, num_threads, work)
    assert (times == 1).all()
    assert count == 0 or threads[0] == 0
    assert ((threads >= 0) & (threads < max(1, num_threads))).all()
    return len(np.unique(threads))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 17, 1024])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 100, 5000])
def test_every_item_runs_once(count, num_threads):
    for work in (0, 100, 10_000 if count < 1000 else 10):
        check_run(count, num_threads, work)


def test_threads_of_the_pool_help():
    """However busy the machine is: items that take long enough are shared in the end."""
    assert any(check_run(64, 4, 1_000_000) > 1 for _ in range(1000))


def test_many_callers_at_once():
    problems = []

    def call(seed):
        rng = random.Random(seed)
        try:
            for _ in range(300):
                check_run(rng.choice([0, 1, 2, 5, 40, 300]), rng.choice([1, 2, 3, 8]), rng.choice([0, 10, 1000]))
        except BaseException as error:
            problems.append(error)
            raise

    callers = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not problems


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="asks for the CPU time of a thread")
def test_callers_share_the_threads():
    """While a call has both threads, another one that may have two gets no helper."""
    seen = 0
    while not seen:
        first = threading.Thread(target=kernelcalls.run_items, args=(40, 2, 10_000_000))
        first.start()
        clock = time.pthread_getcpuclockid(first.ident)
        while time.clock_gettime(clock) < 0.01:  # it is at its items
            time.sleep(0.001)
        while seen < 50:
            found = check_run(8, 2, 100_000)
            if not first.is_alive():
                break
            assert found == 1
            seen += 1
        first.join()


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="sets MXCSR through glibc")
def test_helpers_have_the_rounding_of_their_caller():
    """Denormals that the caller counts as zeros are zeros on every thread: bits do not depend on who runs an item."""
    libm = ctypes.CDLL("libm.so.6")
    before, flushing = (ctypes.c_uint32 * 8)(), (ctypes.c_uint32 * 8)()
    libm.fegetenv(before)
    libm.fegetenv(flushing)
    flushing[7] |= 0x8040  # MXCSR: flush to zero, denormals are zeros
    matrix = Matrix(2048, 256, "f32")
    matrix.put(0, np.full((2048, 256), 2.0**-10, np.float32))
    rows = np.full((1, 256), 2.0**-130, np.float32)
    threads = get_num_threads()
    set_num_threads(4)
    try:
        assert matrix.multiply(rows).all()  # threads have begun, in the usual mode
        libm.fesetenv(flushing)
        found = [matrix.multiply(rows).view(np.uint32).any() for _ in range(200)]  # bits: a comparison flushes too
    finally:
        libm.fesetenv(before)
        set_num_threads(threads)
    assert not any(found)
    assert matrix.multiply(rows).all()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 99),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, 99),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"}, 3),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "1000 100000"}, 1),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "200000 100000"}, 2),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "800000 100000",
          "sys/fs/cgroup/a/b/cpu.max": "400000 100000"}, 4),
        ({"proc/self/cgroup": "0::/of/the/host", "sys/fs/cgroup/cpu.max": "500000 100000"}, 5),
        ({"proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/x", "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "150000",
          "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000"}, 2),
        ({"proc/self/cgroup": "4:cpu:/", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
          "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 99),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "nonsense"}, 99),
    ],
)
def test_quotas_of_control_groups_count(tmp_path, monkeypatch, files, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(99)), raising=False)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert available_cpus(str(tmp_path)) == expected
    assert has_quota(str(tmp_path)) == (expected < 99)


@pytest.mark.parametrize(
    ("capacities", "allowed", "expected"),
    [
        ([], range(4), 4),  # one kind of cores
        ([1024, 1024, 446, 446, 446, 446], range(6), 2),  # big.LITTLE
        ([1024, 1024, 446, 446, 446, 446], range(2, 6), 4),  # bound to the little ones
        ([1024, 870, 870, 325], range(4), 3),  # three kinds
        ([1024, 1024, 640, 640], range(4), 4),  # P and E cores
        ([1024, 446], range(3), 3),  # no capacity of one of them
    ],
)
def test_little_cores_do_not_count(tmp_path, monkeypatch, capacities, allowed, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(allowed), raising=False)
    for cpu, capacity in enumerate(capacities):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}"
        folder.mkdir(parents=True)
        (folder / "cpu_capacity").write_text(f"{capacity}\n")
    assert available_cpus(str(tmp_path)) == expected


def test_at_least_one(monkeypatch):
    """On a system that tells no affinity too."""
    assert 1 <= available_cpus() <= 4096
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    assert 1 <= available_cpus() <= 4096
