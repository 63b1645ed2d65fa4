"""`DrawnTokens`: the tokens that a request of one text draws from its passes, with draft tokens or not."""

from __future__ import annotations

from time import perf_counter

from kvcache.drafts.drafter import Drafter
from kvcache.drafts.text_drafts import TextDrafts
from kvcache.engine.completion import Request
from kvcache.engine.current import CurrentText
from kvcache.grammar.matcher import Matcher
from kvcache.networks.protocols import Float32
from kvcache.texts.text import Text

__all__ = ["DrawnTokens"]


class DrawnTokens:
    """The tokens of a request.

    Args:
        request: draws them.
        sequence: the text.
        drafter: gives it draft tokens; None: it has none.

    Attributes:
        ended: whether no more are to come.
        error: what a draw failed with, behind tokens that are to be given first.
        itself, drafts: see `Drafted`.
    """

    def __init__(self, request: Request, sequence: CurrentText, drafter: Drafter | None) -> None:
        self._request, self._sequence, self._drafter = request, sequence, drafter
        self._left, self.ended, self.error = request.params.max_tokens, request.params.max_tokens == 0, None
        self.drafts: TextDrafts | None = None if drafter is None else drafter.begin()
        self.itself: Text = sequence.text
        self._began: float | None = None  # of a pass; None: it is not measured
        self._drawing = 0.0  # seconds of draws in it, of which a token needs as many with draft tokens as without

    error: Exception | None

    @property
    def matcher(self) -> Matcher | None:
        """See `Drafted`."""
        return self._request.sampler.matcher

    def most_drafts(self, most: int) -> int:
        """See `Drafted`."""
        sequence, positions = self._sequence, self._sequence.settings.max_positions or 0
        most = sequence.pool.in_residual_group(sequence.text, most + 1) - 1  # a stream that is closed drops some
        return min(most, self._left - 1, positions - self.itself.num_tokens)

    def take(self, logits: Float32, tokens: list[int]) -> None:
        """Draw from the logits of a pass, `(rows, vocab_size)`, as long as draft tokens are drawn; into `tokens`."""
        draft, request = self.itself.draft.tolist(), self._request
        for row in logits:
            token = request.sampler.sample(row)
            if token in request.stop_tokens:
                request.finish_reason, self.ended = "stop", True
                return
            request.observe(token, row)
            tokens.append(token)
            self._left -= 1
            self.ended = self._left == 0 or request.is_stopped()
            if self.ended or len(tokens) == len(logits) or token != draft[len(tokens) - 1]:
                return

    def run(self, token: int) -> list[int]:
        """Run the last token with draft tokens, and draw; no token if there are none, and the caller is to run it.

        What a draw fails with is kept in `error`.
        """
        drafter, found = self._drafter, list[int]()
        self._began = None
        if drafter is None or self.drafts is None:
            return found
        longer = self._sequence.with_token(token, drafter.most)
        if longer is None:
            return found
        self.itself, self._began, self._drawing = longer, perf_counter(), 0.0
        drafter.give([self], drafter.most)
        proposed = longer.draft

        def draw(rows: Float32) -> int:
            began = perf_counter()
            try:
                self.take(rows, found)
            except Exception as error:
                self.error, self.ended = error, True
            self._drawing = perf_counter() - began
            last_waits = bool(found) and self.error is None and self._request.finish_reason != "stop"
            return len(found) - last_waits

        if len(proposed) and self._sequence.extend_drafted(longer, draw):
            held = sum(a == b for a, b in zip(proposed.tolist(), found, strict=False))
            self.drafts.learn(len(proposed), held)
        else:
            longer.draft = proposed[:0]
        return found

    def ran(self) -> None:
        """Note that the pass of the last token has run, by `run` or by the caller."""
        if self._drafter is not None and self._began is not None:
            seconds = perf_counter() - self._began - self._drafter.seconds - self._drawing
            self._drafter.ran(1 + len(self.itself.draft), seconds)

    def end(self) -> None:
        """Forget the text in the sources of draft tokens."""
        if self._drafter is not None:
            self._drafter.end(self)
