"""The bodies of `/v1/embeddings` and `/v1/rerank`, and their answers: vectors and scores of texts."""

from __future__ import annotations

import base64
from asyncio import CancelledError
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from anyio import create_task_group, move_on_after
from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from kvcache.engine.text_rows import TextRows
from kvcache.engine.vectors import VectorOptions, Vectors
from kvcache.errors import InvalidOperationError, OutOfMemoryError, QueueFullError
from kvcache.networks.protocols import Float32
from kvcache.server.answers import WholeAnswer
from kvcache.server.fields import FLAG, FROM_1, IGNORED, TEXT, TEXTS, Field
from kvcache.server.forms import unique
from kvcache.server.limits import Threads
from kvcache.server.refusals import BodyError, ending, refusal, too_large
from kvcache.server.written import JsonObject
from kvcache.serving import BatchEngine
from kvcache.serving.request import RequestMetrics
from kvcache.serving.work import FinishReason, Work
from kvcache.support.arguments import as_instance, short

__all__ = [
    "EMBEDDINGS", "RERANK", "VectorAnswer", "VectorBody", "asked_of_embeddings", "asked_of_rerank",
    "names_reranker",
]

_TOGETHER = 64  # texts that wait at a time: a body of thousands leaves the queue to others
_MOST = 16384  # texts of a body
_REPEATED = 1 << 25  # characters of the query and the instruction of a body, which stand before each of its documents


def _encoding(value: Any, name: str) -> str:
    if value not in ("float", "base64"):
        raise ValueError(f"{name}: expected float or base64, got {short(value)}")
    return str(value)


def _documents(value: Any, name: str) -> list[str]:
    """Texts, or objects that have one under `text`."""
    found = [each.get("text") if isinstance(each, dict) else each for each in as_instance(value, list, name)]
    return [as_instance(each, str, f"{name}.{i}") for i, each in enumerate(found)]


EMBEDDINGS = {
    "model": TEXT, "input": TEXTS["prompt"], "encoding_format": Field(_encoding), "dimensions": FROM_1, "user": IGNORED,
    "prompt_name": TEXT, "truncate": FLAG, "normalize": FLAG,
}
RERANK = {
    "model": TEXT, "query": TEXT, "documents": Field(_documents), "top_n": FROM_1, "return_documents": FLAG,
    "instruction": TEXT, "truncate": FLAG, "user": IGNORED, "max_tokens_per_doc": Field(),
}


class VectorBody(NamedTuple):
    """Texts that are to run, and what makes the answer when they have.

    Attributes:
        model: by the name that the server has for it.
        field: of the body, which has them.
        readings: the texts.
        take: called with some of them that have run, in their order, and forgets their rows.
        made: makes the answer of what was taken, with the number of cached tokens.
        space: the namespace of their cached prefixes.
        dimensions: of the vectors; None: these are scores.
    """

    model: str
    field: str
    readings: list[TextRows]
    take: Callable[[list[TextRows]], None]
    made: Callable[[int], JsonObject]
    space: Hashable
    dimensions: int | None = None


def _few(field: str, texts: Sequence[Any]) -> None:
    if not 0 < len(texts) <= _MOST:
        raise ValueError(f"{field}: expected 1 to {_MOST} texts, got {len(texts)}")


def _short(query: str, instruction: str | None, count: int) -> None:
    """ValueError: a small body whose prompts would take memory and time without bounds."""
    length = len(query) + len(instruction or "")
    if length * count > _REPEATED:
        raise ValueError(
            f"query: expected at most {_REPEATED // count} characters, with the instruction, before {count} documents, "
            f"got {length}"
        )


def asked_of_embeddings(
    given: Mapping[str, Any], vectors: Vectors, model: str, space: Hashable, most: int
) -> VectorBody:
    """The texts of a body of `/v1/embeddings`. ValueError: a network that makes no vectors; as `ChatEngine.embed`.

    Args:
        most: the most bytes of vectors.
    """
    texts = given["input"]
    if not vectors.pools:
        message = f"model: expected one whose checkpoint, or --pooling, says a pooling, got {model}"
        raise BodyError(message, "unsupported_model")
    _few("input", texts)
    options = VectorOptions(
        None, given.get("normalize", True), given.get("dimensions"), given.get("prompt_name"),
        given.get("truncate", False),
    )
    count = vectors.dimensions(options.dimensions)
    if len(texts) * count * 4 > most:
        raise ValueError(f"input: expected at most {most} bytes of vectors, got {len(texts)} texts of {count} floats")
    readings, parts = vectors.readings(texts, options, "input"), list[Float32]()

    def take(part: list[TextRows]) -> None:
        parts.append(vectors.made(part, options))
        _forget(part)

    def made(cached: int) -> JsonObject:
        packed = given.get("encoding_format") == "base64"
        data = (
            {"object": "embedding", "index": i, "embedding": _base64(row) if packed else row.tolist()}
            for i, row in enumerate(chain.from_iterable(parts))
        )
        return JsonObject(object="list", data=data, model=model, usage=_usage(readings))

    return VectorBody(model, "input", readings, take, made, space, count)


def _forget(part: Sequence[TextRows]) -> None:
    for each in part:
        each.result = None


def _base64(row: Any) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()


def names_reranker(model: str) -> bool:
    """Whether the name of a model says that it judges documents."""
    return "rerank" in model.lower()


def asked_of_rerank(given: Mapping[str, Any], vectors: Vectors, model: str, space: Hashable) -> VectorBody:
    """The prompts of a body of `/v1/rerank`. ValueError: as `ChatEngine.rerank`; a network that is no reranker."""
    documents = given["documents"]
    if not vectors.is_reranker and not names_reranker(model):
        raise BodyError(
            f"model: expected a reranker, by its checkpoint, by its name or by --reranker, got {model}",
            "unsupported_model",
        )
    _few("documents", documents)
    _short(given["query"], given.get("instruction"), len(documents))
    readings = vectors.judged(given["query"], documents, given.get("instruction"), given.get("truncate", False))
    scores: list[float] = []

    def take(part: list[TextRows]) -> None:
        scores.extend(vectors.scores(part))
        _forget(part)

    def made(cached: int) -> JsonObject:
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: given.get("top_n")]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
        if given.get("return_documents", False):
            results = [each | {"document": {"text": documents[each["index"]]}} for each in results]
        usage = _usage(readings) | {"prompt_tokens_details": {"cached_tokens": cached}}
        return JsonObject(id=unique("rerank-"), model=model, results=results, usage=usage)

    return VectorBody(model, "documents", readings, take, made, space)


def _usage(readings: Sequence[TextRows]) -> dict[str, Any]:
    count = sum(len(each.tokens) for each in readings)
    return {"prompt_tokens": count, "total_tokens": count}


class VectorAnswer:
    """An ASGI application that runs texts and answers. A client that leaves cancels what has not run.

    Args:
        engine: runs them.
        asked: the texts.
        threads: that make answers.
        timeout: seconds to the end.
    """

    def __init__(self, engine: BatchEngine, asked: VectorBody, threads: Threads, timeout: float) -> None:
        self._engine, self._asked, self._threads, self._timeout = engine, asked, threads, timeout
        self._works: list[Work] = []  # all that were queued so far

    @property
    def reasons(self) -> list[FinishReason | None]:
        """Why its texts ended, each reason once."""
        return [*dict.fromkeys(work.reason for work in self._works)]

    @property
    def metrics(self) -> RequestMetrics:
        """The measurements so far, of all texts together."""
        waits = [work.started - work.arrival for work in self._works if work.started is not None]
        return RequestMetrics(
            min(waits, default=None), None, (), self._cached, sum(work.preemptions for work in self._works),
            sum(work.num_prompt for work in self._works), 0,
        )

    @property
    def _cached(self) -> int:
        return sum(work.cached_tokens for work in self._works)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, begun = scope.setdefault("state", {}), False
        state.update(requests=(self,), asked=self._asked)

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            state["left"] = not begun
            tasks.cancel_scope.cancel()

        try:
            async with create_task_group() as tasks:
                tasks.start_soon(watch)
                answer = await self._answered()
                begun = True
                with move_on_after(self._timeout):  # as long again, for a client that reads slowly
                    await answer(scope, receive, send)
                tasks.cancel_scope.cancel()
        except CancelledError:
            if not begun:
                await refusal(ending())(scope, receive, send)

    async def _answered(self) -> ASGIApp:
        try:
            with move_on_after(self._timeout):
                await self._run()
                return await WholeAnswer.begun(partial(self._asked.made, self._cached), self._threads)
            return refusal(HTTPException(503, "answer: expected one, got none: no end within the time limit"))
        except (QueueFullError, InvalidOperationError) as error:
            return refusal(error)
        except OutOfMemoryError:
            longest = max(len(each.tokens) for each in self._asked.readings)
            return refusal(too_large(self._asked.field, f"{longest} tokens", self._engine.max_prompt))
        except Exception as error:
            return refusal(error, running=True)

    async def _run(self) -> None:
        for part in self._parts():
            pending = self._engine.submit_readings(part, namespace=self._asked.space)
            self._works += pending.works
            try:
                while not pending.is_finished:
                    await pending.wait_in_loop(lambda pending=pending: pending.is_finished)  # type: ignore[misc]
                pending.raise_error()
                if any(work.reason == "cancelled" for work in pending.works):
                    raise ending()
                await run_sync(self._asked.take, part, limiter=self._threads.answers)
            finally:
                pending.cancel()

    def _parts(self) -> Iterator[list[TextRows]]:
        readings, count = self._asked.readings, min(_TOGETHER, self._engine.max_queue)
        for start in range(0, len(readings), count):
            yield readings[start : start + count]
