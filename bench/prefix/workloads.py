"""Request traces in pages: synthetic ones from a seed, or from a file in Mooncake's format.

A page is named by a number that identifies the page **and all pages before it**, like a chained hash: the common
prefix of two requests is the common prefix of their lists.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np

__all__ = ["Mix", "Request", "Trace", "from_mooncake", "synthetic"]


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        pages: names of the pages of prompt and answer.
        num_prompt: how many of these belong to the prompt and can be cached already.
        arrival: seconds after the first request.
        prompt_tokens, answer_tokens: the last page of the prompt may have fewer tokens than others.
    """

    pages: list[int]
    num_prompt: int
    arrival: float
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival."""

    name: str
    page_size: int
    requests: list[Request]

    @property
    def num_pages(self) -> int:
        """The number of different pages."""
        return len({page for request in self.requests for page in request.pages})


@dataclass(frozen=True)
class Mix:
    """The parameters of a synthetic trace; lengths in tokens, means of exponential distributions.

    Attributes:
        num_requests, seed: number of requests; seed of the random numbers.
        systems, zipf, system_tokens: number of system prompts, exponent of their Zipf distribution, their length.
        chats, turn_tokens, answer_tokens, turns: share of chat requests; lengths; turns of a chat.
        agents, branches, task_tokens: share of agent requests; branches of a task from one context; its length.
        documents, document_tokens: share of long prompts that are never repeated; their length.
    """

    num_requests: int = 6_000
    seed: int = 0
    systems: int = 64
    zipf: float = 1.1
    system_tokens: int = 1_200
    chats: float = 0.6
    turns: float = 5
    turn_tokens: int = 120
    answer_tokens: int = 250
    agents: float = 0.25
    branches: float = 6
    task_tokens: int = 1_500
    documents: float = 0.15
    document_tokens: int = 6_000


class _Pages:
    """A source of names for new pages."""

    def __init__(self, page_size: int) -> None:
        self.page_size, self.used = page_size, 0

    def fresh(self, tokens: float) -> list[int]:
        count = max(1, round(tokens / self.page_size))
        self.used += count
        return list(range(self.used - count, self.used))


def synthetic(mix: Mix, page_size: int = 16) -> Trace:
    """Chats of several turns, agents that branch, and documents, over system prompts of Zipf popularity.

    One arrives in a second, on average.
    """
    rng = np.random.default_rng(mix.seed)
    arrivals = np.random.default_rng((mix.seed, 1)).exponential(1.0, mix.num_requests).cumsum().tolist()
    pages = _Pages(page_size)
    systems = [pages.fresh(rng.exponential(mix.system_tokens)) for _ in range(mix.systems)]
    weights = 1 / np.arange(1, mix.systems + 1) ** mix.zipf
    weights /= weights.sum()
    open_chats: list[tuple[list[int], int]] = []
    open_tasks: list[tuple[list[int], int]] = []
    requests = []

    def system() -> list[int]:
        return systems[rng.choice(mix.systems, p=weights)]

    def take(waiting: list[tuple[list[int], int]], start: float) -> tuple[list[int], int] | None:
        """Pick an open chat or task, recent ones with a higher probability; None: start a new one."""
        if not waiting or rng.random() < start:
            return None
        return waiting.pop(-1 - min(int(rng.exponential(len(waiting) / 3 + 1)), len(waiting) - 1))

    kinds = rng.choice(3, mix.num_requests, p=np.array([mix.chats, mix.agents, mix.documents]))
    for kind in kinds:
        if kind == 0:
            text, turns = take(open_chats, 1 / mix.turns) or (system(), 1 + rng.poisson(mix.turns - 1))
            prompt = text + pages.fresh(rng.exponential(mix.turn_tokens))
            answered = prompt + pages.fresh(rng.exponential(mix.answer_tokens))
            if turns > 1:
                open_chats.append((answered, turns - 1))
        elif kind == 1:
            context, left = take(open_tasks, 1 / mix.branches) or (
                system() + pages.fresh(rng.exponential(mix.task_tokens)),
                1 + rng.poisson(mix.branches - 1),
            )
            prompt = context + pages.fresh(rng.exponential(mix.turn_tokens))
            answered = prompt + pages.fresh(rng.exponential(mix.answer_tokens))
            if left > 1:
                open_tasks.append((context if rng.random() < 0.7 else answered, left - 1))
        else:
            prompt = system() + pages.fresh(rng.exponential(mix.document_tokens))
            answered = prompt + pages.fresh(rng.exponential(mix.answer_tokens))
        new = (len(answered) - len(prompt)) * page_size
        requests.append(Request(answered, len(prompt), arrivals[len(requests)], len(prompt) * page_size, new))
    return Trace("synthetic: " + ", ".join(f"{k} {v:g}" for k, v in asdict(mix).items()), page_size, requests)


def from_mooncake(path: str, page_size: int = 512) -> Trace:
    """A trace of hashed blocks (one JSON object per line: `hash_ids`, `input_length`, `output_length`)."""
    requests = []
    fresh = 1 << 31  # names of answers, beyond those of the trace
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if not line.strip():
                continue
            record = json.loads(line)
            prompt = [int(block) for block in record["hash_ids"]]
            new = int(record.get("output_length", 0))
            answer = list(range(fresh, fresh + max(0, round(new / page_size))))
            tokens, arrival = int(record.get("input_length", len(prompt) * page_size)), record.get("timestamp", 0) / 1e3
            requests.append(Request(prompt + answer, len(prompt), arrival, tokens, new))
            fresh += len(answer)
    return Trace(path, page_size, requests)
