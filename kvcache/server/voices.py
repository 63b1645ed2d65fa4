"""The readers of answers, in the dialect of the network."""

from __future__ import annotations

from typing import Any

from kvcache.sampling.dialects.dialect_table import DIALECTS, dialect_of
from kvcache.sampling.dialects.spoken_answer import MarkTokens, SpokenAnswer
from kvcache.server.bodies import Body
from kvcache.server.conversations import Conversation
from kvcache.serving.work import Work

__all__ = ["Voices"]

_TAIL = 32  # tokens before an answer: decoders look at some, and one may open a thought


class Voices:
    """Makes the reader of each answer.

    Args:
        tokenizer: of the engine.
        template: its chat template, which tells the dialect; None: there is none.
        name: the name of a dialect, which counts more.
    """

    def __init__(self, tokenizer: Any, template: str | None, name: str | None = None) -> None:
        self._marks = MarkTokens(tokenizer, dialect_of(template or "", name))
        self._plain = MarkTokens(tokenizer, DIALECTS["none"])

    def spoken(self, body: Body, work: Work) -> SpokenAnswer:
        """The reader of one answer to a body: thoughts count in chats, and calls where tools may be called."""
        prompt = work.tokens[max(0, work.num_prompt - _TAIL) : work.num_prompt].tolist()
        stop = body.params.stop
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not body.chat:
            return SpokenAnswer(self._plain, prompt, stops)
        asked: Conversation = body.prompts[0]
        functions = [tool["function"] for tool in asked.tools or ()]
        return SpokenAnswer(
            self._marks, prompt, stops, calls=bool(functions) and asked.choice.mode != "none",
            schemas={function["name"]: function.get("parameters") or {} for function in functions},
            names=asked.choice.names, parallel=asked.parallel,
        )
