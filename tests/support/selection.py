"""The tests that `pytest` runs by itself: every rule of every room in minutes. `--all` is the suite, `--rest` the rest.

- The best SIMD level; the kernels' own files scalar too, which is their specification.
- Of a test with many parameters some values: those whose names have the smallest checksums, so they are drawn from all.
- Of a test of golden networks one case a network.
- No test that is marked `exhaustive`, and a fifth of the random examples (conftest.py).

A test that the command line names (`::`, `-k`) is run as it is.
"""

import math
import zlib

from hypothesis import is_hypothesis_test, settings

from kvcache.kernels import kernels

FEW = 3  # values of a test that all run
NETWORKS = ("engine_of", "network")  # parameters that are golden networks


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


def runs_at(item, level):
    """Whether a test of this SIMD level is not left out; None: the level of the process."""
    best = kernels.simd_levels()[0]
    return level in (None, best) or (level == "scalar" and "kernels" in item.path.parts)


def share(count, network, level):
    """How many of the cases of a test run that differ in values alone."""
    if network is not None:
        return 1
    most = count if count <= FEW else max(FEW, math.isqrt(count))
    return most if level != "scalar" else (most + 1) // 2


def chosen(items):
    """The ids of the tests that `pytest` runs by itself."""
    groups = {}
    for item in items:
        values = parameters(item)
        level, name = values.get("simd"), getattr(item, "originalname", item.name)
        if item.get_closest_marker("exhaustive") is None and runs_at(item, level):
            network = next((repr(values[each]) for each in NETWORKS if each in values), None)
            groups.setdefault((item.path, item.parent.name, name, network, level), []).append(item.nodeid)
    return {each for (*_, network, level), ids in groups.items()
            for each in sorted(ids, key=checksum)[: share(len(ids), network, level)]}


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
