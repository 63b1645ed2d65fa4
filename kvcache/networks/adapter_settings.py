"""The settings of an adapter: the `adapter_config.json` of peft, read strictly.

A setting that changes what the adapter computes is honoured or refused by its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcache.errors import CheckpointError
from kvcache.support.arguments import as_count, as_finite, as_instance, short

__all__ = ["AdapterSettings"]

# Names and hints of training, and what files say in other ways too: nothing here depends on them.
_INFORMATION = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode", "loftq_config",
    "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size",
    "revision", "runtime_config", "task_type",
}
# Both orders of a matrix's axes give the same A and B.
_FLAGS = {"fan_in_fan_out", "use_rslora"}
# What the matrices are before training. The others change the network itself, which is then no longer the one of its
# files.
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
_MOST_RANK = 1 << 16
_MOST_PATTERN, _MOST_REPEATS, _MOST_SEARCHES = 1000, 3, 64  # characters; `*`, `+` or `{` of a pattern, and of all
_LAYER = re.compile(r".*?\.[^.]*\.(\d{1,9})\.")
# What the search for a pattern depends on: escapes and classes count for nothing.
_PLAIN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]")


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """The ranks, factors and modules of an adapter; a module has the path of transformers, such as `model.layers.0.x`.

    Attributes:
        rank, alpha: of modules without others.
        by_root: whether the factor is alpha over the root of the rank (rsLoRA); if not, over the rank.
        ranks, alphas: of the modules whose paths a pattern matches, or end with; the first one counts.
        targets: a pattern of whole paths, or their ends; None: all modules may be changed.
        excluded: likewise, those that are not changed.
        layers: the numbers of the layers that are changed; None: all.
        stacks: patterns of what stands before the number of a layer; (): anything.
        invocation_tokens: see `Adapter`.
    """

    rank: int
    alpha: float
    by_root: bool
    ranks: tuple[tuple[re.Pattern[str], int], ...]
    alphas: tuple[tuple[re.Pattern[str], float], ...]
    targets: re.Pattern[str] | tuple[str, ...] | None
    excluded: re.Pattern[str] | tuple[str, ...]
    layers: frozenset[int] | None
    stacks: tuple[re.Pattern[str], ...]
    invocation_tokens: tuple[int, ...] | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> AdapterSettings:
        """Read the object of a file. Raises CheckpointError that begins with the name of what is wrong."""
        try:
            return cls._read(config)
        except (TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(str(error)) from None

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> AdapterSettings:
        if config.get("peft_type") != "LORA":
            raise ValueError(f"peft_type: expected LORA, got {short(config.get('peft_type'))}")
        said = {key: value for key, value in config.items() if key not in _INFORMATION}
        for key in _FLAGS & set(said):
            as_instance(said[key], bool, key)
        if not any(said.get("init_lora_weights") is each for each in _BEGINNINGS[:3]):
            _expect_one(said, "init_lora_weights", _BEGINNINGS)
        _expect_one(said, "bias", ("none", None))
        for key in set(said) - _READ:
            if said[key] is not None and said[key] is not False and said[key] not in ("", [], {}):
                raise ValueError(f"{key}: expected none, since it is not supported, got {short(said[key])}")
        layers, tokens = said.get("layers_to_transform"), said.get("alora_invocation_tokens")
        layers = [layers] if type(layers) is int else layers
        return cls(
            rank=as_count(said.get("r"), "r", 1, _MOST_RANK),
            alpha=as_finite(said.get("lora_alpha"), "lora_alpha"),
            by_root=said.get("use_rslora", False),
            ranks=tuple(_by_pattern(said, "rank_pattern", lambda value, key: as_count(value, key, 1, _MOST_RANK))),
            alphas=tuple(_by_pattern(said, "alpha_pattern", as_finite)),
            targets=_modules(said, "target_modules") if said.get("target_modules") != "all-linear" else None,
            excluded=_modules(said, "exclude_modules") or (),
            layers=frozenset(_numbers(layers, "layers_to_transform")) if layers else None,
            stacks=tuple(_stacks(said.get("layers_pattern"))),
            invocation_tokens=None if tokens is None else tuple(_numbers(tokens, "alora_invocation_tokens")),
        )

    def rank_of(self, path: str) -> int:
        """The rank of the matrices of a module."""
        return next((rank for pattern, rank in self.ranks if pattern.fullmatch(path)), self.rank)

    def scale_of(self, path: str) -> float:
        """The factor of their product."""
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.fullmatch(path)), self.alpha)
        rank = self.rank_of(path)
        return alpha / (math.sqrt(rank) if self.by_root else rank)

    def changes(self, path: str) -> bool:
        """Whether the adapter changes a module."""
        if _names(self.excluded, path) or (self.targets is not None and not _names(self.targets, path)):
            return False
        if self.layers is None or not isinstance(self.targets, tuple) or path in self.targets:
            return True
        found = next((each for pattern in self.stacks or (_LAYER,) if (each := pattern.match(path))), None)
        return found is not None and int(found[found.re.groups]) in self.layers


_READ = {
    "alora_invocation_tokens", "alpha_pattern", "bias", "exclude_modules", "fan_in_fan_out", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules",
    "use_rslora",
}


def _expect_one(said: Mapping[str, Any], key: str, known: tuple[Any, ...]) -> None:
    if not isinstance(said.get(key), (str, bool, type(None))) or said.get(key) not in known:
        listed = ", ".join(str(each) for each in known if each is not None)
        raise ValueError(f"{key}: expected one of {listed}, got {short(said[key])}")


def _names(modules: re.Pattern[str] | tuple[str, ...], path: str) -> bool:
    if isinstance(modules, re.Pattern):
        return modules.fullmatch(path) is not None
    return path in modules or path.endswith(tuple(f".{each}" for each in modules))


def _modules(said: Mapping[str, Any], key: str) -> re.Pattern[str] | tuple[str, ...] | None:
    """The modules that a setting names; None: nothing is said, or it is a pattern that may take long to search for."""
    value = said.get(key)
    if isinstance(value, str):
        pattern = _pattern(value, key)
        if _repeats(value) is None and key == "exclude_modules":
            raise ValueError(f"{key}: expected a pattern that is found soon, got {short(value)}")
        return None if _repeats(value) is None else pattern
    if value is None:
        return None
    if not all(isinstance(each, str) for each in as_instance(value, list, key)):
        raise TypeError(f"{key}: expected a list of strings, or a pattern, got {short(value)}")
    return tuple(value) or None


def _by_pattern(said: Mapping[str, Any], key: str, read: Any) -> Any:
    """The pairs of a pattern of paths, or of their ends, and a number."""
    value, repeats = as_instance(said.get(key) or {}, dict, key), 0
    for pattern, number in value.items():
        name = f"{key}.{short(pattern)[1:-1]}"
        compiled, count = _pattern(pattern, name, r"(?:.*\.)?(?:{})"), _repeats(pattern)
        repeats += count or 0
        if count is None or repeats > _MOST_SEARCHES:
            raise ValueError(f"{name}: expected a pattern that is found soon, got another one")
        yield compiled, read(number, name)


def _pattern(value: Any, name: str, around: str = "{}") -> re.Pattern[str]:
    if not isinstance(value, str) or len(value) > _MOST_PATTERN:
        raise ValueError(f"{name}: expected a pattern of at most {_MOST_PATTERN} characters, got {short(value)}")
    try:
        re.compile(value)  # a pattern of its own: no parenthesis of another one closes it
        return re.compile(around.replace("{}", value))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{name}: expected a regular expression, got {short(str(error))}") from None


def _repeats(pattern: str) -> int | None:
    """The repetitions of a pattern; None: their number, or a group that is repeated, may make searches very long."""
    plain = _PLAIN.sub("x", pattern)
    count = sum(map(plain.count, "*+{"))
    return None if count > _MOST_REPEATS or re.search(r"\)[*+{]", plain) else count


def _stacks(value: Any) -> Any:
    patterns = [value] if isinstance(value, str) else as_instance(value or [], list, "layers_pattern")
    for pattern in filter(None, patterns):
        if not isinstance(pattern, str) or _repeats(pattern) is None:
            raise ValueError(f"layers_pattern: expected a pattern that is found soon, got {short(pattern)}")
        yield _pattern(pattern, "layers_pattern", r"(?:^|.*?\.)(?:{})\.(\d{1,9})\.")


def _numbers(value: Any, name: str) -> Any:
    return (as_count(each, name, 0, 2**32 - 1) for each in as_instance(value, list, name))
