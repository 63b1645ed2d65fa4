"""An engine from a checkpoint: its network, its text side, and its sampling defaults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache.calibration.calibrating import text_or_calibration
from kvcache.engine.hub import checkpoint_path
from kvcache.gguf.file import GgufFile
from kvcache.networks.gguf import is_gguf
from kvcache.networks.model import Transformer
from kvcache.networks.weights import Progress
from kvcache.sampling.defaults import folder_defaults, gguf_defaults
from kvcache.sampling.sampling import SamplingParams
from kvcache.sampling.tokenizer import CheckpointText, GgufText

if TYPE_CHECKING:
    from kvcache.engine.engine import InferenceEngine

__all__ = ["from_gguf", "from_pretrained"]


def from_pretrained(
    cls: type[InferenceEngine],
    /,
    directory: str | Path,
    sampling_params: SamplingParams | None = None,
    seed: int = 0,
    *,
    weights: str = "auto",
    activations: str = "int8",
    progress: Progress | None = None,
    calibrate: Any = False,
    **options: Any,
) -> InferenceEngine:
    """Make an engine from a Hugging Face checkpoint directory, or from a GGUF file, of a network that README.md names.

    Args:
        directory: contains `config.json`, `*.safetensors` and, for `tokenizer`, `tokenizer.json` or `tekken.json`; or a
            file whose name ends in `.gguf`, the first of several if it was split; or the id of a model in the local
            cache of `huggingface_hub`. `kvcache/guides/checkpoints.md` lists what is read.
        sampling_params: by default those of the checkpoint (`generation_config.json`, `general.sampling.*`), and
            of `SamplingParams` for what it does not say.
        weights: the format of the matrices: "auto" as they are stored, "f32", "f16", "bf16", or packed: "q8" (8.5
            bits per weight), "q4" (5 bits; the head has 8.5).
        activations: how rows meet weights, "int8", "exact" or "bf16"; see `Transformer`.
        progress: called with the bytes of weights that are loaded, and those of all.
        calibrate: False, a `Calibration` or tokens, as for the constructor; "auto": measured on a text that the library
            has; a path of a text or of a saved `Calibration`. What is measured is kept in the user's cache folder
            (`kvcache` in XDG_CACHE_HOME) under the names of network and text.
        seed, options: as for the constructor.

    Raises:
        FileNotFoundError: a file is missing.
        CheckpointError: a file is damaged, or asks for something that is not supported.
        OutOfMemoryError: the weights do not fit the machine.
    """
    path = checkpoint_path(directory)
    network: dict[str, Any] = {"weights": weights, "activations": activations, "progress": progress}
    if is_gguf(path):
        return from_gguf(cls, path, sampling_params, seed, calibrate=calibrate, **network, **options)
    defaults = folder_defaults(path) if sampling_params is None else sampling_params
    text = CheckpointText(path)
    if calibrate is not False:
        options["calibrate"] = text_or_calibration(calibrate, lambda: text.tokenizer)
    engine = cls(Transformer.from_pretrained(path, **network), defaults, seed, **options)
    engine._text = text
    return engine


def from_gguf(
    cls: type[InferenceEngine],
    /,
    path: str | Path,
    sampling_params: SamplingParams | None = None,
    seed: int = 0,
    *,
    calibrate: Any = False,
    **options: Any,
) -> InferenceEngine:
    """Make an engine from a GGUF file of any name; arguments and errors are those of `from_pretrained`."""
    network = {name: options.pop(name) for name in ("weights", "activations", "progress") if name in options}
    defaults = gguf_defaults(GgufFile(path)) if sampling_params is None else sampling_params
    text = GgufText(Path(path))
    if calibrate is not False:
        options["calibrate"] = text_or_calibration(calibrate, lambda: text.tokenizer)
    engine = cls(Transformer.from_gguf(path, **network), defaults, seed, **options)
    engine._text = text
    return engine
