"""The parts of a checkpoint that an engine needs: its network, its text side, and its sampling defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from kvcache.calibration.calibrating import text_or_calibration
from kvcache.engine.hub import checkpoint_path
from kvcache.gguf.file import GgufFile
from kvcache.networks.gguf import is_gguf
from kvcache.networks.model import Transformer
from kvcache.sampling.defaults import folder_defaults, gguf_defaults
from kvcache.sampling.sampling import SamplingParams
from kvcache.sampling.tokenizer import CheckpointText, GgufText

__all__ = ["Opened", "checkpoint_text", "open_checkpoint", "open_gguf", "split_options"]


class Opened(NamedTuple):
    """An open checkpoint.

    Attributes:
        model: its network.
        sampling_params: the caller's, or those of the checkpoint.
        text: its tokenizer and chat template.
        calibrate: for the constructor of an engine.
    """

    model: Transformer
    sampling_params: SamplingParams
    text: CheckpointText | GgufText
    calibrate: Any


def checkpoint_text(directory: str | Path) -> CheckpointText | GgufText:
    """The tokenizer and the chat template of a folder or a GGUF file, without its network.

    FileNotFoundError: as `checkpoint_path`, and no such file or folder.
    """
    path = checkpoint_path(directory)
    if not path.exists() or (path.is_dir() and not (path / "config.json").exists()):
        raise FileNotFoundError(f"{directory}: expected a folder with config.json, or a GGUF file, got none")
    return GgufText(path) if is_gguf(path) else CheckpointText(path)


def open_checkpoint(
    directory: str | Path, sampling_params: SamplingParams | None, calibrate: Any, network: dict[str, Any]
) -> Opened:
    """Open a folder, or a GGUF file; see `InferenceEngine.from_pretrained`.

    Args:
        network: arguments of `Transformer.from_pretrained`.
    """
    path = checkpoint_path(directory)
    if is_gguf(path):
        return open_gguf(path, sampling_params, calibrate, network)
    defaults = folder_defaults(path) if sampling_params is None else sampling_params
    text = CheckpointText(path)
    known = calibrate if calibrate is False else text_or_calibration(calibrate, lambda: text.tokenizer)
    return Opened(Transformer.from_pretrained(path, **network), defaults, text, known)


def open_gguf(
    path: str | Path, sampling_params: SamplingParams | None, calibrate: Any, network: dict[str, Any]
) -> Opened:
    """Open a GGUF file of any name."""
    defaults = gguf_defaults(GgufFile(path)) if sampling_params is None else sampling_params
    text = GgufText(Path(path))
    known = calibrate if calibrate is False else text_or_calibration(calibrate, lambda: text.tokenizer)
    return Opened(Transformer.from_gguf(path, **network), defaults, text, known)


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Take the arguments of the network out of those of an engine: these, and `calibrate`."""
    names = [name for name in options if name in ("weights", "activations", "progress")]
    network = {name: options.pop(name) for name in names}
    return network, options.pop("calibrate", False)
