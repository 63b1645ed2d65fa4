"""A conversation in the words of the chat template, and places in that text.

The ends of blocks are found by a second text: of the same messages, with sentinels at these ends. Without the sentinels
it has to be the first text, for a template may trim, compare or count what is in messages. Where it is another text, or
a sentinel is missing in it, a block ends where the text and that of the conversation up to the block differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from kvcache.engine.partings import common, parting_ends
from kvcache.sampling.sentinels import Sentinels
from kvcache.server.conversations import Conversation, placed, text_of, with_users
from kvcache.server.retention import CacheMark

__all__ = ["ChatText"]

_SYSTEM = ("system", "developer")


class _Place(NamedTuple):
    """A place beside a character of a message that is no white space, which templates do not trim.

    Attributes:
        message: its number; that behind the last one is the end of all.
        character: the number of the character.
        behind: whether the place is behind it.
    """

    message: int
    character: int
    behind: bool


class ChatText:
    """The text of a conversation.

    Args:
        asked: the conversation.
        write: makes the text of messages, with the beginning of an answer or without.
        knows_developer: whether the template has words for the role `developer`.
        marks: ends of blocks.

    Raises:
        TypeError, ValueError: as `write`; the template does not write the last message, which the answer continues.

    Attributes:
        text: what the answer follows.
        ends: for each mark, how many characters of the text are before it.
    """

    def __init__(
        self, asked: Conversation, write: Callable[[Any, bool], str], knows_developer: bool,
        marks: Sequence[CacheMark] = (),
    ) -> None:
        self._asked, self._write, self._knows_developer = asked, write, knows_developer
        self._as_users = False  # whether later system messages are words of the user
        self._messages = asked.messages
        if asked.continues:
            last = asked.messages[-1]
            self._messages = [*asked.messages[:-1], last | {"content": text_of(last)}]
        self.text = self._first()
        places = [self._place_of(mark) for mark in marks]
        found = self._located(places)
        if asked.continues:
            self.text = self.text[: self._end_of_last() if (end := found.get(len(marks))) is None else end]
        self.ends = [
            self._end(mark, place, found.get(number))
            for number, (mark, place) in enumerate(zip(marks, places, strict=True))
        ]

    def partings(self) -> list[int]:
        """After how many characters the next requests are expected to differ, see `parting_ends`."""
        asked, messages = self._asked, self._placed(self._messages)
        if not isinstance(messages, list):
            return []
        return parting_ends(
            lambda others: self._write(others, True), self.text, messages, asked.tools, continues=asked.continues
        )

    # -- texts ----------------------------------------------------------------------------------------------

    def _first(self) -> str:
        """The text. Templates that refuse later system messages get them as words of the user."""
        messages = self._placed(self._messages)
        if isinstance(messages, list) and any(_role(message) in _SYSTEM for message in messages[1:]):
            try:
                return self._write(messages, self._asked.begins)
            except ValueError as error:
                if "the chat template takes" not in str(error):
                    raise
            self._as_users = True
        return self._written(self._messages)

    def _written(self, messages: Any) -> str:
        return self._write(self._placed(messages), self._asked.begins)

    def _placed(self, messages: Any) -> Any:
        """Messages with the system messages where the template takes them; what is none is an error of `write`."""
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            return messages
        messages = placed(messages, self._knows_developer)
        return with_users(messages) if self._as_users else messages

    # -- places ---------------------------------------------------------------------------------------------

    def _place_of(self, mark: CacheMark) -> _Place | None:
        """Where a mark is; None: beside no character.

        The end of a message is the beginning of the next one, behind its calls, and behind tools.
        """
        number, characters, message = mark.message, mark.characters, self._messages[mark.message]
        text = _said(message)
        if characters is None or not text[characters:].strip():
            if number + 1 == len(self._messages):
                return _Place(number + 1, 0, False)
            following = _said(self._messages[number + 1])
            if following.strip():
                return _Place(number + 1, len(following) - len(following.lstrip()), False)
            if message.get("tool_calls") or message.get("role") in _SYSTEM:
                return None
            characters = len(text)
        if before := len(text[:characters].rstrip()):
            return _Place(number, before - 1, True)
        return _Place(number, len(text) - len(text.lstrip()), False) if text.strip() else None

    def _located(self, places: Sequence[_Place | None]) -> dict[int, int]:
        """How many characters of the text are before each place, by its number; the last message, if it is continued,
        ends at the number behind those.

        Places that the template does not write are left out, and all are where it writes another text for them.
        """
        inner = [(place, i) for i, place in enumerate(places) if place and place.message < len(self._messages)]
        if not inner and not self._asked.continues:
            return {}
        sentinels, last, messages = Sentinels(), len(places), [*self._messages]
        if self._asked.continues:
            messages[-1] = messages[-1] | {"content": messages[-1]["content"] + sentinels.name(last)}
        for place, i in sorted(inner, reverse=True):  # the last one first, which moves no other one
            messages[place.message] = _with(messages[place.message], place, sentinels.name(i))
        try:
            pieces = sentinels.pattern.split(self._written(messages))  # texts, and the numbers between them
        except (TypeError, ValueError):
            return {}
        texts, numbers = pieces[::2], [int(number) for number in pieces[1::2]]
        if "".join(texts) != self.text and last in numbers:  # the white space before a sentinel is not trimmed
            said, before = self._messages[-1]["content"], len(numbers) - 1 - numbers[::-1].index(last)
            texts[before] = texts[before].removesuffix(said[len(said.rstrip()) :])
        if "".join(texts) != self.text:
            return {}
        ends = [*zip(numbers, accumulate(map(len, texts)), strict=False)]
        found = dict(ends[::-1])  # the first place of each, where a template writes a text twice
        return found | ({last: dict(ends)[last]} if last in found else {})

    def _end_of_last(self) -> int:
        """The end of the last message in the text, where the template writes it as it is."""
        said = self._messages[-1]["content"].strip()
        if not said or said not in self.text:
            raise ValueError("messages: expected a chat template that writes the last message, got another")
        return self.text.rindex(said) + len(said)

    def _end(self, mark: CacheMark, place: _Place | None, found: int | None) -> int:
        """The end of a block: where its place was found, or where the text and that of the block alone differ.

        It is the end of all where that is its place, and where the template does not take the block alone.
        """
        if place is not None and place.message == len(self._messages):
            return len(self.text)
        if found is not None:
            return min(found, len(self.text))
        messages = self._messages[: mark.message + 1]
        if mark.characters is not None:
            messages[-1] = messages[-1] | {"content": text_of(messages[-1])[: mark.characters]}
        try:
            return common(self.text, self._written(messages))
        except (TypeError, ValueError):
            return len(self.text)


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _said(message: dict[str, Any]) -> str:
    """The text of a message; empty where it is none."""
    return text_of(message) if isinstance(message.get("content"), (str, list)) else ""


def _with(message: dict[str, Any], place: _Place, sentinel: str) -> dict[str, Any]:
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
