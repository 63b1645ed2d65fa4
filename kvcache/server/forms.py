"""The form of an answer: how an interface writes it, whole or as events of a stream."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from json.encoder import encode_basestring_ascii as quoted
from secrets import token_hex
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvcache.sampling.dialects.spoken_answer import SpokenAnswer
from kvcache.sampling.dialects.transcript import ChannelPiece
from kvcache.server.asked import Asked
from kvcache.server.refusals import BodyError, ending, refusal, too_large
from kvcache.server.written import JsonObject, written
from kvcache.serving import BatchEngine
from kvcache.serving import Request as EngineRequest
from kvcache.serving.work import Work

__all__ = [
    "HOLE", "TIMED_OUT", "Choice", "Counts", "Form", "Whole", "call_id", "counts_of", "date_of", "event", "is_json",
    "now", "quoted", "reason_of", "repeated", "segments_of", "stop_reason", "unique", "written_tokens",
]

TIMED_OUT = {"x-stop-reason": "timeout"}  # the header of what the time limit ended


class Choice(NamedTuple):
    """One sample of an answer.

    Attributes:
        number: its place among all.
        work: of the engine.
        spoken: reads its tokens.
    """

    number: int
    work: Any
    spoken: SpokenAnswer


class Whole(NamedTuple):
    """A whole sample: its pieces, and why it ended, "stop" or "length"; None: it has not."""

    choice: Choice
    pieces: list[ChannelPiece]
    reason: str | None


class Counts(NamedTuple):
    """Numbers of tokens: of prompts, of them those that were cached and those that are now, new ones, and thoughts.

    `segments` is the field that says the same of segments; empty: there are none.
    """

    prompt: int
    cached: int
    written: int
    new: int
    reasoning: int
    segments: dict[str, Any]


class Form(ABC):
    """Writes one answer. Events are texts of the stream, each whole.

    Args:
        asked: the answer.
        engine: of the requests.
    """

    def __init__(self, asked: Asked, engine: BatchEngine) -> None:
        self._asked, self._engine = asked, engine

    def too_large(self, tokens: int) -> BodyError:
        """The error of a prompt of `tokens` tokens, which needs more memory than the engine has."""
        most = self._engine.max_prompt
        return too_large(self._asked.field, f"{tokens} tokens", None if most is None or most >= tokens else most)

    def begin(self, requests: Sequence[EngineRequest]) -> Iterator[str]:
        """The events before any token; those that a request needs to be known are written when it has one."""
        return iter(())

    @property
    def warnings(self) -> dict[str, Any]:
        """The field of an answer that says what of the body was not read; empty: all was."""
        return {"warnings": [*self._asked.warnings]} if self._asked.warnings else {}

    @property
    def applied(self) -> dict[str, Any]:
        """The field of an answer that says what edits of the conversation have cleared; empty: none was asked for."""
        found = self._asked.applied
        return {} if found is None else {"context_management": {"applied_edits": [*found]}}

    @abstractmethod
    def events(
        self, choice: Choice, pieces: Sequence[ChannelPiece], details: Mapping[str, Any], reason: str | None
    ) -> Iterator[str]:
        """The events for what is new in a sample.

        Args:
            choice: the sample.
            pieces: what is new.
            details: fields beside them; see `details`.
            reason: why it ended, "stop" or "length"; None: more will come.
        """

    def end(self, requests: Sequence[EngineRequest], choices: Sequence[Choice]) -> Iterator[str]:
        """The events after the last token."""
        return iter(())

    def refusal(self, error: Exception, *, running: bool = False) -> Response:
        """An error instead of an answer; see `refusal`."""
        return refusal(error, running=running)

    @abstractmethod
    def fail(self, error: Exception) -> Iterator[str]:
        """The events that end a stream with an error."""

    @abstractmethod
    def ping(self) -> str:
        """An event that says nothing."""

    def details(self, choice: Choice, tokens: Sequence[int], logprobs: Sequence[Any] | None) -> dict[str, Any]:
        """The fields that say more of the next tokens of a sample than their text; most interfaces have none."""
        return {}

    @abstractmethod
    def whole(self, requests: Sequence[EngineRequest], choices: Sequence[Whole]) -> JsonObject:
        """The whole answer."""


def event(value: Any, name: str | None = None) -> str:
    """An event of a stream; with a name where the interface has names."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {''.join(written(value))}\n\n"


def repeated(found: str) -> str:
    """An event whose values that are `HOLE` change each time, as a format of `%`; these values are to be JSON."""
    return found.replace("%", "%%").replace(json.dumps(HOLE), "%s")


def unique(prefix: str) -> str:
    """A name that nothing else has."""
    return f"{prefix}{token_hex(12)}"


HOLE = unique("hole_")


def is_json(text: str) -> bool:
    """Whether a text is whole JSON, rather than one that was cut."""
    with suppress(ValueError, RecursionError):
        json.loads(text)
        return True
    return False


def call_id() -> str:
    """The id of a call: 9 characters, as the templates of Mistral want them."""
    return token_hex(5)[:9]


def now() -> int:
    """The time of an answer, in seconds since 1970."""
    return int(time.time())


def date_of(seconds: int) -> str:
    """A time, in seconds since 1970, as RFC 3339 writes it."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()


def reason_of(reason: str | None, *, is_empty: bool) -> str | None:
    """Why an answer ended, "stop" or "length"; None: it has not. HTTPException: it ended without any token."""
    if reason == "cancelled":
        raise ending()
    if reason == "deadline" and is_empty:
        message = "answer: expected one, got none: no token within the time limit"
        raise HTTPException(503, message, TIMED_OUT)
    return "length" if reason in ("deadline", "error") else reason  # of errors: memory ran out behind a token


def stop_reason(work: Work) -> dict[str, Any]:
    """A field that tells of an answer which the time limit ended, whose reason is "length"; empty for others."""
    return {"stop_reason": "timeout"} if work.reason == "deadline" else {}


def written_tokens(engine: BatchEngine, work: Work) -> int:
    """The tokens of a prompt that later requests can share and that ran: those of its full blocks."""
    if not (block := engine.shared_block_size):
        return 0
    before = work.base - (work.reused_tokens - work.cached_tokens)  # of the texts that it sees parts of
    return before + max(0, work.num_prompt // block * block - work.cached_tokens)


def counts_of(engine: BatchEngine, requests: Sequence[EngineRequest], choices: Sequence[Choice]) -> Counts:
    """The numbers of tokens of an answer; a prompt of several samples counts once."""
    firsts: list[Work] = [request.works[0] for request in requests]
    return Counts(
        sum(work.whole_prompt for work in firsts), sum(work.reused_tokens for work in firsts),
        sum(written_tokens(engine, work) for work in firsts),
        sum(work.num_tokens - work.num_prompt for request in requests for work in request.works),
        sum(choice.spoken.reasoning_tokens for choice in choices), segments_of(firsts[0]),
    )


def segments_of(work: Any) -> dict[str, Any]:
    """The field of usage that has the tokens of each segment, and how many were cached; empty: there are none."""
    found = work.segments
    if found is None:
        return {}
    return {"segments": [{"tokens": each.tokens, "cached_tokens": each.cached} for each in found]}
