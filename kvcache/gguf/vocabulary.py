"""The vocabulary in a GGUF file: the entries `tokenizer.ggml.*`, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CheckpointError
from kvcache.gguf.file import GgufFile
from kvcache.support.arguments import short

__all__ = [
    "CONTROL", "MOST", "NORMAL", "TEMPLATE", "UNKNOWN", "USER_DEFINED", "Vocabulary", "end_tokens",
]

_PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"  # the key of a chat template; others have a name behind it
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # kinds of tokens; 5 unused, 6 a byte
_MAX_KIND = 6
MOST = 1 << 21  # tokens, and merges; the largest vocabularies have an eighth of it
# Special tokens with these texts end a text too: files name one or two of them by id, networks use several.
_ENDS = frozenset((
    "<EOT>", "[EOS]", "[EOT]", "[e~[", "<｜end▁of▁sentence｜>", "<turn|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<eos>", "<end_of_turn>", "<|end_of_text|>", "<|end|>", "<|endoftext|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>",
    "<|return|>", "<|tool_response>",
))
# This one does if it is a control token. In some vocabularies it is a piece of text: HTML ends `<s>` with it.
_HTML_END = "</s>"
_NEVER_STRIP = frozenset({"<unk>", "<s>", "<|endoftext|>"})  # of the tokens of Phi-3
# Pre-tokenizers of files that begin a text with the token bos, if the file does not say.
_BEGINNING = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken",
)


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The tokens of a file, in the order of their ids.

    Attributes:
        model: "gpt2" (BPE over bytes), "llama" (SentencePiece BPE) or "gemma4" (as "llama", with merges).
        pre: how a text is divided before BPE.
        texts: of the tokens, each once.
        kinds: int32, see `CONTROL` and the others.
        scores: float32; of two merges the one with the higher score is first ("llama").
        merges: pairs of texts, the first is merged first ("gpt2" and "gemma4").
        bos, eos, unknown: ids or None.
        add_bos, add_eos: whether they surround an encoded text.
        add_space_prefix: whether a text begins with a space ("llama" and "gemma4").
        strips: whether special tokens take the white space behind them, but for those in `_NEVER_STRIP`.
    """

    model: str
    pre: str
    texts: list[str]
    kinds: NDArray[np.int32]
    scores: NDArray[np.float32]
    merges: list[tuple[str, str]]
    bos: int | None
    eos: int | None
    unknown: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    strips: bool

    @classmethod
    def of(cls, file: GgufFile) -> Vocabulary | None:
        """Read the vocabulary; None if the file has no tokenizer.

        Raises:
            CheckpointError: an entry is missing, of the wrong kind or length, or contradicts another.
        """
        read = _Entries(file)
        model = read.text("model", None)
        if model in (None, "none", "no_vocab"):
            return None
        if model not in ("gpt2", "llama", "gemma4"):
            read.fail("model", "gpt2, llama or gemma4")
        texts = _texts(read)
        pre = read.text("pre", "default")
        if pre == "gemma4":  # files of other converters than llama.cpp's
            model = "gemma4"
        bytewise, merged = model == "gpt2", model != "llama"
        kinds = read.numbers("token_type", len(texts), np.dtype(np.int32), NORMAL)
        if len(kinds) and (kinds.min() < 0 or kinds.max() > _MAX_KIND):
            raise CheckpointError(f"{file.path}: {_PREFIX}token_type: expected 0 to {_MAX_KIND}, got another number")
        scores = read.numbers("scores", 0 if merged else len(texts), np.dtype(np.float32), 0)
        if np.isnan(scores).any():
            raise CheckpointError(f"{file.path}: {_PREFIX}scores: expected numbers, got nan")
        bos, eos = (read.token(name, None if merged else id) for name, id in (("bos", 1), ("eos", 2)))
        return cls(
            model=str(model),
            pre=str(pre),
            texts=texts,
            kinds=kinds,
            scores=scores,
            merges=_merges(read) if merged else [],
            bos=bos,
            eos=eos,
            unknown=read.token("unknown", None if merged else 0),
            # Files of Gemma 4 that say no are wrong.
            add_bos=read.flag("add_bos_token", pre in _BEGINNING if bytewise else True) or model == "gemma4",
            add_eos=read.flag("add_eos_token", False),
            add_space_prefix=read.flag("add_space_prefix", not merged),
            strips=not merged and _is_phi3(file),
        )

    def strips_after(self, id: int) -> bool:
        """Whether this special token takes the white space behind it."""
        return self.strips and self.texts[id] not in _NEVER_STRIP


def _is_phi3(file: GgufFile) -> bool:
    """Whether this is a Phi-3 with SentencePiece: files do not say that its special tokens strip."""
    name = file.metadata.get("general.name")
    named = isinstance(name, str) and any(part in name.lower() for part in ("phi-3", "phi3"))
    return named or file.metadata.get("general.architecture") == "phi3"


class _Entries:
    """Typed reads of `tokenizer.ggml.*`; every error names file and key."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def get(self, name: str) -> Any:
        return self.file.metadata.get(_PREFIX + name)

    def fail(self, name: str, expected: str) -> NoReturn:
        value = self.get(name)
        found = "nothing" if value is None else short(value)
        raise CheckpointError(f"{self.file.path}: {_PREFIX}{name}: expected {expected}, got {found}")

    def text(self, name: str, default: str | None) -> str | None:
        found = self.get(name)
        if not isinstance(found, (str, type(None))):
            self.fail(name, "a string")
        return default if found is None else found

    def flag(self, name: str, default: bool) -> bool:
        found = self.get(name)
        if not isinstance(found, (bool, type(None))):
            self.fail(name, "true or false")
        return default if found is None else found

    def strings(self, name: str) -> list[str]:
        found = self.get(name)
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            self.fail(name, "an array of strings in UTF-8")
        return found

    def numbers(self, name: str, count: int, dtype: np.dtype[Any], default: int) -> NDArray[Any]:
        """`count` numbers; all `default` if the entry is absent."""
        found = self.get(name)
        if found is None or not count:
            return np.full(count, default, dtype)
        if not isinstance(found, np.ndarray) or found.dtype != dtype or len(found) != count:
            self.fail(name, f"{count} numbers of {dtype}, one for each token")
        return found

    def token(self, name: str, default: int | None) -> int | None:
        """The id in `<name>_token_id`."""
        count = len(self.strings("tokens"))
        found = self.get(f"{name}_token_id")
        if found is None:
            return default if default is not None and default < count else None
        if type(found) is not int or not 0 <= found < count:
            self.fail(f"{name}_token_id", f"the id of one of {count} tokens")
        return found


def _texts(read: _Entries) -> list[str]:
    stored = read.strings("tokens")
    if len(stored) > MOST:
        raise CheckpointError(f"{read.file.path}: {_PREFIX}tokens: expected at most {MOST}, got {len(stored)}")
    texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(stored)]
    embedding = read.file.get("token_embd.weight")
    if embedding is not None and len(texts) > embedding.shape[0]:
        raise CheckpointError(
            f"{read.file.path}: {_PREFIX}tokens: expected at most {embedding.shape[0]}, one for each row of the "
            f"embedding, got {len(texts)}"
        )
    if len(set(texts)) != len(texts):
        raise CheckpointError(f"{read.file.path}: {_PREFIX}tokens: expected each once, got one twice")
    return texts


def _merges(read: _Entries) -> list[tuple[str, str]]:
    stored = read.strings("merges")
    if len(stored) > MOST:
        raise CheckpointError(f"{read.file.path}: {_PREFIX}merges: expected at most {MOST}, got {len(stored)}")
    merges = []
    for merge in stored:
        space = merge.find(" ", 1)
        if space < 0 or space == len(merge) - 1:
            raise CheckpointError(
                f"{read.file.path}: {_PREFIX}merges: expected two texts and a space between, got {short(merge)}"
            )
        merges.append((merge[:space], merge[space + 1 :]))
    return merges


def end_tokens(file: GgufFile) -> list[int] | None:
    """The tokens that end a text: those that the file names by id, and special tokens with a usual text.

    Raises:
        CheckpointError: as `Vocabulary.of`.
    """
    named = [file.metadata.get(f"{_PREFIX}{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = [id for id in named if id is not None]
    several = file.metadata.get(f"{_PREFIX}eos_token_ids")
    ids += several.tolist() if isinstance(several, np.ndarray) else []
    read = _Entries(file)
    if read.get("tokens") is not None and read.get("token_type") is not None:
        texts = read.strings("tokens")
        kinds = read.numbers("token_type", len(texts), np.dtype(np.int32), NORMAL)
        special = {texts[i]: int(i) for i in np.flatnonzero((kinds == CONTROL) | (kinds == USER_DEFINED))}
        # In gpt-oss and Solar Open the end of a message, not that of an answer.
        messages = {"<|return|>", "<|call|>"} <= special.keys() or {"<|flush|>", "<|calls|>"} <= special.keys()
        inner = {"<|end|>"} if messages else set()
        ids += [special[text] for text in special if text in _ENDS - inner]
        ids += [id for id in (special.get(_HTML_END),) if id is not None and kinds[id] == CONTROL]
    return ids or None
