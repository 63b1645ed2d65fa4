"""A conversation in the words of the chat template, and places in that text.

The ends of blocks are found by `located`. Where a template does not write a place, a block ends where the text and that
of the conversation up to the block differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvcache.engine.partings import common, parting_ends
from kvcache.engine.segment_spans import cuts_of, segment_places, text_of_content
from kvcache.engine.text_places import TextPlace, located
from kvcache.server.conversations import Conversation, placed, text_of, with_users
from kvcache.server.retention import CacheMark

__all__ = ["ChatText"]

_SYSTEM = ("system", "developer")


class ChatText:
    """The text of a conversation.

    Args:
        asked: the conversation.
        write: makes the text of messages, with the beginning of an answer or without.
        knows_developer: whether the template has words for the role `developer`.
        marks: ends of blocks.

    Raises:
        TypeError, ValueError: as `write`; the template does not write the last message, which the answer continues;
            it does not write the segments as they are, or something is between them.

    Attributes:
        text: what the answer follows.
        ends: for each mark, how many characters of the text are before it.
        cuts: how many are before each segment, and up to the end of the last one; empty: there are none.
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
        said = [text_of_content(each) for each in self._messages] if asked.segments else []
        inner = [place for span in asked.segments for place in segment_places(span, said[span.message])]
        last = len(places) + len(inner)
        found = self._located([*places, *inner], last)
        if asked.continues:
            self.text = self.text[: self._end_of_last() if (end := found.get(last)) is None else end]
        self.ends = [
            self._end(mark, place, found.get(number))
            for number, (mark, place) in enumerate(zip(marks, places, strict=True))
        ]
        spans = [found.get(len(places) + number) for number in range(len(inner))]
        self.cuts = cuts_of(asked.segments, said, self.text, spans)

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

    def _place_of(self, mark: CacheMark) -> TextPlace | None:
        """Where a mark is; None: beside no character.

        The end of a message is the beginning of the next one, behind its calls, and behind tools.
        """
        number, characters, message = mark.message, mark.characters, self._messages[mark.message]
        text = text_of_content(message)
        if characters is None or not text[characters:].strip():
            if number + 1 == len(self._messages):
                return TextPlace(number + 1, 0, False)
            following = text_of_content(self._messages[number + 1])
            if following.strip():
                return TextPlace(number + 1, len(following) - len(following.lstrip()), False)
            if message.get("tool_calls") or message.get("role") in _SYSTEM:
                return None
            characters = len(text)
        if before := len(text[:characters].rstrip()):
            return TextPlace(number, before - 1, True)
        return TextPlace(number, len(text) - len(text.lstrip()), False) if text.strip() else None

    def _located(self, places: Sequence[TextPlace | None], last: int) -> dict[int, int]:
        """How many characters of the text are before each place, by its number; the last message, if it is continued,
        ends at the number `last`.
        """
        inner = {i: place for i, place in enumerate(places) if place and place.message < len(self._messages)}
        end = last if self._asked.continues else None
        return located(self._written, self.text, self._messages, inner, last=end)

    def _end_of_last(self) -> int:
        """The end of the last message in the text, where the template writes it as it is."""
        said = self._messages[-1]["content"].strip()
        if not said or said not in self.text:
            raise ValueError("messages: expected a chat template that writes the last message, got another")
        return self.text.rindex(said) + len(said)

    def _end(self, mark: CacheMark, place: TextPlace | None, found: int | None) -> int:
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
