"""A `tokenizers.Tokenizer` with the vocabulary of a GGUF file, or of any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvcache.errors import CheckpointError
from kvcache.gguf.vocabulary import CONTROL, MOST, UNKNOWN, USER_DEFINED, Vocabulary
from kvcache.sampling.tokenizer_errors import tokenizer_errors
from kvcache.support.arguments import short

__all__ = ["KIMI_PATTERN", "TEKKEN_PATTERN", "tokenizer_of"]

# Characters of a SentencePiece token, and of all: the search for merges tries each place in each token.
_MAX_PIECE = 512
_MAX_CHARACTERS = 1 << 23

# Regular expressions that divide a text, one after the other, each what the one before has left or matched. They are
# those of the models' own `tokenizer.json`; the names are llama.cpp's.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?%s+|\p{N}%s"
    r"| ?[^\s%s\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Kimi K2: Han characters are words of their own.
_OTHER_UPPER, _OTHER_LOWER = (kinds[:-1] + r"&&[^\p{Han}]]" for kinds in (_UPPER, _LOWER))
KIMI_PATTERN = (
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_OTHER_UPPER}*{_OTHER_LOWER}+{_ENDINGS}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_OTHER_UPPER}+{_OTHER_LOWER}*{_ENDINGS}",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
)
_CASED_LETTERS = (
    "[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ"
    "-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿ"
    "ⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]"
)
_EAST_ASIAN = "[一-龥ࠀ-一가-퟿]+"
_DIGITS, _PLAIN = [r"\p{N}", _GPT2], [_GPT2]
_LLAMA3, _QWEN2 = [_CASELESS % (r"\p{L}", "{1,3}", r"\p{L}")], [_CASELESS % (r"\p{L}", "", r"\p{L}")]
_GPT4O = [_CASED % (_ENDINGS, _ENDINGS, "{1,3}")]
_DEEPSEEK = [
    r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
_BAILING = [
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
]
_PRE = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"],
    "qwen35": [_CASELESS % (r"[\p{L}\p{M}]", "", r"\p{L}\p{M}")],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"],
    "deepseek-llm": [
        r"[\r\n]", rf"\s?{_CASED_LETTERS}+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _EAST_ASIAN, r"\p{N}+",
    ],
    "tekken": [_CASED % ("", "", "")],  # Mistral since Nemo
    "seed-coder": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "kimi-k2": ["|".join(KIMI_PATTERN)],
    "youtu": [
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+", _CASED % (_ENDINGS, _ENDINGS, ""),
    ],
    "viking": [r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"],
    "superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
    "tiny_aya": [r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O],
    "minicpm5": [r"\p{N}{1,3}", _CASELESS % (r"\p{L}", "+", r"\p{L}")],
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    **dict.fromkeys(("deepseek-v3", "joyai-llm", "hunyuan-dense"), _DEEPSEEK),  # DeepSeek V3, V3.1 and R1
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"), _PLAIN),
    **dict.fromkeys(("gigachat", "mellum", "a.x-4.0"), _PLAIN),
    # Granite is refact.
    **dict.fromkeys(
        ("smollm", "refact", "command-r", "starcoder", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama-v3", "llama3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("chatglm-bpe", "glm4", "glm5"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _LLAMA3),  # OLMo 2 and 3, SmolLM3
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),  # gpt-oss, Phi-4-mini
}
# A part that is a token is not merged up to it.
_WHOLE = (
    "llama-bpe", "llama-v3", "llama3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken", "glm4",
    "glm5", "minicpm5", "kimi-k2", "youtu",
)
_COMPOSED = ("qwen2", "qwen35", "command-r", "mpt", "olmo")  # texts are brought to Unicode NFC first


TEKKEN_PATTERN = _PRE["tekken"][0]


def tokenizer_of(vocabulary: Vocabulary, path: Path) -> Any:
    """The `tokenizers.Tokenizer` of a vocabulary; `path` is where it is from.

    Raises:
        ImportError: the package is not installed.
        CheckpointError: a damaged vocabulary, or a kind of tokenizer that is not supported.
    """
    try:
        import tokenizers
    except ImportError:
        raise ImportError(f"{path} needs the tokenizers package: pip install 'kvcache-cpu[text]'") from None
    if vocabulary.model == "gpt2" and vocabulary.pre not in _PRE:
        known, found = ", ".join(_PRE), short(vocabulary.pre)
        raise CheckpointError(f"{path}: tokenizer.ggml.pre: expected one of {known}, got {found}")
    if vocabulary.model != "gpt2" and not vocabulary.merges:
        _check_pieces(path, vocabulary)
    make = _bytewise if vocabulary.model == "gpt2" else _spaced
    with tokenizer_errors(f"{path}: tokenizer", "a consistent vocabulary"):
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
    return tokenizer


def _check_pieces(path: Path, vocabulary: Vocabulary) -> None:
    """Raise CheckpointError if the search for merges would take too long."""
    sizes = [len(text) for text in vocabulary.texts]
    if max(sizes, default=0) > _MAX_PIECE or sum(sizes) > _MAX_CHARACTERS:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.tokens: expected at most {_MAX_PIECE} characters each and {_MAX_CHARACTERS} "
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


def _spaced(vocabulary: Vocabulary, tokenizers: Any) -> Any:
    """BPE over characters: spaces are written as U+2581, and a character that is no token as its bytes.

    The merges are those of the file (Gemma 4), or follow from the scores of SentencePiece.
    """
    unknown = None if vocabulary.unknown is None else vocabulary.texts[vocabulary.unknown]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab=_ids(vocabulary),
            merges=vocabulary.merges or _merges_by_score(vocabulary),
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
