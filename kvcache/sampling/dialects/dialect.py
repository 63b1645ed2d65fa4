"""A dialect: the marks by which a family of networks writes thoughts and calls, and what reads an answer in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from kvcache.sampling.dialects.call_span import CallSpan, CallStream
from kvcache.sampling.dialects.call_texts import WholeReader
from kvcache.sampling.dialects.name_style import NameStyle
from kvcache.sampling.dialects.object_style import ObjectStyle
from kvcache.sampling.dialects.tag_style import TagStyle
from kvcache.sampling.dialects.transcript import Transcript

__all__ = ["AnswerReader", "Dialect", "LoneCall"]


class AnswerReader(Protocol):
    """A state machine over the texts and marks of one answer; what it reads goes to a transcript."""

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is a thought, as far as is known."""

    def text(self, text: str) -> None:
        """Read a text without marks."""

    def mark(self, mark: str, special: bool) -> None:
        """Read a mark; `special`: it has special tokens, and is no text where it has no meaning."""

    def end(self) -> None:
        """Note that no more follows."""


class LoneCall(NamedTuple):
    """How calls begin whose mark a network leaves out, where the name is that of a function which may be called.

    Attributes:
        calls: the marks around each.
        stream: makes the reader of what stands between, of a `CallSpan` and the style.
        style: the words of calls.
    """

    calls: tuple[str, str]
    stream: Callable[..., CallStream]
    style: TagStyle | NameStyle


class Dialect(NamedTuple):
    """The words of a family.

    Attributes:
        calls: the mark that begins calls, and the one that ends them; "" where calls end with the answer, or with the
            next ones.
        stream: makes the reader of what stands between these, of a `CallSpan` and the style, if there is one; None:
            there are no calls.
        style: the words of calls, where readers of one kind read several families.
        lone: other marks of calls; None: there are none.
        section: the marks around all calls, which say nothing; None: there are none.
        read: reads what it leaves, as a whole.
        thoughts: the marks around thoughts; None: there are none.
        titled: whether thoughts begin with a line of their own, which is none.
        more: marks that count within calls and thoughts, such as quotes, if they are special tokens.
        silent: marks that say nothing.
        leads: whether an answer that begins as calls do, without a mark, is calls.
        spaced: whether an answer may begin with a new line.
        framed: how many of the silent marks, the first ones, may stand before calls without content.
        reader: makes the reader of an answer, of the dialect, a transcript, whether calls count, their schemas, and
            whether the answer begins with a thought.
    """

    reader: Callable[[Dialect, Transcript, bool, Mapping[str, Any], bool], AnswerReader]
    calls: tuple[str, str] | None = None
    stream: Callable[..., CallStream] | None = None
    read: WholeReader | None = None
    thoughts: tuple[str, str] | None = None
    titled: bool = False
    more: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    leads: bool = False
    spaced: bool = False
    framed: int = 0
    style: TagStyle | NameStyle | ObjectStyle | None = None
    section: tuple[str, str] | None = None
    lone: LoneCall | None = None

    def reader_of_calls(self, span: CallSpan, lone: LoneCall | None = None) -> CallStream:
        """The reader of a span of calls; `lone`: of those without their first mark."""
        stream, style = (self.stream, self.style) if lone is None else (lone.stream, lone.style)
        if stream is None:
            raise ValueError("stream: expected a dialect with calls, got one without")
        return stream(span) if style is None else stream(span, style)

    @property
    def call_marks(self) -> tuple[str, ...]:
        """The marks that begin calls."""
        return tuple(form[0] for form in (self.calls, self.lone and self.lone.calls) if form)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks."""
        lone = self.lone.calls if self.lone else ()
        found = (*(self.calls or ()), *lone, *(self.thoughts or ()), *(self.section or ()), *self.more, *self.silent)
        return tuple(dict.fromkeys(mark for mark in found if mark))
