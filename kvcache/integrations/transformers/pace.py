"""Threads of torch and of kvcache in one process: as many of both, and none that spins on a core the other needs."""

from __future__ import annotations

import os
import sys
import warnings

from kvcache.integrations.transformers.hf import IMPORTED_LATE, torch
from kvcache.kernels.threads import get_num_threads, set_num_threads
from kvcache.support.cpus import available_cpus

__all__ = ["advise", "take_number"]

_said: set[str] = set()


def take_number() -> None:
    """Give kvcache as many threads as torch has, unless someone has chosen a number."""
    if "KVCACHE_NUM_THREADS" not in os.environ and get_num_threads() == available_cpus():
        set_num_threads(torch.get_num_threads())


def advise() -> None:
    """Warn, once in the process, of what makes steps several times as long."""
    mine, other = get_num_threads(), torch.get_num_threads()
    if mine != other:
        _say(
            f"kvcache: attention uses {mine} threads and torch {other}; "
            "kvcache.set_num_threads(torch.get_num_threads()) gives both the same number"
        )
    if IMPORTED_LATE and other > 1 and sys.platform == "linux":
        _say(
            "kvcache: torch was imported before kvcache.integrations.transformers, so its threads spin on the cores "
            "that attention needs; import this first, or set OMP_WAIT_POLICY=PASSIVE in the environment of the process"
        )


def _say(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=5)
