"""How long clients ask prompts to stay cached."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kvcache.support.arguments import as_instance, short

__all__ = ["cache_options", "marked_ttl"]

_TTL, _UNITS = re.compile(r"(\d{1,5})([smh])"), {"s": 1.0, "m": 60.0, "h": 3600.0}
_MOST = 24 * 3600.0  # seconds
_DEFAULT = "5m"  # of a mark without a time


def cache_options(value: Any, name: str) -> float | None:
    """Read `prompt_cache_options`: the seconds of its `ttl`, at most those of a day; None: it has none."""
    ttl = as_instance(value, dict, name).get("ttl")
    if ttl is None:
        return None
    found = _TTL.fullmatch(as_instance(ttl, str, name))
    if found is None or not 0 < (seconds := int(found[1]) * _UNITS[found[2]]) <= _MOST:
        raise ValueError(f"{name}: expected a ttl such as 30m, up to 24h, got {short(ttl)}")
    return seconds


def marked_ttl(body: dict[str, Any]) -> str | None:
    """The longest `ttl` of the marks `cache_control` of a body of `/v1/messages`; None: it has no mark."""
    found = [
        as_instance(mark.get("ttl") or _DEFAULT, str, "cache_control")
        for block in _blocks(body) if isinstance(mark := block.get("cache_control"), dict)
    ]
    return max(found, key=lambda ttl: cache_options({"ttl": ttl}, "cache_control") or 0.0, default=None)


def _blocks(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects of a body that may have a mark."""
    waiting: list[Any] = [body, body.get("system"), body.get("tools"), body.get("messages")]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            yield each
            waiting.append(each.get("content"))
