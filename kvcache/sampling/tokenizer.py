"""The text side of a checkpoint: its tokenizer, for the optional `tokenizers` package, and its chat template."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from kvcache.errors import CheckpointError
from kvcache.gguf.file import GgufFile
from kvcache.gguf.vocabulary import Vocabulary, chat_template
from kvcache.networks.files import MAX_CONFIG_BYTES, read_file, read_json
from kvcache.sampling.tekken import tekken_vocabulary
from kvcache.sampling.tiktoken_model import kimi_vocabulary
from kvcache.sampling.tokenizer_errors import tokenizer_errors
from kvcache.sampling.tokenizer_json import check_tokenizer_json
from kvcache.sampling.vocabulary_tokenizer import build_tokenizer, tokenizer_of
from kvcache.support.arguments import short

__all__ = ["SPECIAL_TOKENS", "CheckpointText", "GgufText"]

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MOST_TEMPLATES = 64
_MAX_BYTES = 256 * 2**20  # vocabularies of 256 000 tokens take 40 MB


class CheckpointText:
    """Tokenizer and chat template of a Hugging Face checkpoint directory, each loaded on first use.

    Args:
        directory: of the checkpoint.
        own_template: a Jinja template in place of all those of the checkpoint; None: there is none.
    """

    def __init__(self, directory: Path, own_template: str | None = None) -> None:
        self._directory, self._own_template = directory, own_template

    @cached_property
    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer` of `tokenizer.json`, else of `tekken.json` or `tiktoken.model`; None without one.

        Raises:
            ImportError: the package is not installed.
            CheckpointError: not a regular file, too large, or damaged; a part that is not read, or not within bounds.
        """
        path = self._directory / "tokenizer.json"
        if not path.exists():
            return None if self._ranked is None else tokenizer_of(self._ranked, self._directory)
        data = bytes(read_file(path, _MAX_BYTES))
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ImportError(f"{path} needs the tokenizers package: pip install 'kvcache-cpu[text]'") from None
        check_tokenizer_json(path, data)
        with tokenizer_errors(str(path), "a tokenizer of the tokenizers package"):
            tokenizer = Tokenizer.from_buffer(data)
        # The file may keep settings of its training, which would cut prompts or fill them up.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def _ranked(self) -> Vocabulary | None:
        """The vocabulary of `tekken.json` or `tiktoken.model`, where no other file has one."""
        if (self._directory / "tokenizer.json").exists():
            return None
        if (path := self._directory / "tekken.json").exists():
            return tekken_vocabulary(path)
        path = self._directory / "tiktoken.model"
        return kimi_vocabulary(path, self._config) if path.exists() else None

    @property
    def chat_template(self) -> str | None:
        """The Jinja template named "default", or None; raises as `template`."""
        return self.template("default")

    def template(self, name: str) -> str | None:
        """The Jinja template of this name, else the one named "default", or None.

        They are those of `chat_template.jinja` and `additional_chat_templates/`, else of `tokenizer_config.json`, else
        of `chat_template.json`, where older folders of networks that take images have it.

        Raises:
            CheckpointError: a damaged file.
        """
        if self._own_template is not None:
            return self._own_template
        return self._templates.get(name, self._templates.get("default"))

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """The texts of special tokens by the names that templates know them by, such as "bos_token".

        `tokenizer_config.json` has them. In older folders this file has no `added_tokens_decoder`. There the entries of
        `special_tokens_map.json` come first.

        Raises:
            CheckpointError: a damaged file.
        """
        found = _special_tokens(self._directory / "tokenizer_config.json", self._config)
        if "added_tokens_decoder" in self._config:
            return found
        if not self._config and self._ranked is not None:
            return _tokens_by_id(self._ranked)
        path = self._directory / "special_tokens_map.json"
        return found | _special_tokens(path, _json_of(path))

    @cached_property
    def _config(self) -> dict[str, Any]:
        return _json_of(self._directory / "tokenizer_config.json")

    @cached_property
    def _templates(self) -> dict[str, str]:
        path, found = self._directory / "tokenizer_config.json", self._config.get("chat_template")
        if found is None:
            path = self._directory / "chat_template.json"
            found = _json_of(path).get("chat_template")
        if isinstance(found, list):
            found = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
        named: dict[str, Any] = found if isinstance(found, dict) else {"default": found}
        named = {name: template for name, template in named.items() if template is not None}
        for template in named.values():
            if not isinstance(template, str):
                raise CheckpointError(f"{path}: chat_template: expected a string, got {short(template)}")
        more = sorted((self._directory / "additional_chat_templates").glob("*.jinja"))
        files = {each.stem: each for each in more[:_MOST_TEMPLATES]}
        if (first := self._directory / "chat_template.jinja").exists():
            files["default"] = first
        return named | {name: _template_of(each) for name, each in files.items()}


def _json_of(path: Path) -> dict[str, Any]:
    return read_json(path, _MAX_BYTES) if path.exists() else {}


def _special_tokens(path: Path, content: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in SPECIAL_TOKENS:
        value = content.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if not isinstance(text, (str, type(None))):
            raise CheckpointError(f"{path}: {name}: expected a string, got {short(value)}")
        if text is not None:
            found[name] = text
    return found


def _template_of(path: Path) -> str:
    try:
        return read_file(path, MAX_CONFIG_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: expected UTF-8, got {error}") from None


class GgufText:
    """Tokenizer and chat template of a GGUF file, each loaded on first use; arguments as of `CheckpointText`."""

    def __init__(self, path: Path, own_template: str | None = None) -> None:
        self._path, self._own_template = path, own_template

    @cached_property
    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer` of the file, or None if it has none; raises as that of `CheckpointText`."""
        return build_tokenizer(GgufFile(self._path))

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja template of the file, or None; raises as that of `CheckpointText`."""
        return self._own_template or chat_template(GgufFile(self._path))

    def template(self, name: str) -> str | None:
        """The Jinja template of this name, else `chat_template`."""
        return self._own_template or chat_template(GgufFile(self._path), name) or self.chat_template

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """The texts of the tokens that the file names by id; as those of `CheckpointText`."""
        found = Vocabulary.of(GgufFile(self._path))
        return {} if found is None else _tokens_by_id(found)


def _tokens_by_id(vocabulary: Vocabulary) -> dict[str, str]:
    ids = {"bos_token": vocabulary.bos, "eos_token": vocabulary.eos, "unk_token": vocabulary.unknown}
    return {name: vocabulary.texts[id] for name, id in ids.items() if id is not None}
