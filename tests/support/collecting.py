"""The garbage collector at nearly every allocation, with finalisers and weakref callbacks that act."""

import gc
import weakref


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
