"""A process forks after threads have run: the child computes on threads of its own, and the parent continues."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import multiprocessing, os, tempfile
import numpy as np
import kvcache
from kvcache import PagedKvCache, PrefixCache

kvcache.set_num_threads(4)
cache = PagedKvCache(600, 16, 4, 64, dtype="f32")
cache.allocate(1, 9000)
cache.write(0, 1, *np.random.default_rng(0).standard_normal((2, 9000, 4, 64)).astype(np.float32))
queries = np.random.default_rng(1).standard_normal((64, 8, 64)).astype(np.float32)

def attend(_=None):
    return cache.attention(0, queries, [1], query_lens=[64])

block = [np.ones(2 * 16 * 8, np.float32)]
saved = PrefixCache(64, 16, 1, 2, 8)
saved.store(range(1000), 0, [(block, block)] * 60)
file = tempfile.NamedTemporaryFile()
saved.save(file.name)

def reads_a_file():
    loaded = PrefixCache(64, 16, 1, 2, 8)
    loaded.load(file.name)
    return loaded.lookup(range(1000))[0] == 60 * 16

expected = attend()
assert reads_a_file()
if HOW == "fork":
    child = os.fork()
    if child == 0:
        kvcache.set_num_threads(4)
        assert kvcache.get_num_threads() == 4
        assert len(os.listdir("/proc/self/task")) == 1
        cache.fork(1, 2)
        cache.append(2, 1)
        good = np.allclose(attend(), expected, rtol=1e-5, atol=1e-6) and reads_a_file()
        cache.check()
        assert len(os.listdir("/proc/self/task")) == 4
        os._exit(0 if good else 3)
    assert os.waitpid(child, 0)[1] == 0
else:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for got in pool.map(attend, range(4)):
            assert np.allclose(got, expected, rtol=1e-5, atol=1e-6)
assert kvcache.get_num_threads() == 4
assert (attend() == expected).all() and reads_a_file()
cache.check()
print("the parent went on")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("how", ["fork", "multiprocessing"])
def test_a_forked_child_computes(how):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", f"HOW = {how!r}\n{PROGRAM}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "the parent went on" in done.stdout
