"""Nodes of memory: which the CPUs of a process lie on, and one warning if they are several."""

import warnings

import pytest

from kvcache import InferenceEngine
from kvcache.support import memory_nodes
from kvcache.support.memory_nodes import nodes_of_cpus, warn_of_nodes

pytestmark = pytest.mark.one_build


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes a machine of nodes with these CPUs, on which the process may use some."""

    def make(allowed, cpus):
        monkeypatch.setattr("os.sched_getaffinity", lambda _: allowed, raising=False)
        for node, text in cpus.items():
            folder = tmp_path / "sys/devices/system/node" / node
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(text + "\n")
        return str(tmp_path)

    return make


@pytest.mark.parametrize(
    ("allowed", "cpus", "expected"),
    [
        ({0, 1}, {}, []),
        ({0, 1}, {"node0": "0-1"}, [0]),
        ({0, 1, 2, 3}, {"node0": "0-1", "node1": "2-3"}, [0, 1]),
        ({2, 3}, {"node0": "0-1", "node1": "2-3"}, [1]),
        ({0, 9}, {"node0": "0-3,8-11", "node1": "4-7,12-15"}, [0]),
        ({0, 13}, {"node0": "0-3,8-11", "node1": "4-7,12-15"}, [0, 1]),
        (set(range(48)), {"node10": "32-47", "node2": "16-31", "node0": "0-15"}, [0, 2, 10]),
        ({0, 1}, {"node0": "0-1", "node1": ""}, [0]),  # memory without CPUs
        ({0, 1}, {"node0": "0-1", "node1": "nonsense", "node1x": "0"}, [0]),
    ],
)
def test_nodes_of_cpus(machine, allowed, cpus, expected):
    assert nodes_of_cpus(machine(allowed, cpus)) == expected


def test_one_warning_of_several_nodes(machine):
    root = machine({0, 1, 2, 3}, {"node0": "0-1", "node1": "2-3"})
    warn_of_nodes.cache_clear()
    with pytest.warns(UserWarning, match=r"^the CPUs of this process lie on 2 nodes of memory, 0, 1: .*--membind=0"):
        warn_of_nodes(root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_nodes(root)  # once


def test_one_node_is_no_matter(machine):
    warn_of_nodes.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_nodes(machine({2, 3}, {"node0": "0-1", "node1": "2-3"}))


def test_an_engine_warns_where_it_is_made(machine, network, monkeypatch):
    root = machine({0, 1}, {"node0": "0", "node1": "1"})
    monkeypatch.setattr("kvcache.texts.settings.warn_of_nodes", lambda: memory_nodes.warn_of_nodes(root))
    warn_of_nodes.cache_clear()
    with pytest.warns(UserWarning, match="2 nodes of memory"):
        InferenceEngine(network, num_blocks=4)
