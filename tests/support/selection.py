"""The tests that `pytest` runs by itself: every rule of every room in some minutes.

`--all` runs the suite, `--rest` what is left of it.

- The best SIMD level; the kernels' own files scalar too, which is their specification.
- Of a test with many parameters, some values: those whose names have the smallest checksums, so they are drawn from
  all of them.
- Of a test of golden networks one case a network.
- No test that is marked `exhaustive`.

A test that the command line names (`::`, `-k`) is run as it is.
"""

import zlib

from hypothesis import settings

from kvcache.kernels import kernels

FEW = 6  # values of a test that all run
NETWORKS = ("engine_of", "network")  # parameters that are golden networks


def kept(count):
    """How many of so many values of a test run: all of a few, a half of some, a quarter of many."""
    return count if count <= FEW else max(FEW, count // 2 if count <= 4 * FEW else count // 4)


def checksum(nodeid):
    """A number that has nothing to do with the order of parameters."""
    return zlib.crc32(nodeid.encode())


def is_machine(cls):
    """Whether a class of tests is a state machine of hypothesis."""
    return isinstance(getattr(cls, "settings", None), settings)


def parameters(item):
    """The values of the parameters of a test, by name."""
    call = getattr(item, "callspec", None)
    return {} if call is None else call.params


def level_of(item):
    """The SIMD level that a test is given; None: that of the process."""
    return parameters(item).get("simd")


def is_at_a_level_of_all(item):
    """Whether the level is one that is not left out."""
    levels = kernels.simd_levels()
    return level_of(item) in (None, levels[0], "scalar" if "kernels" in item.path.parts else levels[0])


def chosen(items):
    """The ids of the tests that `pytest` runs by itself."""
    groups = {}
    for item in items:
        if item.get_closest_marker("exhaustive") is None and is_at_a_level_of_all(item):
            name, network = getattr(item, "originalname", item.name), [parameters(item).get(each) for each in NETWORKS]
            key = item.path, item.parent.name, name, level_of(item), repr(network)
            groups.setdefault(key, []).append(item.nodeid)
    return {
        nodeid
        for key, ids in groups.items()
        for nodeid in sorted(ids, key=checksum)[: kept(len(ids)) if key[-1] == repr([None] * len(NETWORKS)) else 1]
    }


def select(config, items):
    """Leave the other tests out of `items`. State machines are a part of both, with few examples and with all."""
    if config.getoption("--all") or config.getoption("-k") or any("::" in each for each in config.args):
        return
    wanted = chosen(items)
    if config.getoption("--rest"):
        wanted = {item.nodeid for item in items if item.nodeid not in wanted or is_machine(item.cls)}
    if left_out := [item for item in items if item.nodeid not in wanted]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in wanted]
