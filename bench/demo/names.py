"""Made-up identifiers for the copy task: a model sees one once and must reproduce it."""

from __future__ import annotations

import random
import re
from typing import Any

__all__ = ["TEMPLATES", "name_pieces", "unseen_name"]

#: Definition lines.  The text before the name is the cue; it occurs in no other line of a prompt.
TEMPLATES = (
    "        self.fallback_backend = {}(options)\n",
    "from internal.helpers import {}\n",
    "# The entry point of this module is {}.\n",
    "    DEFAULT_CALLBACK = {}\n",
    '        raise RuntimeError("missing attribute {}")\n',
    "    registry.add_plugin(name={}, enabled=True)\n",
)


def name_pieces(tok: Any) -> list[str]:
    """The vocabulary pieces from which names are composed."""
    return [piece for piece in sorted(tok.get_vocab()) if re.fullmatch(r"[a-z]{2,5}", piece)]


def unseen_name(tok: Any, pieces: list[str], seen: str, rng: random.Random) -> str:
    """A name of random vocabulary pieces that does not occur anywhere in ``seen``."""
    while True:
        name = "".join(rng.sample(pieces, rng.randint(3, 5)))
        if 3 <= len(tok.encode(name).ids) <= 6 and name not in seen:
            return name
