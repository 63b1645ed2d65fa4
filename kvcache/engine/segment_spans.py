"""Segments of conversations: which texts of messages they are, and where the chat template writes them.

A part of a message is a segment where it says `"segment": true`. The template writes it as any other text: the prompt
is cut before the first segment, between segments and behind the last one, and each piece becomes tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvcache.engine.documents import Segment
from kvcache.engine.history import Messages, are_texts
from kvcache.engine.text_places import TextPlace
from kvcache.support.arguments import as_instance, short

__all__ = ["SegmentSpan", "cuts_of", "segment_places", "spans_of", "text_of_content", "with_documents"]


class SegmentSpan(NamedTuple):
    """A part of a message that is a segment.

    Attributes:
        message: the number of its message.
        start, stop: how many characters of the message's text are before it, and up to its end.
    """

    message: int
    start: int
    stop: int


def text_of_content(message: Mapping[str, Any]) -> str:
    """The text of the content of a message; empty where it has none."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content) if are_texts(content) else ""
    return content if isinstance(content, str) else ""


def with_documents(messages: Messages, documents: Iterable[Any]) -> tuple[Messages, list[str | None]]:
    """Messages with documents, as segments, before the first words of the user; and the names of these.

    Args:
        documents: each a `Segment` or a text.

    Raises:
        TypeError, ValueError: another kind; no message of the user whose content is a text, or of texts.
    """
    if isinstance(documents, (str, bytes)) or not isinstance(documents, Iterable):
        raise TypeError(f"segments: expected a list of segments or texts, got {short(documents)}")
    given = [each if isinstance(each, Segment) else Segment(each) for each in documents]
    parts = [{"type": "text", "text": as_instance(each.text, str, "segments"), "segment": True} for each in given]
    number = next((i for i, message in enumerate(messages) if message.get("role") == "user"), None)
    content = None if number is None else messages[number].get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if number is None or not isinstance(content, list) or not are_texts(content):
        raise ValueError("segments: expected a message of the user with a text, which they stand before, got none")
    if any(part.get("segment") for part in content):
        raise ValueError("segments: expected none beside parts of messages that are segments, got some")
    changed = messages[number] | {"content": [*parts, *content]}
    return [*messages[:number], changed, *messages[number + 1 :]], [each.name for each in given]


def spans_of(messages: Any, name: str) -> tuple[Any, tuple[SegmentSpan, ...]]:
    """Messages whose parts say nothing of segments, and the parts that are some.

    Args:
        name: of the messages, for errors.

    Raises:
        TypeError, ValueError: a segment beside parts that are no texts, or without a word; no bool.
    """
    spans, plain = list[SegmentSpan](), list[Any]()
    for number, message in enumerate(messages if isinstance(messages, list) else []):
        parts, at = message.get("content") if isinstance(message, dict) else None, 0
        if isinstance(parts, list) and any(isinstance(part, dict) and "segment" in part for part in parts):
            if not are_texts(parts):
                raise ValueError(f"{name}: expected texts alone beside a segment, got another part")
            for part in parts:
                start, at = at, at + len(part["text"])
                is_own = as_instance(part.get("segment", False), bool, "segment")
                if is_own and not part["text"].strip():
                    raise ValueError(f"{name}: expected a text in each segment, got none")
                spans += [SegmentSpan(number, start, at)] if is_own else []
            message = message | {"content": [{"type": "text", "text": part["text"]} for part in parts]}
        plain.append(message)
    return (plain, tuple(spans)) if plain else (messages, ())


def segment_places(span: SegmentSpan, said: str) -> tuple[TextPlace, TextPlace]:
    """The places of the first and of the last character of a segment that are no white space.

    Args:
        said: the text of its message.
    """
    text = said[span.start : span.stop]
    first, last = len(text) - len(text.lstrip()), len(text.rstrip()) - 1
    return TextPlace(span.message, span.start + first, False), TextPlace(span.message, span.start + last, True)


def cuts_of(
    spans: Sequence[SegmentSpan], said: Sequence[str], text: str, found: Sequence[int | None]
) -> list[int]:
    """How many characters of a text are before each segment, and up to the end of the last one.

    Args:
        said: the text of each message.
        text: what the template writes of the messages.
        found: how many characters of it are before the places of each segment; None: one was not found.

    Raises:
        ValueError: the template does not write the segments as they are, or something is between them.
    """
    cuts = list[int]()
    for span, first, last in zip(spans, found[::2], found[1::2], strict=True):
        own = said[span.message][span.start : span.stop]
        before, behind = own[: len(own) - len(own.lstrip())], own[len(own.rstrip()) :]
        start, stop = (first or 0) - len(before), (last or 0) + len(behind)
        whole = None not in (first, last) and 0 <= start < stop
        if not whole or text[start:first] != before or text[last:stop] != behind:
            raise ValueError("messages: expected a chat template that writes segments as they are, got another one")
        if cuts and start != cuts[-1]:
            raise ValueError("messages: expected segments that follow each other, got a text between two of them")
        cuts += [stop] if cuts else [start, stop]
    return cuts
