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

    python tests/support/reentry.py WORLD ROUNDS SECONDS
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
import weakref
from pathlib import Path

import numpy as np
from interrupts import INSTRUCTIONS, WIRE, spread
from scene import plain

import kvcache
from kvcache import InvalidOperationError, KvCacheError
from kvcache.core.locks import CallLock

HOUSE = str(Path(kvcache.__file__).parent)
DOCUMENTED = (KvCacheError, TypeError, ValueError, IndexError)


def refusal():
    """What a lock says to the thread that is inside."""
    lock = CallLock()
    with lock:
        try:
            lock.__enter__()
        except InvalidOperationError as error:
            return str(error)
    raise AssertionError("a lock was taken twice")


REFUSED = refusal()


class HandlerError(TimeoutError):
    """What a handler raises."""


# -- arguments -----------------------------------------------------------------------------------------------


class Array:
    def __init__(self, via, x):
        self.via, self.x = via, x

    def __array__(self, dtype=None, copy=None):
        self.via.run()
        return np.asarray(self.x, dtype)

    def __len__(self):
        self.via.run()
        return len(self.x)

    def __getitem__(self, i):
        self.via.run()
        return self.x[i]


class Items(list):
    """Rows per layer, blocks, tokens: a list that calls when it is asked for its length or its items."""

    def __init__(self, via, x):
        super().__init__(x)
        self.via = via

    def __len__(self):
        self.via.run()
        return super().__len__()

    def __getitem__(self, i):
        self.via.run()
        return super().__getitem__(i)

    def __iter__(self):
        self.via.run()
        return super().__iter__()


class Integer(int):
    def __new__(cls, via, x):
        self = super().__new__(cls, x)
        self.via = via
        return self

    def __int__(self):
        self.via.run()
        return int.__int__(self)

    __index__ = __int__

    def __le__(self, other):
        self.via.run()
        return int.__le__(self, other)

    def __lt__(self, other):
        self.via.run()
        return int.__lt__(self, other)

    def __ge__(self, other):
        self.via.run()
        return int.__ge__(self, other)


class Index:
    def __init__(self, via, x):
        self.via, self.x = via, x

    def __index__(self):
        self.via.run()
        return int(self.x)


class Number(Index):
    def __float__(self):
        self.via.run()
        return float(self.x)

    __index__ = None


class Name(Index):
    """A namespace: equal to its value, as a key too."""

    def __hash__(self):
        self.via.run()
        return hash(self.x)

    def __eq__(self, other):
        self.via.run()
        return self.x == (other.x if isinstance(other, Name) else other)

    __index__ = None


class Via:
    """What arguments pass through: they stay as they are, or run `action` whenever they are looked at."""

    def __init__(self, action=None):
        self.action, self.count, self.inside = action, 0, False

    def run(self):
        if self.action is not None and not self.inside:
            self.count += 1
            self.inside = True
            try:
                self.action()
            finally:
                self.inside = False

    def _wrap(self, kind, x):
        return x if self.action is None else kind(self, x)

    def array(self, x):
        return self._wrap(Array, x)

    def items(self, x):
        return self._wrap(Items, x)

    def integer(self, x):
        return self._wrap(Integer, x)

    def number(self, x):
        return self._wrap(Number, x)

    def name(self, x):
        return self._wrap(Name, x)

    def tokens(self, x):
        """Half of the time an array, half of the time a list of items that are converted one by one."""
        if self.action is None or self.count % 2:
            return self._wrap(Array, x)
        return [Index(self, x[0]), *np.asarray(x)[1:].tolist()] if len(x) else x


# -- worlds --------------------------------------------------------------------------------------------------


def pure(call):
    """A call that changes nothing, not even what was used last."""
    call.pure = True
    return call


def release(call):
    """A call that is never refused for being inside of another one."""
    call.release = True
    return call


class World:
    """Each method without a leading underscore is a call, and takes a `Via`.

    Attributes:
        random: what calls choose by.
        promises: functions that must be true when the outermost call has left, with what they say.
        problems: what went wrong where no exception can leave.
    """

    rare = ()  # calls that take long
    slow = 1  # how much rarer signals are

    def __init__(self, seed, path):
        self.random, self.path = random.Random(seed), path
        self.promises, self.problems, self.inner_calls, self.refused = [], [], 0, 0
        self.via = Via()  # of objects that live as long as the world
        self._build()

    @classmethod
    def names(cls):
        return sorted(
            name for name in dir(cls)
            if not name.startswith("_") and callable(getattr(cls, name)) and name not in vars(World)
        )  # fmt: skip

    @classmethod
    def pure_names(cls):
        return [name for name in cls.names() if hasattr(getattr(cls, name), "pure")]

    def _call(self, name, via):
        """What a call gives, as something to be compared; what it raises, if that is documented."""
        call = getattr(self, name)
        try:
            return plain(call(via))
        except DOCUMENTED as error:
            if isinstance(error, InvalidOperationError) and str(error) == REFUSED:
                self.refused += 1
                refused = hasattr(call, "release") and not hasattr(error, "handlers")
                assert not refused, f"{name} was refused: {error}"
            return type(error)

    def _inner(self, name):
        """A call from inside of another one, whose documented errors are swallowed."""
        self.inner_calls += 1
        try:
            self._call(name, Via())
        except HandlerError:
            raise
        except Exception as error:
            if hasattr(error, "handlers"):
                raise
            self.problems.append(f"inside, {name}: {traceback.format_exc()}")

    def _loud(self, name):
        """A call from inside of another one, whose errors leave the handler."""
        self.inner_calls += 1
        try:
            getattr(self, name)(Via())
        except DOCUMENTED as error:
            error.handlers = True
            raise

    def _settled(self):
        """No call is at work: what was released has gone."""
        promises, self.promises = self.promises, []
        for kept, what in promises:
            assert kept(), what

    def _verify(self):
        raise NotImplementedError

    def _finish(self):
        raise NotImplementedError


class Disturbance:
    """Chooses what is called inside."""

    def __init__(self, world, names, seed):
        self.world, self.names, self.random = world, names, random.Random(seed)

    def __call__(self, *_):
        name = self.random.choice(self.names)
        if name in self.world.rare and self.random.random() < 0.9:
            return
        self.world._inner(name)


# -- between lines -------------------------------------------------------------------------------------------


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
        if self.busy or not frame.f_code.co_filename.startswith(HOUSE):
            return None
        frame.f_trace_opcodes = self.event == "opcode"
        return self._line

    def _line(self, frame, event, arg):
        if event == self.event and not self.busy:
            self.count += 1
            if self.stop in (None, self.count):
                sys.settrace(None)  # until it is handled: the next trace function would handle it
                WIRE.trip  # noqa: B018
        return self._line


# -- the collector -------------------------------------------------------------------------------------------


class Phoenix:
    """Garbage in a cycle whose finaliser acts, and leaves another one."""

    alive = None  # what acts

    def __init__(self):
        self.me = self

    def __del__(self):
        if Phoenix.alive is not None:
            Phoenix()
            Phoenix.alive()


class Watched:
    """Garbage in a cycle that a weakref watches, whose callback acts and leaves another one."""

    watch = None

    def __init__(self):
        self.me = self
        Watched.watch = weakref.ref(self, Watched.gone)

    @staticmethod
    def gone(_):
        if Phoenix.alive is not None:
            Watched()
            Phoenix.alive()


class Collecting:
    """While entered, the collector runs at nearly every allocation of a container, and `action` in it."""

    def __init__(self, action):
        self.action = action

    def __enter__(self):
        gc.collect()
        gc.freeze()
        self.before = gc.get_threshold()
        Phoenix.alive = self.action
        Phoenix()
        Watched()
        gc.set_threshold(1, 1, 1)

    def __exit__(self, *exception):
        gc.set_threshold(*self.before)
        Phoenix.alive = None
        gc.collect()
        gc.unfreeze()


# -- how a world is disturbed ----------------------------------------------------------------------------------


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
    # As the module that the worlds import.
    sys.exit(importlib.import_module("reentry").main(*sys.argv[1:]))
