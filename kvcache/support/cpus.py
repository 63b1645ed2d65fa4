"""How many CPUs this process may use: the fast ones that the scheduler allows, and the quotas of its control groups."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from pathlib import Path

__all__ = ["available_cpus", "has_quota"]


def available_cpus(root: str = "/") -> int:
    """CPUs that the process may keep busy, at least 1: the fast ones that it may run on, at most its quota, rounded up.

    Slow cores are left out if the system tells them: macOS has performance cores, and Linux has a capacity for
    each CPU of a machine with several kinds. Those with more than half of the largest one count: all of a P+E
    processor, since a slower core takes fewer of the pieces of a call, but not the little cores of ARM's big.LITTLE,
    for which a call would wait.

    Args:
        root: where /proc and /sys are.
    """
    known = hasattr(os, "sched_getaffinity")
    fast = _fast_cpus(Path(root), os.sched_getaffinity(0)) if known else _fast_cpus_of_macos()
    return max(1, min([fast, *(math.ceil(quota) for quota in _quotas(Path(root)))]))


def has_quota(root: str = "/") -> bool:
    """Whether a control group limits the time of CPUs, so that threads which spin spend it.

    Args:
        root: where /proc and /sys are.
    """
    return bool(_quotas(Path(root)))


def _fast_cpus(root: Path, allowed: set[int]) -> int:
    """How many of the CPUs have more than half of the capacity of the best one; all if Linux tells none."""
    try:
        capacities = [int(_text(root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity")) for cpu in allowed]
    except ValueError:
        return len(allowed)
    return sum(2 * capacity > max(capacities) for capacity in capacities)


def _fast_cpus_of_macos() -> int:
    """The performance cores, or all of a machine with one kind."""
    count, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    if sys.platform == "darwin":
        ask = ctypes.CDLL(None).sysctlbyname
        if not ask(b"hw.perflevel0.logicalcpu", ctypes.byref(count), ctypes.byref(size), None, ctypes.c_size_t(0)):
            return count.value
    return os.cpu_count() or 1


def _quotas(root: Path) -> list[float]:
    """CPU time per time, of each control group that the process is in (cgroup v1 and v2) and has a limit."""
    quotas = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup"
        if controllers:  # version 1
            mount /= "cpu" if (mount / "cpu").is_dir() else controllers
        inner = Path(path.lstrip("/"))
        # A container may see its own group as the root of the mount, under a path that does not exist there.
        for group in (mount, *(mount / part for part in (inner, *inner.parents))):
            if controllers:
                limit, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
            else:
                limit, _, period = _text(group / "cpu.max").partition(" ")
            try:
                if int(limit) > 0 and int(period) > 0:
                    quotas.append(int(limit) / int(period))
            except ValueError:  # no such file, or "max": no limit
                continue
    return quotas


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
