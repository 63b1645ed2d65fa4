"""An answer, token by token, as thoughts, content and calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kvcache.sampling.dialects.dialect import Dialect
from kvcache.sampling.dialects.marks import MarkSearch
from kvcache.sampling.dialects.transcript import ChannelPiece, Transcript
from kvcache.sampling.text_stream import TextStream
from kvcache.sampling.tokenizer_errors import decoded

__all__ = ["MarkTokens", "SpokenAnswer"]

_SURROGATES = 0xD800
_TAIL = 16  # tokens of a prompt that may open a thought


class MarkTokens:
    """The marks of a dialect in a vocabulary: special tokens are marks by their ids, and all others by their text.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        dialect: of the answers.

    Attributes:
        by_id: marks that are special tokens.
        spelled: the texts of special tokens that are a part of other marks, by their ids.
        by_text: the other marks, by themselves with a lone surrogate in place of each such token, which no text has.
        tokens: these texts, by their surrogates.
    """

    def __init__(self, tokenizer: Any, dialect: Dialect) -> None:
        self.tokenizer, self.dialect = tokenizer, dialect
        special = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.by_id = {special[mark]: mark for mark in dialect.marks if mark in special}
        others = [mark for mark in dialect.marks if mark not in special]
        self.spelled = {id: text for text, id in special.items() if text and any(text in mark for mark in others)}
        self.tokens = {chr(_SURROGATES + i): text for i, text in enumerate(self.spelled.values())}
        self.by_text = {self.with_tokens(mark): mark for mark in others}

    def with_tokens(self, text: str) -> str:
        """A text with a surrogate in place of each token of `spelled`."""
        for surrogate, token in self.tokens.items():
            text = text.replace(token, surrogate)
        return text

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with the mark that begins thoughts."""
        return self._ends(prompt, 0)

    def closes_thought(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with the mark that ends thoughts: the answer is not to have any."""
        return self._ends(prompt, 1)

    def _ends(self, prompt: Sequence[int], which: int) -> bool:
        if self.dialect.thoughts is None:
            return False
        tail = decoded(self.tokenizer, [int(token) for token in prompt[-_TAIL:]], skip_special_tokens=False)
        return tail.rstrip().endswith(self.dialect.thoughts[which])


class SpokenAnswer:
    """Reads the tokens of one answer; the pieces are the same however the tokens come.

    Args:
        marks: of the dialect.
        prompt: the ids before the answer.
        stop: strings that end its content; within thoughts and calls they count for nothing.
        calls: whether calls count; they are text otherwise.
        schemas: of the arguments of each function, by its name.
        names, parallel: see `Transcript`.
        customs: names of functions that take one text: that comes as their arguments, when it is whole.

    Attributes:
        reasoning_tokens: tokens of thoughts so far.
    """

    def __init__(
        self, marks: MarkTokens, prompt: Sequence[int], stop: Iterable[str] = (), *, calls: bool = False,
        schemas: Mapping[str, Any] | None = None, names: frozenset[str] | None = None, parallel: bool = True,
        customs: frozenset[str] = frozenset(),
    ) -> None:
        dialect = marks.dialect
        self._marks = marks
        self._tokens = [int(token) for token in prompt[-_TAIL:]]
        self._text = TextStream(marks.tokenizer, self._tokens)
        self._search = MarkSearch(marks.by_text)
        self._transcript = Transcript(calls and dialect.stream is not None, names, parallel, stop)
        self._reader = dialect.reader(dialect, self._transcript, calls, schemas or {}, marks.opens_thought(prompt))
        self._customs = customs
        self._custom: list[str] | None = None  # arguments of a call of one of these
        self.reasoning_tokens = 0

    @property
    def has_calls(self) -> bool:
        """Whether there was a call."""
        return self._transcript.calls > 0

    @property
    def stop_string(self) -> str:
        """The stop string that has ended it; "": none."""
        return self._transcript.stop_string

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended it."""
        return self._transcript.stop_string != ""

    def extend(self, tokens: Iterable[int], *, ended: bool) -> list[ChannelPiece]:
        """The pieces that are complete with `tokens`; with `ended` also what still waits."""
        for token in tokens:
            if self.stopped:
                break
            self.reasoning_tokens += self._reader.is_thinking
            if (mark := self._marks.by_id.get(token)) is not None:
                self._read(self._text.end(), ended=True)
                self._text = TextStream(self._marks.tokenizer, [*self._tokens, token])
                self._reader.mark(mark, True)
            elif (text := self._marks.spelled.get(token)) is not None:
                self._read(self._text.end())
                self._text = TextStream(self._marks.tokenizer, [*self._tokens, token])
                self._read(self._marks.with_tokens(text))
            else:
                self._read(self._text.add(token))
            self._tokens = [*self._tokens[1 - _TAIL :], token]
        if ended:
            self._read(self._text.end(), ended=True)
            if not self.stopped:
                self._reader.end()
            self._transcript.end()
        pieces = _merged(self._transcript.take())
        return [*self._with_inputs(pieces, ended)] if self._customs else pieces

    def _with_inputs(self, pieces: Iterable[ChannelPiece], ended: bool) -> Iterator[ChannelPiece]:
        """Pieces with the texts of custom tools instead of the objects that have them."""
        for piece in pieces:
            if piece.channel == "arguments" and self._custom is not None:
                self._custom.append(piece.text)
                continue
            yield from self._input()
            if piece.channel == "call" and piece.text in self._customs:
                self._custom = []
            yield piece
        if ended:
            yield from self._input()

    def _input(self) -> Iterator[ChannelPiece]:
        if self._custom is None:
            return
        text, self._custom = "".join(self._custom), None
        with suppress(ValueError, RecursionError):
            found = json.loads(text)
            text = next((each for each in found.values() if isinstance(each, str)), text)
        yield ChannelPiece("arguments", text)

    def _read(self, text: str, ended: bool = False) -> None:
        for part, is_mark in [*self._search.add(text), *(self._search.end() if ended else ())]:
            if self.stopped:
                return
            if is_mark:
                mark = self._marks.by_text[part]
                self._reader.mark(mark, part != mark)
                continue
            for text in self._tokens_apart(part):
                if text in self._marks.tokens:
                    self._reader.mark(self._marks.tokens[text], True)
                elif text:
                    self._reader.text(text)

    def _tokens_apart(self, text: str) -> list[str]:
        """A text, divided at special tokens that are no part of a mark."""
        return re.split(f"([{''.join(self._marks.tokens)}])", text) if self._marks.tokens else [text]


def _merged(pieces: list[ChannelPiece]) -> list[ChannelPiece]:
    """Pieces with neighbours of one channel put together."""
    if len(pieces) < 2:
        return pieces
    found: list[ChannelPiece] = []
    for piece in pieces:
        if found and piece.channel == found[-1].channel != "call":
            found[-1] = ChannelPiece(piece.channel, found[-1].text + piece.text)
        else:
            found.append(piece)
    return found
