"""Bodies of requests that take memory or time if a server has no limit for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

__all__ = ["BODIES", "GRAMMARS"]

Body = Callable[[], tuple[str, Any]]
_LETTERS = "abcdefgh"


def _text(make: Callable[[], Any]) -> Body:
    return lambda: ("/v1/completions", make())


def _chat(**more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 64, **more}


def _schema(make: Callable[[], dict[str, Any]]) -> Body:
    """A chat whose answer is to follow a schema, which is another one each time."""

    def body() -> tuple[str, dict[str, Any]]:
        schema = make() | {"title": str(random.random())}
        return _chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})

    return body


def _custom(syntax: str, make: Callable[[], str]) -> Body:
    """A chat that must call a tool whose text follows a grammar, which is another one each time."""

    def body() -> tuple[str, dict[str, Any]]:
        definition = f"{make()}\n// {random.random()}" if syntax == "lark" else f"{make()}|{random.random()}"
        form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
        tool = {"type": "custom", "custom": {"name": "g", "format": form}}
        return _chat(tools=[tool], tool_choice="required")

    return body


BODIES: dict[str, Body] = {
    "a long text": _text(lambda: {"prompt": "a" * 3_000_000}),
    "a long word": _text(lambda: {"prompt": "\u00e9" * 1_500_000}),
    "a text of many messages": _text(lambda: {"prompt": ["hello"] * 100_000}),
    "all log-probabilities": _text(lambda: {"prompt": "x", "n": 32, "logprobs": 5, "max_tokens": 500}),
    "many end tokens": _text(lambda: {"prompt": "x", "stop_token_ids": list(range(400_000))}),
    "long stop strings": _text(lambda: {"prompt": "x", "stop": ["ab" * 100_000] * 4, "max_tokens": 200}),
    "many biases": _text(lambda: {"prompt": "x", "logit_bias": {str(i): -1 for i in range(200_000)}}),
    "many samples": _text(lambda: {"prompt": "x", "n": 128, "max_tokens": 500}),
    "deep JSON": _text(lambda: b"[" * 1_000_000),
    "no JSON": _text(lambda: random.randbytes(1_000_000)),
}
GRAMMARS: dict[str, Body] = {
    "a large multiple": _schema(lambda: {"type": "integer", "multipleOf": 99_999_989}),
    "a multiple within the limits": _schema(lambda: {
        "type": "integer", "multipleOf": random.randrange(60_001, 99_991)
    }),
    "several multiples": _schema(lambda: {
        "allOf": [{"type": "integer", "multipleOf": n} for n in (7, 11, 13, 17, 19)]
    }),
    "patterns at once": _schema(lambda: {
        "type": "string", "allOf": [{"pattern": f"^(.*{a}){{3}}.*$"} for a in _LETTERS]
    }),
    "letters that may be": _schema(lambda: {"type": "string", "pattern": f"^{'a?' * 4000}{'a' * 500}$"}),
    "many properties": _schema(lambda: {
        "type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}
    }),
    "many values": _schema(lambda: {"enum": [f"value {random.random()}" for _ in range(4000)]}),
    "a long text of each length": _schema(lambda: {"type": "string", "maxLength": random.randrange(5_000, 100_000)}),
    "empty lines": _custom("lark", lambda: 'start: "a"' + "\n" * 60_000),
    "a conjunction": _custom("lark", lambda: "start: A\nA: " + " & ".join(
        rf"/(.|\n)*{a}(.|\n){{{10 + i}}}{a}(.|\n)*/" for i, a in enumerate(_LETTERS)
    )),
    "many ways to read a text": _custom("lark", lambda: 'start: s\ns: s s | /[a-z ]/ | s s s |'),
    "many lexemes": _custom("lark", lambda: "start: (" + " | ".join(f"A{i}" for i in range(490)) + ")*\n" + "\n".join(
        f"A{i}: /[a-z]{{1,{i + 1}}}x{i}/" for i in range(490)
    )),
    "states without end": _custom("regex", lambda: r"(\w{1,300}\s){100}"),
}
