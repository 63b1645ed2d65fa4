"""The parts of a checkpoint that an engine needs: its network, its text side, and its sampling defaults."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvcache.calibration.calibrating import text_or_calibration
from kvcache.drafts.sources import SOURCE_NAMES, each_source
from kvcache.engine.hub import checkpoint_path
from kvcache.gguf.file import GgufFile
from kvcache.networks.config import ModelConfig
from kvcache.networks.gguf import GgufCheckpoint, is_gguf
from kvcache.networks.model import Transformer
from kvcache.networks.vector_layout import VectorLayout
from kvcache.sampling.defaults import folder_defaults, gguf_defaults
from kvcache.sampling.sampling import SamplingParams
from kvcache.sampling.tokenizer import CheckpointText, GgufText
from kvcache.support.arguments import short
from kvcache.texts.kv_settings import Settings

__all__ = [
    "Opened", "checkpoint_bytes", "checkpoint_positions", "checkpoint_text", "existing_path", "open_checkpoint",
    "open_drafts", "open_gguf", "split_options",
]


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


def checkpoint_positions(directory: str | Path) -> int:
    """The positions of the network of a folder or a GGUF file, without its weights; errors as of `open_checkpoint`."""
    path = checkpoint_path(directory)
    config = GgufCheckpoint(path).config if is_gguf(path) else ModelConfig.from_pretrained(path)
    return config.max_position_embeddings


def checkpoint_bytes(directory: str | Path) -> int:
    """The bytes of the weights of a checkpoint, as its files have them. FileNotFoundError: as `checkpoint_path`."""
    path = checkpoint_path(directory)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


def existing_path(directory: str | Path) -> Path:
    """Where a checkpoint is. FileNotFoundError: as `checkpoint_path`, and no such file or folder."""
    path = checkpoint_path(directory)
    if not path.exists() or (path.is_dir() and not (path / "config.json").exists()):
        raise FileNotFoundError(f"{directory}: expected a folder with config.json, or a GGUF file, got none")
    return path


def checkpoint_text(directory: str | Path, chat_template: str | None = None) -> CheckpointText | GgufText:
    """The tokenizer and the chat template of a folder or a GGUF file, without its network.

    Args:
        directory: of the checkpoint.
        chat_template: a Jinja template in place of the checkpoint's.

    FileNotFoundError: as `existing_path`.
    """
    path = existing_path(directory)
    return GgufText(path, chat_template) if is_gguf(path) else CheckpointText(path, chat_template)


def open_checkpoint(
    directory: str | Path, sampling_params: SamplingParams | None, calibrate: Any, network: dict[str, Any]
) -> Opened:
    """Open a folder, or a GGUF file; see `InferenceEngine.from_pretrained`.

    Args:
        network: arguments of `Transformer.from_pretrained`, and perhaps `chat_template`.
    """
    path = checkpoint_path(directory)
    if is_gguf(path):
        return open_gguf(path, sampling_params, calibrate, network)
    defaults = folder_defaults(path) if sampling_params is None else sampling_params
    text = CheckpointText(path, network.pop("chat_template", None))
    text.vectors = VectorLayout.of_folder(path)
    if text.vectors is not None:
        config = ModelConfig.from_pretrained(path)
        text.vectors.expect(config.hidden_size, config.vocab_size)
    known = calibrate if calibrate is False else text_or_calibration(calibrate, lambda: text.tokenizer)
    return Opened(Transformer.from_pretrained(path, **network), defaults, text, known)


def open_gguf(
    path: str | Path, sampling_params: SamplingParams | None, calibrate: Any, network: dict[str, Any]
) -> Opened:
    """Open a GGUF file of any name."""
    file = GgufFile(path)
    defaults = gguf_defaults(file) if sampling_params is None else sampling_params
    text = GgufText(file, network.pop("chat_template", None))
    text.vectors = VectorLayout.of_gguf(file)
    file.close()
    known = calibrate if calibrate is False else text_or_calibration(calibrate, lambda: text.tokenizer)
    model = Transformer.from_gguf(path, **network)
    if text.vectors is not None:
        text.vectors.expect(model.config.hidden_size, model.config.vocab_size)
    return Opened(model, defaults, text, known)


def open_drafts(draft: Any, text: CheckpointText | GgufText | None = None) -> tuple[Any, ...]:
    """The sources of draft tokens that `draft` names, with networks in place of their paths.

    Args:
        text: of the network that checks them; its tokens are to be those of the paths.

    Raises:
        FileNotFoundError: no such network.
        ValueError: another token stands for one of the ids.
    """
    found: list[Any] = []
    for each in each_source(draft):
        if not isinstance(each, (str, Path)) or each in SOURCE_NAMES:
            found.append(each)
            continue
        try:
            own = checkpoint_text(each)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"draft: expected {', '.join(SOURCE_NAMES)} or a network; {error}") from None
        if text is not None:
            _expect_same_tokens(text, own)
        found.append(Transformer.from_pretrained(checkpoint_path(each)))
    return tuple(found)


def _expect_same_tokens(text: CheckpointText | GgufText, other: CheckpointText | GgufText) -> None:
    """Raise ValueError unless the ids that two checkpoints have are the same tokens, where both have a tokenizer."""
    with suppress(ImportError):
        if text.tokenizer is None or other.tokenizer is None:
            return
        ours = {number: token for token, number in text.tokenizer.get_vocab().items()}
        for token, number in sorted(other.tokenizer.get_vocab().items(), key=lambda item: item[1]):
            if (expected := ours.get(number, token)) != token:
                expected = f"the tokens of the network, with {short(expected)} for id {number}"
                raise ValueError(f"draft: expected {expected}, got {short(token)}")


def split_options(options: dict[str, Any], calibrate: Any = None) -> tuple[dict[str, Any], Any]:
    """Take the arguments of the network out of those of an engine: these, and `calibrate`, perhaps of its settings."""
    names = [name for name in options if name in ("weights", "activations", "chat_template", "progress")]
    network = {name: options.pop(name) for name in names}
    if any(isinstance(each, str) and each in ("mtp", "auto") for each in each_source(options.get("draft"))):
        network["draft_layer"] = True
    calibrate, settings = options.pop("calibrate", calibrate), options.get("settings")
    if calibrate is None:
        calibrate = settings.calibrate if isinstance(settings, Settings) else False
    return network, calibrate
