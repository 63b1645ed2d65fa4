"""Engines that serve many requests, behind one interface: ours and rivals, each with its best settings.

`submit` queues a prompt, `step` returns the new tokens of some requests. Tokens are ids: no engine sees their text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from time import sleep
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from bench.engine.mistral_rs import MistralRs
from bench.engine.vllm_cpu import VllmRequests
from bench.serving.llamacpp import IkLlamaCpp, LlamaCpp
from kvcache import BatchEngine
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.gguf import GgufFile
from kvcache.networks.gguf import GgufCheckpoint
from kvcache.networks.model import Transformer

__all__ = ["ENGINES", "Engine", "Network"]

Tokens = npt.NDArray[np.uint32]
BLOCK = 16
_UNKNOWN = 3  # stands for a token of an engine that writes texts


@dataclass(frozen=True)
class Network:
    """A network as a GGUF file, which ours and OpenVINO read, and as a folder, which transformers and vLLM read.

    Attributes:
        file: of the weights.
        name: of the network, for the folder beside others.
        folders: where checkpoints are written.
    """

    file: Path
    name: str
    folders: Path

    @property
    def folder(self) -> Path:
        """A checkpoint of the same weights (of a Llama) in bfloat16; transformers writes it at the first use."""
        folder = self.folders / self.name
        if not (folder / "config.json").exists():
            import torch
            import transformers

            checkpoint = GgufCheckpoint(self.file)
            c = checkpoint.config
            model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(
                vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
                num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
                max_position_embeddings=c.max_position_embeddings, rms_norm_eps=c.rms_norm_eps, rope_theta=c.rope.theta,
                tie_word_embeddings=c.tie_word_embeddings, dtype="bfloat16",
            )).to(torch.bfloat16)
            for name, to in model.named_parameters():
                stored = checkpoint.rows(name, 0, len(to)).to_float32() if to.ndim == 2 else checkpoint.read(name)
                to.data.copy_(torch.from_numpy(stored))
            model.save_pretrained(folder)
        return folder


class Engine(Protocol):
    """An engine with room for `tokens` of text, `longest` in one request, and `running` requests at a time."""

    def __init__(self, network: Network, tokens: int, longest: int, running: int, threads: int) -> None: ...

    def submit(self, key: int, prompt: Tokens, new: int) -> None:
        """Queue a request for `new` greedy tokens; an end of text does not end it."""

    def step(self) -> list[tuple[int, list[int]]]:
        """Work for a moment; the new tokens of requests by their keys. Nothing to do: returns soon."""

    def prefilled(self) -> int | None:
        """Tokens of prompts that ran so far; None: unknown."""
        return None

    def close(self) -> None:
        """End its threads."""
        return


def _network(file: Path) -> Transformer:
    """The network without its end-of-text tokens: every answer has the length that was asked for."""
    model = Transformer.from_gguf(file)
    model.config = replace(model.config, eos_token_ids=())
    return model


def _greedy(new: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=new)


class Batch(Engine):
    """Our engine for many requests; K and V in q8."""

    options: ClassVar[dict[str, float]] = {}  # of the engine; else the defaults

    def __init__(self, network: Network, tokens: int, longest: int, running: int, threads: int) -> None:
        del longest, threads
        blocks = tokens // BLOCK + 4 * running
        self.engine = BatchEngine(
            _network(network.file), dtype="q8", block_size=BLOCK, num_blocks=blocks, max_running=running,
            **self.options,
        )
        self._running: dict[int, tuple[Any, int]] = {}

    def submit(self, key: int, prompt: Tokens, new: int) -> None:
        self._running[key] = (self.engine.submit(prompt, _greedy(new)), 0)

    def step(self) -> list[tuple[int, list[int]]]:
        self.engine.step()
        found = []
        for key, (request, seen) in list(self._running.items()):
            tokens = request.tokens
            if len(tokens) > seen:
                found.append((key, tokens[seen:]))
                self._running[key] = (request, len(tokens))
            if request.is_finished:
                request.raise_error()
                del self._running[key]
        return found

    def prefilled(self) -> int | None:
        return self.engine.stats().prefilled_tokens

    def close(self) -> None:
        self.engine.close()


class LongGaps(Batch):
    """The same if prompts may keep written texts waiting for twice the time."""

    options: ClassVar[dict[str, float]] = {"target_gap": 0.1}


class OneAfterAnother(Engine):
    """Our engine for one request at a time, with its prefix cache; K and V in q8."""

    def __init__(self, network: Network, tokens: int, longest: int, running: int, threads: int) -> None:
        del running, threads
        self._inner = InferenceEngine(_network(network.file), dtype="q8", num_blocks=longest // BLOCK + 3)
        self._engine = PrefixCachedEngine(self._inner, tokens // BLOCK + 64, strict=True)
        self._queue: list[tuple[int, Tokens, int]] = []
        self._stream: Any = None
        self._key = 0

    def submit(self, key: int, prompt: Tokens, new: int) -> None:
        self._queue.append((key, prompt, new))

    def step(self) -> list[tuple[int, list[int]]]:
        if self._stream is None:
            if not self._queue:
                return []
            self._key, prompt, new = self._queue.pop(0)
            self._stream = self._engine.stream(prompt, _greedy(new))
        for token in self._stream:
            return [(self._key, [token])]
        self._stream = None
        return []

    def prefilled(self) -> int | None:
        return self._inner.prefill_token_count


class OpenVino(Engine):
    """OpenVINO GenAI's continuous batching, with its prefix cache and its default precision."""

    def __init__(self, network: Network, tokens: int, longest: int, running: int, threads: int) -> None:
        import openvino
        import openvino_genai

        del tokens, longest
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = 2
        scheduler.max_num_batched_tokens = 256
        scheduler.max_num_seqs = max(running, 8)
        self._genai, self._tensor = openvino_genai, openvino.Tensor
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(
            str(network.file), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self._handles: dict[int, Any] = {}

    def submit(self, key: int, prompt: Tokens, new: int) -> None:
        settings = self._genai.GenerationConfig(max_new_tokens=new, ignore_eos=True)
        self._handles[key] = self._pipeline.add_request(key, self._tensor(prompt.astype(np.int64)[None]), settings)

    def step(self) -> list[tuple[int, list[int]]]:
        if not self._pipeline.has_non_finished_requests():
            return []
        self._pipeline.step()
        found = []
        for key, handle in self._handles.items():
            if handle.can_read():
                tokens = [int(token) for each in handle.read().values() for token in each.generated_ids]
                found.append((key, tokens))
        return found


class Vllm(VllmRequests, Engine):
    """vLLM on the CPU, bfloat16, with its prefix cache."""

    def __init__(self, network: Network, tokens: int, longest: int, running: int, threads: int) -> None:
        del tokens
        super().__init__(network.folder, longest + 64, running, threads)


class Transformers(Engine):
    """transformers' continuous batching, bfloat16."""

    def __init__(self, network: Network, tokens: int, longest: int, running: int, threads: int) -> None:
        import torch
        import transformers

        del longest
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(network.folder, dtype=torch.bfloat16).eval()
        settings = transformers.GenerationConfig(do_sample=False, max_new_tokens=64, eos_token_id=-1, pad_token_id=0)
        pages = transformers.ContinuousBatchingConfig(num_blocks=-(-2 * tokens // 256) + running, max_batch_tokens=512)
        self._manager: Any = model.init_continuous_batching(
            generation_config=settings, continuous_batching_config=pages
        )
        self._manager.start()
        self._seen: dict[str, int] = {}

    def submit(self, key: int, prompt: Tokens, new: int) -> None:
        self._seen[str(key)] = 0
        self._manager.add_request(prompt.tolist(), request_id=str(key), max_new_tokens=new, streaming=True)

    def step(self) -> list[tuple[int, list[int]]]:
        output = self._manager.get_result(timeout=0.001)
        if output is None:
            sleep(1e-4)
            return []
        seen, tokens = self._seen[output.request_id], output.generated_tokens
        self._seen[output.request_id] = len(tokens)
        return [(int(output.request_id), list(tokens[seen:]))]

    def close(self) -> None:
        """End its thread, without which the process would not end."""
        self._manager.stop(block=True, timeout=5)


class Mistral(Engine):
    """mistral.rs, a thread for each request; an answer has the length of its tokens, whose ids it does not say.

    It runs one request after another: version 0.9.5 refuses a step of several prompts over packed weights on a CPU.
    """

    def __init__(self, network: Network, tokens: int, longest: int, running: int, threads: int) -> None:
        del tokens, longest, running
        random = GgufFile(network.file).metadata.get("general.name") == "random"
        self._engine = MistralRs(network.file, threads, as_letters=random)
        self._found: Queue[tuple[int, list[int] | Exception]] = Queue()

    def submit(self, key: int, prompt: Tokens, new: int) -> None:
        Thread(target=self._run, args=(key, prompt, new), daemon=True).start()

    def _run(self, key: int, prompt: Tokens, new: int) -> None:
        try:
            for _ in self._engine.times(prompt, new):
                self._found.put((key, [_UNKNOWN]))
        except Exception as error:
            self._found.put((key, error))

    def step(self) -> list[tuple[int, list[int]]]:
        try:
            key, found = self._found.get(timeout=0.01)
        except Empty:
            return []
        if isinstance(found, Exception):
            raise found
        return [(key, found)]


ENGINES: dict[str, type[Engine]] = {
    "kvcache, BatchEngine": Batch,
    "kvcache, target_gap=0.1": LongGaps,
    "kvcache, one after another": OneAfterAnother,
    "OpenVINO GenAI": OpenVino,
    "llama.cpp": LlamaCpp,
    "ik_llama.cpp": IkLlamaCpp,
    "mistral.rs": Mistral,
    "vLLM, bf16": Vllm,
    "transformers, bf16": Transformers,
}
