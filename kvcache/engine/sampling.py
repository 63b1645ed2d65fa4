"""Drawing the next token from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.core.arguments import as_count, as_finite, short

__all__ = ["Sampler", "SamplingParams"]

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

GREEDY_TEMPERATURE = 1e-6  # below this the softmax is a maximum
_GROUP = 64  # logits to a group, see _top_k


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, and when to stop. The first four steps apply in the order listed here.

    Attributes:
        repetition_penalty: logits of tokens that the prompt or the text so far contains are divided by
            this where positive and multiplied by it where negative (after CTRL, arXiv 1909.05858,
            section 4.1). 1 is off.
        temperature: logits are divided by it. Below 1e-6 the likeliest token is taken, of equals the
            lowest id.
        top_k: only so many likeliest tokens stay; of equals at the border, the lowest ids. 0 is off.
        top_p: of these, by falling probability, only as many as are needed for their probabilities to sum
            to `top_p` (nucleus sampling, arXiv 1904.09751, section 3.1). 1 is off.
        max_tokens: at most so many new tokens.
        seed: of this request's random numbers; None derives one from the engine's seed and the number of
            the request.
        stop_token_ids: tokens that end the text, beside the model's own; they are not returned.
    """

    temperature: float = 0.7
    top_k: int = 40
    top_p: float = 0.9
    repetition_penalty: float = 1.1
    max_tokens: int = 128
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        store = object.__setattr__
        store(self, "temperature", as_finite(self.temperature, "temperature", 0.0))
        store(self, "top_k", as_count(self.top_k, "top_k", most=None))
        store(self, "top_p", as_finite(self.top_p, "top_p", 0.0, 1.0, above=True))
        penalty = as_finite(self.repetition_penalty, "repetition_penalty", 0.0, above=True)
        store(self, "repetition_penalty", penalty)
        store(self, "max_tokens", as_count(self.max_tokens, "max_tokens", most=None))
        if self.seed is not None:
            store(self, "seed", as_count(self.seed, "seed", most=None))
        try:
            stops = tuple(as_count(token, "stop_token_ids", most=None) for token in self.stop_token_ids)
        except TypeError:
            raise TypeError(f"stop_token_ids: expected ints, got {short(self.stop_token_ids)}") from None
        store(self, "stop_token_ids", stops)


class Sampler:
    """Draws the tokens of one request.

    Attributes:
        params: how.
    """

    def __init__(
        self, params: SamplingParams, rng: np.random.Generator, vocab_size: int, history: NDArray[np.uint32]
    ) -> None:
        """
        Args:
            params: how to draw.
            rng: where random numbers come from; one is used per token, none for greedy choices.
            vocab_size: length of the logits.
            history: ids of the tokens so far, which the repetition penalty counts.
        """
        self.params = params
        self._rng = rng
        self._seen = np.zeros(vocab_size, bool)
        self._seen[history] = True

    def sample(self, logits: Float32) -> int:
        """Choose a token by float32 `(vocab_size,)` logits, and count it as seen.

        A logit of minus infinity is never drawn. Raises ValueError where no finite logit is the largest.
        """
        params = self.params
        if params.repetition_penalty != 1.0:
            logits = self._penalised(logits)
        best = int(np.argmax(logits))  # the first of equals; of a NaN, the NaN
        if not math.isfinite(logits[best]):
            raise ValueError(f"logits: expected a finite maximum, got {logits[best]} at token {best}")
        token = best if params.temperature < GREEDY_TEMPERATURE or params.top_k == 1 else self._draw(logits)
        self._seen[token] = True
        return token

    def _penalised(self, logits: Float32) -> Float32:
        seen = np.flatnonzero(self._seen)
        values = logits[seen]
        penalty = np.float32(self.params.repetition_penalty)
        logits = logits.copy()
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        return logits

    def _draw(self, logits: Float32) -> int:
        params = self.params
        tokens = _top_k(logits, params.top_k)
        weights = _softmax(logits if tokens is None else logits[tokens], params.temperature)
        if params.top_p < 1.0:
            kept = _top_p(weights, params.top_p)
            tokens = kept if tokens is None else tokens[kept]
            weights = weights[kept]
        cumulative = np.cumsum(weights)
        # side="right": a token of probability 0 has no width and is never hit. The product may round up to
        # the total, hence the minimum.
        index = int(np.searchsorted(cumulative, self._rng.random() * cumulative[-1], side="right"))
        index = min(index, int(np.searchsorted(cumulative, cumulative[-1])))
        return index if tokens is None else int(tokens[index])


def _top_k(logits: Float32, k: int) -> NDArray[np.intp] | None:
    """The ids of the `k` largest logits, ascending; of equals at the border the lowest. None: all of them."""
    if k == 0 or k >= len(logits):
        return None
    candidates = np.arange(len(logits))
    groups = len(logits) // _GROUP
    if groups > k:
        # Where k groups have a maximum of at least x, so have k logits; what is less than x is out at once.
        # Over a large vocabulary that is nearly everything, at the cost of one pass.
        peaks = logits[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
        candidates = np.flatnonzero(logits >= _kth(peaks, k))
    values = logits[candidates]
    border = _kth(values, k)
    kept = values > border
    kept[np.flatnonzero(values == border)[: k - int(kept.sum())]] = True
    return candidates[kept]


def _kth(values: Float32, k: int) -> np.float32:
    """The `k`th largest of `values`, equals counted."""
    largest: np.float32 = np.partition(values, len(values) - k)[len(values) - k]
    return largest


def _softmax(logits: Float32, temperature: float) -> Float64:
    """Probabilities in float64."""
    weights = logits.astype(np.float64)
    weights -= weights.max()
    weights /= temperature
    np.exp(weights, out=weights)
    weights /= weights.sum()
    return weights


def _top_p(weights: Float64, p: float) -> NDArray[np.intp]:
    """Indices of the fewest largest `weights` (which sum to 1) that sum to at least `p`, falling."""
    # All weights below (1 - p) / n together are less than 1 - p, so the others reach p without them: over a
    # large vocabulary this spares sorting the long tail. Halved, so that rounding cannot matter.
    candidates = np.flatnonzero(weights >= 0.5 * (1.0 - p) / len(weights))
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    count = int(np.searchsorted(np.cumsum(weights[order]), p)) + 1
    return order[:count]
