"""`GrammarVocabulary`: the tokens of an engine, as llguidance reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from kvcache.grammar.forced_tokens import ForcedTokens
from kvcache.support.byte_letters import byte_letters

__all__ = ["GrammarVocabulary"]

_NO_TEXT = b"\xff"  # begins the tokens that are no text: no character of UTF-8 has this byte
# The parts of a Lark grammar in which `<..>` names no token, comments, texts and patterns; and a token that is named.
_LARK = re.compile(r'(?:#|//)[^\n]*|"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\])+/?|<(\S[^<>\s]*)>')


class GrammarVocabulary:
    """The bytes of each token, and the tokens of each text that a grammar forces.

    Special tokens, and added ones that end texts, are no text of any grammar. All other tokens are texts, those that a
    tokenizer has added to its vocabulary too, such as `<think>` of Qwen3. So what a grammar says of a text with such a
    token in it holds for the token's id, which is what the tokenizer writes; the tokens of its characters may be drawn
    too, and decode to the same text. A text with the name of a special token has the tokens of its characters alone,
    since no decoded answer has the text of a special token.

    Args:
        package: llguidance.
        tokenizer: a `tokenizers.Tokenizer`.
        size: length of the logits.
        end_tokens: those that end a text of the network; at least one.

    Attributes:
        tokens: the bytes of each token; those that are no text begin with byte 255.
        reader: the `LLTokenizer` of these.
        written: the tokenizer as JSON.

    Raises:
        ValueError, Exception: a tokenizer that llguidance cannot read.
    """

    def __init__(self, package: ModuleType, tokenizer: Any, size: int, end_tokens: Sequence[int]) -> None:
        from tokenizers import Tokenizer

        self.written = str(tokenizer.to_str())
        head, model = _divided(self.written)
        no_text = {each["id"] for each in head["added_tokens"] if each["special"] or each["id"] in end_tokens}
        self._added = {each["content"]: each["id"] for each in head["added_tokens"] if each["id"] not in no_text}
        for each in head["added_tokens"]:
            each |= {"special": each["id"] in no_text, "lstrip": False, "rstrip": False, "single_word": False}
        plain = head | {"normalizer": _bare(head["normalizer"]), "pre_tokenizer": _bare(head["pre_tokenizer"])}
        plain |= {"truncation": None, "padding": None, "post_processor": None}
        copy = Tokenizer.from_str(json.dumps(plain)[:-1] + model)
        copy.encode_special_tokens = True  # as texts
        names = tokenizer.get_vocab(with_added_tokens=True)
        if (found := max(names.values(), default=-1)) >= size:
            raise ValueError(f"tokenizer: expected tokens below {size}, got {found}")
        tokens, bytes_of = [_NO_TEXT + f"<[{id}]>".encode() for id in range(size)], _decoder(head["decoder"])
        for name, id in names.items():
            tokens[id] = _NO_TEXT + name.encode() if id in no_text else bytes_of(name)
        for id in self._added.values():  # a normaliser may have changed one, and decoders then write what it made
            tokens[id] = bytes_of(tokenizer.id_to_token(id))
        self.tokens = tokens
        self.reader: Any = package.LLTokenizer(ForcedTokens(copy, tokens, end_tokens[0]), eos_token=list(end_tokens))

    def is_text(self, token: int) -> bool:
        """Whether texts of grammars may have a token."""
        return token < self.reader.vocab_size and not self.reader.is_special_token(token)

    def with_ids(self, lark: str) -> tuple[str, bool]:
        """A Lark grammar with an id for each added token that it names, and whether one of all that it names is a text.

        Llguidance knows special tokens alone by their names.
        """
        ids: set[int] = set()

        def id_of(found: re.Match[str]) -> str:
            if found[1] is None:
                return found[0]
            if (id := self._added.get(found[0])) is not None:
                ids.add(id)
                return f"<[{id}]>"
            ids.update(map(int, re.findall(r"[0-9]{1,9}", found[1])) if found[1].startswith("[") else ())
            return found[0]

        text = _LARK.sub(id_of, lark)
        return text, any(map(self.is_text, ids))


def _divided(written: str) -> tuple[dict[str, Any], str]:
    """A tokenizer in JSON: all before its model, which is large, and the rest of the text."""
    head, comma, model = written.partition(',"model":')
    if not comma:  # another order
        whole = json.loads(written)
        return whole, f', "model": {json.dumps(whole.pop("model"))}}}'
    return json.loads(head + "}"), comma + model


def _bare(step: Any) -> Any:
    """A normaliser or pre-tokenizer in JSON, without what puts a space before a text."""
    if not isinstance(step, dict):
        return step
    found = dict(step)
    for key in ("normalizers", "pretokenizers"):
        if key in found:
            found[key] = [each for each in map(_bare, found[key]) if each is not None]
    found |= {"prepend_scheme": "never"} if "prepend_scheme" in found else {}
    found |= {"add_prefix_space": False} if "add_prefix_space" in found else {}
    return None if found.get("type") == "Prepend" else found


def _flat(step: Any) -> Iterator[dict[str, Any]]:
    """The steps of a decoder."""
    if isinstance(step, dict):
        yield step
        for each in step.get("decoders", ()):
            yield from _flat(each)


def _decoder(step: Any) -> Callable[[str], bytes]:
    """The function of the bytes that a token stands for, by a decoder in JSON. ValueError: it is none of bytes."""
    steps = list(_flat(step))
    kinds = {each["type"] for each in steps}
    if "ByteFallback" in kinds:
        spaces = [each["pattern"] for each in steps if each["type"] == "Replace" and each["content"] == " "]
        space = next(filter(None, (each.get("String") for each in spaces)), " ")

        def bytes_of(name: str) -> bytes:
            byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", name)
            return bytes([int(byte[1], 16)]) if byte else name.replace(space, " ").encode()

        return bytes_of
    if "ByteLevel" not in kinds:
        raise ValueError(f"decoder: expected one of bytes, got {', '.join(sorted(kinds)) or None}")
    letters = {letter: byte for byte, letter in enumerate(byte_letters())}

    def written_bytes(name: str) -> bytes:
        try:
            return bytes([letters[letter] for letter in name])
        except KeyError:
            return name.encode()

    return written_bytes
