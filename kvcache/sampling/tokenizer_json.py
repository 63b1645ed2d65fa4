"""`tokenizer.json`: which of its parts are read, and the bounds within which they may be.

The `tokenizers` package trusts its files: a part may make a text longer without bound, or take any memory when it is
loaded, and either ends the process. So the parts are checked here before the package gets them.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from kvcache.errors import CheckpointError
from kvcache.support.arguments import short
from kvcache.support.json_text import json_fault

__all__ = ["check_tokenizer_json"]

Part = Mapping[str, Any]

_MOST_PARTS = 64  # of one section; published files have up to 8
_MOST_CHARACTERS = 4096  # of a pattern, or of a text that takes its place; the longest published pattern has 500
_MOST_GROWTH = 128  # NFKC writes 18 characters for one of Arabic, `ByteLevel` up to 5 for each of these
_MOST_IDS = 64  # of a template, and of one of its special tokens
_MOST_IN_WORD = 1000  # characters of a word under WordPiece, which takes time in proportion to their square


class _Section(NamedTuple):
    """A section of the file: the key of a sequence's parts, and for each kind of part how much it lengthens a text.

    That is the most characters, or tokens, that come of one; a function computes it from the part, and raises
    ValueError for one that is not read.
    """

    parts: str
    growth: Mapping[str, float | Callable[[Part], float]]


def check_tokenizer_json(path: Path, data: bytes) -> None:
    """Raise CheckpointError for a file with parts that are not known, or not within bounds; it names the part."""
    try:
        content = json.loads(data, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON, got an error: {json_fault(error)}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected an object, got {short(content)}")
    _check_model(path, content.get("model"))
    growth = {name: _growth(path, name, content.get(name)) for name in _SECTIONS}
    decoding = growth.pop("decoder")
    for task, found in (("encodes", math.prod(growth.values())), ("decodes", decoding)):
        if found > _MOST_GROWTH:
            raise CheckpointError(
                f"{path}: expected a tokenizer that {task} a text to at most {_MOST_GROWTH} times its length, "
                f"got {found:.3g} times"
            )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys differ, or a vocabulary: readers take different ones of two values."""
    found = dict(pairs)
    if len(found) < len(pairs) and not all(type(value) is int for value in found.values()):
        raise ValueError("keys: expected each once in an object, got one twice")
    return found


def _check_model(path: Path, model: Any) -> None:
    if not isinstance(model, dict):
        raise CheckpointError(f"{path}: model: expected an object, got {short(model)}")
    kind = model.get("type", "BPE" if "merges" in model else None)  # the first files of GPT-2 do not say it
    if kind not in _MODELS:
        raise CheckpointError(f"{path}: model: expected one of {', '.join(_MODELS)}, got {short(kind)}")
    most = model.get("max_input_chars_per_word", 0)
    if not isinstance(most, int) or most > _MOST_IN_WORD:
        raise CheckpointError(
            f"{path}: model: max_input_chars_per_word: expected at most {_MOST_IN_WORD}, got {short(most)}"
        )


def _growth(path: Path, name: str, found: Any) -> float:
    """How much the parts of a section lengthen a text, one after another."""
    section, growth, count = _SECTIONS[name], 1.0, 0
    parts = [] if found is None else [found]
    while parts:
        part = parts.pop()
        count += 1
        if count + len(parts) > _MOST_PARTS:
            raise CheckpointError(f"{path}: {name}: expected at most {_MOST_PARTS} parts, got more")
        kind = part.get("type") if isinstance(part, dict) else part
        if kind == "Sequence" and isinstance(part.get(section.parts), list):
            parts += part[section.parts]
        elif not isinstance(kind, str) or kind not in section.growth:
            known = ", ".join(["Sequence", *section.growth])
            raise CheckpointError(f"{path}: {name}: expected one of {known}, got {short(kind)}")
        else:
            own = section.growth[kind]
            try:
                growth *= own if isinstance(own, float | int) else own(part)
            except ValueError as error:
                raise CheckpointError(f"{path}: {name}: {kind}: {error}") from None
    return growth


def _fail(name: str, expected: str, found: Any) -> NoReturn:
    raise ValueError(f"{name}: expected {expected}, got {short(found)}")


def _text(value: Any, name: str, least: int = 0) -> str:
    if not isinstance(value, str) or not least <= len(value) <= _MOST_CHARACTERS:
        _fail(name, f"a text of {least} to {_MOST_CHARACTERS} characters", value)
    return value


def _pattern(part: Part) -> tuple[str, str]:
    """The kind of a pattern, "String" or "Regex", and its text."""
    pattern = part.get("pattern")
    if not isinstance(pattern, dict) or len(pattern) != 1 or (kind := next(iter(pattern))) not in ("String", "Regex"):
        _fail("pattern", "a String or a Regex", pattern)
    return kind, _text(pattern[kind], "pattern", 1)


def _replaced(part: Part) -> float:
    kind, pattern = _pattern(part)
    content = _text(part.get("content"), "content")
    # A regular expression may match at each place, without a character.
    return 1.0 + len(content) if kind == "Regex" else max(1.0, len(content) / len(pattern))


def _prepended(part: Part) -> float:
    """A text has no more pieces than characters, and each gets the prefix."""
    return 1.0 + len(_text(part.get("prepend"), "prepend"))


def _split(part: Part) -> float:
    _pattern(part)
    return 1.0


def _cut(part: Part) -> float:
    if type(length := part.get("length")) is not int or length < 1:
        _fail("length", "at least 1", length)
    return 1.0


def _normalised(part: Part) -> float:
    """By a table of SentencePiece: the size of a trie of 32-bit units, the trie, and texts that end with a zero."""
    charsmap = part.get("precompiled_charsmap")
    try:
        data = b64decode(charsmap if isinstance(charsmap, str) else "", validate=True)
        size = int.from_bytes(data[:4], "little")
        if not size or size % 4 or len(data) < 4 + size:
            raise ValueError
        texts = data[4 + size :].decode()
    except ValueError:
        _fail("precompiled_charsmap", "a table of SentencePiece", charsmap)
    if not texts.endswith("\0"):
        _fail("precompiled_charsmap", "texts that end with a zero", charsmap)
    return float(max(1, *map(len, texts.split("\0"))))


def _filled(part: Part) -> float:
    """By a template: how often it has the text."""
    single, tokens = part.get("single"), part.get("special_tokens")
    if not isinstance(single, list) or len(single) > _MOST_IDS:
        _fail("single", f"a template of at most {_MOST_IDS} pieces", single)
    for token in tokens.values() if isinstance(tokens, dict) else ():
        if not isinstance(token, dict) or not isinstance(ids := token.get("ids"), list) or len(ids) > _MOST_IDS:
            _fail("special_tokens", f"tokens of at most {_MOST_IDS} ids", token)
    return float(max(1, sum(isinstance(piece, dict) and "Sequence" in piece for piece in single)))


_MODELS = ("BPE", "Unigram", "WordLevel", "WordPiece")
# The most characters of one: Unicode's own figures for the normal forms; 4 bytes in UTF-8, and a space before a piece.
_SECTIONS = {
    "normalizer": _Section("normalizers", {
        "BertNormalizer": 12, "ByteLevel": 4, "Lowercase": 3, "NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Nmt": 1,
        "Precompiled": _normalised, "Prepend": _prepended, "Replace": _replaced, "Strip": 1, "StripAccents": 1,
    }),
    "pre_tokenizer": _Section("pretokenizers", {
        "BertPreTokenizer": 1, "ByteLevel": 5, "CharDelimiterSplit": 1, "Digits": 1, "FixedLength": _cut,
        "Metaspace": 2, "Punctuation": 1, "Split": _split, "UnicodeScripts": 1, "Whitespace": 1, "WhitespaceSplit": 1,
    }),
    "post_processor": _Section("processors", {
        "BertProcessing": 1, "ByteLevel": 1, "RobertaProcessing": 1, "TemplateProcessing": _filled,
    }),
    "decoder": _Section("decoders", {
        "BPEDecoder": 2, "ByteFallback": 1, "ByteLevel": 1, "CTC": 2, "Fuse": 1, "Metaspace": 1, "Replace": _replaced,
        "Strip": 1, "WordPiece": 2,
    }),
}
