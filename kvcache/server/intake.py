"""Bodies become requests of the engine, or answers that need none. All of it runs beside the event loop."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Union

from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from kvcache.errors import GrammarError, OutOfMemoryError, QueueFullError
from kvcache.sampling.tokenizer_errors import decoded
from kvcache.server.answers import HttpAnswer
from kvcache.server.api_keys import Keys
from kvcache.server.bodies import Body, body_of, json_of
from kvcache.server.completion_form import CompletionForm
from kvcache.server.constraints import grammar_refused
from kvcache.server.fields import DETOKENIZE, TOKENIZE, checked
from kvcache.server.forms import Form, unique
from kvcache.server.limits import BodyReader, Threads
from kvcache.server.logprobs import TokenTexts
from kvcache.server.message_bodies import COUNTED, MESSAGES, chat_of_messages
from kvcache.server.message_form import MessageForm
from kvcache.server.prompts import Prompts
from kvcache.server.refusals import too_large, too_many
from kvcache.server.response_bodies import RESPONSES, chat_of_responses
from kvcache.server.response_form import ResponseForm
from kvcache.server.voices import Voices
from kvcache.serving import BatchEngine
from kvcache.support.arguments import short

__all__ = ["Intake"]

_ARRIVING, _READING = 30.0, 30.0  # seconds for a body; and beyond the time limit, for reading the end of an answer


class _Asked(NamedTuple):
    """A body that is to be answered, in a form and a namespace."""

    body: Body
    form: Form
    space: Hashable


Answer = Union[ASGIApp, _Asked]  # noqa: UP007  # for Python 3.10 at run time


class Intake:
    """Reads bodies and answers them.

    Args:
        engine, timeout: see `make_app`.
        names: of the model.
        keys: API keys; None: requests need none.
        bodies, threads: limits that all requests share.
        prompts, voices: make tokens of conversations, and read answers.
    """

    def __init__(
        self, engine: BatchEngine, names: Sequence[str], keys: Keys | None, bodies: BodyReader, threads: Threads,
        timeout: float, prompts: Prompts, voices: Voices,
    ) -> None:
        self._engine, self._names, self._keys, self._bodies = engine, names, keys, bodies
        self._threads, self._timeout, self._prompts, self._voices = threads, timeout, prompts, voices
        self._texts = TokenTexts(engine.tokenizer)

    def namespace(self, request: Request) -> str | None:
        """The namespace of a request, by its key. HTTPException: it has no known one."""
        if self._keys is None:
            return None
        found = self._keys.namespace(request.headers.get("authorization"), request.headers.get("x-api-key"))
        request.state.namespace = found
        return found

    def route(self, answer: Callable[[dict[str, Any], Hashable], Answer]) -> Callable[[Request], Any]:
        """The endpoint that reads a body and answers by a method of this class."""

        async def endpoint(request: Request) -> ASGIApp:
            space = self.namespace(request)
            async with self._bodies.body(request, min(_ARRIVING, self._timeout)) as data:
                limiter = self._threads.for_body(len(data))
                found = await run_sync(self._taken, answer, data, space, limiter=limiter)
                if not isinstance(found, _Asked):
                    return found
                await run_sync(self._compile, found.body, limiter=self._threads.grammars)
                return await run_sync(self._queued, found, limiter=limiter)

        return endpoint

    def _taken(self, answer: Callable[[dict[str, Any], Hashable], Answer], data: bytearray, space: Hashable) -> Answer:
        try:
            return answer(json_of(data), space)
        except RecursionError:  # of what has as many levels as JSON may have, a template's or an encoder's
            raise ValueError("body: expected at most some hundred levels, got more") from None

    def _compile(self, body: Body) -> None:
        assert body.params.grammar is not None
        try:
            self._engine.prepare_grammar(body.params.grammar)
        except GrammarError as error:
            raise grammar_refused(error, "tools" if _requires_call(body) else "response_format") from None

    @property
    def routes(self) -> dict[str, Callable[[dict[str, Any], Hashable], Answer]]:
        """The method for each path."""
        return {
            "/v1/chat/completions": partial(self.complete, chat=True),
            "/v1/completions": partial(self.complete, chat=False),
            "/v1/chat/completions/render": partial(self.render, chat=True),
            "/v1/completions/render": partial(self.render, chat=False), "/v1/messages": self.message,
            "/v1/responses": self.respond,
            "/v1/messages/count_tokens": self.count, "/tokenize": self.tokenize, "/detokenize": self.detokenize,
        }

    # -- answers of the network -----------------------------------------------------------------------------

    def complete(self, found: dict[str, Any], space: Hashable, *, chat: bool) -> Answer:
        """Answer a chat completion, or a completion."""
        body = self._body(found, chat)
        return self._begin(body, CompletionForm(body, self._engine, self._texts), space)

    def message(self, found: dict[str, Any], space: Hashable) -> Answer:
        """Answer a body of `/v1/messages`."""
        body = self._body(chat_of_messages(checked(found, MESSAGES, ("model", "messages", "max_tokens"))), True)
        return self._begin(body, MessageForm(body, self._engine), space)

    def respond(self, found: dict[str, Any], space: Hashable) -> Answer:
        """Answer a body of `/v1/responses`."""
        given = checked(found, RESPONSES, ("model", "input"))
        body = self._body(chat_of_responses(given), True)._replace(field="input")
        return self._begin(body, ResponseForm(body, self._engine, given), space)

    def _body(self, found: dict[str, Any], chat: bool) -> Body:
        body = body_of(found, chat, self._engine.sampling_params, self._engine.max_positions)
        self.expect_model(body.model)
        return body

    def expect_model(self, model: str) -> None:
        """Raise HTTPException unless the model has this name."""
        if model not in self._names:
            raise HTTPException(404, f"model: expected {' or '.join(self._names)}, got {short(model)}")

    def _begin(self, body: Body, form: Form, space: Hashable) -> Answer:
        """Queue the requests of a body; one with a grammar comes back, since its compilation may take long."""
        if _requires_call(body):
            grammar = self._voices.required(body.prompts[0], self._prompts.tokens(body)[0].tolist())
            body = body._replace(params=replace(body.params, grammar=grammar))
        asked = _Asked(body, form, space if body.salt is None else (space, body.salt))
        return self._queued(asked) if body.params.grammar is None else asked

    def _queued(self, asked: _Asked) -> ASGIApp:
        """Queue the requests of a body, all or none."""
        engine, timeout, (body, form, space) = self._engine, self._timeout, asked
        keep = body.keep if engine.shares_prefixes else None
        spoken = partial(self._voices.spoken, body)
        answer = HttpAnswer(form, body.stream, spoken, self._threads, timeout + _READING)
        tokens = None
        try:
            for number, tokens in enumerate(self._prompts.tokens(body)):
                later = number * body.n  # so that a body of many texts waits rather than one of a single text
                submit = partial(
                    engine.submit, namespace=space, deadline=timeout, n=body.n, priority=later, keep=keep
                )
                parts = self._prompts.parts(body, number, tokens)
                answer.requests.append(submit(tokens, body.params, parts_at=parts))
        except BaseException as error:
            answer.cancel()
            count = body.n * len(body.prompts)
            if isinstance(error, QueueFullError) and count > error.max_queue:  # there is never room for all of it
                raise too_many(body.field, error.max_queue, count) from None
            if isinstance(error, OutOfMemoryError) and tokens is not None:
                raise too_large(body.field, len(tokens)) from None
            raise
        return answer

    # -- tokens alone ---------------------------------------------------------------------------------------

    def count(self, found: dict[str, Any], space: Hashable) -> ASGIApp:
        """The number of tokens of a body of `/v1/messages`."""
        body = self._body(chat_of_messages(checked(found, COUNTED, ("model", "messages"))), True)
        return JSONResponse({"input_tokens": len(self._prompts.tokens(body)[0])})

    def render(self, found: dict[str, Any], space: Hashable, *, chat: bool) -> ASGIApp:
        """The token ids of the prompts of a body, as routers ask for them."""
        body = self._body(found, chat)
        rendered = [
            {"request_id": unique("render-"), "token_ids": tokens.tolist(), "model": body.model}
            for tokens in self._prompts.tokens(body)
        ]
        return JSONResponse(rendered[0] if chat else rendered)

    def tokenize(self, found: dict[str, Any], space: Hashable) -> ASGIApp:
        """The token ids of a prompt or of a conversation."""
        with_texts = checked(found, TOKENIZE, ()).get("return_token_strs", False)
        asked = {"model": self._names[0]} | {
            name: value for name, value in found.items() if name not in ("add_special_tokens", "return_token_strs")
        }
        body = self._body(asked, "messages" in asked)
        if len(body.prompts) != 1:
            raise ValueError(f"prompt: expected one, got {len(body.prompts)}")
        ids = self._prompts.tokens(body)[0].tolist()
        texts = [self._texts.of(token)[0] for token in ids] if with_texts else None
        most = self._engine.max_positions
        return JSONResponse({"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": texts})

    def detokenize(self, found: dict[str, Any], space: Hashable) -> ASGIApp:
        """The text of token ids."""
        given = checked(found, DETOKENIZE, ("tokens",))
        self.expect_model(given.get("model", self._names[0]))
        tokens = self._prompts.checked(given["tokens"], "tokens").tolist()
        return JSONResponse({"prompt": decoded(self._engine.tokenizer, tokens, skip_special_tokens=False)})


def _requires_call(body: Body) -> bool:
    """Whether an answer must call a function, whatever the network would say."""
    return body.chat and body.prompts[0].choice.mode == "required"
