"""`Conversations`: texts of several chats with common beginnings, and clients that send them turn by turn."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["Conversations"]

_WORDS = ("walk", "path", "node", "index", "value", "reader", "count", "buffer", "token", "parse", "left", "right")


@dataclass(frozen=True)
class Conversations:
    """Chats of some clients: each prompt is the one before it and a few lines more, whatever was answered.

    Attributes:
        count, turns: chats, and prompts of each.
        heads: different beginnings, which chats have by turns.
        head_lines, turn_lines: lines of a beginning and of a turn.
        clients: that send at a time; each has its own chats, and goes from one to another at random.
    """

    count: int = 16
    turns: int = 6
    heads: int = 4
    head_lines: int = 24
    turn_lines: int = 8
    clients: int = 4

    @property
    def num_requests(self) -> int:
        """Prompts of all chats."""
        return self.count * self.turns

    def prompts(self, client: int) -> Iterator[str]:
        """The prompts of one client in their order."""
        own = range(client, self.count, self.clients)
        left = [chat for chat in own for _ in range(self.turns)]
        random.Random(client).shuffle(left)
        texts = {chat: _lines(f"head {chat % self.heads}", self.head_lines) for chat in own}
        for number, chat in enumerate(left):
            texts[chat] += _lines(f"chat {chat} {number}", self.turn_lines)
            yield texts[chat]

    def send(self, ask: Callable[[str], tuple[int, int]]) -> tuple[int, int]:
        """Send all prompts, a thread for each client.

        Args:
            ask: sends a prompt; returns its tokens and those of them that were cached.

        Returns:
            The sums over all prompts.
        """
        found: list[tuple[int, int]] = []

        def run(client: int) -> None:
            for prompt in self.prompts(client):
                found.append(ask(prompt))

        threads = [threading.Thread(target=run, args=(client,)) for client in range(self.clients)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if len(found) != self.num_requests:
            raise RuntimeError(f"expected {self.num_requests} answers, got {len(found)}")
        return sum(tokens for tokens, _ in found), sum(cached for _, cached in found)


def _lines(seed: str, count: int) -> str:
    draw = random.Random(seed)
    return "".join(f"    {draw.choice(_WORDS)}_{draw.randrange(100)} = {draw.choice(_WORDS)}\n" for _ in range(count))
