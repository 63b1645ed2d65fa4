"""Answers as messages, the form of Anthropic's interface."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from kvcache.sampling.dialects.transcript import ChannelPiece
from kvcache.server.asked import Asked
from kvcache.server.fingerprints import Comparison
from kvcache.server.forms import (
    HOLE,
    Choice,
    Form,
    Whole,
    call_id,
    event,
    is_json,
    quoted,
    repeated,
    segments_of,
    written_tokens,
)
from kvcache.server.refusals import message_refusal
from kvcache.server.written import JsonObject
from kvcache.serving import BatchEngine
from kvcache.serving import Request as EngineRequest
from kvcache.support.json_text import begun_object

__all__ = ["MessageForm"]

# The kind of a block for each channel, its first form, and the name and key of its deltas.
_BLOCKS: dict[str, tuple[dict[str, Any], str, str]] = {
    "reasoning": ({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    "content": ({"type": "text", "text": ""}, "text_delta", "text"),
    "arguments": ({"type": "tool_use", "input": {}}, "input_json_delta", "partial_json"),
}


class MessageForm(Form):
    """Writes the answer to a body of `/v1/messages`; see `Form`.

    Args:
        asked: the answer.
        engine: of the request.
        answer: the id of the answer.
        comparison: of the body with an earlier one; None: it asks for none.
    """

    def __init__(self, asked: Asked, engine: BatchEngine, answer: str, comparison: Comparison | None = None) -> None:
        super().__init__(asked, engine)
        self._comparison = comparison
        self._head = {"id": answer, "type": "message", "role": "assistant", "model": asked.model}
        self._open: str | None = None  # the channel of the block that is not ended
        self._delta = ""  # an event of that block; see `repeated`
        self._blocks = 0
        self._begun = False
        self._arguments = ""  # of the call that is not ended
        self._cut: list[str] = []  # warnings of calls that are not whole

    # -- streams --------------------------------------------------------------------------------------------

    def events(
        self, choice: Choice, pieces: Sequence[ChannelPiece], details: Mapping[str, Any], reason: str | None
    ) -> Iterator[str]:
        if not self._begun:
            self._begun = True
            usage = self._usage(choice) | {"output_tokens": 0}
            end = {"stop_reason": None, "stop_sequence": None}
            message: dict[str, Any] = {**self._head, "content": [], **end, "usage": usage, **self._diagnosis(choice)}
            message |= self.warnings
            yield self._event("message_start", message=message)
        for piece in pieces:
            yield from self._piece(piece)
        if reason is not None:
            yield from self._end_block()
            delta, usage = self._end(choice, reason), self._usage(choice)
            yield self._event("message_delta", delta=delta, usage=usage, **self.applied, **self._warned())

    def _piece(self, piece: ChannelPiece) -> Iterator[str]:
        channel = "arguments" if piece.channel == "call" else piece.channel
        first, kind, key = _BLOCKS[channel]
        if piece.channel == "call" or self._open != channel:
            yield from self._end_block()
            self._open = channel
            named = {"id": call_id(), "name": piece.text} if piece.channel == "call" else {}
            yield self._event("content_block_start", index=self._blocks, content_block={**first, **named})
            delta = {"type": kind, key: HOLE}
            self._delta = repeated(self._event("content_block_delta", index=self._blocks, delta=delta))
        if piece.channel != "call":
            self._arguments += piece.text if channel == "arguments" else ""
            yield self._delta % quoted(piece.text)

    def _end_block(self) -> Iterator[str]:
        if self._open is None:
            return
        if self._open == "arguments":
            self._end_call(self._blocks)
        if self._open == "reasoning":
            signature = {"type": "signature_delta", "signature": _SIGNATURE}
            yield self._event("content_block_delta", index=self._blocks, delta=signature)
        yield self._event("content_block_stop", index=self._blocks)
        self._open, self._blocks = None, self._blocks + 1

    def _end_call(self, place: int) -> dict[str, Any]:
        """The input of the call at this place: of one that was cut, the members that were whole, and a warning."""
        text, self._arguments = self._arguments, ""
        if not is_json(text):
            what = "expected a whole call, got one that was cut; its input has what was whole"
            self._cut.append(f"content.{place}: {what}")
        return begun_object(text, whole=True) or {}

    def _warned(self) -> dict[str, Any]:
        found = [*self._asked.warnings, *self._cut]
        return {"warnings": found} if found else {}

    def end(self, requests: Sequence[EngineRequest], choices: Sequence[Choice]) -> Iterator[str]:
        yield self._event("message_stop")

    def refusal(self, error: Exception, *, running: bool = False) -> Response:
        return message_refusal(error, running=running)

    def fail(self, error: Exception) -> Iterator[str]:
        yield event(json.loads(bytes(message_refusal(error, running=True).body)), "error")

    def ping(self) -> str:
        return self._event("ping")

    def _event(self, kind: str, **fields: Any) -> str:
        return event({"type": kind, **fields}, kind)

    # -- whole ----------------------------------------------------------------------------------------------

    def whole(self, requests: Sequence[EngineRequest], choices: Sequence[Whole]) -> JsonObject:
        ((choice, pieces, reason),) = choices
        content: list[dict[str, Any]] = []
        last = None
        for piece in [*pieces, None]:
            if last in ("call", "arguments") and (piece is None or piece.channel != "arguments"):
                content[-1]["input"] = self._end_call(len(content) - 1)
            if piece is None:
                break
            if piece.channel == "call":
                content.append({"type": "tool_use", "id": call_id(), "name": piece.text})
            elif piece.channel == "arguments":
                self._arguments += piece.text
            elif piece.channel == last:
                content[-1]["thinking" if piece.channel == "reasoning" else "text"] += piece.text
            elif piece.channel == "reasoning":
                content.append({"type": "thinking", "thinking": piece.text, "signature": _SIGNATURE})
            else:
                content.append({"type": "text", "text": piece.text})
            last = piece.channel
        end = self._end(choice, reason or "stop")
        more = {**self._diagnosis(choice), **self.applied, **self._warned()}
        return JsonObject(**self._head, content=content, **end, usage=self._usage(choice), **more)

    # -- both -----------------------------------------------------------------------------------------------

    def _end(self, choice: Choice, reason: str) -> dict[str, Any]:
        """Why the answer ended, and the stop string that it ended at."""
        if choice.spoken.has_calls and reason == "stop":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if not choice.spoken.stopped:
            return {"stop_reason": "end_turn", "stop_sequence": None}
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.spoken.stop_string}

    def _diagnosis(self, choice: Choice) -> dict[str, Any]:
        """Why less of the prompt was cached than the body expects, where it asks for that."""
        if self._comparison is None:
            return {}
        block = self._engine.shared_block_size
        return {"diagnostics": self._comparison.reason(choice.work.reused_tokens, block) if block else None}

    def _usage(self, choice: Choice) -> dict[str, Any]:
        """The numbers of tokens; those of the prompt that were cached, and those that are now, count apart."""
        work = choice.work
        written = written_tokens(self._engine, work)
        return {
            "input_tokens": work.whole_prompt - work.reused_tokens - written,
            "cache_read_input_tokens": work.reused_tokens, "cache_creation_input_tokens": written,
            "output_tokens": work.num_new, **segments_of(work),
        }


_SIGNATURE = "kvcache"  # clients send it back; nothing is signed
