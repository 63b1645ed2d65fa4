"""The files of a folder that its tokenizer and its chat templates are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcache.errors import CheckpointError
from kvcache.networks.files import MAX_CONFIG_BYTES, json_object, read_file

__all__ = ["TextFiles"]

_MAX_BYTES = 256 * 2**20  # vocabularies of 256 000 tokens take 40 MB
_MAX_RANKED_BYTES = 32 * 2**20  # files of 150 000 tokens take 15 MB
_MOST_TEMPLATES = 64
# The files of each kind of tokenizer, by the name of the first one, and the most bytes of each.
_TOKENIZERS: dict[str, dict[str, int]] = {
    "tokenizer.json": {"tokenizer.json": _MAX_BYTES},
    "tekken.json": {"tekken.json": _MAX_RANKED_BYTES},
    "tiktoken.model": {"tiktoken.model": _MAX_RANKED_BYTES, "tokenization_kimi.py": MAX_CONFIG_BYTES},
}
_OTHERS = {
    "tokenizer_config.json": _MAX_BYTES, "special_tokens_map.json": _MAX_BYTES, "chat_template.json": _MAX_BYTES,
    "chat_template.jinja": MAX_CONFIG_BYTES,
}


class TextFiles:
    """The contents of files, read now: a folder that is moved, changed or removed later changes nothing.

    A file that cannot be read is an error where it is needed.

    Args:
        folder: of the checkpoint.

    Attributes:
        folder: see above.
        tokenizer: the name of the file of its tokenizer, the first one of `tokenizer.json`, `tekken.json` and
            `tiktoken.model` that is there; "": none is.
        templates: the names of the files of further templates.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = next((name for name in _TOKENIZERS if (folder / name).exists()), "")
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))[:_MOST_TEMPLATES]
        self.templates = [path.relative_to(folder).as_posix() for path in more]
        self._found: dict[str, bytes | CheckpointError] = {}
        named = _TOKENIZERS.get(self.tokenizer, {}) | _OTHERS | dict.fromkeys(self.templates, MAX_CONFIG_BYTES)
        for name, most in named.items():
            if not (path := folder / name).exists():
                continue
            try:
                self._found[name] = bytes(read_file(path, most))
            except CheckpointError as error:
                self._found[name] = error

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def content(self, name: str) -> bytes:
        """The bytes of a file that is there. CheckpointError: no regular file, a larger one, or one not readable."""
        found = self._found[name]
        if isinstance(found, CheckpointError):
            raise found.with_traceback(None)
        return found

    def json(self, name: str) -> dict[str, Any]:
        """The object of a file; empty if there is none. CheckpointError: as of `content`, or other JSON."""
        return json_object(self.folder / name, self.content(name)) if name in self else {}

    def text(self, name: str) -> str:
        """The text of a file that is there. CheckpointError: as of `content`, or not UTF-8."""
        try:
            return self.content(name).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.folder / name}: expected UTF-8, got {error}") from None

    def drop_tokenizer(self) -> None:
        """Free the contents that its tokenizer alone is made of."""
        for name in _TOKENIZERS.get(self.tokenizer, {}):
            self._found.pop(name, None)
