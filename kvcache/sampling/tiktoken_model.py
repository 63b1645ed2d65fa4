"""Kimi's tokenizer files, `tiktoken.model` and `tokenizer_config.json`, if a folder has no `tokenizer.json`.

The first lists tokens as bytes with their ranks, the second the special tokens, whose ids come behind. The regular
expression that divides a text is in the Python beside them, which is read and never run.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any, NoReturn

from kvcache.errors import CheckpointError
from kvcache.gguf.vocabulary import MOST, Vocabulary
from kvcache.sampling.byte_ranks import MAX_TOKEN_BYTES, rank_vocabulary
from kvcache.sampling.text_files import TextFiles
from kvcache.sampling.vocabulary_tokenizer import KIMI_PATTERN
from kvcache.support.arguments import short

__all__ = ["kimi_vocabulary"]

_CLASS = "tokenization_kimi.TikTokenTokenizer"
_SPECIAL = 256  # ids behind those of the file


def kimi_vocabulary(files: TextFiles) -> Vocabulary:
    """The tokens of `tiktoken.model`. CheckpointError: damaged files, or those of another tokenizer."""
    path, beside = files.folder / "tiktoken.model", files.folder / "tokenizer_config.json"
    config = files.json(beside.name)
    _check_pattern(files, beside, config)
    ranks = _ranks(path, files.content(path.name))
    special = _special_tokens(beside, config, len(ranks))
    ids = {text: id for id, (text, _) in enumerate(special, len(ranks))}
    bos, eos, unknown = (ids.get(name) if isinstance(name := config.get(key), str) else None for key in _NAMES)
    try:
        return rank_vocabulary(
            "kimi-k2", ranks, special, special_first=False, add_bos=False, ends=(bos, eos, unknown)
        )
    except ValueError:
        _fail(beside, "added_tokens_decoder", "texts that are no other tokens", "one twice")


_NAMES = ("bos_token", "eos_token", "unk_token")


def _fail(path: Path, key: str, expected: str, found: Any) -> NoReturn:
    raise CheckpointError(f"{path}: {key}: expected {expected}, got {short(found)}")


def _check_pattern(files: TextFiles, beside: Path, config: dict[str, Any]) -> None:
    """Raise CheckpointError for another tokenizer: by its name, and by the Python beside it, if there is some."""
    classes = config.get("auto_map")
    named = classes.get("AutoTokenizer") if isinstance(classes, dict) else None
    named = named[0] if isinstance(named, list) and named else named
    if named != _CLASS:
        _fail(beside, "auto_map.AutoTokenizer", f"{_CLASS}, whose tiktoken.model is the only one that is read", named)
    if (code := "tokenization_kimi.py") in files:
        text = files.content(code).decode(errors="replace")
        missing = [part for part in KIMI_PATTERN if part not in text]
        if missing:
            _fail(files.folder / code, "pat_str", f"the part {missing[0]}", "another pattern")


def _ranks(path: Path, data: bytes) -> list[bytes]:
    """The bytes of all tokens, by rank."""
    lines = data.splitlines()
    if not 256 <= len(lines) <= MOST - _SPECIAL:
        raise CheckpointError(f"{path}: expected 256 to {MOST - _SPECIAL} tokens, got {len(lines)}")
    found: list[bytes | None] = [None] * len(lines)
    for number, line in enumerate(lines):
        token, _, rank = line.partition(b" ")
        try:
            at = int(rank) if len(rank) < 10 else -1
            written = base64.b64decode(token, validate=True)
        except (binascii.Error, ValueError):
            at, written = -1, b""
        if not 0 <= at < len(lines) or found[at] is not None or not 0 < len(written) <= MAX_TOKEN_BYTES:
            _fail(path, f"line {number + 1}", "base64 of a token and a rank of its own", line.decode(errors="replace"))
        found[at] = written
    ranks = [token for token in found if token is not None]
    if not {bytes([byte]) for byte in range(256)} <= set(ranks):
        raise CheckpointError(f"{path}: expected each byte as a token, got others")
    return ranks


def _special_tokens(path: Path, config: dict[str, Any], first: int) -> list[tuple[str, bool]]:
    """Text of each, and whether it is a control token; those without a name have a text of their id."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict) or len(listed) > _SPECIAL:
        _fail(path, "added_tokens_decoder", f"an object of at most {_SPECIAL} tokens", listed)
    ids = {str(id): id for id in range(first, first + _SPECIAL)}
    found = [(f"<|reserved_token_{id}|>", True) for id in ids.values()]
    for id, token in listed.items():
        text = token.get("content") if isinstance(token, dict) else None
        if id not in ids or not isinstance(text, str) or not text:
            _fail(path, "added_tokens_decoder", f"texts of ids from {first} to {first + _SPECIAL - 1}", {id: token})
        found[ids[id] - first] = text, token.get("special") is True
    return found
