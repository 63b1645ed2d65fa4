"""The experts of a network: how many, how large, how they are chosen, and what is beside them."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.errors import CheckpointError
from kvcache.networks.entries import Entries
from kvcache.support.arguments import short

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

    def open_to(self, experts: int) -> int:
        """How many of so many experts a token is left to choose from, in the groups that are kept."""
        return experts // self.groups * self.kept


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The sizes and options of a layer with experts, beside their number.

    Attributes:
        size: the intermediate size of an expert.
        latent: the size of the rows that experts take and give, if it is another one; 0: it is not.
        shared: the intermediate size of an MLP for all rows beside the experts; 0: there is none.
        shared_gate: whether the results of that MLP have a gate.
        choice: how the experts of a token are chosen.
        beside: whether the MLP beside the experts has the intermediate size of the network, and norms of its own.
    """

    size: int
    latent: int = 0
    shared: int = 0
    shared_gate: bool = False
    choice: ExpertChoice = ExpertChoice()
    beside: bool = False

    @classmethod
    def of(cls, kind: str, read: Entries, size: int) -> ExpertSizes:
        """Read the keys of a `config.json`, where experts have `size` unless a key says another one.

        Raises:
            CheckpointError: a key of the wrong kind, or an option that is not supported.
        """
        if kind == "lfm2":
            choice = ExpertChoice(
                read.flag("norm_topk_prob", True), sigmoid=True, bias=read.flag("use_expert_bias", True), eps=1e-6,
                factor=read.number("routed_scaling_factor", 1.0),
            )
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
        if kind == "minimax":
            return cls(size, choice=ExpertChoice(sigmoid=True, bias=True))
        if kind == "ernie":
            return cls._ernie(read)
        if kind == "mellum":
            choice = ExpertChoice(read.flag("norm_topk_prob", True))
            return cls(read.size("moe_intermediate_size"), choice=choice)
        if kind == "bailing":
            return cls._bailing(read)
        return cls(size, choice=ExpertChoice(kind != "qwen" or read.flag("norm_topk_prob", False)))

    @classmethod
    def _deepseek(cls, read: Entries) -> ExpertSizes:
        size, beside = read.size("moe_intermediate_size"), read.size("n_shared_experts", 1)
        sigmoid = read.default("scoring_func") == "sigmoid"
        groups, kept = _groups_of(read)
        normalise, best = read.flag("norm_topk_prob", True), 2
        if read.default("topk_method") is not None:  # DeepSeek-V2, which ranks groups by their best expert
            method, normalise, best = read.get("topk_method"), False, 1
            if read.flag("mlp_bias", False):
                raise CheckpointError("mlp_bias: expected false with experts, got true")
            if method not in ("greedy", "group_limited_greedy"):
                raise CheckpointError(f"topk_method: expected greedy or group_limited_greedy, got {short(method)}")
            groups, kept = (groups, kept) if method == "group_limited_greedy" else (1, 1)
        choice = ExpertChoice(
            normalise, sigmoid, bias=sigmoid, eps=1e-20, factor=read.number("routed_scaling_factor", 1.0),
            groups=groups, kept=kept, best=best,
        )
        return cls(size, shared=size * beside, choice=choice)

    @classmethod
    def _bailing(cls, read: Entries) -> ExpertSizes:
        if read.get("score_function") != "sigmoid":
            raise CheckpointError(f"score_function: expected sigmoid, got {short(read.get('score_function'))}")
        groups, kept = _groups_of(read, "num_experts")
        choice = ExpertChoice(
            read.flag("norm_topk_prob", True), sigmoid=True, bias=read.flag("moe_router_enable_expert_bias", True),
            eps=1e-20, factor=read.number("routed_scaling_factor"), groups=groups, kept=kept,
        )
        size, beside = read.size("moe_intermediate_size"), read.size("num_shared_experts", 1, at_least=0)
        return cls(size, shared=read.size("moe_shared_expert_intermediate_size", size) * beside, choice=choice)

    @classmethod
    def _ernie(cls, read: Entries) -> ExpertSizes:
        layers, last = read.size("num_hidden_layers"), read.get("moe_layer_end_index")
        if last not in (None, -1, layers - 1):
            raise CheckpointError(f"moe_layer_end_index: expected -1 or the last of {layers} layers, got {short(last)}")
        if read.flag("use_bias", False):
            raise CheckpointError("use_bias: expected false with experts, got true")
        if read.size("moe_layer_interval", 1) != 1:
            raise CheckpointError(f"moe_layer_interval: expected 1, got {short(read.get('moe_layer_interval'))}")
        size, beside = read.size("moe_intermediate_size"), read.size("moe_num_shared_experts", 2, at_least=0)
        return cls(size, shared=size * beside, choice=ExpertChoice(bias=True, least=read.number("moe_norm_min", 1e-12)))

    @classmethod
    def _nemotron(cls, read: Entries) -> ExpertSizes:
        if read.flag("mlp_bias", False):
            raise CheckpointError("mlp_bias: expected false with experts, got true")
        if read.size("n_shared_experts", 1) != 1:
            raise CheckpointError(f"n_shared_experts: expected 1, got {read.get('n_shared_experts')}")
        groups, kept = _groups_of(read)
        choice = ExpertChoice(
            read.flag("norm_topk_prob", True), sigmoid=True, bias=True, eps=1e-20,
            factor=read.number("routed_scaling_factor", 1.0), groups=groups, kept=kept,
        )
        latent = 0 if read.get("moe_latent_size") is None else read.size("moe_latent_size")
        shared = read.size("moe_shared_expert_intermediate_size", 7688)
        return cls(read.size("moe_intermediate_size", 7688), latent, shared, choice=choice)


def _groups_of(read: Entries, key: str = "n_routed_experts") -> tuple[int, int]:
    """The groups of experts, as many as `key` says, and how many of them experts are chosen from."""
    groups, experts = read.size("n_group", 1), read.size(key, 8)
    if experts % groups:
        raise CheckpointError(f"n_group: expected a divisor of {experts} experts, got {groups}")
    return groups, read.size("topk_group", 1, most=groups)
