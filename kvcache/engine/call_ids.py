"""Ids of calls as Kimi K2 writes them: its templates repeat them, and the network goes on with what it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["with_counted_ids"]


def with_counted_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose calls have the ids `functions.NAME:NUMBER`, counted from 0 on, and results those of their calls.

    An id without a call before it stays as it is.
    """
    known: dict[Any, str] = {}
    found, count = [], 0
    for message in messages:
        changed = dict(message)
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            changed["tool_calls"] = list(calls)
            for place, call in enumerate(calls):
                function = call.get("function", call) if isinstance(call, dict) else None
                if isinstance(function, dict) and isinstance(name := function.get("name"), str):
                    own = f"functions.{name}:{count}"
                    if isinstance(given := call.get("id"), str):
                        known[given] = own
                    changed["tool_calls"][place] = call | {"id": own}
                    count += 1
        if isinstance(result := message.get("tool_call_id"), str) and result in known:
            changed["tool_call_id"] = known[result]
        found.append(changed)
    return found
