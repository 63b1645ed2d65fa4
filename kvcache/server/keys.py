"""API keys, and the namespace of each."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from kvcache.networks.files import read_file

__all__ = ["Keys"]

_MAX_BYTES = 2**20


class Keys:
    """API keys. The requests of one namespace share cached prefixes, and those of two namespaces share nothing.

    Args:
        lines: `KEY` or `KEY NAMESPACE` each; a key without a namespace has one of its own. Empty lines and those that
            begin with # are left out.

    Raises:
        ValueError: no key, a key twice, or a line of another form.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self._namespaces: dict[bytes, str] = {}  # by the digest of the key: nothing shows a key
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) > 2:
                raise ValueError(f"api_keys: expected KEY or KEY NAMESPACE in line {number}, got {len(words)} words")
            digest = sha256(words[0].encode()).digest()
            if digest in self._namespaces:
                raise ValueError(f"api_keys: expected each key once, got that of line {number} again")
            self._namespaces[digest] = words[1] if len(words) == 2 else f"key {digest.hex()[:16]}"
        if not self._namespaces:
            raise ValueError("api_keys: expected at least one key, got none")

    @classmethod
    def read(cls, path: str | Path) -> Keys:
        """The keys of a file of UTF-8 text. OSError, ValueError: it cannot be read, or as the constructor."""
        return cls(bytes(read_file(Path(path), _MAX_BYTES)).decode("utf-8").splitlines())

    def namespace(self, authorization: str | None) -> str | None:
        """The namespace of a header `Authorization: Bearer KEY`; None: no such key.

        Every key is compared, each in constant time, so that the time does not depend on the keys.
        """
        scheme, _, key = (authorization or "").partition(" ")
        given, found = sha256(key.strip().encode()).digest(), None
        for digest, namespace in self._namespaces.items():
            if hmac.compare_digest(digest, given):
                found = namespace
        return found if scheme.lower() == "bearer" else None
