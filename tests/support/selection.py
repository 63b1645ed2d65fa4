"""The tests that `pytest` runs by itself: every rule of every room in minutes. `--all` is the suite, `--rest` the rest.

- The best SIMD level, and networks at each level of the build: scalar is the specification of the others.
- Of a test with many parameters some values: those whose names have the smallest checksums, so they are drawn from all.
- Of a test of golden networks one case a network, of one of levels one a level.
- No test that is marked `exhaustive`, and a fifth of the random examples (conftest.py).

A test that the command line names (`::`, `-k`) is run as it is.
"""

import math
import zlib

from hypothesis import is_hypothesis_test, settings

FEW = 3  # values of a test that all run
EACH = ("engine_of", "network", "level")  # parameters of which each value runs: golden networks, SIMD levels


def is_machine(cls):
    """Whether a class of tests is a state machine of hypothesis."""
    return isinstance(getattr(cls, "settings", None), settings)


def is_random(item):
    """Whether hypothesis makes the examples of a test."""
    return is_machine(item.cls) or is_hypothesis_test(item.obj)


def checksum(nodeid):
    """A number that has nothing to do with the order of parameters."""
    return zlib.crc32(nodeid.encode())


def parameters(item):
    """The values of the parameters of a test, by name."""
    call = getattr(item, "callspec", None)
    return {} if call is None else call.params


def share(count, alone):
    """How many of the cases of a test run that differ in values alone; `alone`: one."""
    if alone:
        return 1
    return count if count <= FEW else max(FEW, math.isqrt(count))


def chosen(items):
    """The ids of the tests that `pytest` runs by itself."""
    groups = {}
    for item in items:
        if item.get_closest_marker("exhaustive") is None:
            values, name = parameters(item), getattr(item, "originalname", item.name)
            each = next((repr(values[each]) for each in EACH if each in values), None)
            groups.setdefault((item.path, item.parent.name, name, each), []).append(item.nodeid)
    return {nodeid for (*_, each), ids in groups.items()
            for nodeid in sorted(ids, key=checksum)[: share(len(ids), each is not None)]}


def select(config, items):
    """Leave the other tests out of `items`. Those with random examples are a part of both, with few and with all."""
    if config.getoption("--all") or config.getoption("-k") or any("::" in each for each in config.args):
        return
    wanted = chosen(items)
    if config.getoption("--rest"):
        wanted = {item.nodeid for item in items if item.nodeid not in wanted or is_random(item)}
    if left_out := [item for item in items if item.nodeid not in wanted]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in wanted]
