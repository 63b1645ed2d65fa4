"""The arguments of one function whose name came before: an object of JSON, which comes as it is written."""

from __future__ import annotations

from kvcache.sampling.dialects.call_span import CallSpan
from kvcache.sampling.dialects.json_scan import JsonScan

__all__ = ["ArgumentCall"]


class ArgumentCall:
    """Reads them; what is no object is kept, and what follows them is content.

    Args:
        span: that they are in.
        name: of the function.
        close: what may follow them, white space left out, and says nothing.
    """

    def __init__(self, span: CallSpan, name: str, close: str = "") -> None:
        self._span, self._name = span, name
        self._close = close.strip()  # "": it has come, or something else
        self._tail = ""  # what may be it
        self._scan: JsonScan | None = None  # None: they have not begun
        self._is_other = False  # no call

    @property
    def is_open(self) -> bool:
        return self._scan is not None and self._scan.is_in_string

    @property
    def is_none(self) -> bool:
        return self._is_other

    def add(self, text: str) -> None:
        at = 0
        if self._scan is None and not self._is_other:
            at = len(text) - len(text.lstrip(" \t\n\r"))
            self._span.keep(text[:at])
            if at == len(text):
                return
            self._is_other = text[at] != "{" or not self._span.begin(self._name)
        if self._is_other:
            self._span.keep(text[at:])
            return
        self._scan = scan = self._scan or JsonScan(lenient=True)
        if not scan.is_whole and not scan.is_broken:
            at, written = scan.take(text, at)
            self._span.put(written)
            if scan.is_whole or scan.is_broken:
                self._span.finish(is_whole=scan.is_whole)
        self._follow(text[at:])

    def _follow(self, text: str) -> None:
        """Read what stands behind the arguments."""
        if self._close:
            self._tail = (self._tail + text).lstrip()
            if self._close.startswith(self._tail):
                return
            text, self._tail = self._tail.removeprefix(self._close), ""
            self._close = ""
        self._span.say(text)

    def end(self, close: str) -> None:
        scan = self._scan
        if scan is not None and not scan.is_whole and not scan.is_broken:
            self._span.finish(is_whole=False)
        if self._tail != self._close:
            self._span.say(self._tail)
        self._span.end(close)
