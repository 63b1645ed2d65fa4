"""API keys: the namespace of each, and how it is shown."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from hashlib import sha256
from typing import NamedTuple

from starlette.exceptions import HTTPException

__all__ = ["Keys", "Label"]


class Label(NamedTuple):
    """A namespace as reports show it: those with one text count together."""

    space: Hashable
    text: str

    def __str__(self) -> str:
        return self.text


class Keys:
    """Finds the namespace of a request by its key.

    A key without a namespace has one of its own. It is a hash of the key, since blocks are kept under its name over
    restarts. Metrics show the number of the key instead: a weak key can be guessed by its hash.

    Args:
        keys: the namespace of each key, or None for one of its own.
    """

    def __init__(self, keys: Mapping[str, str | None]) -> None:
        # By digests: neither a time nor a message tells anything of a key.
        self._spaces: dict[bytes, str] = {}
        self._shown: dict[str, str] = {}
        for number, (key, space) in enumerate(keys.items(), 1):
            digest = sha256(key.encode())
            if space is None:
                space = f"key {digest.hexdigest()[:16]}"
                self._shown[space] = f"key {number}"
            self._spaces[digest.digest()] = space

    def namespace(self, authorization: str | None, plain: str | None = None) -> str:
        """The namespace of a request with this header. HTTPException: it has no known key.

        Args:
            plain: another header, which has the key alone.
        """
        if authorization is None and plain is not None:
            authorization = f"Bearer {plain}"
        scheme, _, key = (authorization or "").partition(" ")
        found = self._spaces.get(sha256(key.strip().encode()).digest()) if scheme.lower() == "bearer" else None
        if found is None:
            got = "none" if authorization is None else "another"
            raise HTTPException(401, f"authorization: expected Bearer and a known key, got {got}")
        return found

    def shown(self, space: object) -> object:
        """The name of a namespace for metrics."""
        return self._shown.get(space, space) if isinstance(space, str) else space
