"""llama.cpp beside the engine: files that it quantises, and its logits of every position.

Needs llama-cpp-python. Requests are token ids, so the vocabulary of a file does not matter.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.gguf import GgufFile

__all__ = ["CACHES", "FILES", "LlamaLogits", "bits_per_weight", "installed", "quantise", "quiet", "version"]

Float32 = npt.NDArray[np.float32]
# Kinds of files, and llama.cpp's numbers for them.
FILES = {"F32": 0, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q4_K_M": 15}
# Formats of K and V: llama.cpp's numbers, and bits per value. Those of fewer bits need its flash attention.
CACHES = {"f32": (0, 32.0), "q8_0": (8, 8.5), "q5_1": (7, 6.0), "q4_1": (3, 5.0), "q4_0": (2, 4.5)}


def installed() -> bool:
    """True if llama-cpp-python can be imported."""
    return importlib.util.find_spec("llama_cpp") is not None


def version() -> str:
    """The version of llama-cpp-python."""
    import llama_cpp

    return str(llama_cpp.__version__)


def quiet() -> None:
    """Stop the library's messages about each tensor."""
    import llama_cpp

    @llama_cpp.llama_log_callback
    def ignore(level: int, text: bytes, data: Any) -> None:
        pass

    global _callback
    _callback = ignore  # the library keeps a pointer to it
    llama_cpp.llama_log_set(ignore, ctypes.c_void_p(0))


def quantise(path: Path, kind: str, threads: int) -> Path:
    """Write the network of a GGUF file as another kind of file, a key of `FILES`, beside it."""
    import llama_cpp

    out = path.with_name(f"{path.stem}-{kind}.gguf")
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread, options.allow_requantize = FILES[kind], threads, True
    if llama_cpp.llama_model_quantize(str(path).encode(), str(out).encode(), ctypes.byref(options)):
        raise RuntimeError(f"{path}: expected llama.cpp to write {kind}, got an error")
    return out


def bits_per_weight(path: Path) -> float:
    """Bits per weight of the matrices of a GGUF file."""
    matrices = [info for info in GgufFile(path).values() if len(info.shape) == 2]
    return 8 * sum(info.stop - info.start for info in matrices) / sum(int(np.prod(info.shape)) for info in matrices)


class LlamaLogits:
    """The logits of all tokens of a text.

    Args:
        kv: the format of K and V, a key of `CACHES`.
    """

    def __init__(self, path: Path, context: int, threads: int, kv: str = "f32") -> None:
        import llama_cpp

        number = CACHES[kv][0]
        self._llama = llama_cpp.Llama(
            str(path), n_ctx=context, n_batch=context, n_ubatch=min(context, 512), n_threads=threads,
            n_threads_batch=threads, logits_all=True, type_k=number, type_v=number, verbose=False,
            flash_attn=kv != "f32",
        )
        self.bits = bits_per_weight(path)

    def __call__(self, tokens: npt.NDArray[np.uint32]) -> Float32:
        """The logits after each token but the last, `(n - 1, vocabulary)`."""
        self._llama.reset()
        self._llama.eval(tokens[:-1].tolist())
        found: Float32 = self._llama.scores[: len(tokens) - 1].copy()
        return found
