"""Divergence of the next-token distributions of several runs from those of a reference, with standard errors.

Tokens of a window are correlated, so a standard error is that of the mean over windows: each window counts as one
sample of a paired difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bench.quality.network import log_softmax

__all__ = ["Divergence", "Logits", "compare", "paired", "tails"]

Logits = Callable[[npt.NDArray[np.uint32]], npt.NDArray[np.float32]]  # of each token of a window but the last


@dataclass
class Divergence:
    """One run against its reference.

    Attributes:
        kl: the KL divergence of each token's distribution from the reference, an array per window.
        rise: by how much each next token's negative log-likelihood is above the reference, per window.
        nats: negative log-likelihoods, per window.
        same: per token, whether the likeliest next token is that of the reference, per window.
    """

    kl: list[npt.NDArray[np.float64]] = field(default_factory=list)
    rise: list[npt.NDArray[np.float64]] = field(default_factory=list)
    nats: list[npt.NDArray[np.float64]] = field(default_factory=list)
    same: list[npt.NDArray[np.bool_]] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """The means, and standard errors (`_se`); `rise` is that of the perplexity, relative to the reference's."""
        kl, kl_se = _mean(self.kl)
        rise, rise_se = _mean(self.rise)
        return {
            "tokens": sum(map(len, self.nats)), "kl": kl, "kl_se": kl_se,
            **tails(np.concatenate(self.kl)),
            "perplexity": float(np.exp(np.concatenate(self.nats).mean())), "rise": float(np.expm1(rise)),
            "rise_se": float(np.exp(rise) * rise_se), "same": float(np.concatenate(self.same).mean()),
        }


def tails(kl: npt.NDArray[np.float64]) -> dict[str, float]:
    """The KL divergence that 1 % and 0.1 % of the tokens exceed: a mean hides the few that change what follows."""
    return {"kl_p99": float(np.quantile(kl, 0.99)), "kl_p999": float(np.quantile(kl, 0.999))}


def _mean(windows: list[npt.NDArray[np.float64]]) -> tuple[float, float]:
    """The mean over windows of equal length, and its standard error (NaN for one window)."""
    means = np.array([window.mean() for window in windows])
    error = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else np.nan
    return float(means.mean()), float(error)


def paired(one: Divergence, other: Divergence) -> tuple[float, float]:
    """The mean of the KL divergence of `one` less that of `other` over the same windows, and its standard error."""
    return _mean([a - b for a, b in zip(one.kl, other.kl, strict=True)])


def compare(
    reference: Logits, runs: dict[str, Logits], windows: Iterable[npt.NDArray[np.uint32]]
) -> dict[str, Divergence]:
    """Run every window through the reference and through each run; the reference may be one of them."""
    found = {name: Divergence() for name in runs}
    for window in windows:
        rows, after = np.arange(len(window) - 1), window[1:].astype(np.int64)
        truth = log_softmax(reference(window))
        sure, best, nats = np.exp(truth), truth.argmax(axis=1), -truth[rows, after].astype(np.float64)
        for name, run in runs.items():
            scores = truth.copy() if run is reference else log_softmax(run(window))
            one = found[name]
            one.nats.append(-scores[rows, after].astype(np.float64))
            one.rise.append(one.nats[-1] - nats)
            one.same.append(scores.argmax(axis=1) == best)
            np.subtract(truth, scores, out=scores)
            scores *= sure
            one.kl.append(scores.sum(axis=1, dtype=np.float64))
    return found
