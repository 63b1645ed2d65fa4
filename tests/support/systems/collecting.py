"""Runs the garbage collector at nearly every allocation, with finalisers and weakref callbacks that call a function."""

import contextvars
import gc
import weakref


def act():
    """Call `Finalised.action` in a context of its own.

    CPython 3.11 keeps a freed value where the collector runs inside of `ContextVar.reset` and a finaliser reads
    the same variable: NumPy reads one in every ufunc and resets it at the end of `errstate`.
    """
    contextvars.copy_context().run(Finalised.action)


class Finalised:
    """Garbage in a cycle whose finaliser calls `action` and makes another such object."""

    action = None  # what the finaliser calls

    def __init__(self):
        self.me = self

    def __del__(self):
        if Finalised.action is not None:
            Finalised()
            act()


class Watched:
    """Garbage in a cycle with a weakref whose callback calls `action` and makes another such object."""

    watch = None

    def __init__(self):
        self.me = self
        Watched.watch = weakref.ref(self, Watched.gone)

    @staticmethod
    def gone(_):
        if Finalised.action is not None:
            Watched()
            act()


class Collecting:
    """While entered, the collector runs at nearly every n-th allocation of a container, and `action` in it.

    After a `gc.freeze` it looks at few objects, and is quick.
    """

    def __init__(self, action, every=1):
        self.action, self.every = action, every

    def __enter__(self):
        gc.collect()
        self.before = gc.get_threshold()
        Finalised.action = self.action
        Finalised()
        Watched()
        gc.set_threshold(self.every, 1, 1)

    def __exit__(self, *exception):
        gc.set_threshold(*self.before)
        Finalised.action = None
        gc.collect()
