"""Token ids of a text: one function for all callers, which refuses by length a text that cannot fit."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from kvcache.sampling.tokenizer_errors import tokenizer_errors
from kvcache.support.heaps import give_back

__all__ = ["TooManyTokens", "encoded", "encoded_with_ends", "encoded_within", "least_tokens"]

_SHORT = 4096  # characters: `encode`, which holds the GIL, then takes less than 20 ms, of whatever text
_LARGE = 1 << 18  # characters: the tokens of such a text take 100 bytes for each of its own, which are to come back
# A character beyond ASCII has at most 4 bytes, and Unicode composes at most 4 characters into one. So a byte of a
# normalised text stands for one of ASCII, or for at most 12 of others: 2 bytes for one of ASCII and three of others.
_FOLDED = 12
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"}
_DROPPING_SPACES = {"Strip", "Whitespace", "WhitespaceSplit", "BertPreTokenizer"}
_FOLDING = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"}


class TooManyTokens(ValueError):
    """A text has more tokens than the network has positions.

    Args:
        name: of the argument.
        most: the number of positions.
        got: the number of tokens, or what is known of it.
    """

    def __init__(self, name: str, most: int, got: str) -> None:
        super().__init__(f"{name}: expected at most {most} tokens, got {got}")
        self.most = most


class _Lengths(NamedTuple):
    """How a tokenizer may shorten a text.

    Attributes:
        longest: the most bytes that a token stands for.
        folds: whether characters beyond ASCII may become shorter, or be composed.
        drops_spaces: whether white space may vanish.
    """

    longest: int
    folds: bool
    drops_spaces: bool


_known: WeakKeyDictionary[Any, _Lengths | None] = WeakKeyDictionary()


def encoded(
    tokenizer: Any, text: str, name: str, *, most: int | None = None, add_special_tokens: bool = True
) -> list[int]:
    """The ids that a tokenizer gives for a text; other threads run meanwhile.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        name: of the argument, for messages.
        most: raise TooManyTokens, without a look at the tokens, for a text that certainly has more tokens.
        add_special_tokens: whether the tokenizer surrounds the text with those of its post-processor.

    Raises:
        ValueError: a str with half of a surrogate pair, which JSON may have and a tokenizer does not take.
        TooManyTokens: see `most`.
        CheckpointError: the tokenizer fails at it.
    """
    ids: list[int] = _encoding(tokenizer, text, name, most, add_special_tokens, "encode_batch_fast").ids
    _give_back(text)
    return ids


def encoded_within(tokenizer: Any, text: str, name: str, most: int) -> list[int]:
    """The first ids of a text, at most `most` with those that the post-processor adds, which stay.

    Errors are those of `encoded`.
    """
    with tokenizer_errors("tokenizer", "the tokens of a text"):
        added: int = tokenizer.num_special_tokens_to_add(False)
    found = _encoding(tokenizer, text, name, None, False, "encode_batch")
    with tokenizer_errors("tokenizer", "the tokens of a text"):
        found.truncate(max(0, most - added))
        ids: list[int] = tokenizer.post_process(found).ids
    del found
    _give_back(text)
    return ids


def encoded_with_ends(
    tokenizer: Any, text: str, name: str, ends: Iterable[int], *, most: int | None = None
) -> tuple[list[int], list[int]]:
    """The ids of a text without surrounding special tokens, and how many of them the text before each place has.

    A token that goes on behind a place is not counted.

    Args:
        ends: the places, in characters.

    The other arguments and the errors are those of `encoded`.
    """
    found = _encoding(tokenizer, text, name, most, False, "encode_batch")
    ids, counts = found.ids, [_tokens_before(found, end) for end in ends]
    del found
    _give_back(text)
    return ids, counts


def _encoding(
    tokenizer: Any, text: str, name: str, most: int | None, add_special_tokens: bool, method: str
) -> Any:
    """Encode a text; an `Encoding` of the tokenizers package.

    Args:
        method: of the tokenizer, for long texts: one without the places of tokens in the text is faster.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{name}: expected Unicode text, got a lone surrogate") from None
    if most is not None and size > most and least_tokens(tokenizer, text) > most:
        raise TooManyTokens(name, most, f"a text of {size} bytes")
    with tokenizer_errors("tokenizer", "the tokens of a text"):
        if len(text) <= _SHORT:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return getattr(tokenizer, method)([text], add_special_tokens=add_special_tokens)[0]


def _tokens_before(encoding: Any, end: int) -> int:
    """How many tokens end at a character of the text, or before it."""
    return bisect_right(range(len(encoding)), end, key=lambda token: encoding.token_to_chars(token)[1])


def least_tokens(tokenizer: Any, text: str) -> int:
    """A number of tokens that a text has at least, by its length; 0 if the tokenizer allows no such bound.

    Raises:
        CheckpointError: the tokenizer fails.
    """
    if tokenizer not in _known:
        with tokenizer_errors("tokenizer", "one of the tokenizers package"):
            _known[tokenizer] = _lengths(json.loads(tokenizer.to_str()))
    if (lengths := _known[tokenizer]) is None:
        return 0
    if lengths.drops_spaces:
        text = "".join(text.split())
    size = len(text.encode())
    if lengths.folds:
        plain = len(text.encode("ascii", "ignore"))
        size = plain + (size - plain) // _FOLDED
    return -(-size // lengths.longest)


def _lengths(tokenizer: dict[str, Any]) -> _Lengths | None:
    """The lengths of a tokenizer in the form of `tokenizer.json`.

    None: one token may stand for any number of bytes. Some models have one token for all that they do not know, or
    none; some normalisers drop characters.
    """
    steps = [*_flat(tokenizer["normalizer"], "normalizers"), *_flat(tokenizer["pre_tokenizer"], "pretokenizers")]
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    if tokenizer["truncation"] is not None or not all(map(_keeps, steps)):
        return None
    kinds = {step["type"] for step in steps}
    pieces = {piece for piece, *_ in model["vocab"]} if model["type"] == "Unigram" else set(model["vocab"])
    if "ByteLevel" in kinds and model["type"] == "BPE":
        known, longest = set(_alphabet()), max(map(len, pieces), default=0)  # each character is written for a byte
    elif model.get("byte_fallback") and model["type"] in ("BPE", "Unigram"):
        known = {f"<0x{byte:02X}>" for byte in range(256)}
        longest = max((len(piece.encode()) for piece in pieces), default=0)
    else:
        return None
    if not known <= pieces:
        return None
    longest = max(longest, *(len(token["content"].encode()) for token in added), 1)
    strips = any(token["lstrip"] or token["rstrip"] for token in added)
    return _Lengths(longest, bool(kinds & _FOLDING), strips or bool(kinds & _DROPPING_SPACES))


def _flat(step: dict[str, Any] | None, name: str) -> Iterable[dict[str, Any]]:
    """The steps of a normaliser or pre-tokenizer, those of sequences one by one."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for each in step[name]:
        yield from _flat(each, name)


def _keeps(step: dict[str, Any]) -> bool:
    """Whether a step drops nothing but white space, and shortens no text beyond `_FOLDED`."""
    kind = step["type"]
    if kind == "Replace":
        found = step["pattern"].get("String")
        return found is not None and len(found.encode()) <= len(step["content"].encode())
    if kind in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return kind == "Prepend" or kind in _KEEPING | _DROPPING_SPACES | _FOLDING


def _alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    found: list[str] = ByteLevel.alphabet()
    return found


def _give_back(text: str) -> None:
    """Return what a large text took to the system. The C library keeps it otherwise, all of a text of megabytes."""
    if len(text) >= _LARGE:
        give_back()
