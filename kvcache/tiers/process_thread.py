"""`ProcessThread`: a thread that a process begins when it first needs it, as a forked process does again."""

from __future__ import annotations

import os
from _thread import get_ident, start_new_thread
from collections.abc import Callable

__all__ = ["ProcessThread"]


class ProcessThread:
    """At most one thread in each process: a forked process has none of its parent's threads."""

    def __init__(self) -> None:
        self._threads: dict[int, int] = {}  # by process; of threads that begin at once, the first one

    def begin(self, run: Callable[[], None]) -> bool:
        """Run a function in the thread of this process; False: it has one. RuntimeError: the system has none left."""
        if os.getpid() in self._threads:
            return False
        start_new_thread(self._run, (run,))
        return True

    def _run(self, run: Callable[[], None]) -> None:
        if self._threads.setdefault(os.getpid(), get_ident()) == get_ident():
            run()
