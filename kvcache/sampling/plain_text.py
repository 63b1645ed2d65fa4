"""Texts of users in which special tokens are text: no user can end a turn, or begin one in another's name.

A tokenizer finds special tokens in a text by their contents, wherever these came from. Here a second tokenizer has
other contents for them, sentinels that nobody outside the process knows. A plain text is encoded by it as it is.
In a conversation, the contents that the chat template wrote are replaced by these, and those in messages are not.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvcache.errors import CheckpointError
from kvcache.sampling.sentinels import Sentinels
from kvcache.sampling.text_tokens import encoded
from kvcache.sampling.tokenizer_errors import tokenizer_errors

__all__ = ["PlainText"]


class PlainText:
    """Encodes texts and conversations; the special tokens in them, as users wrote them, are text.

    The result is that of the tokenizer for texts without such contents. Tokens that a tokenizer has added without
    calling them special are found as ever. Roles of messages are taken as they are: a template may make special tokens
    of them.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.

    Raises:
        CheckpointError: a tokenizer whose special tokens cannot have other contents.

    Attributes:
        tokenizer: the second one, which encodes what `chat_text` writes.
    """

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import Tokenizer

        added = tokenizer.get_added_tokens_decoder()
        ids = {token.content: id for id, token in added.items() if token.special}
        sentinels, self._marks = Sentinels(), Sentinels()
        self._names = {content: sentinels.name(i) for i, content in enumerate(ids)}
        with tokenizer_errors("tokenizer", "one whose special tokens can be renamed"):
            self.tokenizer = Tokenizer.from_str(json.dumps(_renamed(json.loads(tokenizer.to_str()), self._names)))
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
        for content, name in self._names.items():
            if self.tokenizer.token_to_id(name) != ids[content]:
                raise CheckpointError(f"tokenizer: expected special tokens that can be renamed, got {content}")
        self._special = re.compile(_any_of(ids) if ids else r"(?!)")
        self._beginnings = {content[:n] for content in ids for n in range(1, len(content))}
        self._endings = {content[n:] for content in ids for n in range(1, len(content))}
        self._longest = max(map(len, ids), default=0)
        self._contents = "\n".join(ids)

    def encode(self, text: str, name: str = "prompt", *, most: int | None = None) -> list[int]:
        """The token ids of a text; see `encoded` for the arguments and errors."""
        return encoded(self.tokenizer, text, name, most=most)

    def encode_chat(
        self, messages: Any, render: Callable[..., Any], *, most: int | None = None, **options: Any
    ) -> list[int]:
        """The token ids of a conversation.

        Args:
            messages: as of `InferenceEngine.apply_chat_template`.
            render: that method, or another function that writes messages as a text.
            most: as of `encoded`.
            options: more arguments of `render`, in which special tokens are text too, such as `tools`.
        """
        text = self.chat_text(messages, render, **options)
        return encoded(self.tokenizer, text, "messages", most=most, add_special_tokens=False)

    def chat_text(self, messages: Any, render: Callable[..., Any], **options: Any) -> str:
        """The text of a conversation for `tokenizer`: only special tokens of the template have their other contents.

        The arguments are those of `encode_chat`.
        """
        marks: dict[str, str] = {}
        text = str(render(self._hidden_messages(messages, marks), **self._hidden(options, marks)))
        text = self._special.sub(lambda found: self._names[found[0]], text)
        contents = {mark: content for content, mark in marks.items()}
        return self._marks.pattern.sub(lambda found: contents.get(found[0], found[0]), text)

    def _hidden_messages(self, messages: Any, marks: dict[str, str]) -> Any:
        hidden = self._hidden(messages, marks)
        if isinstance(messages, (list, tuple)):
            for message, found in zip(messages, hidden, strict=True):
                if isinstance(message, Mapping) and "role" in message:
                    found["role"] = message["role"]
        return hidden

    def _hidden(self, value: Any, marks: dict[str, str], depth: int = 101) -> Any:
        """Plain data with marks in place of special tokens; `marks` gets those of their contents."""
        if depth == 0:
            return value  # too deep for `render` too
        if isinstance(value, str):
            return self._hidden_in(str.__str__(value), marks)
        if isinstance(value, Mapping):
            return {
                self._hidden_key(key, marks): self._hidden(each, marks, depth - 1) for key, each in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._hidden(each, marks, depth - 1) for each in value]
        return value

    def _hidden_key(self, key: Any, marks: dict[str, str]) -> Any:
        """A key; templates know those that are identifiers, and write the others, of schemas say, as texts."""
        return key if not isinstance(key, str) or key.isidentifier() else self._hidden_in(str.__str__(key), marks)

    def _hidden_in(self, text: str, marks: dict[str, str]) -> str:
        def mark(content: str) -> str:
            return marks.setdefault(content, self._marks.name(len(marks))) if content else ""

        inner = text.strip()
        if 0 < len(inner) < self._longest and not inner.isidentifier() and inner in self._contents:
            return text.replace(inner, mark(inner))  # the middle of one: a template may write `<` and `>` around it
        text = self._special.sub(lambda found: mark(found[0]), text)
        # A special token may also lie half in this text and half in the next one. Templates trim texts, so white space
        # at the ends does not count.
        start = len(text) - len(text.lstrip())
        begun = next((n for n in range(self._longest, 0, -1) if text[start : start + n] in self._endings), 0)
        text = text[:start] + mark(text[start : start + begun]) + text[start + begun :]
        stop = len(text.rstrip())
        ends = next((n for n in range(min(self._longest, stop), 0, -1) if text[stop - n : stop] in self._beginnings), 0)
        return text[: stop - ends] + mark(text[stop - ends : stop]) + text[stop:]


def _any_of(words: Iterable[str]) -> str:
    """A pattern for any of `words`, the longest that fits, in a time that hardly depends on their number."""
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault(word[:1], []).append(word)
    ends = groups.pop("", None)
    found = []
    for group in groups.values():
        same = os.path.commonprefix(group)  # noqa: RUF071  # of words
        rest = _any_of(word[len(same) :] for word in group) if len(group) > 1 else ""
        found.append(re.escape(same) + rest)
    return f"(?:{'|'.join(found)}){'?' if ends else ''}"


def _renamed(tokenizer: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer in the form of `tokenizer.json`, with other contents of some tokens, which no merge makes."""
    model = tokenizer["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(piece, piece): id for piece, id in model["vocab"].items()}
    if "merges" in model:
        pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    for token in tokenizer["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    return tokenizer
