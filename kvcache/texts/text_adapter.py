"""`TextAdapter`: the adapter of a text, from one of its tokens on, and the namespace that its cached blocks have.

    adapter            all tokens         namespace ("with an adapter", its digest, that of the text)
    activated adapter  from its           namespace of the text: the tokens before are those of the network itself, and
                       invocation on      shared with all of its texts; those from there on are not cached
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np

from kvcache.errors import InvalidOperationError
from kvcache.networks.adapter import Adapter
from kvcache.support.arguments import short
from kvcache.texts.text import Tokens

__all__ = ["LoadedAdapter", "TextAdapter", "is_adapted", "name_of_adapted"]

_ADAPTED = "with an adapter"


class LoadedAdapter:
    """An adapter that an engine has.

    Args:
        name: by which requests name it.
        adapter: its matrices.
        prepared: what the network made of it, see `protocols.Model`.

    Attributes:
        name, adapter, prepared: see above.
        is_loaded: whether texts may run with it.
    """

    def __init__(self, name: str, adapter: Adapter, prepared: Any) -> None:
        self.name, self.adapter, self.prepared = name, adapter, prepared
        self.is_loaded = True

    def expect_loaded(self) -> None:
        """Raise InvalidOperationError after `unload_adapter`."""
        if not self.is_loaded:
            raise self.unloaded()

    def unloaded(self) -> InvalidOperationError:
        """The error of a text whose adapter is gone."""
        return InvalidOperationError(f"adapter: expected one that is loaded, got {self.name!r}, which was unloaded")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.adapter!r})"


class TextAdapter(NamedTuple):
    """The adapter of a text.

    Attributes:
        loaded: the adapter.
        start: the first token that it changes.
    """

    loaded: LoadedAdapter
    start: int

    @classmethod
    def of(cls, loaded: LoadedAdapter | None, tokens: Tokens) -> TextAdapter | None:
        """The adapter of a text that begins with a prompt; None: it has none.

        Raises:
            ValueError: the prompt has no invocation of an activated adapter.
        """
        if loaded is None:
            return None
        invocation = loaded.adapter.invocation_tokens
        return cls(loaded, 0 if invocation is None else _last_place(loaded, tokens, invocation))

    @property
    def is_activated(self) -> bool:
        """Whether tokens before its invocation are those of the network itself."""
        return self.loaded.adapter.invocation_tokens is not None

    @property
    def shares_to(self) -> int:
        """How many of the first tokens of its text may be cached."""
        return self.start if self.is_activated else sys.maxsize

    def space(self, namespace: Hashable) -> Hashable:
        """The namespace of the cached blocks of its text."""
        return namespace if self.is_activated else (_ADAPTED, self.loaded.adapter.digest, namespace)


def is_adapted(space: Any) -> bool:
    """Whether a namespace is one that `TextAdapter.space` gives for other texts than those of the network itself."""
    return isinstance(space, tuple) and len(space) == 3 and space[0] == _ADAPTED


def name_of_adapted(space: Any) -> Hashable:
    """The namespace that `TextAdapter.space` was given."""
    name: Hashable = space[2] if is_adapted(space) else space
    return name


def _last_place(loaded: LoadedAdapter, tokens: Tokens, invocation: tuple[int, ...]) -> int:
    """Where the last invocation in a prompt begins."""
    wanted = np.array(invocation, np.uint32)
    found = np.flatnonzero(tokens[: max(0, len(tokens) - len(wanted) + 1)] == wanted[0])[::-1]
    place = next((int(at) for at in found if np.array_equal(tokens[at : at + len(wanted)], wanted)), None)
    if place is None:
        expected = f"one with the invocation tokens {short(list(invocation))} of adapter {loaded.name!r}"
        raise ValueError(f"prompt: expected {expected}, got {len(tokens)} tokens without them")
    return place
