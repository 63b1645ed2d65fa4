"""The memory of the machine, of control groups and of the process, and sizes in the words of people."""

import pytest

from kvcache import BatchEngine
from kvcache.demo import DIRECTORY
from kvcache.support import machine_memory as room
from kvcache.support.machine_memory import MachineMemory, as_memory, machine_memory, size_text

pytestmark = pytest.mark.one_build


@pytest.fixture
def machine(tmp_path):
    """Makes a machine with 1,000 KiB, of which 800 are available, and these further files."""

    def make(**files):
        found = {"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n", **files}
        for name, text in found.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return str(tmp_path)

    return make


def group(limit, used, droppable, names=("memory.max", "memory.current", "inactive_file")):
    return {names[0]: f"{limit}\n", names[1]: f"{used}\n", "memory.stat": f"anon 1\n{names[2]} {droppable}\n"}


def test_without_a_control_group(machine):
    assert machine_memory(machine()) == (1000 << 10, 800 << 10)


def test_the_smallest_limit_of_the_groups_around_the_process_counts(machine):
    old = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for own, folder, names in (
        ("0::/a/b\n", "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")),
        ("3:cpu:/\n4:memory:/a/b\n0::/\n", "sys/fs/cgroup/memory", old),
    ):
        groups = {
            f"{folder}/a": group(600 << 10, 500 << 10, 100 << 10, names),
            f"{folder}/a/b": group("max" if names is not old else 1 << 62, 10, 0, names),
        }
        files = {f"{path}/{name}": text for path, found in groups.items() for name, text in found.items()}
        root = machine(**{"proc/self/cgroup": own, **files})
        assert machine_memory(root) == (600 << 10, 200 << 10), own


def test_a_limit_of_addresses(machine, monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr("resource.getrlimit", lambda kind: (900 << 10, resource.RLIM_INFINITY))
    monkeypatch.setattr("os.sysconf", lambda name: 4096)
    assert machine_memory(machine(**{"proc/self/statm": "100 1 1\n"})) == (900 << 10, 500 << 10)


def test_a_share_is_of_what_is_available(monkeypatch):
    """It is taken once, when the engine is made."""
    calls = []

    def told():
        calls.append(1)
        return MachineMemory(1 << 40, 8 << 20)

    monkeypatch.setattr(room, "machine_memory", told)
    assert (as_memory("50%", "m"), as_memory(" 12.5 % ", "m"), as_memory("4MiB", "m")) == (4 << 20, 1 << 20, 4 << 20)
    calls.clear()
    engine = BatchEngine.from_pretrained(DIRECTORY, max_memory_bytes="50%", num_blocks=1 << 20)
    assert 0.9 * (4 << 20) < engine.memory()["kv"] <= 4 << 20
    assert engine.max_prompt == engine.total_tokens < engine.max_positions
    assert len(calls) == 1


def test_sizes():
    assert [size_text(count) for count in (0, 2000, 1 << 20, 1 << 30, 3 << 40)] == [
        "0 MiB", "0.0019 MiB", "1.00 MiB", "1.00 GiB", "3,072.00 GiB"
    ]
