"""Errors as a client of OpenAI's interface gets them: status, message, the field they are about, and a code."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvcache.errors import CheckpointError, GrammarError, InvalidOperationError, OutOfMemoryError, QueueFullError
from kvcache.sampling.text_tokens import TooManyTokens
from kvcache.server.request_log import request_id
from kvcache.support.arguments import short

__all__ = ["REFUSED", "BodyError", "ending", "message_refusal", "no_adapter", "refusal", "too_large", "too_many"]

logger = logging.getLogger("kvcache")

CONTEXT = "context_length_exceeded"
_STATUSES: dict[type[Exception], int] = {  # of what may be raised before a request runs
    QueueFullError: 429, InvalidOperationError: 503, CheckpointError: 500, OutOfMemoryError: 400, TypeError: 400,
    ValueError: 400, ImportError: 501,  # which names the extra that this server lacks
}
REFUSED = (*_STATUSES, HTTPException)
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_MESSAGE_KINDS = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    529: "overloaded_error",
}
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
_NO_FIELDS = {"answer", "authorization", "body", "content-type", "grammar", "host", "method", "path"}  # of other things


class BodyError(ValueError):
    """A body that is refused, with one of the codes of OpenAI's interface."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def too_many(field: str, most: int, count: int) -> ValueError:
    """A body asks for more answers than may be."""
    return ValueError(f"{field}: expected at most {most} answers, n for each, got {count}")


def too_large(field: str, got: str, most: int | None = None) -> BodyError:
    """A text needs more memory than the engine has, where `most` tokens fit.

    Args:
        field: of the body.
        got: what the text has, such as "7 tokens".
        most: None: not known, or no less than the text has.
    """
    expected = "a text that fits the memory for tokens" if most is None else f"at most {most} tokens"
    limit = "" if most is None else f": this model's maximum context length is {most} tokens on this server"
    more = "--context, --num-blocks or --max-memory of the server gives more"
    return BodyError(f"{field}: expected {expected}, got {got}{limit}; {more}", CONTEXT)


def no_adapter(name: str) -> HTTPException:
    """A request names an adapter, or runs with one, that was unloaded."""
    return HTTPException(404, f"model: expected an adapter that is loaded, got {short(name)}, which was unloaded")


def ending() -> HTTPException:
    """There is no answer, since the server ends."""
    return HTTPException(503, "answer: expected one, got none: the server ends")


def refusal(error: Exception, *, running: bool = False) -> Response:
    """An error as a client gets it. What it did not cause goes to the log; `running`: a request failed as it ran."""
    found = _found(error, running)
    kind = _KINDS.get(found.status, "invalid_request_error" if found.status < 500 else "server_error")
    value = {"message": found.message, "type": kind, "param": found.field, "code": found.code}
    return _response(found, {"error": value})


def message_refusal(error: Exception, *, running: bool = False) -> Response:
    """As `refusal`, in the form of Anthropic's interface."""
    found = _found(error, running)
    message = f"prompt is too long: {found.message}" if found.code == CONTEXT else found.message  # clients look for it
    if found.status == 503:
        found = found._replace(status=529)
    kind = _MESSAGE_KINDS.get(found.status, "invalid_request_error" if found.status < 500 else "api_error")
    value = {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id()}
    return _response(found, value)


class _Found(NamedTuple):
    """An error, as far as a client is told."""

    status: int
    message: str
    field: str | None
    code: str | None
    headers: Mapping[str, str] | None


def _found(error: Exception, running: bool) -> _Found:
    known = not running or isinstance(error, (BodyError, GrammarError))
    status = next((_STATUSES[kind] for kind in type(error).__mro__ if known and kind in _STATUSES), 500)
    message = str(error)
    if isinstance(error, InvalidOperationError) and known:
        error = ending()
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif status == 500:
        logger.error("request %s failed", request_id() or "of no client", exc_info=error)
        message = f"the request failed: {type(error).__name__}"
    name, found, _ = message.partition(": expected")
    field = name if found and name not in _NO_FIELDS else None
    code = getattr(error, "code", None) or _CODES.get(status)
    if isinstance(error, TooManyTokens):  # clients look for these words, or for the code
        code, message = CONTEXT, f"{message}: this model's maximum context length is {error.most} tokens"
    elif (status, field) == (404, "model"):
        code = "model_not_found"
    headers = getattr(error, "headers", None)
    if status in (429, 503):
        headers = {"retry-after": "1"} | dict(headers or {})
    return _Found(status, message, field, code, headers)


def _response(found: _Found, value: Any) -> Response:
    """JSON in ASCII, whatever is in a text."""
    return Response(json.dumps(value), found.status, found.headers, "application/json")
