"""The text side of a checkpoint: its tokenizer, for the optional `tokenizers` package, and its chat template."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from kvcache.errors import CheckpointError
from kvcache.gguf.file import GgufFile
from kvcache.gguf.vocabulary import TEMPLATE, Vocabulary
from kvcache.networks.vector_layout import VectorLayout
from kvcache.sampling.tekken import tekken_vocabulary
from kvcache.sampling.text_files import TextFiles
from kvcache.sampling.tiktoken_model import kimi_vocabulary
from kvcache.sampling.tokenizer_errors import tokenizer_errors
from kvcache.sampling.tokenizer_json import check_tokenizer_json
from kvcache.sampling.vocabulary_tokenizer import tokenizer_of
from kvcache.support.arguments import as_instance, short
from kvcache.support.once import Once

__all__ = ["SPECIAL_TOKENS", "CheckpointText", "GgufText"]

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_RANKED = {"tekken.json": tekken_vocabulary, "tiktoken.model": kimi_vocabulary}


class CheckpointText:
    """Tokenizer and chat template of a Hugging Face checkpoint directory.

    Its files are read now, and never again; each part is made of them at its first use, which raises their errors.

    Args:
        directory: of the checkpoint.
        own_template: a Jinja template in place of all those of the checkpoint; None: there is none.

    Attributes:
        vectors: how the checkpoint makes vectors of texts, where `open_checkpoint` read it; None: it does not say.
    """

    vectors: VectorLayout | None = None

    def __init__(self, directory: Path, own_template: str | None = None) -> None:
        self._own_template = _own(own_template)
        files = TextFiles(directory)
        config = Once(lambda: files.json("tokenizer_config.json"))
        ranked = Once(lambda: _RANKED[files.tokenizer](files) if files.tokenizer in _RANKED else None)
        self._tokenizer, self._drop = Once(lambda: _tokenizer_of(files, ranked)), Once(files.drop_tokenizer)
        self._templates = Once(lambda: _templates_of(files, config()))
        self._special = Once(lambda: _special_tokens_of(files, config(), ranked))

    @property
    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer` of `tokenizer.json`, else of `tekken.json` or `tiktoken.model`; None without one.

        Raises:
            ImportError: the package is not installed.
            CheckpointError: not a regular file, too large, or damaged; a part that is not read, or not within bounds.
        """
        made = self._tokenizer()
        self._drop()  # not before, so that an interrupt loses nothing
        return made

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
        templates = self._templates()
        return templates.get(name, templates.get("default"))

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts of special tokens by the names that templates know them by, such as "bos_token".

        `tokenizer_config.json` has them. In older folders this file has no `added_tokens_decoder`. There the entries of
        `special_tokens_map.json` come first.

        Raises:
            CheckpointError: a damaged file.
        """
        return self._special()


def _own(template: str | None) -> str | None:
    return None if template is None else as_instance(template, str, "chat_template")


def _tokenizer_of(files: TextFiles, ranked: Once[Vocabulary | None]) -> Any:
    if files.tokenizer != "tokenizer.json":
        vocabulary = ranked()
        made = None if vocabulary is None else tokenizer_of(vocabulary, files.folder)
    else:
        path, data = files.folder / files.tokenizer, files.content(files.tokenizer)
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ImportError(f"{path} needs the tokenizers package: pip install 'kvcache-cpu[text]'") from None
        check_tokenizer_json(path, data)
        with tokenizer_errors(str(path), "a tokenizer of the tokenizers package"):
            made = Tokenizer.from_buffer(data)
        # The file may keep settings of its training, which would cut prompts or fill them up.
        made.no_truncation()
        made.no_padding()
    return made


def _templates_of(files: TextFiles, config: dict[str, Any]) -> dict[str, str]:
    """The templates of a folder by their names."""
    path, found = files.folder / "tokenizer_config.json", config.get("chat_template")
    if found is None:
        path = files.folder / "chat_template.json"
        found = files.json(path.name).get("chat_template")
    if isinstance(found, list):
        found = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
    named: dict[str, Any] = found if isinstance(found, dict) else {"default": found}
    named = {name: template for name, template in named.items() if template is not None}
    for template in named.values():
        if not isinstance(template, str):
            raise CheckpointError(f"{path}: chat_template: expected a string, got {short(template)}")
    more = {Path(name).stem: files.text(name) for name in files.templates}
    if "chat_template.jinja" in files:
        more["default"] = files.text("chat_template.jinja")
    return named | more


def _special_tokens_of(
    files: TextFiles, config: dict[str, Any], ranked: Once[Vocabulary | None]
) -> dict[str, str]:
    found = _special_tokens(files.folder / "tokenizer_config.json", config)
    if "added_tokens_decoder" in config:
        return found
    if not config and (vocabulary := ranked()) is not None:
        return _tokens_by_id(vocabulary)
    name = "special_tokens_map.json"
    return found | _special_tokens(files.folder / name, files.json(name))


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


class GgufText:
    """Tokenizer and chat template of a GGUF file.

    Its metadata are read now, and never again; each part is made of them at its first use, which raises their errors.

    Args:
        file: its path; or the open file, which may be closed afterwards.
        own_template: as of `CheckpointText`.

    Attributes:
        vectors: how the file makes vectors of texts, where `open_gguf` read it; None: it does not say.
    """

    vectors: VectorLayout | None = None

    def __init__(self, file: GgufFile | str | Path, own_template: str | None = None) -> None:
        self._own_template = _own(own_template)
        if not isinstance(file, GgufFile):
            file = GgufFile(file)
            file.close()
        path, vocabulary = file.path, Once(partial(Vocabulary.of, file))
        special = Once(lambda: {} if (found := vocabulary()) is None else _tokens_by_id(found))

        def tokenizer() -> Any:
            special()  # the vocabulary is freed behind this
            return None if (found := vocabulary()) is None else tokenizer_of(found, path)

        self._path, self._tokenizer, self._special = path, Once(tokenizer), special
        self._templates = {key: value for key, value in file.metadata.items() if key.startswith(TEMPLATE)}

    @property
    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer` of the file, or None if it has none; raises as that of `CheckpointText`."""
        return self._tokenizer()

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of the file, or None; raises as that of `CheckpointText`."""
        return self.template("default")

    def template(self, name: str) -> str | None:
        """The Jinja template of this name, else `chat_template`."""
        if self._own_template is not None:
            return self._own_template
        keys = [key for key in (f"{TEMPLATE}.{name}", TEMPLATE) if key in self._templates]
        if not keys:
            return None
        if not isinstance(found := self._templates[keys[0]], str):
            raise CheckpointError(f"{self._path}: {keys[0]}: expected a string, got {short(found)}")
        return found

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts of the tokens that the file names by id; as those of `CheckpointText`."""
        return self._special()


def _tokens_by_id(vocabulary: Vocabulary) -> dict[str, str]:
    ids = {"bos_token": vocabulary.bos, "eos_token": vocabulary.eos, "unk_token": vocabulary.unknown}
    return {name: vocabulary.texts[id] for name, id in ids.items() if id is not None}
