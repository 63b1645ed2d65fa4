"""The words between the mark that begins a call and its arguments in JSON, and those behind them."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["DEEPSEEK_NAMES", "FUNCTIONARY_NAMES", "KIMI_NAMES", "MISTRAL_NAMES", "SOLAR_NAMES", "NameForm", "NameStyle"]

_NAME = r"([^\s<\[{:]+)"


class NameForm(NamedTuple):
    """One way to write a name.

    Attributes:
        head: a regular expression of the text before arguments; its group is the name.
        before: the text before the name, as a grammar writes it.
        behind: that between the name and the arguments.
        close: that behind the arguments.
    """

    head: str
    before: str = ""
    behind: str = ""
    close: str = ""


class NameStyle(NamedTuple):
    """The ways of a family.

    Attributes:
        forms: one or several.
        counts: whether a grammar writes a colon and a number behind the name.
        has_ids: whether an id stands before it all.
        ids: regular expressions of what networks write for a name, which is the group.
        is_written: whether a grammar writes these; objects of JSON otherwise.
    """

    forms: tuple[NameForm, ...]
    counts: bool = False
    has_ids: bool = False
    ids: tuple[str, ...] = ()
    is_written: bool = True


_SEPARATOR = "<｜tool▁sep｜>"
# V3.1 has the name alone, V3 and R1 a block of Markdown.
DEEPSEEK_NAMES = NameStyle((
    NameForm(rf"\s*{_NAME}\s*{_SEPARATOR}\s*", "", _SEPARATOR),
    NameForm(rf"\s*function{_SEPARATOR}\s*{_NAME}\s*```json\s*", f"function{_SEPARATOR}", "\n```json\n", "\n```"),
))
_BEGIN = "<|tool_call_argument_begin|>"
KIMI_NAMES = NameStyle(
    (NameForm(rf"\s*(?:functions\.)?{_NAME}(?::[0-9]+)?\s*{re.escape(_BEGIN)}\s*", "functions.", _BEGIN),), counts=True,
    ids=(r"(.+?)[._:]?[0-9]+", r"functions[._:]?(.+)", r"functions[._:]?(.+?)[._:]?[0-9]+"),
)
MISTRAL_NAMES = NameStyle(
    (NameForm(rf"\s*{_NAME}\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\]\s*)?"),), is_written=False
)
FUNCTIONARY_NAMES = NameStyle((NameForm(rf"{_NAME}>\s*", "", ">"),))
_SOLAR = "<|tool_call:name|>", "<|tool_call:args|>"
SOLAR_NAMES = NameStyle(
    (NameForm(rf"[^<]*{re.escape(_SOLAR[0])}\s*{_NAME}\s*{re.escape(_SOLAR[1])}\s*", *_SOLAR),), has_ids=True
)
