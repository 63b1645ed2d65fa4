"""The values of tiers: the K and V of a group of tokens, with all that says whether they are the right ones.

    0     magic "kvvalue\\x1a", version (u32), tokens (u32), bytes of the body (u64), its own key (20 bytes), zeros

    version 1                                             version 2, encrypted
    64    tokens    the ids of the group, 4 bytes each    64    nonce   16 random bytes, of which 12 are used
          body      [page][layer], each as one block      80    AES-256-GCM of tokens and body, with the first 64 bytes
                    of the store (ckernels/kvc.h)               as associated data
          mac       32 bytes                                    tag     16 bytes

Numbers are unsigned and little-endian. A value is accepted under a key if its length, magic, version, key, tokens and
MAC or tag are the expected ones; any other bytes are a miss. So a value that was forged, damaged, cut short, or moved
there from another key, namespace or model is never read. The keys of the MAC come from the tier's secret, that of the
encryption from the secret and the namespace.

The MAC is HMAC-SHA-256 over the bytes before the body and the sums of NH over the body (kvc_digest.c), under a key of
its own: a universal hash, then a pseudo-random function, as in Carter and Wegman, "New Hash Functions and Their Use in
Authentication and Set Equality", 1981. Two bodies have the same sums with a probability of 2^-128. NH takes a tenth of
the time of HMAC on CPUs with SHA instructions, so a MAC costs less than a copy of the value.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass
from hashlib import blake2b, shake_256
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvcache.tiers.bodies import KEY_WORDS, digest
from kvcache.tiers.keys import KEY_BYTES
from kvcache.tiers.spaces import SPACE

__all__ = ["MAGIC", "VERSION", "Encrypted", "Signed", "ValueFormat", "Wrapping", "wrapping"]

MAGIC, VERSION, _ENCRYPTED = b"kvvalue\x1a", 1, 2
HEADER = struct.Struct(f"<8sIIQ{KEY_BYTES}s20x")
_MAC = 32  # bytes, as many as an encrypted value has in its nonce and its tag
_NONCE, _TAG = 16, 16
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
    """Seals and opens the values of one tier and one namespace, which prove what they are."""

    def body(self, form: ValueFormat, value: memoryview) -> memoryview:
        """The place of the body in the bytes of a value that is to be sealed."""

    def seal(self, form: ValueFormat, key: bytes, tokens: Tokens, value: memoryview) -> None:
        """Complete the value of a group: its body stands in its place."""

    def open(self, form: ValueFormat, key: bytes, tokens: Tokens, value: object) -> memoryview | None:
        """The body of what was fetched under `key` for `tokens`; None if it is not their value."""


class Signed:
    """Values of version 1.

    Args:
        secret: of the tier.
    """

    def __init__(self, secret: bytes) -> None:
        # Keys of their own, so that no key of a value is a MAC, and the other way round.
        self._key = blake2b(digest_size=32, key=secret, person=b"kvcache value").digest()
        seed = blake2b(digest_size=32, key=secret, person=b"kvcache digest").digest()
        self._words = np.frombuffer(shake_256(seed).digest(4 * KEY_WORDS), "<u4")

    def body(self, form: ValueFormat, value: memoryview) -> memoryview:
        """See `Wrapping`."""
        return value[HEADER.size + 4 * form.group_tokens : -_MAC]

    def seal(self, form: ValueFormat, key: bytes, tokens: Tokens, value: memoryview) -> None:
        """See `Wrapping`."""
        head = form.head(VERSION, key) + _bytes(tokens)
        value[: len(head)] = head
        value[-_MAC:] = self._mac(head, value[len(head) : -_MAC])

    def open(self, form: ValueFormat, key: bytes, tokens: Tokens, value: object) -> memoryview | None:
        """See `Wrapping`."""
        view, head = _view(form, value), form.head(VERSION, key) + _bytes(tokens)
        if view is None or view[: len(head)] != head:
            return None
        body = view[len(head) : -_MAC]
        return body if hmac.compare_digest(self._mac(head, body), view[-_MAC:]) else None

    def _mac(self, head: bytes, body: memoryview) -> bytes:
        return hmac.digest(self._key, head + digest(self._words, body), "sha256")


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

    def body(self, form: ValueFormat, value: memoryview) -> memoryview:
        """See `Wrapping`."""
        return value[HEADER.size + _NONCE + 4 * form.group_tokens : -_TAG]

    def seal(self, form: ValueFormat, key: bytes, tokens: Tokens, value: memoryview) -> None:
        """See `Wrapping`."""
        head, nonce, ids = form.head(_ENCRYPTED, key), secrets.token_bytes(_NONCE), _bytes(tokens)
        start = len(head) + _NONCE
        value[:start] = head + nonce
        value[start : start + len(ids)] = ids
        self._aes.encrypt_into(nonce[:12], value[start:-_TAG], head, value[start:])  # in place

    def open(self, form: ValueFormat, key: bytes, tokens: Tokens, value: object) -> memoryview | None:
        """See `Wrapping`."""
        view, head = _view(form, value), form.head(_ENCRYPTED, key)
        if view is None or view[: len(head)] != head:
            return None
        start = len(head) + _NONCE
        plain = SPACE(len(view) - start - _TAG)
        try:
            self._aes.decrypt_into(view[len(head) : start][:12], view[start:], head, plain)
        except Exception:  # InvalidTag, of a package that is imported on demand
            return None
        ids = _bytes(tokens)
        return plain[len(ids) :] if plain[: len(ids)] == ids else None


def wrapping(secret: bytes, encrypt: bool, namespace: bytes) -> Wrapping:
    """The wrapping of the values of a namespace in a tier."""
    return Encrypted(secret, namespace) if encrypt else Signed(secret)


def _view(form: ValueFormat, value: object) -> memoryview | None:
    if not isinstance(value, (bytes, bytearray, memoryview)) or memoryview(value).nbytes != form.value_bytes:
        return None
    view = memoryview(value)
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def _bytes(tokens: Tokens) -> bytes:
    return np.ascontiguousarray(tokens, "<u4").tobytes()


def _aes(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise ImportError("encrypt needs the cryptography package: pip install 'kvcache-cpu[encryption]'") from None
    return AESGCM(key)
