"""`ModelLoader`: loads models when requests ask for them, and unloads others to make room."""

from __future__ import annotations

import logging
from asyncio import Task, create_task
from time import monotonic

from anyio import CancelScope, CapacityLimiter, Event, Lock, fail_after, sleep
from anyio.lowlevel import checkpoint
from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException

from kvcache.server.model_slot import ModelSlot, ModelUse
from kvcache.server.models import Models
from kvcache.server.refusals import ending
from kvcache.server.served_model import ServedModel
from kvcache.support.machine_memory import size_text

__all__ = ["ModelLoader"]

logger = logging.getLogger("kvcache")

_POLL = 0.02  # seconds between looks at a model whose last requests run


class ModelLoader:
    """Loads one model at a time, in the order in which requests ask.

    A model that has no room takes the place of the least recently used one that is not pinned, once the requests of
    that one have ended; new requests for that one wait meanwhile, and then load it again.

    Args:
        models: of the server.
        memory: bytes that all models together may take; None: no limit but the system's.
        most_loaded: models that may be loaded at a time; None: any number.
        idle: seconds without a request after which a model that is not pinned is unloaded; None: it stays.
        most_waiting: requests that may wait for a model that is not loaded.
    """

    def __init__(
        self,
        models: Models,
        *,
        memory: int | None = None,
        most_loaded: int | None = None,
        idle: float | None = None,
        most_waiting: int = 256,
    ) -> None:
        self._models, self._memory, self._most, self._idle = models, memory, most_loaded, idle
        self._most_waiting = most_waiting

    async def start(self) -> None:
        """Start the models that are loaded. Called on the event loop that all other calls are made on."""
        self._turn, self._thread, self._tasks = Lock(), CapacityLimiter(1), set[Task[None]]()
        for slot in self._loaded():
            await run_sync(slot.start, limiter=self._thread)

    async def close(self) -> None:
        """Close all models, also one that loads or leaves; what still runs is cancelled."""
        for slot in self._models.all:
            try:
                await run_sync(slot.close)
            except Exception:  # the others are closed too
                logger.exception("%s could not be closed", slot.names[0])
        for task in list(self._tasks):  # not what it waits for: a thread that loads closes what it has opened
            task.cancel()

    async def unload_idle(self) -> None:
        """Unload models that nobody uses any more, until this is cancelled."""
        if self._idle is None:
            return
        while True:
            await sleep(min(1.0, self._idle / 4))
            async with self._turn:
                for slot in self._loaded():
                    is_idle = not slot.is_pinned and monotonic() - slot.used > self._idle
                    if is_idle and slot.leave(idle=True):
                        await self._leave(slot)

    async def taken(self, slot: ModelSlot, use: ModelUse, seconds: float) -> ServedModel:
        """The model of a slot, which `use` has then; it is loaded if it is not.

        Raises:
            HTTPException: too many requests wait for it; it could not be loaded, or not within `seconds`.
        """
        if slot.waiting >= self._most_waiting:
            told = f"model: expected at most {self._most_waiting} requests that wait until it is loaded, got more"
            raise HTTPException(503, told, {"retry-after": str(max(1, round(slot.seconds)))})
        slot.waiting += 1
        scope, ended, found = CancelScope(), Event(), list[ServedModel | Exception]()

        async def take() -> None:  # in a task of its own: a thread that loads, or unloads, holds up no time limit
            try:
                with scope:
                    found.append(await self._in_turn(slot, use, scope))
            except Exception as error:
                found.append(error)
            finally:
                ended.set()

        task = create_task(take())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            with fail_after(seconds):
                await ended.wait()
        except TimeoutError:
            raise HTTPException(503, "model: expected one that is loaded in time, got none") from None
        finally:
            slot.waiting -= 1
            scope.cancel()
        if not found:
            raise ending()
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    async def _in_turn(self, slot: ModelSlot, use: ModelUse, scope: CancelScope) -> ServedModel:
        async with self._turn:
            if slot.model is None:
                await self._load(slot)
            if scope.cancel_called:  # nobody would end the use
                await checkpoint()
            if (model := use.take(slot)) is None:  # a loaded model stays until the turn ends
                raise ending()
            return model

    async def _load(self, slot: ModelSlot) -> None:
        """Load a model, and unload others for it as long as that helps. Called in a turn."""
        while not self._has_room(slot) and await self._freed():
            pass
        if not self._has_place():
            raise HTTPException(503, "model: expected a place for it, got pinned models in all of them")
        while True:
            try:
                await run_sync(slot.load, limiter=self._thread)
                break
            except MemoryError as error:
                if not await self._freed():
                    logger.warning("%s could not be loaded: %s", slot.names[0], error)
                    raise HTTPException(503, f"model: expected memory for it, got none: {error}") from None
            except Exception as error:  # the server goes on
                logger.exception("%s could not be loaded", slot.names[0])
                raise HTTPException(503, f"model: expected one that loads, got {type(error).__name__}") from None
        logger.warning("loaded %s in %.1f s, %s", slot.names[0], slot.seconds, size_text(slot.needs))

    def _loaded(self) -> list[ModelSlot]:
        return [slot for slot in self._models.all if slot.model is not None]

    def _has_place(self) -> bool:
        return self._most is None or len(self._loaded()) < self._most

    def _has_room(self, slot: ModelSlot) -> bool:
        taken = sum(each.needs for each in self._loaded())
        return self._has_place() and (self._memory is None or taken + slot.needs <= self._memory)

    async def _freed(self) -> bool:
        """Unload the least recently used model that is not pinned, one that is idle if any is; whether one was."""
        some = [slot for slot in self._loaded() if not slot.is_pinned]
        if not some:
            return False
        await self._leave(min(some, key=lambda slot: (slot.uses > 0, slot.used)))
        return True

    async def _leave(self, slot: ModelSlot) -> None:
        """Unload a model when its last request has ended; if this is cancelled before, the model stays."""
        slot.leave()
        try:
            while slot.uses:
                await sleep(_POLL)
            await run_sync(slot.unload)
            logger.warning("unloaded %s", slot.names[0])
        except Exception:  # the server goes on; the model is gone
            logger.exception("%s could not be closed", slot.names[0])
        finally:
            slot.is_leaving = False
