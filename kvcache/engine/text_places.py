"""Places of messages in the text that a chat template writes of them.

They are found by a second text: of the same messages, with sentinels at the places. Without the sentinels it has to be
the first text, for a template may trim, compare or count what is in messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from kvcache.engine.history import are_texts
from kvcache.sampling.sentinels import Sentinels

__all__ = ["TextPlace", "located", "text_place"]


class TextPlace(NamedTuple):
    """A place beside a character of a message that is no white space, which templates do not trim.

    Attributes:
        message: its number; that behind the last one is the end of all.
        character: the number of the character.
        behind: whether the place is behind it.
    """

    message: int
    character: int
    behind: bool


def text_place(message: dict[str, Any], number: int, end: int) -> TextPlace | None:
    """The beginning (`end` 0) or the end (-1) of the text of a message, without white space; None: it has no text."""
    content = message.get("content")
    if isinstance(content, list) and are_texts(content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not content.strip():
        return None
    if end:
        return TextPlace(number, len(content.rstrip()) - 1, True)
    return TextPlace(number, len(content) - len(content.lstrip()), False)


def located(
    write: Callable[[list[Any]], str], text: str, messages: Sequence[dict[str, Any]],
    places: Mapping[int, TextPlace], *, last: int | None = None,
) -> dict[int, int]:
    """How many characters of a text are before each place, by its number.

    Places that the template does not write are left out, and all are where it writes another text for them.

    Args:
        write: makes the text of messages. TypeError, ValueError: it refuses them.
        text: of these messages.
        messages: dicts.
        places: within messages, by their numbers.
        last: the number of the end of the last message, whose content is a text; None: it is not looked for.
    """
    if not places and last is None:
        return {}
    sentinels, marked, said = Sentinels(), [*messages], ""
    if last is not None:
        said = messages[-1]["content"]
        marked[-1] = messages[-1] | {"content": said + sentinels.name(last)}
    for place, number in sorted(((place, number) for number, place in places.items()), reverse=True):
        marked[place.message] = _with(marked[place.message], place, sentinels.name(number))  # moves no other one
    try:
        pieces = sentinels.pattern.split(write(marked))  # texts, and the numbers between them
    except (TypeError, ValueError):
        return {}
    texts, numbers = pieces[::2], [int(number) for number in pieces[1::2]]
    if "".join(texts) != text and last in numbers:  # the white space before a sentinel is not trimmed
        before = len(numbers) - 1 - numbers[::-1].index(last)
        texts[before] = texts[before].removesuffix(said[len(said.rstrip()) :])
    if "".join(texts) != text:
        return {}
    ends = [*zip(numbers, accumulate(map(len, texts)), strict=False)]
    found = dict(ends[::-1])  # the first place of each, where a template writes a text twice
    return found | ({last: dict(ends)[last]} if last in found else {})


def _with(message: dict[str, Any], place: TextPlace, sentinel: str) -> dict[str, Any]:
    """A message with a sentinel at a place of it."""
    content, start = message["content"], 0
    if isinstance(content, str):
        at = place.character + place.behind
        return message | {"content": content[:at] + sentinel + content[at:]}
    parts = []
    for part in content:
        text = part["text"]
        if start <= place.character < start + len(text):
            at = place.character - start + place.behind
            part = part | {"text": text[:at] + sentinel + text[at:]}
        start += len(text)
        parts.append(part)
    return message | {"content": parts}
