"""The paths by which clients load and unload adapters, where the server lets them: those of vLLM."""

from __future__ import annotations

import os
from collections.abc import Hashable
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvcache.errors import CheckpointError
from kvcache.server.fields import FLAG, IGNORED, TEXT, checked
from kvcache.server.intake import Intake
from kvcache.server.models import Models
from kvcache.server.served_model import ServedModel
from kvcache.support.arguments import short

__all__ = ["AdapterRoutes"]

SPACE = "adapters"  # the namespace of keys that may change adapters
_LOAD = {"model": TEXT, "lora_name": TEXT, "lora_path": TEXT, "load_inplace": FLAG}
_UNLOAD = {"lora_name": TEXT, "lora_int_id": IGNORED}


class AdapterRoutes:
    """Loads adapters from a folder, and unloads them.

    Where the server has keys, one of the namespace `adapters` is needed: an adapter that is unloaded ends the requests
    of all.

    Args:
        models: of the server.
        intake: reads bodies.
        folder: the only one that adapters are read from, and what is in it; None: there are no such paths.
    """

    def __init__(self, models: Models, intake: Intake, folder: str | os.PathLike[str] | None) -> None:
        self._models, self._intake, self._folder, self._turn = models, intake, folder, Lock()

    @property
    def routes(self) -> list[Route]:
        """The paths."""
        if self._folder is None:
            return []
        load = self._intake.route(self._load, self._expect_allowed)
        return [
            Route("/v1/load_lora_adapter", load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
        ]

    def _expect_allowed(self, space: str | None) -> None:
        if space not in (None, SPACE):
            raise HTTPException(403, f"authorization: expected a key of the namespace {SPACE}, got another")

    def _load(self, model: ServedModel, found: dict[str, Any], space: Hashable) -> ASGIApp:
        """Load an adapter into a model; one of several is named by `model`."""
        given = checked(found, _LOAD, ("model", "lora_name", "lora_path"))
        name, path = given["lora_name"], self._path(given["lora_path"])
        with self._turn:  # of two that have one name the second one is refused
            owner = self._models.owner(name)
            if owner is not None and name not in model.adapters:
                raise ValueError(f"lora_name: expected a name that nothing else has, got {short(name)}")
            if owner is not None and not given.get("load_inplace", False):
                raise ValueError(f"lora_name: expected one that is not loaded, or load_inplace, got {short(name)}")
            try:
                model.adapters.load(model.engine, name, str(path))
            except FileNotFoundError as error:
                raise HTTPException(404, self._told(error)) from None
            except CheckpointError as error:
                raise ValueError(self._told(error)) from None
        return PlainTextResponse(f"Loaded the adapter {name}.")

    def _told(self, error: Exception) -> str:
        """The message of an error, without the place of the folder."""
        told = str(error).replace(f"{self._root()}{os.sep}", "")
        return f"lora_path: expected an adapter that can be read, got an error: {told}"

    def _root(self) -> Path:
        assert self._folder is not None, "there are no paths without it"
        return Path(self._folder).resolve()

    def _path(self, said: str) -> Path:
        """The path of an adapter in the folder. ValueError: another one."""
        root = self._root()
        try:
            path = (root / said).resolve()
        except (OSError, ValueError, RuntimeError):  # a circle of links; a name that no file has
            path = root.parent
        if root not in path.parents:
            raise ValueError(f"lora_path: expected a path in the folder of adapters, got {short(said)}")
        return path

    async def _unload(self, request: Request) -> Response:
        """Unload an adapter; a model that is not loaded stays so."""
        self._expect_allowed(self._intake.namespace(request))
        body = await self._intake.body(request)
        name = checked(body, _UNLOAD, ("lora_name",))["lora_name"]
        await run_sync(partial(self._give_up, name))
        return PlainTextResponse(f"Unloaded the adapter {name}.")

    def _give_up(self, name: str) -> None:
        with self._turn:
            owner = self._models.owner(name)
            if owner is None or name not in owner.adapters:
                raise HTTPException(404, f"lora_name: expected an adapter that is loaded, got {short(name)}")
            model = owner.model
            owner.adapters.unload(None if model is None else model.engine, name)
