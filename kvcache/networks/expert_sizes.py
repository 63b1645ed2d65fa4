"""The experts of a network: how large, how they are chosen, and what is beside them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ExpertChoice", "ExpertSizes"]


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """How the experts of a token are chosen and weighted, see `kvcache.kernels.layers.top_experts`.

    Attributes:
        normalise: whether the weights of a token's experts add up to 1.
        sigmoid: whether scores are sigmoids, not a softmax.
        bias: whether the choice has a bias for each expert.
        eps: added to the sum that sigmoids are divided by.
        factor: multiplies the weights.
        groups, kept: of experts, and those of them whose experts may be chosen.
        best: the scores of a group, 1 or 2, whose sum is its own.
        least: the weights of a softmax are divided by at least this.
        jitter: weights are those of `near_experts`; None: they are not.
    """

    normalise: bool = True
    sigmoid: bool = False
    bias: bool = False
    eps: float = 0.0
    factor: float = 1.0
    groups: int = 1
    kept: int = 1
    best: int = 2
    least: float = 0.0
    jitter: float | None = None

    def open_to(self, experts: int) -> int:
        """The number of `experts` that a token may choose from: those in the groups that are kept."""
        return experts // self.groups * self.kept


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The sizes and options of a layer with experts, beside their number.

    Attributes:
        size: the intermediate size of an expert.
        latent: the size of the rows that experts take and give, if it is another one; 0: it is not.
        shared: the intermediate size of an MLP for all rows beside the experts; 0: there is none.
        shared_gate: whether the results of that MLP have a gate.
        mean: whether those and the results of the experts are averaged, not added.
        choice: how the experts of a token are chosen.
        beside: whether the MLP beside the experts has the intermediate size of the network, and norms of its own.
        limits, shared_limits: of each layer, of what experts and the shared MLP multiply before their last matrix:
            `min(silu(gate), limit) * clip(up, -limit, limit)`; 0, or no such layer: there is none.
    """

    size: int
    latent: int = 0
    shared: int = 0
    shared_gate: bool = False
    choice: ExpertChoice = ExpertChoice()
    beside: bool = False
    mean: bool = False
    limits: tuple[float, ...] = ()
    shared_limits: tuple[float, ...] = ()
