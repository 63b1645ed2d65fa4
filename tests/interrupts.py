"""KeyboardInterrupt between any two lines of `kvcache/`, as Ctrl-C may strike there: counted, chosen, raised once."""

from __future__ import annotations

import dis
import gc
import sys
from pathlib import Path

import kvcache

NOP = dis.opmap["NOP"]
HOUSE = str(Path(kvcache.__file__).parent)


class Lines:
    """While entered, counts what runs in the Python files of `kvcache/`, and interrupts before the n-th.

    Args:
        stop: the count at which KeyboardInterrupt is raised; None: never.
        opcodes: count single instructions of the interpreter instead of lines.

    Attributes:
        count: lines that were reached.
        seen: where each stands, as (file, line), if `stop` is None.
        struck: where it was raised, as "file:line", or None.
    """

    def __init__(self, stop=None, opcodes=False):
        self.stop, self.event = stop, "opcode" if opcodes else "line"
        self.count, self.seen, self.struck = 0, [], None

    def __enter__(self):
        gc.collect()
        gc.disable()  # what dies, dies at the same count each time
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception):
        sys.settrace(self._before)
        gc.enable()

    def _call(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(HOUSE):
            return None
        frame.f_trace_opcodes = self.event == "opcode"
        return self._line

    def _line(self, frame, event, arg):
        # CPython takes it that nothing is raised at a NOP (a bare `try:`), and looks at no signal there: no handler
        # covers it, not even that of a `with`.
        if event != self.event or frame.f_code.co_code[frame.f_lasti] == NOP:
            return self._line
        self.count += 1
        if self.stop is None:
            self.seen.append((frame.f_code.co_filename, frame.f_lineno))
        elif self.count == self.stop:
            self.struck = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            raise KeyboardInterrupt
        return self._line


def places(seen, every):
    """Counts at which to interrupt: all, or of each line the first and the last time that it runs."""
    if every:
        return range(1, len(seen) + 1)
    first = {place: n for n, place in reversed(list(enumerate(seen, 1)))}
    last = {place: n for n, place in enumerate(seen, 1)}
    return sorted({*first.values(), *last.values()})
