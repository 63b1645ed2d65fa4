"""Nested calls from arguments, signal handlers and the collector; see reentry.py.

Each system runs in a separate process, which prints all stacks and ends if it hangs.
"""

import os
import re
import subprocess
import sys

import pytest
from pace import FAST
from places import SUPPORT, search_path

pytestmark = pytest.mark.no_level

SYSTEMS = [
    f"systems.{path.stem}.{name}"
    for path in sorted((SUPPORT / "systems").glob("*.py"))
    for name in re.findall(r"^class (\w+System)\(", path.read_text(), re.M)
]


@pytest.mark.skipif(not hasattr(__import__("signal"), "setitimer"), reason="needs timers")
@pytest.mark.parametrize("system", SYSTEMS)
def test_nested_calls(tmp_path, long, system):
    rounds, seconds = (30, 20) if long else (1, 0.2 if FAST else 0.4)
    done = subprocess.run(
        [sys.executable, "-m", "systems.reentry", system, str(rounds), str(seconds), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": search_path(), "KVCACHE_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=3600,
    )
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    counts = re.search(r"(\d+) calls, (\d+) inside, (\d+) refused, (\d+) handlers, 0 problems", done.stdout)
    assert counts, "the process printed no counts"
    calls, inside, refused, handlers = map(int, counts.groups())
    least = 50 if FAST else 100  # without those of the timers, whose number is the machine's speed
    assert calls > least
    assert inside > 5 * least
    assert refused > least, "no call was made inside of a call"
    assert handlers > 0
