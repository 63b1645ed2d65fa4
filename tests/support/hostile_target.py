"""What test_hostile.py calls: objects, their calls with arguments that are right, and what must hold afterwards."""

import numpy as np

from kvcache import KvCacheError

ALLOWED = (TypeError, ValueError, IndexError, KvCacheError)
FILES = (*ALLOWED, OSError)
ROWS = np.ones((4, 2, 8), np.float32)
LINE = np.ones(16, np.float32)


class Target:
    """What is called.

    Args:
        make: a new object.
        calls: by name, a function of the object and the arguments, and good arguments.
        works: asserts that the object works; the calls leave what it needs.
        errors: that a call may end with.
    """

    def __init__(self, make, calls, works=lambda it: None, errors=ALLOWED):
        self.make, self.calls, self.works, self.errors = make, calls, works, errors


def method(name, *arguments):
    return name, (lambda it, *given: getattr(it, name)(*given), arguments)


def keyword(name, key, value, *arguments):
    """An argument that is given by its name, after those that are not."""
    return f"{name}({key}=)", (lambda it, given: getattr(it, name)(*arguments, **{key: given}), (value,))


def function(name, call, *arguments):
    return name, (lambda it, *given: call(*given), arguments)


def named(name, call, key, value, *arguments):
    return f"{name}({key}=)", (lambda it, given: call(*arguments, **{key: given}), (value,))
