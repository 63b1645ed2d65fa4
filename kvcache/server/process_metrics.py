"""Metrics of the process, under the names that exporters of Prometheus give them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["process_metrics"]

_PROC = Path("/proc")


def process_metrics() -> str:
    """CPU time, memory, open files and the start of this process; what the system does not tell is left out."""
    return "".join(
        f"# TYPE process_{name} {'counter' if name.endswith('_total') else 'gauge'}\nprocess_{name} {value}\n"
        for name, value in _found()
    )


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
