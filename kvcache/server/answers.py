"""What a client gets: the objects of OpenAI's interface, whole or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from kvcache.engine.completion import TokenLogprobs
from kvcache.engine.text import TextStream
from kvcache.server.bodies import Body
from kvcache.serving.request import Request

__all__ = ["Answer", "Refused", "refusal"]

logger = logging.getLogger("kvcache")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Piece = tuple[int, str, list[dict[str, Any]] | None, str | None]  # choice, text, log-probabilities, finish_reason

_READING = 30.0  # seconds beyond the time limit in which a client may read the end of its answer


class Refused(Exception):
    """A request that is not answered: the HTTP status, the reason, and a setting that is wrong, if it is one."""

    def __init__(self, status: int, message: str, param: str | None = None, retry: int | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        self.headers = {} if retry is None else {"retry-after": str(retry)}


def refusal(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status of an error, and its body in OpenAI's form; any error but `Refused` goes to the log alone."""
    if not isinstance(error, Refused):
        logger.error("a request failed", exc_info=error)
    status = error.status if isinstance(error, Refused) else 500
    kinds = {401: "authentication_error", 429: "rate_limit_error", 404: "not_found_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    message = str(error) if isinstance(error, Refused) else f"the request failed: {type(error).__name__}"
    return status, {"error": {
        "message": message, "type": kind, "param": getattr(error, "param", None),
        "code": "invalid_api_key" if status == 401 else None,
    }}  # fmt: skip


class Answer:
    """An ASGI application that answers one body. A client that leaves cancels its requests, within a step.

    Args:
        body: what it asks for.
        requests: one for each prompt.
        prompts: their token ids.
        tokenizer: of the engine.
        limit: seconds after which requests end.
    """

    def __init__(
        self, body: Body, requests: Sequence[Request], prompts: Sequence[list[int]], tokenizer: Any, limit: float
    ) -> None:
        self._body, self._requests, self._prompts, self._tokenizer = body, requests, prompts, tokenizer
        self._limit, self._new = limit + _READING, 0
        self._head = {
            "id": ("chatcmpl-" if body.chat else "cmpl-") + secrets.token_hex(12),
            "object": ("chat.completion" + ".chunk" * body.stream) if body.chat else "text_completion",
            "created": int(time.time()), "model": body.model,
        }  # fmt: skip

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await asyncio.wait_for(self._stream(send) if self._body.stream else self._whole(send), self._limit)
        finally:
            watcher.cancel()
            self._cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._cancel()

    def _cancel(self) -> None:
        for request in self._requests:
            if not request.is_finished:
                request.cancel()

    # -- whole and in pieces --------------------------------------------------------------------------------

    async def _whole(self, send: Send) -> None:
        found: dict[int, tuple[list[str], list[dict[str, Any]], list[str | None]]] = {}
        status, headers = 200, {}
        try:
            async for index, text, entries, reason in self._pieces():
                texts, all_entries, reasons = found.setdefault(index, ([], [], []))
                texts.append(text)
                all_entries += entries or []
                reasons.append(reason)
        except Exception as error:
            status, answer = refusal(error)
            headers = error.headers if isinstance(error, Refused) else {}
        else:
            with_logprobs = self._body.params.logprobs is not None
            choices = [
                self._choice(index, "".join(texts), entries if with_logprobs else None, reasons[-1], "message")
                for index, (texts, entries, reasons) in sorted(found.items())
            ]
            answer = {**self._head, "choices": choices, "usage": self._usage()}
        data = json.dumps(answer).encode()
        await _start(send, status, {"content-type": "application/json", "content-length": str(len(data)), **headers})
        await send({"type": "http.response.body", "body": data})

    async def _stream(self, send: Send) -> None:
        await _start(send, 200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        usage: dict[str, Any] = {"usage": None} if self._body.with_usage else {}
        begun: set[int] = set()
        try:
            async for index, text, entries, reason in self._pieces():
                if text or entries or reason is not None or index not in begun:
                    choice = self._choice(index, text, entries, reason, "delta", index not in begun)
                    begun.add(index)
                    await _event(send, json.dumps({**self._head, "choices": [choice], **usage}))
            if usage:
                await _event(send, json.dumps({**self._head, "choices": [], "usage": self._usage()}))
        except Exception as error:
            await _event(send, json.dumps(refusal(error)[1]))
        await _event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b""})

    async def _pieces(self) -> AsyncIterator[Piece]:
        """The text of all choices as it comes, of whole characters; those of one prompt after those of another.

        Raises:
            Refused: a request ended before its answer did.
            Exception: what a request failed with.
        """
        for number, (request, prompt) in enumerate(zip(self._requests, self._prompts, strict=True)):
            texts = [TextStream(self._tokenizer, prompt, self._body.params.stop) for _ in range(request.n)]
            last = [prompt[-1:]] * request.n
            begun: set[int] = set()
            async for new in request.arrivals():
                reason: str | None = new.finish_reason
                if new.tokens:
                    self._new += len(new.tokens)
                    begun.add(new.index)
                if reason == "cancelled" or (reason == "deadline" and new.index not in begun):
                    why = "no token within the time limit" if reason == "deadline" else "the server ends"
                    raise Refused(503, f"expected an answer, got none: {why}", retry=1)
                text = "".join(map(texts[new.index].add, new.tokens))
                entries = None
                if new.logprobs is not None:
                    entries = self._entries([*last[new.index], *new.tokens], new.logprobs)
                    last[new.index] = new.tokens[-1:] or last[new.index]
                if reason is not None and reason != "error":
                    text += texts[new.index].end()
                    reason = "length" if reason == "deadline" else reason
                if reason != "error":  # which `arrivals` raises next
                    yield number * request.n + new.index, text, entries, reason

    # -- parts ----------------------------------------------------------------------------------------------

    def _entries(self, tokens: list[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """The log-probabilities of all tokens but the first `len(tokens) - len(logprobs)`, with the tokens' texts."""
        found = []
        for at, (logprob, top) in enumerate(logprobs, len(tokens) - len(logprobs)):
            before = tokens[max(0, at - 1) : at]
            tops = [self._entry(before, token, value) for token, value in top.items()]
            found.append({**self._entry(before, tokens[at], logprob), "top_logprobs": tops})
        return found

    def _entry(self, before: list[int], token: int, logprob: float) -> dict[str, Any]:
        known, text = (self._tokenizer.decode(ids, skip_special_tokens=False) for ids in (before, [*before, token]))
        own = text[len(known) :]
        # None: the token is a part of a character
        return {"token": own, "logprob": logprob, "bytes": None if "\ufffd" in own else list(own.encode())}

    def _choice(
        self, index: int, text: str, entries: list[dict[str, Any]] | None, reason: str | None, kind: str,
        first: bool = True,
    ) -> dict[str, Any]:  # fmt: skip
        logprobs: dict[str, Any] | None
        if self._body.chat:
            logprobs = None if entries is None else {"content": entries}
            role = {"role": "assistant"} if first else {}
            return {"index": index, kind: {**role, "content": text}, "logprobs": logprobs, "finish_reason": reason}
        logprobs = None if entries is None else {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries],
        }  # fmt: skip
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _usage(self) -> dict[str, Any]:
        prompt, new = sum(map(len, self._prompts)), self._new
        cached = sum(request.metrics.cached_tokens for request in self._requests)
        return {
            "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip


async def _start(send: Send, status: int, headers: dict[str, str]) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


async def _event(send: Send, data: str) -> None:
    """One server-sent event; it waits until the client has read most of those before."""
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
