"""Nested calls from arguments, signal handlers and the collector; see reentry.py.

Each system runs in a process of its own, which prints all stacks and ends if it hangs.
"""

import os
import re

import pytest
from forks import Forks
from pace import FAST
from places import SUPPORT, search_path

pytestmark = pytest.mark.exhaustive

SYSTEMS = [
    f"systems.{path.stem}.{name}"
    for path in sorted((SUPPORT / "systems").glob("*.py"))
    for name in re.findall(r"^class (\w+System)\(", path.read_text(), re.M)
]
# Python over compiled parts that have systems of their own; two of the engines' have the turns, which are compiled too.
HAVE_TURNS = ("systems.engine.EngineSystem", "systems.engine.CachedSystem")
IN_PYTHON = {each for each in SYSTEMS if each.startswith(("systems.engine.", "systems.serving."))} - {*HAVE_TURNS}
CASES = [pytest.param(each, marks=[pytest.mark.one_build] if each in IN_PYTHON else []) for each in SYSTEMS]


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    modules = sorted({system.rpartition(".")[0] for system in SYSTEMS})
    environment = os.environ | {"PYTHONPATH": search_path(), "KVCACHE_NUM_THREADS": "1"}
    forks = Forks(tmp_path_factory.mktemp("reentrancy"), ["systems.reentry", *modules], environment)
    yield forks
    forks.close()


@pytest.mark.skipif(not hasattr(__import__("signal"), "setitimer"), reason="needs timers")
@pytest.mark.parametrize("system", CASES)
def test_nested_calls(forks, tmp_path, long, system):
    rounds, seconds = (30, 20) if long else (0.25, 0.05) if FAST else (0.35, 0.1)
    status, printed = forks.run("systems.reentry", system, rounds, seconds, str(tmp_path), timeout=3600)
    print(printed[-2000:])
    assert status == 0, printed[-8000:]
    counts = re.search(r"(\d+) calls, (\d+) inside, (\d+) refused, (\d+) handlers, 0 problems", printed)
    assert counts, "the process printed no counts"
    calls, inside, refused, handlers = map(int, counts.groups())
    least = 50  # without those of the timers, whose number is the machine's speed
    assert calls > least
    assert inside > 5 * least
    assert refused > least, "no call was made inside of a call"
    assert handlers > 0
