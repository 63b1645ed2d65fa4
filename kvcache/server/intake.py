"""Bodies become answers of the model that they name. All but the reading of bytes runs beside the event loop."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from anyio import create_task_group, current_time
from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp

from kvcache.sampling.text_tokens import TooManyTokens
from kvcache.server.api_keys import Keys
from kvcache.server.limits import BodyReader, Threads
from kvcache.server.model_loader import ModelLoader
from kvcache.server.model_slot import ModelSlot, ModelUse
from kvcache.server.models import Models
from kvcache.server.refusals import BodyError
from kvcache.server.served_model import Answer, Prepared, ServedModel
from kvcache.server.vector_bodies import VectorAnswer, VectorBody
from kvcache.support.arguments import as_instance
from kvcache.support.json_text import TooManyNested, json_fault, read_json_text

__all__ = ["Intake", "json_of"]

_ARRIVING = 30.0  # seconds for a body
_LEAST = 0.001  # seconds that are left for an answer
Method = Callable[[ServedModel, dict[str, Any], Hashable], Answer]


def json_of(data: bytes | bytearray) -> dict[str, Any]:
    """The object of a body. ValueError: it is none."""
    try:
        return as_instance(read_json_text(data), dict, "body")
    except TooManyNested as error:
        raise BodyError(f"body: {error}", "array_above_max_length") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"body: expected JSON, got an error: {json_fault(error)}") from None


class _Waiting(NamedTuple):
    """A body that waits for the compilation of its grammar."""

    model: ServedModel
    prepared: Prepared
    seconds: float  # until its answer has ended


class _Unloaded(NamedTuple):
    """A body that waits for its model, which is not loaded."""

    slot: ModelSlot
    body: dict[str, Any]


class Intake:
    """Reads bodies and answers them.

    Args:
        models, loader: of the server.
        keys: API keys; None: requests need none.
        bodies, threads: limits that all requests share.
        timeout: see `make_app`.
    """

    def __init__(
        self, models: Models, loader: ModelLoader, keys: Keys | None, bodies: BodyReader, threads: Threads,
        timeout: float,
    ) -> None:
        self._models, self._loader, self._keys, self._bodies = models, loader, keys, bodies
        self._threads, self._timeout = threads, timeout

    def namespace(self, request: Request) -> str | None:
        """The namespace of a request, by its key. HTTPException: it has no known one."""
        if self._keys is None:
            return None
        found = self._keys.namespace(request.headers.get("authorization"), request.headers.get("x-api-key"))
        request.state.namespace = found
        return found

    @property
    def routes(self) -> dict[str, Method]:
        """The method of a model for each path."""
        return {
            "/v1/chat/completions": partial(ServedModel.complete, chat=True),
            "/v1/completions": partial(ServedModel.complete, chat=False),
            "/v1/chat/completions/render": partial(ServedModel.render, chat=True),
            "/v1/completions/render": partial(ServedModel.render, chat=False), "/v1/messages": ServedModel.message,
            "/v1/responses": ServedModel.respond, "/v1/messages/count_tokens": ServedModel.count,
            "/tokenize": ServedModel.tokenize, "/detokenize": ServedModel.detokenize,
            "/v1/cache/hints": ServedModel.hint, "/v1/embeddings": ServedModel.embed, "/v1/rerank": ServedModel.rerank,
        }

    def route(
        self, method: Method, expect: Callable[[str | None], object] = lambda space: None
    ) -> Callable[[Request], Any]:
        """The endpoint that reads a body and answers by a method of the model that it names.

        Args:
            expect: raises where a namespace may not ask.
        """

        async def endpoint(request: Request) -> ASGIApp:
            space, use = self.namespace(request), ModelUse()
            expect(space)
            try:
                return use.until_answered(await self._answer(request, method, space, use))
            except BaseException:
                use.end()
                raise

        return endpoint

    async def body(self, request: Request) -> dict[str, Any]:
        """The object of a body that needs no model."""
        async with self._bodies.body(request, min(_ARRIVING, self._timeout)) as data:
            return await run_sync(json_of, data, limiter=self._threads.for_body(len(data)))

    async def _answer(self, request: Request, method: Method, space: str | None, use: ModelUse) -> ASGIApp:
        """The answer to a body; its model and its grammar may be waited for."""
        async with self._bodies.body(request, min(_ARRIVING, self._timeout)) as data:
            limiter = self._threads.for_body(len(data))
            found = await run_sync(self._read, method, data, space, use, limiter=limiter)
            if isinstance(found, _Unloaded):
                ends = current_time() + self._timeout
                model = await self._loaded(request, found.slot, use)
                seconds = max(_LEAST, ends - current_time())
                found = await run_sync(self._taken, model, method, found.body, space, seconds, limiter=limiter)
            if not isinstance(found, _Waiting):
                return found
            async with self._threads.turn(space):
                await run_sync(found.model.compile, found.prepared.asked, limiter=self._threads.grammars)
            return await run_sync(self._queued, *found, limiter=limiter)

    async def _loaded(self, request: Request, slot: ModelSlot, use: ModelUse) -> ServedModel:
        """The model of a slot, once it is loaded; none is loaded, or unloaded, for a client that has left."""
        found: ServedModel | HTTPException = HTTPException(408, "model: expected a client that waits for it, got none")

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            request.state.left = True
            tasks.cancel_scope.cancel()

        async with create_task_group() as tasks:
            tasks.start_soon(watch)
            try:
                found = await self._loader.taken(slot, use, self._timeout)
            except HTTPException as error:  # beside the group, which would wrap it
                found = error
            tasks.cancel_scope.cancel()
        if isinstance(found, HTTPException):
            raise found
        return found

    def _read(
        self, method: Method, data: bytearray, space: Hashable, use: ModelUse
    ) -> ASGIApp | _Waiting | _Unloaded:
        """The answer to the bytes of a body, or what it waits for."""
        slot = self._models.of(body := json_of(data))
        model = use.take(slot)
        return _Unloaded(slot, body) if model is None else self._taken(model, method, body, space, self._timeout)

    def _taken(
        self, model: ServedModel, method: Method, body: dict[str, Any], space: Hashable, seconds: float
    ) -> ASGIApp | _Waiting:
        """The answer to a body, or what waits for its grammar where that is new: the compilation may take long."""
        try:
            with _limits_told(model):
                found = method(model, body, space)
        except RecursionError:  # of what has as many levels as JSON may have, a template's or an encoder's
            raise ValueError("body: expected at most some hundred levels, got more") from None
        if isinstance(found, VectorBody):
            return VectorAnswer(model.engine, found, self._threads, seconds)
        if not isinstance(found, Prepared):
            return found
        if model.compiles(found.asked):
            return _Waiting(model, found, seconds)
        model.compile(found.asked)  # raises, where it was refused before
        return self._queued(model, found, seconds)

    def _queued(self, model: ServedModel, prepared: Prepared, seconds: float) -> ASGIApp:
        with _limits_told(model):
            return model.queued(prepared, self._threads, seconds)


@contextmanager
def _limits_told(model: ServedModel) -> Iterator[None]:
    """Tell the smaller one of two limits, of positions and of memory, where a prompt has too many tokens."""
    try:
        yield
    except TooManyTokens as error:
        raise model.too_many_tokens(error) from None
