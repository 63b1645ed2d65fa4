"""Sampling: the parameters, and the choice of the next token from logits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import GrammarError
from kvcache.grammar.grammar import Grammar
from kvcache.grammar.matcher import Matcher
from kvcache.kernels.functions import shares
from kvcache.support.arguments import as_count, as_finite, as_floats, as_instance, as_number, short
from kvcache.support.exclusions import expect

__all__ = ["Biases", "LogitsProcessor", "Sampler", "SamplingParams"]

Float32 = NDArray[np.float32]
Whole = NDArray[np.uint64]
LogitsProcessor = Callable[[NDArray[np.uint32], Float32], Any]

GREEDY_TEMPERATURE = 1e-6  # below this temperature sampling is greedy
_GROUP = 64  # logits per group, see _top_k
# Float32 holds numbers below 3.4e38: with these bounds a sum of a logit and a bias stays finite under the penalty.
_MOST_BIAS, _MOST_PENALTY = 1e30, 1e6
_MOST_STOP_TOKENS = 1 << 16
_LEAST_SEED = -(2**63)
_BITS = 53  # of a random number


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, and when to stop. The first ten steps apply in the order listed here.

    Attributes:
        logits_processor: a function of the text so far, uint32 `(n,)`, prompt and new tokens, read-only, and of the
            logits, float32 `(vocab_size,)`. It returns logits, or changes them in place and returns None. None is off.
        grammar: what the text may be, see `kvcache.grammar`: the logits of tokens that cannot follow become minus
            infinity, and the text ends, with the reason "stop", if nothing may follow. None is off.
        logit_bias: is added to the logits of some tokens, `{token: bias}`, from -1e30 to 1e30; minus infinity excludes
            a token.
        repetition_penalty: for tokens that the prompt or the text so far contains, positive logits are divided
            by this and negative ones multiplied by it (after CTRL, arXiv 1909.05858, section 4.1); from 1e-6 to 1e6. 1
            is off.
        presence_penalty: is subtracted from the logits of tokens that were drawn, the prompt not counted; from -2 to 2,
            as in OpenAI's interface. 0 is off.
        frequency_penalty: is subtracted from these once for each time that they were drawn; from -2 to 2. 0 is off.
        temperature: logits are divided by it. Below 1e-6 the most likely token is taken; ties go to the lowest id.
        top_k: keep the k most likely tokens; ties go to the lowest ids. 0 is off, and so is -1, which becomes 0.
        top_p: of these, keep the most likely tokens, as few as have probabilities that sum to `top_p` (nucleus
            sampling, arXiv 1904.09751, section 3.1). 1 is off; 0 takes the most likely token.
        min_p: of these, keep tokens at least `min_p` times as likely as the most likely one (arXiv 2407.01082). 0 is
            off.
        max_tokens: maximum number of new tokens.
        seed: seed of this request's random numbers, from -2**63 on; None derives one from the engine's seed and the
            number of the request.
        stop_token_ids: tokens that end the text, besides the model's own, at most 65,536; they are not returned.
        ignore_eos: whether the model's own tokens that end a text are tokens like others; those of `stop_token_ids`
            still end it. Not beside a `grammar`, whose texts end.
        min_tokens: the number of new tokens before which none that ends the text is drawn. Not beside a `grammar`.
        stop: strings that end the text, one or several; the engine needs a tokenizer. The tokens that spell one are
            returned by `generate` and `stream`; the text of `complete` ends before it.
        logprobs: for `complete`: report the log-probability of each new token, and of this many most likely ones
            beside it. None: none is reported.
    """

    temperature: float = 0.7
    top_k: int = 40
    top_p: float = 0.9
    repetition_penalty: float = 1.0
    max_tokens: int = 128
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = ()
    stop: str | Iterable[str] = ()
    logprobs: int | None = None
    logits_processor: LogitsProcessor | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    grammar: Grammar | None = None
    ignore_eos: bool = False
    min_tokens: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken, and no random number used."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1 or self.top_p == 0.0

    def changed(self, changes: Mapping[str, Any]) -> SamplingParams:
        """The same with other values of some attributes, by name. TypeError, ValueError: no such name, or value."""
        for name in changes:
            if name not in self.__dataclass_fields__:
                raise TypeError(f"{short(name)}: expected an attribute of SamplingParams, got none of that name")
        return replace(self, **changes) if changes else self

    def __post_init__(self) -> None:
        store = object.__setattr__
        store(self, "temperature", as_finite(self.temperature, "temperature", 0.0))
        store(self, "top_k", max(0, as_count(self.top_k, "top_k", -1, most=None)))
        store(self, "top_p", as_finite(self.top_p, "top_p", 0.0, 1.0))
        penalty = as_finite(self.repetition_penalty, "repetition_penalty", 1 / _MOST_PENALTY, _MOST_PENALTY)
        store(self, "repetition_penalty", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            store(self, name, as_finite(getattr(self, name), name, -2.0, 2.0))
        store(self, "max_tokens", as_count(self.max_tokens, "max_tokens", most=None))
        if self.seed is not None:
            store(self, "seed", as_count(self.seed, "seed", _LEAST_SEED, most=None))
        if self.logprobs is not None:
            store(self, "logprobs", as_count(self.logprobs, "logprobs", most=None))
        try:
            some = islice(self.stop_token_ids, _MOST_STOP_TOKENS + 1)
            stops = tuple(as_count(token, "stop_token_ids", most=None) for token in some)
        except TypeError:
            raise TypeError(f"stop_token_ids: expected ints, got {short(self.stop_token_ids)}") from None
        if len(stops) > _MOST_STOP_TOKENS:
            raise ValueError(f"stop_token_ids: expected at most {_MOST_STOP_TOKENS} ids, got more")
        store(self, "stop_token_ids", stops)
        store(self, "min_p", as_finite(self.min_p, "min_p", 0.0, 1.0))
        store(self, "logit_bias", _biases(self.logit_bias))
        store(self, "stop", _strings(self.stop))
        if self.logits_processor is not None and not callable(self.logits_processor):
            got = type(self.logits_processor).__name__
            raise TypeError(f"logits_processor: expected a function of tokens and logits, got {got}")
        store(self, "ignore_eos", as_instance(self.ignore_eos, bool, "ignore_eos"))
        store(self, "min_tokens", as_count(self.min_tokens, "min_tokens", most=None))
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: expected at most max_tokens, {self.max_tokens}, got {self.min_tokens}")
        if self.grammar is not None:
            as_instance(self.grammar, Grammar, "grammar")
            for name in ("ignore_eos", "min_tokens"):
                expect(name, getattr(self, name) or None, {"grammar"})


class Biases(NamedTuple):
    """The `logit_bias` of a request as arrays, which all its samples share.

    Attributes:
        tokens: int64 `(n,)`.
        values: float32 `(n,)`.
    """

    tokens: NDArray[np.int64]
    values: Float32

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> Biases:
        """ValueError: `logit_bias` names a token outside the vocabulary, or excludes all tokens."""
        if not params.logit_bias:
            return _NO_BIASES
        biases = dict(params.logit_bias)
        largest = max(biases, default=0)
        if largest >= vocab_size:
            raise ValueError(f"logit_bias: expected tokens from 0 to {vocab_size - 1}, got {largest}")
        if list(biases.values()).count(-math.inf) == vocab_size:
            raise ValueError("logit_bias: expected minus infinity for some tokens at most, got it for all")
        count = len(biases)
        return cls(np.fromiter(biases, np.int64, count), np.fromiter(biases.values(), np.float32, count))


_NO_BIASES = Biases(np.empty(0, np.int64), np.empty(0, np.float32))


def _biases(biases: Any) -> tuple[tuple[int, float], ...]:
    """`logit_bias` as pairs, which can be hashed."""
    try:
        pairs = dict(biases).items()
    except (TypeError, ValueError):
        raise TypeError(f"logit_bias: expected {{token: bias}}, got {short(biases)}") from None
    checked = []
    for token, bias in pairs:
        number = as_number(bias, "logit_bias")
        if not (abs(number) <= _MOST_BIAS or number == -math.inf):  # NaN neither
            most = f"{_MOST_BIAS:g}"
            raise ValueError(f"logit_bias: expected numbers from -{most} to {most}, or minus infinity, got {number}")
        checked.append((as_count(token, "logit_bias", most=None), number))
    return tuple(checked)


def _strings(stop: Any) -> tuple[str, ...]:
    """`stop` as a tuple of strings that are not empty."""
    try:
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
    except TypeError:
        raise TypeError(f"stop: expected strings, got {short(stop)}") from None
    for string in strings:
        if not isinstance(string, str):
            raise TypeError(f"stop: expected strings, got {short(string)}")
        if not string:
            raise ValueError("stop: expected strings of at least one character, got an empty one")
    return strings


class Sampler:
    """Draws the tokens of one request.

    Attributes:
        params: the sampling parameters.
        matcher: see below.
    """

    def __init__(
        self, params: SamplingParams, rng: np.random.Generator | None, vocab_size: int, history: NDArray[np.uint32],
        num_drawn: int = 0, biases: Biases | None = None, matcher: Matcher | None = None,
        stop_tokens: Iterable[int] = (),
    ) -> None:
        """
        Args:
            params: the sampling parameters.
            rng: source of random numbers, of a generator of 64 bits: one is used per token. None: for a greedy
                choice, which uses none.
            vocab_size: length of the logits.
            history: ids of the tokens so far, for the penalties and the logits processor.
            num_drawn: how many of the last of these are new tokens, not of the prompt.
            biases: those of `params`, if they are at hand.
            matcher: follows the new tokens through the grammar of `params`; None: there is none.
            stop_tokens: those that end the text, for `min_tokens`.
        """
        self.params, self.matcher = params, matcher
        self._rng, self._first_state = rng, None if rng is None else rng.bit_generator.state
        self._seen = np.zeros(vocab_size, bool)
        self._seen[history] = True
        self._is_greedy = params.is_greedy
        self._drawn, self._num_drawn = dict[int, int](), num_drawn  # how often each token was drawn; how many
        if num_drawn:
            self._drawn = dict(Counter(history[len(history) - num_drawn :].tolist()))
        self._ends = [token for token in stop_tokens if token < vocab_size] if params.min_tokens else []
        self._biases = Biases.of(params, vocab_size) if biases is None else biases
        self._text, self._length = history, len(history)  # the text so far, if there is a processor, has free room

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole, as the grammar has it, and no token may follow."""
        return self.matcher is not None and self.matcher.is_complete

    def resumed(self, text: NDArray[np.uint32], num_drawn: int) -> Sampler:
        """A sampler of the same random numbers in its state after `text`, whose last `num_drawn` tokens it drew."""
        rng = None
        if self._first_state is not None:
            rng = np.random.Generator(np.random.PCG64())
            rng.bit_generator.state = self._first_state
        matcher = None if self.matcher is None else self.matcher.at(text[len(text) - num_drawn :].tolist())
        sampler = Sampler(self.params, rng, len(self._seen), text, num_drawn, self._biases, matcher, self._ends)
        sampler._first_state = self._first_state
        if rng is not None and not self.params.is_greedy:
            rng.bit_generator.random_raw(num_drawn, False)
        return sampler

    def sample(self, logits: Float32) -> int:
        """Choose a token by float32 `(vocab_size,)` logits, which stay as they are, and add it to the history.

        A token whose logit is minus infinity is never drawn. Raises ValueError unless the largest logit is finite;
        GrammarError, which is one, where the grammar fails.
        """
        params = self.params
        if params.logits_processor is not None:
            logits = self._processed(logits, params.logits_processor)
        if self.matcher is not None:
            logits = self.matcher.masked(logits)
        if self._ends and self._num_drawn < params.min_tokens:
            logits = logits.copy()
            logits[self._ends] = -np.inf
        if len(self._biases.tokens):
            logits = logits.copy()
            logits[self._biases.tokens] += self._biases.values
        if params.repetition_penalty != 1.0:
            logits = self._penalised(logits)
        if (params.presence_penalty or params.frequency_penalty) and self._drawn:
            logits = self._less_often(logits)
        best = int(logits.argmax())  # among equals the first; a NaN if there is one
        if not math.isfinite(logits[best]):
            if self.matcher is not None and logits[best] == -math.inf:
                raise GrammarError("grammar: expected a token that may follow, got none beside the other settings")
            raise ValueError(f"logits: expected a finite maximum, got {logits[best]} at token {best}")
        token = best if self._is_greedy else self._draw(logits)
        if self.matcher is not None:
            self.matcher.advance(token)
        self._seen[token] = True
        self._drawn[token] = self._drawn.get(token, 0) + 1
        self._num_drawn += 1
        if params.logits_processor is not None:
            if self._length == len(self._text):
                self._text = np.resize(self._text, 2 * self._length + 64)
            self._text[self._length] = token
            self._length += 1
        return token

    def _processed(self, logits: Float32, processor: LogitsProcessor) -> Float32:
        text = self._text[: self._length]
        text.flags.writeable = False
        logits = logits.copy()
        result = processor(text, logits)
        return logits if result is None else as_floats(result, logits.shape, "logits_processor")

    def _penalised(self, logits: Float32) -> Float32:
        seen = np.flatnonzero(self._seen)
        values = logits[seen]
        penalty = np.float32(self.params.repetition_penalty)
        logits = logits.copy()
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        return logits

    def _less_often(self, logits: Float32) -> Float32:
        tokens = np.fromiter(self._drawn, np.int64, len(self._drawn))
        counts = np.fromiter(self._drawn.values(), np.float64, len(tokens))
        logits = logits.copy()
        logits[tokens] -= self.params.presence_penalty + self.params.frequency_penalty * counts
        return logits

    def _draw(self, logits: Float32) -> int:
        params = self.params
        tokens = _top_k(logits, params.top_k)
        weights, total = shares(logits if tokens is None else logits[tokens], params.temperature)
        if params.top_p < 1.0:
            kept = _top_p(weights, total, params.top_p)
            tokens = kept if tokens is None else tokens[kept]
            weights = weights[kept]
        if params.min_p > 0.0:
            kept = np.flatnonzero(weights >= _share(int(weights.max()), params.min_p))
            tokens = kept if tokens is None else tokens[kept]
            weights = weights[kept]
        cumulative = np.cumsum(weights)
        place = (self._bits() * int(cumulative[-1])) >> _BITS
        # side="right": a token of weight 0 has an empty interval and is never drawn.
        index = int(np.searchsorted(cumulative, np.uint64(place), side="right"))
        return index if tokens is None else int(tokens[index])

    def _bits(self) -> int:
        """The next random number, of 53 bits. Streams of raw numbers stay as they are in all versions of NumPy."""
        assert self._rng is not None
        return int(self._rng.bit_generator.random_raw()) >> (64 - _BITS)


def _top_k(logits: Float32, k: int) -> NDArray[np.intp] | None:
    """The ids of the `k` largest logits, ascending; ties go to the lowest ids. None: all ids.

    In a large vocabulary only logits above minus infinity are looked at: a grammar may leave fewer than `k`.
    """
    if k == 0 or k >= len(logits):
        return None
    candidates = np.arange(len(logits))
    groups = len(logits) // _GROUP
    if groups > k:
        # If k groups have a maximum of at least x, then k logits are at least x, and smaller logits are not in the top
        # k. One pass removes nearly all tokens of a large vocabulary this way.
        peaks = logits[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
        border = _kth(peaks, k)
        candidates = np.flatnonzero(logits >= border if border > -np.inf else logits > border)
        if len(candidates) <= k:
            return candidates
    values = logits[candidates]
    border = _kth(values, k)
    kept = values > border
    kept[np.flatnonzero(values == border)[: k - int(kept.sum())]] = True
    return candidates[kept]


def _kth(values: Float32, k: int) -> np.float32:
    """The `k`th largest of `values`, equals counted."""
    largest: np.float32 = np.partition(values, len(values) - k)[len(values) - k]
    return largest


def _top_p(weights: Whole, total: int, p: float) -> NDArray[np.intp]:
    """Indices of the fewest largest `weights` that sum to at least `p` of their total, by falling weight."""
    # All weights below (1 - p) / n of the total sum to less than 1 - p of it, so the others sum to p without them, and
    # the long tail of a large vocabulary need not be sorted. The bound is halved as a margin for rounding.
    candidates = np.flatnonzero(weights >= np.uint64(0.5 * (1.0 - p) / len(weights) * total))
    order = candidates[np.argsort(-weights[candidates].astype(np.int64), kind="stable")]
    return order[: int(np.searchsorted(np.cumsum(weights[order]), _share(total, p))) + 1]


def _share(total: int, p: float) -> np.uint64:
    """`p * total`, exact, rounded up."""
    numerator, denominator = p.as_integer_ratio()
    return np.uint64(-(-total * numerator // denominator))
