"""The kinds of experts: how a `config.json` describes them, and how folders name and store their matrices.

A family names its kind (`Family.experts`). A further family needs one more row here, unless its experts are computed
in another way (`ExpertSizes`, `ExpertChoice`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kvcache.errors import CheckpointError
from kvcache.networks.entries import Entries, Flag, Number, Only, SameSize, Size
from kvcache.networks.expert_sizes import ExpertChoice, ExpertSizes
from kvcache.support.arguments import short

__all__ = ["EXPERT_KINDS", "ExpertKind", "StackedExperts"]

_SIZE, _PER_TOKEN = Size("intermediate_size"), Size("num_experts_per_tok")
_NORMALISE, _FACTOR = Flag("norm_topk_prob", True), Number("routed_scaling_factor", 1.0)


class StackedExperts(NamedTuple):
    """The tensors of a folder that have all experts of a layer: `(experts, 2 * size, in)` and `(experts, out, size)`.

    Attributes:
        gate_up, down: the names, in the layer.
        turned: whether each expert is the transpose of this.
        in_turn: whether rows of gate and up take turns; if not, gate is above up.
        packed: the method of quantisation that writes it; "": none.
        apart: whether gate and up are tensors of their own, `(experts, size, in)`; `gate_up` is the name of both.
        biases: the names of their biases.
    """

    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"
    turned: bool = False
    in_turn: bool = False
    packed: str = ""
    apart: bool = False
    biases: tuple[str, str] = ("mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias")


def _steps(read: Entries) -> tuple[int, list[int]]:
    """A number of which only multiples, from 1 on, are layers with experts, and layers that have an MLP in any case."""
    mlps = read.get("mlp_only_layers") or []
    if not isinstance(mlps, list) or not all(type(layer) is int for layer in mlps):
        raise CheckpointError(f"mlp_only_layers: expected numbers of layers, got {short(mlps)}")
    return read.size("decoder_sparse_step", 1), mlps


def _by_steps(read: Entries, layers: int) -> list[bool]:
    """Which layers have experts by `_steps`."""
    step, mlps = _steps(read)
    return [(i + 1) % step == 0 and i not in mlps for i in range(layers)]


def _listed_layers(read: Entries, layers: int) -> list[bool]:
    """The layers that `moe_layers` lists; without a list those of which one in each `interleave_moe_layer_step` has."""
    listed, step = read.get("moe_layers"), read.size("interleave_moe_layer_step", 1)
    if listed is None:
        return [(i + 1) % step == 0 for i in range(layers)]
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise CheckpointError(f"moe_layers: expected numbers of layers, got {short(listed)}")
    return [i in listed for i in range(layers)]


def _in_every_layer(read: Entries) -> None:
    """Raise CheckpointError if some layers have an MLP in place of experts."""
    step, mlps = _steps(read)
    if step != 1 or mlps:
        raise CheckpointError(f"mlp_only_layers: expected none and a step of 1, got {short(mlps)} and {step}")


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """One row of the table. Entries are named by their keys in `config.json`.

    Attributes:
        count: the keys of the number of experts: the first that is there, or the last one.
        at_least: the least number of experts; 0: a network may have none, and has the shared MLP alone.
        switch: the key of a flag without which there are none; "": there is none.
        layer: what lists of layers call one with experts; "": they do not say.
        per_token: how many experts a token has.
        size: the intermediate size of an expert.
        apart: whether MLPs in the place of experts, or beside them, have a size of their own.
        mlp: the key of that size; where it is another one than `intermediate_size`, null means the size of an expert.
        dense_first: the key of how many of the first layers have an MLP in place of experts; "": none has.
        listed: whether `mlp_layer_types` may say which layers have one.
        stepped: which of a number of layers have experts, where further keys say so; None: they do not.
        shared: the size of the MLP that all rows share, or of one of `shared_count`; None: that of an expert.
        shared_count: how many of these there are, side by side as one; None: one if `shared` has a key, else none.
        shared_gate: whether the results of that MLP have a gate.
        mean: whether these and the results of the experts are averaged; None: they are added.
        latent: the key of the size of rows that experts take and give; "": the hidden size.
        beside: see `ExpertSizes`.
        choice: the fields of `ExpertChoice`, each a value or what reads it.
        checks: raise CheckpointError for options that are not supported.
        each: the name of one expert's matrix, of the numbers and the parts; "": folders stack them.
        parts: the names of gate, up and down in there.
        stacks: how folders may stack the experts of a layer; the first that is there is read.
        shared_stack: the tensor of gate above up of the shared MLP; "": they are apart.
        bias_row: whether folders have the bias of the choice as `(1, experts)`.
    """

    count: tuple[str, ...] = ("num_local_experts", "num_experts")
    at_least: int = 1
    switch: str = ""
    layer: str = ""
    per_token: Size = _PER_TOKEN
    size: Size = _SIZE
    apart: bool = False
    mlp: str = "intermediate_size"
    dense_first: str = ""
    listed: bool = False
    stepped: Callable[[Entries, int], list[bool]] | None = None
    shared: Size | None = None
    shared_count: Size | None = None
    shared_gate: bool = False
    mean: _Which | None = None
    latent: str = ""
    beside: bool = False
    choice: Mapping[str, Any] = field(default_factory=dict)
    checks: tuple[Callable[[Entries], object] | Only | Flag, ...] = (_in_every_layer,)
    each: str = "mlp.experts.{}.{}_proj.weight"
    parts: tuple[str, str, str] = ("gate", "up", "down")
    stacks: tuple[StackedExperts, ...] = ()
    shared_stack: str = ""
    bias_row: bool = False

    def number(self, read: Entries, layers: list[Any]) -> int:
        """The number of experts in a layer that has them; 0: no layer has.

        Args:
            read: the configuration.
            layers: what it calls the layers, if it does.
        """
        if (self.layer and self.layer not in layers) or (self.switch and not read.flag(self.switch, False)):
            return 0
        there = (key for key in self.count if read.get(key) is not None)
        return read.size(next(there, self.count[-1]), at_least=self.at_least)

    def mlp_size(self, read: Entries, experts: int) -> int:
        """The intermediate size of MLPs; where no layer has one, that of an expert if it is not there."""
        if not self.apart:
            size = self.size(read)
            return self.shared(read) if self.shared and not experts else size
        needed = self.mlp == "intermediate_size" and self._has_mlps(read, experts)
        return read.size(self.mlp, None if needed else self.size(read))

    def _has_mlps(self, read: Entries, experts: int) -> bool:
        """Whether some layers have an MLP, as far as a key says."""
        listed = read.get("mlp_layer_types") if self.listed else None
        if self.beside or self.layer or not experts:
            return True
        if self.stepped:
            return not all(self.stepped(read, read.size("num_hidden_layers")))
        return "dense" in listed if isinstance(listed, list) else read.get(self.dense_first) not in (None, 0)

    def has_experts(self, read: Entries, layers: int) -> list[bool]:
        """Whether each of `layers` layers has experts, where no list of the mixers says; others have an MLP."""
        listed = read.get("mlp_layer_types") if self.listed else None
        if listed is not None:
            known = isinstance(listed, list) and all(each in ("dense", "sparse") for each in listed)
            if not known or len(listed) != layers:
                expected = f"dense or sparse for each of {layers} layers"
                raise CheckpointError(f"mlp_layer_types: expected {expected}, got {short(listed)}")
            return [each == "sparse" for each in listed]
        if self.stepped:
            return self.stepped(read, layers)
        dense = read.size(self.dense_first, at_least=0, most=layers) if self.dense_first else 0
        return [i >= dense for i in range(layers)]

    def gguf_keys(self) -> list[tuple[str, str]]:
        """The keys of `config.json` with those of GGUF files, which all kinds share."""
        rows = [(self.choice.get(name, getattr(self, name, "")), key) for name, key in _GGUF_KEYS.items()]
        keys = [(row[0] if isinstance(row, tuple) else row, key) for row, key in rows]  # of rows as `Size`
        return [(own, key) for own, key in keys if own and isinstance(own, str)]

    def sizes(self, read: Entries, experts: int) -> ExpertSizes:
        """The sizes of `experts` experts and how they are chosen.

        Raises:
            CheckpointError: a key of the wrong kind, or an option that is not supported.
        """
        for check in self.checks:
            check(read)
        size, shared = self.size(read), 0
        if self.shared_count is not None or self.shared is not None:
            each = size if self.shared is None else (self.shared._replace(default=self.shared.default or size))(read)
            shared = each if self.shared_count is None else each * self.shared_count(read)
        latent = read.size(self.latent) if self.latent and read.get(self.latent) is not None else 0
        choice = ExpertChoice(**{key: value(read) if callable(value) else value for key, value in self.choice.items()})
        if experts % choice.groups:
            key = self.choice["groups"].key
            raise CheckpointError(f"{key}: expected a divisor of {experts} experts, got {choice.groups}")
        if choice.kept > choice.groups:
            expected = f"a positive whole number up to {choice.groups}"
            raise CheckpointError(f"{self.choice['kept'].key}: expected {expected}, got {choice.kept}")
        mean = self.mean is not None and shared > 0 and self.mean(read)
        return ExpertSizes(size, latent, shared, self.shared_gate, choice, self.beside, mean)


class _IfLimited(NamedTuple):
    """A number of groups of DeepSeek-V2; 1 if it chooses from all experts."""

    key: str

    def __call__(self, read: Entries) -> int:
        """The value. Raises CheckpointError for an unknown method."""
        found, method = read.size(self.key, 1), read.get("topk_method")
        if method not in ("greedy", "group_limited_greedy"):
            raise CheckpointError(f"topk_method: expected greedy or group_limited_greedy, got {short(method)}")
        return 1 if method == "greedy" else found


class _Which(NamedTuple):
    """Which of two words an entry has, as a flag: whether it is the second one."""

    key: str
    words: tuple[str, str]
    default: str

    def __call__(self, read: Entries) -> bool:
        """The flag. Raises CheckpointError for any other word."""
        found = read.get(self.key)
        found = self.default if found is None else found
        if found not in self.words:
            raise CheckpointError(f"{self.key}: expected {' or '.join(self.words)}, got {short(found)}")
        return bool(found == self.words[1])


class _OrSoftmax(NamedTuple):
    """A flag of scores that are sigmoids; true for a softmax."""

    key: str
    sigmoid: _Which

    def __call__(self, read: Entries) -> bool:
        """The value."""
        return read.flag(self.key, True) or not self.sigmoid(read)


def _to_the_last_layer(read: Entries) -> None:
    """Raise CheckpointError if the last layers of ERNIE have an MLP in place of experts."""
    layers, last = read.size("num_hidden_layers"), read.get("moe_layer_end_index")
    if last not in (None, -1, layers - 1):
        raise CheckpointError(f"moe_layer_end_index: expected -1 or the last of {layers} layers, got {short(last)}")


# What GGUF files say of experts, by the fields of `ExpertKind` and `ExpertChoice`.
_GGUF_KEYS = {
    "count": "expert_count", "per_token": "expert_used_count", "size": "expert_feed_forward_length",
    "dense_first": "leading_dense_block_count", "shared": "expert_shared_feed_forward_length",
    "shared_count": "expert_shared_count", "latent": "moe_latent_size", "normalise": "expert_weights_norm",
    "factor": "expert_weights_scale", "groups": "expert_group_count", "kept": "expert_group_used_count",
}
_GROUPS = {"groups": Size("n_group", 1), "kept": Size("topk_group", 1)}
_SIGMOID = {"normalise": _NORMALISE, "sigmoid": True, "bias": True, "eps": 1e-20, "factor": _FACTOR}
_BY_WORD = _Which("expert_selection_fn", ("softmax", "sigmoid"), "softmax")
_NO_BIASES = Only("mlp_bias", False, " with experts")
_STACKED = (StackedExperts(),)
_W = ("w1", "w3", "w2")
_MIXTRAL = ExpertKind(each="block_sparse_moe.experts.{}.{}.weight", parts=_W)
_QWEN = ExpertKind(
    size=Size("moe_intermediate_size"), choice={"normalise": Flag("norm_topk_prob", False)},
    stacks=(StackedExperts(turned=True), StackedExperts()),
)
_DEEPSEEK = ExpertKind(
    count=("n_routed_experts",), size=Size("moe_intermediate_size"), apart=True, dense_first="first_k_dense_replace",
    listed=True, shared_count=Size("n_shared_experts", 1), choice=_SIGMOID | _GROUPS, checks=(), stacks=_STACKED,
)
EXPERT_KINDS = {
    "mixtral": _MIXTRAL,
    "minimax": replace(_MIXTRAL, choice={"sigmoid": True, "bias": True}),
    "phi": replace(
        _MIXTRAL, choice={"jitter": Number("router_jitter_noise", 0.01)}, checks=(Only("num_experts_per_tok", 2),),
    ),
    "qwen": _QWEN,
    "olmoe": replace(_QWEN, size=_SIZE),
    "qwen2": replace(
        _QWEN, apart=True, stepped=_by_steps, shared=Size("shared_expert_intermediate_size", 5632), shared_gate=True,
        checks=(), stacks=_STACKED,
    ),
    "hunyuan": ExpertKind(
        count=("num_experts",), per_token=SameSize("moe_topk", 1), shared=_SIZE, checks=(), stacks=_STACKED,
    ),
    "llama4": ExpertKind(
        count=("num_local_experts",), apart=True, mlp="intermediate_size_mlp", stepped=_listed_layers, shared=_SIZE,
        choice={"normalise": False, "sigmoid": True, "before": True}, checks=(),
        each="feed_forward.experts.{}.{}_proj.weight", stacks=(
            StackedExperts("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj", turned=True),
        ),
    ),
    "mellum": ExpertKind(
        size=Size("moe_intermediate_size"), apart=True, listed=True, choice={"normalise": _NORMALISE}, checks=(),
    ),
    "gated": ExpertKind(  # Qwen3-Next and Qwen3.5
        size=Size("moe_intermediate_size"), shared=Size("shared_expert_intermediate_size", 512), shared_gate=True,
        checks=(_in_every_layer, Only("norm_topk_prob", True)), stacks=_STACKED,
    ),
    "gpt_oss": ExpertKind(each="", stacks=(
        StackedExperts("mlp.experts.gate_up_proj_blocks", "mlp.experts.down_proj_blocks", in_turn=True, packed="mxfp4"),
        StackedExperts(turned=True, in_turn=True),
    )),
    "lfm2": ExpertKind(
        size=Size("moe_intermediate_size", 1792), apart=True, dense_first="num_dense_layers",
        choice=_SIGMOID | {"bias": Flag("use_expert_bias", True), "eps": 1e-6},
        each="feed_forward.experts.{}.{}.weight", parts=_W,
    ),
    "granite": ExpertKind(
        count=("num_local_experts",), at_least=0, shared=Size("shared_intermediate_size"), each="",
        stacks=(StackedExperts("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),),
        shared_stack="shared_mlp.input_linear.weight",
    ),
    "gemma4": ExpertKind(
        switch="enable_moe_block", per_token=Size("top_k_experts"), size=Size("moe_intermediate_size"), apart=True,
        beside=True, stacks=(StackedExperts("experts.gate_up_proj", "experts.down_proj"),),
    ),
    "nemotron": ExpertKind(
        count=("n_routed_experts",), layer="moe", size=Size("moe_intermediate_size", 7688), apart=True,
        shared=Size("moe_shared_expert_intermediate_size", 7688), latent="moe_latent_size", choice=_SIGMOID | _GROUPS,
        checks=(_NO_BIASES, Only("n_shared_experts", 1)), each="mixer.experts.{}.{}_proj.weight",
    ),
    "deepseek": _DEEPSEEK,
    "mimo": replace(_DEEPSEEK, shared_count=None),
    "exaone": replace(_DEEPSEEK, count=("num_experts",), shared_count=Size("num_shared_experts", 1)),
    "afmoe": ExpertKind(
        count=("num_experts",), size=Size("moe_intermediate_size"), apart=True, dense_first="num_dense_layers",
        shared_count=Size("num_shared_experts", 2, 0), stacks=_STACKED,
        choice=_SIGMOID | {"normalise": Flag("route_norm", True), "factor": Number("route_scale", 1.0)},
        checks=(Only("score_func", "sigmoid"), Only("n_group", 1)),
    ),
    "deepseek_v2": replace(  # groups are ranked by their best expert
        _DEEPSEEK, checks=(_NORMALISE, _NO_BIASES), choice={
            "normalise": False, "eps": 1e-20, "factor": _FACTOR, "best": 1,
            "groups": _IfLimited("n_group"), "kept": _IfLimited("topk_group"),
        },
    ),
    "hy3": replace(
        _DEEPSEEK, count=("num_experts",), shared_count=Size("num_shared_experts", 1), checks=(_NO_BIASES,),
        choice=_SIGMOID | {"normalise": Flag("route_norm", True), "factor": Number("router_scaling_factor", 2.826)},
    ),
    "laguna": replace(
        _DEEPSEEK, count=("num_experts",), shared=Size("shared_expert_intermediate_size", 512), shared_count=None,
        checks=(Only("moe_apply_router_weight_on_input", False),), choice={
            "sigmoid": True, "bias": True, "factor": Number("moe_routed_scaling_factor", 1.0),
            "softcap": Number("moe_router_logit_softcapping", 0.0),
        },
    ),
    "step": replace(
        _DEEPSEEK, shared=Size("share_expert_dim", 1280), shared_count=None, checks=(_NO_BIASES,),
        choice={"sigmoid": True, "bias": True, "factor": Number("moe_router_scaling_factor", 1.0)},
        stacks=(StackedExperts("moe.{}_proj.weight", "moe.down_proj.weight", apart=True),),
    ),
    "mistral4": replace(_DEEPSEEK, choice=_SIGMOID | _GROUPS | {"sigmoid": False, "bias": False}),
    "cohere": ExpertKind(
        count=("num_experts",), apart=True, mlp="prefix_dense_intermediate_size", dense_first="first_k_dense_replace",
        listed=True, shared_count=Size("num_shared_experts", 0, 0), checks=(), stacks=_STACKED,
        mean=_Which("shared_expert_combination_strategy", ("sum", "average"), "average"),
        choice={"normalise": _OrSoftmax("norm_topk_prob", _BY_WORD), "sigmoid": _BY_WORD},
    ),
    "bailing": ExpertKind(
        count=("num_experts",), size=Size("moe_intermediate_size"), apart=True, dense_first="first_k_dense_replace",
        shared=Size("moe_shared_expert_intermediate_size"), shared_count=Size("num_shared_experts", 1, 0),
        choice=_SIGMOID | _GROUPS | {"bias": Flag("moe_router_enable_expert_bias", True)},
        checks=(Only("score_function", "sigmoid"),),
    ),
    "kimi": replace(
        _DEEPSEEK, count=("num_experts",), shared_count=Size("num_shared_experts", 1),
        each="block_sparse_moe.experts.{}.{}.weight", parts=_W, stacks=(),
    ),
    "ernie": ExpertKind(
        count=("moe_num_experts",), per_token=Size("moe_k"), size=Size("moe_intermediate_size"), apart=True,
        dense_first="moe_layer_start_index", shared_count=Size("moe_num_shared_experts", 2, 0),
        choice={"bias": True, "least": Number("moe_norm_min", 1e-12)},
        checks=(_to_the_last_layer, Only("use_bias", False, " with experts"), Only("moe_layer_interval", 1)),
        stacks=_STACKED, bias_row=True,
    ),
}
