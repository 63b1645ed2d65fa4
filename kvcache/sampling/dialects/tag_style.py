"""The tags in which a family writes calls: which ones, and what is between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

__all__ = [
    "DSML_TAGS", "GLM_TAGS", "HY_TAGS", "KIMI_TAGS", "MINICPM_TAGS", "MINIMAX_M3_TAGS", "MINIMAX_TAGS",
    "NESTED_WORD", "QWEN_TAGS", "SEED_TAGS", "TagStyle",
]

NESTED_WORD = "]<]minimax[>["  # before each tag of MiniMax-M3


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
        attribute: the attribute of keys that says of which type a value is; "": there is none.
        kinds: what it says, by the types of JSON; what is no text is JSON.
        counts: whether a number stands behind the name of a function, from 1 on.
        escapes: whether names have `&quot;` and `&amp;`.
        quotes: what may be around a text, in which the tag behind it is text; "" twice: nothing.
        nests: whether the tag behind a value has the name of the argument, and objects and lists are tags within tags.
    """

    function: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    in_lines: bool
    wraps: bool = False
    several: bool = False
    guesses: bool = False
    attribute: str = ""
    kinds: Mapping[str, str] = {}
    counts: bool = False
    escapes: bool = False
    quotes: tuple[str, str] = ("", "")
    nests: bool = False

    def without_first(self) -> TagStyle:
        """These tags, if the mark that begins calls is the beginning of the first one, and the mark that ends them the
        last one."""
        return self._replace(function=("", self.function[1]), end="", several=False)

    @property
    def name_pattern(self) -> str:
        """A regular expression of the names of functions."""
        close = self.function[1]
        return _between(close) if close else r"[^\s<{]+"

    @property
    def key_pattern(self) -> str:
        """A regular expression of the names of arguments."""
        if self.nests:
            return r"[^<>/\s](?:[^<>\n]*[^<>\s])?"
        return _between(self.key[1])

    def head_of_function(self) -> re.Pattern[str]:
        """The beginning of a call; its group is the name of the function."""
        return _head(*self.function, self.name_pattern, r'\s+index="[0-9]+"' if self.counts else "")

    def head_of_value(self) -> re.Pattern[str]:
        """The words before a value; their groups are the name of the argument, and what its attribute says."""
        opening, more = re.escape(self.value[0]), rf'(?:\s+{self.attribute}="(\w+)")?' if self.attribute else "()"
        return re.compile(_head(*self.key, self.key_pattern, more).pattern + (rf"\s*{opening}" if opening else ""))

    def close_of(self, key: str) -> str:
        """The tag behind the value of an argument."""
        return f"{self.value[1]}{key}>" if self.nests else self.value[1]

    def named(self, text: str) -> str:
        """A name that files write so."""
        return text.replace("&quot;", '"').replace("&amp;", "&") if self.escapes else text

    def written(self, name: str) -> str:
        """How a name is written."""
        return name.replace("&", "&amp;").replace('"', "&quot;") if self.escapes else name

    def tag_of_function(self, name: str, number: str = "1") -> str:
        """The tag of a function."""
        begin, end = self.function
        return begin + self.written(name) + (f'" index="{number}{end}' if self.counts else end)

    def tag_of_key(self, name: str, kind: str) -> str:
        """The tag of an argument whose value is of a type of JSON."""
        begin, end = self.key
        return begin + self.written(name) + (f'" {self.attribute}="{self.kinds[kind]}{end}' if self.attribute else end)


def _between(close: str) -> str:
    """Names before a tag."""
    inner = rf"{re.escape(close[0])}\n"
    return rf"[^{inner}\s](?:[^{inner}]*[^{inner}\s])?"


def _head(begin: str, end: str, name: str, more: str = "") -> re.Pattern[str]:
    """A tag with a name; `more`: attributes behind the quote that ends the name."""
    if not end:
        return re.compile(f"({name}){more}")
    if more.startswith((r"\s", r"(?:\s")):
        end, more = end[1:], f"{re.escape(end[0])}{more}"
    return re.compile(rf"{re.escape(begin)}[^\S\n]*({name})[^\S\n]*{more}{re.escape(end)}")


# Qwen3-Coder and Qwen3.5.
QWEN_TAGS = TagStyle(
    ("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", in_lines=True, wraps=True
)
SEED_TAGS = QWEN_TAGS._replace(wraps=False)
# GLM-4.5 and 4.6 write each tag on a line of its own, GLM-4.7 all on one.
GLM_TAGS = TagStyle(
    ("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "", in_lines=False, guesses=True
)
# Hy3.
HY_TAGS = TagStyle(
    ("", "<tool_sep:opensource>"), ("<arg_key:opensource>", "</arg_key:opensource>"),
    ("<arg_value:opensource>", "</arg_value:opensource>"), "", in_lines=False, guesses=True,
)
# MiniMax-M2.
MINIMAX_TAGS = TagStyle(
    ('<invoke name="', '">'), ('<parameter name="', '">'), ("", "</parameter>"), "</invoke>", in_lines=True,
    several=True, guesses=True,
)
# DeepSeek-V3.2 and V4.
DSML_TAGS = TagStyle(
    ('<｜DSML｜invoke name="', '">'), ('<｜DSML｜parameter name="', '">'), ("", "</｜DSML｜parameter>"),
    "</｜DSML｜invoke>", in_lines=True, several=True, attribute="string",
    kinds={"string": "true"} | dict.fromkeys(("integer", "number", "boolean", "null", "object", "array"), "false"),
)
# Kimi K3.
KIMI_TAGS = TagStyle(
    ('<|open|>call tool="', '"<|sep|>'), ('<|open|>argument key="', '"<|sep|>'), ("", "<|close|>argument<|sep|>"),
    "<|close|>call<|sep|>", in_lines=False, several=True, attribute="type", counts=True, escapes=True,
    kinds={each: each for each in ("string", "number", "boolean", "null", "object", "array")} | {"integer": "number"},
)
# MiniCPM5; the mark of calls has the beginning of the first tag.
MINICPM_TAGS = TagStyle(
    ("", '">'), ('<param name="', '">'), ("", "</param>"), "", in_lines=False, quotes=("<![CDATA[", "]]>")
)
# MiniMax-M3.
MINIMAX_M3_TAGS = TagStyle(
    (f'{NESTED_WORD}<invoke name="', '">'), (f"{NESTED_WORD}<", ">"), ("", f"{NESTED_WORD}</"),
    f"{NESTED_WORD}</invoke>", in_lines=False, several=True, guesses=True, nests=True,
)
