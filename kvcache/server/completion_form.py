"""Answers as completions and chat completions, the forms of OpenAI's older interfaces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.sampling.dialects.transcript import Channel, ChannelPiece
from kvcache.sampling.tokenizer_errors import decoded
from kvcache.server.asked import Asked
from kvcache.server.forms import (
    HOLE,
    Choice,
    Counts,
    Form,
    Whole,
    call_id,
    counts_of,
    event,
    now,
    quoted,
    repeated,
    stop_reason,
    unique,
)
from kvcache.server.logprobs import Offsets, TokenTexts, of_chat, of_texts
from kvcache.server.refusals import refusal
from kvcache.server.written import JsonObject
from kvcache.serving import BatchEngine
from kvcache.serving import Request as EngineRequest

__all__ = ["CompletionForm"]

_TEXTS = ("content", "reasoning")
_ARGUMENTS = {"function": "arguments", "custom": "input"}  # by the kind of a tool


class CompletionForm(Form):
    """Writes an answer to a body, a chat or a text; see `Form`.

    Args:
        asked: the answer.
        engine: of the requests.
        texts: of the engine's tokens.
        prompts: the tokens of each prompt, with those that it stands behind.
    """

    def __init__(
        self, asked: Asked, engine: BatchEngine, texts: TokenTexts, prompts: Sequence[npt.NDArray[np.uint32]] = ()
    ) -> None:
        super().__init__(asked, engine)
        self._texts, self._prompts = texts, prompts
        self._offsets: dict[int, Offsets] = {}
        self._calls: dict[int, int] = {}  # of each sample that has some: how many
        self._begun: set[int] = set()
        self._plain: dict[tuple[int, Channel], str] = {}  # of each sample and channel: events with a text alone
        talk = asked.conversation
        self._chat, self._customs = talk is not None, frozenset(() if talk is None else talk.customs)
        self._kinds: dict[int, str] = {}  # of the last call of each sample
        kind, prefix = ("chat.completion", "chatcmpl-") if self._chat else ("text_completion", "cmpl-")
        kind += ".chunk" if self._chat and asked.stream else ""
        self._head = {"id": unique(prefix), "object": kind, "created": now(), "model": asked.model}
        self._common = self._head | ({"usage": None} if asked.with_usage else {})

    # -- streams --------------------------------------------------------------------------------------------

    def events(
        self, choice: Choice, pieces: Sequence[ChannelPiece], details: Mapping[str, Any], reason: str | None
    ) -> Iterator[str]:
        number, first = choice.number, choice.number not in self._begun
        if not first and reason is None and not details and all(piece.channel in _TEXTS for piece in pieces):
            return (self._text_event(number, piece) for piece in pieces)  # most events
        return self._other_events(choice, pieces, details, reason, first)

    def _text_event(self, number: int, piece: ChannelPiece) -> str:
        """An event that says nothing but a text."""
        if (found := self._plain.get((number, piece.channel))) is None:
            sample = self._sample(number, self._delta(number, ChannelPiece(piece.channel, HOLE)))
            found = self._plain[number, piece.channel] = repeated(event(dict(self._common, choices=[sample])))
        return found % quoted(piece.text)

    def _other_events(
        self, choice: Choice, pieces: Sequence[ChannelPiece], details: Mapping[str, Any], reason: str | None,
        first: bool,
    ) -> Iterator[str]:
        number = choice.number
        self._begun.add(number)
        if first and self._asked.echo:
            pieces = [ChannelPiece("content", self._prompt_text(choice)), *pieces]
        deltas = [self._delta(number, piece) for piece in pieces]
        if not deltas and (details or reason is not None or first):
            deltas = [{} if number in self._calls else self._content("")]
        for place, delta in enumerate(deltas):
            role = {"role": "assistant"} if first and not place and self._chat else {}
            end = reason if place == len(deltas) - 1 else None
            beside = {} if place else details
            found = self._sample(number, role | delta, beside, _with_calls(choice, end))
            found |= {} if end is None else stop_reason(choice.work)
            common = self._common | self.applied | self.warnings if first and not place else self._common
            if first and not place and self._asked.with_tokens:
                common, found = self._with_prompt(common, found, choice)
            if "logprobs" in beside:
                yield event(JsonObject(**common, choices=iter([found])))
            else:  # one call of the encoder
                yield event(dict(common, choices=[found]))

    def _sample(
        self, number: int, delta: dict[str, Any], beside: Mapping[str, Any] | None = None, reason: str | None = None
    ) -> JsonObject:
        """The part of an event that is about one sample."""
        content = {"delta": delta} if self._chat else delta
        return JsonObject(index=number, **content, **{"logprobs": None, **(beside or {})}, finish_reason=reason)

    def _with_prompt(
        self, answer: dict[str, Any], found: JsonObject, choice: Choice
    ) -> tuple[dict[str, Any], JsonObject]:
        """An answer and a sample of it, one of which has the token ids of the prompt."""
        prompt = {"prompt_token_ids": self._prompt(choice)}
        return (answer | prompt, found) if self._chat else (answer, JsonObject(found | prompt))

    def _prompt(self, choice: Choice) -> list[int]:
        ids: list[int] = self._prompts[choice.number // self._asked.n].tolist()
        return ids

    def _prompt_text(self, choice: Choice) -> str:
        prompt = self._asked.prompts[choice.number // self._asked.n]
        return prompt if isinstance(prompt, str) else decoded(self._texts.tokenizer, prompt)

    def _content(self, text: str) -> dict[str, Any]:
        return {"content": text} if self._chat else {"text": text}

    def _delta(self, number: int, piece: ChannelPiece) -> dict[str, Any]:
        if piece.channel == "content":
            return self._content(piece.text)
        if piece.channel == "reasoning":
            return {"reasoning_content": piece.text}
        if piece.channel == "call":
            self._calls[number] = self._calls.get(number, 0) + 1
            call = self._call(piece.text)
            self._kinds[number] = call["type"]
        else:
            kind = self._kinds[number]
            call = {kind: {_ARGUMENTS[kind]: piece.text}}
        return {"tool_calls": [{"index": self._calls[number] - 1, **call}]}

    def _call(self, name: str) -> dict[str, Any]:
        """A call without its arguments."""
        kind = "custom" if name in self._customs else "function"
        return {"id": call_id(), "type": kind, kind: {"name": name, _ARGUMENTS[kind]: ""}}

    def end(self, requests: Sequence[EngineRequest], choices: Sequence[Choice]) -> Iterator[str]:
        if self._asked.with_usage:
            yield event({**self._common, "choices": [], "usage": _usage(counts_of(self._engine, requests, choices))})
        yield "data: [DONE]\n\n"

    def fail(self, error: Exception) -> Iterator[str]:
        yield f"data: {bytes(refusal(error, running=True).body).decode()}\n\ndata: [DONE]\n\n"

    def ping(self) -> str:
        return ": ping\n\n"

    # -- both -----------------------------------------------------------------------------------------------

    def details(self, choice: Choice, tokens: Sequence[int], logprobs: Sequence[Any] | None) -> dict[str, Any]:
        found: dict[str, Any] = {} if logprobs is None else {"logprobs": self._logprobs(choice, tokens, logprobs)}
        return found | ({"token_ids": list(tokens)} if self._asked.with_tokens else {})

    def _logprobs(self, choice: Choice, tokens: Sequence[int], found: Sequence[Any]) -> JsonObject:
        if self._chat:
            return of_chat(self._texts, tokens, found)
        if choice.number not in self._offsets:
            before = [] if self._asked.echo else self._prompt(choice)
            self._offsets[choice.number] = Offsets(self._texts, before)
        return of_texts(self._texts, tokens, found, self._offsets[choice.number])

    # -- whole ----------------------------------------------------------------------------------------------

    def whole(self, requests: Sequence[EngineRequest], choices: Sequence[Whole]) -> JsonObject:
        counts = counts_of(self._engine, requests, [each.choice for each in choices])
        made = (self._choice(each, requests[each.choice.number // self._asked.n]) for each in choices)
        whole = JsonObject(**self._head, choices=made, usage=_usage(counts), **self.applied, **self.warnings)
        if self._chat and self._asked.with_tokens:
            whole["prompt_token_ids"] = self._prompt(choices[0].choice)
        return whole

    def _choice(self, sample: Whole, request: EngineRequest) -> JsonObject:
        choice, pieces, reason = sample
        work, before = choice.work, request.prompt_logprobs
        tokens, logprobs = work.new_tokens, work.logprobs
        if self._asked.echo:
            pieces = [ChannelPiece("content", self._prompt_text(choice)), *pieces]
        details = self.details(choice, tokens, logprobs if before is None else None)
        if before is not None:
            details["logprobs"] = self._logprobs(choice, [*self._prompt(choice), *tokens], [*before, *(logprobs or ())])
        message: Mapping[str, Any] = self._message(pieces)
        if self._chat:
            reason, message = _with_calls(choice, reason), {"message": message}
        elif self._asked.with_tokens:
            details["prompt_token_ids"] = self._prompt(choice)
        details = {"logprobs": None, **details}
        return JsonObject(index=choice.number, **message, **details, finish_reason=reason, **stop_reason(work))

    def _message(self, pieces: list[ChannelPiece]) -> dict[str, Any]:
        """The whole of a sample. A message without content beside calls has none."""
        texts = {
            channel: "".join(piece.text for piece in pieces if piece.channel == channel)
            for channel in ("content", "reasoning")
        }
        if not self._chat:
            return self._content(texts["content"])
        calls: list[dict[str, Any]] = []
        for channel, text in pieces:
            if channel == "call":
                calls.append(self._call(text))
            elif channel == "arguments":
                kind = calls[-1]["type"]
                calls[-1][kind][_ARGUMENTS[kind]] += text
        found = {"role": "assistant", "content": texts["content"] or (None if calls else "")}
        thoughts = {"reasoning_content": texts["reasoning"]} if texts["reasoning"] else {}
        return found | thoughts | ({"tool_calls": calls} if calls else {})


def _with_calls(choice: Choice, reason: str | None) -> str | None:
    """Why a chat ended: where there are whole calls, for these."""
    return "tool_calls" if reason == "stop" and choice.spoken.has_calls else reason


def _usage(counts: Counts) -> dict[str, Any]:
    """The numbers of tokens of an answer."""
    return {
        "prompt_tokens": counts.prompt, "completion_tokens": counts.new, "total_tokens": counts.prompt + counts.new,
        "prompt_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": counts.written},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning}, **counts.segments,
    }
