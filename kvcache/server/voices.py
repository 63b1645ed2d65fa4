"""The readers of answers, in the dialect of the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvcache.errors import GrammarError
from kvcache.grammar import Grammar
from kvcache.sampling.dialects.call_grammars import calls_grammar, lead_of_answers
from kvcache.sampling.dialects.dialect_table import DIALECTS, dialect_of
from kvcache.sampling.dialects.spoken_answer import MarkTokens, SpokenAnswer
from kvcache.server.asked import Asked
from kvcache.server.constraints import INSTALL, grammar_refused, knows_grammars
from kvcache.server.conversations import Conversation
from kvcache.server.refusals import BodyError

__all__ = ["Voices"]

_NO_CALLS = "its chat template has no words for calls that are known (--chat-template or --tool-parser sets others)"


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

    def reader(self, asked: Asked, tail: Sequence[int]) -> SpokenAnswer:
        """The reader of an answer: thoughts count in chats, and calls where tools may be called.

        Args:
            asked: the answer.
            tail: as of `Prompt`.
        """
        stop, talk = asked.params.stop, asked.conversation
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if talk is None:
            return SpokenAnswer(self._plain, tail, stops)
        functions = [tool["function"] for tool in talk.tools or ()]
        return SpokenAnswer(
            self._marks, tail, stops, calls=bool(functions) and talk.choice.mode != "none",
            schemas={function["name"]: function.get("parameters") or {} for function in functions},
            names=talk.choice.names, parallel=talk.parallel, customs=frozenset(talk.customs),
        )

    def calling(self, asked: Conversation, tail: Sequence[int], form: Grammar | None = None) -> Grammar | None:
        """The grammar of an answer to a conversation that asks for a call, or that has a strict function for one.

        Without a call asked for, the answer is free until one begins. None: all of it is free, but for a form.

        Args:
            tail: as of `Prompt`.
            form: of an answer without calls, if it is to have one; the answer is then of this form, or calls alone.

        Raises:
            BodyError: the dialect has no calls; llguidance is not installed; the parameters of a function are no
                schema, or a strict one that the dialect cannot follow.
        """
        names, free = asked.choice.names, asked.choice.mode != "required"
        functions = [
            tool["function"] for tool in asked.tools or () if names is None or tool["function"]["name"] in names
        ]
        is_strict = form is not None or any(each.get("strict") is True for each in functions)
        if asked.choice.mode == "none" or not functions or (free and not is_strict):
            return None
        if not free:  # texts of custom tools are as free as the answer
            functions, form = [each | {"format": asked.customs.get(each["name"])} for each in functions], None
        thinks, may_think = self._thoughts(tail)
        try:
            found = calls_grammar(
                self._marks, functions, parallel=asked.parallel, thinks=thinks, may_think=may_think or form is None,
                free=free and form is None, form=form,
            )
        except GrammarError as error:
            raise grammar_refused(error, "tools") from None
        except TypeError:  # of a keyword with a value of another kind
            raise grammar_refused(GrammarError("grammar: expected JSON schemas, got another value"), "tools") from None
        if found is None and free:
            return None
        if found is None or not knows_grammars():
            why = f"the server has no llguidance ({INSTALL})" if found is not None else _NO_CALLS
            message = f"tool_choice: expected none or auto, since {why}, got one that requires a call"
            if free:
                message = f"tools: expected functions that are not strict, since {why}, got one that is"
            raise BodyError(message, "unsupported_parameter")
        return found

    def formed(self, grammar: Grammar, tail: Sequence[int]) -> Grammar:
        """The grammar of an answer with thoughts, where the network has some, before what `grammar` says.

        Args:
            tail: as of `Prompt`.
        """
        thinks, may_think = self._thoughts(tail)
        return replace(grammar, lead=lead_of_answers(self._marks, thinks=thinks, may_think=may_think))

    def _thoughts(self, tail: Sequence[int]) -> tuple[bool, bool]:
        """Whether a prompt has begun a thought, and whether one may come if it has not."""
        return self._marks.opens_thought(tail), not self._marks.closes_thought(tail)
