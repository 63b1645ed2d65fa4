"""The memory of the machine, or of the container that this process runs in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvcache.support.arguments import as_bytes
from kvcache.support.mapped import physical_memory

__all__ = ["MachineMemory", "as_memory", "machine_memory", "size_text"]

_SHARE = re.compile(r"\s*([0-9]{1,2}(?:\.[0-9]{1,9})?|100)\s*%\s*")


class MachineMemory(NamedTuple):
    """Bytes of memory: all that this process could ever have, and those that are available now."""

    total: int
    available: int


def machine_memory(root: str = "/") -> MachineMemory:
    """The memory of the machine, or less if this process or a control group around it has a limit.

    Args:
        root: where /proc and /sys are.
    """
    total, available = physical_memory()
    with suppress(OSError, ValueError, IndexError):  # another system than Linux
        lines = Path(root, "proc/meminfo").read_text().splitlines()
        found = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
        total, available = found.get("MemTotal", total), found.get("MemAvailable", available)
    for limit, used in (*_limits(Path(root)), *_limit_of_addresses(Path(root))):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return MachineMemory(total, min(available, total))


def as_memory(value: Any, name: str) -> int:
    """As `as_bytes`; or a share, such as "50%", of the memory that is available now."""
    if isinstance(value, str) and (share := _SHARE.fullmatch(value)):
        return int(machine_memory().available * float(share[1]) / 100)
    return as_bytes(value, name)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """The limit of each control group around this process, and the bytes that it uses less files it may drop."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds == "":  # version 2
                base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
            elif "memory" in kinds.split(","):
                base = root / "sys/fs/cgroup/memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for count in range(len(parts), -1, -1):
                with suppress(OSError, ValueError):  # no limit: "max", or no such folder in a container
                    yield _limit(base.joinpath(*parts[:count]), *names)


def _limit(group: Path, limit: str, used: str, droppable: str) -> tuple[int, int]:
    most, now = int((group / limit).read_text()), int((group / used).read_text())
    rows = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    return most, now - next((int(row[1]) for row in rows if row[0] == droppable), 0)


def _limit_of_addresses(root: Path) -> Iterator[tuple[int, int]]:
    """The limit of the process for its address space, such as `ulimit -v` sets, and what it uses of that."""
    with suppress(ImportError, OSError, ValueError, IndexError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            yield soft, int((root / "proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def size_text(count: float) -> str:
    """A number of bytes for people, in GiB or, if it is less, in MiB."""
    gibibytes, mebibytes = count / 2**30, count / 2**20
    if gibibytes >= 1:
        return f"{gibibytes:,.2f} GiB"
    return f"{mebibytes:,.2f} MiB" if mebibytes >= 1 else f"{mebibytes:.2g} MiB"
