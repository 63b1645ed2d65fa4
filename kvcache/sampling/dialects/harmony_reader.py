"""Answers in the messages of gpt-oss (harmony): each has a header, which names its channel and its recipient.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvcache.sampling.dialects.argument_call import ArgumentCall
from kvcache.sampling.dialects.call_span import CallSpan
from kvcache.sampling.dialects.call_texts import json_calls
from kvcache.sampling.dialects.dialect import Dialect
from kvcache.sampling.dialects.transcript import ToolCall, Transcript

__all__ = ["HARMONY_MARKS", "HarmonyReader"]

HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyReader:
    """Reads a harmony answer, which begins with the header of its first message; see `Dialect` for the arguments.

    Content are all messages to the user: those of the channel final, and what is said beside calls.
    """

    def __init__(
        self, dialect: Dialect, transcript: Transcript, calls: bool, schemas: Mapping[str, Any], thinks: bool
    ) -> None:
        self._transcript, self._schemas, self._calls = transcript, schemas, calls
        self._header: str | None = ""  # None: within a message
        self._call: ArgumentCall | None = None  # that the message is
        self._thinks, self._was_thinking, self._has_content = False, False, False

    @property
    def is_thinking(self) -> bool:
        return self._thinks

    def text(self, text: str) -> None:
        if self._header is not None:
            self._header += text
        elif self._call is not None:
            self._call.add(text)
        elif self._thinks:
            self._transcript.think(text)
        else:
            self._transcript.say(text)
            self._has_content = True

    def mark(self, mark: str, special: bool) -> None:
        if mark in ("<|start|>", "<|end|>", "<|call|>", "<|return|>"):
            self._end_message()
        elif mark == "<|message|>" and self._header is not None:
            self._begin_message(self._header)
        elif self._header is not None:
            self._header += mark
        elif not special:
            self.text(mark)

    def _begin_message(self, header: str) -> None:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        self._header = None
        if recipient is not None and self._calls:
            self._call = self._of_function(recipient[1])
        self._thinks = self._call is None and channel is not None and channel[1] == "analysis"
        if self._thinks and self._was_thinking:
            self._transcript.think("\n\n")
        elif not self._thinks and self._call is None and self._has_content:
            self._transcript.say("\n\n")

    def _of_function(self, name: str) -> ArgumentCall:
        """Read the arguments of a function; those that are no object are a text that says one."""

        def whole(text: str) -> list[ToolCall] | None:
            return json_calls(f'{{"name": {json.dumps(name)}, "arguments": {text}}}')

        return ArgumentCall(CallSpan(self._transcript, whole, self._schemas), name)

    def _end_message(self) -> None:
        if self._call is not None:
            self._call.end("")
        self._was_thinking = self._was_thinking or self._thinks
        self._header, self._call, self._thinks = "", None, False

    def end(self) -> None:
        if self._header and not self._was_thinking and not self._has_content and "<|channel|>" not in self._header:
            self._transcript.say(self._header)  # an answer without any mark is content
        elif self._header is None:
            self._end_message()

