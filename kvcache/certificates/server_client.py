"""`ServerClient`: answers of a server with OpenAI's interface, with their log-probabilities where it has them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from kvcache.support.arguments import short
from kvcache.support.json_text import json_fault

__all__ = ["ServerAnswer", "ServerClient"]

MAX_TOKENS = 32
_TOP = 5
_TIMEOUT = 600.0  # seconds of one answer
_MOST_BYTES = 1 << 26
_FIXED = {"temperature": 0, "seed": 0, "max_tokens": MAX_TOKENS}


class ServerAnswer(NamedTuple):
    """An answer of a server.

    Attributes:
        text: of it.
        tokens: the texts of its tokens; empty: the server gave no log-probabilities.
        logprobs: the log-probability of each token.
        tops: for each token those of the most likely ones, by their texts.
        cached: tokens of the prompt that the server says were cached; None: it does not say.
    """

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    tops: tuple[Mapping[str, float], ...]
    cached: int | None


class _Form(NamedTuple):
    """A way to ask: a path, and the fields of a prompt."""

    path: str
    body: Callable[[str], dict[str, Any]]


# The first form that a server answers with log-probabilities is taken, else the first one that it answers.
_FORMS = (
    _Form("/completions", lambda prompt: {"prompt": prompt, "logprobs": _TOP}),
    _Form("/chat/completions", lambda prompt: {"messages": _talk(prompt), "logprobs": True, "top_logprobs": _TOP}),
    _Form("/completions", lambda prompt: {"prompt": prompt}),
    _Form("/chat/completions", lambda prompt: {"messages": _talk(prompt)}),
)


def _talk(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


class ServerClient:
    """Asks one server for answers. Threads may share it.

    Args:
        url: of the interface, with `/v1` or without.
        key: of the server; None: it has none.
        model: the name of a model that it serves; None: the first one of its list.

    Raises:
        ValueError: no URL of http or https.
        OSError: no answer; an answer that is none of OpenAI's interface.
    """

    def __init__(self, url: str, key: str | None = None, model: str | None = None) -> None:
        if not _is_http(url):
            raise ValueError(f"server: expected a URL such as http://127.0.0.1:8000/v1, got {short(url)}")
        url = url.rstrip("/")
        self.url = url if url.endswith("/v1") else f"{url}/v1"
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self.model = self._first_model() if model is None else model
        self._form: _Form | None = None

    def choose(self, prompt: str) -> str:
        """Find out how the server is asked, by a prompt; returns what it is asked for.

        OSError: it answers none of the forms.
        """
        refusals, answered = list[str](), list[_Form]()
        for form in _FORMS:
            try:
                answer = self._ask(form, prompt)
            except OSError as error:
                refusals.append(str(error))
                continue
            answered.append(form)
            if answer.tokens:
                break
        if not answered:
            raise OSError(f"server: expected an answer to {_FORMS[0].path} or {_FORMS[1].path}, got {refusals[0]}")
        self._form = answered[-1] if answer.tokens else answered[0]
        return f"{self._form.path}, {'with' if answer.tokens else 'without'} log-probabilities"

    def answer(self, prompt: str) -> ServerAnswer:
        """The answer to a prompt. OSError: the server fails."""
        assert self._form is not None, "choose comes first"
        return self._ask(self._form, prompt)

    def _ask(self, form: _Form, prompt: str) -> ServerAnswer:
        content = self._fetch(form.path, {"model": self.model, **_FIXED, **form.body(prompt)})
        try:
            return _read(content)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise OSError(f"{form.path}: expected an answer of OpenAI's interface, got {short(content)}") from None

    def _first_model(self) -> str:
        try:
            return str(self._fetch("/models", None)["data"][0]["id"])
        except (IndexError, KeyError, TypeError):
            raise OSError("/models: expected a list of at least one model, got another answer") from None

    def _fetch(self, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(self.url + path, data, self._headers), timeout=_TIMEOUT) as page:
                return json.loads(page.read(_MOST_BYTES))
        except HTTPError as error:
            with error:
                said = error.read(300).decode(errors="replace")
            raise OSError(f"{path}: expected an answer, got status {error.code}: {said}") from None
        except URLError as error:
            raise OSError(f"{self.url}: expected a server, got {error.reason}") from None
        except HTTPException as error:
            raise OSError(f"{self.url}: expected an answer of HTTP, got {error!r}") from None
        except (RecursionError, ValueError) as error:
            raise OSError(f"{path}: expected JSON, got {json_fault(error)}") from None


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of its host or port
        return False


def _read(content: Any) -> ServerAnswer:
    """An answer of either form: lists of tokens and numbers, or a list of objects, as some servers have in both."""
    choice, usage = content["choices"][0], content.get("usage") or {}
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    told = choice.get("logprobs") or {}
    if told.get("content"):
        tokens = tuple(str(each["token"]) for each in told["content"])
        logprobs = tuple(float(each["logprob"]) for each in told["content"])
        lists = [each.get("top_logprobs") or [] for each in told["content"]]
        tops = tuple({str(each["token"]): float(each["logprob"]) for each in reversed(some)} for some in lists)
    else:
        tokens = tuple(map(str, told.get("tokens") or ()))
        logprobs = tuple(map(float, told["token_logprobs"])) if tokens else ()
        given = told.get("top_logprobs") or [{}] * len(tokens)
        tops = tuple({str(name): float(value) for name, value in (each or {}).items()} for each in given)
    if not len(tokens) == len(logprobs) == len(tops):
        raise ValueError(f"logprobs: expected {len(tokens)} numbers, got {len(logprobs)} and {len(tops)}")
    return ServerAnswer("" if text is None else str(text), tokens, logprobs, tops, cached)
