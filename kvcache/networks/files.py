"""The files of a checkpoint: only regular files are opened, and JSON is bounded in size and read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvcache.errors import CheckpointError
from kvcache.support.arguments import short
from kvcache.support.descriptors import File
from kvcache.support.json_text import json_fault
from kvcache.support.regular_files import open_regular, read_at

__all__ = [
    "ADAPTER_CONFIG", "MAX_CONFIG_BYTES", "MAX_JSON_BYTES", "json_object", "open_file", "parse_json", "read_file",
    "read_json", "refuse_adapter",
]

# An index or a header: room for more than 100 000 tensors of about 100 bytes each. It bounds the cost of parsing
# hostile JSON to less than half a GiB and some seconds.
MAX_JSON_BYTES = 16 * 2**20
MAX_CONFIG_BYTES = 4 * 2**20  # a configuration; most take some KiB
ADAPTER_CONFIG = "adapter_config.json"
_MAX_DIGITS = 400  # of one number: parsing takes quadratic time, and float64 ends at 309 digits


def open_file(path: Path) -> tuple[File, int]:
    """Open a regular file: `(file, size)`. Raises FileNotFoundError, or CheckpointError if it cannot be read."""
    try:
        return open_regular(path, CheckpointError)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"expected a local checkpoint directory with {path.name} (nothing is downloaded), got none at {path}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: expected a readable file, got {error.strerror}") from error


def read_file(path: Path, most: int) -> bytearray:
    """Read a regular file of at most `most` bytes. Raises as `open_file`, and CheckpointError for a larger file."""
    file, size = open_file(path)
    try:
        if size > most:
            raise CheckpointError(f"{path}: expected at most {most} bytes, got {size}")
        data = bytearray(size)
        if not read_at(file.fd, [data], 0):
            raise CheckpointError(f"{path}: expected {size} bytes, got a truncated file")
        return data
    except OSError as error:
        raise CheckpointError(f"{path}: expected a readable file, got {error.strerror}") from error
    finally:
        file.close()


def read_json(path: Path, most: int = MAX_CONFIG_BYTES, *, infinity: bool = False) -> dict[str, Any]:
    """Read the JSON object in `path`; raises as `read_file` and `json_object`."""
    return json_object(path, read_file(path, most), infinity=infinity)


def json_object(path: Path, data: bytes | bytearray, *, infinity: bool = False) -> dict[str, Any]:
    """The JSON object in `data`, the content of `path`, as `parse_json` reads it. CheckpointError: anything else."""
    try:
        content = parse_json(data, infinity=infinity)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected valid JSON, got {json_fault(error)}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def refuse_adapter(directory: Path) -> None:
    """Raise CheckpointError for a folder of an adapter, such as LoRA, alone or beside a network, which it changes."""
    found = directory / ADAPTER_CONFIG
    if not found.exists():
        return
    base = read_json(found).get("base_model_name_or_path")
    named = f" for {short(base)}" if isinstance(base, str) and base else ""
    raise CheckpointError(
        f"{found}: expected a network alone, got an adapter{named}: load its network, and the adapter beside it, with "
        "adapters= of an engine or --adapter of a command"
    )


def parse_json(data: bytes | bytearray, *, infinity: bool = False) -> Any:
    """Parse UTF-8 JSON. Raises RecursionError, and ValueError also for a repeated key, NaN and Infinity.

    Args:
        infinity: whether Infinity becomes the object that transformers 5 writes for it; no entry takes it for a number.
    """
    constant = _infinity if infinity else _no_constant
    return json.loads(
        data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=constant, parse_int=_int, parse_float=_float
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict. Raises ValueError for a repeated key, since it is unknown which value is meant."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"keys: expected each once, got {short(key)} twice")
            seen.add(key)
    return found


def _infinity(name: str) -> Any:
    return {"__float__": name} if name == "Infinity" else _no_constant(name)


def _no_constant(name: str) -> Any:
    raise ValueError(f"number: expected a finite one, got {name}")


def _int(digits: str) -> int:
    return int(_bounded(digits))


def _float(digits: str) -> float:
    return float(_bounded(digits))


def _bounded(digits: str) -> str:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"number: expected at most {_MAX_DIGITS} digits, got {len(digits)}")
    return digits
