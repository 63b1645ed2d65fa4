"""`Worker`: one server of a fleet. Its index of prefixes is the library's own; its time is that of `Costs`.

A page of the trace is one page of the index, and its name is the token: names say what comes before a page too, so
lookups, insertions and evictions are those of `PrefixCache` over pages of any size. A prompt holds the pages of its
answer from its start on. One prompt runs at a time; answers are written meanwhile.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.fleet.costs import Costs
from bench.prefix.workloads import Request
from kvcache.core.block_pool import BlockPool
from kvcache.prefix.index.prefix_index import PrefixIndex
from kvcache.prefix.index.slots import Slots
from kvcache.trie.trie import TokenTrie

__all__ = ["Job", "Memory", "Worker"]

RUNNING = 64  # answers that a server writes at a time
_SOON = 1e-6  # seconds, or steps: what is due within these is due now


@dataclass(eq=False)
class Job:
    """A request on its way.

    Attributes:
        names: of its pages, those of the answer after those of the prompt.
        found: pages of the prompt that the worker had when it began.
        stored: pages after these that the shared store had.
        worker: the worker that got it.
        load: the seconds that the router expects of it.
        first: when its first token came.
    """

    request: Request
    names: npt.NDArray[np.uint32]
    page_size: int
    found: int = 0
    stored: int = 0
    worker: int = -1
    load: float = 0.0
    first: float = 0.0
    claims: list[Any] = field(default_factory=list)

    @property
    def cached(self) -> int:
        """Tokens of the prompt that do not run; the last one always does."""
        return self.tokens(self.found + self.stored)

    def tokens(self, pages: int) -> int:
        """Tokens that a hit on `pages` pages of the prompt spares."""
        return min(pages * self.page_size, self.request.prompt_tokens - 1)


class Memory:
    """The pages of one worker.

    Attributes:
        evicted: names of pages that have left, until the reader of events takes them.
    """

    def __init__(self, num_pages: int) -> None:
        self.slots = Slots([BlockPool(num_pages)])
        self.index = PrefixIndex(TokenTrie(1), self.slots)
        self.slots.reserve(num_pages)
        self.evicted: list[int] = []

    def begin(self, job: Job) -> bool:
        """Hold the pages of a prompt that are cached, and take the others; False: there is no room."""
        prompt, index = job.names[: job.request.num_prompt], self.index
        head = index.head(prompt)
        found = 0 if head is None else len(head)
        if head is not None:
            head.keep()
        needed = len(job.names) - found
        while (room := self.slots.room(needed)) < needed:
            gone = index.evict(needed - room)
            if gone is None:
                if head is not None:
                    head.release()
                return False
            self.evicted += gone.tokens[len(gone.tokens) - len(gone) :].tolist()
            gone.release()
        fresh = [self.slots.take(len(prompt) - found), self.slots.take(len(job.names) - len(prompt))]
        job.found, job.claims = found, [head, *fresh]
        for claim in job.claims[1:]:
            claim.keep()
        return True

    def name_prompt(self, job: Job) -> None:
        """Cache the pages of a prompt that has run."""
        self._name(job, job.names[: job.request.num_prompt], job.claims[1], job.claims[0])

    def end(self, job: Job) -> None:
        """Cache the pages of an answer, and hold nothing of it any more."""
        if len(job.claims[2]):
            self._name(job, job.names, job.claims[2], self.index.head(job.names[: job.request.num_prompt]))
        for claim in job.claims:
            if claim is not None:
                claim.release()
        job.claims = []

    def _name(self, job: Job, names: npt.NDArray[np.uint32], fresh: Any, head: Any) -> None:
        if len(fresh):
            self.index.insert(names, fresh, None, head)
            job.claims.append(self.index.head(names))
            job.claims[-1].keep()


class Worker:
    """A server between two events, in which it proceeds at one rate.

    Attributes:
        now: until when it has proceeded.
        queue: jobs that wait.
        prompt: the job whose prompt runs; `left` seconds of it are to be done, of which `reads` are the store's.
    """

    def __init__(self, costs: Costs, num_pages: int) -> None:
        self.costs, self.memory = costs, Memory(num_pages)
        self.now, self.queue = 0.0, deque[Job]()
        self.prompt: Job | None = None
        self.left = self.reads = self.steps = 0.0
        self._answers: list[tuple[float, int, Job]] = []  # a heap: the step after which each ends
        self._context, self._count, self.version = 0, 0, 0

    def _rates(self) -> tuple[float, float]:
        running = self.prompt is not None and not self._reads
        return self.costs.shares(len(self._answers), self._context, prompt_runs=running)

    @property
    def _reads(self) -> bool:
        return self.reads > _SOON

    @property
    def computed(self) -> Job | None:
        """The job whose prompt has just run."""
        return self.prompt if not self._reads and self.left <= _SOON else None

    def proceed(self, now: float) -> None:
        """Let the time until `now` pass; no event lies between."""
        proceeds, steps = self._rates()
        seconds, self.now = now - self.now, now
        self.steps += steps * seconds
        if self.prompt is not None:
            if self._reads:
                self.reads -= seconds
            else:
                self.left -= proceeds * seconds

    def next_event(self) -> float:
        """When its prompt or its first answer ends, or a read of the store; infinity: nothing runs."""
        proceeds, steps = self._rates()
        ends = [np.inf]
        if self.prompt is not None:
            ends.append(self.now + (self.reads if self._reads else self.left / proceeds))
        if self._answers:
            ends.append(self.now + max(0.0, self._answers[0][0] - self.steps) / steps)
        return float(min(ends))

    @property
    def running(self) -> int:
        """Jobs that have begun."""
        return len(self._answers) + (self.prompt is not None)

    def may_begin(self) -> bool:
        """Whether the first job that waits may begin, memory aside."""
        return bool(self.queue) and self.prompt is None and len(self._answers) < RUNNING

    def write(self, job: Job) -> None:
        """Begin the answer of a job whose prompt has run: its first token is there."""
        self._count += 1
        self._context += job.request.prompt_tokens
        heapq.heappush(self._answers, (self.steps + max(0, job.request.answer_tokens - 1), self._count, job))

    def written(self) -> list[Job]:
        """The jobs whose answers are whole by now; they leave."""
        ended = []
        while self._answers and self._answers[0][0] <= self.steps + _SOON:
            ended.append(heapq.heappop(self._answers)[2])
            self._context -= ended[-1].request.prompt_tokens
        return ended
