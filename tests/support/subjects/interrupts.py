"""Ctrl-C at any place of `kvcache/` where Python looks at signals: counted, chosen, and sent as a real signal."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kvcache

PACKAGE = str(Path(kvcache.__file__).parent)
INSTRUCTIONS = sys.version_info < (3, 12)  # whether a trace function is shown all of them
# Python 3.10 looks at signals between an exception and the handler that it jumps to: one that arrives just then skips
# the `__exit__` of a `with`, that of `threading.Lock` too.
SKIPS_HANDLERS = sys.version_info < (3, 11)


class SignalSender:
    """Reading `SENDER.send` sends SIGINT to this thread.

    It is an attribute because a trace function that called something would handle the signal itself: Python checks for
    signals after a call, and not after it has read an attribute. So the traced code handles the signal, at the next
    place where it would handle any other one.
    """

    _as_parameter_ = int(signal.SIGINT)
    send = property((ctypes.CDLL(None) if os.name == "posix" else ctypes.CDLL("ucrtbase"))["raise"])


SENDER = SignalSender()


class Lines:
    """While entered, counts what runs in the Python files of `kvcache/`, and sends SIGINT before the n-th.

    Args:
        stop: the count at which it is sent; None: never.
        opcodes: count single instructions of the interpreter instead of lines; from Python 3.12 on, which passes over
            most of them, lines all the same.
        package: count lines of files whose paths begin with this, or with one of these.
        again: the count at which it is sent once more, to interrupt what runs after the first.

    Attributes:
        count: lines that were reached.
        seen: (file, line) of each, if `stop` is None.
        handled_at: "file:line" where the signal was handled, or None.
    """

    def __init__(self, stop=None, opcodes=False, package=PACKAGE, again=None):
        self.again = again
        self.stop, self.package = stop, package
        self.event = "opcode" if opcodes and INSTRUCTIONS else "line"
        self.count, self.seen, self.handled_at, self._late = 0, [], None, False

    def __enter__(self):
        gc.collect()
        gc.disable()  # so that objects are deallocated at the same count each time
        self._before = sys.gettrace(), signal.signal(signal.SIGINT, self._handle)
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception):
        sys.settrace(self._before[0])  # a signal that was sent is handled by now
        signal.signal(signal.SIGINT, self._before[1])
        gc.enable()
        if self._late and exception[0] is None:
            raise KeyboardInterrupt

    def _handle(self, _, frame):
        self.handled_at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        if self.again is not None and self.count < self.again:
            sys.settrace(self._call)
        self._late = frame.f_code is Lines.__exit__.__code__
        if not self._late:
            raise KeyboardInterrupt

    def _call(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(self.package):
            return None
        frame.f_trace_opcodes = self.event == "opcode"
        return self._line

    def _line(self, frame, event, arg):
        if event != self.event:
            return self._line
        self.count += 1
        if self.stop is None:
            self.seen.append((frame.f_code.co_filename, frame.f_lineno))
        elif self.count in (self.stop, self.again):
            sys.settrace(None)  # until it is handled: the next trace function would handle it
            SENDER.send  # noqa: B018
        return self._line


def first_and_last(seen):
    """Two dicts: the count at which each place is seen first, and last."""
    first = {place: n for n, place in reversed(list(enumerate(seen, 1)))}
    return first, {place: n for n, place in enumerate(seen, 1)}


def places(seen, every):
    """Counts at which to interrupt: all, or of each line the first and the last time that it runs."""
    if every:
        return range(1, len(seen) + 1)
    first, last = first_and_last(seen)
    return sorted({*first.values(), *last.values()})


def spread(chosen, most):
    """At most about `most` of them, evenly, the last one among them."""
    return chosen[:: -max(1, -(-len(chosen) // most))]


def interrupt_everywhere(subject, name, most=None, opcodes=False, twice=False):
    """Interrupt an operation of a subject (subject.py) at many places, each time in a fresh one.

    Afterwards the operation has happened as a whole or not at all; if not, the next call does it.

    Args:
        most: places to try; None: every one, every time that it is reached.
        opcodes: as of `Lines`.
        twice: interrupt once more soon after.

    Returns:
        `(places, problems)`: how many interrupts handled_at, and what was wrong.
    """
    getattr(subject(), name)()  # the first time some modules load
    clean = subject()
    clean._state()  # as below, where it is asked for first
    with Lines(None, opcodes) as lines:
        getattr(clean, name)()
    clean._check()
    after = clean._kept(clean._state())
    evicts = subject.evicts and "evict" in name  # what was evicted to make room stays evicted
    chosen = list(places(lines.seen, every=True)) if most is None else spread(places(lines.seen, every=False), most)
    problems = []
    with ThreadPoolExecutor(1) as other:  # its calls return only if every lock was released
        for stop in chosen:
            here = subject()
            before = here._kept(here._state())
            lines = Lines(stop, opcodes, again=stop + 1 + stop % 17 if twice else None)
            try:
                _interrupted(here, name, lines)
                assert lines.handled_at, "the run was another one"
                gc.collect()
                other.submit(here._check).result(600)
                found = here._kept(here._state())
                assert evicts or found in (before, after), "half of it was done"
                if evicts or found == before:
                    getattr(here, name)()
                    other.submit(here._check).result(600)
                    assert evicts or here._kept(here._state()) == after, "the second call did something else"
            except Exception:
                where = f"{lines.handled_at} ({stop} of {lines.count})"
                problems.append(f"{subject.__name__}.{name} at {where}: {traceback.format_exc(limit=-3)}")
    return len(chosen), problems


def _interrupted(subject, name, lines):
    try:
        with lines:
            getattr(subject, name)()
    except KeyboardInterrupt:
        assert lines.handled_at
