"""The contents of messages as clients send them, by kind: texts are read, and what is no text is named in its place."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from kvcache.server.refusals import BodyError
from kvcache.support.arguments import as_instance, short

__all__ = ["PARTS", "Contents", "as_list", "is_segment", "left_out"]

logger = logging.getLogger("kvcache")

_MOST = 100  # characters of a name in a placeholder
_MOST_WARNINGS = 16  # of an answer
_PLAIN = ("text/", "application/json")  # media types of files that are texts
# Where the texts of a value without a kind are: results of tools that a service ran.
_ANYWHERE = ("name", "title", "filename", "url", "text", "stdout", "stderr", "logs", "content", "output", "tools")


class Contents:
    """Reads the contents of one body as texts.

    Args:
        name: of the field, for messages.

    Attributes:
        warnings: for the client: what is not read and has a placeholder in the prompt.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.warnings: list[str] = []

    def text(self, part: Any, name: str | None = None) -> str:
        """The text of a part. BodyError: of an unknown kind, or a segment; `name`: of another field."""
        text = self._text(part, name or self.name)
        if is_segment(part):
            raise _elsewhere(name or self.name)
        return text

    def _text(self, part: Any, name: str) -> str:
        kind = as_instance(part, dict, name).get("type")
        if (read := PARTS.get(kind) if isinstance(kind, str) else None) is None:
            raise BodyError(f"{name}: expected parts of text, got {short(kind)}", "unsupported_parameter")
        cited = part.get("citations")
        if isinstance(cited, dict) and cited.get("enabled"):
            raise BodyError("citations: expected none, since they are not supported", "unsupported_parameter")
        return read(self, part)

    def part(self, part: Any, *, segments: bool = True) -> dict[str, Any]:
        """A part as templates know it, and whether it is a segment. What was no plain text has lines of its own.

        A segment begins with its first word: a template may trim what a message begins with.

        Args:
            segments: whether there may be one.
        """
        text, is_own = self._text(part, self.name), is_segment(part)
        if is_own and not segments:
            raise _elsewhere(self.name)
        if part["type"] not in _WORDS:
            text = f"{text}\n" if is_own else f"\n{text}\n"
        return {"type": "text", "text": text, **({"segment": True} if is_own else {})}

    def joined(self, content: Any, between: str = "") -> str:
        """The text of a content: a text, or parts."""
        if isinstance(content, str):
            return content
        return between.join(self.text(part) for part in as_list(content, self.name))

    def found(self, value: Any) -> str:
        """The texts anywhere in what a service has answered, a line each."""
        return "\n".join(self._found(value))

    def _found(self, value: Any) -> Iterator[str]:
        if isinstance(value, list):
            for each in value:
                yield from self._found(each)
        elif isinstance(value, dict) and str(value.get("type")) in _UNREAD:
            yield self.placeholder(value)
        elif isinstance(value, dict):
            yield from self._found([value.get(key) for key in _KEYS.get(str(value.get("type")), _ANYWHERE)])
        elif isinstance(value, str) and value:
            yield value

    def placeholder(self, part: Mapping[str, Any]) -> str:
        """The words in place of what is no text; the answer warns of it."""
        names = (part.get(key) for key in ("filename", "media_type", "file_id", "id"))
        named, kind = next((name for name in names if isinstance(name, str)), ""), str(part.get("type"))
        label = kind if not named else f"{kind} {named[:_MOST]}"
        warning = f"{self.name}: {short(label)[1:-1]} was not read, since this server reads texts alone"
        if warning not in self.warnings and len(self.warnings) < _MOST_WARNINGS:
            self.warnings.append(warning)
        return f"[{label}: not shown, only text can be read]"


def as_list(value: Any, name: str) -> list[Any]:
    """A list, in a field that may be a text instead, which the caller has looked for. TypeError: neither."""
    if not isinstance(value, list):
        raise TypeError(f"{name}: expected a text or a list, got {type(value).__name__}")
    return value


def is_segment(part: Mapping[str, Any]) -> bool:
    """Whether a part asks to be a segment: by `"segment": true`, or by a `cache_control` with the scope `segment`."""
    if (given := part.get("segment")) is not None:
        return bool(as_instance(given, bool, "segment"))
    mark = part.get("cache_control")
    if not isinstance(mark, dict) or mark.get("scope") != "segment":
        return False
    if mark.get("ttl") is not None:
        raise ValueError(f"cache_control: expected no ttl beside the scope segment, got {short(mark['ttl'])}")
    return True


def _elsewhere(name: str) -> BodyError:
    message = f"{name}: expected segments among the parts of messages alone, got one elsewhere"
    return BodyError(message, "unsupported_parameter")


@lru_cache(maxsize=256)
def left_out(kind: str) -> None:
    """Log, once for each kind, that an item without words of anybody is left out."""
    logger.warning("items of type %s are left out: they have no text", short(kind))


_Reader = Callable[[Contents, dict[str, Any]], str]


def _word(key: str, other: str = "") -> _Reader:
    """A part that is a text, under this key or the other one."""
    return lambda contents, part: str(as_instance(part.get(key, part.get(other)), str, contents.name))


def _at(*keys: str) -> _Reader:
    """A part whose texts are at some of these keys: texts, parts or lists of these, a line each."""

    def read(contents: Contents, part: dict[str, Any]) -> str:
        texts = []
        for key in keys:
            value = part.get(key)
            each = contents.text(value) if isinstance(value, dict) else contents.joined(value or "", "\n")
            texts += [each] if each else []
        return "\n".join(texts) or contents.placeholder(part)

    return read


def _unread(contents: Contents, part: dict[str, Any]) -> str:
    return contents.placeholder(part)


def _file(contents: Contents, part: dict[str, Any]) -> str:
    """A file whose data are here: that of a text is read."""
    inner = part.get("file")
    found = part | inner | {"type": part["type"]} if isinstance(inner, dict) else part
    data, media = found.get("file_data", found.get("data")), found.get("media_type")
    if isinstance(data, str) and data.startswith("data:"):
        head, _, data = data.partition(",")
        media = head[len("data:") :].removesuffix(";base64").partition(";")[0]
        found = {"media_type": media} | found
    if isinstance(data, str) and isinstance(media, str) and media.startswith(_PLAIN):
        try:
            return base64.b64decode(data, validate=True).decode()
        except ValueError:  # no base64, or no UTF-8
            pass
    return contents.placeholder(found)


# How a part is read, by its kind: plain texts, texts within other things, and what is none.
_WORDS = {
    "text": _word("text", "data"), "refusal": _word("refusal"),
    **dict.fromkeys(("input_text", "output_text", "summary_text", "reasoning_text"), _word("text")),
}
_KEYS = {
    "document": ("title", "context", "source"), "content": ("content",),
    "search_result": ("title", "source", "content"), "tool_reference": ("tool_name",), "compaction": ("content",),
    "web_search_result": ("title", "url"), "web_fetch_result": ("url", "content"), "logs": ("logs",),
    "web_search_tool_result_error": ("error_code",), "web_fetch_tool_result_error": ("error_code",),
    "code_execution_tool_result_error": ("error_code",), "tool_search_tool_result_error": ("error_code",),
    "tool_search_tool_search_result": ("tool_references",),
}
_UNREAD = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot", "video", "video_url"), _unread),
    **dict.fromkeys(("audio", "audio_url", "input_audio", "container_upload", "item_reference", "url"), _unread),
    "file": _file, "input_file": _file, "base64": _file,
}
PARTS: dict[str, _Reader] = {
    **_WORDS, **{kind: _at(*keys) for kind, keys in _KEYS.items()}, **_UNREAD,
}
