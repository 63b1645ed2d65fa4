"""A workload like that of a server: several users share one file, and each asks for several continuations of it.

The shared system prompt is a source file of this library, which every installation has. The demo model writes Python,
so the turns are beginnings of code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvcache

__all__ = ["MAX_TOKENS", "Conversation", "conversations", "system_prompt"]

MAX_TOKENS = 40  # new tokens per turn
SYSTEM_CHARACTERS = 4200  # more than a thousand tokens

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
    """The text at the start of every conversation."""
    path = Path(kvcache.__file__).parent / "handle.py"
    return path.read_text(encoding="utf-8")[:SYSTEM_CHARACTERS]


@dataclass
class Conversation:
    """One user's text so far, in tokens.

    Attributes:
        user: a name.
        tokens: system prompt, turns and answers so far.
        turns: token ids of the user's remaining turns.
    """

    user: str
    tokens: list[int]
    turns: list[list[int]] = field(default_factory=list)


def conversations(tokenizer: Any) -> list[list[Conversation]]:
    """New conversations, as a list of rounds; in each round every user sends one turn."""
    shared = tokenizer.encode(system_prompt()).ids
    people = [
        Conversation(user, list(shared), [tokenizer.encode(turn).ids for turn in turns])
        for user, turns in TURNS.items()
    ]
    return [list(people) for _ in range(max(map(len, TURNS.values())))]
