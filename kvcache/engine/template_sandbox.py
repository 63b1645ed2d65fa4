"""`compiled`: a chat template in the sandbox of jinja2.

It has the names that transformers gives to templates: `raise_exception`, `strftime_now`, `tojson`, and the tags
`break`, `continue` and `generation`.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from types import GeneratorType
from typing import Any

from kvcache.errors import CheckpointError

__all__ = ["compiled"]

_OLDEST = (3, 1, 6)  # of jinja2: earlier sandboxes have known holes
_NEEDS = "a chat template needs the package jinja2, 3.1.6 or later: pip install 'kvcache-cpu[text]'"


def compiled(template: str) -> Any:
    """The template as jinja2 compiles it. ImportError: no such package, or an old one; CheckpointError: damaged."""
    if isinstance(found := _compiled_or_refused(template), str):
        raise CheckpointError(f"chat_template: expected a Jinja template, got an error: {found}")
    return found


@lru_cache(maxsize=8)
def _compiled_or_refused(template: str) -> Any:
    """The same; a text is the error of a damaged one, which may take a second to be found."""
    environment = _environment()
    try:
        return environment.from_string(template)
    except Exception as error:  # of jinja2, or of Python's compiler: SyntaxError, RecursionError, MemoryError
        return str(error)


def _environment() -> Any:
    """The sandbox. ImportError: as `compiled`."""
    try:
        import jinja2
        from jinja2 import ext, nodes, sandbox
    except ImportError:
        raise ImportError(_NEEDS) from None
    if tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit()) < _OLDEST:
        raise ImportError(f"{_NEEDS}; got {jinja2.__version__}")

    class Generation(ext.Extension):
        """`{% generation %}` marks what an assistant wrote, which changes no text."""

        tags = {"generation"}  # noqa: RUF012  # as its class has it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Namespace(jinja2.utils.Namespace):
        """Without names that begin with an underscore, which lead to the interpreter's own objects."""

        def __init__(*args: Any, **attributes: Any) -> None:
            for name in dict(*args[1:], **attributes):
                refuse_hidden(name)
            jinja2.utils.Namespace.__init__(*args, **attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            refuse_hidden(name)
            super().__setitem__(name, value)

    class Sandbox(sandbox.ImmutableSandboxedEnvironment):
        """One in which a template can use a list as a queue, as those of Kimi K2 do: all that it reaches is a copy."""

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            return (type(obj) is list and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    def refuse_hidden(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace: expected a public name, got {name}")

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=_strftime_now, namespace=Namespace,
        dict=lambda *args, **items: dict(*args, **items),  # not the class, which has more
    )
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without jinja2's escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_listed
    )


def _listed(value: Any) -> list[Any]:
    """The values of a filter such as `map`."""
    if not isinstance(value, GeneratorType):
        raise TypeError(f"tojson: expected plain data, got {type(value).__name__}")
    return list(value)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
