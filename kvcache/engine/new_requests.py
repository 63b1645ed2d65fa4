"""New requests: their arguments, checked, and their random numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.core.locks import CallLock, MendingLock
from kvcache.engine.completion import Request, as_prompt
from kvcache.engine.documents import Documents, Placed, place
from kvcache.grammar.compiler import GrammarCompiler
from kvcache.grammar.grammar import Grammar
from kvcache.grammar.matcher import Matcher
from kvcache.grammar.trials import Trials
from kvcache.networks.protocols import NetworkConfig
from kvcache.sampling.sampling import Biases, Sampler, SamplingParams
from kvcache.sampling.stop_strings import StopStrings
from kvcache.support.arguments import as_count, short
from kvcache.support.exclusions import excluded, expect
from kvcache.texts.behind import Behind, base_of

__all__ = ["NewRequests", "Shared"]


class Shared(NamedTuple):
    """The values that all samples of a request share.

    Attributes:
        params: how to sample.
        stop_tokens: the tokens that end it, those of the network included unless it ignores them.
        stop_strings: the strings that end it.
        biases: those of its logits.
        matcher: its grammar, at the start; None: it has none.
        decoder: the tokenizer that spells its text; None: there is none, or no need of text.
    """

    params: SamplingParams
    stop_tokens: frozenset[int]
    stop_strings: StopStrings
    biases: Biases
    matcher: Matcher | None
    decoder: Any


class NewRequests:
    """Makes the requests of an engine.

    Args:
        config: sizes of the network.
        max_positions: maximum number of positions of a text; None: no limit.
        seed: see `InferenceEngine`.
        lock: guards the count of requests.
        tokenizer: returns the tokenizer, or None. It is called for texts, stop strings and grammars.
        features: of the network and its settings, see `kvcache.support.exclusions`.

    Attributes:
        max_positions, features: see above.
    """

    def __init__(
        self, config: NetworkConfig, max_positions: int | None, seed: int, lock: CallLock | MendingLock,
        tokenizer: Callable[[], Any], features: Collection[str] = (),
    ) -> None:
        self._config, self.max_positions, self._lock = config, max_positions, lock
        self._tokenizer, self.features = tokenizer, features
        self._is_whole = bool(excluded("generate", features))
        self._grammars: GrammarCompiler | None = None
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Restart the random numbers of requests without their own seed."""
        self._seed = as_count(seed, "seed", most=None)
        self._count = 0

    def shared(self, params: SamplingParams, with_text: bool = False) -> Shared:
        """The values that the samples of a request share; a new grammar is compiled, which holds up no step.

        Args:
            with_text: whether the request reports its text, if there is a tokenizer.

        Raises:
            ValueError: as `Biases.of`; stop strings without a tokenizer.
            GrammarError, ImportError: as `GrammarCompiler.compile`.
        """
        biases = Biases.of(params, self._config.vocab_size)
        stops = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else self._ends)))
        matcher = None if params.grammar is None else self.matcher(params.grammar, stops)
        decoder = self._decoder(params) if params.stop or with_text else None
        return Shared(params, stops, StopStrings(params.stop), biases, matcher, decoder)

    def _decoder(self, params: SamplingParams) -> Any:
        """The tokenizer, if there is one; stop strings need it."""
        decoder = None
        try:
            decoder = self._tokenizer()
        except ImportError:
            if params.stop:
                raise
        if params.stop and decoder is None:
            raise ValueError(f"stop: expected none, since the engine has no tokenizer, got {short(params.stop)}")
        return decoder

    def matcher(self, grammar: Grammar, stop_tokens: Iterable[int] = (), trials: Trials | None = None) -> Matcher:
        """A matcher at the start of a grammar, which is compiled unless it is known; see the compiler."""
        return self.compiler().compile(grammar, stop_tokens, trials)

    def compiler(self) -> GrammarCompiler:
        """The compiler of this engine's grammars, which is made once."""
        with self._lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(self._tokenizer, self._config.vocab_size, self._ends)
            return self._grammars

    @property
    def _ends(self) -> tuple[int, ...]:
        return tuple(getattr(self._config, "eos_token_ids", ()))

    def request(
        self, tokens: NDArray[np.uint32], shared: Shared, sample: int = 0, prefix: Behind | None = None
    ) -> Request:
        """A new request without text; adds one to the count of requests.

        Args:
            tokens: of `prompt`.
            shared: what it shares with other samples.
            sample: its number among them, which is added to the seed of its parameters.
            prefix: what its text stands behind.
        """
        stops, params = shared.stop_tokens, shared.params
        matcher = None if shared.matcher is None else shared.matcher.fresh(stops)
        rng = self._randomness(params, sample)
        sampler = Sampler(params, rng, self._config.vocab_size, tokens, 0, shared.biases, matcher, stops)
        return Request(tokens, sampler, stops, prefix)

    def prompt(
        self, prompt: Any, prefix: Behind | None = None, *, or_empty: bool = False
    ) -> NDArray[np.uint32]:
        """The token ids of a prompt, which are converted and checked here alone; see `as_prompt`.

        Args:
            prefix: what the text stands behind.
            or_empty: whether there may be none.
        """
        tokens = as_prompt(prompt, self._tokenizer, self._config.vocab_size, self.max_positions)
        if len(tokens) or not or_empty:
            self.check_span(tokens, base_of(prefix))
        return tokens

    def placed(
        self, prompt: Any, prefix: Behind | None, documents: Documents, features: Collection[str] | None = None
    ) -> Placed:
        """A prompt behind what stands before it; see `place`.

        Args:
            features: those of the request beside those of the engine.
        """
        if documents.head is None and documents.segments is None:
            return Placed(prompt, prefix)
        expect("segments", documents.segments, {*self.features, *(features or ())})
        return place(prompt, prefix, documents, self._tokenizer, self._config.vocab_size)

    def check_span(self, tokens: NDArray[np.uint32], pos: int) -> None:
        """Raise ValueError unless there is a token, all positions from `pos` on exist, and texts are continued."""
        if self._is_whole:
            expect("generate", len(tokens), self.features)
        if not len(tokens):
            raise ValueError("tokens: expected at least one, got none")
        if self.max_positions is not None and pos + len(tokens) > self.max_positions:
            raise ValueError(
                f"tokens: expected positions below max_position_embeddings ({self.max_positions}), "
                f"got {len(tokens)} tokens from position {pos}"
            )

    def _randomness(self, params: SamplingParams, sample: int) -> np.random.Generator | None:
        """The random numbers of the next request, the sample of this number; None: it uses none."""
        with self._lock:
            number = self._count
            self._count += 1
        if params.is_greedy:
            return None
        # NumPy takes no negative seed; these are read as 64 bits without a sign.
        own = None if params.seed is None else _unsigned(params.seed + sample)
        return np.random.Generator(np.random.PCG64((self._seed, number) if own is None else own))


def _unsigned(seed: int) -> int:
    return seed if seed >= 0 else seed + 2**64
