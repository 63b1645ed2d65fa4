"""The output of the demo: a live panel and a progress bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.demo.run import Pass, Request

__all__ = ["Display", "TerminalDisplay", "display"]

BAR = 40  # characters of the longest bar


def display() -> Display:
    """A `TerminalDisplay` if standard output is a terminal and `rich` is installed, else plain lines."""
    if sys.stdout.isatty():
        try:
            return TerminalDisplay()
        except ImportError:
            pass
    return Display()


class Display:
    """Prints plain lines."""

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def line(self, text: str = "") -> None:
        """Print one line of text."""
        print(text, flush=True)

    def start(self, title: str, requests: int) -> None:
        """The demo begins, with `requests` requests in total."""
        self.line(title)

    def heading(self, text: str) -> None:
        """A pass begins."""
        self.line()
        self.line(f"-- {text} --")
        self.line(f"{'user':>5} turn {'prompt':>7} {'reused':>7} {'prefilled':>9} {'first token':>12} {'speed':>12}")

    def prompt(self, user: str, turn: int) -> None:
        """A request begins."""

    def text(self, piece: str) -> None:
        """New characters of the answer."""

    def request(self, request: Request) -> None:
        """A request has ended."""
        self.line(
            f"{request.user:>5} {request.turn:>4} {request.prompt:>7} {request.reused:>7} {request.prefilled:>9} "
            f"{1e3 * request.first:>9.1f} ms {request.rate:>6.0f} tok/s"
        )

    def summary(self, cold: Pass, warm: Pass, same: bool) -> None:
        """Print the table of both passes, a bar chart, and whether the answers are identical."""
        self.line()
        self.table(rows(cold, warm))
        self.line()
        self.line("time to first token, by request (cold #, warm =)")
        longest = max(request.first for request in cold.requests + warm.requests)
        for c, w in zip(cold.requests, warm.requests, strict=True):
            self.line(f"{c.user:>5} {c.turn} {bar('#', c.first, longest)} {1e3 * c.first:.1f} ms")
            self.line(f"{'':>7} {bar('=', w.first, longest)} {1e3 * w.first:.1f} ms")
        self.line()
        self.line(f"outputs cold and warm: {'identical' if same else 'DIFFERENT'}, {len(warm.requests)} requests")

    def table(self, cells: list[tuple[str, ...]]) -> None:
        """Print four columns; the first row has their names."""
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for name, *values in cells:
            padded = [value.rjust(width) for value, width in zip(values, widths[1:], strict=True)]
            self.line("  ".join([name.ljust(widths[0]), *padded]).rstrip())


def rows(cold: Pass, warm: Pass) -> list[tuple[str, ...]]:
    """The rows of the table that compares both passes."""
    first, later = (cold.mean_first(), warm.mean_first()), (cold.mean_first(later=True), warm.mean_first(later=True))
    prefilled = [sum(request.prefilled for request in p.requests) for p in (cold, warm)]
    saved = 1 - prefilled[1] / prefilled[0]
    return [
        ("", "cold", "warm", "gain"),
        ("time to first token, mean", *(f"{1e3 * t:.1f} ms" for t in first), f"{first[0] / first[1]:.1f}x"),
        ("the same, after the first request", *(f"{1e3 * t:.1f} ms" for t in later), f"{later[0] / later[1]:.1f}x"),
        ("prompt tokens prefilled", *(f"{n}" for n in prefilled), f"{100 * saved:.1f} % saved"),
        ("prompt tokens found in the cache", *(f"{100 * p.hit_rate:.1f} %" for p in (cold, warm)), ""),
        (
            "KV bytes of all conversations",
            *(f"{p.kv_bytes / 2**20:.1f} MiB" for p in (cold, warm)),
            f"{cold.kv_bytes / warm.kv_bytes:.1f}x",
        ),
    ]


def bar(character: str, value: float, longest: float) -> str:
    """A bar of `BAR * value / longest` characters, at least one."""
    return character * max(1, round(BAR * value / longest))


class TerminalDisplay(Display):
    """Shows finished requests, a live panel with the current answer, and a progress bar. Needs `rich`."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._task = self._progress.add_task("requests", total=None)
        self._live = Live(console=self._console, refresh_per_second=20, transient=True)
        self._title = self._answer = ""

    def __enter__(self) -> Display:
        self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._live.stop()

    def line(self, text: str = "") -> None:
        self._console.print(text, markup=False)

    def start(self, title: str, requests: int) -> None:
        self.line(title)
        self._progress.update(self._task, total=requests)

    def prompt(self, user: str, turn: int) -> None:
        self._title, self._answer = f"{user}, turn {turn}", ""

    def text(self, piece: str) -> None:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        self._answer += piece
        shown = "\n".join(self._answer.splitlines()[-8:])
        self._live.update(Group(Panel(Text(shown), title=self._title, height=10), self._progress))

    def request(self, request: Request) -> None:
        super().request(request)
        self._progress.advance(self._task)

    def table(self, cells: list[tuple[str, ...]]) -> None:
        from rich.table import Table

        table = Table(*cells[0])
        for column in table.columns[1:]:
            column.justify = "right"
        for row in cells[1:]:
            table.add_row(*row)
        self._console.print(table)
