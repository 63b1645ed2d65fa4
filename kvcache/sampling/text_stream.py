"""Text from tokens as they come, and the strings that end it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvcache.sampling.stop_strings import StopStrings, UntilStop
from kvcache.sampling.tokenizer_errors import decoded

__all__ = ["TextStream"]

_CONTEXT = 8  # tokens: a decoder may drop the space before the first token that it sees
_CHARACTER = 4  # tokens, at most: the bytes of UTF-8
_BROKEN = "\ufffd"  # stands for bytes that are no character


class TextStream:
    """The text of new tokens after a prompt, piece by piece; the pieces together are the whole text.

    A token may be a part of a character, and its text may depend on the token before it. So the new tokens are decoded
    with some of those before them. What they add is a piece as soon as it does not end within a character: at most
    three tokens wait for the rest of one. Text that may begin a stop string waits until the next tokens tell. Each
    token takes the same time, however many came before it and whatever their bytes are.

    Bytes that are no character are U+FFFD, as the tokenizer decodes them. A tokenizer over bytes has one for each
    beginning of a character that does not go on, and for each other byte; the text is then what it gives for all
    tokens at once. One with tokens for single bytes (`ByteFallback`) finds a whole run of these invalid if a part of it
    is, characters too; here characters before and behind the invalid part are text.

    Args:
        tokenizer: has `decode`, of a list of ids.
        prompt: the ids before the new tokens.
        stop: strings that end the text.
    """

    def __init__(self, tokenizer: Any, prompt: Any = (), stop: StopStrings | Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._until_stop = UntilStop(stop if isinstance(stop, StopStrings) else StopStrings(stop))
        # The tokens that are decoded, how many of them are done, and their text that is out.
        self._tokens = self._context([int(token) for token in prompt[1 - _CONTEXT - _CHARACTER :]])
        self._done, self._out = len(self._tokens), self._text(self._tokens)
        self._in_bytes = False  # whether the decoder is known to go from byte to byte, whatever bytes are before
        # A prompt may end within a character, which then comes whole, or not at all.
        self._prompt, self._prompt_done = self._out, self._done
        while self._out.endswith(_BROKEN) and self._done > max(0, len(self._tokens) - _CHARACTER + 1):
            self._done -= 1
            self._out = self._text(self._tokens[: self._done])
        if self._out.endswith(_BROKEN):
            self._done, self._out = self._prompt_done, self._prompt

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; the text ends before it."""
        return self._until_stop.found != ""

    def add(self, token: int) -> str:
        """The piece of text that is complete with this token; empty after a stop string."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        piece = self._until_stop.add(self._complete())
        if len(self._tokens) >= 2 * (_CONTEXT + _CHARACTER):
            self._forget()
        return piece

    def extend(self, tokens: Iterable[int], *, ended: bool) -> str:
        """The pieces of several tokens; with `ended` also the text that still waits."""
        return "".join(map(self.add, tokens)) + (self.end() if ended else "")

    def end(self) -> str:
        """The text that still waits, when no token follows; an unfinished character is U+FFFD."""
        if self.stopped:
            return ""
        return self._until_stop.add(self._pass(*self._decode()[:2])) + self._until_stop.end()

    def _complete(self) -> str:
        """The text that is complete now and not out yet."""
        text, out, done = self._decode()
        if not text.endswith(_BROKEN):
            return self._pass(text, out)
        if self._in_bytes:
            return self._pass(text[:-1], out)
        new, waiting = text[len(out) :], len(self._tokens) - done
        if waiting < _CHARACTER:
            return ""
        if not new:
            return self._pass(text, out)
        # The first token that waits does not begin a character, which would be complete by now. If it is one byte, the
        # others are decoded without it.
        rest = self._tokens[: self._done] + self._tokens[done + 1 :]
        without = self._text(rest)
        is_byte = without == self._out + _BROKEN * (waiting - 1) or not without.endswith(_BROKEN)
        if new == _BROKEN * waiting and is_byte:
            self._tokens, self._prompt = rest, ""
            return _BROKEN + self._complete()
        self._in_bytes = True
        return self._pass(text[:-1], out)

    def _decode(self) -> tuple[str, str, int]:
        """The text of the tokens, its beginning that is out, and the number of tokens that are done with that."""
        text = self._text(self._tokens)
        if self._prompt and text.startswith(self._prompt):  # as yet the prompt ends within a character
            return text, self._prompt, self._prompt_done
        if not text.startswith(self._out):  # a run of bytes that began before is invalid with the new ones
            del self._tokens[: self._done]
            self._done, self._out, self._prompt = 0, "", ""
            text = self._text(self._tokens)
        return text, self._out, self._done

    def _pass(self, text: str, out: str) -> str:
        """Let `text`, the beginning of what is decoded, be out; what of it was not."""
        self._out, self._done, self._prompt = text, len(self._tokens), ""
        return text[len(out) :]

    def _forget(self) -> None:
        """Forget the tokens that are not needed as a context."""
        if self._in_bytes or self._done == len(self._tokens):
            self._tokens = self._context(self._tokens)
            text = self._text(self._tokens)
            waits = self._in_bytes and text.endswith(_BROKEN)
            self._out, self._done = text[:-1] if waits else text, len(self._tokens)

    def _context(self, tokens: list[int]) -> list[int]:
        """The last tokens, from the beginning of a character on: of a run of bytes that begins within one, some
        decoders find all invalid. If they have no text, the first ones."""
        lengths = range(_CONTEXT, _CONTEXT + _CHARACTER)
        found = (tokens[-n:] for n in lengths if self._begins_character(tokens[-n:]))
        return next(found, tokens[-_CONTEXT:] if self._text(tokens[-_CONTEXT:]) else tokens[:_CONTEXT])

    def _begins_character(self, ids: list[int]) -> bool:
        texts = (self._text(ids[:n]) for n in range(1, _CHARACTER + 1))
        return any(text and not text.startswith(_BROKEN) for text in texts)

    def _text(self, ids: list[int]) -> str:
        return decoded(self._tokenizer, ids)
