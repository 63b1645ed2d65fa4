"""Answers as responses, the form of OpenAI's newer interface."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvcache.sampling.dialects.transcript import ChannelPiece
from kvcache.server.asked import Asked
from kvcache.server.forms import (
    HOLE,
    Choice,
    Form,
    Whole,
    call_id,
    event,
    is_json,
    now,
    quoted,
    repeated,
    segments_of,
    unique,
    written_tokens,
)
from kvcache.server.refusals import refusal
from kvcache.server.response_bodies import flattened, tools_of_body
from kvcache.server.written import JsonObject
from kvcache.serving import BatchEngine
from kvcache.serving import Request as EngineRequest

__all__ = ["ResponseForm"]

_ECHOED: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "reasoning": None,
    "temperature": None, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": None,
    "store": False, "service_tier": "default", "truncation": "disabled", "previous_response_id": None,
    "completed_at": None,
}
# Say what is done, not what was asked for.
_KEPT = {"completed_at", "store", "service_tier", "truncation", "previous_response_id"}


class ResponseForm(Form):
    """Writes the answer to a body of `/v1/responses`; see `Form`.

    Thoughts, text and each call are items of their own, in the order in which they come.

    Args:
        asked: the answer.
        engine: of the request.
        given: the fields of the body as they were sent.
    """

    def __init__(self, asked: Asked, engine: BatchEngine, given: Mapping[str, Any]) -> None:
        super().__init__(asked, engine)
        said = {name: given.get(name) for name in _ECHOED if name not in _KEPT and given.get(name) is not None}
        head = {"id": unique("resp_"), "object": "response", "created_at": now(), "model": asked.model}
        self._head: dict[str, Any] = {**head, **_ECHOED, **said, "error": None, "incomplete_details": None}
        self._head |= self.warnings
        talk = asked.conversation
        self._customs = frozenset(() if talk is None else talk.customs)
        self._names = flattened(tools_of_body(given))
        self._items: list[dict[str, Any]] = []
        self._open = False  # whether the last item is not ended
        self._delta = ""  # an event of the last item; see `repeated`
        self._number = -1  # of the last event

    # -- items ----------------------------------------------------------------------------------------------

    def _add(self, piece: ChannelPiece) -> Iterator[str]:
        """Add a piece to the items; the events that say so."""
        kind = {"content": "message", "reasoning": "reasoning"}.get(piece.channel, "")
        if piece.channel == "call":
            kind = "custom_tool_call" if piece.text in self._customs else "function_call"
        elif piece.channel == "arguments":
            kind = self._items[-1]["type"]
        if piece.channel == "call" or not self._open or self._items[-1]["type"] != kind:
            yield from self._end_item()
            yield from self._begin_item(kind, piece)
        item = self._items[-1]
        if kind in _CALLS:
            if piece.channel == "arguments":
                item[_CALLS[kind][0]] += piece.text
                yield self._next(piece.text)
            return
        item["content"][0]["text"] += piece.text
        yield self._next(piece.text)

    def _next(self, text: str) -> str:
        """The event that adds a text to the last item."""
        self._number += 1
        return self._delta % (self._number, quoted(text))

    def _begin_item(self, kind: str, piece: ChannelPiece) -> Iterator[str]:
        item: dict[str, Any] = {"type": kind, "id": unique(_PREFIXES[kind]), "status": "in_progress"}
        if kind in _CALLS:
            item |= {"call_id": call_id(), "name": piece.text, _CALLS[kind][0]: ""}
            item |= self._names.get(piece.text, {})
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": [], "encrypted_content": None}
        self._items.append(item)
        self._open = True
        yield self._event("response.output_item.added", None, item=dict(item))
        if kind == "message":
            item["content"] = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
            yield self._event("response.content_part.added", item, content_index=0, part=dict(item["content"][0]))
        elif kind == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": ""}]
        name, more = _DELTAS[kind]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        self._delta = repeated(event({"type": name, "sequence_number": HOLE, **place, **more}, name))

    def _end_item(self, status: str = "completed") -> Iterator[str]:
        if not self._open:
            return
        self._open, item = False, self._items[-1]
        item["status"] = status
        if item["type"] in _CALLS:
            key, name = _CALLS[item["type"]]
            is_whole = key == "input" or is_json(item[key])
            item["status"] = "completed" if is_whole else "incomplete"
            yield self._event(f"response.{name}.done", item, **{"name": item["name"], key: item[key]})
        elif item["type"] == "message":
            part = item["content"][0]
            yield self._event("response.output_text.done", item, content_index=0, text=part["text"], logprobs=[])
            yield self._event("response.content_part.done", item, content_index=0, part=part)
        else:
            text = item["content"][0]["text"]
            yield self._event("response.reasoning_text.done", item, content_index=0, text=text)
        yield self._event("response.output_item.done", None, item=item)

    # -- streams --------------------------------------------------------------------------------------------

    def begin(self, requests: Sequence[EngineRequest]) -> Iterator[str]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def events(
        self, choice: Choice, pieces: Sequence[ChannelPiece], details: Mapping[str, Any], reason: str | None
    ) -> Iterator[str]:
        for piece in pieces:
            yield from self._add(piece)
        if reason is not None:
            yield from self._end_item("incomplete" if reason == "length" else "completed")
            found = self._ended(choice, reason)
            yield self._event(f"response.{found['status']}", response=found)

    def fail(self, error: Exception) -> Iterator[str]:
        found = json.loads(bytes(refusal(error, running=True).body))["error"]
        said = {"code": found["code"] or "server_error", "message": found["message"]}
        yield self._event("response.failed", response=self._response("failed") | {"error": said})

    def ping(self) -> str:
        return self._event("response.in_progress", response=self._response("in_progress"))

    def _event(self, kind: str, about: Mapping[str, Any] | None = None, **fields: Any) -> str:
        """An event, with the place of the item that it is about."""
        self._number += 1
        place: dict[str, Any] = {} if about is None else {"item_id": about["id"]}
        if about is not None or "item" in fields:
            place["output_index"] = len(self._items) - 1
        return event({"type": kind, "sequence_number": self._number, **place, **fields}, kind)

    # -- whole ----------------------------------------------------------------------------------------------

    def whole(self, requests: Sequence[EngineRequest], choices: Sequence[Whole]) -> JsonObject:
        ((choice, pieces, reason),) = choices
        for _ in self.events(choice, pieces, {}, reason or "stop"):
            pass  # the items are what counts
        return JsonObject(self._ended(choice, reason or "stop"))

    # -- both -----------------------------------------------------------------------------------------------

    def _response(self, status: str) -> dict[str, Any]:
        return {**self._head, "status": status, "output": list(self._items), "usage": None}

    def _ended(self, choice: Choice, reason: str) -> dict[str, Any]:
        """The response with its end."""
        work, is_cut = choice.work, reason == "length"
        found = self._response("incomplete" if is_cut else "completed")
        details = {"cached_tokens": work.reused_tokens, "cache_write_tokens": written_tokens(self._engine, work)}
        usage = {
            "input_tokens": work.whole_prompt, "input_tokens_details": details, "output_tokens": work.num_new,
            "output_tokens_details": {"reasoning_tokens": choice.spoken.reasoning_tokens},
            "total_tokens": work.whole_prompt + work.num_new, **segments_of(work),
        }
        if not is_cut:
            found["completed_at"] = now()
        return found | {"usage": usage, "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None}


_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}
# The field of a call's input and the name of its events, by the kind of call.
_CALLS = {
    "function_call": ("arguments", "function_call_arguments"), "custom_tool_call": ("input", "custom_tool_call_input"),
}
# The name of the events that add a text to an item, and their fields beside its place.
_DELTAS: dict[str, tuple[str, dict[str, Any]]] = {
    "message": ("response.output_text.delta", {"content_index": 0, "delta": HOLE, "logprobs": []}),
    "reasoning": ("response.reasoning_text.delta", {"content_index": 0, "delta": HOLE}),
    **{kind: (f"response.{name}.delta", {"delta": HOLE}) for kind, (_, name) in _CALLS.items()},
}
