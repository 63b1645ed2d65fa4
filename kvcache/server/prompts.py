"""The prompts of an answer, each made once: its tokens, and places in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.engine.edit_masks import EditMasks, seen_by
from kvcache.engine.edits import Edited, edited
from kvcache.engine.partings import places_of
from kvcache.engine.prompt_measure import PromptMeasure
from kvcache.networks.tokens import as_tokens
from kvcache.sampling.plain_text import PlainText
from kvcache.sampling.text_tokens import TooManyTokens, encoded, encoded_with_ends, least_tokens
from kvcache.server.asked import Asked
from kvcache.server.chat_text import ChatText
from kvcache.server.conversations import Conversation
from kvcache.serving import BatchEngine
from kvcache.texts.seen_parts import SeenParts

__all__ = ["Prompt", "Prompts"]

_TOOL = {"type": "function", "function": {"name": "a_tool_of_none", "description": "", "parameters": {}}}
_TOOLS_LEFT_OUT = (
    "tools: left out of the prompt, since the chat template has no words for them; --chat-template sets another one"
)
_TAIL = 32  # decoders look at some, and one may open a thought


class Prompt(NamedTuple):
    """A prompt.

    Attributes:
        tokens: its ids.
        parts: after how many of them the next requests are expected to differ, see `BatchEngine.submit`.
        kept: how many of the first ones stay cached, and for how many seconds each; None: nothing is said.
        applied: what each edit of its conversation has cleared; None: the body asks for no edits.
        original: how many tokens it had before the edits.
        behind: what its last tokens see of those before them, after edits by masks; None: it runs as one text.
        segments: the tokens of each segment, which follow those of the head.
        head: how many tokens are before the segments.
        link: of the segments, see `SeenParts.of_segments`.
    """

    tokens: npt.NDArray[np.uint32]
    parts: tuple[int, ...] = ()
    kept: list[tuple[int, float]] | None = None
    applied: tuple[dict[str, Any], ...] | None = None
    original: int = 0
    behind: SeenParts | None = None
    segments: tuple[npt.NDArray[np.uint32], ...] = ()
    head: int = 0
    link: int = 0

    @property
    def own(self) -> npt.NDArray[np.uint32]:
        """The tokens that run behind `behind`, or behind the segments."""
        if self.segments:
            return self.tokens[self.head + sum(map(len, self.segments)) :]
        return self.tokens if self.behind is None else self.tokens[self.behind.num_tokens :]

    @property
    def before(self) -> dict[str, Any]:
        """The arguments of `BatchEngine.submit` about what `own` stands behind."""
        if self.segments:
            return {"head": self.tokens[: self.head], "segments": self.segments, "link": self.link}
        return {"prefix": self.behind}

    def behind_masks(self) -> Prompt:
        """The prompt with the times of its own tokens alone: those before them are of other texts."""
        base = 0 if self.behind is None else self.behind.num_tokens
        return self._replace(kept=[(end - base, time) for end, time in self.kept or () if end > base] or None)

    @property
    def tail(self) -> list[int]:
        """The last ids, which tell how an answer begins."""
        ids: list[int] = self.tokens[-_TAIL:].tolist()
        return ids


class Prompts:
    """Makes prompts; in messages of errors they have the names of OpenAI's interface.

    Args:
        engine: has a tokenizer.
        plain: whether special tokens in the texts of users are text.
        masks: whether edits that say nothing of it are by masks.

    Attributes:
        plain: encodes such texts; None: special tokens are special.
    """

    def __init__(self, engine: BatchEngine, plain: bool, masks: bool = False) -> None:
        self._engine, self._masks = engine, masks
        self.plain = PlainText(engine.tokenizer) if plain else None
        self._tokenizer = engine.tokenizer if self.plain is None else self.plain.tokenizer
        self._writes_tools = engine.chat_template is None or self._shows(_TOOL)
        self._knows_developer = "developer" in (engine.chat_template or "")
        least_tokens(engine.tokenizer, "")  # which reads the vocabulary, once

    def of(self, asked: Asked, *, runs: bool = True) -> list[Prompt]:
        """The prompts of an answer.

        Args:
            runs: whether they are for requests; of others the tokens are made, and nothing else.

        Raises:
            TooManyTokens: more than the network has positions.
            TypeError, ValueError: none, or not of the vocabulary.
        """
        make = self._of_text if asked.conversation is None else self._of_conversation
        try:
            return [make(asked, prompt, runs) for prompt in asked.prompts]
        except ValueError as error:  # of the engine, which calls a conversation messages
            if asked.field == "messages" or not str(error).startswith("messages: "):
                raise
            if isinstance(error, TooManyTokens):
                raise TooManyTokens(asked.field, error.most, str(error).rpartition(", got ")[2]) from None
            _, _, why = str(error).partition(": ")
            raise ValueError(f"{asked.field}: {why}") from None

    def noted(self, asked: Asked) -> Asked:
        """Return the answer, with a warning if its prompt will leave its tools out."""
        talk = asked.conversation
        if talk is None or not talk.tools or talk.choice.mode == "none" or self._writes_tools:
            return asked
        return asked._replace(warnings=(*asked.warnings, _TOOLS_LEFT_OUT))

    def _shows(self, tool: dict[str, Any]) -> bool:
        """Whether the chat template writes a tool; True where it refuses this question, or cannot be run."""
        try:
            text: str = self._engine.apply_chat_template([{"role": "user", "content": "x"}], tools=[tool])
        except (ImportError, ValueError):  # chats say why; completions need no template
            return True
        return tool["function"]["name"] in text

    def _of_text(self, asked: Asked, prompt: Any, runs: bool) -> Prompt:
        if not isinstance(prompt, list):
            prompt = encoded(self._tokenizer, prompt, asked.field, most=self._engine.max_positions)
        tokens = self.checked(prompt, asked.field)
        return Prompt(tokens, (), self._kept(asked, len(tokens), []) if runs else None)

    def _of_conversation(self, asked: Asked, talk: Conversation, runs: bool) -> Prompt:
        """A conversation in the words of the template. Places in its text become numbers of tokens with the ids."""
        if talk.edits is not None and talk.segments:
            raise ValueError("context_management: expected none beside segments, got edits")
        change = None if talk.edits is None else self._edited(talk, asked.model in self._engine.adapters)
        if change is not None:
            talk = talk._replace(messages=change.messages)
        marks = asked.marks if runs and self._keeps(asked) else ()
        text = ChatText(talk, self._writer(talk), self._knows_developer, marks)
        if talk.segments:
            return self._of_segments(asked, text, talk.link, runs)
        masks = None if change is None or not change.masked else EditMasks(talk.messages, change.masked, asked.field)
        ends = [] if masks is None else masks.located(self._rewriter(talk), text.text)
        places = ends + text.ends + (text.partings() if runs and self._engine.keeps_states else [])
        most, counts = self._engine.max_positions, list[int]()
        if places:
            ids, counts = encoded_with_ends(self._tokenizer, text.text, asked.field, places, most=most)
        else:
            ids = encoded(self._tokenizer, text.text, asked.field, most=most, add_special_tokens=False)
        tokens = self.checked(ids, asked.field)
        of_masks, counts = counts[: len(ends)], counts[len(ends) :]
        parts = places_of(counts[len(marks) :])
        found = Prompt(tokens, parts, self._kept(asked, len(tokens), counts[: len(marks)]) if runs else None)
        if change is None:
            return found
        if masks is not None:
            edits = masks.chain(of_masks, len(tokens))
            masked = sum(stop - start for _, spans in edits for start, stop in spans)
            change = change.with_masked(len(tokens), masked)
            found = found._replace(behind=seen_by(tokens, edits)).behind_masks()
        return found._replace(applied=change.applied, original=change.original_tokens or len(tokens))

    def _of_segments(self, asked: Asked, text: ChatText, link: int, runs: bool) -> Prompt:
        """A conversation with segments: the text before them, each of them, and that behind them have tokens alone."""
        most, field = self._engine.max_positions, asked.field
        *before, own = (text.text[start:stop] for start, stop in pairwise([0, *text.cuts, len(text.text)]))
        if not own:
            raise ValueError(f"{field}: expected a text behind the segments, got none")
        head, *segments = [
            encoded(self._tokenizer, piece, field, most=most, add_special_tokens=False) for piece in before
        ]
        marks = [mark for mark, end in zip(asked.marks, text.ends, strict=False) if end > text.cuts[-1]]
        ends = [end - text.cuts[-1] for end in text.ends if end > text.cuts[-1]]
        last, counts = encoded_with_ends(self._tokenizer, own, field, ends, most=most)
        tokens = self.checked([*head, *chain.from_iterable(segments), *last], field)
        linked = sum(min(link, len(each)) for each in segments[1:])  # tokens that the engine runs before the own ones
        asked = asked._replace(marks=tuple(marks))
        kept = self._kept(asked, linked + len(last), [linked + count for count in counts]) if runs else None
        parts = np.split(tokens, np.cumsum([len(head), *map(len, segments)]))
        return Prompt(tokens, (), kept, segments=tuple(parts[1:-1]), head=len(head), link=link)

    def _edited(self, talk: Conversation, is_adapted: bool) -> Edited | None:
        """The conversation after its edits; None: its messages are none, as the template will say.

        Texts with adapters have no masks: where nothing is said, their results are cleared by placeholders.
        """
        if talk.edits is None or not isinstance(talk.messages, list):
            return None
        if not all(isinstance(each, dict) for each in talk.messages):
            return None
        edits = talk.edits.by_masks() if self._masks and not is_adapted else talk.edits
        if edits.uses is not None and edits.uses.mask:
            if is_adapted:
                raise ValueError("kvcache_mode: expected recompute with an adapter, got 'mask'")
            self._engine.expect_masks()
        return edited(talk.messages, edits, PromptMeasure(self._rewriter(talk), self._tokenizer))

    def _rewriter(self, talk: Conversation) -> Callable[[Any], str]:
        """The function that writes a conversation with other messages."""

        def write(messages: Any) -> str:
            asked = talk._replace(messages=messages)
            return ChatText(asked, self._writer(asked), self._knows_developer).text

        return write

    def _writer(self, talk: Conversation) -> Callable[[Any, bool], str]:
        """The function that writes messages for the tokenizer, with the beginning of an answer or without."""
        options: dict[str, Any] = {"tools": talk.tools, "template": talk.template}

        def write(messages: Any, begins: bool) -> str:
            render = partial(self._engine.apply_chat_template, add_generation_prompt=begins)
            if self.plain is not None:
                return self.plain.chat_text(messages, render, **options)
            text: str = render(messages, **options)
            return text

        return write

    def _keeps(self, asked: Asked) -> bool:
        """Whether prompts can stay cached."""
        return self._engine.shares_prefixes and asked.scores is None

    def _kept(self, asked: Asked, size: int, ends: list[int]) -> list[tuple[int, float]] | None:
        """`Prompt.kept` of `size` tokens; `ends`: how many of them are before each mark."""
        if not self._keeps(asked):
            return None
        kept = [] if asked.seconds is None else [(size, asked.seconds)]
        kept += [(max(1, end), mark.seconds) for end, mark in zip(ends, asked.marks, strict=True)]
        return kept or None

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
