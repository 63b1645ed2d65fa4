"""New requests: their arguments, checked, and their random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.core.locks import CallLock, MendingLock
from kvcache.engine.completion import Request, as_prompt
from kvcache.grammar.compiler import GrammarCompiler
from kvcache.grammar.grammar import Grammar
from kvcache.grammar.matcher import Matcher
from kvcache.grammar.trials import Trials
from kvcache.networks.protocols import NetworkConfig
from kvcache.sampling.sampling import Biases, Sampler, SamplingParams
from kvcache.sampling.stop_strings import StopStrings
from kvcache.sampling.text_stream import TextStream
from kvcache.support.arguments import as_count, short
from kvcache.texts.compressed_prefix import CompressedPrefix

__all__ = ["NewRequests", "Shared"]


class Shared(NamedTuple):
    """The values that all samples of a request share.

    Attributes:
        stop_tokens: the tokens that end it, those of the network included unless it ignores them.
        stop_strings: the strings that end it.
        biases: those of its logits.
        matcher: its grammar, at the start; None: it has none.
    """

    stop_tokens: frozenset[int]
    stop_strings: StopStrings
    biases: Biases
    matcher: Matcher | None


class NewRequests:
    """Makes the requests of an engine.

    Args:
        config: sizes of the network.
        max_positions: maximum number of positions of a text; None: no limit.
        seed: see `InferenceEngine`.
        lock: guards the count of requests.

    Attributes:
        max_positions: see above.
    """

    def __init__(
        self, config: NetworkConfig, max_positions: int | None, seed: int, lock: CallLock | MendingLock
    ) -> None:
        self._config, self.max_positions, self._lock = config, max_positions, lock
        self._grammars: GrammarCompiler | None = None
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Restart the random numbers of requests without their own seed."""
        self._seed = as_count(seed, "seed", most=None)
        self._count = 0

    def shared(self, params: SamplingParams, tokenizer: Callable[[], Any]) -> Shared:
        """The values that the samples of a request share; a new grammar is compiled, which holds up no step.

        Raises:
            ValueError: as `Biases.of`.
            GrammarError, ImportError: as `GrammarCompiler.compile`.
        """
        biases = Biases.of(params, self._config.vocab_size)
        stops = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else self._ends)))
        matcher = None if params.grammar is None else self.matcher(params.grammar, tokenizer, stops)
        return Shared(stops, StopStrings(params.stop), biases, matcher)

    def matcher(
        self, grammar: Grammar, tokenizer: Callable[[], Any], stop_tokens: Iterable[int] = (),
        trials: Trials | None = None,
    ) -> Matcher:
        """A matcher at the start of a grammar, which is compiled unless it is known; see the compiler."""
        return self.compiler(tokenizer).compile(grammar, stop_tokens, trials)

    def compiler(self, tokenizer: Callable[[], Any]) -> GrammarCompiler:
        """The compiler of this engine's grammars, which is made once."""
        with self._lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(tokenizer, self._config.vocab_size, self._ends)
            return self._grammars

    @property
    def _ends(self) -> tuple[int, ...]:
        return tuple(getattr(self._config, "eos_token_ids", ()))

    def request(
        self, prompt: Any, params: SamplingParams, tokenizer: Callable[[], Any], *, with_text: bool = False,
        or_empty: bool = False, is_history: bool = False, shared: Shared | None = None, sample: int = 0,
        prefix: CompressedPrefix | None = None,
    ) -> Request:
        """A new request, checked; adds one to the count of requests.

        Args:
            prompt: token ids, or a text.
            tokenizer: returns the tokenizer, or None. It is called for a text, for stop strings and with `with_text`.
            with_text: whether the request reports its text, where there is a tokenizer.
            or_empty: whether the prompt may be empty.
            is_history: whether the tokens of the prompt ran already; there may be any number of them.
            shared: what it shares with other samples, see `shared`.
            sample: its number among them, which is added to the seed of `params`.
            prefix: what its text stands behind.

        Raises:
            TypeError, ValueError: as `InferenceEngine.complete`; a token of `logit_bias` is outside the vocabulary;
                stop strings, or a text, without a tokenizer.
        """
        tokens = self.tokens_of(prompt, tokenizer, None if is_history else self.max_positions)
        if not is_history and (len(tokens) or not or_empty):
            self.check_span(tokens, 0 if prefix is None else prefix.num_tokens)
        shared = self.shared(params, tokenizer) if shared is None else shared
        decoder = None
        if params.stop or with_text:
            with nullcontext() if params.stop else suppress(ImportError):
                decoder = tokenizer()
        if params.stop and decoder is None:
            raise ValueError(f"stop: expected none, since the engine has no tokenizer, got {short(params.stop)}")
        text = None if decoder is None else TextStream(decoder, tokens, shared.stop_strings)
        rng, vocab_size = self._randomness(params, sample), self._config.vocab_size
        matcher = None if shared.matcher is None else shared.matcher.fresh(shared.stop_tokens)
        stops = shared.stop_tokens
        sampler = Sampler(params, rng, vocab_size, tokens, biases=shared.biases, matcher=matcher, stop_tokens=stops)
        request = Request(tokens, sampler, text, shared.stop_tokens)
        request.prefix = prefix
        return request

    def tokens_of(self, prompt: Any, tokenizer: Callable[[], Any], most: int | None) -> NDArray[np.uint32]:
        """The token ids of a prompt; see `as_prompt`."""
        return as_prompt(prompt, tokenizer, self._config.vocab_size, most)

    def check_span(self, tokens: NDArray[np.uint32], pos: int) -> None:
        """Raise ValueError unless there is a token, and every position from `pos` on is one of the network's."""
        if not len(tokens):
            raise ValueError("tokens: expected at least one, got none")
        if self.max_positions is not None and pos + len(tokens) > self.max_positions:
            raise ValueError(
                f"tokens: expected positions below max_position_embeddings ({self.max_positions}), "
                f"got {len(tokens)} tokens from position {pos}"
            )

    def _randomness(self, params: SamplingParams, sample: int) -> np.random.Generator:
        """The random numbers of the next request, the sample of this number."""
        with self._lock:
            number = self._count
            self._count += 1
        # NumPy takes no negative seed; these are read as 64 bits without a sign.
        own = None if params.seed is None else _unsigned(params.seed + sample)
        return np.random.Generator(np.random.PCG64((self._seed, number) if own is None else own))


def _unsigned(seed: int) -> int:
    return seed if seed >= 0 else seed + 2**64
