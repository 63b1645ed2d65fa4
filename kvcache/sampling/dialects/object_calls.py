"""Objects of JSON with a name and arguments, one or several, whose arguments come as they are written."""

from __future__ import annotations

from typing import Any, Literal

from kvcache.sampling.dialects.argument_values import json_value
from kvcache.sampling.dialects.call_span import CallSpan
from kvcache.sampling.dialects.call_texts import json_calls
from kvcache.sampling.dialects.json_scan import JsonScan
from kvcache.sampling.dialects.object_style import LONE_OBJECTS, ObjectStyle

__all__ = ["ObjectCalls"]

_SPACE = " \t\n\r"
_BETWEEN = _SPACE + "[],;"  # between objects, and around them
_NAMES = ("name", "tool_name")  # the keys of names


class ObjectCalls:
    """Reads `{"name": .., "arguments": {..}}`, or lists of these; `parameters` are arguments too.

    A call begins where its arguments do, if its name comes before them. Other objects are read when they are whole;
    what is none of both is kept.

    Args:
        span: that they are in.
        style: of the objects.
    """

    def __init__(self, span: CallSpan, style: ObjectStyle = LONE_OBJECTS) -> None:
        self._span, self._keyed = span, style.keyed
        self._state: Literal["between", "head", "arguments", "tail", "other", "rest"] = "between"
        self._scan = JsonScan(lenient=True)  # of the object that is read
        self._object: list[str] = []  # its characters before its arguments
        self._string: list[str] | None = None  # those of a name or value in it
        self._key = self._name = ""  # the last one; that of the function

    @property
    def is_open(self) -> bool:
        return self._state in ("head", "arguments", "tail") and self._scan.is_in_string

    @property
    def is_none(self) -> bool:
        return self._state == "other"

    def add(self, text: str) -> None:
        at = 0
        while at < len(text):
            if self._state == "other":
                self._span.keep(text[at:])
                return
            if self._state == "rest":
                self._span.say(text[at:])
                return
            at = self._step(text, at)

    def end(self, close: str) -> None:
        if self._state == "arguments":
            self._span.finish(is_whole=False)
        self._span.end(close)

    def _step(self, text: str, at: int) -> int:
        """Read on from a place; the place behind what was read."""
        character = text[at]
        if self._state == "arguments":
            return self._follow(text, at)
        if self._state == "between":
            if character == "{":
                self._state, self._scan, self._object, self._name = "head", JsonScan(lenient=True), [], ""
            elif character not in _BETWEEN:
                self._give_up()
            else:
                if not self._span.has_begun:
                    self._span.keep(character)
                return at + 1
            return at
        if self._state == "head" and self._begins_arguments(character):
            self._state = "arguments"
            return at
        if not self._scan.add(character):
            self._give_up()
            return at
        if self._state == "head":
            self._span.keep(character)
            self._object.append(character)
            self._note(character)
        if self._scan.is_whole:
            self._end_object()
        return at + 1

    def _give_up(self) -> None:
        """Read what follows as text: kept, or content behind arguments."""
        self._state = "rest" if self._state in ("tail", "arguments") else "other"

    def _begins_arguments(self, character: str) -> bool:
        scan = self._scan
        if character != "{" or scan.need != "value" or scan.level != 1:
            return False
        if self._keyed:
            return self._key != "" and self._span.begin(self._key)
        if not self._name:
            return False
        return self._key in ("arguments", "parameters") and self._span.begin(self._name)

    def _follow(self, text: str, at: int) -> int:
        """Give what belongs to the arguments."""
        scan = self._scan
        end, written = scan.take(text, at, level=1)
        self._span.put(written)
        if scan.is_broken:
            self._give_up()
        elif scan.level == 1:
            self._state = "tail"
        if self._state != "arguments":
            self._span.finish(is_whole=self._state == "tail")
        return end

    def _note(self, character: str) -> None:
        """Note names and the function's name among the members of the object."""
        if self._string is not None and self._scan.need in ("string", "escape", "hex"):
            self._string.append(character)
        elif self._string is not None:
            found: Any = json_value(f'"{"".join(self._string)}"')
            if self._scan.need == "colon":
                self._key = found
            elif self._key in _NAMES or (self._key == "function" and not self._name):
                self._name = found
            self._string = None
        elif self._scan.level == 1 and self._scan.need == "string":
            self._string = []

    def _end_object(self) -> None:
        """Read an object without arguments that began: it may say them as a text, or before its name, or have none."""
        is_call = self._state == "tail" or self._span.take(json_calls("".join(self._object)))
        self._state = "between" if is_call else "other"
