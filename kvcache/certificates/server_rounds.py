"""`compared`: the answers of a server to the same prompts, cold and warm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from kvcache.certificates.seeded_prompts import words
from kvcache.certificates.server_client import ServerAnswer, ServerClient

__all__ = ["WarmComparison", "compared"]

_OWN = 24  # words behind the beginning that prompts share
_TRAFFIC = 3  # requests that share the beginning, before it is asked for again


class WarmComparison(NamedTuple):
    """The answers of one way, compared with the cold ones.

    Attributes:
        way: the name.
        answers: how many there are.
        flipped: how many have another text or other tokens.
        moved: how many have other log-probabilities or other alternatives, or are flipped.
        largest: the largest difference of a log-probability, of tokens up to the first that differs; None: the server
            gives none.
        first: the least number of tokens before the first one that differs; None: no token differs.
        cached: tokens of prompts that the server says were cached; None: it does not say.
        is_missing: whether the way needs hits, and the server says that some prompt had none.
    """

    way: str
    answers: int
    flipped: int
    moved: int
    largest: float | None
    first: int | None
    cached: int | None
    is_missing: bool


class _Prompts(NamedTuple):
    """Prompts of a run, which no other run has: so that nothing is cached at first.

    Attributes:
        seed: of the run.
        number: how many there are.
        words: of the beginning that a prompt shares with others.
    """

    seed: str
    number: int
    words: int

    def text(self, number: int, end: str = "") -> str:
        """A prompt; `end` names another one with the same beginning."""
        shared = words(f"{self.seed}, beginning {number}", self.words)
        return f"{shared} {words(f'{self.seed}, end {number}{end}', _OWN)}"


def _again(client: ServerClient, prompts: _Prompts, colds: list[ServerAnswer]) -> list[ServerAnswer]:
    """Each prompt, cold and then the same at once; the cold answers enter `colds`."""
    warm = list[ServerAnswer]()
    for number in range(prompts.number):
        colds.append(client.answer(prompts.text(number)))
        warm.append(client.answer(prompts.text(number)))
    return warm


def _after_traffic(client: ServerClient, prompts: _Prompts, colds: list[ServerAnswer]) -> list[ServerAnswer]:
    """Each prompt behind others that share its beginning."""
    warm = list[ServerAnswer]()
    for number in range(prompts.number):
        for i in range(_TRAFFIC):
            client.answer(prompts.text(number, f", {i}"))
        warm.append(client.answer(prompts.text(number)))
    return warm


def _burst(client: ServerClient, prompts: _Prompts, colds: list[ServerAnswer]) -> list[ServerAnswer]:
    """All prompts at once."""
    with ThreadPoolExecutor(prompts.number) as pool:
        return [*pool.map(client.answer, map(prompts.text, range(prompts.number)))]


# Names, how answers are asked for, and whether a prompt must be cached.
_WAYS: tuple[tuple[str, Callable[[ServerClient, _Prompts, list[ServerAnswer]], list[ServerAnswer]], bool], ...] = (
    ("the same prompt again", _again, True),
    ("behind others with its beginning", _after_traffic, True),
    ("all prompts at once", _burst, False),
)


def compared(client: ServerClient, seed: str, count: int, length: int) -> list[WarmComparison]:
    """Ask for answers in every way.

    Args:
        client: asks.
        seed: of the prompts.
        count: of prompts.
        length: words of the beginning that a prompt shares with others.

    Raises:
        OSError: the server fails.
    """
    prompts, colds, found = _Prompts(seed, count, length), list[ServerAnswer](), list[WarmComparison]()
    for name, ask, needs_hit in _WAYS:
        warm = ask(client, prompts, colds)
        found.append(_warm_comparison(name, needs_hit, colds, warm))
    return found


def _warm_comparison(
    way: str, needs_hit: bool, colds: Sequence[ServerAnswer], warm: Sequence[ServerAnswer]
) -> WarmComparison:
    pairs = [*zip(colds, warm, strict=True)]
    flips = [a.text != b.text or a.tokens != b.tokens for a, b in pairs]
    same = [_same_tokens(a, b) for a, b in pairs]
    gaps = [_largest(a, b, count) for (a, b), count in zip(pairs, same, strict=True)]
    known = [gap for gap in gaps if gap is not None]
    moved = sum((a.text, a.tokens, a.logprobs, a.tops) != (b.text, b.tokens, b.logprobs, b.tops) for a, b in pairs)
    first = min((count for flip, count in zip(flips, same, strict=True) if flip), default=None)
    cached = [b.cached for _, b in pairs if b.cached is not None]
    return WarmComparison(
        way, len(pairs), sum(flips), moved, max(known, default=None), first, sum(cached) if cached else None,
        bool(needs_hit and cached and not all(cached)),
    )


def _same_tokens(a: ServerAnswer, b: ServerAnswer) -> int:
    """The tokens before the first one that differs; of texts without tokens the characters."""
    ours, theirs = (a.tokens, b.tokens) if a.tokens and b.tokens else (tuple(a.text), tuple(b.text))
    return next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), min(len(ours), len(theirs)))


def _largest(a: ServerAnswer, b: ServerAnswer, count: int) -> float | None:
    """The largest difference of a log-probability, up to the first token that differs, whose alternatives count."""
    if not a.tokens or not b.tokens:
        return None
    values = [*zip(a.logprobs[:count], b.logprobs[:count], strict=True)]
    for ours, theirs in zip(a.tops[: count + 1], b.tops[: count + 1], strict=False):
        values += [(value, theirs[name]) for name, value in ours.items() if name in theirs]
    return max((abs(x - y) for x, y in values if x != y), default=0.0)
