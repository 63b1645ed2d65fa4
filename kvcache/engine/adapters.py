"""`Adapters`: the adapters that an engine has, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from threading import Lock
from typing import Any
from weakref import WeakSet

from kvcache.networks.adapter import Adapter
from kvcache.networks.adapter_files import read_adapter
from kvcache.networks.config import ModelConfig
from kvcache.networks.protocols import Model
from kvcache.support.arguments import as_instance, short
from kvcache.texts.text_adapter import LoadedAdapter

__all__ = ["Adapters"]


class Adapters(Mapping[str, Adapter]):
    """The adapters of an engine, by the names that requests give. Calls of several threads are safe.

    Args:
        model: the network.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._loaded: dict[str, LoadedAdapter] = {}  # is replaced, never changed
        self._changes = Lock()
        self._known: WeakSet[LoadedAdapter] = WeakSet()  # those too that a later one of the name has replaced

    def load(self, name: str, adapter: Adapter | str | PathLike[str]) -> Adapter:
        """Take an adapter, or read one, under a name; texts that run with another one of that name go on with it.

        Raises:
            TypeError: another kind, or a network that takes none.
            ValueError: an adapter of another network; no name.
            FileNotFoundError, CheckpointError: as `read_adapter`.
        """
        if not as_instance(name, str, "name"):
            raise ValueError("name: expected one of an adapter, got an empty text")
        prepare = getattr(self._model, "prepare_adapter", None)
        if prepare is None:
            raise TypeError(f"adapters: expected a network with prepare_adapter, got {type(self._model).__name__}")
        if isinstance(adapter, (str, PathLike)):
            adapter = read_adapter(adapter, as_instance(self._model.config, ModelConfig, "adapters"), name)
        loaded = LoadedAdapter(name, as_instance(adapter, Adapter, "adapter"), prepare(adapter))
        with self._changes:
            self._known.add(loaded)
            self._loaded = self._loaded | {name: loaded}
        return adapter

    def unload(self, name: str) -> None:
        """Give an adapter up: no text runs with one of this name any more. ValueError: there is none."""
        with self._changes:
            self.find(name)
            self._loaded = {each: loaded for each, loaded in self._loaded.items() if each != name}
            for loaded in list(self._known):
                if loaded.name == name:
                    loaded.is_loaded = False

    def find(self, name: str | None) -> LoadedAdapter | None:
        """The adapter of a name; None has none. ValueError: there is no such adapter."""
        if name is None:
            return None
        found = self._loaded.get(name) if isinstance(name, str) else None
        if found is None:
            known = f"one of {short(sorted(self._loaded))}" if self._loaded else "none, since none is loaded"
            raise ValueError(f"adapter: expected {known}, got {short(name)}")
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices that products read."""
        return sum(loaded.prepared.nbytes for loaded in self._loaded.values())

    def __getitem__(self, name: Any) -> Adapter:
        return self._loaded[name].adapter

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({short(list(self._loaded))})"
