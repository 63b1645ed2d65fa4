"""How many prompt tokens a step may run, so that texts that are being written do not wait for long."""

from __future__ import annotations

from kvcache.support.arguments import as_finite

__all__ = ["TokenBudget"]

LEAST, MOST = 16, 512  # tokens of prompts per step
MOST_PROMPTS = 8  # prompts of which a step may run a piece, where each may touch a block of f16 rows more than it keeps
CHEAP_ROWS = 16  # rows that a product of decodes may have for the sake of draft tokens
_WEIGHT = 0.25  # of the newest measurement in the running means
_GAP = 0.05  # seconds: the default
_AIM = 0.9  # share of the target that a step is meant to last: with that 99 of 100 gaps keep it, or nearly


class TokenBudget:
    """Follows the measured rates: `clamp((0.9 target gap - time of the decodes) * rate of prompts, 16, 512)`.

    The measurements decide when tokens run, never which tokens come out.

    Args:
        target_gap: seconds that a step beside decodes should last at most. None: 0.05, with at least as much time
            for prompts as for decodes.
    """

    def __init__(self, target_gap: float | None = None) -> None:
        self._grows = target_gap is None
        self.target_gap = _GAP if target_gap is None else as_finite(target_gap, "target_gap", 0.0)
        self.decode_seconds = 0.0  # of a step of decodes alone; 0: not measured yet
        self.prefill_rate = 0.0  # prompt tokens per second; 0: not measured yet

    def tokens(self, num_decodes: int) -> int:
        """The most prompt tokens of a step beside so many decodes."""
        if not num_decodes or not self.prefill_rate:
            return MOST if not num_decodes else LEAST
        spare = _AIM * self.target_gap - self.decode_seconds
        if self._grows:
            spare = max(spare, self.decode_seconds)
        return int(min(max(spare * self.prefill_rate, LEAST), MOST))

    def observe(self, num_decodes: int, num_prefilled: int, seconds: float) -> None:
        """Note a step that was measured."""
        if not num_prefilled:
            self.decode_seconds = _mean(self.decode_seconds, seconds)
            return
        own = seconds - (self.decode_seconds if num_decodes else 0.0)
        if own > 0.0:
            self.prefill_rate = _mean(self.prefill_rate, num_prefilled / own)

    def __repr__(self) -> str:
        return (
            f"TokenBudget({1e3 * self.decode_seconds:.3g} ms per step of decodes, "
            f"{self.prefill_rate:.3g} prompt tokens per second)"
        )


def _mean(before: float, now: float) -> float:
    return now if not before else before + _WEIGHT * (now - before)
