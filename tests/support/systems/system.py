"""A system: an object, or several that share locks, with every public call on them; `reentry.py` disturbs its calls."""

import random
import traceback

from subjects.subject import plain
from systems.calling_arguments import ArgumentWrapper

from kvcache import InvalidOperationError, KvCacheError
from kvcache.core.locks import CallLock

DOCUMENTED = (KvCacheError, TypeError, ValueError, IndexError)


def refusal():
    """The message of a lock that its own thread holds already."""
    lock = CallLock()
    with lock:
        try:
            lock.__enter__()
        except InvalidOperationError as error:
            return str(error)
    raise AssertionError("a lock was taken twice")


REFUSED = refusal()


class HandlerError(TimeoutError):
    """The error that a signal handler raises."""


def pure(call):
    """Mark a call that changes nothing, not even the order of use."""
    call.pure = True
    return call


def release(call):
    """Mark a call that is never refused inside of another one."""
    call.release = True
    return call


class System:
    """Each method without a leading underscore is a call, and takes a `ArgumentWrapper`.

    Attributes:
        random: from which calls choose their arguments.
        promises: functions that must return true after the outermost call, each with a message.
        problems: errors of places from which no exception can leave.
    """

    rare = ()  # calls that take long
    slow = 1  # how much rarer signals are

    def __init__(self, seed, path):
        self.random, self.path = random.Random(seed), path
        self.promises, self.problems, self.inner_calls, self.refused = [], [], 0, 0
        self.wrap = ArgumentWrapper()  # of objects that live as long as the system
        self._build()

    @classmethod
    def names(cls):
        return sorted(
            name for name in dir(cls)
            if not name.startswith("_") and callable(getattr(cls, name)) and name not in vars(System)
        )

    @classmethod
    def pure_names(cls):
        return [name for name in cls.names() if hasattr(getattr(cls, name), "pure")]

    def _call(self, name, wrap):
        """The result of a call, to be compared; the type of its error, if that is documented."""
        call = getattr(self, name)
        try:
            return plain(call(wrap))
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
            self._call(name, ArgumentWrapper())
        except HandlerError:
            raise
        except Exception as error:
            if hasattr(error, "handlers"):
                raise
            self.problems.append(f"inside, {name}: {traceback.format_exc()}")

    def _call_that_may_raise(self, name):
        """A call from inside of another one, whose errors leave the handler."""
        self.inner_calls += 1
        try:
            getattr(self, name)(ArgumentWrapper())
        except DOCUMENTED as error:
            error.handlers = True
            raise

    def _settled(self):
        """After the outermost call: everything released is gone."""
        promises, self.promises = self.promises, []
        for kept, what in promises:
            assert kept(), what

    def _verify(self):
        raise NotImplementedError

    def _finish(self):
        raise NotImplementedError


class InnerCalls:
    """Chooses which call is made inside of another one."""

    def __init__(self, system, names, seed):
        self.system, self.names, self.random = system, names, random.Random(seed)

    def __call__(self, *_):
        name = self.random.choice(self.names)
        if name in self.system.rare and self.random.random() < 0.9:
            return
        self.system._inner(name)
