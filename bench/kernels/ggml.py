"""llama.cpp's CPU attention, called through the ggml libraries of llama-cpp-python.

llama.cpp runs `ggml_flash_attn_ext` if flash attention is on. K and V have the layout of its own cache.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from ctypes import POINTER, c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["FlashAttention", "load"]

Float32 = npt.NDArray[np.float32]
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
MASK_ROWS = 64  # rows of a mask are padded to a multiple of this


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _Ggml(NamedTuple):
    base: Any
    cpu: Any
    version: str


@cache
def load() -> _Ggml:
    """Load the libraries. Raises ImportError or OSError if they are missing."""
    package = importlib.util.find_spec("llama_cpp")
    if package is None or not package.submodule_search_locations:
        raise ImportError("llama-cpp-python is not installed")
    folder = Path(package.submodule_search_locations[0], "lib")

    def library(name: str) -> Any:
        found = sorted(folder.glob(f"*{name}.*"))
        if not found:
            raise OSError(f"no {name} in llama-cpp-python")
        return ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)

    base, cpu = library("ggml-base"), library("ggml-cpu")
    for owner, name, result, arguments in (
        (base, "ggml_init", c_void_p, [_InitParams]),
        (base, "ggml_free", None, [c_void_p]),
        (base, "ggml_new_tensor_4d", c_void_p, [c_void_p, c_int] + [c_int64] * 4),
        (base, "ggml_get_data", c_void_p, [c_void_p]),
        (base, "ggml_nbytes", c_size_t, [c_void_p]),
        (base, "ggml_flash_attn_ext", c_void_p, [c_void_p] * 5 + [c_float] * 3),
        (base, "ggml_new_graph", c_void_p, [c_void_p]),
        (base, "ggml_build_forward_expand", None, [c_void_p] * 2),
        (base, "ggml_quantize_chunk", c_size_t, [c_int, c_void_p, c_void_p] + [c_int64] * 3 + [POINTER(c_float)]),
        (base, "ggml_backend_graph_compute", c_int, [c_void_p] * 2),
        (cpu, "ggml_backend_cpu_init", c_void_p, []),
        (cpu, "ggml_backend_cpu_set_n_threads", None, [c_void_p, c_int]),
    ):
        function = getattr(owner, name)
        function.restype, function.argtypes = result, arguments
    return _Ggml(base, cpu, importlib.metadata.version("llama_cpp_python"))


class FlashAttention:
    """Attention over one of several K and V per call.

    Args:
        kind: of K and V, a key of `TYPES`.
        queries: `(batch, rows, heads, head_dim)`.
        keys, values: `(batch, kv_heads, tokens, head_dim)`.
        layers: copies of K and V, used in turn.
        threads: threads of the backend.
        causal: whether the rows have the last positions; otherwise every row sees all tokens.
    """

    def __init__(
        self, kind: str, queries: Float32, keys: Float32, values: Float32, layers: int, threads: int, *, causal: bool
    ) -> None:
        self._ggml, (batch, rows, heads, dim), (_, kv_heads, tokens, _) = load(), queries.shape, keys.shape
        base = self._ggml.base
        size = layers * (2 * keys.nbytes + 2 * queries.nbytes + 2 * (rows + MASK_ROWS) * tokens + (1 << 20)) + (
            64 << 20
        )
        self._context = base.ggml_init(_InitParams(size, None, False))
        self._backend = self._ggml.cpu.ggml_backend_cpu_init()
        self._ggml.cpu.ggml_backend_cpu_set_n_threads(self._backend, threads)
        q = self._tensor("f32", dim, rows, heads, batch)
        self._fill(q, "f32", np.ascontiguousarray(queries.transpose(0, 2, 1, 3)))
        mask = None
        if causal:
            padded = -(-rows // MASK_ROWS) * MASK_ROWS
            mask = self._tensor("f16", tokens, padded, 1, 1)
            seen = np.tril(np.ones((padded, tokens), bool), tokens - rows)
            self._copy(mask, np.where(seen, 0, -np.inf).astype(np.float16))
        self._graphs = []
        for _ in range(layers):
            k, v = (self._tensor(kind, dim, tokens, kv_heads, batch) for _ in range(2))
            self._fill(k, kind, keys)
            self._fill(v, kind, values)
            self._out = base.ggml_flash_attn_ext(self._context, q, k, v, mask, dim**-0.5, 0.0, 0.0)
            graph = base.ggml_new_graph(self._context)
            base.ggml_build_forward_expand(graph, self._out)
            self._graphs.append(graph)
        self._shape = (batch, rows, heads, dim)
        self._turn = 0

    def _tensor(self, kind: str, *sizes: int) -> Any:
        return self._ggml.base.ggml_new_tensor_4d(self._context, TYPES[kind], *sizes)

    def _copy(self, tensor: Any, array: npt.NDArray[Any]) -> None:
        ctypes.memmove(self._ggml.base.ggml_get_data(tensor), array.ctypes.data, array.nbytes)

    def _fill(self, tensor: Any, kind: str, array: Float32) -> None:
        if kind == "f32":
            self._copy(tensor, array)
        else:
            data, rows = self._ggml.base.ggml_get_data(tensor), array.size // array.shape[-1]
            source = np.ascontiguousarray(array)
            self._ggml.base.ggml_quantize_chunk(TYPES[kind], source.ctypes.data, data, 0, rows, array.shape[-1], None)

    def run(self) -> None:
        """Attend over the next layer."""
        self._turn = (self._turn + 1) % len(self._graphs)
        self._ggml.base.ggml_backend_graph_compute(self._backend, self._graphs[self._turn])

    def result(self) -> Float32:
        """The output of the last call, `(batch, rows, heads, head_dim)`."""
        data = ctypes.cast(self._ggml.base.ggml_get_data(self._out), POINTER(c_float))
        return np.ctypeslib.as_array(data, self._shape).copy()

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._ggml.base.ggml_free(self._context)
