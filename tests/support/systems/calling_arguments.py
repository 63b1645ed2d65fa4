"""Arguments that run a function when they are converted, hashed, compared or asked for their length."""

import numpy as np


class Array:
    def __init__(self, wrap, x):
        self.wrap, self.x = wrap, x

    def __array__(self, dtype=None, copy=None):
        self.wrap.run()
        return np.asarray(self.x, dtype)

    def __len__(self):
        self.wrap.run()
        return len(self.x)

    def __getitem__(self, i):
        self.wrap.run()
        return self.x[i]


class Items(list):
    """Rows per layer, blocks, tokens: a list that runs the action when it is asked for its length or its items."""

    def __init__(self, wrap, x):
        super().__init__(x)
        self.wrap = wrap

    def __len__(self):
        self.wrap.run()
        return super().__len__()

    def __getitem__(self, i):
        self.wrap.run()
        return super().__getitem__(i)

    def __iter__(self):
        self.wrap.run()
        return super().__iter__()


class Integer(int):
    def __new__(cls, wrap, x):
        self = super().__new__(cls, x)
        self.wrap = wrap
        return self

    def __int__(self):
        self.wrap.run()
        return int.__int__(self)

    __index__ = __int__

    def __le__(self, other):
        self.wrap.run()
        return int.__le__(self, other)

    def __lt__(self, other):
        self.wrap.run()
        return int.__lt__(self, other)

    def __ge__(self, other):
        self.wrap.run()
        return int.__ge__(self, other)


class Index:
    def __init__(self, wrap, x):
        self.wrap, self.x = wrap, x

    def __index__(self):
        self.wrap.run()
        return int(self.x)


class Number(Index):
    def __float__(self):
        self.wrap.run()
        return float(self.x)

    __index__ = None


class Name(Index):
    """A namespace: equal to its value, as a key too."""

    def __hash__(self):
        self.wrap.run()
        return hash(self.x)

    def __eq__(self, other):
        self.wrap.run()
        return self.x == (other.x if isinstance(other, Name) else other)

    __index__ = None


class ArgumentWrapper:
    """Wraps arguments so that they run `action` whenever they are read; without an action they stay as they are."""

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
