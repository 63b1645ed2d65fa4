"""Bodies of `/v1/cache/hints`: what a client knows of a text while no request has it.

A body is that of a request, which names the text, with actions beside it: in the envelope `kv_hints` of vLLM and
SGLang, or as `nvext` of Dynamo. `branches` are messages that follow those of the body, one list for each text.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from kvcache.server.retention import seconds_of
from kvcache.serving import BatchEngine
from kvcache.support.arguments import as_count, as_finite, as_instance, short
from kvcache.texts.hints import HINTS, Hinted, head_of
from kvcache.texts.text import Tokens

__all__ = ["Action", "CacheHints", "cache_hints_of", "hinted"]

_MOST_ACTIONS, _MOST_BRANCHES = 16, 16
_MOST_NAME = 256  # characters
_PREFILL, _KEPT = "speculative_prefill", 60.0  # seconds that a text stays for which runs ahead
# The endpoints whose bodies name texts: the field of these, in the order in which it tells the endpoint.
_TEXTS = {
    "/v1/completions": "prompt", "/v1/responses": "input", "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
}
_OWN = ("branches", "endpoint", "kv_hints", "nvext")


class Action(NamedTuple):
    """An action on the texts of a body.

    Attributes:
        id: the client's name of it; None: it has none.
        kind: a name of `HINTS`; "speculative_prefill": the texts run, and nothing else.
        options: of `BatchEngine.hint`.
    """

    id: str | None
    kind: str
    options: dict[str, Any]


class CacheHints(NamedTuple):
    """A body, read.

    Attributes:
        endpoint: whose bodies have such a text.
        bodies: of a request each; with branches the first one is that of the head.
        has_branches: whether there are any.
        message: the client's name of the envelope; None: it has none.
        actions: in the order of the body.
    """

    endpoint: str
    bodies: list[dict[str, Any]]
    has_branches: bool
    message: str | None
    actions: list[Action]


def cache_hints_of(found: Mapping[str, Any]) -> CacheHints:
    """Read a body; the texts in it are not read.

    Raises:
        TypeError, ValueError: no text, no action, or another one; the name of what is wrong begins the message.
    """
    body = {name: value for name, value in found.items() if name not in _OWN and value is not None}
    said = {name: found.get(name) for name in _OWN}
    endpoint = said["endpoint"]
    if endpoint is None:
        endpoint = next((path for path, name in _TEXTS.items() if name in body), None)
        if endpoint is None:
            raise ValueError("messages: expected messages, input or a prompt, got none")
    elif not isinstance(endpoint, str) or endpoint not in _TEXTS:
        raise ValueError(f"endpoint: expected one of {', '.join(_TEXTS)}, got {short(endpoint)}")
    bodies, message, actions = [body], None, list[Action]()
    if (branches := said["branches"]) is not None:
        bodies += _branched(body, _TEXTS[endpoint], branches)
    if said["kv_hints"] is not None:
        message, actions = _envelope(said["kv_hints"])
    if said["nvext"] is not None:
        actions += _extension(said["nvext"])
    if not 0 < len(actions) <= _MOST_ACTIONS:
        raise ValueError(f"kv_hints: expected 1 to {_MOST_ACTIONS} actions, got {len(actions)}")
    return CacheHints(endpoint, bodies, len(bodies) > 1, message, actions)


def _branched(body: dict[str, Any], field: str, branches: Any) -> list[dict[str, Any]]:
    """The bodies of the texts that go on from that of a body."""
    if not 0 < len(as_instance(branches, list, "branches")) <= _MOST_BRANCHES:
        raise ValueError(f"branches: expected 1 to {_MOST_BRANCHES} lists of messages, got {len(branches)}")
    head = body.get(field)
    if field == "prompt" or not isinstance(head, list):
        raise ValueError(f"branches: expected a list of messages before them, got {short(head)}")
    return [body | {field: [*head, *as_instance(branch, list, "branches")]} for branch in branches]


def _envelope(value: Any) -> tuple[str | None, list[Action]]:
    """The name and the actions of `kv_hints`."""
    given, name = as_instance(value, dict, "kv_hints"), "kv_hints.actions"
    _named(given.get("protocol_version"), "kv_hints.protocol_version")
    actions = as_instance(given.get("actions"), list, name)[: _MOST_ACTIONS + 1]
    return _named(given.get("message_id"), "kv_hints.message_id"), [_action(each, name) for each in actions]


def _action(value: Any, name: str) -> Action:
    given = as_instance(value, dict, name)
    _named(given.get("action_version"), f"{name}.action_version")
    kind = as_instance(given.get("action_type"), str, f"{name}.action_type").removeprefix("kv.")
    if kind not in HINTS:
        raise ValueError(f"{name}.action_type: expected one of {', '.join(HINTS)}, got {short(kind)}")
    payload, options = as_instance(given.get("payload") or {}, dict, f"{name}.payload"), dict[str, Any]()
    for key, each in payload.items():
        if key not in HINTS[kind].takes:
            takes = " or ".join(HINTS[kind].takes)
            raise ValueError(f"{name}.payload: expected {takes} for {kind}, got {short(key)}")
        options[key] = _PAYLOAD[key](each, f"{name}.payload.{key}")
    return Action(_named(given.get("action_id"), f"{name}.action_id"), kind, options)


def _extension(value: Any) -> list[Action]:
    """The actions of `nvext`: what it says of requests changes nothing, for there is none."""
    found, given = [], as_instance(value, dict, "nvext")
    if (mark := given.get("cache_control")) is not None:
        seconds = seconds_of(as_instance(mark, dict, "nvext.cache_control").get("ttl") or "5m", "nvext.cache_control")
        found.append(Action(None, "pin", {"ttl": seconds}))
    hints = as_instance(given.get("agent_hints") or {}, dict, "nvext.agent_hints")
    if as_instance(hints.get(_PREFILL, False), bool, f"nvext.agent_hints.{_PREFILL}"):
        found.append(Action(None, _PREFILL, {}))
    return found


def hinted(
    engine: BatchEngine, model: str, given: CacheHints, texts: Sequence[Sequence[Tokens]], space: Hashable,
    adapter: str | None = None,
) -> dict[str, Any]:
    """Give the hints of a body to an engine; the answer.

    Args:
        model: its name.
        texts: the token ids of each of `given.bodies`.
        space: the namespace.
        adapter: of the texts.
    """
    head = texts[0][0] if given.has_branches else None
    prompts = [tokens for each in texts[given.has_branches :] for tokens in each]
    for action in given.actions:  # before any of them has an effect
        if action.kind in HINTS and len(prompts) < HINTS[action.kind].least:
            raise ValueError(f"branches: expected several for {action.kind}, got {len(prompts)} text")
    results = []
    for action in given.actions:
        found = _give(engine, action, prompts, head, space, adapter)
        tokens, cached = sum(each.tokens for each in found), sum(each.tokens_found for each in found)
        reads = action.kind == _PREFILL or (action.kind == "prefetch" and engine.tiers is not None)
        results.append({
            "action_id": action.id, "action_type": action.kind, "status": "accepted" if cached or reads else "missing",
            "tokens": tokens, "tokens_found": cached,
        })
    return {"object": "cache.hints", "model": model, "message_id": given.message, "results": results}


def _give(
    engine: BatchEngine, action: Action, prompts: Sequence[Tokens], head: Tokens | None, space: Hashable,
    adapter: str | None,
) -> list[Hinted]:
    """Give one hint. A branch leaves its head at a place of its own, up to which the text is not the branch's."""
    if action.kind == _PREFILL:
        found = engine.hint("pin", *prompts, namespace=space, ttl=_KEPT, adapter=adapter)
        if adapter is not None and engine.adapters[adapter].invocation_tokens is not None:
            adapter = None  # what comes before its invocation is the network's
        for tokens in prompts:
            engine.submit(tokens, namespace=space, keep=_KEPT, max_tokens=0, adapter=adapter)
        return [found]
    if head is not None and "after" in HINTS[action.kind].takes and "after" not in action.options:
        places = [len(head_of([head, tokens])) for tokens in prompts]
        return [
            engine.hint(action.kind, tokens, namespace=space, after=place, adapter=adapter)
            for tokens, place in zip(prompts, places, strict=True)
        ]
    return [engine.hint(action.kind, *prompts, namespace=space, adapter=adapter, **action.options)]


def _named(value: Any, name: str) -> str | None:
    if value is not None and len(as_instance(value, str, name)) > _MOST_NAME:
        raise ValueError(f"{name}: expected at most {_MOST_NAME} characters, got {len(value)}")
    return None if value is None else str(value)


def _seconds(value: Any, name: str) -> float:
    """A time such as "30m", or a number of seconds."""
    return seconds_of(value, name) if isinstance(value, str) else as_finite(value, name, 0.0)


_PAYLOAD = {"ttl": _seconds, "resume_in": _seconds, "after": as_count}
