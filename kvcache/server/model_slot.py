"""`ModelSlot`: a model of a server, loaded or not; `ModelUse`: its use by a request."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack, suppress
from threading import Lock
from time import monotonic

from starlette.types import ASGIApp, Receive, Scope, Send

from kvcache.errors import GrammarError
from kvcache.grammar import json_object
from kvcache.server.constraints import knows_grammars
from kvcache.server.forms import now
from kvcache.server.served_adapters import ServedAdapters
from kvcache.server.served_model import ServedModel

__all__ = ["ModelSlot", "ModelUse"]


class ModelSlot:
    """A model by its names, which may be loaded later, and unloaded while no request uses it.

    Args:
        names: that of the model, and further ones.
        make: opens the model, on any thread; what is to be closed goes to the stack. None: `model` is given.
        needs: bytes of memory that it takes, about, until it was loaded once.
        is_pinned: whether it is never unloaded.
        model: loaded already.
        adapters: of the model; None: those of `model`, or none.

    Attributes:
        names, needs, is_pinned, adapters: see above.
        created: when this was made, in seconds since 1970.
        model: None while it is not loaded.
        is_leaving: whether it is to be unloaded: it takes no further requests.
        used: when the last request ended or began, in seconds of `monotonic`.
        loads: how many times it was loaded.
        waiting: requests that wait until it is loaded.
        seconds: that loading took.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        make: Callable[[ExitStack], ServedModel] | None,
        *,
        needs: int = 0,
        is_pinned: bool = False,
        model: ServedModel | None = None,
        adapters: ServedAdapters | None = None,
    ) -> None:
        self.names, self.needs, self.is_pinned, self.created = names, needs, is_pinned, now()
        if adapters is None:
            adapters = ServedAdapters() if model is None else model.adapters
        self.adapters = adapters
        self.model, self._make, self._stack, self._lock = model, make, ExitStack(), Lock()
        self._unloading, self._is_closed = Lock(), False
        if model is not None:
            _close_with(self._stack, model)
        self.is_leaving, self.used, self.seconds = False, monotonic(), 1.0
        self.loads, self.waiting, self._uses = 0, 0, 0

    @classmethod
    def of(cls, model: ServedModel) -> ModelSlot:
        """The slot of a model that is loaded and stays so."""
        return cls(model.names, None, is_pinned=True, model=model)

    @property
    def uses(self) -> int:
        """The number of requests that use the model."""
        return self._uses

    def load(self) -> None:
        """Open the model and start its engine; only then others see it.

        Nothing stays open where that raises, or where `close` was called meanwhile.
        """
        assert self._make is not None, "a model that is given stays loaded"
        began = monotonic()
        with ExitStack() as stack:
            model = self._make(stack)
            _close_with(stack, model)
            _start(model)
            with self._lock:
                if self._is_closed:
                    return
                self.needs = sum(model.engine.memory()[name] for name in ("weights", "kv"))
                self.seconds, self.used, self.loads = monotonic() - began, monotonic(), self.loads + 1
                self._stack, self.model = stack.pop_all(), model

    def start(self) -> None:
        """Start the engine of a model that was given; one that was loaded runs."""
        assert self.model is not None, "it is loaded"
        _start(self.model)

    def unload(self) -> None:
        """Close the model, if there is one, and return its memory; those that use it are cancelled.

        Others do not see it any more from the beginning on: what its tiers still have to write may take a minute.
        """
        with self._unloading:
            with self._lock:
                self.model, stack, self._stack = None, self._stack, ExitStack()
            stack.close()
            del stack
            gc.collect()  # an engine has cycles, and the next model needs its memory now

    def close(self) -> None:
        """Unload the model for good: one that just loads is closed as soon as it is loaded."""
        with self._lock:
            self._is_closed = True
        self.unload()

    def leave(self, *, idle: bool = False) -> bool:
        """Take no further requests; whether that is so. With `idle` it is not if requests use the model."""
        with self._lock:
            if not (idle and self._uses):
                self.is_leaving = True
            return self.is_leaving

    def take(self) -> ServedModel | None:
        """The model, used from now on until `give_back`; None: it is not loaded, or leaves."""
        with self._lock:
            if self.model is None or self.is_leaving:
                return None
            self._uses += 1
            return self.model

    def give_back(self) -> None:
        """End a use."""
        with self._lock:
            self._uses -= 1
            self.used = monotonic()


def _start(model: ServedModel) -> None:
    if knows_grammars():
        with suppress(GrammarError):  # a tokenizer that llguidance does not read: each request is told
            model.engine.prepare_grammar(json_object())  # no thread runs while it reads the vocabulary
    model.engine.start()


def _close_with(stack: ExitStack, model: ServedModel) -> None:
    stack.callback(model.engine.close, cancel=True)
    stack.callback(model.trials.close)


class ModelUse:
    """The use of a model by one request, from `take` to `end`, or to the end of an answer."""

    def __init__(self) -> None:
        self._slot: ModelSlot | None = None

    def take(self, slot: ModelSlot) -> ServedModel | None:
        """See `ModelSlot.take`."""
        if (model := slot.take()) is not None:
            self._slot = slot
        return model

    def end(self) -> None:
        """End the use, if there is one."""
        if self._slot is not None:
            self._slot.give_back()
        self._slot = None

    def until_answered(self, answer: ASGIApp) -> ASGIApp:
        """The answer, at whose end the use ends."""

        async def answered(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await answer(scope, receive, send)
            finally:
                self.end()

        return answered
