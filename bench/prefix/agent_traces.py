"""Traces of agents, from a seed: shared system prompts, pauses of tools and of people, branches, clears.

A session is a client's: a system prompt with tools, a task, and turns that each add what a tool or a person says. Some
turns start subagents, which fork the context or begin from a system prompt of their own. A context that grows too long
is replaced by a summary behind the system prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["AgentMix", "AgentRequest", "agent_trace"]


@dataclass(frozen=True)
class AgentMix:
    """The parameters of a trace; lengths in tokens, pauses in seconds.

    Attributes:
        sessions, seed, page_size: number of sessions, seed of the random numbers, tokens of a page.
        clients, system_tokens: number of system prompts, and the least and the most tokens of one.
        every: seconds between two new sessions, on average.
        turns, added, answer: means of the turns of a session, and of the tokens of a turn and its answer.
        tool_pause, person_pause, persons: medians of pauses; the share of those of persons.
        branching, branches, branch_turns: the share of turns that start subagents, the most of these, their turns.
        longest: tokens of a context that is cleared.
    """

    sessions: int = 80
    seed: int = 0
    page_size: int = 64
    clients: int = 4
    system_tokens: tuple[int, int] = (4_000, 14_000)
    every: float = 30.0
    turns: float = 25.0
    added: float = 900.0
    answer: float = 200.0
    tool_pause: float = 5.0
    person_pause: float = 90.0
    persons: float = 0.2
    branching: float = 0.08
    branches: int = 3
    branch_turns: tuple[int, int] = (3, 8)
    longest: int = 40_000


@dataclass
class AgentRequest:
    """One request.

    Attributes:
        time: of its arrival.
        pages: the names of its pages, those of the answer too; a name says all pages before it.
        num_prompt: how many of them are of the prompt.
        back: seconds until its text comes back, where a tool runs; None: nobody knows.
        head: None: its text goes on; else it has ended, and so many of its first pages are another's.
    """

    time: float
    pages: list[int]
    num_prompt: int
    back: float | None = None
    head: int | None = None


class _Writer:
    """Writes the requests of a trace."""

    def __init__(self, mix: AgentMix) -> None:
        self.mix, self.rng, self.used = mix, np.random.default_rng(mix.seed), 0
        self.requests: list[AgentRequest] = []

    def fresh(self, tokens: float) -> list[int]:
        count = max(1, round(tokens / self.mix.page_size))
        self.used += count
        return list(range(self.used - count, self.used))

    def pause(self, median: float) -> float:
        return float(median * np.exp(self.rng.normal(0.0, 1.0)))

    def turn(self, time: float, context: list[int]) -> tuple[AgentRequest, float]:
        """Ask once; the request, and when its answer has ended."""
        prompt = context + self.fresh(self.rng.exponential(self.mix.added))
        pages = prompt + self.fresh(self.rng.exponential(self.mix.answer))
        self.requests.append(AgentRequest(time, pages, len(prompt)))
        return self.requests[-1], time + 2.0 + (len(pages) - len(context)) * 0.2

    def subagent(self, time: float, context: list[int], head: int) -> float:
        """Run the turns of a branch behind its context, of which `head` pages are another's; when it has ended."""
        mix = self.mix
        for _ in range(int(self.rng.integers(*mix.branch_turns))):
            request, time = self.turn(time, context)
            request.back = self.pause(mix.tool_pause)
            context, time = request.pages, time + request.back
        request.back, request.head = None, head
        return time

    def session(self, time: float, system: list[int], other: list[int]) -> None:
        """Run a session of a client whose subagents begin with a system prompt of their own, or fork the context."""
        mix = self.mix
        context = system + self.fresh(self.rng.exponential(1_500))
        for _ in range(1 + int(self.rng.geometric(1 / mix.turns))):
            request, time = self.turn(time, context)
            context = request.pages
            if self.rng.random() < mix.branching:
                ends = []
                for _ in range(int(self.rng.integers(1, mix.branches + 1))):
                    forks = self.rng.random() < 0.5
                    begin = context if forks else other
                    ends.append(self.subagent(time, begin + self.fresh(self.rng.exponential(600)), len(begin)))
                time = max(ends)
            elif self.rng.random() < mix.persons:
                time += self.pause(mix.person_pause)
            else:
                request.back = self.pause(mix.tool_pause)
                time += request.back
            if len(context) * mix.page_size > mix.longest:
                request.back, request.head = None, len(system)
                context = system + self.fresh(1_500)
        request.back, request.head = None, len(system)


def agent_trace(mix: AgentMix) -> list[AgentRequest]:
    """The requests of all sessions in the order of their arrival."""
    writer = _Writer(mix)
    systems = [(writer.fresh(writer.rng.integers(*mix.system_tokens)), writer.fresh(3_000)) for _ in range(mix.clients)]
    weights = 1 / np.arange(1, mix.clients + 1)
    begin = 0.0
    for _ in range(mix.sessions):
        begin += float(writer.rng.exponential(mix.every))
        writer.session(begin, *systems[writer.rng.choice(mix.clients, p=weights / weights.sum())])
    return sorted(writer.requests, key=lambda request: request.time)
