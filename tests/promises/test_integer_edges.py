"""Every integer argument at the edges of all integer types, in a process with little memory; see integer_edges.py."""

import os
import re
import subprocess
import sys

import pytest
from places import search_path

pytestmark = pytest.mark.exhaustive


def test_every_integer_at_every_edge(long):
    done = subprocess.run(
        [sys.executable, "-m", "hostile.integer_edges", "all" if long else "few"],
        env=os.environ | {"PYTHONPATH": search_path()}, capture_output=True, text=True, timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    counts = re.search(r"(\d+) calls, (\d+) results, (\d+) refused, 0 problems", done.stdout)
    assert counts, "the calls did not come to their end"
    assert int(counts[1]) > (50_000 if long else 5_000)
    assert int(counts[2]) > 500
