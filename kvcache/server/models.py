"""The models of a server, by their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from starlette.exceptions import HTTPException

from kvcache.server.model_slot import ModelSlot
from kvcache.support.arguments import short

__all__ = ["Models"]

_FEW = 16  # names in a message


class Models:
    """The models of a server by their names, and by those of their adapters, which may change.

    Args:
        models: at least one.

    Raises:
        ValueError: none; two have one name.

    Attributes:
        all: see above.
    """

    def __init__(self, models: Sequence[ModelSlot]) -> None:
        if not models:
            raise ValueError("models: expected at least one, got none")
        self.all = tuple(models)
        self._by_name: dict[str, ModelSlot] = {}
        for model in models:
            for name in model.names:
                if self._by_name.setdefault(name, model) is not model:
                    raise ValueError(f"models: expected each name once, got {short(name)} twice")
        count = Counter((*self._by_name, *(name for model in models for name in model.adapters)))
        if twice := [name for name, number in count.items() if number > 1]:
            raise ValueError(f"models: expected other names of adapters, got {short(twice[0])} twice")

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of the models; those of adapters behind."""
        return (*self._by_name, *(name for model in self.all for name in model.adapters))

    def owner(self, name: str) -> ModelSlot | None:
        """The model of a name, or of an adapter of that name; None: there is none."""
        return self._by_name.get(name) or next((model for model in self.all if name in model.adapters), None)

    def named(self, name: str) -> ModelSlot:
        """As `owner`. HTTPException: there is none."""
        if (found := self.owner(name)) is None:
            raise HTTPException(404, f"model: expected {_some(self.names)}, got {short(name)}")
        return found

    def of(self, body: dict[str, Any]) -> ModelSlot:
        """The model that a body asks for. One that names none asks for the only one, and gets its name.

        With several models the first one is returned; paths that need a name then refuse the body.
        """
        if len(self.all) == 1 and body.get("model") is None:
            body["model"] = self.all[0].names[0]
        name = body.get("model")
        return self.named(name) if isinstance(name, str) else self.all[0]


def _some(names: Sequence[str]) -> str:
    """Names for a message: of many adapters the first ones."""
    return " or ".join([*names[:_FEW], *(["another of /v1/models"] if len(names) > _FEW else [])])
