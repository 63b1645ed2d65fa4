"""How many CPUs this process may use: what the scheduler allows, and the quotas of its control groups."""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["available_cpus", "has_quota"]


def available_cpus(root: str = "/") -> int:
    """CPUs that the process may keep busy, at least 1: those it may run on, at most its quota, rounded up.

    Args:
        root: where /proc and /sys are.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([count, *(math.ceil(quota) for quota in _quotas(Path(root)))]))


def has_quota(root: str = "/") -> bool:
    """Whether a control group limits the time of CPUs, so that threads which spin spend it.

    Args:
        root: where /proc and /sys are.
    """
    return bool(_quotas(Path(root)))


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
