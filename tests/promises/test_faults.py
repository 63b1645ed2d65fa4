"""Allocations fail, in a process with `failing_malloc.c` loaded before libc; faults.py runs the subjects.

At every second place that allocates one fails alone (of engines at every third), and at every tenth place all later
ones fail too. With --long every single allocation fails.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest
from forks import Forks
from places import SUPPORT, search_path

import kvcache

pytestmark = pytest.mark.exhaustive

SUBJECTS = [
    (f"subjects.{path.stem}", name)
    for path in sorted((SUPPORT / "subjects").glob("*.py"))
    for name in re.findall(r"^class (\w+)\([\w, ]+\)", path.read_text(), re.M)
]


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    """Forks of a process with the shim."""
    if "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("needs glibc's own allocator, got a sanitizer's")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("faults")
    library = folder / "failing_malloc.so"
    made = [compiler, "-shared", "-fPIC", "-O2", "-Werror", f"-I{sysconfig.get_path('include')}"]
    made += [str(SUPPORT / "subjects" / "failing_malloc.c"), "-o", str(library), "-ldl"]
    subprocess.run(made, check=True)
    environment = os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": search_path(), "KVCACHE_NUM_THREADS": "1"}
    environment["FAULTS_IN"] = os.path.dirname(kvcache.__file__)
    forks = Forks(folder, ["subjects.faults", *sorted({module for module, _ in SUBJECTS})], environment)
    yield forks
    forks.close()


ALL = 1 << 40  # number of consecutive failing allocations: all until the call ends


@pytest.mark.parametrize("width", [1, ALL], ids=["one", "all"])
@pytest.mark.parametrize(("module", "subject"), SUBJECTS)
def test_nothing_is_lost_when_allocations_fail(forks, long, module, subject, width):
    engine = module in ("subjects.engine", "subjects.serving")  # the caches inside have subjects of their own
    step = 0 if long else 2 + engine if width == 1 else 10
    status, printed = forks.run("subjects.faults", module, subject, width, step)
    print(printed[-8000:])
    assert status == 0
    counts = re.search(r"(\d+) operations, (\d+) faults, (\d+) failed calls, 0 problems", printed)
    assert counts, "the process printed no counts"
    assert int(counts[2]) > 0, "no allocation has failed: is the shim loaded?"
