"""`Adapter`: matrices of low rank that change the products of a network (LoRA), of layers and projections by name.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021): `W x` becomes `W x + scale * B (A x)`.
An activated adapter (Greenewald et al., "Activated LoRA", 2025) does so from its invocation tokens on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.networks.config import ModelConfig
from kvcache.networks.names import tensors_of
from kvcache.support.arguments import BFLOAT16, as_instance, described, is_integer, short

__all__ = ["PROJECTIONS", "Adapter", "LowRank", "adapted_shapes", "floats_of"]

# The projections that an adapter may change, and their tensors in a layer.
PROJECTIONS = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}
_TYPES = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
_MOST_TOKENS = 4096  # of an invocation
_MOST_SCALE = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """Two matrices and a factor: `scale * b @ a` is added to a matrix of the network.

    Attributes:
        a: `(rank, in)`, of float32, float16 or bf16 (the dtype `BFLOAT16` of support/arguments.py).
        b: `(out, rank)`, of the same type; rows in the order that the network has them.
        scale: the factor.
    """

    a: NDArray[Any]
    b: NDArray[Any]
    scale: float

    @property
    def rank(self) -> int:
        """Rows of `a`."""
        return len(self.a)

    @property
    def shape(self) -> tuple[int, int]:
        """`(out, in)`."""
        return len(self.b), self.a.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter of a network; it owns its arrays, and never changes.

    Args:
        matrices: by layer and projection, one of `PROJECTIONS`; they are copied.
        invocation_tokens: of an activated adapter: it changes the rows from the last place on where a text has these;
            None: it changes all rows.
        name: for messages.

    Attributes:
        digest: 20 bytes that every number, its place and the invocation tokens decide.

    Raises:
        TypeError, ValueError: no such matrices or tokens; numbers that are not finite.
    """

    matrices: Mapping[tuple[int, str], LowRank]
    invocation_tokens: tuple[int, ...] | None = None
    name: str = "adapter"
    digest: bytes = field(init=False, default=b"")

    def __post_init__(self) -> None:
        keys = sorted(self.matrices, key=_place)
        found = {(int(key[0]), str(key[1])): _checked(key, self.matrices[key]) for key in keys}
        if not found:
            raise ValueError("matrices: expected those of a projection or more, got none")
        tokens = None if self.invocation_tokens is None else _tokens(self.invocation_tokens)
        digest = blake2b(repr(("adapter", tokens)).encode(), digest_size=20, person=b"adapter")
        for key, each in found.items():
            digest.update(repr((key, each.scale, each.a.dtype.str, each.a.shape, each.b.shape)).encode())
            digest.update(each.a.tobytes() + each.b.tobytes())
        for name, value in (
            ("matrices", MappingProxyType(found)), ("invocation_tokens", tokens), ("digest", digest.digest()),
        ):
            object.__setattr__(self, name, value)

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum(each.a.nbytes + each.b.nbytes for each in self.matrices.values())

    def expect(self, config: ModelConfig) -> None:
        """Raise ValueError unless the network has all projections, in these sizes."""
        shapes, layers = adapted_shapes(config), config.trunk_layers
        for (layer, projection), each in self.matrices.items():
            place = f"{self.name}: layer {layer}, {projection}"
            if layer >= layers:
                raise ValueError(f"{place}: expected one of {layers} layers, got layer {layer}")
            if (want := shapes.get((layer, projection))) is None:
                has = [name for name in PROJECTIONS if (layer, name) in shapes]
                raise ValueError(f"{place}: expected a projection that adapters change there, {has}, got {projection}")
            if each.shape != want:
                raise ValueError(f"{place}: expected matrices for (out, in) {want}, got {each.shape}")

    def __repr__(self) -> str:
        ranks = sorted({each.rank for each in self.matrices.values()})
        return f"Adapter({self.name!r}, {len(self.matrices)} matrices of rank {short(ranks)}, {self.digest.hex()[:8]})"


def adapted_shapes(config: ModelConfig) -> dict[tuple[int, str], tuple[int, int]]:
    """The projections of a network that adapters change, by layer and name, with their `(out, in)`.

    Not those of experts, of layers with a state, of latent attention, and of MTP layers.
    """
    there = dict(tensors_of(config))
    found = {}
    for layer in range(config.trunk_layers):
        attends = config.mixers[layer] == "attention" and config.latent is None
        for name, tensor in PROJECTIONS.items():
            has = config.mlps[layer] == "mlp" if tensor.startswith("mlp.") else attends
            shape = there.get(f"model.layers.{layer}.{tensor}.weight")
            if has and shape is not None and len(shape) == 2:
                found[layer, name] = (shape[0], shape[1])
    return found


def _place(key: Any) -> tuple[int, int]:
    """The order of a key among others. ValueError: it names no projection of a layer."""
    well = isinstance(key, tuple) and len(key) == 2 and is_integer(key[0]) and key[0] >= 0 and key[1] in PROJECTIONS
    if not well:
        raise ValueError(f"matrices: expected keys (layer, one of {', '.join(PROJECTIONS)}), got {short(key)}")
    return int(key[0]), list(PROJECTIONS).index(key[1])


def _checked(key: tuple[int, str], given: LowRank) -> LowRank:
    """The matrices with arrays of their own."""
    name = f"matrices.{key[0]}.{key[1]}"
    as_instance(given, LowRank, name)
    for part in (given.a, given.b):
        if not isinstance(part, np.ndarray) or part.dtype not in _TYPES or part.ndim != 2 or not part.size:
            raise TypeError(f"{name}: expected (rank, in) and (out, rank) in f32, f16 or bf16, got {described(part)}")
    if given.a.dtype != given.b.dtype or given.b.shape[1] != len(given.a):
        expected = f"b of {given.a.dtype} (out, {len(given.a)}), as many columns as a has rows"
        raise ValueError(f"{name}: expected {expected}, got {described(given.b)}")
    scale = float(given.scale)
    if not abs(scale) <= _MOST_SCALE:
        raise ValueError(f"{name}.scale: expected a finite number that f32 can hold, got {short(given.scale)}")
    own = [part.copy(order="C") for part in (given.a, given.b)]
    for part in own:
        part.flags.writeable = False
        if not _is_finite(part):
            raise ValueError(f"{name}: expected finite numbers, got others")
    return LowRank(own[0], own[1], scale)


def floats_of(array: NDArray[Any]) -> NDArray[np.float32]:
    """The numbers of an adapter as float32, which holds them all."""
    if array.dtype != BFLOAT16:
        return array.astype(np.float32)
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _is_finite(array: NDArray[Any]) -> bool:
    if array.dtype == BFLOAT16:
        return bool(((array.view(np.uint16) & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(array).all())


def _tokens(given: Any) -> tuple[int, ...]:
    tokens = tuple(given)
    well = all(is_integer(each) and 0 <= each < 2**32 for each in tokens)
    if not well or not 0 < len(tokens) <= _MOST_TOKENS:
        raise ValueError(f"invocation_tokens: expected 1 to {_MOST_TOKENS} token ids, got {short(given)}")
    return tuple(map(int, tokens))
