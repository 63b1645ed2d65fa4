"""Answers as Markdown: the screen at the end has the whole answer once, however its pieces came."""

import io
import re

import pytest

from kvcache.commands.answer_view import AnswerView, MarkdownView, answer_view, note

console_of = pytest.importorskip("rich.console").Console
pytestmark = pytest.mark.one_build

ANSWER = """\
<think>
Which of both?
</think>

# Two ways

The first line
and the second, with **strong** words.

1. one
2. two

   still two

```python
def first():

    return 1
```

| a | b |
|---|---|
| 1 | 2 |

""" + "".join(f"{line} of a long paragraph\n" for line in range(30))


def screen(text):
    """The lines that a terminal shows after this output, those that have left it at the top included."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[\??\d*[A-Za-z]|\n|\r)", text):
        if part == "\n":
            row += 1
            lines.extend([""] * (row + 1 - len(lines)))
        elif part == "\r":
            continue
        elif up := re.fullmatch(r"\x1b\[(\d*)A", part):
            row -= int(up[1] or 1)
            assert row >= 0
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith("\x1b["):
            lines[row] += part
    return [line.rstrip() for line in lines]


def shown(pieces, monkeypatch, height=12):
    out = io.StringIO()
    size = {"width": 60, "height": height}
    console = console_of(file=out, force_terminal=True, color_system=None, legacy_windows=False, **size)
    monkeypatch.setattr("kvcache.commands.answer_view._PAUSE", 0.0)
    view = MarkdownView(console)
    for piece in pieces:
        view.add(piece)
    view.end()
    return screen(out.getvalue())


def test_markdown_comes_once(monkeypatch):
    """In one piece, by characters and by words, on a screen that is lower than the last block."""
    whole = shown([ANSWER], monkeypatch)
    for words in ("<think>", "Which of both?", "</think>", "Two ways", "The first line", "and the second, with strong"):
        assert sum(words in line for line in whole) == 1, words
    text = "\n".join(whole)
    assert "**" not in text
    assert "```" not in text
    assert re.search(r"def first\(\):\s+return 1", text), "an empty line does not end a fence"
    assert re.search(r" 2 two\n+ +still two", text), "nor a list whose next line is indented"
    assert [line for line in whole if "of a long paragraph" in line] == [f"{n} of a long paragraph" for n in range(30)]
    by_characters, by_words = shown(ANSWER, monkeypatch), shown(re.split(r"(?<= )", ANSWER), monkeypatch)
    assert [line for line in by_characters if line] == [line for line in by_words if line]
    assert "".join(by_characters).split() == "".join(whole).split()


def test_an_answer_that_is_stopped_is_shown(monkeypatch):
    """Also within a fence; and the next answer begins anew."""
    assert any("x = 1" in line for line in shown(["```python\nx = 1"], monkeypatch))
    assert any("**half" in line for line in shown(["a **half"], monkeypatch))


def test_where_no_terminal_is(capsys, monkeypatch):
    """The pieces as they are; notes go to the other stream, without colours."""
    view = answer_view(plain=False)
    assert type(view) is AnswerView
    view.add("**a**\n")
    view.end()
    note("about it")
    assert capsys.readouterr() == ("**a**\n\n", "about it\n")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert type(answer_view(plain=True)) is AnswerView
    assert type(answer_view(plain=False)) is MarkdownView
    note("dim")
    assert capsys.readouterr().err == "\x1b[2mdim\x1b[22m\n"
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "19")
    note("\nanswered: 7 of 8,192\n/help      lists them")
    assert capsys.readouterr().err == "\nanswered: 7 of\n 8,192\n/help      lists\n them\n", "between words"
    assert type(answer_view(plain=False)) is AnswerView
