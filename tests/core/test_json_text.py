"""Texts of others that are no JSON: each reader says what is wrong, and no words of Python about its own limits."""

import json

import pytest

from kvcache.certificates.certificate import IDENTITY, Certificate
from kvcache.commands.conversation import Conversation
from kvcache.errors import CheckpointError
from kvcache.grammar import json_schema
from kvcache.networks.files import json_object
from kvcache.sampling.tokenizer_json import check_tokenizer_json

BROKEN = [
    (b'{"a": "\xe9"}', "bytes that are no utf-8, from byte 7 on"),
    (b"[" * 100_000, "too many lists and objects within one another"),
    (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
    (b'{"a": 1', "Expecting"),
    (b"", "Expecting value"),
]


def read_body(path):
    pytest.importorskip("starlette", reason="a server needs it")
    from kvcache.server.intake import json_of

    json_of(path.read_bytes())


def read_conversation(path):
    Conversation.load(Conversation.__new__(Conversation), path)


READERS = {
    "body": read_body,
    "config": lambda path: json_object(path, path.read_bytes()),
    "tokenizer": lambda path: check_tokenizer_json(path, path.read_bytes()),
    "conversation": read_conversation,
    "certificate": Certificate.read,
    "schema": lambda path: json_schema(path.read_bytes().decode("latin-1")),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("data", "told"), BROKEN)
def test_what_is_no_json_is_described(reader, data, told, tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(data)
    if reader == "schema" and b"\xe9" in data:
        return  # a text, not bytes
    with pytest.raises((ValueError, CheckpointError), match="expected") as caught:
        READERS[reader](path)
    assert told in str(caught.value)
    assert not any(word in str(caught.value) for word in ("codec", "recursion", "sys.", "object is"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([], "parts of other types"), (3, "parts of other types"), ({}, "without"), ({"prompts": 3}, "without"),
        (dict.fromkeys(IDENTITY, "x") | {"prompts": [3], "ways": [], "digest": ""}, "parts of other types"),
        (dict.fromkeys(IDENTITY, "x") | {"prompts": [{}], "ways": [], "digest": ""}, "got one without 'tokens'"),
        (dict.fromkeys(IDENTITY, "x") | {"prompts": [], "ways": [], "digest": "", "equal": True}, "at least one"),
    ],
)
def test_json_that_is_no_certificate_is_described(content, told, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="expected a certificate") as caught:
        Certificate.read(path)
    assert told in str(caught.value)
