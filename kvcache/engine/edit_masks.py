"""Edits by masks: the tokens of cleared results stay in the text, and those behind an edit do not see them.

An edit is made at a token: those before it have seen the result, and keep their K and V. It is the first one that was
new to the request which cleared the result: behind the answer before it, or behind the result where that is new itself.
At which tokens the edits of a conversation were made follows from its messages, so a conversation that is sent again
sees the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain as chained
from typing import Any

import numpy as np

from kvcache.engine.edits import Clearing
from kvcache.engine.history import Messages
from kvcache.engine.text_places import TextPlace, located, text_place
from kvcache.texts.seen_parts import SeenParts
from kvcache.texts.text import Tokens

__all__ = ["Chain", "EditMasks", "seen_by"]

Chain = list[tuple[int, list[tuple[int, int]]]]


class EditMasks:
    """The places of cleared results, and of the edits that clear them, in a conversation.

    Args:
        messages: of the conversation, with all results.
        done: which uses of tools were cleared, and when.
        name: of the messages, for errors.
    """

    def __init__(self, messages: Messages, done: Sequence[Clearing], name: str = "messages") -> None:
        self._messages, self._name = messages, name
        self._places: list[TextPlace] = []
        self._edits: list[tuple[int, list[tuple[int, int]]]] = []  # numbers of places: of each edit, and of its spans
        for point, uses in done:
            spans = [span for use in uses if (span := self._span(use.result)) is not None]
            if spans:
                self._edits.append((self._add(self._before(point)), spans))

    def _add(self, place: TextPlace) -> int:
        self._places.append(place)
        return len(self._places) - 1

    def _span(self, number: int) -> tuple[int, int] | None:
        """The numbers of both ends of the text of a message; None: it has none."""
        first, last = text_place(self._messages[number], number, 0), text_place(self._messages[number], number, -1)
        return None if first is None or last is None else (self._add(first), self._add(last))

    def _before(self, point: int) -> TextPlace:
        """The place behind which a request of the first messages is new: the end of the text of its last answer.

        Without such a text it is the beginning of the first one behind the answer, or the end of the last text before.
        """
        answer = next((i for i in range(point - 1, -1, -1) if self._messages[i].get("role") == "assistant"), 0)
        later, earlier = range(answer + 1, point), range(answer, -1, -1)
        tried = chained([(answer, -1)], ((number, 0) for number in later), ((number, -1) for number in earlier))
        places = (text_place(self._messages[number], number, end) for number, end in tried)
        return next(place for place in places if place is not None)

    def located(self, write: Callable[[Any], str], text: str) -> list[int]:
        """How many characters of the text of the conversation are before each of the places.

        Args:
            write: makes the text of messages.
            text: of these.

        Raises:
            ValueError: the template does not write them as they are.
        """
        found = located(write, text, self._messages, dict(enumerate(self._places)))
        if len(found) < len(self._places):
            raise ValueError(
                f"{self._name}: expected a chat template that writes results of tools as they are, for edits by masks, "
                f"got another one"
            )
        return [found[number] for number in range(len(self._places))]

    def chain(self, counts: Sequence[int], num_tokens: int) -> Chain:
        """The edits, by the token that each is made at, ascending, and the spans of tokens `[start, stop)` it clears.

        Args:
            counts: how many tokens are before each of the places.
            num_tokens: of the conversation, whose last one runs behind all edits.
        """
        found: Chain = []
        for at, spans in self._edits:
            cleared = [(counts[start], counts[stop]) for start, stop in spans if counts[start] < counts[stop]]
            if not cleared or num_tokens < 2:
                continue
            before = found[-1][0] if found else 0
            place = min(max(before, counts[at], *(stop for _, stop in cleared)), num_tokens - 1)
            if place == before:
                found[-1][1].extend(cleared)
            else:
                found.append((place, cleared))
        return found


def seen_by(tokens: Sequence[int] | Tokens, chain: Chain) -> SeenParts | None:
    """Make the value of what the tokens behind the last edit of a text see before them; None: there are no edits."""
    ids, start, seen = np.asarray(tokens, np.uint32), 0, None
    for stop, spans in chain:
        seen = SeenParts.of_edit(ids[start:stop], spans, seen)
        start = stop
    return seen
