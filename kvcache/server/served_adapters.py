"""The adapters of a model of a server: their names and folders, which stay while the model is not loaded."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from threading import Lock

from kvcache.errors import CheckpointError
from kvcache.server.forms import now
from kvcache.serving import BatchEngine
from kvcache.support.arguments import short

__all__ = ["ServedAdapters", "checked_name"]

logger = logging.getLogger("kvcache")

_MOST_NAME = 200  # characters


class ServedAdapters(Mapping[str, str]):
    """The paths of adapters by the names that requests give as their model. Calls of several threads are safe.

    Args:
        paths: those that the model has from the beginning on.

    Raises:
        ValueError: a name that none may have.

    Attributes:
        created: when each was named, in seconds since 1970.
        requests: the number of requests that each has had; "": of those without one.
    """

    def __init__(self, paths: Mapping[str, str] | None = None) -> None:
        self._paths = {checked_name(name): path for name, path in (paths or {}).items()}  # is replaced, never changed
        self._later: frozenset[str] = frozenset()  # of clients
        self._lock = Lock()
        self.created = dict.fromkeys(self._paths, now())
        self.requests: Counter[str] = Counter({"": 0} | dict.fromkeys(self._paths, 0))

    def attach(self, engine: BatchEngine) -> None:
        """Load all into the engine of the model, which has just been made.

        An adapter that a client has named may have been removed from its folder: the model loads without it then. An
        adapter that a client unloads meanwhile is not in the engine.

        Raises:
            FileNotFoundError, CheckpointError: as `read_adapter`, of one that was there from the beginning on.
        """
        paths = self._paths
        for name, path in paths.items():
            try:
                engine.load_adapter(name, path)
            except (FileNotFoundError, CheckpointError) as error:
                if name not in self._later:
                    raise
                logger.warning("the adapter %s cannot be loaded again: %s", name, error)
                with suppress(ValueError):  # a client has
                    self.unload(None, name)
        with self._lock:
            for name in paths:
                if name not in self._paths and name in engine.adapters:
                    engine.unload_adapter(name)

    def load(self, engine: BatchEngine, name: str, path: str) -> None:
        """Load one into the engine of the model, in place of the one of its name, if there is one.

        Raises:
            ValueError: no such name. Otherwise as `read_adapter`; all stays as it was then.
        """
        checked_name(name)
        with self._lock:
            engine.load_adapter(name, path)
            self._paths, self._later = self._paths | {name: path}, self._later | {name}
            self.created[name] = now()
            self.requests[name] += 0

    def count(self, name: str | None) -> None:
        """Count a request with an adapter; None: without one."""
        with self._lock:
            if name is None or name in self._paths:
                self.requests[name or ""] += 1

    def unload(self, engine: BatchEngine | None, name: str) -> None:
        """Give one up, whose requests end; `engine`: that of the model, if it is loaded. ValueError: there is none."""
        with self._lock:
            if name not in self._paths:
                raise ValueError(f"lora_name: expected one of {short(sorted(self._paths))}, got {short(name)}")
            self._paths = {each: path for each, path in self._paths.items() if each != name}
            if engine is not None and name in engine.adapters:
                engine.unload_adapter(name)
            del self.created[name], self.requests[name]

    def __getitem__(self, name: str) -> str:
        return self._paths[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def checked_name(name: str) -> str:
    """The name of an adapter. ValueError: none that can be shown in a line."""
    if not 0 < len(name) <= _MOST_NAME or not name.isprintable() or name != name.strip():
        raise ValueError(f"adapter: expected a name of 1 to {_MOST_NAME} characters that print, got {short(name)}")
    return name
