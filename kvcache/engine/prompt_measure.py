"""The numbers of tokens by which edits of a conversation are decided: those of its prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvcache.engine.history import Messages
from kvcache.engine.text_places import located, text_place
from kvcache.sampling.text_tokens import encoded, encoded_with_ends

__all__ = ["PromptMeasure"]


class PromptMeasure:
    """Counts the tokens of prompts; see `Measure`.

    Args:
        write: makes the text of messages, with the beginning of an answer. TypeError, ValueError: it refuses them.
        tokenizer: encodes it, without special tokens of its own.
        name: of the messages, for errors.
    """

    def __init__(self, write: Callable[[Any], str], tokenizer: Any, name: str = "messages") -> None:
        self._write, self._tokenizer, self._name = write, tokenizer, name
        self._last: tuple[str, int] | None = None  # a text and its tokens: it is often asked for twice

    def prompt(self, messages: Messages) -> int:
        """The tokens of the prompt of a conversation."""
        text = self._write(messages)
        if self._last is None or self._last[0] != text:
            self._last = text, self.text(text)
        return self._last[1]

    def text(self, text: str) -> int:
        """The tokens of a text alone."""
        return len(encoded(self._tokenizer, text, self._name, add_special_tokens=False))

    def before(self, messages: Messages, points: Sequence[int]) -> list[int]:
        """The tokens that the prompts of the first messages had, by their numbers, ascending up to all.

        The prompt of some messages ends with the text of the last one, and with as many tokens behind it as that of all
        has there. Where the template does not write that text, the number is 0.
        """
        if [*points] == [len(messages)]:
            return [self.prompt(messages)]
        text = self._write(messages)
        ends = {point: text_place(messages[point - 1], point - 1, -1) for point in {*points, len(messages)}}
        found = located(self._write, text, messages, {point: end for point, end in ends.items() if end is not None})
        known = [*found]
        ids, counts = encoded_with_ends(self._tokenizer, text, self._name, [found[point] for point in known])
        tokens = dict(zip(known, counts, strict=True))
        behind = len(ids) - tokens.pop(len(messages), len(ids))
        tokens = {point: count + behind for point, count in tokens.items()} | {len(messages): len(ids)}
        return [tokens.get(point, 0) for point in points]
