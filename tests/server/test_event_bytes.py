"""The bytes of streams: those that parts of a body write at once, and those that the ASGI server writes."""

import json
import re

import pytest
from http_servers import MODEL, post

from kvcache.server.body_parts import BodyParts

pytestmark = pytest.mark.one_build

SAID = '100 %s of "it" \\ \x07, all of which are many words — und die Katze: 猫 🐈, %(x)s %%'
TALK = [{"role": "user", "content": "Well?"}]
CHUNK = f'"created": 0, "model": "{MODEL}", '
# For each interface: what asks, and an event that says a text; ids, times and numbers are masked.
FORMS = {
    "/v1/completions": (
        {"prompt": "ab", "max_tokens": 200},
        'data: {"id": "ID", "object": "text_completion", ' + CHUNK
        + '"choices": [{"index": 0, "text": TEXT, "logprobs": null, "finish_reason": null}]}',
    ),
    "/v1/chat/completions": (
        {"messages": TALK, "max_tokens": 200, "stream_options": {"include_usage": True}},
        'data: {"id": "ID", "object": "chat.completion.chunk", ' + CHUNK + '"usage": null, '
        '"choices": [{"index": 0, "delta": {"content": TEXT}, "logprobs": null, "finish_reason": null}]}',
    ),
    "/v1/messages": (
        {"messages": TALK, "max_tokens": 200},
        'event: content_block_delta\ndata: {"type": "content_block_delta", "index": 0, '
        '"delta": {"type": "text_delta", "text": TEXT}}',
    ),
    "/v1/responses": (
        {"input": "Well?", "max_output_tokens": 200},
        'event: response.output_text.delta\ndata: {"type": "response.output_text.delta", "sequence_number": 0, '
        '"item_id": "ID", "output_index": 0, "content_index": 0, "delta": TEXT, "logprobs": []}',
    ),
}
MASKS = (
    (r'"(cmpl-|chatcmpl-|msg_|resp_)[0-9a-f]{24}"', '"ID"'), (r'"(created|created_at|completed_at)": \d+', r'"\1": 0'),
    (r'"sequence_number": \d+', '"sequence_number": 0'),
    (r'"(input_tokens|cached_tokens|cache_write_tokens|cache_\w+_input_tokens)": \d+', r'"\1": 0'),
)
PIECE = r'("(?:text|content)": )"(?:[^"\\]|\\.)*"'  # which tokens come together is a matter of time


def events(served, path, body, version="1.1"):
    """The events of a stream, ids and times masked."""
    request = post(json.dumps({"model": MODEL, "temperature": 0, "stream": True, **body}).encode(), path)
    request = request.replace(b" HTTP/1.1\r\n", f" HTTP/{version}\r\nConnection: close\r\n".encode(), 1)
    with served.connect(request) as connection:
        data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, rest = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    if is_chunked := b"transfer-encoding: chunked" in head.lower():
        rest = b"".join(chunks(rest))
    assert is_chunked == (version == "1.1")
    text = rest.decode("ascii")
    for pattern, mask in MASKS:
        text = re.sub(pattern, mask, text)
    assert text.endswith("\n\n")
    return text.split("\n\n")[:-1]


def chunks(data):
    while True:
        size, _, data = data.partition(b"\r\n")
        if not (length := int(size, 16)):
            assert data == b"\r\n"
            return
        yield data[:length]
        assert data[length : length + 2] == b"\r\n"
        data = data[length + 2 :]


@pytest.mark.parametrize("asked", FORMS)
def test_the_bytes_of_a_stream(served, monkeypatch, asked):
    """Each event that says a text has the bytes of the table, and the others are the same, however they are written."""
    body, form = FORMS[asked]
    served.say(SAID)
    head, tail = form.split("TEXT")
    written, write = [], BodyParts.__call__
    monkeypatch.setattr(BodyParts, "__call__", lambda parts, part: write(parts, part) and not written.append(part))
    found = {"at once": events(served, asked, body)}
    assert written
    found["HTTP 1.0"] = events(served, asked, body, "1.0")
    monkeypatch.setattr(BodyParts, "__call__", lambda parts, part: False)
    found["ASGI"] = events(served, asked, body)
    others = []
    for way, each in found.items():
        says = [event for event in each if event.startswith(head) and event.endswith(tail)]
        texts = [event.removeprefix(head).removesuffix(tail) for event in says]
        assert [json.dumps(json.loads(text)) for text in texts] == texts, way
        assert "".join(map(json.loads, texts)) in SAID, way  # the first and the last event of some forms say more
        assert len(texts) > 1, way
        others.append([re.sub(PIECE, r"\1TEXT", event) for event in each if event not in says])
    assert others[0] == others[1] == others[2]
