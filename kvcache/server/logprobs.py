"""Log-probabilities as clients of OpenAI's interface get them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from kvcache.engine.completion import TokenLogprobs
from kvcache.sampling.text_stream import TextStream
from kvcache.sampling.tokenizer_errors import decoded
from kvcache.server.written import JsonObject

__all__ = ["Offsets", "TokenTexts", "of_chat", "of_texts"]

_KEPT = 1 << 16  # tokens whose texts are kept: 20 MB


class TokenTexts:
    """The texts of single tokens, each decoded once.

    Args:
        tokenizer: has `decode`.

    Attributes:
        tokenizer: see above.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.of = lru_cache(maxsize=_KEPT)(self._decoded)

    def _decoded(self, token: int) -> tuple[str, list[int] | None]:
        """The text of a token, and its bytes; None: it is a part of a character."""
        alone, twice = (decoded(self.tokenizer, [token] * n, skip_special_tokens=False) for n in (1, 2))
        # Decoders drop a space at the beginning of a text, which a token has behind itself.
        text = twice[len(alone) :] if twice != alone and twice.startswith(alone) else alone
        return text, None if "\ufffd" in text else list(text.encode())


class Offsets:
    """Where the tokens of an answer begin in its text, in characters; all parts of a character begin where it does.

    Args:
        texts: of tokens.
        prompt: the ids before the answer.
    """

    def __init__(self, texts: TokenTexts, prompt: Any) -> None:
        self._texts, self._text, self._place = texts, TextStream(texts.tokenizer, prompt), 0

    def of(self, tokens: Sequence[int]) -> Iterator[int]:
        """The offsets of the next tokens."""
        for token in tokens:
            piece = self._text.add(token)  # with what waited before it, if that was no character
            yield self._place + max(0, len(piece) - len(self._texts.of(token)[0]))
            self._place += len(piece)


def of_chat(texts: TokenTexts, tokens: Sequence[int], found: Sequence[TokenLogprobs]) -> JsonObject:
    """`logprobs` of a chat completion, for these tokens."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, data = texts.of(token)
        return {"token": text, "logprob": logprob, "bytes": data}

    return JsonObject(
        content=(
            entry(token, logprob) | {"top_logprobs": [entry(*each) for each in top.items()]}
            for token, (logprob, top) in zip(tokens, found, strict=True)
        )
    )


def of_texts(
    texts: TokenTexts, tokens: Sequence[int], found: Sequence[TokenLogprobs | None], offsets: Offsets
) -> JsonObject:
    """`logprobs` of a completion, for these tokens; None: a token, the first one of all, has none."""

    def by_text(top: Mapping[int, float]) -> dict[str, float]:
        """The log-probability of each text. Of tokens with one text, such as parts of characters, the first counts."""
        best: dict[str, float] = {}
        for token, logprob in top.items():
            best.setdefault(texts.of(token)[0], logprob)
        return best

    return JsonObject(
        tokens=(texts.of(token)[0] for token in tokens),
        token_logprobs=(None if each is None else each.logprob for each in found),
        top_logprobs=(None if each is None else by_text(each.top) for each in found),
        text_offset=offsets.of(tokens),
    )
