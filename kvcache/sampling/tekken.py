"""Mistral's own tokenizer file, `tekken.json`, if a folder has no `tokenizer.json`.

It lists tokens as bytes, in the order of their ranks: a text is divided by a regular expression, and of all neighbours
whose bytes together are a token those of the lowest rank are joined first. The ids of special tokens come before.
"""

from __future__ import annotations

import base64
import binascii
from typing import NoReturn

from kvcache.errors import CheckpointError
from kvcache.gguf.vocabulary import MOST, Vocabulary
from kvcache.sampling.byte_ranks import MAX_TOKEN_BYTES, rank_vocabulary
from kvcache.sampling.text_files import TextFiles
from kvcache.sampling.vocabulary_tokenizer import TEKKEN_PATTERN
from kvcache.support.arguments import short

__all__ = ["tekken_vocabulary"]

# The special tokens of files that list none.
_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)
_BOS, _EOS, _UNKNOWN = 1, 2, 0


def tekken_vocabulary(files: TextFiles) -> Vocabulary:
    """The tokens of the file. Raises CheckpointError for a damaged file, or one of another pattern."""
    read = _File(files)
    special = read.special_tokens()
    ranks = read.ranks(read.size("default_vocab_size") - len(special))
    try:
        return rank_vocabulary(
            "tekken", ranks, special, special_first=True, add_bos=True, ends=(_BOS, _EOS, _UNKNOWN)
        )
    except ValueError:
        read.fail("vocab", "each token once", "one twice")


class _File:
    """Typed reads of the file; every error names file and key."""

    def __init__(self, files: TextFiles) -> None:
        self._path = files.folder / "tekken.json"
        self._content = files.json("tekken.json")
        config = self._content.get("config")
        if not isinstance(config, dict):
            self.fail("config", "an object", short(config))
        if config.get("pattern") != TEKKEN_PATTERN:
            self.fail("config.pattern", "that of Mistral's tokenizers", short(config.get("pattern")))
        self._config = config

    def fail(self, key: str, expected: str, found: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {key}: expected {expected}, got {found}")

    def size(self, key: str) -> int:
        found = self._config.get(key)
        if type(found) is not int or not len(_SPECIAL) <= found <= MOST:
            self.fail(f"config.{key}", f"a whole number from {len(_SPECIAL)} to {MOST}", short(found))
        return found

    def special_tokens(self) -> list[tuple[str, bool]]:
        """Text of each, and whether it is a control token; unnamed ones have a text of their id."""
        listed = self._content.get("special_tokens")
        if listed is None:
            listed = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(_SPECIAL)]
        count = self.size("default_num_special_tokens")
        if not isinstance(listed, list) or not _EOS < len(listed) <= count:
            self.fail("special_tokens", f"a list of {_EOS + 1} to {count} tokens", short(listed))
        found = []
        for i, token in enumerate(listed):
            if not isinstance(token, dict) or token.get("rank") != i or not isinstance(token.get("token_str"), str):
                self.fail("special_tokens", f"the text of the token of rank {i}", short(token))
            found.append((token["token_str"], token.get("is_control") is not False))
        return found + [(f"<SPECIAL_{i}>", True) for i in range(len(found), count)]

    def ranks(self, count: int) -> list[bytes]:
        """The bytes of the first `count` tokens, by rank; those behind are of larger vocabularies."""
        listed = self._content.get("vocab")
        if not isinstance(listed, list) or not 256 <= count <= len(listed):
            self.fail("vocab", f"a list of at least {max(count, 256)} tokens", short(listed))
        found = []
        for i, token in enumerate(listed[:count]):
            stored = token.get("token_bytes") if isinstance(token, dict) and token.get("rank") == i else None
            if not isinstance(stored, str) or len(stored) > 2 * MAX_TOKEN_BYTES:
                self.fail("vocab", f"the bytes of the token of rank {i}", short(token))
            try:
                found.append(base64.b64decode(stored, validate=True))
            except (binascii.Error, ValueError):
                self.fail("vocab", f"base64 of the token of rank {i}", short(stored))
        if found[:256] != [bytes([i]) for i in range(256)]:
            self.fail("vocab", "each byte first", "other tokens")
        return found
