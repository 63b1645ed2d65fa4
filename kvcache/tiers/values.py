"""The values of tiers: the K and V of a group of tokens, with all that says whether they are the right ones.

    0     magic "kvvalue\\x1a", version (u32), tokens (u32), bytes of the body (u64), its own key (20 bytes), zeros

    version 1                                             version 2, encrypted
    64    tokens    the ids of the group, 4 bytes each    64    nonce   16 random bytes, of which 12 are used
          body      [page][layer], each as one block      80    AES-256-GCM of tokens and body, with the first 64 bytes
                    of the store (ckernels/kvc.h)               as associated data
          mac       HMAC-SHA-256 over all of the above          tag     16 bytes

Numbers are unsigned and little-endian. A value is accepted under a key if its length, magic, version, key, tokens and
MAC or tag are the expected ones; any other bytes are a miss. So a value that was forged, damaged, cut short, or moved
there from another key, namespace or model is never read. The key of the MAC comes from the tier's secret, that of the
encryption from the secret and the namespace. HMAC-SHA-256 takes half the time of keyed BLAKE2b on CPUs with SHA
instructions, AES-GCM a fifth of that on CPUs with AES instructions.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvcache.tiers.keys import KEY_BYTES
from kvcache.tiers.protocol import Buffer

__all__ = ["MAGIC", "VERSION", "Encrypted", "Signed", "ValueFormat", "Wrapping", "wrapping"]

MAGIC, VERSION, _ENCRYPTED = b"kvvalue\x1a", 1, 2
HEADER = struct.Struct(f"<8sIIQ{KEY_BYTES}s20x")
_MAC = 32  # bytes; of an encrypted value nonce and tag together
_NONCE = 16
Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class ValueFormat:
    """The sizes of the values of one cache.

    Attributes:
        group_tokens: tokens of a value.
        body_bytes: bytes of their K and V.
    """

    group_tokens: int
    body_bytes: int

    @property
    def value_bytes(self) -> int:
        """Bytes of a whole value."""
        return HEADER.size + 4 * self.group_tokens + self.body_bytes + _MAC

    def head(self, version: int, key: bytes) -> bytes:
        """The first bytes of a value."""
        return HEADER.pack(MAGIC, version, self.group_tokens, self.body_bytes, key)


class Wrapping(Protocol):
    """How values of one tier and one namespace prove what they are."""

    def seal(self, form: ValueFormat, key: bytes, tokens: Tokens, body: Buffer) -> bytes:
        """The value of a group."""

    def open(self, form: ValueFormat, key: bytes, tokens: Tokens, value: object) -> memoryview | None:
        """The body of what was fetched under `key` for `tokens`; None if it is not their value."""


class Signed:
    """Values of version 1.

    Args:
        secret: of the tier.
    """

    def __init__(self, secret: bytes) -> None:
        # A key of its own, so that no key of a value is a MAC, and the other way round.
        self._key = blake2b(digest_size=32, key=secret, person=b"kvcache value").digest()

    def seal(self, form: ValueFormat, key: bytes, tokens: Tokens, body: Buffer) -> bytes:
        """See `Wrapping`."""
        head = form.head(VERSION, key) + _bytes(tokens)
        return b"".join((head, body, self._mac(head, body)))

    def open(self, form: ValueFormat, key: bytes, tokens: Tokens, value: object) -> memoryview | None:
        """See `Wrapping`."""
        view, head = _view(form, value), form.head(VERSION, key) + _bytes(tokens)
        if view is None or view[: len(head)] != head:
            return None
        body = view[len(head) : -_MAC]
        return body if hmac.compare_digest(self._mac(head, body), view[-_MAC:]) else None

    def _mac(self, head: bytes, body: Buffer) -> bytes:
        mac = hmac.new(self._key, head, "sha256")
        mac.update(body)
        return mac.digest()


class Encrypted:
    """Values of version 2.

    Args:
        secret: of the tier.
        namespace: encoded; each has a key of its own.

    Raises:
        ImportError: the package `cryptography` is not installed.
    """

    def __init__(self, secret: bytes, namespace: bytes) -> None:
        self._aes = _aes(blake2b(namespace, digest_size=32, key=secret, person=b"kvcache encrypt").digest())

    def seal(self, form: ValueFormat, key: bytes, tokens: Tokens, body: Buffer) -> bytes:
        """See `Wrapping`."""
        head, nonce = form.head(_ENCRYPTED, key), secrets.token_bytes(_NONCE)
        return b"".join((head, nonce, self._aes.encrypt(nonce[:12], b"".join((_bytes(tokens), body)), head)))

    def open(self, form: ValueFormat, key: bytes, tokens: Tokens, value: object) -> memoryview | None:
        """See `Wrapping`."""
        view, head = _view(form, value), form.head(_ENCRYPTED, key)
        if view is None or view[: len(head)] != head:
            return None
        start = len(head) + _NONCE
        try:
            plain = memoryview(self._aes.decrypt(view[len(head) : start][:12], view[start:], head))
        except Exception:  # InvalidTag, of a package that is imported on demand
            return None
        ids = _bytes(tokens)
        return plain[len(ids) :] if plain[: len(ids)] == ids else None


def wrapping(secret: bytes, encrypt: bool, namespace: bytes) -> Wrapping:
    """How a tier wraps the values of a namespace."""
    return Encrypted(secret, namespace) if encrypt else Signed(secret)


def _view(form: ValueFormat, value: object) -> memoryview | None:
    if not isinstance(value, (bytes, bytearray, memoryview)) or memoryview(value).nbytes != form.value_bytes:
        return None
    return memoryview(value).cast("B")


def _bytes(tokens: Tokens) -> bytes:
    return np.ascontiguousarray(tokens, "<u4").tobytes()


def _aes(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise ImportError("encrypt needs the cryptography package: pip install 'kvcache-cpu[encryption]'") from None
    return AESGCM(key)
