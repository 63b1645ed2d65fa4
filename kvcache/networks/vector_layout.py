"""`VectorLayout`: the way a checkpoint makes vectors of texts, as sentence-transformers or a GGUF file say it.

`modules.json` lists modules in their order: the network, a pooling, perhaps dense layers, perhaps a normalisation; or
the network and `LogitScore`, which compares the logits of two tokens: a reranker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CheckpointError
from kvcache.gguf.blocks import LOADABLE, row_bytes, values
from kvcache.gguf.file import GgufFile
from kvcache.kernels.functions import tanh
from kvcache.kernels.matrix import Matrix
from kvcache.networks.files import MAX_CONFIG_BYTES, parse_json, read_file, read_json
from kvcache.networks.safetensors import SafetensorsFile
from kvcache.support.arguments import short
from kvcache.support.json_text import json_fault

__all__ = ["GGUF_TENSORS", "Dense", "VectorLayout"]

Float32 = NDArray[np.float32]

_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
_OLD = "pooling_mode_"
_POOLINGS = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
_IDENTITY = "torch.nn.modules.linear.Identity"
_ACTIVATIONS: dict[str, Callable[[Float32], Float32]] = {
    _IDENTITY: lambda x: x,
    "torch.nn.modules.activation.Tanh": lambda x: tanh(x).astype(np.float32),
}
_GGUF = {0: None, 1: "mean", 3: "last"}  # `pooling_type`
_RANK, _RANKS = 4, ("qwen3", "qwen3vl")  # the one of rerankers, and the architectures whose last row it reads
_JUDGE, _DENSE = "cls.output.weight", ("dense_2.weight", "dense_3.weight")  # tensors
_LABELS = ["yes", "no"]  # of the rows of the former
GGUF_TENSORS = frozenset((_JUDGE, *_DENSE))
# What entries of a dense layer have to say, if anything.
_OWN = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding", "use_residual": False}


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A layer behind the pooling.

    Attributes:
        weight, bias: `(out, in)` and `(out,)`; None: no bias.
        activation: a key of the table of activations, as files name it.
    """

    weight: Matrix
    bias: Float32 | None
    activation: str

    @classmethod
    def read(cls, folder: Path) -> Dense:
        """Read `config.json` and `model.safetensors` of a folder. Raises as `VectorLayout.of_folder`."""
        path = folder / "config.json"
        config = read_json(path)
        for key, own in _OWN.items():
            if config.get(key) not in (None, own):
                raise CheckpointError(f"{path}: {key}: expected {own}, got {short(config[key])}")
        activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
        if not isinstance(activation, str) or activation not in _ACTIVATIONS:
            raise CheckpointError(
                f"{path}: activation_function: expected one of {', '.join(_ACTIVATIONS)}, got {short(activation)}"
            )
        file = SafetensorsFile(folder / "model.safetensors")
        shape = config.get("out_features"), config.get("in_features")
        expected: dict[str, Any] = {"linear.weight": shape}
        if config.get("bias", True):
            expected["linear.bias"] = shape[:1]
        found: dict[str, Any] = {name: info.shape for name, info in file.items()}
        if found != expected or not all(type(size) is int for size in shape):
            raise CheckpointError(f"{file.path}: expected tensors {short(expected)}, got {short(found)}")
        bias = file.read("linear.bias") if "linear.bias" in file else None
        return cls(_matrix(file.read("linear.weight")), bias, activation)

    @classmethod
    def of_gguf(cls, file: GgufFile, name: str) -> Dense:
        """Read a matrix of a GGUF file. CheckpointError: it has none of this name, or no matrix."""
        info = file.get(name)
        if info is None or len(info.shape) != 2 or info.dtype not in LOADABLE:
            found = "none" if info is None else f"{info.dtype} {info.shape}"
            raise CheckpointError(f"{file.path}: {name}: expected a matrix, got {found}")
        raw = np.empty((info.shape[0], row_bytes(info.dtype, info.shape[1])), np.uint8)
        file.read([raw], name)
        return cls(_matrix(values(info.dtype, raw, info.shape[1])), None, _IDENTITY)

    def __call__(self, rows: Float32) -> Float32:
        """The results of rows `(n, in)`, `(n, out)`; each has the same bits in any company."""
        return _ACTIVATIONS[self.activation](self.weight.multiply(rows, self.bias, activations="exact"))


@dataclass(frozen=True, slots=True, eq=False)
class VectorLayout:
    """The way a checkpoint makes vectors, or scores, of texts.

    Attributes:
        pooling: "last", the row of the last token, or "mean", that of all; None: it makes no vectors.
        dense: the layers behind it.
        prompts, default_prompt: texts that stand before others, by their names; the name of the one by default.
        pools_prompt: whether the tokens of a prompt count in the mean.
        most_tokens: the most tokens of a text; None: those of the network.
        dimensions: how many of the first numbers of a vector are kept; None: all.
        judges: the ids of the tokens whose logits a reranker compares, of true and of false; None: it compares none.
        judge: the two rows of the head of these tokens, where a file has them apart.
    """

    pooling: str | None = None
    dense: tuple[Dense, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    pools_prompt: bool = True
    most_tokens: int | None = None
    dimensions: int | None = None
    judges: tuple[int, int] | None = None
    judge: Dense | None = None

    @property
    def is_reranker(self) -> bool:
        """Whether it makes scores of documents."""
        return self.judges is not None or self.judge is not None

    def expect(self, hidden_size: int, vocab_size: int) -> None:
        """CheckpointError: layers or tokens that do not go with a network of these sizes."""
        for layer in self.dense:
            if layer.weight.shape[1] != hidden_size:
                raise CheckpointError(f"in_features: expected {hidden_size}, got {layer.weight.shape[1]}")
            hidden_size = layer.weight.shape[0]
        if self.judge is not None and self.judge.weight.shape != (2, hidden_size):
            raise CheckpointError(f"{_JUDGE}: expected shape (2, {hidden_size}), got {self.judge.weight.shape}")
        if self.judges is not None and not (max(self.judges) < vocab_size and len({*self.judges}) == 2):
            raise CheckpointError(f"true_token_id: expected two ids below {vocab_size}, got {self.judges}")

    @classmethod
    def of_gguf(cls, file: GgufFile) -> VectorLayout | None:
        """The layout that an open GGUF file says; None: none.

        Raises:
            CheckpointError: another pooling than those that are read; a matrix or labels of another form.
        """
        letters = file.metadata.get("general.architecture")
        kind = file.metadata.get(f"{letters}.pooling_type", 0)
        if type(kind) is int and kind == _RANK and letters in _RANKS:
            labels = file.metadata.get(f"{letters}.classifier.output_labels", _LABELS)
            if not isinstance(labels, list) or labels != _LABELS:
                name, expected = f"{letters}.classifier.output_labels", " and ".join(_LABELS)
                raise CheckpointError(f"{file.path}: {name}: expected {expected}, got {short(labels)}")
            return cls(judge=Dense.of_gguf(file, _JUDGE))
        if type(kind) is not int or kind not in _GGUF:
            expected = f"{', '.join(map(str, _GGUF))}, or {_RANK} of {' and '.join(_RANKS)}"
            raise CheckpointError(f"{file.path}: {letters}.pooling_type: expected {expected}, got {short(kind)}")
        pooling = _GGUF[kind]
        if pooling is None:
            return None
        return cls(pooling, tuple(Dense.of_gguf(file, name) for name in _DENSE if name in file))

    @classmethod
    def of_folder(cls, folder: Path) -> VectorLayout | None:
        """The layout of a folder with `modules.json`; None: there is no such file.

        Raises:
            CheckpointError: another module, order, pooling or option than those that are read; a damaged file.
            FileNotFoundError: a file that it names is missing.
        """
        path = folder / "modules.json"
        if not path.exists():
            return None
        modules = _modules(path)
        kinds = [kind for kind, _ in modules]
        if kinds == ["Transformer", "LogitScore"]:
            return cls(judges=_judges(folder / modules[1][1] / "config.json"))
        order = [_ORDER.index(kind) if kind in _ORDER else -1 for kind in kinds]
        if order != sorted(order) or kinds[:2] != list(_ORDER[:2]) or kinds.count("Pooling") > 1:
            raise CheckpointError(
                f"{path}: expected Transformer, Pooling, Dense layers and Normalize, or Transformer and LogitScore, "
                f"got {', '.join(kinds) or 'nothing'}"
            )
        pooling, pools_prompt = _pooling(folder / modules[1][1] / "config.json")
        dense = tuple(Dense.read(folder / place) for kind, place in modules if kind == "Dense")
        texts = _optional(folder / "config_sentence_transformers.json")
        prompts = texts.get("prompts") or {}
        if not isinstance(prompts, dict) or not all(isinstance(each, str) for each in prompts.values()):
            raise CheckpointError(f"{folder}: prompts: expected texts by their names, got {short(prompts)}")
        default = texts.get("default_prompt_name")
        if default is not None and default not in [*prompts]:
            raise CheckpointError(f"{folder}: default_prompt_name: expected one of prompts, got {short(default)}")
        most = _optional(folder / modules[0][1] / "sentence_bert_config.json").get("max_seq_length")
        return cls(
            pooling, dense, prompts, default, pools_prompt, _size(most, "max_seq_length"),
            _size(texts.get("truncate_dim"), "truncate_dim"),
        )


def _modules(path: Path) -> list[tuple[str, str]]:
    try:
        found = parse_json(read_file(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected valid JSON, got {json_fault(error)}") from None
    if not isinstance(found, list):
        raise CheckpointError(f"{path}: expected a list of modules, got {type(found).__name__}")
    return [_module(path, each) for each in found]


def _module(path: Path, entry: Any) -> tuple[str, str]:
    """The kind and the folder of a module."""
    kind: Any
    place: Any
    kind, place = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
    named = isinstance(kind, str) and isinstance(place, str)
    if not named or Path(place).is_absolute() or ".." in Path(place).parts or "\0" in place:
        raise CheckpointError(f"{path}: expected modules with a type and a path inside the folder, got {short(entry)}")
    return kind.rpartition(".")[2], place


def _pooling(path: Path) -> tuple[str, bool]:
    """The pooling, and whether it counts the prompt, of its `config.json`, of older versions too."""
    config = read_json(path)
    modes: Any = config.get("pooling_mode")
    if modes is None:
        modes = [key.removeprefix(_OLD) for key, value in config.items() if key.startswith(_OLD) and value is True]
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _POOLINGS:
        raise CheckpointError(f"{path}: pooling_mode: expected lasttoken or mean, got {short(modes)}")
    counted = config.get("include_prompt", True)
    if not isinstance(counted, bool):
        raise CheckpointError(f"{path}: include_prompt: expected true or false, got {short(counted)}")
    return _POOLINGS[modes[0]], counted


def _judges(path: Path) -> tuple[int, int]:
    config = read_json(path)
    found = config.get("true_token_id"), config.get("false_token_id")
    if not all(type(each) is int and each >= 0 for each in found):
        raise CheckpointError(f"{path}: expected true_token_id and false_token_id, got {short(config)}")
    return found[0], found[1]  # type: ignore[return-value]


def _matrix(rows: Float32) -> Matrix:
    found = Matrix(len(rows), rows.shape[1], "f32")
    found.put(0, rows)
    return found


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _size(value: Any, name: str) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise CheckpointError(f"{name}: expected a whole number above 0, got {short(value)}")
    found: int | None = value
    return found
