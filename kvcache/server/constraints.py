"""The form that a body asks its answer to have."""

from __future__ import annotations

from typing import Any

from kvcache.server.refusals import BodyError
from kvcache.support.arguments import short

__all__ = ["expect_free_calls", "response_format"]


def response_format(value: Any, name: str) -> None:
    """Read the form that an answer is to have: text is the only one.

    Raises:
        BodyError: another form.
    """
    if not isinstance(value, dict) or value.get("type") != "text":
        raise BodyError(f"{name}: expected type text, got {short(value)}", "unsupported_parameter")


def expect_free_calls(choice: str, name: str) -> None:
    """Refuse a choice of tools that leaves the network no choice, since nothing holds it to a call.

    Args:
        choice: "none", "auto" or "required".
        name: of the field.

    Raises:
        BodyError: "required".
    """
    if choice == "required":
        raise BodyError(f"{name}: expected none or auto, got one that requires a call", "unsupported_parameter")
