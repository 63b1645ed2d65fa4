"""llama.cpp and ik_llama.cpp through the C functions that their servers are made of, behind one interface."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BATCH", "IkBatchesApi", "IkLlamaApi", "LlamaApi", "RepackedIkLlamaApi"]

BATCH = 512  # tokens of a step
_END = -1  # of positions, and of sequences


class LlamaApi:
    """A network with K and V in f16, in one pool of cells for all sequences, with flash attention.

    Args:
        cells: tokens that fit.
        sequences: the most that there are.

    Attributes:
        batch: the rows of the next step.
        vocabulary: tokens that it knows.
    """

    name = "llama.cpp"
    state_flags: tuple[int, ...] = ()  # last arguments of the functions that copy a sequence

    def __init__(self, path: Path, threads: int, cells: int, sequences: int = 1) -> None:
        self._library: Any = self._load()
        self._quiet = self._silence()
        self._library.llama_backend_init()
        self._model = self._library.llama_model_load_from_file(str(path).encode(), self._model_settings())
        if not self._model:
            raise ValueError(f"{path.name} is not read")
        settings = self._library.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = -(-cells // 256) * 256, BATCH, BATCH
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = threads
        self._set(settings)
        self._context = self._library.llama_init_from_model(self._model, settings)
        if not self._context:
            raise ValueError(f"{path.name} gets no context of {cells} tokens")
        self.vocabulary = int(self._library.llama_vocab_n_tokens(self._library.llama_model_get_vocab(self._model)))
        self.batch = self._library.llama_batch_init(BATCH, 0, 1)

    @staticmethod
    def version() -> str:
        import llama_cpp

        return str(llama_cpp.__version__)

    def _load(self) -> Any:
        import llama_cpp

        return llama_cpp

    def _silence(self) -> Any:
        """Drop its messages; the caller keeps what this returns."""
        quiet = self._library.llama_log_callback(lambda level, text, user: None)
        self._library.llama_log_set(quiet, c_void_p(0))
        return quiet

    def _model_settings(self) -> Any:
        return self._library.llama_model_default_params()

    def _set(self, settings: Any) -> None:
        settings.kv_unified, settings.flash_attn_type, settings.swa_full = True, 1, False

    @property
    def _cells(self) -> Any:
        """The first argument of the functions of cells."""
        return self._library.llama_get_memory(self._context)

    def put(self, row: int, token: int, pos: int, sequence: int, *, due: bool) -> None:
        """Set a row of the batch; `due`: its logits are needed."""
        batch = self.batch
        batch.token[row], batch.pos[row], batch.logits[row] = token, pos, due
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence

    def run(self, rows: int) -> int:
        """Run the first rows of the batch; 0 if they fitted, 1 if no cells are left."""
        self.batch.n_tokens = rows
        return int(self._library.llama_decode(self._context, self.batch))

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """The logits of a row of the last batch."""
        found = self._library.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(found, (self.vocabulary,))

    def clear(self) -> None:
        """Drop every sequence; the next tokens take the first cells, one behind another."""
        self._library.llama_memory_clear(self._cells, False)

    def forget(self, sequence: int, start: int = _END) -> None:
        """Drop the tokens of a sequence from `start` on, or all."""
        self._library.llama_memory_seq_rm(self._cells, sequence, start, _END)

    def copy(self, source: int, target: int, count: int = _END) -> None:
        """Give a sequence the first `count` tokens of another one too, or all."""
        self._library.llama_memory_seq_cp(self._cells, source, target, _END, count)

    def move(self, sequence: int, by: int) -> None:
        """Add to the positions of a sequence."""
        self._library.llama_memory_seq_add(self._cells, sequence, _END, _END, by)

    def duplicate(self, source: int, target: int) -> None:
        """Write K and V of a sequence into further cells, as another sequence's."""
        size = self._library.llama_state_seq_get_size(self._context, source, *self.state_flags)
        memory = (ctypes.c_uint8 * size)()
        self._library.llama_state_seq_get_data(self._context, memory, size, source, *self.state_flags)
        if not self._library.llama_state_seq_set_data(self._context, memory, size, target, *self.state_flags):
            raise ValueError("K and V of a sequence are not read again")

    def close(self) -> None:
        """Free what it holds."""
        self._library.llama_batch_free(self.batch)
        self._library.llama_free(self._context)
        self._free_model()

    def _free_model(self) -> None:
        self._library.llama_model_free(self._model)


class _IkFunctions:
    """The functions that ik-llama-cpp-python binds, and those of cells, which it does not."""

    def __init__(self) -> None:
        from ik_llama_cpp import _ctypes_api

        self._bound, library = _ctypes_api, _ctypes_api._lib
        for name, result, arguments in (
            ("llama_kv_cache_seq_rm", ctypes.c_bool, [c_void_p] + [c_int32] * 3),
            ("llama_kv_cache_seq_cp", None, [c_void_p] + [c_int32] * 4),
            ("llama_kv_cache_seq_add", None, [c_void_p] + [c_int32] * 4),
            ("llama_state_seq_get_size", c_size_t, [c_void_p, c_int32, c_uint32]),
            ("llama_state_seq_get_data", c_size_t, [c_void_p, c_void_p, c_size_t, c_int32, c_uint32]),
            ("llama_state_seq_set_data", c_size_t, [c_void_p, c_void_p, c_size_t, c_int32, c_uint32]),
            ("llama_log_set", None, [c_void_p, c_void_p]),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.replace("kv_cache", "memory"), function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bound, name)


class IkLlamaApi(LlamaApi):
    """ik_llama.cpp; matrices as the file has them, which it packs again for each batch."""

    name = "ik_llama.cpp"
    repack, flash, state_flags = False, True, (0,)

    @staticmethod
    def version() -> str:
        from importlib.metadata import version

        import ik_llama_cpp  # noqa: F401

        return version("ik_llama_cpp_python")

    def _load(self) -> Any:
        return _IkFunctions()

    def _silence(self) -> Any:
        quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, c_void_p)(lambda level, text, user: None)
        self._library.llama_log_set(ctypes.cast(quiet, c_void_p), None)
        return quiet

    def _model_settings(self) -> Any:
        settings = self._library.llama_model_default_params()
        settings.use_mmap, settings.repack_tensors = not self.repack, self.repack
        return settings

    def _set(self, settings: Any) -> None:
        settings.flash_attn = self.flash

    @property
    def _cells(self) -> Any:
        return self._context

    def clear(self) -> None:
        self._library.llama_kv_cache_clear(self._context)

    def _free_model(self) -> None:
        self._library.llama_free_model(self._model)


class IkBatchesApi(IkLlamaApi):
    """The same without flash attention, which ends the process where a batch has several sequences."""

    flash = False


class RepackedIkLlamaApi(IkLlamaApi):
    """The same with matrices whose rows it interleaves when it loads them, its option -rtr."""

    name = "ik_llama.cpp -rtr"
    repack = True
