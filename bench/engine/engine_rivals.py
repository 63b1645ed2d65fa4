"""Rivals that run the same network: transformers, llama.cpp and OpenVINO GenAI, each if it is installed.

A rival reads a file, or one with the weights of a random network (`random`). It prefills a prompt (`prefill`), decodes
`steps` tokens after it (`rewind`, then `decode`), and prefills the tail of a prompt whose head it has cached (`extend`;
`hold` brings it to the end of the head). All inputs are token ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support.checkpoints import Size, write_checkpoint, write_gguf
from bench.support.report import reason_of

__all__ = ["RIVALS", "ROOM", "LlamaCpp", "OpenVino", "Rival", "Tokens", "Transformers", "availability", "installed"]

Tokens = npt.NDArray[np.uint32]
ROOM = 4352  # tokens of a text, unless a caller has longer ones


class Rival(ABC):
    """An engine whose cache can be cut back to a prompt."""

    _held = 0  # tokens of the prompt

    @abstractmethod
    def prefill(self, tokens: Tokens) -> None:
        """Run a prompt with an empty cache, up to the logits of its last token."""

    @abstractmethod
    def rewind(self) -> None:
        """Cut the cache back to the prompt."""

    def hold(self, tokens: Tokens) -> None:
        """Bring the cache to the end of a prompt."""
        if self._held == len(tokens):
            self.rewind()
        else:
            self.prefill(tokens)


class Transformers(Rival):
    """transformers with `DynamicCache`, on PyTorch. It multiplies packed weights as floats."""

    name = "transformers"

    def __init__(self, path: Path, threads: int, dtype: str = "bfloat16") -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._torch, self._cache_class = torch, transformers.DynamicCache
        torch.set_num_threads(threads)
        place = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **place).eval()
        self._cache: Any = None

    @classmethod
    def random(cls, size: Size, folder: Path, threads: int) -> Transformers:
        """A random network in float32."""
        return cls(write_checkpoint(size, folder), threads, "float32")

    @staticmethod
    def version() -> str:
        import torch
        import transformers

        return f"{transformers.__version__} on PyTorch {torch.__version__}"

    def _run(self, tokens: Any, cache: Any) -> Any:
        with self._torch.inference_mode():
            return self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    def _ids(self, tokens: Tokens) -> Any:
        return self._torch.from_numpy(tokens.astype(np.int64))[None]

    def prefill(self, tokens: Tokens) -> None:
        self._cache = self._cache_class()
        self._run(self._ids(tokens), self._cache).argmax(-1)
        self._held = len(tokens)

    def rewind(self) -> None:
        behind = self._cache.get_seq_length() - self._held
        if behind:
            self._cache.crop(-behind)

    def decode(self, steps: int) -> None:
        """Run greedy decode steps."""
        token = self._torch.ones((1, 1), dtype=self._torch.int64)
        for _ in range(steps):
            token = self._run(token, self._cache).argmax(-1)[None]

    def extend(self, tokens: Tokens) -> None:
        """Run more tokens after the prompt; `rewind` crops the cache afterwards."""
        self._run(self._ids(tokens), self._cache).argmax(-1)


class LlamaCpp(Rival):
    """llama.cpp through llama-cpp-python, with flash attention and float16 K and V, its defaults but for the former."""

    name = "llama.cpp"

    def __init__(self, path: Path, threads: int, context: int = ROOM) -> None:
        import llama_cpp

        self._llama = llama_cpp.Llama(
            str(path), n_ctx=context, n_batch=512, n_threads=threads, n_threads_batch=threads, flash_attn=True,
            verbose=False,
        )

    @classmethod
    def random(cls, size: Size, folder: Path, threads: int) -> LlamaCpp:
        """A random network in float32."""
        return cls(write_gguf(size, folder / "random.gguf"), threads, size.positions)

    @staticmethod
    def version() -> str:
        import llama_cpp

        return str(llama_cpp.__version__)

    def prefill(self, tokens: Tokens) -> None:
        self._llama.reset()
        self._llama.eval(tokens.tolist())
        self._held = len(tokens)

    def rewind(self) -> None:
        """Go back to the prompt: `eval` drops the tokens after it."""
        self._llama.n_tokens = self._held

    def decode(self, steps: int) -> None:
        """Run greedy decode steps."""
        token = 3
        for _ in range(steps):
            self._llama.eval([token])
            logits = np.ctypeslib.as_array(self._llama._ctx.get_logits(), shape=(self._llama.n_vocab(),))
            token = int(logits.argmax())

    def extend(self, tokens: Tokens) -> None:
        """Run more tokens after the prompt."""
        self._llama.eval(tokens.tolist())


class OpenVino:
    """OpenVINO GenAI's pipeline for one request, with its prefix cache; it reports its own times.

    Its precision is the default of the CPU plugin, bf16 where the CPU has it, unless `properties` say otherwise.
    """

    name = "OpenVINO GenAI"

    def __init__(self, path: Path, threads: int, context: int = ROOM, **properties: str) -> None:
        import openvino_genai

        self._genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = 1
        scheduler.max_num_batched_tokens = context
        self._pipeline = openvino_genai.LLMPipeline(
            str(path), "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads, **properties
        )

    @classmethod
    def random(cls, size: Size, folder: Path, threads: int) -> OpenVino:
        """A random network in float32 arithmetic. Its reader takes no float32 matrices: the weights are float16."""
        path = write_gguf(size, folder / "half.gguf", half=True)
        return cls(path, threads, size.positions, INFERENCE_PRECISION_HINT="f32")

    @staticmethod
    def version() -> str:
        import openvino_genai

        return str(openvino_genai.__version__)

    def _generate(self, tokens: Tokens, new: int) -> Any:
        import openvino

        ids = openvino.Tensor(tokens.astype(np.int64)[None])
        mask = openvino.Tensor(np.ones((1, len(tokens)), np.int64))
        settings = self._genai.GenerationConfig(max_new_tokens=new, ignore_eos=True)
        return self._pipeline.generate(self._genai.TokenizedInputs(ids, mask), settings).perf_metrics

    def first_token(self, tokens: Tokens) -> float:
        """Seconds from the prompt to the first token, by OpenVINO's own clock."""
        return float(self._generate(tokens, 1).get_ttft().mean) / 1e3

    def step(self, tokens: Tokens, steps: int) -> float:
        """Seconds per token after this prompt, by OpenVINO's own clock."""
        return float(self._generate(tokens, steps + 1).get_tpot().mean) / 1e3


RIVALS = (Transformers, LlamaCpp, OpenVino)


def availability(rivals: Iterable[Any] = RIVALS) -> list[str]:
    """A line per rival: its version, or the reason for its absence."""
    return [f"{rival.name} {why}" if ok else f"not measured: {rival.name} ({why})" for rival, ok, why in _probe(rivals)]


def _probe(rivals: Iterable[Any]) -> list[tuple[Any, bool, str]]:
    found = []
    for rival in rivals:
        version: Callable[[], str] = rival.version
        try:
            found.append((rival, True, version()))
        except Exception as error:  # any reason for which a rival's package does not load
            found.append((rival, False, reason_of(error)))
    return found


def installed() -> list[Any]:
    """The rivals whose packages load."""
    return [rival for rival, ok, _ in _probe(RIVALS) if ok]
