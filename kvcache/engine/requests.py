"""Requests over one sequence: their turns, their random numbers, and the loop from a prompt to tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.core.locks import CallLock, MendingLock
from kvcache.drafts.drafter import Drafter
from kvcache.drafts.sources import DraftSources
from kvcache.engine.completion import Request, as_prompt
from kvcache.engine.current import CurrentText
from kvcache.engine.documents import Placed
from kvcache.engine.drawn_tokens import DrawnTokens
from kvcache.engine.new_requests import NewRequests
from kvcache.engine.text_rows import TextRows, common_tokens
from kvcache.engine.turns import CallInTurn, Turn, Turns
from kvcache.errors import InvalidOperationError
from kvcache.kernels.functions import log_sums
from kvcache.networks.protocols import Float32, is_causal
from kvcache.sampling.sampling import SamplingParams
from kvcache.sampling.text_stream import TextStream
from kvcache.sampling.tokenizer import CheckpointText, GgufText
from kvcache.support.arguments import as_instance
from kvcache.texts.behind import Behind, base_of
from kvcache.texts.forward import Forward
from kvcache.texts.text_adapter import LoadedAdapter, TextAdapter

__all__ = ["SCORE_FLOATS", "Requests", "Tokens", "log_probabilities"]

Tokens = NDArray[np.uint32]

SCORE_FLOATS = 2**24  # maximum number of logits that score() holds at a time: 64 MiB


class Requests:
    """Runs the requests of an engine, one after another, on its one sequence.

    Args:
        sequence: the tokens so far, and the network that extends them.
        seed: see `InferenceEngine`.
        sources, most_drafts: of draft tokens, and the most of them in a pass.

    Attributes:
        lock: held while the sequence changes.
        turns: the turns of streams, over the version of the sequence.
        call: a context manager for one call that changes the sequence: holds a turn and the lock.
        num_prefilled: tokens prefilled so far.
        new: makes the requests.
        text: the text side of the checkpoint; None: there is none.
    """

    def __init__(
        self, sequence: CurrentText, seed: int, sources: DraftSources | None = None, most_drafts: int = 0
    ) -> None:
        self.sequence, self.max_positions = sequence, sequence.settings.max_positions
        self.config = sequence.settings.model.config
        self.lock = MendingLock(CallLock(level=2), sequence.mend)
        self.turns = Turns()
        self.call = CallInTurn(self.turns, self.lock)
        self.num_prefilled = 0
        self.new = NewRequests(
            self.config, self.max_positions, seed, self.lock, lambda: self.tokenizer, sequence.settings.features
        )
        self.text: CheckpointText | GgufText | None = None
        self._sources, self._most_drafts = sources, most_drafts
        self._drafters: dict[Forward, Drafter] = {}  # the one of the pool that the sequence is in
        self._goes_back = is_causal(sequence.settings.model)  # a text may go on behind tokens of another one

    @property
    def drafter(self) -> Drafter | None:
        """The sources of draft tokens, over the pool that the sequence is in now; None: there are none."""
        forward = self.sequence.forward
        if self._sources is None or self._sources.is_empty:
            return None
        if (found := self._drafters.get(forward)) is None:
            made = self._sources.drafter(forward, self._most_drafts, perf_counter)
            found = self._drafters.setdefault(forward, made)  # of threads that report meanwhile, the first one's
            for other in list(self._drafters):
                if other is not forward:
                    self._drafters.pop(other, None)
        return found

    @property
    def tokenizer(self) -> Any:
        """See `InferenceEngine`."""
        return None if self.text is None else self.text.tokenizer

    def request(
        self, prompt: Any, params: SamplingParams, sampling: Mapping[str, Any], *, with_text: bool = False,
        or_empty: bool = False, is_history: bool = False, placed: Placed | None = None,
        adapter: LoadedAdapter | None = None,
    ) -> Request:
        """A new request, checked; adds one to the count of requests.

        Args:
            prompt: token ids, or a text.
            sampling: attributes in place of those of `params`.
            with_text: whether the request reports its text, if there is a tokenizer.
            or_empty: whether the prompt may be empty.
            is_history: whether the tokens of the prompt ran already; there may be any number of them.
            placed: what its text stands behind, and its prompt, which is `prompt`.
            adapter: that of its text.

        Raises:
            TypeError, ValueError: as `InferenceEngine.complete`; a token of `logit_bias` is outside the vocabulary;
                stop strings, or a text, without a tokenizer.
        """
        params, new = as_instance(params, SamplingParams, "params").changed(sampling), self.new
        prefix = None if placed is None else placed.prefix
        if is_history:
            tokens = as_prompt(prompt, lambda: self.tokenizer, self.config.vocab_size)
        else:
            tokens = new.prompt(prompt, prefix, or_empty=or_empty)
        shared = new.shared(params, with_text)
        request = new.request(tokens, shared, prefix=prefix, adapter=TextAdapter.of(adapter, tokens))
        request.placed = placed
        if shared.decoder is not None:
            request.text = TextStream(shared.decoder, tokens, shared.stop_strings)
        return request

    def enlarge(self, blocks: int, cached: int | None = None) -> None:
        """Begin an empty text in a pool of `blocks` more; prefixes have at most `cached` of all, None: none."""
        with self.call:
            self.sequence.move(self.sequence.settings.pool(self.sequence.cache.total_blocks + blocks, cached))

    # ---------------------------------------------------------------- steps, with the lock held, in a turn

    def prefill(self, tokens: Tokens, pos: int) -> Float32:
        """Do what `extend` does, and count the tokens as prefilled."""
        logits = self.extend(tokens, pos)
        self.num_prefilled += len(tokens)
        return logits

    def extend(self, tokens: Tokens, pos: int) -> Float32:
        """Run tokens at positions from `pos` on and return the logits `(vocab_size,)` after the last token."""
        if pos > self.sequence.num_tokens:
            raise ValueError(f"pos: expected at most the {self.sequence.num_tokens} tokens in the cache, got {pos}")
        self.new.check_span(tokens, pos)
        logits: Float32 = self.sequence.extend(tokens, pos)[0]
        return logits

    # ---------------------------------------------------------------- whole requests

    def stream(self, request: Request, *, whole: bool) -> Iterator[int]:
        """Run a request. If it fails and is `whole`, the sequence is empty afterwards."""
        turn = self.turns.take(self.sequence.version)
        try:
            with self.lock:
                least = base_of(request.prefix) + len(request.tokens)
                request.cached_texts = self.sequence.clear(request.prefix, least, request.adapter)
                logits = self.prefill(request.tokens, self.sequence.num_tokens)
                turn.leave(self.sequence.version)
            yield from self.decode(logits, request, turn)
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
            yield from self.decode(logits, request, turn)
        finally:
            turn.give_back()

    def decode(self, logits: Float32, request: Request, turn: Turn) -> Iterator[int]:
        """Draw tokens and run them, with draft tokens where there are some."""
        drawn = DrawnTokens(request, self.sequence, self.drafter)
        waiting, tokens = deque[int](), list[int]()
        try:
            if not drawn.ended:
                drawn.take(logits[None], tokens)
            while True:
                waiting.extend(tokens)
                while waiting:
                    yield waiting.popleft()
                if drawn.ended:
                    break
                with self.lock:
                    turn.go_on(self.sequence.version)
                    if self.sequence.num_tokens == self.max_positions:
                        return
                    last = tokens[-1]
                    tokens = drawn.run(last)
                    if not tokens and not drawn.ended:
                        logits = self.extend(np.array([last], np.uint32), self.sequence.num_tokens)
                    drawn.ran()
                    turn.leave(self.sequence.version)
                if not tokens and not drawn.ended:
                    drawn.take(logits[None], tokens)
            if drawn.error is not None:
                raise drawn.error
        finally:
            # It may be closed before it gave all that it has drawn; the last one of these has not run.
            if (count := min(len(waiting), len(tokens) - 1)) > 0:
                self.lock.when_free(partial(self._shorten, turn, count))
            drawn.end()

    def _shorten(self, turn: Turn, count: int) -> None:
        if self.sequence.version == turn.version:
            self.sequence.shorten(count)
            turn.leave(self.sequence.version)

    def score(self, tokens: Tokens, prefix: Behind | None = None, adapter: LoadedAdapter | None = None) -> Float32:
        """Log-probability of each token after the first; see `InferenceEngine.score`."""
        base = base_of(prefix)
        self.new.check_span(tokens[:-1] if len(tokens) > 1 else tokens, base)
        scores = np.empty(len(tokens) - 1, np.float32)
        chunk = max(1, min(self.sequence.chunk, SCORE_FLOATS // self.config.vocab_size))
        own = TextAdapter.of(adapter, tokens)
        with self.call:
            self.sequence.clear(prefix, base + len(tokens), own)
            try:
                for start in range(0, len(scores), chunk):
                    piece = tokens[start : min(start + chunk, len(scores))]
                    logits = self.sequence.extend(piece, base + start, "all", len(scores))
                    targets = tokens[start + 1 : start + 1 + len(piece)]
                    scores[start : start + len(piece)] = log_probabilities(logits, targets)
            except BaseException:
                self.sequence.clear()
                raise
        return scores

    def read(self, readings: Sequence[TextRows], progress: Callable[[int, int], object] | None = None) -> None:
        """Run texts one after another, and read their rows; the sequence is empty afterwards.

        If the last row of a text is read, the text keeps the tokens that it shares with the one before, as far as going
        back gives the bits of a cold run; only the other tokens run.

        Args:
            progress: called with the number of texts that have run, and of all.
        """
        with self.call:
            try:
                before: TextRows | None = None
                for number, each in enumerate(readings):
                    if each.every:
                        self._read_all(each)
                    else:
                        self._read_last(each, before)
                    before = each
                    if progress is not None:
                        progress(number + 1, len(readings))
            finally:
                self.sequence.clear()

    def _read_all(self, reading: TextRows) -> None:
        tokens, chunk = reading.tokens, self.sequence.chunk
        self._begin(reading)
        for start in range(0, len(tokens), chunk):
            reading.take(self.sequence.extend(tokens[start : start + chunk], start, "all", len(tokens)), start)

    def _begin(self, reading: TextRows) -> None:
        self.sequence.clear()
        self.sequence.text.head = reading.head

    def _read_last(self, reading: TextRows, before: TextRows | None) -> None:
        tokens, pos = reading.tokens, 0
        if self._goes_back and before is not None and not before.every and before.head == reading.head:
            pos = min(common_tokens([before.tokens, tokens]), len(tokens) - 1)
            group = self.sequence.cache.residual_length
            pos -= pos % group if group else 0  # tokens of a group are packed together
        last = len(tokens) - 1
        if pos:
            try:
                reading.take(self.sequence.extend(tokens[pos:], pos), last)
                return
            except InvalidOperationError:  # a window has left them
                pos = 0
        self._begin(reading)
        reading.take(self.sequence.extend(tokens, 0), last)


def log_probabilities(logits: Float32, targets: Tokens) -> NDArray[np.float64]:
    """log softmax of `logits` `(n, vocab)` at `targets` `(n,)`."""
    chosen = logits[np.arange(len(targets)), targets].astype(np.float64)
    return chosen - log_sums(logits)
