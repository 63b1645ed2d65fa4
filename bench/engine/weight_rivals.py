"""Rivals that read the same GGUF files: llama.cpp and OpenVINO GenAI in their default precision, transformers in bf16.

A rival prefills a prompt (`prefill`) and decodes `steps` tokens behind it (`rewind`, then `decode`), as our engine
does. All inputs are token ids.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.engine import engine_rivals
from bench.engine.shapes import Shape
from bench.support.checkpoints import Size, write_gguf

__all__ = ["COMMON_FILES", "GGUF_FILES", "RIVALS", "OpenVino", "availability", "write_files"]

GGUF_FILES = {  # llama.cpp's numbers of the file types
    "f16": 1, "q8_0": 7, "q4_0": 2, "q4_k_m": 15, "bf16": 32, "q6_k": 18, "q5_k_m": 17, "q3_k_m": 12, "q2_k": 10,
    "q5_0": 8, "q5_1": 9, "q4_1": 3, "iq4_nl": 25, "iq4_xs": 30, "mxfp4": 38,
}
COMMON_FILES = ("f16", "q8_0", "q4_0", "q4_k_m")  # OpenVINO reads these


def write_files(size: Size | Shape, folder: Path, names: Sequence[str] = COMMON_FILES) -> None:
    """Write the random network as f16 and, with llama.cpp, in packed types; files that are there are kept.

    Args:
        names: those of `GGUF_FILES`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "f16.gguf").exists():
        if isinstance(size, Shape):
            size.write(folder / "f16.gguf")
        else:
            write_gguf(size, folder / "f16.gguf", half=True)
    try:
        import llama_cpp
    except ImportError:
        return
    for name in names:
        target, kind = folder / f"{name}.gguf", GGUF_FILES[name]
        if target.exists():
            continue
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = kind
        if llama_cpp.llama_model_quantize(
            str(folder / "f16.gguf").encode(), str(target).encode(), ctypes.byref(parameters)
        ):
            target.unlink(missing_ok=True)


class LlamaCpp(engine_rivals.LlamaCpp):
    """llama.cpp through llama-cpp-python, with flash attention and float16 K and V, its defaults but for the former."""

    files = tuple(GGUF_FILES)

    def __init__(self, path: Path, threads: int, context: int = 4352) -> None:
        import llama_cpp

        self._llama = llama_cpp.Llama(
            str(path), n_ctx=context, n_batch=512, n_threads=threads, n_threads_batch=threads, flash_attn=True,
            verbose=False,
        )
        self._held = 0


class Transformers(engine_rivals.Transformers):
    """transformers on PyTorch in bfloat16, with `DynamicCache`. It multiplies packed weights as floats."""

    files = ("f16",)

    def __init__(self, path: Path, threads: int) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._torch, self._cache_class = torch, transformers.DynamicCache
        torch.set_num_threads(threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.bfloat16
        ).eval()
        self._cache: Any = None
        self._held = 0


class OpenVino(engine_rivals.OpenVino):
    """OpenVINO GenAI's pipeline for one request, with the defaults of the CPU plugin: bf16 where the CPU has it."""

    name = "OpenVINO"
    files = COMMON_FILES

    def __init__(self, path: Path, threads: int) -> None:
        import openvino_genai

        self._genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = 1
        scheduler.max_num_batched_tokens = 4352
        self._pipeline = openvino_genai.LLMPipeline(
            str(path), "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads
        )


RIVALS = (LlamaCpp, OpenVino, Transformers)


def availability() -> list[str]:
    """A line per rival: its version, or the reason for its absence."""
    lines = []
    for rival in RIVALS:
        try:
            lines.append(f"{rival.name} {rival.version()}")
        except ImportError as error:
            lines.append(f"not measured: {rival.name} ({error})")
    return lines
