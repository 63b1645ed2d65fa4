"""Rivals that read the same GGUF files, in their default precision, and transformers in bf16."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.engine.engine_rivals import ROOM, LlamaCpp, Rival, Tokens, Transformers
from bench.engine.mistral_rs import MistralRs
from bench.engine.popular import IkLlamaText, OpenVinoText
from bench.engine.shapes import Shape, values_of
from bench.engine.vllm_cpu import VllmHalf
from bench.support.blas import set_threads
from bench.support.checkpoints import Size, write_gguf
from bench.support.common import Candidate, Case, Result
from bench.support.packed_files import quantise, write_packed
from bench.support.report import reason_of
from bench.support.tables import measured

__all__ = ["COMMON_FILES", "GGUF_FILES", "RIVALS", "measure_each", "write_files"]

GGUF_FILES = {  # llama.cpp's numbers of the file types
    "f16": 1, "q8_0": 7, "q4_0": 2, "q4_k_m": 15, "bf16": 32, "q6_k": 18, "q5_k_m": 17, "q3_k_m": 12, "q2_k": 10,
    "q5_0": 8, "q5_1": 9, "q4_1": 3, "iq4_nl": 25, "iq4_xs": 30, "mxfp4": 38,
}
COMMON_FILES = ("f16", "q8_0", "q4_0", "q4_k_m")  # OpenVINO reads these


def write_files(size: Size | Shape, folder: Path, names: Sequence[str] = COMMON_FILES) -> None:
    """Write the random network as f16 and, with llama.cpp, in packed types; files that are there are kept.

    For a large network only the named files are written; llama.cpp packs them.

    Args:
        names: those of `GGUF_FILES`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(size, Shape) and size.large:
        for name in (each for each in names if not (folder / f"{each}.gguf").exists()):
            kind = GGUF_FILES[name]
            write_packed(folder / f"{name}.gguf", size.entries(kind), size.tensors, values_of, kind)
        return
    if not (folder / "f16.gguf").exists():
        if isinstance(size, Shape):
            size.write(folder / "f16.gguf")
        else:
            write_gguf(size, folder / "f16.gguf", half=True)
    for name in (each for each in names if not (folder / f"{each}.gguf").exists()):
        try:
            quantise(folder / "f16.gguf", folder / f"{name}.gguf", GGUF_FILES[name])
        except ImportError:
            return


class IkLlama(Rival):
    """ik_llama.cpp with flash attention and float16 K and V; matrices as the file has them."""

    name = IkLlamaText.name

    def __init__(self, path: Path, threads: int, context: int = ROOM) -> None:
        self._text = IkLlamaText(path, threads, context)

    @staticmethod
    def version() -> str:
        return IkLlamaText.version()

    def prefill(self, tokens: Tokens) -> None:
        self._text.start(tokens)
        self._held = len(tokens)

    def rewind(self) -> None:
        self._text.cut(self._held)

    def decode(self, steps: int) -> None:
        """Run greedy decode steps."""
        token = 3
        for _ in range(steps):
            token = self._text.extend(np.array([token], np.uint32))

    def extend(self, tokens: Tokens) -> None:
        """Run more tokens after the prompt."""
        self._text.extend(tokens)


# rival -> the files that it reads
RIVALS: dict[Any, tuple[str, ...]] = {
    LlamaCpp: tuple(GGUF_FILES), IkLlama: tuple(GGUF_FILES), MistralRs: tuple(GGUF_FILES),
    OpenVinoText: COMMON_FILES, Transformers: ("f16",), VllmHalf: ("f16",),
}


def measure_each(
    builders: Iterable[tuple[str, Callable[[], Any]]],
    candidates: Callable[[Any, str], Iterable[tuple[str, Candidate]]],
    results: dict[str, Result],
    threads: int,
    rounds: int,
) -> None:
    """Measure one engine after another, each with all its rounds: not all of them fit the memory together.

    Args:
        builders: `(name, function that makes the engine)`; one that cannot be made is reported.
        candidates: from an engine and its name, `(key of results, candidate)`.
        results: get the times.
    """
    for name, build in builders:
        set_threads(threads)
        try:
            engine = build()
        except Exception as error:  # the rival's package is absent, or does not read this file
            print(f"not measured: {name} ({reason_of(error)})")
            continue
        set_threads(threads)
        for what, candidate in candidates(engine, name):
            one = measured(Case(what, lambda c=candidate: [c]), rounds)
            results[what].times |= one.times
            results[what].facts |= one.facts
        del engine
        gc.collect()
