"""Hints: what a caller knows of cached texts while no request has them. They change times, never bits.

    demote      a tool runs: the text is copied to the tiers, and what it alone has is evicted before all else
    pin         it stays for some seconds, as `keep` of a request
    prefetch    it comes back, now or in some seconds: it is read from the tiers before its request comes
    release     it has ended: what it alone has is forgotten
    share       several texts go on from one head: that stays for some seconds
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from kvcache.support.arguments import as_count, as_finite, short
from kvcache.texts.arrivals import Arrivals
from kvcache.texts.behind import Behind
from kvcache.texts.forward import Forward
from kvcache.texts.pool import Pool
from kvcache.texts.text import Text, Tokens

__all__ = ["HINTS", "MOST_TEXTS", "Hint", "HintKind", "Hinted", "demote", "head_of"]

MOST_TEXTS = 64  # of a hint
_MOST_SECONDS, _MOST_AFTER = 24 * 3600.0, 2**31


class HintKind(NamedTuple):
    """What a hint takes beside texts.

    Attributes:
        ttl: seconds that texts stay for where none are given; None: it takes none.
        resumes: whether it takes `resume_in`.
        after: whether it takes `after`.
        least: the fewest texts.
    """

    ttl: float | None = None
    resumes: bool = False
    after: bool = False
    least: int = 1

    @property
    def takes(self) -> list[str]:
        """The names of these arguments."""
        given = {"ttl": self.ttl is not None, "resume_in": self.resumes, "after": self.after}
        return [name for name, is_given in given.items() if is_given]


HINTS = {
    "demote": HintKind(after=True), "pin": HintKind(300.0), "prefetch": HintKind(60.0, resumes=True),
    "release": HintKind(after=True), "share": HintKind(300.0, least=2),
}


class Hinted(NamedTuple):
    """What is known of the texts of a hint when it is given.

    Attributes:
        action: a name of `HINTS`.
        tokens: of the texts; of `share`, of their head.
        tokens_found: those of them whose K and V are cached; 0: it changes nothing, unless tiers have some.
    """

    action: str
    tokens: int
    tokens_found: int


class Hint(NamedTuple):
    """A hint, checked.

    Attributes:
        action: a name of `HINTS`.
        texts: each with its tokens so far; for `share`, their head alone.
        ttl: seconds that they stay for.
        resume_in: seconds until they come back.
        after: how many first tokens of each stay as they are.
    """

    action: str
    texts: tuple[Text, ...]
    ttl: float
    resume_in: float
    after: int

    @classmethod
    def of(
        cls, forward: Forward, action: Any, prompts: Sequence[Tokens], namespace: Hashable = None,
        prefix: Behind | None = None, ttl: Any = None, resume_in: Any = None, after: Any = None,
    ) -> Hint:
        """Check the arguments of a hint.

        Raises:
            TypeError, ValueError: no such hint; too few or too many texts; an argument that it does not take, or no
                number.
        """
        kind = HINTS.get(action) if isinstance(action, str) else None
        if kind is None:
            raise ValueError(f"action: expected one of {', '.join(HINTS)}, got {short(action)}")
        if not kind.least <= len(prompts) <= MOST_TEXTS:
            raise ValueError(f"prompts: expected {kind.least} to {MOST_TEXTS} for {action}, got {len(prompts)}")
        for name, value in {"ttl": ttl, "resume_in": resume_in, "after": after}.items():
            if value is not None and name not in kind.takes:
                raise ValueError(f"{name}: expected none for {action}, got {short(value)}")
        seconds = kind.ttl or 0.0 if ttl is None else as_finite(ttl, "ttl", 0.0, _MOST_SECONDS)
        due = 0.0 if resume_in is None else as_finite(resume_in, "resume_in", 0.0, _MOST_SECONDS)
        first = 0 if after is None else as_count(after, "after", most=_MOST_AFTER)
        if kind.least > 1:
            prompts = [head_of(prompts)]
        texts = []
        for tokens in prompts:
            text = Text(tokens, namespace, prefix)
            text.regime = forward.regime(text.num_tokens)
            text.space = forward.space_of(text)
            texts.append(text)
        return cls(action, tuple(texts), seconds, due, first)

    def found(self, pool: Pool) -> Hinted:
        """What the index of a pool has of its texts now; waits for no step."""
        index, tokens = pool.block_index, sum(text.num_tokens for text in self.texts)
        if index is None:
            return Hinted(self.action, tokens, 0)
        found = sum(index.longest(each.tokens, each.num_tokens, each.space) for each in self.texts)
        return Hinted(self.action, tokens, found)


def head_of(prompts: Sequence[Tokens]) -> Tokens:
    """The first tokens that all prompts have."""
    head = prompts[0]
    for other in prompts[1:]:
        most = min(len(head), len(other))
        differ = head[:most] != other[:most]
        head = head[: int(differ.argmax()) if differ.any() else most]
    return head


def demote(pool: Pool, arrivals: Arrivals | None, text: Text, after: int) -> None:
    """Let what a text alone has be evicted before all else; with tiers, once they have its copy or are about to."""
    text.computed = pool.shared.longest(text)
    if arrivals is None or arrivals.copied(text):
        pool.shared.leave(text, after, at_once=False)
