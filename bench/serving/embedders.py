"""Engines that make vectors of texts of one GGUF file: ours, llama.cpp's server, OpenVINO's pipeline.

Each pools the row of the last token, and gives vectors of length 1.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import numpy as np
import numpy.typing as npt

from bench.serving.http import server_seconds
from bench.support.processes import served
from kvcache import BatchEngine

__all__ = ["EMBEDDERS", "Embedder", "Scored"]

Vectors = npt.NDArray[np.float32]
CONTEXT, SLOTS, ROWS = 8192, 8, 2048  # of llama.cpp: all tokens, texts at once, tokens of a pass


class Embedder(ABC):
    """An engine over a file.

    Args:
        file: of the network.
        threads: that it may use.
    """

    @abstractmethod
    def __init__(self, file: Path, threads: int) -> None: ...

    @abstractmethod
    def embed(self, texts: list[str]) -> Vectors:
        """The vectors of texts."""

    def spent(self) -> float:
        """The CPU seconds of its process so far."""
        return process_time()

    @abstractmethod
    def close(self) -> None:
        """End what runs."""


class Ours(Embedder):
    """Our engine, which takes all texts in one call."""

    def __init__(self, file: Path, threads: int) -> None:
        del threads  # of the process
        self.engine = BatchEngine.from_pretrained(file, dtype="q8", num_blocks=4096)

    def embed(self, texts: list[str]) -> Vectors:
        return self.engine.embed(texts, "last")

    def close(self) -> None:
        self.engine.close()


class _Http(Embedder):
    """A server with OpenAI's interface; all texts are one body."""

    url = ""

    def embed(self, texts: list[str]) -> Vectors:
        body = json.dumps({"input": texts}).encode()
        with urlopen(Request(f"{self.url}/v1/embeddings", body, {"content-type": "application/json"})) as page:
            data = json.loads(page.read())["data"]
        return np.array([each["embedding"] for each in data], np.float32)


class OurServer(_Http):
    """Our server, a process of its own."""

    def __init__(self, file: Path, threads: int) -> None:
        self._stack = ExitStack()
        running = served(file, "--dtype", "q8", "--pooling", "last", KVCACHE_NUM_THREADS=str(threads))
        (host, port), self._process = self._stack.enter_context(running)
        self.url = f"http://{host}:{port}"

    def spent(self) -> float:
        return server_seconds(self._process)[0] + process_time()

    def close(self) -> None:
        self._stack.close()


class LlamaServer(_Http):
    """The server of llama.cpp, by the package xllamacpp."""

    def __init__(self, file: Path, threads: int) -> None:
        import xllamacpp

        settings: Any = xllamacpp.CommonParams()
        settings.model.path, settings.embedding = str(file), True
        settings.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_LAST
        settings.n_ctx, settings.n_parallel, settings.n_batch, settings.n_ubatch = CONTEXT, SLOTS, ROWS, ROWS
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
        settings.verbosity = -1
        self._server: Any = xllamacpp.Server(settings)
        self.url = self._server.listening_address

    def close(self) -> None:
        self._server = None


class OpenVino(Embedder):
    """OpenVINO GenAI's `TextEmbeddingPipeline`, over the network that its own reader makes of the file."""

    def __init__(self, file: Path, threads: int) -> None:
        import openvino_genai

        self._folder = tempfile.TemporaryDirectory()
        kind: Any = openvino_genai.TextEmbeddingPipeline
        settings = kind.Config()
        settings.pooling_type, settings.normalize = kind.PoolingType.LAST_TOKEN, True
        settings.padding_side = "left"
        made = _stateless(file, Path(self._folder.name))
        self._pipeline = kind(str(made), "CPU", settings, INFERENCE_NUM_THREADS=threads)

    def embed(self, texts: list[str]) -> Vectors:
        return np.array(self._pipeline.embed_documents(texts), np.float32)

    def close(self) -> None:
        self._folder.cleanup()


def _stateless(file: Path, folder: Path) -> Path:
    """A folder with the network as OpenVINO reads it, without its states and its head: what the pipeline takes."""
    import openvino
    import openvino_genai
    from openvino import opset13 as ops

    copy, made = folder / "network.gguf", folder / "made"
    shutil.copyfile(file, copy)
    openvino_genai.LLMPipeline(str(copy), "CPU", enable_save_ov_model=True)
    made.mkdir()
    model: Any = openvino.Core().read_model(str(folder / "openvino_model.xml"))
    inputs = {each.any_name: each.get_node() for each in model.inputs}

    def number(value: int, *, listed: bool = False) -> Any:
        return ops.constant(np.array([value] if listed else value, np.int64))

    for node in model.get_ordered_ops():
        if node.get_type_name() != "Concat":
            continue
        if node.get_input_size() == 5 and _is_zero(node.input_value(3).get_node()):  # a length that the states have
            node.input(3).replace_source_output(number(1, listed=True).output(0))
        past = node.input_value(0).get_node()
        if past.get_type_name() != "Gather" or past.input_value(0).get_node().get_type_name() != "ReadValue":
            continue
        new, axis = node.input_value(1), node.get_attributes()["axis"]
        node.output(0).replace(new)
        empty = ops.slice(new, *(number(each, listed=True) for each in (0, 0, 1, axis)))
        for each in [*past.output(0).get_target_inputs()]:
            if each.get_node().get_type_name() == "ShapeOf":
                each.replace_source_output(empty.output(0))
    shape = ops.shape_of(inputs["input_ids"], "i64")
    length = ops.gather(shape, number(1), number(0))
    positions = ops.unsqueeze(ops.range(number(0), length, number(1), "i64"), number(0))
    inputs["position_ids"].output(0).replace(ops.broadcast(positions, shape).output(0))
    last = model.outputs[0].get_node().input_value(0).get_node().input_value(0)
    last.get_tensor().set_names({"last_hidden_state"})
    kept = [inputs[name] for name in ("input_ids", "attention_mask")]
    whole = openvino.Model([last.get_node().output(0)], kept, "embedder")
    openvino.save_model(whole, str(made / "openvino_model.xml"), compress_to_fp16=False)
    (made / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name in ("openvino_tokenizer", "openvino_detokenizer"):
        for end in (".xml", ".bin"):
            shutil.copy(folder / f"{name}{end}", made)
    return made


def _is_zero(node: Any) -> bool:
    return node.get_type_name() == "Constant" and node.get_data().tolist() == [0]


class Scored(NamedTuple):
    """Documents that are ranked by our engine, in one of the ways of `ways`."""

    engine: BatchEngine

    def ways(self, query: str, documents: list[str]) -> dict[str, Callable[[], list[float]]]:
        """How documents may be ranked: each alone, their common beginning once, all of them cached."""
        return {
            "each prompt whole": lambda: self._alone(query, documents),
            "the common beginning once": lambda: self._cold(query, documents),
            "the same call again": lambda: self.engine.rerank(query, documents),
        }

    def _cold(self, query: str, documents: list[str]) -> list[float]:
        self.engine.clear_cache()
        return self.engine.rerank(query, documents)

    def _alone(self, query: str, documents: list[str]) -> list[float]:
        """The scores of prompts that share nothing: each has a namespace of its own."""
        self.engine.clear_cache()
        vectors = self.engine.vectors()
        readings = vectors.judged(query, documents, None, False)
        pending = [self.engine.submit_readings([each], namespace=i) for i, each in enumerate(readings)]
        for each in pending:
            each.wait(lambda each=each: each.is_finished)  # type: ignore[misc]
            each.expect_end()
        return vectors.scores(readings)


EMBEDDERS: dict[str, type[Embedder]] = {
    "kvcache, BatchEngine": Ours, "kvcache, its server": OurServer, "llama.cpp's server": LlamaServer,
    "OpenVINO": OpenVino,
}
