"""Metrics of the process, under the names that exporters of Prometheus give them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvcache.serving.prometheus import head

__all__ = ["process_metrics"]

_PROC = Path("/proc")
_HELP = {
    "cpu_seconds_total": "CPU time of the process, its own and the system's.",
    "max_fds": "Files and connections that it may have open.",
    "open_fds": "Files and connections that are open.",
    "virtual_memory_bytes": "Addresses that it has taken, with memory or without.",
    "resident_memory_bytes": "Memory that it has.",
    "start_time_seconds": "When it began, in seconds since 1970.",
}


def process_metrics() -> str:
    """CPU time, memory, open files and the start of this process; what the system does not tell is left out."""
    lines: list[str] = []
    for name, value in _found():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [*head(f"process_{name}", kind, _HELP[name]), f"process_{name} {value}"]
    return "\n".join([*lines, ""])


def _found() -> Iterator[tuple[str, float]]:
    times = os.times()
    yield "cpu_seconds_total", round(times.user + times.system, 2)
    with suppress(ImportError):  # Windows has no such limit
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            yield "max_fds", soft
    with suppress(OSError, ValueError, IndexError):  # another system than Linux
        yield "open_fds", len(list((_PROC / "self/fd").iterdir())) - 1  # less the one of this list
        # The fields behind the name of the program, which may have spaces: the first one is the third.
        fields = (_PROC / "self/stat").read_text().rpartition(") ")[2].split()
        page, tick = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
        yield "virtual_memory_bytes", int(fields[20])
        yield "resident_memory_bytes", int(fields[21]) * page
        booted = next(line for line in (_PROC / "stat").read_text().splitlines() if line.startswith("btime "))
        yield "start_time_seconds", round(int(booted.split()[1]) + int(fields[19]) / tick, 2)
