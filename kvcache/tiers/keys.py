"""The keys of values: a chain of keyed hashes over the text.

    h(0) = H(0, context, namespace)      context: see `KeyChain`; namespace: as saved/namespaces.py encodes it
    h(i) = H(i's predecessor, tokens)    tokens: the `group_tokens` ids of group i - 1, 4 bytes each, little-endian

H is BLAKE2b of 20 bytes, keyed with the tier's secret, over its arguments with the length of each but the last before
it. h(i), i > 0, is the key of the value with the K and V of group i - 1. It names everything that this K and V depends
on, so two models, formats or namespaces never ask for each other's values, and without the secret nobody can tell
whether the tier has a text.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

__all__ = ["KEY_BYTES", "KeyChain", "as_secret"]

KEY_BYTES = 20
_PERSON = b"kvcache key"
_LENGTH = struct.Struct("<Q")
_LEAST, _MOST = 16, 64  # bytes of a secret; BLAKE2b takes 64


def as_secret(secret: object) -> bytes:
    """A secret of a tier: 16 to 64 bytes that nobody can guess, such as `secrets.token_bytes(32)`.

    Raises:
        TypeError, ValueError: not bytes, or another length.
    """
    if not isinstance(secret, bytes):
        raise TypeError(f"secret: expected bytes, got {type(secret).__name__}")
    if not _LEAST <= len(secret) <= _MOST:
        raise ValueError(f"secret: expected {_LEAST} to {_MOST} bytes, got {len(secret)}")
    return secret


class KeyChain:
    """The keys of texts in one tier.

    Args:
        secret: of the tier.
        context: what K and V of a token depend on beside the text: the network, the formats, the bytes of a value.
        group_tokens: tokens of a value.
    """

    def __init__(self, secret: bytes, context: bytes, group_tokens: int) -> None:
        self.secret, self._context, self.group_tokens = secret, context, group_tokens

    def keys(self, namespace: bytes, tokens: npt.NDArray[np.uint32]) -> list[bytes]:
        """The keys of all full groups of a text; `namespace` is encoded."""
        data = np.ascontiguousarray(tokens, "<u4").tobytes()
        step = 4 * self.group_tokens
        last = self._hash(_LENGTH.pack(0) + _LENGTH.pack(len(self._context)) + self._context + namespace)
        found = []
        for first in range(0, len(data) - step + 1, step):
            last = self._hash(_LENGTH.pack(KEY_BYTES) + last + data[first : first + step])
            found.append(last)
        return found

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=KEY_BYTES, key=self.secret, person=_PERSON).digest()
