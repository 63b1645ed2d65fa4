"""`Record`: the tokens of an answer, and digests of all bits that it was drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.engine.completion import Completion, TokenLogprobs
from kvcache.sampling.sampling import SamplingParams

__all__ = ["LogitsDigests", "Record", "digest_of", "first_difference"]


@dataclass(frozen=True, slots=True)
class Record:
    """An answer.

    Attributes:
        prompt: tokens of its prompt.
        tokens: the new tokens.
        logprobs: the log-probability of each.
        steps: for each a digest of its logits, of its log-probability, and of those of the five most likely tokens.
        scores: a digest of the log-probabilities of the prompt's tokens; None: they were not computed.
    """

    prompt: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    steps: tuple[str, ...]
    scores: str | None

    @property
    def digest(self) -> str:
        """One digest of all of them."""
        return digest_of([self.prompt, *self.tokens, *self.steps, self.scores])

    def as_json(self) -> dict[str, Any]:
        """The attributes and the digest."""
        return {**asdict(self), "digest": self.digest}


class LogitsDigests:
    """A logits processor that changes nothing: it keeps a digest of the logits behind each length of the text."""

    def __init__(self) -> None:
        self._found: dict[int, bytes] = {}

    def __call__(self, text: NDArray[np.uint32], logits: NDArray[np.float32]) -> None:
        self._found[len(text)] = blake2b(_bits(logits), digest_size=16).digest()

    def params(self, params: SamplingParams) -> SamplingParams:
        """Sampling parameters whose logits are noted here."""
        return params.changed({"logits_processor": self})

    def record(self, prompt: int, answer: Completion, scores: NDArray[np.float32] | None = None) -> Record:
        """The record of an answer to a prompt of `prompt` tokens."""
        assert answer.logprobs is not None
        steps = tuple(
            _step(self._found[prompt + i], token, each)
            for i, (token, each) in enumerate(zip(answer.tokens, answer.logprobs, strict=True))
        )
        logprobs = tuple(each.logprob for each in answer.logprobs)
        scored = None if scores is None else blake2b(_bits(scores), digest_size=16).hexdigest()
        return Record(prompt, tuple(answer.tokens), logprobs, steps, scored)


def _bits(values: NDArray[np.float32]) -> bytes:
    """The bits of floats, lowest byte first; NaN is one value, whatever its sign and payload."""
    return np.where(np.isnan(values), np.float32(np.nan), values).astype("<f4").tobytes()


def _step(logits: bytes, token: int, each: TokenLogprobs) -> str:
    digest = blake2b(logits, digest_size=8)
    digest.update(np.array([token, *each.top], "<u4").tobytes())
    digest.update(np.array([each.logprob, *each.top.values()], "<f8").tobytes())
    return digest.hexdigest()


def digest_of(parts: Sequence[Any]) -> str:
    """One digest of numbers and texts in their order."""
    return blake2b("\n".join(map(str, parts)).encode(), digest_size=16).hexdigest()


def first_difference(want: Record, got: Record) -> str | None:
    """Where two records of a prompt differ first, in words; None: they are equal. Scores count where both have them."""
    if want.prompt != got.prompt:
        return f"a prompt of {want.prompt} tokens, and of {got.prompt}"
    if None not in (want.scores, got.scores) and want.scores != got.scores:
        return "the log-probabilities of the prompt's tokens"
    if len(want.tokens) != len(got.tokens):
        return f"{len(want.tokens)} new tokens, and {len(got.tokens)}"
    for i, (a, b) in enumerate(zip(want.steps, got.steps, strict=True)):
        if a != b or want.tokens[i] != got.tokens[i]:
            log = f"log-probability {want.logprobs[i]:.9g}, and {got.logprobs[i]:.9g}"
            if want.tokens[i] != got.tokens[i]:
                return f"new token {i}: {want.tokens[i]}, and {got.tokens[i]}; {log}"
            return f"logits of new token {i}: {log}"
    return None
