"""A request as it runs, and its result."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.engine.documents import Placed, SegmentUse
from kvcache.kernels.functions import log_sums
from kvcache.networks.protocols import Float32
from kvcache.networks.tokens import as_tokens
from kvcache.sampling.sampling import Sampler
from kvcache.sampling.text_stream import TextStream
from kvcache.sampling.text_tokens import encoded
from kvcache.support.arguments import as_array, described
from kvcache.texts.behind import Behind
from kvcache.texts.seen_parts import TextKey
from kvcache.texts.text_adapter import TextAdapter

__all__ = ["Completion", "Request", "TokenLogprobs", "as_prompt", "listed", "logprobs_of"]

FinishReason = Literal["stop", "length"]


class TokenLogprobs(NamedTuple):
    """Log-probabilities (natural) at one place of the text, of the network's logits before any step of the sampling.

    Attributes:
        logprob: of the token that was chosen.
        top: of the most likely tokens, `{token: logprob}`, the most likely first; ties go to the lowest ids.
    """

    logprob: float
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of `complete`.

    Attributes:
        tokens: the new tokens, without the stop token; with those that spell a stop string.
        text: their text, up to a stop string; None if the engine has no tokenizer.
        finish_reason: "stop" after a stop token or a stop string; "length" after `max_tokens` or at the network's last
            position.
        logprobs: for each token its `TokenLogprobs`; None unless `SamplingParams.logprobs` asked for them.
        cached_tokens: the number of prompt tokens whose K and V came from a prefix cache: of a request with
            segments, those of the text behind them.
        segments: for each segment its `SegmentUse`; None: there are none.
    """

    tokens: list[int]
    text: str | None
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None
    cached_tokens: int
    segments: list[SegmentUse] | None = None


class Request:
    """One request: its prompt, its sampler, when it ends, and what it reports.

    Args:
        tokens: the token ids of the prompt.
        sampler: draws the new tokens.
        stop_tokens: the tokens that end it, those of the network included.
        prefix: what its text stands behind, see `Text`.
        adapter: that of its text.

    Attributes:
        tokens, sampler, stop_tokens, prefix, adapter: as above.
        text: gets the new tokens, if the request reports its text or has stop strings.
        params: those of the sampler.
        finish_reason: why it ended.
        logprobs: one entry per new token, if they are reported.
        cached_tokens: the number of prompt tokens that did not run.
        cached_texts: of each cached text that it sees parts of the number of tokens that did not run.
        placed: what its prompt was made of; None: of a prompt alone.
        is_complete: whether all its text has come.
        parts_at: see `Text`.
        progress: called while its prompt runs, see `PrefixCachedEngine.chat`; None: nothing is.
    """

    def __init__(
        self, tokens: NDArray[np.uint32], sampler: Sampler, stop_tokens: frozenset[int],
        prefix: Behind | None = None, adapter: TextAdapter | None = None,
    ) -> None:
        self.tokens, self.sampler, self.stop_tokens = tokens, sampler, stop_tokens
        self.prefix, self.adapter = prefix, adapter
        self.text: TextStream | None = None
        self.params = sampler.params
        self.finish_reason: FinishReason = "length"
        self.parts_at: tuple[int, ...] = ()
        self.logprobs: list[TokenLogprobs] | None = None
        self.cached_tokens = 0
        self.cached_texts: dict[TextKey, int] = {}
        self.placed: Placed | None = None
        self.is_complete = False
        self.progress: Callable[[int, int], None] | None = None
        self._pieces = deque[str]()

    def observe(self, token: int, logits: Float32) -> None:
        """Note a new token, and the logits that it was drawn from."""
        if self.logprobs is not None:
            self.logprobs.append(logprobs_of(logits, token, self.params.logprobs or 0))
        if self.text is not None:
            self._pieces.append(self.text.add(token))

    def is_stopped(self) -> bool:
        """Whether the last token completed a stop string, or the grammar."""
        return self.sampler.is_complete or (self.text is not None and self.text.stopped)

    @property
    def end(self) -> FinishReason:
        """Why it ended, a stop string and a grammar counted."""
        return "stop" if self.is_stopped() else self.finish_reason

    def pieces(self, new: Iterator[int], tokens: list[int]) -> Iterator[str]:
        """Run it: `new` yields its tokens, which are added to `tokens`; their text, piece by piece."""
        for token in new:
            tokens.append(token)
            if self._pieces and (piece := self._pieces.popleft()):
                yield piece
        if self.text is not None and (piece := self.text.end()):
            yield piece
        self.is_complete = True

    def complete(self, new: Iterator[int]) -> Completion:
        """Run it: `new` yields its tokens."""
        if self.params.logprobs is not None:
            self.logprobs = []
        tokens: list[int] = []
        text = "".join(self.pieces(new, tokens))
        own = None if self.text is None else text
        return Completion(tokens, own, self.end, self.logprobs, self.cached_tokens, self.segments)

    @property
    def segments(self) -> list[SegmentUse] | None:
        """The use of each segment; None: there are none."""
        return None if self.placed is None else self.placed.uses(self.cached_texts)


def logprobs_of(logits: Float32, token: int, count: int) -> TokenLogprobs:
    """The log-probabilities of `token` and of the `count` most likely ones, in float64."""
    shifted = logits.astype(np.float64) - log_sums(logits[None])
    count = min(count, len(shifted))
    top: NDArray[np.intp] = np.empty(0, np.intp)
    if count:
        border = np.partition(shifted, len(shifted) - count)[len(shifted) - count]
        top = np.flatnonzero(shifted >= border)
        top = top[np.argsort(-shifted[top], kind="stable")][:count]
    return TokenLogprobs(float(shifted[token]), {int(each): float(shifted[each]) for each in top})


def listed(texts: Any, name: str) -> Iterable[Any]:
    """Return `texts`. TypeError: one text, or what is no list."""
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
        got = "one text" if isinstance(texts, (str, bytes)) else type(texts).__name__
        raise TypeError(f"{name}: expected a list of texts, got {got}")
    return texts


def as_prompt(
    prompt: Any, tokenizer: Callable[[], Any], vocab_size: int, most: int | None = None
) -> NDArray[np.uint32]:
    """A prompt's token ids: of a text, those that the tokenizer gives; of ids, a checked copy.

    Args:
        tokenizer: returns the tokenizer, or None. It is called for a text.
        most: as of `encoded`.

    Raises:
        ValueError: a text without a tokenizer, or one that is not Unicode; an id outside the vocabulary.
        TooManyTokens: a text that certainly has more than `most` tokens.
        TypeError: neither a text nor integers.
    """
    if not isinstance(prompt, str):
        if not isinstance(prompt, (list, tuple, range)):
            array = as_array(prompt, "prompt")
            if not array.ndim:  # NumPy takes it as one value
                raise TypeError(f"prompt: expected a text or token ids, got {described(prompt)}")
            prompt = array
        return as_tokens(prompt, vocab_size)
    encoder = tokenizer()
    if encoder is None:
        raise ValueError("prompt: expected token ids, since the engine has no tokenizer, got a text")
    return as_tokens(encoded(encoder, prompt, "prompt", most=most), vocab_size)
