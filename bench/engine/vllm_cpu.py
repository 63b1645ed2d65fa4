"""vLLM's build for the CPU, which reads no GGUF file: its requests, and networks of the sizes that a file says."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bench.engine.engine_rivals import ROOM
from bench.engine.streamed import Streamed
from kvcache.gguf import GgufFile
from kvcache.networks.gguf_config import config_of, network_of

__all__ = ["VllmFour", "VllmHalf", "VllmRequests"]

Tokens = npt.NDArray[np.uint32]


class VllmRequests:
    """Requests over a checkpoint, with its prefix cache.

    Args:
        folder: of the checkpoint.
        longest: tokens of the longest text.
        running: requests at a time.
        space: GiB of K and V.
        more: arguments of its engine.
    """

    def __init__(self, folder: Path, longest: int, running: int, threads: int, space: int = 2, **more: Any) -> None:
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": str(space), "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "OMP_NUM_THREADS": str(threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        }
        import vllm

        self._vllm: Any = vllm
        arguments = vllm.EngineArgs(
            model=str(folder), dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True,
            max_model_len=longest, max_num_seqs=max(running, 8), enable_prefix_caching=True, seed=0, **more,
        )
        self._engine: Any = vllm.LLMEngine.from_engine_args(arguments)
        self._seen: dict[int, int] = {}

    @staticmethod
    def version() -> str:
        from importlib.metadata import version

        return version("vllm_cpu")

    def submit(self, key: int, prompt: Tokens, new: int) -> None:
        """Queue a request for `new` greedy tokens."""
        settings = self._vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        self._engine.add_request(str(key), {"prompt_token_ids": prompt.tolist()}, settings)
        self._seen[key] = 0

    def step(self) -> list[tuple[int, list[int]]]:
        """Work for a moment; the new tokens of requests by their keys."""
        if not self._engine.has_unfinished_requests():
            return []
        found = []
        for output in self._engine.step():
            key, tokens = int(output.request_id), list(output.outputs[0].token_ids)
            if len(tokens) > self._seen[key]:
                found.append((key, tokens[self._seen[key] :]))
                self._seen[key] = len(tokens)
        return found


class VllmHalf(Streamed):
    """vLLM in bfloat16 over random weights, of a network with the sizes that a file says."""

    name = "vLLM, bf16"
    packed: ClassVar[dict[str, Any]] = {}  # more of its config.json

    def __init__(self, path: Path, threads: int, room: int = ROOM) -> None:
        self._cores = os.sched_getaffinity(0)  # it binds the thread that calls it
        file = GgufFile(path)
        network = network_of(file)
        size = 4 * network.num_layers * network.num_kv_heads * network.head_dim * room
        with TemporaryDirectory() as folder:
            config = config_of(file) | {"architectures": [network.architecture], **self.packed}
            Path(folder, "config.json").write_text(json.dumps(config))
            self._requests = VllmRequests(
                Path(folder), min(room, network.max_position_embeddings), 1, threads, 1 + -(-size // 2**30),
                load_format="dummy",
            )
        self._count = 0

    @staticmethod
    def version() -> str:
        return VllmRequests.version()

    def times(self, tokens: Tokens, new: int) -> Iterator[float]:
        self._count += 1
        self._requests.submit(self._count, tokens, new)
        while new:
            for _, found in self._requests.step():
                new -= len(found)
                yield from [perf_counter()] * len(found)

    def __del__(self) -> None:
        os.sched_setaffinity(0, self._cores)


class VllmFour(VllmHalf):
    """The same with matrices of 4 bits in groups of 128, as AWQ stores them."""

    name = "vLLM, int4"
    packed: ClassVar[dict[str, Any]] = {"quantization_config": {
        "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
    }}
