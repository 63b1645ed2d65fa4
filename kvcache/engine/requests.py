"""Requests over one sequence: their turns, their random numbers, and the loop from a prompt to tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.core.arguments import as_count, short
from kvcache.core.locks import CallLock, MendingLock
from kvcache.engine.completion import Request, as_prompt
from kvcache.engine.regimes import Regimes
from kvcache.engine.sampling import Sampler, SamplingParams, check_biases
from kvcache.engine.sequence import ModelSequence
from kvcache.engine.text import TextStream
from kvcache.engine.turns import CallInTurn, Turn, Turns
from kvcache.networks.protocols import Float32

__all__ = ["Requests", "Tokens"]

Tokens = NDArray[np.uint32]

_SCORE_FLOATS = 2**24  # maximum number of logits that score() holds at a time: 64 MiB


class Requests:
    """Runs the requests of an engine, one after another, on its one sequence.

    Args:
        sequence: the tokens so far, and the network that extends them.
        max_positions: maximum number of positions of a text; None: no limit.
        seed: see `InferenceEngine`.

    Attributes:
        lock: held while the sequence changes.
        turns: the turns of streams, over the version of the sequence.
        call: a context manager for one call that changes the sequence: holds a turn and the lock.
        num_prefilled: tokens prefilled so far.
        regimes: extends the sequence in the regime of its text.
    """

    def __init__(self, sequence: ModelSequence, max_positions: int | None, seed: int) -> None:
        self.sequence, self.max_positions = sequence, max_positions
        self.config = sequence.model.config
        self.lock = MendingLock(CallLock(level=2), sequence.mend)
        self.turns = Turns()
        self.call = CallInTurn(self.turns, self.lock)
        self.num_prefilled = 0
        self.regimes = Regimes(sequence)
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Restart the random numbers of requests without their own seed."""
        self._seed = as_count(seed, "seed", most=None)
        self._count = 0

    # ---------------------------------------------------------------- arguments of a request

    def request(
        self, prompt: Any, params: SamplingParams, tokenizer: Callable[[], Any], *, with_text: bool = False,
        or_empty: bool = False, is_history: bool = False,
    ) -> Request:  # fmt: skip
        """A new request, checked; adds one to the count of requests.

        Args:
            prompt: token ids, or a text.
            tokenizer: returns the tokenizer, or None. It is called for a text, for stop strings and with `with_text`.
            with_text: whether the request reports its text, where there is a tokenizer.
            or_empty: whether the prompt may be empty.
            is_history: whether the tokens of the prompt ran already; there may be any number of them.

        Raises:
            TypeError, ValueError: as `InferenceEngine.complete`; a token of `logit_bias` is outside the vocabulary;
                stop strings, or a text, without a tokenizer.
        """
        tokens = as_prompt(prompt, tokenizer, self.config.vocab_size)
        if not is_history and (len(tokens) or not or_empty):
            self.check_span(tokens, 0)
        check_biases(params, self.config.vocab_size)
        decoder = None
        if params.stop or with_text:
            with nullcontext() if params.stop else suppress(ImportError):
                decoder = tokenizer()
        if params.stop and decoder is None:
            raise ValueError(f"stop: expected none, since the engine has no tokenizer, got {short(params.stop)}")
        text = None if decoder is None else TextStream(decoder, tokens, params.stop)
        return Request(tokens, Sampler(params, self.randomness(params), self.config.vocab_size, tokens), text)

    def check_span(self, tokens: Tokens, pos: int) -> None:
        """Raise ValueError unless there is a token, and every position from `pos` on is one of the network's."""
        if not len(tokens):
            raise ValueError("tokens: expected at least one, got none")
        if self.max_positions is not None and pos + len(tokens) > self.max_positions:
            raise ValueError(
                f"tokens: expected positions below max_position_embeddings ({self.max_positions}), "
                f"got {len(tokens)} tokens from position {pos}"
            )

    def randomness(self, params: SamplingParams) -> np.random.Generator:
        """The random numbers of the next request."""
        with self.lock:
            number = self._count
            self._count += 1
        return np.random.default_rng((self._seed, number) if params.seed is None else params.seed)

    # ---------------------------------------------------------------- steps, with the lock held, in a turn

    def prefill(self, tokens: Tokens, pos: int, whole: int = 0) -> Float32:
        """Do what `extend` does, and count the tokens as prefilled."""
        logits = self.extend(tokens, pos, whole)
        self.num_prefilled += len(tokens)
        return logits

    def extend(self, tokens: Tokens, pos: int, whole: int = 0) -> Float32:
        """Run tokens at positions from `pos` on and return the logits `(vocab_size,)` after the last token.

        `whole` is the length of the whole text, where more tokens are to follow.
        """
        if pos > self.sequence.num_tokens:
            raise ValueError(f"pos: expected at most the {self.sequence.num_tokens} tokens in the cache, got {pos}")
        self.check_span(tokens, pos)
        logits: Float32 = self.regimes.extend(tokens, pos, "last", whole)[0]
        return logits

    # ---------------------------------------------------------------- whole requests

    def stream(self, request: Request, *, whole: bool) -> Iterator[int]:
        """Run a request. If it fails and is `whole`, the sequence is empty afterwards."""
        turn = self.turns.take(self.sequence.version)
        try:
            with self.lock:
                self.sequence.clear()
                logits = self.prefill(request.tokens, 0)
                turn.leave(self.sequence.version)
            yield from self.decode(logits, request, turn, [])
        except BaseException:
            if whole:
                self.lock.when_free(self.sequence.clear)
            raise
        finally:
            turn.give_back()

    def decode_in_turn(self, version: int, logits: Float32, request: Request) -> Iterator[int]:
        """Run `decode` as a stream in its own turn; the sequence must still have `version`."""
        turn = self.turns.take(self.sequence.version)
        try:
            turn.leave(version)
            yield from self.decode(logits, request, turn, [])
        finally:
            turn.give_back()

    def decode(self, logits: Float32, request: Request, turn: Turn, text: list[int]) -> Iterator[int]:
        """Sample tokens and run them; the step that adds a token to the sequence also adds it to `text`."""
        params = request.params
        stops = {*params.stop_token_ids, *getattr(self.config, "eos_token_ids", ())}
        for left in reversed(range(params.max_tokens)):
            token = request.sampler.sample(logits)
            if token in stops:
                request.finish_reason = "stop"
                return
            request.observe(token, logits)
            yield token
            if left == 0 or request.is_stopped():
                return
            with self.lock:
                turn.go_on(self.sequence.version)
                if self.sequence.num_tokens == self.max_positions:
                    return
                logits = self.extend(np.array([token], np.uint32), self.sequence.num_tokens)
                text.append(token)
                turn.leave(self.sequence.version)

    def score(self, tokens: Tokens) -> Float32:
        """Log-probability of each token after the first; see `InferenceEngine.score`."""
        self.check_span(tokens[:-1] if len(tokens) > 1 else tokens, 0)
        scores = np.empty(len(tokens) - 1, np.float32)
        chunk = max(1, min(self.sequence.chunk, _SCORE_FLOATS // self.config.vocab_size))
        with self.call:
            self.sequence.clear()
            try:
                for start in range(0, len(scores), chunk):
                    piece = tokens[start : min(start + chunk, len(scores))]
                    logits = self.regimes.extend(piece, start, "all", len(scores))
                    targets = tokens[start + 1 : start + 1 + len(piece)]
                    scores[start : start + len(piece)] = _log_probabilities(logits, targets)
            except BaseException:
                self.sequence.clear()
                raise
        return scores


def _log_probabilities(logits: Float32, targets: Tokens) -> NDArray[np.float64]:
    """log softmax of `logits` `(n, vocab)`, which are overwritten, at `targets` `(n,)`."""
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(targets)), targets].astype(np.float64)
    total = np.exp(logits, out=logits).sum(axis=1, dtype=np.float64)
    result: NDArray[np.float64] = chosen - np.log(total)
    return result
