"""Options of a command in a file of TOML, instead of on its command line, which counts more."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcache.support.arguments import short

__all__ = ["configured"]

# What a table [[model]] may say beside its path, its name and its aliases: options that are about one model.
_OF_A_MODEL = {
    "activations", "adapter", "autosave", "calibrate", "chat_template", "context", "draft", "draft_tokens", "dtype",
    "edit_masks", "frequency_penalty", "kv_events", "kv_events_medium", "kv_events_rank", "kv_events_replay",
    "kv_events_topic", "kv_events_unsalted", "max_memory", "max_queue", "max_running", "max_tokens", "max_vectors",
    "min_p", "num_blocks", "object_store", "pin", "plain_special_tokens", "pooling", "preload", "presence_penalty",
    "redis", "repetition_penalty", "reranker", "seed", "sparse_tokens", "spill", "stop", "temperature",
    "tier_secret", "tool_parser", "top_k", "top_p", "weights",
}
_NAMES = {"path": "model", "name": "name", "aliases": "served_name"}  # of a table, and the options that they are


def configured(
    path: str, parser: argparse.ArgumentParser, parse: Callable[[], argparse.Namespace]
) -> argparse.Namespace:
    """The options of a command line over those of a file.

    `tables` of the result has the options of each model of the file, a table `[[model]]`: what the command line says,
    or else the table, or else the rest of the file.

    Args:
        path: of a file such as `port = 8080`; names are those of options, with `-` or `_`.
        parser: of the command; it gets the defaults of the file.
        parse: reads the command line.

    Raises:
        ImportError: Python 3.10, which does not read TOML.
        OSError: no file that can be read.
        ValueError: no TOML, an unknown option, or a value of another kind.
    """
    content, known = _content(path), vars(parser.parse_args([]))
    for name in ("model", "models"):
        if isinstance(content.get(name), dict) or (name == "models" and name in content):
            got = f"[{name}]" if isinstance(content[name], dict) else name
            raise ValueError(f"config: expected a table [[model]] for each model, got {got}")
    tables = content.pop("model") if isinstance(content.get("model"), list) else []
    places = {name: name for name in known if name not in ("config", "parser", "tables")}
    base = _options(content, known, places, "the command")
    parser.set_defaults(**base)
    options = parse()
    if tables and (options.model is not None or options.name is not None or options.served_name or options.adapter):
        raise ValueError("config: expected what names models, and adapters, in the tables [[model]] alone, got another")
    options.tables = []
    for table in tables:
        if not isinstance(table, dict) or "path" not in table:
            raise ValueError(f"config: model: expected tables with a path, got {short(table)}")
        own = _options(table, known, {name: name for name in _OF_A_MODEL} | _NAMES, "a model")
        parser.set_defaults(**known | base | own)
        options.tables.append(parse())
    return options


def _content(path: str) -> dict[str, Any]:
    if sys.version_info < (3, 11):
        raise ImportError("config: expected Python 3.11 or later, which reads TOML, got 3.10")
    import tomllib

    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"config: expected TOML, got an error: {short(str(error))}") from None


def _options(content: dict[str, Any], known: dict[str, Any], places: dict[str, str], what: str) -> dict[str, Any]:
    """The options of a table by their places in the result of a parser, as texts where the parser reads them."""
    found = {}
    for name, value in content.items():
        place = places.get(name.replace("-", "_"))
        if place is None:
            raise ValueError(f"config: expected options of {what}, got {short(name)}")
        found[place] = _read(name, value, known[place])
    return found


def _read(name: str, value: Any, default: Any) -> Any:
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"config: {name}: expected true or false, got {short(value)}")
        return value
    if isinstance(default, list):
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ValueError(f"config: {name}: expected a list of texts, got {short(value)}")
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"config: {name}: expected a text or a number, got {short(value)}")
    return str(value)
