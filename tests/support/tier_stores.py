"""Tiers for tests, and a twin of the keys and values of tiers, written from their description."""

import hashlib
import hmac
import os
import struct
import threading

import numpy as np

SECRET = bytes(range(32))
GIVEN = {} if os.name == "posix" else {"secret": SECRET}  # to a folder: without one Windows is refused


class ObjectStore:
    """A tier over an object store, here a dict of a "bucket": the three methods, and no more."""

    def __init__(self, bucket=None):
        self.bucket = {} if bucket is None else bucket
        self.calls = []

    def get_many(self, keys):
        self.calls.append(("get", len(keys)))
        return [self.bucket.get(key) for key in keys]

    def put_many(self, items):
        self.calls.append(("put", len(items)))
        for key, value in items:
            self.bucket[key] = bytes(value)

    def contains_many(self, keys):
        self.calls.append(("contains", len(keys)))
        return [key in self.bucket for key in keys]


class Faulty:
    """A tier that fails, forgets, answers late, and damages, exchanges and repeats values, by a random generator."""

    def __init__(self, tier, seed, rate=0.3):
        self.tier, self.rng, self.rate, self.lock = tier, np.random.default_rng(seed), rate, threading.Lock()
        self.seen = []  # values of the past

    def _draw(self, n):
        with self.lock:
            return int(self.rng.integers(n)), self.rng.random() < self.rate

    def get_many(self, keys):
        kind, faulty = self._draw(8)
        if faulty and kind == 0:
            raise ConnectionError("lost")
        values = self.tier.get_many(keys)
        if faulty and kind == 1:
            return values[:-1]
        if faulty and kind == 2:
            return None
        return [self._value(value) for value in values]

    def _value(self, value):
        kind, faulty = self._draw(7)
        if value is None or not faulty:
            return value
        value = bytes(value)
        with self.lock:
            self.seen = [*self.seen[-20:], value]
            other = self.seen[int(self.rng.integers(len(self.seen)))]
            at = int(self.rng.integers(len(value)))
        wrong = [
            None, value[:at], value[:at] + bytes([value[at] ^ 4]) + value[at + 1 :], other, b"", "text", value + b"\0",
        ]
        return wrong[kind]

    def put_many(self, items):
        kind, faulty = self._draw(3)
        if faulty and kind == 0:
            raise OSError(28, "No space left on device")
        if faulty and kind == 1:
            self.tier.put_many(items[: len(items) // 2])
            raise ConnectionError("lost")
        if faulty:
            return
        self.tier.put_many(items)

    def contains_many(self, keys):
        kind, faulty = self._draw(4)
        if faulty and kind == 0:
            raise TimeoutError("late")
        if faulty and kind == 1:
            return [True] * len(keys)
        if faulty and kind == 2:
            return [True]
        return self.tier.contains_many(keys)


def twin_keys(secret, context, namespace, tokens, size):
    """The keys of a text."""
    keys, before = [], struct.pack("<QQ", 0, len(context)) + context + namespace
    for i in range(len(tokens) // size + 1):
        keys.append(hashlib.blake2b(before, digest_size=20, key=secret, person=b"kvcache key").digest())
        ids = [int(token) for token in tokens[i * size : (i + 1) * size]]
        before = struct.pack("<Q", 20) + keys[-1] + struct.pack(f"<{len(ids)}I", *ids)
    return keys[1:]


def twin_value(secret, key, tokens, body):
    """The value of a group."""
    value = b"kvvalue\x1a" + struct.pack("<IIQ", 1, len(tokens), len(body)) + key + bytes(20)
    value += struct.pack(f"<{len(tokens)}I", *[int(token) for token in tokens]) + bytes(body)
    own = hashlib.blake2b(b"", digest_size=32, key=secret, person=b"kvcache value").digest()
    seed = hashlib.blake2b(b"", digest_size=32, key=secret, person=b"kvcache digest").digest()
    words = np.frombuffer(hashlib.shake_256(seed).digest(4 * 262), "<u4")
    head = value[: len(value) - len(body)]
    return value + hmac.digest(own, head + twin_digest(words, bytes(body)), "sha256")


def twin_digest(words, data):
    """NH of bytes under a key of 262 words: four sums of products for each 1024 bytes, filled up with zeros to 64."""
    sums = []
    for first in range(0, len(data), 1024):
        part = data[first : first + 1024]
        m = np.frombuffer(part + bytes(-len(part) % 64), "<u4")
        for shift in range(0, 8, 2):
            pairs = (m + words[shift : shift + len(m)]).astype(np.uint64).reshape(-1, 2)  # uint32 wraps around first
            sums.append((pairs[:, 0] * pairs[:, 1]).sum(dtype=np.uint64))
    return np.array(sums, "<u8").tobytes()
