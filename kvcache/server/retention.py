"""How long clients ask prompts to stay cached, and up to where."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from kvcache.support.arguments import as_instance, short

__all__ = ["MOST_MARKS", "CacheMark", "breakpoints", "cache_options", "cache_retention", "marked_ttl", "seconds_of"]

_TTL, _UNITS = re.compile(r"(\d{1,5})([smh])"), {"s": 1.0, "m": 60.0, "h": 3600.0}
_MOST = 24 * 3600.0  # seconds
_DEFAULT = "5m"  # of a mark without a time
MOST_MARKS = 4  # of a body, the last ones, as in the interfaces: each is looked for in the prompt


class CacheMark(NamedTuple):
    """The end of a block that is to stay cached.

    Attributes:
        message: the number of its message.
        characters: how many of the message's text are before it; None: all, and what else the message has.
        seconds: for which it stays, from its last use on.
    """

    message: int
    characters: int | None
    seconds: float


def seconds_of(ttl: Any, name: str) -> float:
    """Read a time such as "30m", at most a day."""
    found = _TTL.fullmatch(as_instance(ttl, str, name))
    if found is None or not 0 < (seconds := int(found[1]) * _UNITS[found[2]]) <= _MOST:
        raise ValueError(f"{name}: expected a ttl such as 30m, up to 24h, got {short(ttl)}")
    return seconds


def cache_options(value: Any, name: str) -> float | None:
    """Read `prompt_cache_options`: the seconds of its `ttl`; None: it has none."""
    ttl = as_instance(value, dict, name).get("ttl")
    return None if ttl is None else seconds_of(ttl, name)


def cache_retention(value: Any, name: str) -> float | None:
    """Read `prompt_cache_retention`: the seconds of a day; None: as long as there is memory."""
    if value not in ("24h", "in_memory", "in-memory"):
        raise ValueError(f"{name}: expected in_memory or 24h, got {short(value)}")
    return _MOST if value == "24h" else None


def breakpoints(messages: Any, read: Any, ttl: float | None) -> tuple[CacheMark, ...]:
    """The `prompt_cache_breakpoint`s of parts.

    Args:
        messages: as they were sent.
        read: the same with texts for parts.
        ttl: seconds of marks without a time.
    """
    found = []
    for number, message in enumerate(messages if isinstance(messages, list) else []):
        content, characters = message.get("content") if isinstance(message, dict) else None, 0
        for place, part in enumerate(content if isinstance(content, list) else []):
            characters += len(read[number]["content"][place]["text"])
            if (mark := part.get("prompt_cache_breakpoint")) is not None:
                name = "prompt_cache_breakpoint"
                seconds = cache_options(mark, name) or ttl or seconds_of(_DEFAULT, name)
                found.append(CacheMark(number, characters, seconds))
    return tuple(found[-MOST_MARKS:])


def marked_ttl(block: dict[str, Any]) -> float | None:
    """The seconds of the mark `cache_control` of a block; None: it has none. ValueError: it is that of a segment."""
    mark = block.get("cache_control")
    if not isinstance(mark, dict):
        return None
    if mark.get("scope") == "segment":
        raise ValueError("cache_control: expected the scope segment at parts of a user's message, got it elsewhere")
    return seconds_of(mark.get("ttl") or _DEFAULT, "cache_control")
