"""The targets of test_hostile.py: objects, calls with valid arguments, and checks after a call."""

import numpy as np

from kvcache import KvCacheError

ALLOWED = (TypeError, ValueError, IndexError, KvCacheError)
FILES = (*ALLOWED, OSError)
ROWS = np.ones((4, 2, 8), np.float32)
LINE = np.ones(16, np.float32)


class Target:
    """An object with its calls.

    Args:
        make: returns a new object.
        calls: name -> a function of the object and the arguments, and valid arguments.
        works: asserts that the object works; no call removes what this needs.
        errors: the errors that a call may raise.
    """

    def __init__(self, make, calls, works=lambda it: None, errors=ALLOWED):
        self.make, self.calls, self.works, self.errors = make, calls, works, errors


def method(name, *arguments):
    return name, (lambda it, *given: getattr(it, name)(*given), arguments)


def keyword(name, key, value, *arguments):
    """A keyword argument; these follow the positional ones."""
    return f"{name}({key}=)", (lambda it, given: getattr(it, name)(*arguments, **{key: given}), (value,))


def function(name, call, *arguments):
    return name, (lambda it, *given: call(*given), arguments)


def named(name, call, key, value, *arguments):
    return f"{name}({key}=)", (lambda it, given: call(*arguments, **{key: given}), (value,))
