"""The nodes of memory (NUMA) near the CPUs that this process may use, as Linux tells them."""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path

__all__ = ["nodes_of_cpus", "warn_of_nodes"]


def nodes_of_cpus(root: str = "/") -> list[int]:
    """The nodes that have CPUs which this process may use, in order; none if the system does not tell.

    Args:
        root: where /sys is.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    nodes = []
    for path in Path(root, "sys/devices/system/node").glob("node[0-9]*/cpulist"):
        try:
            cpus = _numbers(path.read_text(encoding="ascii"))
            node = int(path.parent.name.removeprefix("node"))
        except (OSError, ValueError):
            continue
        if allowed & cpus:
            nodes.append(node)
    return sorted(nodes)


def _numbers(text: str) -> set[int]:
    """The numbers of a list such as "0-3,8"."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


@cache
def warn_of_nodes(root: str = "/") -> None:
    """Warn, once in a process, if its threads may run on CPUs of several nodes."""
    nodes = nodes_of_cpus(root)
    if len(nodes) > 1:
        warnings.warn(
            f"the CPUs of this process lie on {len(nodes)} nodes of memory, {', '.join(map(str, nodes))}: each reads a "
            f"part of the weights from another node. An engine on each node is faster: numactl "
            f"--cpunodebind={nodes[0]} --membind={nodes[0]}; kvcache/guides/nodes.md has more",
            stacklevel=4,
        )
