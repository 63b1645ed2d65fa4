"""Calls from inside of calls: what `test_reentrancy.py` runs in a process of its own.

A system (systems/) is an object, or several that share locks, with every public call on them. Each call is
interrupted by other calls of the same system:

    arguments   objects that call when they are converted, hashed or compared; networks, `share` and `reclaim` that call
    lines       a call between any two lines of `kvcache/`, where a signal handler could run
    raising     an exception there: a TimeoutError, or what the inner call raises
    collector   calls by finalisers and weakref callbacks, with a collection at nearly every allocation
    signals     calls by the handler of a real timer, thousands of times
    timeouts    the same with handlers whose errors leave the handler

Every call returns its result, raises an error of the documented kinds, or raises the error of the handler. Releases are
never refused; all objects pass `check()`, hold what was written to them, and nothing is leaked.

    python -m systems.reentry MODULE.SYSTEM ROUNDS SECONDS
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import random
import signal
import sys
import time
import traceback
from pathlib import Path

from subjects.interrupts import SKIPS_HANDLERS, spread
from systems.between_lines import Between
from systems.calling_arguments import ArgumentWrapper
from systems.collecting import Collecting
from systems.system import DOCUMENTED, HandlerError, InnerCalls


class Run:
    """Runs every kind of interruption over one kind of system.

    Args:
        make: `make(seed)` gives a system.
        rounds: how much of each; less than 1 for builds that run slowly.
    """

    def __init__(self, make, rounds):
        self.make, self.rounds = make, rounds
        self.system = make(0)
        self.names, self.pure = self.system.names(), self.system.pure_names()
        self.calls = self.inner = self.refused = 0
        self.problems = []

    def _end(self, system, what, finish=True):
        """Verify the system after its last call."""
        sys.settrace(None)
        system.wrap.action = None
        try:
            system._settled()
            system._verify()
            if finish:
                system._finish()
            assert not system.problems, "\n".join(system.problems[:3])
        except Exception:
            self.problems.append(f"{what}: {traceback.format_exc()}")
        self.calls += 1
        self.inner, self.refused = self.inner + system.inner_calls, self.refused + system.refused
        system.inner_calls = system.refused = 0
        system.problems.clear()

    def _outer(self, system, name, wrap, what):
        try:
            return system._call(name, wrap)
        except Exception:
            sys.settrace(None)
            self.problems.append(f"{what}: {traceback.format_exc()}")
            return None

    def twins(self):
        """The result of each call without an interruption."""
        results = {}
        for name in self.names:
            system = self.make(1)
            results[name] = system._call(name, ArgumentWrapper())
            self._end(system, f"{name} alone")
        return results

    def arguments(self, every):
        """Every call inside of the argument conversions of every other one, or of some."""
        for outer in self.names:
            most = len(self.names) if every else min(max(1, int(3 * self.rounds)), len(self.names))
            some = random.Random(outer).sample(self.names, most)
            for inner in some:
                system = self.make(1)
                wrap = system.wrap if system.wrap.action else ArgumentWrapper()
                wrap.action = lambda system=system, inner=inner: system._inner(inner)
                system.wrap.action = wrap.action
                self._outer(system, outer, wrap, f"{outer}({inner})")
                wrap.action = None
                self._end(system, f"{inner} inside of an argument of {outer}")

    def unchanged(self, twins):
        """Calls that change nothing, at every line of another one, whose result stays the same."""
        for outer in self.names[:: 1 if self.rounds >= 1 else 2]:
            system = self.make(1)
            inner = InnerCalls(system, self.pure, outer)
            system.wrap.action = inner
            with Between(inner):
                result = self._outer(system, outer, ArgumentWrapper(inner), outer)
            system.wrap.action = None
            if result != twins[outer]:
                self.problems.append(f"{outer} gave {str(result)[:300]}, alone {str(twins[outer])[:300]}")
            self._end(system, f"what changes nothing inside of {outer}")

    def lines(self):
        """Any call at every line."""
        for number in range(max(1, int(self.rounds))):
            for outer in self.names if self.rounds >= 1 else self.names[1::2]:
                system = self.make(number)
                inner = InnerCalls(system, self.names, (outer, number).__repr__())
                system.wrap.action = inner
                with Between(inner):
                    self._outer(system, outer, ArgumentWrapper(), f"{outer} between lines")
                self._end(system, f"calls between the lines of {outer} ({number})")

    def raising(self):
        """An exception at many places."""
        for outer in self.names:
            system = self.make(1)
            with Between(None, opcodes=True, stop=0) as between:
                system._call(outer, ArgumentWrapper())
            for stop in spread(range(1, between.count + 1), int(4 * self.rounds)):
                system = self.make(1)
                inner = random.Random(f"{outer} {stop}").choice(self.names)

                def interrupt(stop=stop, system=system, inner=inner):
                    if stop % 2:
                        system._call_that_may_raise(inner)
                    raise HandlerError

                try:
                    with Between(interrupt, opcodes=True, stop=stop):
                        system._call(outer, ArgumentWrapper())
                except HandlerError:
                    pass
                except Exception as error:  # one of a call inside leaves too, where the handler runs after the call
                    if not hasattr(error, "handlers"):
                        self.problems.append(f"{outer}, interrupted at {stop}: {traceback.format_exc()}")
                self._end(system, f"{outer}, interrupted at {stop} of {between.count}")

    def collector(self):
        for number in range(max(1, int(self.rounds))):
            for outer in self.names:
                system = self.make(number)
                inner = InnerCalls(system, self.names, f"{outer} {number}")
                with Collecting(inner, every=1 if self.rounds > 1 else 2 if self.rounds == 1 else 3):
                    self._outer(system, outer, ArgumentWrapper(), f"{outer} under the collector")
                self._end(system, f"{outer} under the collector ({number})")

    def signals(self, seconds, timeouts):
        """A timer whose handler calls; with `timeouts` its errors, and errors of its own, leave it."""
        number, system, inner, depth, handled = 0, None, None, 0, 0
        armed = calling = False  # whether an error may leave the handler: one of its own, one that a request has kept

        def handler(*_):
            nonlocal depth, armed, handled
            if depth > 1 or inner is None:
                return
            depth += 1
            try:
                handled += 1
                if armed and depth == 1 and inner.random.random() < 0.3:
                    armed = False
                    if inner.random.random() < 0.5:
                        raise HandlerError
                    system._call_that_may_raise(inner.random.choice(self.names))
                else:
                    inner()
            except (HandlerError, *DOCUMENTED):
                if calling:
                    raise
            finally:
                depth -= 1

        signal.signal(signal.SIGALRM, handler)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            number += 1
            system, deadline = self.make(number), time.monotonic() + 0.15
            system.wrap.action = inner = InnerCalls(system, self.names, number)
            signal.setitimer(signal.ITIMER_REAL, 2e-5, 7e-5 * system.slow)
            what = ""
            while time.monotonic() < deadline and len(self.problems) < 20:
                what = inner.random.choice(self.names)
                try:
                    armed, calling = timeouts, True
                    try:
                        system._call(what, ArgumentWrapper())
                    finally:
                        armed = calling = False
                except (HandlerError, *DOCUMENTED):
                    armed = calling = False
                except Exception as error:
                    armed = calling = False
                    if not hasattr(error, "handlers"):
                        self.problems.append(f"{what} under signals: {traceback.format_exc()}")
                self.calls += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            inner = None
            self._end(system, f"signals, system {number}, {what} last")
        return handled


def main(system, rounds, seconds, path):
    logging.disable()
    rounds, seconds = float(rounds), float(seconds)
    faulthandler.dump_traceback_later(150 + 40 * seconds * 30 + 30 * rounds, exit=True)
    module, _, name = system.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    gc.freeze()  # gc.collect() then looks at what a system makes, not at all of NumPy
    run = Run(lambda seed: kind(seed, Path(path)), rounds)

    def unraisable(what):
        error = what.exc_value
        while error is not None and not isinstance(error, HandlerError) and not hasattr(error, "handlers"):
            error = error.__context__
        if error is None:  # not a handler's
            text = "".join(traceback.format_exception(what.exc_type, what.exc_value, what.exc_traceback))
            run.problems.append(f"what could not be raised: {text}")

    sys.unraisablehook = unraisable
    marks = []

    def mark(what, handled=""):
        marks.append(
            f"{what} {run.calls} calls with {run.inner} inside, {run.refused} refused {handled} {len(run.problems)}"
        )
        print(f"{time.perf_counter() - start:.1f} s: {marks[-1]}", flush=True)

    start = time.perf_counter()
    twins = run.twins()
    run.unchanged(twins)
    mark("unchanged")
    run.arguments(every=rounds > 10)
    mark("arguments")
    run.lines()
    mark("lines")
    run.raising()
    mark("raising")
    run.collector()
    mark("collector")
    handled = run.signals(seconds, False)
    mark("signals", handled)
    if not SKIPS_HANDLERS:  # a call inside may fail at any time, and the handler's error then leave its `with`
        handled += run.signals(seconds, True)
        mark("timeouts", handled)
    for problem in run.problems[:12]:
        print(problem[-3000:])
    print(
        f"{name}: {run.calls} calls, {run.inner} inside, {run.refused} refused, {handled} handlers, "
        f"{len(run.problems)} problems"
    )
    return bool(run.problems)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
