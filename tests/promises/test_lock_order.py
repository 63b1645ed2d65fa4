"""Calls that take the locks of several objects, in two threads, in both orders: no deadlock, contents as written."""

import itertools
import os
import re

import pytest
from forks import Forks
from pace import FAST
from places import search_path

pytestmark = pytest.mark.exhaustive

PAIRS = ["saves", "saves_over_one", "states", "engines", "engine_and_cache", "engine_and_save"]


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    environment = os.environ | {"PYTHONPATH": search_path()}
    forks = Forks(tmp_path_factory.mktemp("lock_order"), ["systems.lock_order"], environment)
    yield forks
    forks.close()


@pytest.mark.parametrize("pair", PAIRS)
def test_no_deadlock(forks, tmp_path, long, pair):
    """If a thread hangs, the process prints all stacks and ends."""
    rounds = 3000 if long else 30 if FAST else 100
    if "engine" in pair:
        rounds //= 6
    status, printed = forks.run("systems.lock_order", pair, rounds, str(tmp_path))
    assert status == 0, printed[-9000:]
    assert int(re.search(r"^\d+", printed, re.M)[0]) >= 2 * rounds


def test_every_pair_is_run():
    from systems import lock_order

    named = set(itertools.chain(lock_order.PAIRS))
    assert named == set(PAIRS)
