"""How answers look: as they come, or as Markdown in a terminal."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["AnswerView", "MarkdownView", "answer_view", "note"]

_PAUSE = 0.08  # seconds between two pictures of a block that grows
_FENCE = re.compile(r" {0,3}(```+|~~~+)")


def answer_view(plain: bool) -> AnswerView:
    """A `MarkdownView` if the standard output is a terminal and `rich` is installed; else an `AnswerView`."""
    if not plain and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        try:
            return MarkdownView()
        except ImportError:
            pass
    return AnswerView()


def note(text: str) -> None:
    """Print what is no part of an answer to stderr; a terminal breaks it between words, and shows it dim."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        text = "\n".join(_wrapped(line, width) for line in text.splitlines())
        if os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR"):
            text = f"\x1b[2m{text}\x1b[22m"
    print(text, file=sys.stderr, flush=True)


def _wrapped(line: str, width: int) -> str:
    return textwrap.fill(line, width, subsequent_indent=" ", break_on_hyphens=False)


class AnswerView:
    """Prints the pieces of an answer as they come."""

    def add(self, piece: str) -> None:
        """Show more of the answer."""
        print(piece, end="", flush=True)

    def end(self) -> None:
        """Show that the answer has ended, whole or not."""
        print(flush=True)


class MarkdownView(AnswerView):
    """Shows an answer as Markdown, block by block; the last block is drawn again as it grows. Needs `rich`.

    Args:
        console: a `rich.console.Console`; None: one over the standard output.
    """

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False) if console is None else console
        self._make_live = Live
        self._live: Any = None
        self._text = ""  # blocks that are not printed yet
        self._drawn = 0.0

    def add(self, piece: str) -> None:
        self._text += piece
        done, self._text = _whole_blocks(self._text)
        if done:
            self._erase()
            self._console.print(_markdown(done))
            self._console.print()
        if self._text.strip() and time.monotonic() - self._drawn >= _PAUSE:
            if self._live is None:
                self._live = self._make_live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(_Tail(_markdown(self._text)), refresh=True)
            self._drawn = time.monotonic()

    def end(self) -> None:
        self._erase()
        if self._text.strip():
            self._console.print(_markdown(self._text))
        self._text = ""

    def _erase(self) -> None:
        """Take the block that grows off the screen."""
        live, self._live, self._drawn = self._live, None, 0.0
        if live is not None:
            live.stop()


class _Tail:
    """The last lines of something, as many as the screen has: a live picture cannot be higher."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        lines = console.render_lines(self._whole, options.update(height=None), pad=False)
        for line in lines[-max(1, console.size.height - 1) :]:
            yield from line
            yield Segment.line()


def _whole_blocks(text: str) -> tuple[str, str]:
    """Markdown that is complete, up to the last empty line outside fences that no indented line follows; the rest."""
    end, start, fence, after_empty = 0, 0, "", False
    for line in text.splitlines(keepends=True):
        if after_empty and not fence and line.strip() and not line[0].isspace():
            end = start
        if found := _FENCE.match(line):
            if not fence:
                fence = found[1]
            elif found[1].startswith(fence) and line.strip() == found[1]:
                fence = ""
        after_empty, start = not line.strip() and line.endswith("\n"), start + len(line)
    return text[:end], text[end:]


def _markdown(text: str) -> Any:
    """Markdown as models write it: a new line is one, and what looks like HTML, such as thoughts, is text."""
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown

    shown = Markdown("")
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    shown.markup, shown.parsed = text, parser.parse(text)
    for token in shown.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return shown
