"""The tags in which a family writes calls: which ones, and what is between them."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["GLM_TAGS", "MINIMAX_TAGS", "QWEN_TAGS", "SEED_TAGS", "TagStyle"]


class TagStyle(NamedTuple):
    """The tags of a call, in the order in which they are written.

    Attributes:
        function: around the name; "" twice where it is the first word.
        key: around the name of an argument.
        value: around its value; "" where it follows the name.
        end: of the call; "": the mark that ends calls ends it.
        in_lines: whether a new line is behind each tag but those around a value; elsewhere one may be.
        wraps: whether new lines around a value are none of it.
        several: whether all calls stand between two marks, rather than each.
        guesses: whether a value whose schema names no type is JSON where it can be, and else a text; it is a text
            otherwise.
    """

    function: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    in_lines: bool
    wraps: bool = False
    several: bool = False
    guesses: bool = False

    @property
    def name_pattern(self) -> str:
        """A regular expression of the names of functions."""
        close = self.function[1]
        return _between(close) if close else r"[^\s<{]+"

    @property
    def key_pattern(self) -> str:
        """A regular expression of the names of arguments."""
        return _between(self.key[1])

    def head_of_function(self) -> re.Pattern[str]:
        """The beginning of a call; its group is the name of the function."""
        return _head(*self.function, self.name_pattern)

    def head_of_value(self) -> re.Pattern[str]:
        """The words before a value; their group is the name of the argument."""
        opening = re.escape(self.value[0])
        return re.compile(_head(*self.key, self.key_pattern).pattern + (rf"\s*{opening}" if opening else ""))


def _between(close: str) -> str:
    """Names before a tag."""
    inner = rf"{re.escape(close[0])}\n"
    return rf"[^{inner}\s](?:[^{inner}]*[^{inner}\s])?"


def _head(begin: str, end: str, name: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(begin)}[^\S\n]*({name})[^\S\n]*{re.escape(end)}" if end else f"({name})")


# Qwen3-Coder and Qwen3.5.
QWEN_TAGS = TagStyle(
    ("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", in_lines=True, wraps=True
)
SEED_TAGS = QWEN_TAGS._replace(wraps=False)
# GLM-4.5 and 4.6 write each tag on a line of its own, GLM-4.7 all on one.
GLM_TAGS = TagStyle(
    ("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "", in_lines=False, guesses=True
)
# MiniMax-M2.
MINIMAX_TAGS = TagStyle(
    ('<invoke name="', '">'), ('<parameter name="', '">'), ("", "</parameter>"), "</invoke>", in_lines=True,
    several=True, guesses=True,
)
