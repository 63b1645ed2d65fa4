"""Workloads of many users on one machine: trees of turns that arrive over time.

A turn's prompt is all of the conversation before it, the answers included, and some new tokens. A turn with several
next ones is an agent that branches: they begin together when it has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

__all__ = ["WORKLOADS", "Turn", "Workload", "at_once", "poisson"]

Tokens = npt.NDArray[np.uint32]
Generator = np.random.Generator


@dataclass
class Turn:
    """One request.

    Attributes:
        tokens: new ones of the prompt.
        new: tokens of the answer.
        pause: seconds from the end of the turn before to this request.
        following: the turns that continue this one.
    """

    tokens: Tokens
    new: int
    pause: float = 0.0
    following: list[Turn] = field(default_factory=list)

    def __len__(self) -> int:
        return 1 + sum(map(len, self.following))


@dataclass
class Workload:
    """First turns, and the second at which each of them arrives."""

    roots: list[Turn]
    arrivals: list[float]

    def __len__(self) -> int:
        return sum(map(len, self.roots))

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation."""

        def length(turn: Turn) -> int:
            return len(turn.tokens) + turn.new + max(map(length, turn.following), default=0)

        return max(map(length, self.roots))

    @property
    def size(self) -> int:
        """Tokens of all turns together, each turn's own."""

        def own(turn: Turn) -> int:
            return len(turn.tokens) + turn.new + sum(map(own, turn.following))

        return sum(map(own, self.roots))


def at_once(roots: list[Turn]) -> Workload:
    """All first turns at the beginning."""
    return Workload(roots, [0.0] * len(roots))


def poisson(roots: list[Turn], rate: float, rng: Generator) -> Workload:
    """First turns at random times, `rate` of them per second."""
    return Workload(roots, np.cumsum(rng.exponential(1 / rate, len(roots))).tolist())


def _ids(rng: Generator, n: int) -> Tokens:
    return rng.integers(3, 4000, n).astype(np.uint32)


def chats(rng: Generator, count: int) -> list[Turn]:
    """Conversations of four turns over one system prompt of 400 tokens: 20 to 100 new tokens, answers of 20 to 80."""
    system, roots = _ids(rng, 400), []
    for _ in range(count):
        turns = [Turn(_ids(rng, int(rng.integers(20, 101))), int(rng.integers(20, 81)), 0.5) for _ in range(4)]
        turns[0].tokens, turns[0].pause = np.concatenate([system, turns[0].tokens]), 0.0
        for turn, following in pairwise(turns):
            turn.following.append(following)
        roots.append(turns[0])
    return roots


def agents(rng: Generator, count: int) -> list[Turn]:
    """Agents: a prompt of 800 tokens, then three rounds in which the last step tries four branches of 60 tokens."""

    def branches(depth: int) -> list[Turn]:
        made = [Turn(_ids(rng, 60), 24) for _ in range(4)]
        if depth > 1:
            made[0].following = branches(depth - 1)
        return made

    return [Turn(_ids(rng, 800), 24, following=branches(3)) for _ in range(count)]


def documents(rng: Generator, count: int) -> list[Turn]:
    """A quarter are documents of 3,000 tokens with a summary of 60; the others short chats, 60 tokens and 40 new."""
    return [Turn(_ids(rng, 60), 40) if i % 4 else Turn(_ids(rng, 3000), 60) for i in range(count)]


def edits(rng: Generator, count: int) -> list[Turn]:
    """Prompts in which a passage of 80 tokens stands three times, and 96 new tokens: answers that repeat the prompt."""
    roots = []
    for _ in range(count):
        passage = _ids(rng, 80)
        roots.append(Turn(np.concatenate([_ids(rng, 40), *[passage] * 3]), 96))
    return roots


# name: (what makes `count` first turns, how many, whether they arrive at a rate)
WORKLOADS: dict[str, tuple[Callable[[Generator, int], list[Turn]], int, bool]] = {
    "chats": (chats, 24, True),
    "agents": (agents, 3, False),
    "documents": (documents, 12, False),
    "edits": (edits, 8, False),
}
