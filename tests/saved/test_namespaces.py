"""Namespaces as bytes: decoded ones are equal, different ones have different bytes, and other bytes are refused."""

import enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.saved.namespaces import decode_namespace, encode_namespace

PLAIN = st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=())) | st.binary()
NAMES = st.recursive(PLAIN, lambda parts: st.lists(parts, max_size=4).map(tuple), max_leaves=8)


@given(NAMES)
def test_there_and_back(name):
    data = encode_namespace(name)
    again = decode_namespace(data)
    assert again == name
    assert type(again) is type(name)
    assert hash(again) == hash(name)
    assert encode_namespace(again) == data


@given(NAMES, NAMES)
def test_what_differs_stays_different(one, other):
    if one != other:
        assert encode_namespace(one) != encode_namespace(other)


def test_what_could_be_mistaken_for_each_other():
    names = [None, False, True, 0, 1, -1, 255, -256, "", b"", "1", b"1", (), ((),), ("",), (b"",), ("a", "b"), ("ab",)]
    names += [("a", ("b",)), (("a",), "b"), "None", "()", "\0", "\ud800", 2**64, -(2**64), 10**400]
    assert len({encode_namespace(name) for name in names}) == len(names)
    assert [decode_namespace(encode_namespace(name)) for name in names] == names


class Tenant(enum.IntEnum):
    RED = 7


class Name(str):
    __slots__ = ()


def test_kinds_of_their_own_come_back_as_what_they_equal():
    for name, plain in ((Tenant.RED, 7), (Name("x"), "x")):
        assert name == plain
        assert type(decode_namespace(encode_namespace(name))) is type(plain)
        assert decode_namespace(encode_namespace(name)) == name


@pytest.mark.parametrize("bad", [1.0, [], {}, frozenset(), object(), (1, 2.0), 1j, range(3)])
def test_what_is_no_namespace(bad):
    with pytest.raises(TypeError, match="namespace: expected"):
        encode_namespace(bad)


def test_too_deep():
    name = ()
    for _ in range(15):
        name = (name,)
    assert decode_namespace(encode_namespace(name)) == name
    with pytest.raises(TypeError):
        encode_namespace((name,))
    deep = b"(\1\0\0\0" * 100_000 + b"N"
    with pytest.raises(ValueError, match="namespace: expected"):
        decode_namespace(deep)


@given(st.binary(max_size=40) | NAMES.map(encode_namespace), st.integers(0, 40))
def test_any_bytes_are_a_namespace_or_an_error(data, cut):
    data = data[:cut]
    try:
        name = decode_namespace(data)
    except ValueError:
        return
    assert encode_namespace(name) == data


def test_a_length_beyond_the_end_takes_no_memory():
    for tag in b"isb(":
        with pytest.raises(ValueError, match="expected 4294967295 bytes"):
            decode_namespace(bytes([tag]) + b"\xff\xff\xff\xff" + b"x")
