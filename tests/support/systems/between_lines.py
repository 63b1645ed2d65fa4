"""A signal before each line, or each instruction, of `kvcache/`: where a signal handler could run."""

import signal
import sys
from pathlib import Path

from subjects.interrupts import INSTRUCTIONS, SENDER

import kvcache

PACKAGE = str(Path(kvcache.__file__).parent)


class Between:
    """While entered, a signal is sent before each line (instruction) of `kvcache/`, whose handler runs `action`.

    Args:
        action: `action()`.
        stop: send it before the n-th alone; 0: count.
    """

    def __init__(self, action, opcodes=False, stop=None):
        self.action, self.count, self.stop, self.busy = action, 0, stop, False
        self.event = "opcode" if opcodes and INSTRUCTIONS else "line"

    def __enter__(self):
        self.before = signal.signal(signal.SIGINT, self._handle)
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception):
        sys.settrace(None)  # a signal that was sent is handled by now
        signal.signal(signal.SIGINT, self.before)

    def _handle(self, *_):
        if not self.busy:
            self.busy = True
            try:
                self.action()
            finally:
                self.busy = False
                sys.settrace(self._call)

    def _call(self, frame, event, arg):
        if self.busy or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = self.event == "opcode"
        return self._line

    def _line(self, frame, event, arg):
        if event == self.event and not self.busy:
            self.count += 1
            if self.stop in (None, self.count):
                sys.settrace(None)  # until it is handled: the next trace function would handle it
                SENDER.send  # noqa: B018
        return self._line
