"""Reports of a server: its models, its probes, its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from threading import Event
from typing import Any

from anyio.to_thread import run_sync
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvcache.server.api_keys import Keys, Label
from kvcache.server.forms import date_of
from kvcache.server.intake import Intake
from kvcache.server.limits import Threads
from kvcache.server.model_slot import ModelSlot
from kvcache.server.models import Models
from kvcache.server.page import page
from kvcache.server.process_metrics import process_metrics
from kvcache.serving.prometheus import expositions

__all__ = ["ServerReports"]


class ServerReports:
    """Answers those that watch a server.

    Args:
        models: of the server.
        keys: API keys; None: requests need none.
        intake: knows the namespace of a request.
        threads: limits that all requests share.

    Attributes:
        statuses: the number of answers of each status, which the application counts.
        leaving: whether the server is about to end.
    """

    def __init__(self, models: Models, keys: Keys | None, intake: Intake, threads: Threads) -> None:
        self._models, self._keys, self._intake, self._threads = models, keys, intake, threads
        self.statuses: Counter[int] = Counter()
        self.leaving = Event()
        self._shown = page()

    @property
    def routes(self) -> list[Route]:
        """The pages."""
        return [
            Route("/", self._page), Route("/live", self._alive), Route("/ready", self._ready),
            Route("/health", self._health), Route("/metrics", self._metrics), Route("/v1/models", self._list),
            Route("/v1/models/{name:path}", self._one),
        ]

    # -- models ---------------------------------------------------------------------------------------------

    async def _list(self, request: Request) -> Response:
        """The models, under each of their names."""
        self._intake.namespace(request)
        names = self._models.names
        found = [_entry(name, owner) for name in names if (owner := self._models.owner(name)) is not None]
        ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}  # as Anthropic's client reads lists
        return JSONResponse({"object": "list", "data": found, **ends})

    async def _one(self, request: Request) -> Response:
        """The model of one name."""
        self._intake.namespace(request)
        model = self._models.named(asked := request.path_params["name"])
        return JSONResponse(_entry(asked, model))

    # -- probes ---------------------------------------------------------------------------------------------

    async def _alive(self, request: Request) -> Response:
        return Response()

    async def _page(self, request: Request) -> Response:
        return self._shown

    async def _health(self, request: Request) -> Response:
        return self._probed(None)

    async def _ready(self, request: Request) -> Response:
        models = [slot.model for slot in self._models.all]  # one that is not loaded waits for requests
        is_full = all(model and model.engine.stats().waiting >= model.engine.max_queue for model in models)
        return self._probed("the queue is full" if is_full else None)

    def _probed(self, fault: str | None) -> Response:
        if not all(slot.model is None or slot.model.engine.is_running for slot in self._models.all):
            fault = "the engine does not run"
        if self.leaving.is_set():
            fault = "the server ends"
        return JSONResponse({"status": fault or "ok"}, 503 if fault else 200)

    # -- metrics --------------------------------------------------------------------------------------------

    async def _metrics(self, request: Request) -> Response:
        """The counters for Prometheus. A key of the namespace `metrics` gets all namespaces, another one its own."""
        return PlainTextResponse(
            await run_sync(self._report, self._intake.namespace(request), limiter=self._threads.reports),
            media_type="text/plain; version=0.0.4",
        )

    def _report(self, own: str | None) -> str:
        models = [model for slot in self._models.all if (model := slot.model) is not None]
        found: dict[str | None, Any] = {
            model.names[0]: (model.engine.stats(), self._namespaces(model.engine.namespace_stats(), own))
            for model in models
        }
        loads = {slot.names[0]: slot.loads for slot in self._models.all}
        adapters = sum((slot.adapters.requests.copy() for slot in self._models.all), Counter[str]())
        adapters.update(dict.fromkeys((name for slot in self._models.all for name in ("", *slot.adapters)), 0))
        return expositions(
            found, http_responses=("status", self.statuses.copy()), model_loads=("model", loads),
            adapter_requests=("adapter", adapters),
        ) + process_metrics()

    def _namespaces(self, found: dict[Hashable, Any], own: str | None) -> dict[Hashable, Any]:
        """The counters that a namespace may see, as it may see them."""
        shown: dict[Hashable, Any] = {}
        for name, counts in found.items():
            space = name[0] if isinstance(name, tuple) else name  # that of the key, where a body has a salt
            if own in (None, "metrics", space):
                text = (space or "") if self._keys is None else self._keys.shown(space)
                shown[Label(name, str(text))] = counts
        return shown


def _entry(name: str, slot: ModelSlot) -> dict[str, Any]:
    """A model as OpenAI's interface tells it, Anthropic's, and vLLM's, whose clients look for `max_model_len`.

    An adapter has the name of its network as `parent`, and that of its folder as `root`: no path is told.
    """
    base, path = slot.names[0], slot.adapters.get(name)
    created = slot.created if path is None else slot.adapters.created.get(name, slot.created)
    own = {"root": base, "parent": None} if path is None else {"root": Path(path).name, "parent": base}
    most = None if (model := slot.model) is None else model.engine.max_prompt
    return {
        "id": name, "object": "model", "created": created, "owned_by": "kvcache", "max_model_len": most,
        "type": "model", "display_name": name, "created_at": date_of(created), "max_input_tokens": most,
        "loaded": model is not None, **own,
        "tasks": None if model is None else model.tasks if path is None else ["generate"],
    }
