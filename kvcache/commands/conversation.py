"""`Conversation`: messages, and the engine that answers them."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvcache.engine import Answer, PrefixCachedEngine, SamplingParams
from kvcache.engine.history import are_texts
from kvcache.engine.segment_spans import text_of_content
from kvcache.networks.files import parse_json
from kvcache.networks.weights import Progress
from kvcache.support.arguments import short
from kvcache.support.descriptors import Replacement
from kvcache.support.json_text import json_fault
from kvcache.support.regular_files import write_at

__all__ = ["Conversation", "Messages"]

Messages = list[dict[str, Any]]


class Conversation:
    """Messages between a person and a model. What has not been answered is no part of it.

    Args:
        engine: answers; it keeps the prefix of the conversation between two turns.
        context: the most tokens of the conversation.
        system: the first message; None: there is none.
        adapter: the name of one of the engine's, which answers have; None: there is none.

    Raises:
        ValueError: the chat template takes no system message, or fails.

    Attributes:
        messages: dicts with "role" and "content", the oldest first; of a file contents may have segments.
        context: see above.
    """

    def __init__(
        self, engine: PrefixCachedEngine, context: int, system: str | None, adapter: str | None = None
    ) -> None:
        self.messages: Messages = []
        self.context, self._engine, self._adapter = context, engine, adapter
        self.set_system(system)

    def asked(self, question: str) -> Messages:
        """The messages with one more of the user."""
        return [*self.messages, {"role": "user", "content": question}]

    def count(self, messages: Messages) -> int:
        """The tokens of `messages`, with the beginning of an answer."""
        return self._engine.chat_prompt(messages).num_tokens

    def used(self) -> int:
        """The tokens of the conversation, as a next message would find them; 0 for an empty one."""
        with suppress(ValueError):  # templates may refuse a system message alone
            return len(self._engine.apply_chat_template(self.messages, add_generation_prompt=False, tokenize=True))
        return 0

    def answer(self, messages: Messages, params: SamplingParams, progress: Progress | None = None) -> Answer:
        """Answer `messages`; errors and `progress` are those of `PrefixCachedEngine.chat`."""
        return self._engine.chat(messages, params, progress=progress, adapter=self._adapter)

    def keep(self, messages: Messages, answer: str) -> None:
        """Continue with `messages` and their answer."""
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def undo(self) -> str | None:
        """Take back the last question and what followed it; returns the question, None if there is none."""
        for index in reversed(range(len(self.messages))):
            if self.messages[index]["role"] == "user":
                question = text_of_content(self.messages[index])
                self.messages = self.messages[:index]
                return question
        return None

    def clear(self) -> None:
        """Forget all messages but the system message, and the K and V of all of them."""
        self.messages = self._system()
        self._engine.inner.reset()
        self._engine.clear_cache()

    @property
    def system(self) -> str | None:
        """The text of the system message; None: there is none."""
        return next((message["content"] for message in self._system()), None)

    def set_system(self, text: str | None) -> None:
        """Replace the system message; None: there is none. ValueError: the chat template does not take it."""
        first = [] if text is None else [{"role": "system", "content": text}]
        self._replace([*first, *self.messages[len(self._system()) :]])

    def without_oldest(self, question: str, most: int) -> Messages | None:
        """The messages with a question, less the oldest turns: so few that they have at most `most` tokens.

        None: the system message and the question alone have more.
        """
        first, turns = self._system(), self.messages[len(self._system()) :]
        asked = {"role": "user", "content": question}
        starts = [i for i, message in enumerate(turns) if message["role"] == "user" and i]
        for start in [*starts, len(turns)]:
            shorter = [*first, *turns[start:], asked]
            if self.count(shorter) <= most:
                return shorter
        return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the messages to a JSON file. OSError: an error of the file system; the old file is kept then."""
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1) + "\n"
        with Replacement(os.path.expanduser(path)) as file:
            write_at(file, [text.encode("utf-8")], 0)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue with the messages of a file that `save` wrote.

        Raises:
            OSError: an error of the file system.
            ValueError: not such a file; messages that the chat template does not take.
        """
        try:
            content = parse_json(Path(path).expanduser().read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: expected a saved conversation, got no JSON: {json_fault(error)}") from None
        found = content.get("messages") if isinstance(content, dict) else None
        if not isinstance(found, list) or not all(map(_is_message, found)):
            raise ValueError(f'{path}: expected "messages", each with "role" and "content", got {short(content)}')
        if found and found[0]["role"] == "system" and not isinstance(found[0]["content"], str):
            raise ValueError(f"{path}: expected a system message that is a text, got {short(found[0]['content'])}")
        self._replace([{"role": each["role"], "content": each["content"]} for each in found])

    def _system(self) -> Messages:
        return self.messages[:1] if self.messages and self.messages[0]["role"] == "system" else []

    def _replace(self, messages: Messages) -> None:
        """Continue with `messages`, if the template takes them with a question behind them."""
        self._engine.chat_prompt([*messages, {"role": "user", "content": ""}])
        self.messages = messages


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    return isinstance(content, str) or (isinstance(content, list) and are_texts(content))
