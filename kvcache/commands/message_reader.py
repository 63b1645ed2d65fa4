"""`MessageReader`: the messages of a person at a terminal, or the lines of a pipe."""

from __future__ import annotations

import re
import select
import shutil
import sys
from threading import Event
from unicodedata import east_asian_width

__all__ = ["MessageReader"]

_QUOTES = '"""'
_OPENS = re.compile(rf"\s*(/\w+\s+)?{_QUOTES}")
_AT_ONCE = 0.02  # seconds: a terminal delivers the lines of a paste without a pause


class MessageReader:
    r'''Reads one message after another from the standard input.

    A person may write several lines as one message between `"""` and `"""`, or paste them: GNU readline tells a paste
    apart (bracketed paste), and without it, lines that come at once are one message. In a pipe each line is a message.

    Attributes:
        is_typed: whether the standard input is a terminal.
        is_shown: whether the standard output is one too, which then shows the prompt.
    '''

    def __init__(self) -> None:
        self.is_typed = sys.stdin.isatty()
        self.is_shown = self.is_typed and sys.stdout.isatty()
        if self.is_shown:
            _edit_lines()

    def read(self) -> str:
        """The next message, at least a character that is no space. EOFError: there is none."""
        while True:
            message = self._typed() if self.is_typed else input()
            if message.strip():
                return message

    def confirm(self, question: str, *, default: bool = True) -> bool:
        """Whether a person says yes; Enter alone is the default. False if there is no person."""
        if not self.is_typed:
            return False
        try:
            said = self.line(f"{question} {'[Y/n]' if default else '[y/N]'} ").strip().lower()
        except EOFError:
            return False
        return said in ("y", "yes") or (default and not said)

    def line(self, prompt: str) -> str:
        """A line of a person; EOFError: Ctrl-D."""
        if not self.is_shown:
            print(prompt, end="", file=sys.stderr, flush=True)
            return input("")
        text = input(prompt)
        columns, rows = shutil.get_terminal_size()
        if height(prompt + text, columns) > rows:  # readline has shown its beginning and its end alone
            print(f"\x1b[H\x1b[J{prompt}{visible(text)}", flush=True)
        return text

    def _typed(self) -> str:
        text = self.line("> ")
        if "\n" not in text and _OPENS.match(text):
            text = self._until_closed(text)
        lines = [text]
        while _has_more():
            try:
                lines.append(self.line(""))
            except EOFError:
                break
        return "\n".join(lines)

    def _until_closed(self, text: str) -> str:
        """The message that begins with quotes, without them: lines up to the next ones."""
        before, _, inside = text.partition(_QUOTES)
        while _QUOTES not in inside:
            inside += "\n" + self.line(". ")
        inside, _, behind = inside.partition(_QUOTES)
        return before + inside.strip("\n") + behind


def _has_more() -> bool:
    """Whether a terminal has more of what was typed or pasted."""
    if sys.platform == "win32":
        import msvcrt

        Event().wait(_AT_ONCE)
        return msvcrt.kbhit()
    return bool(select.select([sys.stdin], [], [], _AT_ONCE)[0])


def visible(text: str) -> str:
    """A text without what would control the terminal, as readline shows it."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else f"^{chr(ord(each) ^ 64)}" if each < "\x80" else "\ufffd"
        for each in text
    )


def height(text: str, columns: int) -> int:
    """The lines of a terminal that a text takes."""
    lines = (visible(line).expandtabs() for line in text.split("\n"))
    widths = (sum(1 + (east_asian_width(each) in "WF") for each in line) for line in lines)
    return sum(max(1, -(-width // max(1, columns))) for width in widths)


def _edit_lines() -> None:
    """Let `input` edit the line, know those before, and take a paste of several lines as one."""
    try:
        import readline
    except ImportError:
        return
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")
