"""The tokens of a body's prompts."""

from __future__ import annotations

from functools import partial
from secrets import token_hex
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.networks.tokens import as_tokens
from kvcache.sampling.plain_text import PlainText
from kvcache.sampling.text_tokens import TooManyTokens, encoded, least_tokens
from kvcache.server.bodies import Body
from kvcache.server.conversations import Conversation, placed, text_of, with_users
from kvcache.server.retention import CacheMark
from kvcache.serving import BatchEngine

__all__ = ["Prompts"]


class Prompts:
    """Makes token ids of texts and conversations; in messages they have the names of OpenAI's interface.

    Args:
        engine: has a tokenizer.
        plain: whether special tokens in the texts of users are text.
    """

    def __init__(self, engine: BatchEngine, plain: bool) -> None:
        self._engine = engine
        self._plain = PlainText(engine.tokenizer) if plain else None
        least_tokens(engine.tokenizer, "")  # which reads the vocabulary, once

    def tokens(self, body: Body) -> list[npt.NDArray[np.uint32]]:
        """The token ids of each prompt.

        Raises:
            TooManyTokens: more than the network has positions.
            TypeError, ValueError: none, or not of the vocabulary.
        """
        try:
            return [self.checked(self._of(body, prompt), body.field) for prompt in body.prompts]
        except ValueError as error:  # of the engine, which calls a conversation messages
            if body.field == "messages" or not str(error).startswith("messages: "):
                raise
            if isinstance(error, TooManyTokens):
                raise TooManyTokens(body.field, error.most, str(error).rpartition(", got ")[2]) from None
            _, _, why = str(error).partition(": ")
            raise ValueError(f"{body.field}: {why}") from None

    def parts(self, body: Body, number: int, tokens: npt.NDArray[np.uint32]) -> tuple[int, ...]:
        """Where the next requests are expected to differ from the prompt of this number, see `BatchEngine.submit`."""
        asked: Any = body.prompts[number]
        if not body.chat or not isinstance(asked.messages, list):
            return ()
        messages = placed(asked.messages, "developer" in (self._engine.chat_template or ""))
        return self._engine.chat_parts(messages, tokens.tolist(), tools=asked.tools, template=asked.template)

    def kept(self, body: Body, tokens: npt.NDArray[np.uint32]) -> list[tuple[int, float]] | None:
        """How many of the first tokens of a prompt stay cached, and for how many seconds each; None: nothing is said.

        A block ends where its tokens differ from those of the conversation up to it alone. Where the template has no
        words for that, all of the prompt stays.
        """
        kept = [] if body.keep is None else [(len(tokens), body.keep)]
        for mark in body.marks:
            kept.append((self._end_of(body.prompts[0], mark, tokens, body.field), mark.seconds))
        return kept if body.marks or body.keep is not None else None

    def _end_of(self, asked: Conversation, mark: CacheMark, tokens: npt.NDArray[np.uint32], field: str) -> int:
        messages = asked.messages[: mark.message + 1]
        if mark.characters is not None:
            messages[-1] = messages[-1] | {"content": text_of(messages[-1])[: mark.characters]}
        try:
            found = self._of_conversation(asked._replace(messages=messages, continues=False), field)
        except (TypeError, ValueError):
            return len(tokens)
        most = min(len(found), len(tokens))
        differ = np.flatnonzero(np.array(found[:most], np.int64) != tokens[:most])
        return max(1, int(differ[0]) if len(differ) else most)

    def _of(self, body: Body, prompt: Any) -> list[int]:
        engine, most = self._engine, self._engine.max_positions
        if body.chat:
            return self._of_conversation(prompt, body.field)
        if isinstance(prompt, list):
            return prompt
        if self._plain is not None:
            return self._plain.encode(prompt, body.field, most=most)
        return encoded(engine.tokenizer, prompt, body.field, most=most)

    def _of_conversation(self, asked: Conversation, field: str) -> list[int]:
        """The tokens of a conversation. Templates that refuse later system messages get them as words of the user."""
        messages, system = asked.messages, ("system", "developer")
        if isinstance(messages, list) and all(isinstance(each, dict) for each in messages):
            messages = placed(messages, "developer" in (self._engine.chat_template or ""))
            if any(message.get("role") in system for message in messages[1:]):
                try:
                    return self._written(messages, asked, field)
                except ValueError as error:
                    if "the chat template takes" not in str(error):
                        raise
                messages = with_users(messages)
        return self._written(messages, asked, field)

    def _written(self, messages: Any, asked: Conversation, field: str) -> list[int]:
        most, options = self._engine.max_positions, {"tools": asked.tools, "template": asked.template}
        render = partial(self._begun if asked.continues else self._rendered, begins=asked.begins)
        if self._plain is not None:
            return self._plain.encode_chat(messages, render, most=most, **options)
        text = render(messages, **options)
        return encoded(self._engine.tokenizer, text, field, most=most, add_special_tokens=False)

    def _rendered(self, messages: Any, *, begins: bool, **options: Any) -> str:
        text: str = self._engine.apply_chat_template(messages, add_generation_prompt=begins, **options)
        return text

    def _begun(self, messages: Any, **options: Any) -> str:
        """Messages up to the end of the text of the last one, which the answer goes on with."""
        mark = f"{token_hex(16)} "
        last = messages[-1] | {"content": text_of(messages[-1]) + mark}
        before, found, behind = self._rendered([*messages[:-1], last], **options).rpartition(mark.strip())
        if not found:
            raise ValueError("messages: expected a chat template that writes the last message, got another")
        return before if behind.startswith(" ") else before.rstrip()  # a template that trims texts

    def checked(self, tokens: Any, field: str) -> npt.NDArray[np.uint32]:
        """Token ids of the vocabulary, at least one and no more than there are positions; errors as of `tokens`."""
        most = self._engine.max_positions
        if most is not None and len(tokens) > most:
            raise TooManyTokens(field, most, f"{len(tokens)} tokens")
        if not tokens:
            raise ValueError(f"{field}: expected at least one token, got none")
        try:
            return as_tokens(tokens, self._engine.config.vocab_size)
        except (TypeError, ValueError) as error:
            _, _, why = str(error).partition(": ")
            raise ValueError(f"{field}: {why}") from None
