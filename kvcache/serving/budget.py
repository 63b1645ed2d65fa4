"""The time that the prompts of a step may take, and the time that their tokens take: texts never wait for long."""

from __future__ import annotations

from math import sqrt

from kvcache.support.arguments import as_finite

__all__ = ["TokenBudget", "pairs"]

LEAST, MOST = 16, 512  # tokens of prompts per step
# Without texts that are being written. A token takes 1 to 2 % longer in pieces of 128 than in pieces of 512, in pieces
# of 64 it takes 4 to 6 % longer, behind few tokens and behind 15,000.
LEAST_ALONE = 128
MOST_PROMPTS = 8  # prompts of which a step may run a piece, where each may touch a block of f16 rows more than it keeps
CHEAP_ROWS = 16  # rows that a product of decodes may have for the sake of draft tokens
ENOUGH_ROWS = 64  # a product of twice as many takes twice as long
_WEIGHT = 0.25  # of the newest measurement in the running means
_GAP = 0.05  # seconds: the default
_AIM = 0.9  # share of the target that a step is meant to last: with that 99 of 100 gaps keep it, or nearly
_GAPS_ALONE = 4  # a step without texts that are being written lasts this many of them
_GUESS = 2e-3  # seconds of a token of a prompt, before one was measured
_PAIRS = 4096  # pairs that take as long as a token, before they were measured; with large networks they are more
_SHORTEST, _MOST_PAIRS = 1e-9, 1 << 20  # seconds of a token at least; pairs that take as long as a token at most
_FARTHEST = 16.0  # times that a measurement differs from the expected one at most: others may have the CPUs


class TokenBudget:
    """Follows measured times: `tokens * per_token + pairs * per_pair` seconds for a piece of a prompt.

    A pair is a token of the piece and one before it, which it reads. Beside `n` texts that are being written the
    prompts of a step have `0.9 target gap - time of the decodes`, and at least 16 tokens; without these they have
    `4 * 0.9 target gap`, and at least 128 tokens. They never have more than 512. The measurements decide when tokens
    run, never which tokens come out.

    Args:
        target_gap: seconds that a step beside decodes should last at most. None: 0.05, with at least as much time
            for prompts as for decodes.

    Attributes:
        decode_seconds: of a step of decodes alone; 0: not measured yet.
        per_token, per_pair: seconds, see above.
    """

    def __init__(self, target_gap: float | None = None) -> None:
        self._grows = target_gap is None
        self.target_gap = _GAP if target_gap is None else as_finite(target_gap, "target_gap", 0.0)
        self.decode_seconds = 0.0
        self.per_token, self.per_pair = _GUESS, _GUESS / _PAIRS
        self._is_measured = False

    def seconds(self, num_decodes: int) -> float:
        """Seconds for the prompts of a step that decodes `num_decodes` texts."""
        if not num_decodes:
            return _GAPS_ALONE * _AIM * self.target_gap
        spare = _AIM * self.target_gap - self.decode_seconds
        return max(spare, self.decode_seconds if self._grows else 0.0)

    def least(self, num_decodes: int) -> int:
        """Tokens of prompts that a step with `num_decodes` decodes may run, however long they take."""
        return LEAST if num_decodes else LEAST_ALONE

    def cost(self, count: int, computed: int = 0) -> float:
        """Seconds of the next tokens of a prompt, of which `computed` have run."""
        return count * self.per_token + pairs(count, computed) * self.per_pair

    def tokens(self, seconds: float, computed: int = 0) -> int:
        """The number of these that run in `seconds`, `MOST` at most."""
        if seconds <= 0.0:
            return 0
        each = self.per_token + self.per_pair * computed  # seconds = each * tokens + per_pair / 2 * tokens ** 2
        return int(min(2.0 * seconds / (each + sqrt(each**2 + 2.0 * self.per_pair * seconds)), MOST))

    def observe(self, num_decodes: int, num_prefilled: int, seconds: float, num_pairs: float = 0.0) -> None:
        """Note a step that was measured."""
        if not num_prefilled:
            self.decode_seconds = _mean(self.decode_seconds, seconds)
            return
        own = seconds - (self.decode_seconds if num_decodes else 0.0)
        if own <= 0.0:
            return
        for_tokens, for_pairs = num_prefilled * self.per_token, num_pairs * self.per_pair
        ratio = own / (for_tokens + for_pairs)
        if not self._is_measured and num_prefilled >= LEAST:
            self.per_token, self.per_pair, self._is_measured = self.per_token * ratio, self.per_pair * ratio, True
            return
        # Each of both changes by its share of the expected time, so that the expected logarithm moves by the weight.
        ratio = min(max(ratio, 1.0 / _FARTHEST), _FARTHEST)
        weight = _WEIGHT * min(1.0, num_prefilled / ENOUGH_ROWS)
        weight *= (for_tokens + for_pairs) / (for_tokens**2 + for_pairs**2)
        self.per_token = max(self.per_token * ratio ** (weight * for_tokens), _SHORTEST)
        self.per_pair = max(self.per_pair * ratio ** (weight * for_pairs), self.per_token / _MOST_PAIRS)

    def __repr__(self) -> str:
        return (
            f"TokenBudget({1e3 * self.decode_seconds:.3g} ms per step of decodes, "
            f"{1 / self.per_token:.3g} prompt tokens per second, {1 / (self.per_token + 4096 * self.per_pair):.3g} "
            "behind 4,096)"
        )


def pairs(count: int, computed: int) -> float:
    """Tokens that the next `count` of a text read, of which `computed` have run."""
    return count * (computed + count / 2)


def _mean(before: float, now: float) -> float:
    return now if not before else before + _WEIGHT * (now - before)
