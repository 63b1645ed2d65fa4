"""The experts of a network: how many, how large, how they are chosen, and what is beside them."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.errors import CheckpointError
from kvcache.networks.entries import Entries

__all__ = ["ExpertSizes", "SigmoidChoice"]


@dataclass(frozen=True, slots=True)
class SigmoidChoice:
    """The choice of experts by sigmoids, see `kvcache.kernels.layers.top_sigmoid_experts`.

    Attributes:
        bias: whether the choice has a bias for each expert.
        eps: added to the sum that weights are divided by; None: they are not.
        factor: multiplies the weights.
        groups, kept: of experts, and those of them whose experts may be chosen.
    """

    bias: bool
    eps: float | None
    factor: float
    groups: int = 1
    kept: int = 1


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The sizes and options of a layer with experts, beside their number.

    Attributes:
        size: the intermediate size of an expert.
        latent: the size of the rows that experts take and give, if it is another one; 0: it is not.
        shared: the intermediate size of an MLP for all rows beside the experts; 0: there is none.
        shared_gate: whether the results of that MLP have a gate.
        choice: by sigmoids; None: by the largest logits.
        beside: whether the MLP beside the experts has the intermediate size of the network, and norms of its own.
    """

    size: int
    latent: int = 0
    shared: int = 0
    shared_gate: bool = False
    choice: SigmoidChoice | None = None
    beside: bool = False

    @classmethod
    def of(cls, kind: str, read: Entries, size: int) -> ExpertSizes:
        """Read the keys of a `config.json`, where experts have `size` unless a key says another one.

        Raises:
            CheckpointError: a key of the wrong kind, or an option that is not supported.
        """
        if kind == "lfm2":
            normalised = 1e-6 if read.flag("norm_topk_prob", True) else None
            factor = read.number("routed_scaling_factor", 1.0)
            choice = SigmoidChoice(read.flag("use_expert_bias", True), normalised, factor)
            return cls(read.size("moe_intermediate_size", 1792), choice=choice)
        if kind == "shared":
            if not read.flag("norm_topk_prob", True):
                raise CheckpointError("norm_topk_prob: expected true, got false")
            return cls(size, shared=read.size("shared_expert_intermediate_size", 512), shared_gate=True)
        if kind == "granite":
            return cls(size, shared=read.size("shared_intermediate_size"))
        if kind == "gemma4":
            return cls(read.size("moe_intermediate_size"), beside=True)
        if kind == "nemotron":
            return cls._nemotron(read)
        if kind == "deepseek":
            return cls._deepseek(read)
        return cls(size)

    @classmethod
    def _deepseek(cls, read: Entries) -> ExpertSizes:
        size, beside = read.size("moe_intermediate_size"), read.size("n_shared_experts", 1)
        factor, groups = read.number("routed_scaling_factor", 1.0), _groups_of(read)
        if read.default("scoring_func") == "sigmoid":
            eps = 1e-20 if read.flag("norm_topk_prob", True) else None
            return cls(size, shared=size * beside, choice=SigmoidChoice(True, eps, factor, *groups))
        if groups[0] != 1 or factor != 1 or read.get("topk_method") not in (None, "greedy"):
            raise CheckpointError(
                f"topk_method: expected greedy, n_group 1 and routed_scaling_factor 1 of a choice by softmax, got "
                f"{read.get('topk_method')}, {groups[0]}, {factor}"
            )
        return cls(size, shared=size * beside)

    @classmethod
    def _nemotron(cls, read: Entries) -> ExpertSizes:
        if read.flag("mlp_bias", False):
            raise CheckpointError("mlp_bias: expected false with experts, got true")
        if read.size("n_shared_experts", 1) != 1:
            raise CheckpointError(f"n_shared_experts: expected 1, got {read.get('n_shared_experts')}")
        groups, kept = _groups_of(read)
        eps = 1e-20 if read.flag("norm_topk_prob", True) else None
        choice = SigmoidChoice(True, eps, read.number("routed_scaling_factor", 1.0), groups, kept)
        latent = 0 if read.get("moe_latent_size") is None else read.size("moe_latent_size")
        shared = read.size("moe_shared_expert_intermediate_size", 7688)
        return cls(read.size("moe_intermediate_size", 7688), latent, shared, choice=choice)


def _groups_of(read: Entries) -> tuple[int, int]:
    """The groups of experts, and how many of them experts are chosen from."""
    groups, experts = read.size("n_group", 1), read.size("n_routed_experts", 8)
    if experts % groups:
        raise CheckpointError(f"n_group: expected a divisor of {experts} experts, got {groups}")
    return groups, read.size("topk_group", 1, most=groups)
