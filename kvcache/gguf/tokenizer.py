"""A `tokenizers.Tokenizer` with the vocabulary of a GGUF file."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.core.arguments import short
from kvcache.errors import CheckpointError
from kvcache.gguf.file import GgufFile
from kvcache.gguf.vocabulary import CONTROL, MOST, UNKNOWN, USER_DEFINED, Vocabulary

__all__ = ["build_tokenizer"]

# Characters of a SentencePiece token, and of all: the search for merges tries each place in each token.
_MAX_PIECE = 512
_MAX_CHARACTERS = 1 << 23

# Regular expressions that divide a text, one after the other, each what the one before has left or matched. They are
# those of the models' own `tokenizer.json`; the names are llama.cpp's.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = [_CASELESS % "{1,3}"], [_CASELESS % ""]
_PRE = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "refact": [r"\p{N}", _GPT2],  # Granite
    "dbrx": _LLAMA3,  # OLMo 2 and 3
    "gpt-4o": [_GPT4O],  # gpt-oss, Phi-4-mini
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "smaug-bpe": _LLAMA3,  # SmolLM3, and some files of Llama 3
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
_WHOLE = ("llama-bpe", "llama-v3", "llama3")  # a part that is a token is not merged up to it
_COMPOSED = ("qwen2",)  # texts are brought to Unicode NFC first


def build_tokenizer(file: GgufFile) -> Any:
    """The `tokenizers.Tokenizer` of `file`, or None if the file has no vocabulary.

    Raises:
        ImportError: the package is not installed.
        CheckpointError: a damaged vocabulary, or a kind of tokenizer that is not supported.
    """
    vocabulary = Vocabulary.of(file)
    if vocabulary is None:
        return None
    try:
        import tokenizers
    except ImportError:
        raise ImportError(f"{file.path} needs the tokenizers package: pip install 'kvcache-cpu[text]'") from None
    if vocabulary.model == "gpt2" and vocabulary.pre not in _PRE:
        known, found = ", ".join(_PRE), short(vocabulary.pre)
        raise CheckpointError(f"{file.path}: tokenizer.ggml.pre: expected one of {known}, got {found}")
    if vocabulary.model == "llama":
        _check_pieces(file, vocabulary)
    make = _bytewise if vocabulary.model == "gpt2" else _sentencepiece
    try:
        tokenizer = make(vocabulary, tokenizers)
        for special in (True, False):
            kinds = (CONTROL, UNKNOWN) if special else (USER_DEFINED,)
            tokenizer.add_tokens(
                [
                    tokenizers.AddedToken(
                        vocabulary.texts[i], special=special, normalized=False, rstrip=vocabulary.strips_after(i)
                    )
                    for i in np.flatnonzero(np.isin(vocabulary.kinds, kinds)).tolist()
                ]
            )
        _surround(tokenizer, vocabulary, tokenizers)
    except Exception as error:  # the package raises bare Exception for any fault of a vocabulary
        raise CheckpointError(f"{file.path}: tokenizer: expected a consistent vocabulary, got {error}") from None
    return tokenizer


def _check_pieces(file: GgufFile, vocabulary: Vocabulary) -> None:
    """Raise CheckpointError where the search for merges would take too long."""
    sizes = [len(text) for text in vocabulary.texts]
    if max(sizes, default=0) > _MAX_PIECE or sum(sizes) > _MAX_CHARACTERS:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.tokens: expected at most {_MAX_PIECE} characters each and {_MAX_CHARACTERS} "
            f"together, got {max(sizes)} and {sum(sizes)}"
        )


def _bytewise(vocabulary: Vocabulary, tokenizers: Any) -> Any:
    """BPE over bytes that are written as characters (Radford et al., GPT-2)."""
    pre = tokenizers.pre_tokenizers
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=_ids(vocabulary), merges=vocabulary.merges, ignore_merges=vocabulary.pre in _WHOLE)
    )
    splits = [pre.Split(tokenizers.Regex(pattern), "isolated") for pattern in _PRE[vocabulary.pre]]
    tokenizer.pre_tokenizer = pre.Sequence([*splits, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    if vocabulary.pre in _COMPOSED:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary, tokenizers: Any) -> Any:
    """SentencePiece BPE: spaces are written as U+2581, and a character that is no token as its bytes."""
    unknown = None if vocabulary.unknown is None else vocabulary.texts[vocabulary.unknown]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab=_ids(vocabulary),
            merges=_merges_by_score(vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    prefix = [normalizers.Prepend("▁")] if vocabulary.add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    return {text: i for i, text in enumerate(vocabulary.texts)}


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the highest score first.

    SentencePiece merges any two neighbours whose text is a token. Its vocabularies have each character of their tokens
    as a token too, so that the two always are tokens. Ties are in the order of the ids of the parts.
    """
    ids = _ids(vocabulary)
    found = []
    for text, score in zip(vocabulary.texts, vocabulary.scores.tolist(), strict=True):
        for i in range(1, len(text)):
            left, right = ids.get(text[:i]), ids.get(text[i:])
            if left is not None and right is not None:
                found.append((-score, left, right))
        if len(found) > MOST:
            raise ValueError(f"merges: expected at most {MOST}, got more")
    found.sort()
    return [(vocabulary.texts[left], vocabulary.texts[right]) for _, left, right in found]


def _surround(tokenizer: Any, vocabulary: Vocabulary, tokenizers: Any) -> None:
    """Encoded texts begin with bos and end with eos, if the file says so and has them."""
    first = [vocabulary.bos] if vocabulary.add_bos and vocabulary.bos is not None else []
    last = [vocabulary.eos] if vocabulary.add_eos and vocabulary.eos is not None else []
    if not first + last:
        return
    before, after = ([vocabulary.texts[i] for i in ids] for ids in (first, last))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B:1", *after],
        special_tokens=[(vocabulary.texts[i], i) for i in dict.fromkeys(first + last)],
    )
