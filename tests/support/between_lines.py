"""An action before each line, or each instruction, of `kvcache/`: where a signal handler could run."""

import sys
from pathlib import Path

from interrupts import INSTRUCTIONS, quiet

import kvcache

HOUSE = str(Path(kvcache.__file__).parent)


class Between:
    """While entered, runs `action(n)` before the n-th line (instruction) of `kvcache/`, where a handler could run."""

    def __init__(self, action, opcodes=False):
        self.action, self.count = action, 0
        self.event = "opcode" if opcodes and INSTRUCTIONS else "line"

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception):
        sys.settrace(None)

    def _call(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(HOUSE):
            return None
        frame.f_trace_opcodes = self.event == "opcode"
        return self._line

    def _line(self, frame, event, arg):
        if event == self.event and frame.f_lasti not in quiet(frame.f_code):
            self.count += 1
            self.action(self.count)
        return self._line
