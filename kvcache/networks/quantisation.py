"""How a Hugging Face folder is quantised: `quantization_config` of its `config.json`, read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from kvcache.errors import CheckpointError
from kvcache.networks.entries import Entries
from kvcache.support.arguments import short

__all__ = ["METHODS", "Quantisation", "quantisation_of"]

METHODS = ("mxfp4", "fp8", "compressed-tensors", "gptq", "awq", "modelopt")
_FORMATS = (
    "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision",
)
_BLOCK = (128, 128)


class Quantisation(NamedTuple):
    """The quantisation of a folder. Fields that a method does not use keep their defaults.

    Attributes:
        method: one of `METHODS`.
        bits: of a number (gptq).
        group_size: channels per scale (gptq, awq); -1: all of a row.
        zeros_less_one: whether zeros are stored less 1 (gptq).
        symmetric: whether all zeros are half of the range (gptq).
        block: rows and columns per scale (fp8, compressed-tensors), where scales are those of blocks.
    """

    method: str
    bits: int = 4
    group_size: int = 128
    zeros_less_one: bool = True
    symmetric: bool = True
    block: tuple[int, int] = _BLOCK


def quantisation_of(config: Mapping[str, Any]) -> Quantisation | None:
    """Read `quantization_config`, or `compression_config` or `quantization` of older folders; None for a plain one.

    `quantization` is that of modelopt's `hf_quant_config.json`, which names no method.

    Raises:
        CheckpointError: a method, or an option of it, that is not read.
    """
    for key in ("quantization_config", "compression_config"):
        found = config.get(key)
        if found is not None:
            method = found.get("quant_method") if isinstance(found, Mapping) else None
            if method not in METHODS:
                named = "" if method is None else f"quant_method {short(method)} of "
                raise CheckpointError(f"{key}: expected one of {', '.join(METHODS)}, got {named}{short(found)}")
            read = _Read(found, f"{key}.")
            return _READERS[method](read)
    if isinstance(config.get("quantization"), Mapping):
        return _modelopt(_Read(config["quantization"], "quantization."))
    return None


class _Read(Entries):
    """The entries of a `quantization_config`."""

    def fail(self, key: str, expected: str) -> NoReturn:
        raise CheckpointError(f"{self.where}{key}: expected {expected}, got {short(self.get(key))}")

    def one_of(self, key: str, *known: Any) -> Any:
        """The value of an entry, which is one of these."""
        found = self.get(key)
        if not any(type(found) is type(value) and found == value for value in known):
            self.fail(key, " or ".join(str(value) for value in known if value is not None))
        return found

    def empty(self, key: str) -> None:
        if self.get(key) not in (None, {}, []):
            self.fail(key, "none")

    def group_size(self) -> int:
        found = self.get("group_size")
        if found == -1 and type(found) is int:
            return found
        return self.size("group_size", 128)


def _mxfp4(read: _Read) -> Quantisation:
    return Quantisation("mxfp4")


def _block(read: Entries, key: str, fail: Any) -> tuple[int, int]:
    """Rows and columns of a block; the default where the entry is null."""
    found = read.get(key)
    if found is None:
        return _BLOCK
    if not isinstance(found, list) or len(found) != 2 or not all(type(size) is int and size > 0 for size in found):
        fail(key, "two positive whole numbers or null")
    return found[0], found[1]


def _fp8(read: _Read) -> Quantisation:
    read.one_of("fmt", None, "e4m3")
    return Quantisation("fp8", block=_block(read, "weight_block_size", read.fail))


def _compressed(read: _Read) -> Quantisation:
    read.one_of("format", *_FORMATS)
    read.one_of("quantization_status", None, "compressed")
    for key in ("kv_cache_scheme", "transform_config"):
        read.empty(key)
    sparsity = read.get("sparsity_config")
    if sparsity not in (None, {}) and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        read.fail("sparsity_config", "none")
    groups = read.get("config_groups")
    blocks = set()
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            inner = _Read(weights, f"{read.where}config_groups.{name:.100}.weights.")
            blocks.add(_block(inner, "block_structure", inner.fail))
    if len(blocks) > 1:
        read.fail("config_groups", "blocks of one size")
    return Quantisation("compressed-tensors", block=blocks.pop() if blocks else _BLOCK)


def _gptq(read: _Read) -> Quantisation:
    version = read.one_of("checkpoint_format", None, "gptq", "gptq_v2")
    read.empty("dynamic")
    bits, size = read.one_of("bits", 4, 8), read.group_size()
    return Quantisation("gptq", bits, size, version != "gptq_v2", read.flag("sym", True))


def _awq(read: _Read) -> Quantisation:
    read.one_of("bits", 4)
    read.one_of("version", None, "gemm", "GEMM")
    read.one_of("zero_point", None, True)
    return Quantisation("awq", 4, read.group_size())


def _modelopt(read: _Read) -> Quantisation:
    read.one_of("quant_algo", "NVFP4", "FP8")
    read.one_of("group_size", None, 16)
    return Quantisation("modelopt")


_READERS = {
    "mxfp4": _mxfp4, "fp8": _fp8, "compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq, "modelopt": _modelopt,
}
