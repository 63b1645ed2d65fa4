"""Calls from inside of calls: what `test_reentrancy.py` runs in a process of its own.

A world (worlds_*.py) is an object, or several that share locks, with every public call on them. Each call is disturbed
by other calls of the same world:

    arguments   objects that call when they are converted, hashed or compared; networks, `share` and `reclaim` that call
    lines       a call between any two lines of `kvcache/`, where a signal handler could run
    raising     an exception there: a TimeoutError, or what the inner call raises
    collector   calls by finalisers and weakref callbacks, with a collection at nearly every allocation
    signals     calls by the handler of a real timer, thousands of times
    timeouts    the same with handlers whose errors leave the handler

Whatever happens, a call ends in its result, in an error of the documented kinds or in the error of the handler;
releases are never refused; all objects pass `check()`, hold what was written to them, and nothing is leaked.

    python tests/support/reentry.py MODULE.WORLD ROUNDS SECONDS
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

from between_lines import Between
from calling_arguments import Via
from collecting import Collecting
from interrupts import spread
from world import DOCUMENTED, Disturbance, HandlerError


class Run:
    """All ways, over one kind of world.

    Args:
        make: `make(seed)` gives a world.
        rounds: how much of each.
    """

    def __init__(self, make, rounds):
        self.make, self.rounds = make, rounds
        self.world = make(0)
        self.names, self.pure = self.world.names(), self.world.pure_names()
        self.calls = self.inner = self.refused = 0
        self.problems = []

    def _end(self, world, what, finish=True):
        """No call is at work any more."""
        sys.settrace(None)
        world.via.action = None
        try:
            world._settled()
            world._verify()
            if finish:
                world._finish()
            assert not world.problems, "\n".join(world.problems[:3])
        except Exception:
            self.problems.append(f"{what}: {traceback.format_exc()}")
        self.calls += 1
        self.inner, self.refused = self.inner + world.inner_calls, self.refused + world.refused
        world.inner_calls = world.refused = 0
        world.problems.clear()

    def _outer(self, world, name, via, what):
        try:
            return world._call(name, via)
        except Exception:
            sys.settrace(None)
            self.problems.append(f"{what}: {traceback.format_exc()}")
            return None

    def twins(self):
        """What each call gives when nothing disturbs it."""
        results = {}
        for name in self.names:
            world = self.make(1)
            results[name] = world._call(name, Via())
            self._end(world, f"{name} alone")
        return results

    def arguments(self, every):
        """Every call inside of the conversions of every other one; or of some."""
        for outer in self.names:
            some = (
                self.names if every else random.Random(outer).sample(self.names, min(3 * self.rounds, len(self.names)))
            )
            for inner in some:
                world = self.make(1)
                via = world.via if world.via.action else Via()
                via.action = lambda world=world, inner=inner: world._inner(inner)
                world.via.action = via.action
                self._outer(world, outer, via, f"{outer}({inner})")
                via.action = None
                self._end(world, f"{inner} inside of an argument of {outer}")

    def unchanged(self, twins):
        """Calls that change nothing, inside, at every line: the outer one gives what it gives alone."""
        for outer in self.names:
            world = self.make(1)
            inner = Disturbance(world, self.pure, outer)
            world.via.action = inner
            with Between(inner):
                result = self._outer(world, outer, Via(inner), outer)
            world.via.action = None
            if result != twins[outer]:
                self.problems.append(f"{outer} gave {str(result)[:300]}, alone {str(twins[outer])[:300]}")
            self._end(world, f"what changes nothing inside of {outer}")

    def lines(self):
        """Any call at every line."""
        for number in range(self.rounds):
            for outer in self.names:
                world = self.make(number)
                inner = Disturbance(world, self.names, (outer, number).__repr__())
                world.via.action = inner
                with Between(inner):
                    self._outer(world, outer, Via(), f"{outer} between lines")
                self._end(world, f"calls between the lines of {outer} ({number})")

    def raising(self):
        """An exception at many places."""
        for outer in self.names:
            world = self.make(1)
            with Between(None, opcodes=True, stop=0) as between:
                world._call(outer, Via())
            for stop in spread(range(1, between.count + 1), 4 * self.rounds):
                world = self.make(1)
                inner = random.Random(f"{outer} {stop}").choice(self.names)

                def strike(stop=stop, world=world, inner=inner):
                    if stop % 2:
                        world._loud(inner)
                    raise HandlerError

                try:
                    with Between(strike, opcodes=True, stop=stop):
                        world._call(outer, Via())
                except HandlerError:
                    pass
                except Exception:
                    self.problems.append(f"{outer}, struck at {stop}: {traceback.format_exc()}")
                self._end(world, f"{outer}, struck at {stop} of {between.count}")

    def collector(self):
        for number in range(self.rounds):
            for outer in self.names:
                world = self.make(number)
                inner = Disturbance(world, self.names, f"{outer} {number}")
                with Collecting(inner):
                    self._outer(world, outer, Via(), f"{outer} under the collector")
                self._end(world, f"{outer} under the collector ({number})")

    def signals(self, seconds, timeouts):
        """A timer whose handler calls; with `timeouts` its errors, and errors of its own, leave it."""
        number, world, inner, depth, armed, handled = 0, None, None, 0, False, 0

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
                    world._loud(inner.random.choice(self.names))
                else:
                    inner()
            finally:
                depth -= 1

        signal.signal(signal.SIGALRM, handler)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            number += 1
            world, deadline = self.make(number), time.monotonic() + 0.15
            world.via.action = inner = Disturbance(world, self.names, number)
            signal.setitimer(signal.ITIMER_REAL, 2e-5, 7e-5 * world.slow)
            what = ""
            while time.monotonic() < deadline and len(self.problems) < 20:
                what = inner.random.choice(self.names)
                try:
                    armed = timeouts
                    try:
                        world._call(what, Via())
                    finally:
                        armed = False
                except (HandlerError, *DOCUMENTED):
                    armed = False
                except Exception as error:
                    armed = False
                    if not hasattr(error, "handlers"):
                        self.problems.append(f"{what} under signals: {traceback.format_exc()}")
                self.calls += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            inner = None
            self._end(world, f"signals, world {number}, {what} last")
        return handled


def main(world, rounds, seconds, path):
    logging.disable()
    rounds, seconds = int(rounds), float(seconds)
    faulthandler.dump_traceback_later(120 + 40 * seconds * 30 + 30 * rounds, exit=True)
    module, name = world.split(".")
    kind = getattr(importlib.import_module(module), name)
    gc.freeze()  # gc.collect() then looks at what a world makes, not at all of NumPy
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
