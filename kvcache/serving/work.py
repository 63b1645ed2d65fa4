"""`Work`: a text that the scheduler runs until it catches up with its tokens, to draw the next one or to score all."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Literal

import numpy as np

from kvcache.drafts.text_drafts import TextDrafts
from kvcache.engine.completion import Request, TokenLogprobs, logprobs_of
from kvcache.engine.documents import SegmentUse
from kvcache.engine.requests import log_probabilities
from kvcache.engine.text_rows import TextRows
from kvcache.grammar.matcher import Matcher
from kvcache.networks.protocols import Float32, NetworkConfig
from kvcache.sampling.stop_strings import StopWatch
from kvcache.sampling.text_stream import TextStream
from kvcache.texts.behind import Behind
from kvcache.texts.seen_parts import TextKey
from kvcache.texts.text import Text, Tokens
from kvcache.texts.text_adapter import TextAdapter

__all__ = ["Drawing", "FinishReason", "Reading", "Scoring", "Work"]

_OPENING = 256  # tokens: attention reads no fewer together
FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]


class Work(Text, ABC):
    """A text of a request, and how far it is. `computed` is below the number of tokens as long as it runs.

    Args:
        tokens: those to run; a copy of the caller's.
        namespace: texts share cached blocks within one namespace.

    Attributes:
        key: the order in which works run; lower first.
        arrival: when it was submitted, in seconds of the engine's clock.
        deadline: when it ends at the latest; None: never.
        chunk: its prompt runs in pieces that end at multiples of this, its new tokens one by one; 0: in any pieces.
        opening: its namespace's hash and its first tokens, by which the texts of a pass are sorted.
        reason: why it ended; None: it has not.
        error: what it failed with.
        trace: where, of `error`; each raise of it adds the frames of a caller, which are not to be kept.
        cached_tokens: tokens of the prompt that did not run, at the first start.
        left_at: what it had computed when it last gave up its sequence for blocks of tiers; -1: never.
        preemptions: how often it lost its sequence.
        owed: seconds that shorter prompts have run in place of this one, see `Shares`.
        started, times: when it first ran, and when each new token came.
        leader: the work whose sequence it will fork; None: it starts by itself.
        followers: works that fork this one's sequence when its prompt has run.
        drafts: its draft tokens; None: it has none.
        keep: `(tokens, seconds)`: how many of its first tokens stay cached when they have run, and for how long.
        cached_texts: of each cached text that it sees parts of the number of tokens that did not run.
        parked: `(tokens, work)`: works that wait until this one has run these tokens, which are theirs too.
    """

    def __init__(
        self, tokens: Tokens, namespace: Hashable, prefix: Behind | None = None, adapter: TextAdapter | None = None
    ) -> None:
        super().__init__(tokens, namespace, prefix, adapter)
        space = namespace if adapter is None else adapter.space(namespace)
        self.opening = (hash((space, self.base)), tokens[:_OPENING].tobytes())
        self.key: tuple[float, int] = (0.0, 0)
        self.arrival = 0.0
        self.deadline: float | None = None
        self.chunk = 0
        self.reason: FinishReason | None = None
        self.error: Exception | None = None
        self.trace: TracebackType | None = None
        self.cached_tokens = self.preemptions = 0
        self.left_at, self.owed = -1, 0.0
        self.started: float | None = None
        self.times: list[float] = []
        self.leader: Work | None = None
        self.followers: list[Work] = []
        self.drafts: TextDrafts | None = None
        self.keep: list[tuple[int, float]] = []
        self.cached_texts: dict[TextKey, int] = {}
        self.parked: list[tuple[int, Work]] = []

    @property
    def whole_prompt(self) -> int:
        """Tokens of the prompt with those that it stands behind."""
        return self.base + self.num_prompt

    @property
    def reused_tokens(self) -> int:
        """Tokens of `whole_prompt` that did not run for this request."""
        parts = () if self.prefix is None else self.prefix.parts
        ran = sum(len(part.tokens) - self.cached_texts.get(part.key, 0) for part in parts)
        return self.cached_tokens + max(0, self.base - ran)

    @property
    def itself(self) -> Text:
        """See `Drafted`."""
        return self

    def most_drafts(self, most: int) -> int:
        """See `Drafted`."""
        return 0

    @property
    def matcher(self) -> Matcher | None:
        """See `Drafted`."""
        return None

    @property
    def fixed_piece(self) -> int:
        """Tokens of the next piece, where `chunk` says it."""
        ahead = self.num_prompt - self.computed
        return min(ahead, self.chunk - self.computed % self.chunk) if ahead > 0 else 1

    def __lt__(self, other: Work) -> bool:
        return self.key < other.key

    @abstractmethod
    def rows_due(self, count: int) -> int:
        """The number of the next `count` tokens, the last ones, whose rows are due."""

    def logits_due(self, count: int) -> int:
        """The number of these whose rows are logits, of which a step has few."""
        return self.rows_due(count)

    def masks_due(self, rows: int) -> list[tuple[Matcher, list[int]]]:
        """The matcher that `take` asks for the masks of `rows` rows of logits, and the draft tokens between them."""
        return []

    @abstractmethod
    def take(self, logits: Float32, start: int) -> int:
        """Use the logits `(rows_due, vocab_size)` of a piece from token `start` on; how many draft tokens held."""

    @abstractmethod
    def ending(self) -> FinishReason | None:
        """Why it is at its end; None: it is not."""

    @abstractmethod
    def mend(self) -> None:
        """Undo a `take` that an exception ended."""


class Drawing(Work):
    """A text that draws new tokens: one sample of a request.

    Args:
        request: its prompt and sampler.
        drafts: its draft tokens; None: it has none.
        make_text: makes the `TextStream` behind the prompt, with the stop strings; None: there is no tokenizer.
        config: of the network.
        make_watch: makes what finds the stop strings; None: the text does.

    Attributes:
        prompt_logprobs: for each token of the prompt its `TokenLogprobs`, None for the first one; those so far. None:
            they are not reported.
    """

    def __init__(
        self, request: Request, make_text: Callable[[], TextStream] | None, config: NetworkConfig,
        namespace: Hashable, drafts: TextDrafts | None = None, make_watch: Callable[[], StopWatch] | None = None,
    ) -> None:
        super().__init__(request.tokens, namespace, request.prefix, request.adapter)
        self._sampler, self._request, self._make_text = request.sampler, request, make_text
        self._make_watch: Callable[[], StopWatch] | None = make_watch or make_text if request.params.stop else None
        self._watched = None if self._make_watch is None else self._make_watch()
        request.cached_texts = self.cached_texts
        if request.params.logprobs is not None:
            request.logprobs = []
        self._most = config.max_position_embeddings - self.base
        self.drafts = drafts
        self._stopped = self._drawing = self._warms = False
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._top = 0  # of these: how many of the most likely tokens

    def evict(self, chunk: int, *, endless: bool) -> None:
        """Run in pieces of `chunk`, without shared blocks and draft tokens; `endless`: any number of tokens."""
        self.chunk, self.shares, self.drafts = chunk, False, None
        self._most = sys.maxsize if endless else self._most

    def score(self, top: int) -> None:
        """Note the log-probabilities of the prompt too. It runs as a whole, since cached blocks have no logits."""
        self.shares, self.drafts = False, None
        self.prompt_logprobs, self._top = [None], top

    def warm(self) -> None:
        """Run the prompt, and draw nothing."""
        self._warms = True

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """The log-probabilities of the new tokens; None: they are not reported."""
        return self._request.logprobs

    @property
    def segments(self) -> list[SegmentUse] | None:
        """The use of each segment; None: there are none."""
        return self._request.segments

    @property
    def num_new(self) -> int:
        """New tokens so far."""
        return self.num_tokens - self.num_prompt

    @property
    def new_tokens(self) -> list[int]:
        """The new tokens so far."""
        new: list[int] = self.tokens[self.num_prompt :].tolist()
        return new

    @property
    def text(self) -> str | None:
        """The text of the new tokens, all of it when the work has ended; None without a tokenizer."""
        stream = self.new_text()
        return None if stream is None else stream.extend(self.new_tokens, ended=self.reason is not None)

    def new_text(self) -> TextStream | None:
        """A stream for the text of the new tokens, all of which are to be added; None without a tokenizer."""
        return None if self._make_text is None else self._make_text()

    def most_drafts(self, most: int) -> int:
        if not self.num_new:
            return 0
        return min(most, self._request.params.max_tokens - self.num_new - 1, self._most - self.num_tokens)

    @property
    def matcher(self) -> Matcher | None:
        return self._sampler.matcher

    def rows_due(self, count: int) -> int:
        if self._is_scoring:
            return count
        return 0 if self._warms else max(0, count - self.remaining + 1)

    @property
    def _is_scoring(self) -> bool:
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt

    def masks_due(self, rows: int) -> list[tuple[Matcher, list[int]]]:
        matcher = self.matcher
        return [] if matcher is None else [(matcher, self.draft[: rows - 1].tolist())]

    def take(self, logits: Float32, start: int) -> int:
        if self._is_scoring:
            logits = self._scored(logits, start)
        if self._warms or not len(logits):
            return 0
        draft, held = self.draft[: len(logits) - 1].tolist(), 0
        for row in logits:
            token = self._draw(row)
            if held == len(draft) or token != draft[held]:
                break
            held += 1
            if self.ending() is not None:
                break
        if self.drafts is not None:
            self.drafts.learn(len(draft), held)
        return held

    def _scored(self, logits: Float32, start: int) -> Float32:
        """Note the log-probabilities of the tokens of the prompt behind `start`; the logits of what follows it."""
        assert self.prompt_logprobs is not None
        del self.prompt_logprobs[start + 1 :]  # of a piece that runs again
        tokens = self.tokens[start + 1 : self.num_prompt].tolist()
        for row, token in zip(logits, tokens, strict=False):
            self.prompt_logprobs.append(logprobs_of(row, token, self._top))
        return logits[len(tokens) :]

    def _draw(self, logits: Float32) -> int | None:
        """Draw the next token; None: it ends the text."""
        self._drawing = True
        token = self._sampler.sample(logits)
        if token in self._request.stop_tokens:
            self._stopped = True
            return None
        self._request.observe(token, logits)
        if self._watched is not None:
            self._watched.extend([token], ended=False)
        self.add(token)
        self._drawing = False
        return token

    def ending(self) -> FinishReason | None:
        if self._warms:
            return "length" if self.computed == self.num_tokens else None
        if self._stopped or self._sampler.is_complete or (self._watched is not None and self._watched.stopped):
            return "stop"
        if self.num_new < self._request.params.max_tokens and self.num_tokens <= self._most:
            return None
        if self._watched is not None:
            self._watched.extend((), ended=True)  # a stop string may be in the text that waited
        return "stop" if self._watched is not None and self._watched.stopped else "length"

    def mend(self) -> None:
        if not self._drawing:
            return
        self._sampler = self._sampler.resumed(self.tokens.copy(), self.num_new)
        if self.logprobs is not None:
            del self.logprobs[self.num_new :]
        if self._make_watch is not None:
            self._watched = self._make_watch()
            self._watched.extend(self.new_tokens, ended=False)
        self._stopped = self._drawing = False


class Scoring(Work):
    """A text whose tokens get their log-probabilities. It runs as a whole, since cached blocks have no logits.

    Args:
        tokens: at least two.
        chunk: as of `Work`.

    Attributes:
        scores: float32 `(len(tokens) - 1,)`, of each token after the first.
    """

    shares = False

    def __init__(self, tokens: Tokens, chunk: int = 0) -> None:
        super().__init__(tokens[:-1], None)
        self.chunk = chunk
        self._targets = tokens[1:]
        self.scores = np.empty(len(tokens) - 1, np.float32)
        self._scored = 0

    def rows_due(self, count: int) -> int:
        return count

    def take(self, logits: Float32, start: int) -> int:
        stop = start + len(logits)
        self.scores[start:stop] = log_probabilities(logits, self._targets[start:stop])
        self._scored = stop
        return 0

    def ending(self) -> FinishReason | None:
        return "length" if self._scored == self.num_tokens else None

    def mend(self) -> None:
        """Nothing: a piece that runs again writes the same scores."""


class Reading(Work):
    """A text whose rows are read.

    Args:
        rows: reads them.
        namespace: as of `Work`.
        whole: whether it runs in one piece, and shares nothing.
    """

    def __init__(self, rows: TextRows, namespace: Hashable = None, *, whole: bool = False) -> None:
        super().__init__(rows.tokens, namespace)
        self._rows, self.head, self.shares, self.parts_at = rows, rows.head, rows.shares and not whole, rows.parts_at
        self.chunk = len(rows.tokens) if whole else 0

    def rows_due(self, count: int) -> int:
        return count if self._rows.every else max(0, count - self.remaining + 1)

    def logits_due(self, count: int) -> int:
        return self.rows_due(count) if self.head else 0

    def take(self, logits: Float32, start: int) -> int:
        self._rows.take(logits, start)
        return 0

    def ending(self) -> FinishReason | None:
        return None if self._rows.result is None else "length"

    def mend(self) -> None:
        """Nothing: rows that come again have the same bits."""
