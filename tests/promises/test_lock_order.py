"""Calls that take the locks of several objects, in two threads, in both orders: no deadlock, contents as written."""

import itertools
import os
import subprocess
import sys

import pytest
from pace import FAST
from places import search_path

pytestmark = pytest.mark.no_level

PAIRS = ["saves", "saves_over_one", "states", "engines", "engine_and_cache", "engine_and_save"]


@pytest.mark.parametrize("pair", PAIRS)
def test_no_deadlock(tmp_path, long, pair):
    """If a thread hangs, the process prints all stacks and ends."""
    rounds = 3000 if long else 30 if FAST else 100
    if "engine" in pair:
        rounds //= 6
    command = [sys.executable, "-m", "systems.lock_order", pair, str(rounds), str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": search_path()}, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert int(done.stdout.split()[0]) >= 2 * rounds


def test_every_pair_is_run():
    from systems import lock_order

    named = set(itertools.chain(lock_order.PAIRS))
    assert named == set(PAIRS)
