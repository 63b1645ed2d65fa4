"""Digests of networks: what each gives for one text in each format, the same on every CPU and after every compiler.

An entry of `tests/golden/digests.json` is a name, "NETWORK WEIGHTS CACHE", and three digests: of the logits after each
piece of a prompt and each token that follows; of log-probabilities; and of the tokens of a sampled text. All inputs
come from raw bits of a seeded stream.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matrices import floats_of_scales, values_of
from places import GOLDEN, MODELS
from seeded_weights import SEEDED, golden_folder, values, write

from kvcache.core.calibration import Calibration
from kvcache.demo import DIRECTORY
from kvcache.engine import InferenceEngine, ModelConfig, SamplingParams, Transformer
from kvcache.eviction import EvictionPolicy
from kvcache.kernels import kernels
from kvcache.kernels.matrix import MATRIX_FORMATS, Matrix
from kvcache.networks.names import tensors_of
from kvcache.policies import TOVA, AdaKV, SnapKV

PATH = GOLDEN / "digests.json"
PARTS = ("logits", "log-probabilities", "tokens")
# Longer than the groups that quantised caches keep in f16: their codes are read.
PIECES, DECODED = (97, 33, 12), 6
SAMPLING = SamplingParams(
    temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.2,
    frequency_penalty=0.1, max_tokens=12, seed=7, ignore_eos=True, logprobs=3,
)

FEW = ("f32", "q8", "q4")
PLAIN: dict[str, dict[str, Any]] = {
    **{name: {"dtype": name} for name in kernels.FORMATS},
    **{f"{name}-whole": {"dtype": name, "residual_length": 0} for name, format in kernels.FORMATS.items()
       if format.bits < 8},
}
EVERY = PLAIN | {
    "q8-turned": {"dtype": "q8", "rotate": True},
    "q8-q2": {"key_dtype": "q8", "value_dtype": "q2"},
    "q4-f16": {"key_dtype": "q4", "value_dtype": "f16", "block_size": 32},
}
# What engines do beside: choose pages, evict tokens, steer the rounding of keys by a calibration.
MORE: dict[str, Callable[[Transformer], dict[str, Any]]] = {
    "sparse": lambda model: {"sparse_tokens": 16},
    "q4-sparse": lambda model: {"sparse_tokens": 16, "dtype": "q4"},
    "H2O": lambda model: {"eviction_policy": EvictionPolicy.H2O(), "kv_budget": 48},
    "q8-streaming": lambda model: {"eviction_policy": EvictionPolicy.StreamingLLM(4, 40), "dtype": "q8"},
    "TOVA": lambda model: {"eviction_policy": TOVA(), "kv_budget": 48},
    "SnapKV": lambda model: {"eviction_policy": SnapKV(per_head=True), "kv_budget": 48},
    "AdaKV": lambda model: {"eviction_policy": AdaKV(SnapKV(per_head=True)), "kv_budget": 48},
    "q4-calibrated": lambda model: {"dtype": "q4", "calibrate": calibration(model.config)},
    "q2-calibrated": lambda model: {"dtype": "q2", "calibrate": calibration(model.config)},
}
# Heads of other sizes; windows and sinks; latent rows.
ALL_CACHES = ("llama", "gpt_oss", "qwen3_100", "deepseek_v3")
ALL_WEIGHTS = ("llama", "gpt_oss", "qwen3_moe", "gemma4_experts", "qwen3_next", "wide")
WEIGHTS = (*((weights, "int8") for weights in ("f32", "f16", "bf16", "q8", "q4")), ("q8", "exact"), ("q4", "exact"))
PACKED_ONLY = ("qwen3_moe",)  # beside "wide": experts share a call
# Networks as GGUF files, which the package gguf writes: their angles and epsilons are said in other words.
GGUF = ("llama", "gemma3", "phi3_longrope", "llama_llama3_bf16", "mistral_yarn", "gpt_oss")


class Entry(NamedTuple):
    """A name of the file, and the options of the engine that gives its digests."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Network:
    """A network in one format of weights, and its entries."""

    name: str
    load: Callable[[], Transformer]
    caches: tuple[str, ...]

    def entries(self, model: Transformer) -> Iterator[Entry]:
        """The entries over `model`, which `load` has made."""
        for each in self.caches:
            yield Entry(f"{self.name} {each}", EVERY[each] if each in EVERY else MORE[each](model))


# ---------------------------------------------------------------- networks


WIDE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 288, "intermediate_size": 544,
    "num_attention_heads": 4, "vocab_size": 300, "num_key_value_heads": 2, "num_hidden_layers": 1, "head_dim": 80,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}


@cache
def _place():
    """A folder that this process removes when it ends."""
    return tempfile.TemporaryDirectory(prefix="kvcache-digests-")


@cache
def folder_of(name: str) -> Path:
    """The folder of a network: golden, in a tower, the demo's, or one with rows of more than a record of weights."""
    if name == "demo":
        return Path(DIRECTORY)
    if name.startswith("towers/"):
        return GOLDEN / name
    return _wide() if name == "wide" else golden_folder(name)


def _wide():
    folder = Path(_place().name) / "wide"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(WIDE))
    tensors = {}
    for name, shape in tensors_of(ModelConfig.from_dict(WIDE)):
        mean, deviation = (1.0, 0.2) if len(shape) == 1 else (0.0, shape[1] ** -0.5)
        found = values(62, name, shape, deviation, mean)
        tensors[name] = "F32", found, found
    write(folder / "model.safetensors", tensors)
    return folder


@cache
def gguf_of(name: str) -> Path:
    """A golden network as a GGUF file."""
    from gguf_files import as_converted, convert

    place = Path(_place().name)
    folder = as_converted(golden_folder(name), place / name)
    path = convert(folder, place / f"{name}.gguf")
    shutil.rmtree(folder)
    return path


def raw(seed: str, count: int) -> np.ndarray:
    """Raw bits of a stream, uint64."""
    key = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little")
    return np.random.PCG64(key).random_raw(count) >> np.uint64(16)


def packed(seed: str, rows: int, columns: int, format: str) -> Matrix:
    """A matrix of random codes and scales, sized so that a product keeps the size of its rows."""
    line = MATRIX_FORMATS[format]
    groups, records = -(-columns // line.channels), -(-columns // line.record)
    codes = (raw(seed + "/codes", rows * columns) & np.uint64((1 << line.bits) - 1)).astype(np.uint8)
    codes = codes.reshape(rows, columns)
    codes = codes.view(np.int8) if line.bits == 8 else codes
    bits = [raw(f"{seed}/{each}", rows * groups).reshape(rows, groups) for each in ("scales", "minima")]
    if line.scales == "halves":
        scales, minima = (((each & np.uint64(255)).astype(np.float32) / 256 + 0.5) for each in bits)
        minima *= -(1 << line.bits) / 2
    else:
        low, high = {"nibbles": (1, 16), "e8m0": (120, 124), "e4m3": (40, 56)}.get(line.scales, (16, 64))
        scales, minima = ((low + each % np.uint64(high - low)).astype(np.uint8) for each in bits)
        scales = scales if line.has_minima or line.scales != "bytes" else scales.view(np.int8)
    minima = minima if line.has_minima else None
    units = None
    if line.has_units:
        units = np.ones((rows, records, 2) if line.has_minima else (rows, records), np.float32)
        if line.has_minima:
            units[..., 1] = -(1 << line.bits) / 2
    stands = values_of(format, codes, scales, minima, units)
    size = math.fsum((stands[: min(rows, 8)].astype(np.float64) ** 2).ravel().tolist()) / (min(rows, 8) * columns)
    factor = 2.0 ** -round(math.log2(math.sqrt(size * columns)))
    if units is not None:
        units *= np.float32(factor)
    elif line.scales == "halves":
        scales = (scales * factor).astype(np.float16)
        minima = None if minima is None else (minima * factor).astype(np.float16)
    else:
        scales = (scales.astype(np.int32) + int(math.log2(factor))).astype(np.uint8)
    assert np.isfinite(floats_of_scales(line, scales)).all()
    matrix = Matrix(rows, columns, format)
    matrix.put_codes(0, codes, scales, minima, units)
    return matrix


def with_packed(model: Transformer, format: str) -> Transformer:
    """The network with matrices of random codes in place of its own, but for those of its routers."""
    made: dict[int, Matrix] = {}

    def other(value: Any) -> Any:
        if isinstance(value, Matrix):
            if id(value) not in made:
                made[id(value)] = packed(f"{format}/{len(made)}", *value.shape, format)
            return made[id(value)]
        if isinstance(value, tuple):
            return tuple(map(other, value))
        if not is_dataclass(value):
            return value
        names = [field.name for field in fields(value) if field.name != "router"]
        return replace(value, **{name: other(getattr(value, name)) for name in names})

    return Transformer(model.config, other(model.weights))


@cache
def packed_network(name: str, format: str) -> Transformer:
    """See `with_packed`; levels share it."""
    return with_packed(Transformer.from_pretrained(folder_of(name)), format)


def calibration(config: ModelConfig) -> Calibration:
    """Centres and symmetric moments for any network with heads of one size."""
    shape = (config.num_layers, config.num_kv_heads, config.head_dim)
    factors = values(3, "moments", (*shape, config.head_dim), 1.0, 0.0).astype(np.float64)
    moments = np.zeros((*shape, config.head_dim))
    for i in range(config.head_dim):
        moments += factors[..., i, :, None] * factors[..., i, None, :] / (1 + i)
    return Calibration(values(3, "centres", shape, 1.0, 0.0), moments.astype(np.float32))


def networks(gguf: bool) -> Iterator[Network]:
    """All networks in all formats of weights; `gguf`: those of GGUF files too."""
    everything = (*EVERY, *MORE)
    towers = [f"towers/{path.parent.name}" for path in sorted(GOLDEN.glob("towers/*/config.json"))]
    for name in (*MODELS, *SEEDED, *towers, "demo", "wide"):
        caches = everything if name == "llama" else (*PLAIN,) if name in ALL_CACHES else FEW
        yield Network(f"{name} auto", lambda name=name: Transformer.from_pretrained(folder_of(name)), caches)
    for name in ALL_WEIGHTS:
        for weights, activations in WEIGHTS:
            yield Network(
                f"{name} {weights}{'-exact' * (activations == 'exact')}",
                lambda name=name, weights=weights, activations=activations: Transformer.from_pretrained(
                    folder_of(name), weights=weights, activations=activations
                ),
                ("f32",),
            )
    for name in ("wide", *PACKED_ONLY):
        for format, line in MATRIX_FORMATS.items():
            if line.packed:
                load = partial(packed_network, name, format)
                yield Network(f"{name} {format}", load, ("f32",))
    for name in GGUF if gguf else ():
        yield Network(f"gguf/{name} auto", lambda name=name: Transformer.from_pretrained(gguf_of(name)), ("f32", "q4"))


# ---------------------------------------------------------------- digests


def digest(arrays: list[np.ndarray]) -> str:
    """64 bits of BLAKE2 over the bits of floats, in which all NaN are one, or of whole numbers."""
    total = hashlib.blake2b(digest_size=8)
    for array in arrays:
        if array.dtype.kind == "f":
            array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def text_of(config: ModelConfig) -> np.ndarray:
    """The tokens of a prompt and of those that follow it."""
    count = min(sum(PIECES) + DECODED, config.max_position_embeddings)
    return (raw("text", count) % np.uint64(config.vocab_size)).astype(np.uint32)


def digests_of(model: Transformer, options: dict[str, Any]) -> str:
    """The three digests of an engine over `model`."""
    tokens, logits, at = text_of(model.config), [], 0
    engine = InferenceEngine(model, **options)
    for size in (*PIECES, *[1] * DECODED):
        piece = tokens[at : at + size]
        if len(piece):
            logits.append(engine.prefill_from_pos(piece, at) if size > 1 else engine.decode_step(int(piece[0]), at))
        at += len(piece)
    scores = engine.score(tokens)
    sampled = engine.complete(tokens[: min(40, len(tokens) - 12)], SAMPLING)
    chances = [each.logprob for each in sampled.logprobs] + [x for each in sampled.logprobs for x in each.top.values()]
    tops = [token for each in sampled.logprobs for token in each.top]
    return " ".join((
        digest(logits), digest([scores, np.array(chances)]), digest([np.array(sampled.tokens + tops, np.int64)])
    ))


def all_digests(gguf: bool, takes: Callable[[int, Network], bool] = lambda number, network: True) -> dict[str, str]:
    """Each entry at the SIMD level in use, of the networks that it takes; `gguf`: those of GGUF files too."""
    found = {}
    for network in [each for number, each in enumerate(networks(gguf)) if takes(number, each)]:
        model = network.load()
        found |= {entry.name: digests_of(model, entry.options) for entry in network.entries(model)}
    return found
