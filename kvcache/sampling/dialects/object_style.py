"""The objects of JSON in which families write calls."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "APERTUS_OBJECTS", "BARE_OBJECTS", "COHERE_OBJECTS", "LISTED_OBJECTS", "LLAMA_OBJECTS", "LONE_OBJECTS",
    "ObjectStyle",
]


class ObjectStyle(NamedTuple):
    """The objects of a family.

    Attributes:
        before: what a grammar writes before the name, in quotes.
        behind: what it writes between the name and the arguments.
        listed: whether the calls between two marks are a list; otherwise there is one.
        gap: what it writes around this one.
        keyed: whether the name is the key of the arguments.
    """

    before: str = '{"name": '
    behind: str = ', "arguments": '
    listed: bool = False
    gap: str = "\n"
    keyed: bool = False


LONE_OBJECTS = ObjectStyle()
LISTED_OBJECTS = ObjectStyle(listed=True)
BARE_OBJECTS = ObjectStyle(gap="")
LLAMA_OBJECTS = ObjectStyle(behind=', "parameters": ', gap="")
COHERE_OBJECTS = ObjectStyle('{"tool_call_id": "0", "tool_name": ', ', "parameters": ', listed=True)
APERTUS_OBJECTS = ObjectStyle("{", ": ", listed=True, keyed=True)
