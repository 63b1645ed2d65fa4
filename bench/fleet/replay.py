"""`replay`: a trace through a fleet of workers, with or without a shared store, by one way of routing."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from bench.fleet.costs import Costs
from bench.fleet.router import PrefixRouter, RoundRobin, Router
from bench.fleet.store import Store
from bench.fleet.worker import Job, Worker
from bench.prefix.workloads import Trace

__all__ = ["WAYS", "Fleet", "Outcome", "Replay", "replay"]

# name -> (whether requests go where their prefix is, whether there is a shared store)
WAYS = {
    "round robin": (False, False), "prefix routing": (True, False), "shared store": (False, True), "both": (True, True),
}


@dataclass(frozen=True)
class Fleet:
    """Servers and a store.

    Attributes:
        workers: their number.
        worker_pages, store_pages: pages of the trace that a worker, and the store, have room for.
        store_nodes: servers of the store.
        load: the share of the workers' time that all prompts would take if nothing was cached; arrivals are stretched
            to that.
    """

    workers: int
    worker_pages: int
    store_pages: int
    store_nodes: int = 1
    load: float = 0.6


@dataclass(frozen=True)
class Outcome:
    """Measurements of a replay.

    Attributes:
        cached: for each request, tokens of its prompt that did not run.
        stored: for each request, those of them that came from the store.
        first: for each request, seconds to its first token.
        worker: the worker that got each request.
        prompt_tokens: of all requests.
        read, written: bytes from and to the store.
    """

    cached: list[int]
    stored: list[int]
    first: list[float]
    worker: list[int]
    prompt_tokens: int
    read: int
    written: int

    @property
    def hit_rate(self) -> float:
        """The share of the tokens of prompts that did not run."""
        return sum(self.cached) / self.prompt_tokens


class Replay:
    """The events of a replay in their order: arrivals, and what workers end."""

    def __init__(self, trace: Trace, fleet: Fleet, costs: Costs, routed: bool, stored: bool) -> None:
        self.costs, self.size = costs, trace.page_size
        self.store = Store(costs, fleet.store_pages if stored else 0, trace.page_size, fleet.store_nodes)
        self.workers = [Worker(costs, fleet.worker_pages) for _ in range(fleet.workers)]
        self.router: Router = PrefixRouter(fleet.workers, costs) if routed else RoundRobin(fleet.workers)
        busy = sum(costs.prompt(request.prompt_tokens) for request in trace.requests)
        span = trace.requests[-1].arrival or 1.0
        self.stretch = busy / (fleet.load * fleet.workers * span)
        self.jobs = [Job(request, np.array(request.pages, np.uint32), trace.page_size) for request in trace.requests]
        self.events: list[tuple[float, int, int, int]] = [  # when, worker or -1, its version or the number of the job
            (request.arrival * self.stretch, -1, number, 0) for number, request in enumerate(trace.requests)
        ]

    def run(self) -> None:
        """All of it."""
        heapq.heapify(self.events)
        while self.events:
            now, number, version, _ = heapq.heappop(self.events)
            if number < 0:
                self._arrive(self.jobs[version], now)
            elif self.workers[number].version == version:
                self._advance(number, now)

    def _arrive(self, job: Job, now: float) -> None:
        request, prompt = job.request, job.request.pages[: job.request.num_prompt]
        stored = self.store.has(prompt, now)
        number, job.load = self.router.choose(prompt, request.prompt_tokens, self.size, stored, now)
        job.worker = number
        self.workers[number].queue.append(job)
        self._advance(number, now)

    def _advance(self, number: int, now: float) -> None:
        """Let a worker do what is due, and note its next event."""
        worker = self.workers[number]
        worker.proceed(now)
        if (job := worker.computed) is not None:
            self._computed(number, job, now)
        for job in worker.written():
            worker.memory.end(job)
            answer = job.request.pages[job.request.num_prompt :]
            self.store.write(answer, now)
            self._tell(number, answer, now)
        while worker.may_begin() and worker.memory.begin(worker.queue[0]):
            self._begin(number, worker.queue.popleft(), now)
        worker.version += 1
        if (then := worker.next_event()) < np.inf:
            heapq.heappush(self.events, (max(then, now), number, worker.version, 0))
        elif worker.queue:
            raise ValueError("worker_pages: expected room for the longest request, got less")

    def _begin(self, number: int, job: Job, now: float) -> None:
        worker, request = self.workers[number], job.request
        prompt = request.pages[: request.num_prompt]
        had = job.cached
        have = self.store.has(prompt, now, job.found)
        spared = job.tokens(have) - had
        tokens, seconds = request.prompt_tokens, self.costs.prompt
        computing = seconds(tokens, had) - seconds(tokens, had + spared)
        job.stored, worker.reads = self.store.fetch(prompt, job.found, spared, computing, now)
        worker.prompt, worker.left = job, seconds(tokens, job.cached)
        self._tell(number, [], now)

    def _computed(self, number: int, job: Job, now: float) -> None:
        worker, prompt = self.workers[number], job.request.pages[: job.request.num_prompt]
        worker.prompt, job.first = None, now
        worker.memory.name_prompt(job)
        worker.write(job)
        self.router.done(number, job.load)
        self.store.write(prompt, now)
        self._tell(number, prompt[job.found :], now)

    def _tell(self, number: int, stored: list[int], now: float) -> None:
        memory = self.workers[number].memory
        if stored or memory.evicted:
            self.router.tell(now, number, stored, memory.evicted)
            memory.evicted = []


def replay(trace: Trace, fleet: Fleet, way: str, costs: Costs) -> Outcome:
    """Replay a trace in one of `WAYS`.

    Raises:
        ValueError: a worker has no room for the longest request.
    """
    each = Replay(trace, fleet, costs, *WAYS[way])
    each.run()
    jobs = each.jobs
    had = [job.tokens(job.found) for job in jobs]
    return Outcome(
        [job.cached for job in jobs], [job.cached - own for job, own in zip(jobs, had, strict=True)],
        [job.first - job.request.arrival * each.stretch for job in jobs], [job.worker for job in jobs],
        sum(job.request.prompt_tokens for job in jobs), each.store.read * costs.token_bytes,
        each.store.written * costs.token_bytes,
    )
