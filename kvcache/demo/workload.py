"""A serving-like workload: several users with one file open, each asking for several continuations of it.

The shared system prompt is a source file of this library, which every installation has; the demo model writes
Python, so the turns are beginnings of code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvcache

__all__ = ["MAX_TOKENS", "Conversation", "conversations", "system_prompt"]

MAX_TOKENS = 40  # new tokens per turn
SYSTEM_CHARACTERS = 4200  # a thousand tokens and more

TURNS = {
    "ada": [
        '\n\ndef free_blocks(self):\n    """Return',
        "\n\ndef test_free_blocks(self):\n    self.assertEqual(",
        "\n\n# The next function",
    ],
    "ben": [
        "\n\nclass BlockIterator:\n    def __init__(self, table):\n",
        "\n\n    def __iter__(self):\n",
        "\n\n    def __repr__(self):\n        return",
    ],
    "cleo": [
        '\n\nimport argparse\n\ndef main():\n    parser = argparse.ArgumentParser(description="',
        "\n    parser.add_argument(",
        "\n    options = parser.parse_args()\n    if options.verbose:\n",
    ],
    "dan": [
        "\n\ndef read_table(filename):\n    with open(",
        "\n\ndef write_table(table, filename):\n",
        '\n    """Write the table',
    ],
}


def system_prompt() -> str:
    """The text that all users share."""
    path = Path(kvcache.__file__).parent / "handle.py"
    return path.read_text(encoding="utf-8")[:SYSTEM_CHARACTERS]


@dataclass
class Conversation:
    """One user's text so far, in tokens.

    Attributes:
        user: a name.
        tokens: system prompt, turns and answers.
        turns: token ids of what the user has still to say.
    """

    user: str
    tokens: list[int]
    turns: list[list[int]] = field(default_factory=list)


def conversations(tokenizer: Any) -> list[list[Conversation]]:
    """Fresh conversations as the requests arrive: rounds, in each of which every user speaks once."""
    shared = tokenizer.encode(system_prompt()).ids
    people = [
        Conversation(user, list(shared), [tokenizer.encode(turn).ids for turn in turns])
        for user, turns in TURNS.items()
    ]
    return [list(people) for _ in range(max(map(len, TURNS.values())))]
