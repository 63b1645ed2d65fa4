"""Fingerprints of the bodies of `/v1/messages`: where a conversation parts from the one that it went on from."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from hashlib import blake2b
from threading import Lock
from typing import Any, NamedTuple

from kvcache.support.arguments import as_instance

__all__ = ["Comparison", "Fingerprints", "without_billing"]

_KEPT = 4096  # of the newest answers, some hundred bytes each
_BILLING = "x-anthropic-billing-header:"  # begins a line of clients that differs with each request


class _Fingerprint(NamedTuple):
    """The digests of a body: of its parts, and of its first messages, with their number; tokens of its prompt."""

    model: str
    system: bytes
    tools: bytes
    messages: bytes
    length: int
    tokens: int


class Comparison(NamedTuple):
    """A body beside an earlier one.

    Attributes:
        kind: of the first difference; "": there is none.
        tokens: of the earlier prompt; 0: it is not known.
    """

    kind: str
    tokens: int

    def reason(self, cached_tokens: int, block_size: int) -> dict[str, Any] | None:
        """`diagnostics` of an answer whose prompt had `cached_tokens`; None: there is nothing to say.

        Where nothing differs and less was cached than full blocks of the earlier prompt, the memory was needed.
        """
        missed = max(0, self.tokens - cached_tokens)
        if self.kind == "previous_message_not_found":
            return {"cache_miss_reason": {"type": self.kind}}
        if missed < 2 * block_size:  # the last block of a prompt is seldom full, and its last token runs
            return None
        if not self.kind:
            return {"cache_miss_reason": {"type": "unavailable"}}
        return {"cache_miss_reason": {"type": self.kind, "cache_missed_input_tokens": missed}}


class Fingerprints:
    """Keeps those of the newest bodies by the ids of their answers. Threads may share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: OrderedDict[tuple[Hashable, str], _Fingerprint] = OrderedDict()

    def note(self, given: Mapping[str, Any], space: Hashable, answer: str, tokens: int) -> Comparison | None:
        """Keep the fingerprint of a body; compare it with the one that it names in `diagnostics`.

        Args:
            given: its fields.
            space: its namespace, outside of which nothing is known.
            answer: the id of its answer.
            tokens: of its prompt.

        Returns:
            None: it names none.
        """
        asked = as_instance(given.get("diagnostics", {}), dict, "diagnostics").get("previous_message_id")
        with self._lock:
            before = None if asked is None else self._known.get((space, str(asked)))
        digests = _prefixes(given["messages"])
        found = _Fingerprint(
            str(given["model"]), _digest(_system(given.get("system", ""))), _digest(given.get("tools", [])),
            digests[-1], len(digests) - 1, tokens,
        )
        with self._lock:
            self._known[space, answer] = found
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        if asked is None:
            return None
        return _compared(found, before, digests)


def _compared(found: _Fingerprint, before: _Fingerprint | None, digests: list[bytes]) -> Comparison:
    if before is None:
        return Comparison("previous_message_not_found", 0)
    for name in ("model", "system", "tools"):
        if getattr(found, name) != getattr(before, name):
            return Comparison(f"{name}_changed", before.tokens)
    goes_on = before.length < len(digests) and digests[before.length] == before.messages
    return Comparison("" if goes_on else "messages_changed", before.tokens)


def _prefixes(messages: list[Any]) -> list[bytes]:
    """The digests of no message, of the first one, of the first two, and so on."""
    digests = [b""]
    for message in messages:
        digests.append(blake2b(digests[-1] + _digest(message), digest_size=16).digest())
    return digests


def _digest(value: Any) -> bytes:
    written = json.dumps(_plain(value), sort_keys=True)
    return blake2b(written.encode(), digest_size=16).digest()


def _plain(value: Any) -> Any:
    """A value without marks for caches, which change nothing of a prompt unless they make segments."""
    if isinstance(value, dict):
        is_segment = isinstance(mark := value.get("cache_control"), dict) and mark.get("scope") == "segment"
        return {key: _plain(each) for key, each in value.items() if key != "cache_control" or is_segment}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _system(system: Any) -> list[str]:
    """The texts of a system message, without the line that bills."""
    blocks = system if isinstance(system, list) else [{"text": system}]
    texts = (str(block.get("text")) for block in blocks if isinstance(block, dict))
    return [*filter(None, map(without_billing, texts))]


def without_billing(text: str) -> str:
    """The text of a system message without the line at its beginning by which clients bill."""
    return text.partition("\n")[2].lstrip("\n") if text.startswith(_BILLING) else text
