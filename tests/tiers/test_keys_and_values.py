"""Keys and values of tiers against their twin, and every way in which a value can be wrong."""

import hashlib

import numpy as np
import pytest
from tier_stores import SECRET, twin_keys, twin_value

from kvcache.saved.namespaces import encode_namespace
from kvcache.tiers.keys import KeyChain, as_secret
from kvcache.tiers.values import Encrypted, Signed, ValueFormat

pytestmark = pytest.mark.one_build

NAMES = (None, 0, 1, True, "", "a", b"a", ("a", 1), (1, "a"), (None,), ())


def sealed(wrapping, form, key, tokens, body):
    """The value of a body."""
    value = memoryview(bytearray(form.value_bytes))
    wrapping.body(form, value)[:] = body
    wrapping.seal(form, key, tokens, value)
    return bytes(value)


def test_keys_are_those_of_the_twin(rng):
    for _ in range(50):
        size, secret = int(rng.integers(1, 70)), rng.bytes(int(rng.integers(16, 65)))
        context, tokens = rng.bytes(int(rng.integers(0, 99))), rng.integers(0, 2**32, int(rng.integers(0, 300)))
        namespace = encode_namespace(NAMES[rng.integers(len(NAMES))])
        keys = KeyChain(secret, context, size).keys(namespace, tokens.astype(np.uint32))
        assert keys == twin_keys(secret, context, namespace, tokens, size)
        assert len(keys) == len(tokens) // size


def test_everything_that_k_and_v_depend_on_is_in_the_key(rng):
    """A change of secret, context, namespace, a token before or in the group, or of the size gives another key."""
    tokens = rng.integers(0, 99, 256).astype(np.uint32)
    found = [KeyChain(SECRET, b"model", 64).keys(encode_namespace(name), tokens)[-1] for name in NAMES]
    found.append(KeyChain(SECRET[::-1], b"model", 64).keys(encode_namespace(None), tokens)[-1])
    found.append(KeyChain(SECRET, b"mode", 64).keys(b"l" + encode_namespace(None), tokens)[-1])
    found += [KeyChain(SECRET, b"model", size).keys(encode_namespace(None), tokens)[-1] for size in (32, 128)]
    for at in (0, 63, 64, 255):
        other = tokens.copy()
        other[at] += 1
        found.append(KeyChain(SECRET, b"model", 64).keys(encode_namespace(None), other)[-1])
    assert len(set(found)) == len(found)
    assert {len(key) for key in found} == {20}


def test_a_key_and_a_value_stay_as_they_are():
    """Another version of the library on another machine makes the same ones."""
    tokens = np.arange(128, dtype=np.uint32)
    keys = KeyChain(SECRET, b"model", 64).keys(encode_namespace("a"), tokens)
    assert [key.hex() for key in keys] == KNOWN_KEYS
    value = sealed(Signed(SECRET), ValueFormat(64, 5), keys[1], tokens[64:], b"hello")
    assert hashlib.sha256(value).hexdigest() == KNOWN_VALUE


KNOWN_KEYS = ["db876f2421c844c2e2f195d2a94051baf7a079cb", "c4356ef63eed146ccfb2da5c38d9f13f9e87403f"]
KNOWN_VALUE = "6f447592c94f5e102bc7310d054927fce7877ef830babf5f65ac40f9b9d8499c"


def test_values_are_those_of_the_twin(rng):
    for _ in range(50):
        size, body = int(rng.integers(1, 70)), rng.bytes(int(rng.choice([0, 1, 63, 64, 500, 1023, 1024, 1025, 5000])))
        tokens, key = rng.integers(0, 2**32, size).astype(np.uint32), rng.bytes(20)
        form = ValueFormat(size, len(body))
        value = sealed(Signed(SECRET), form, key, tokens, body)
        assert value == twin_value(SECRET, key, tokens, body)
        assert len(value) == form.value_bytes
        for given in (value, bytearray(value), memoryview(value), memoryview(bytearray(value))):
            assert Signed(SECRET).open(form, key, tokens, given) == body


@pytest.mark.parametrize("wrap", [Signed, lambda secret: Encrypted(secret, b"name")])
def test_any_other_bytes_are_a_miss(rng, wrap):
    """Every byte changed, every length, other keys, tokens, secrets and formats, and objects that are no bytes."""
    tokens, key, body = rng.integers(0, 99, 8).astype(np.uint32), rng.bytes(20), rng.bytes(40)
    form, mine = ValueFormat(8, 40), wrap(SECRET)
    value = sealed(mine, form, key, tokens, body)
    assert mine.open(form, key, tokens, value) == body
    assert len(value) == form.value_bytes
    for at in range(len(value)):
        wrong = bytearray(value)
        wrong[at] ^= 1 << int(rng.integers(8))
        assert mine.open(form, key, tokens, wrong) is None or (at in range(76, 80) and wrap is not Signed)
        assert mine.open(form, key, tokens, value[:at]) is None
    assert mine.open(form, key, tokens, value + b"\0") is None
    assert mine.open(form, rng.bytes(20), tokens, value) is None
    assert mine.open(form, key, tokens + 1, value) is None
    assert wrap(SECRET[::-1]).open(form, key, tokens, value) is None
    assert mine.open(ValueFormat(8, 41), key, tokens, value) is None
    # The same number of bytes, divided in another way.
    assert mine.open(ValueFormat(7, 44), key, tokens[:7], value) is None
    for wrong in (None, "text", 7, [value], object()):
        assert mine.open(form, key, tokens, wrong) is None


def test_an_encrypted_value_shows_neither_tokens_nor_k_and_v(rng):
    """It differs each time, and another namespace has another key."""
    tokens, key, body = rng.integers(0, 2**32, 8).astype(np.uint32), rng.bytes(20), rng.bytes(40)
    form, mine = ValueFormat(8, 40), Encrypted(SECRET, b"name")
    value, again = (sealed(mine, form, key, tokens, body) for _ in range(2))
    assert value[:64] == again[:64]
    assert value[64:] != again[64:]
    assert mine.open(form, key, tokens, again) == body
    assert not any(token.tobytes() in value for token in tokens)
    assert Encrypted(SECRET, b"other").open(form, key, tokens, value) is None
    assert Signed(SECRET).open(form, key, tokens, value) is None
    assert mine.open(form, key, tokens, sealed(Signed(SECRET), form, key, tokens, body)) is None


@pytest.mark.parametrize("secret", [b"", b"short", bytes(65), "a text of 20 letters", None, bytearray(32)])
def test_secrets(secret):
    with pytest.raises((TypeError, ValueError), match="secret: expected"):
        as_secret(secret)
    assert as_secret(SECRET) == SECRET
