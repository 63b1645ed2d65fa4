"""The models of a server, by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.exceptions import HTTPException

from kvcache.server.model_slot import ModelSlot
from kvcache.support.arguments import short

__all__ = ["Models"]


class Models:
    """The models of a server by their names.

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

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of the models."""
        return tuple(self._by_name)

    def named(self, name: str) -> ModelSlot:
        """The model of a name. HTTPException: there is none."""
        if name not in self._by_name:
            raise HTTPException(404, f"model: expected {' or '.join(self._by_name)}, got {short(name)}")
        return self._by_name[name]

    def of(self, body: dict[str, Any]) -> ModelSlot:
        """The model that a body asks for. One that names none asks for the only one, and gets its name.

        With several models the first one is returned; paths that need a name then refuse the body.
        """
        if len(self.all) == 1 and body.get("model") is None:
            body["model"] = self.all[0].names[0]
        name = body.get("model")
        return self.named(name) if isinstance(name, str) else self.all[0]
