"""`NetworkEngine`: the base of the engines that run a network, and how they open a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache.engine.adapters import Adapters
from kvcache.engine.chat import ChatEngine
from kvcache.engine.opening import Opened, open_checkpoint, open_drafts, open_gguf, split_options
from kvcache.networks.adapter import Adapter
from kvcache.networks.protocols import Model, NetworkConfig
from kvcache.networks.weights import Progress
from kvcache.sampling.sampling import SamplingParams
from kvcache.sampling.tokenizer import CheckpointText, GgufText
from kvcache.support.arguments import as_instance, as_path

if TYPE_CHECKING:  # typing has it from Python 3.11 on
    from typing_extensions import Self

__all__ = ["NetworkEngine"]


class NetworkEngine(ChatEngine):
    """The base of the engines that run a network.

    Attributes:
        model: the network.
        sampling_params: the defaults of a request.
        adapters: a mapping from names to each `Adapter` that requests may name.
    """

    def __init__(
        self, model: Model, sampling_params: SamplingParams | None = None, seed: int = 0, *,
        adapters: Mapping[str, Any] | None = None, **options: Any,
    ) -> None:
        sampling_params = SamplingParams() if sampling_params is None else sampling_params
        self.model, self.sampling_params = model, as_instance(sampling_params, SamplingParams, "params")
        self.adapters = Adapters(model)
        if not (adapters is None or isinstance(adapters, Mapping)):
            raise TypeError(f"adapters: expected a mapping from names to adapters, got {type(adapters).__name__}")
        for name, each in (adapters or {}).items():
            self.load_adapter(name, each)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        sampling_params: SamplingParams | None = None,
        seed: int = 0,
        *,
        weights: str = "auto",
        activations: str = "int8",
        progress: Progress | None = None,
        calibrate: Any = None,
        **options: Any,
    ) -> Self:
        """Make an engine from a Hugging Face checkpoint directory, or from a GGUF file, of a network README.md names.

        Args:
            directory: contains `config.json`, `*.safetensors` and, for `tokenizer`, `tokenizer.json`, `tekken.json` or
                `tiktoken.model`; or a GGUF file, the first of several if it was split; or the id of a
                model in the local cache of `huggingface_hub`. `kvcache/guides/checkpoints.md` lists what is read.
            sampling_params: by default those of the checkpoint (`generation_config.json`, `general.sampling.*`), and
                of `SamplingParams` for what it does not say.
            weights: the format of the matrices: "auto" as they are stored, "f32", "f16", "bf16", or packed: "q8" (8.5
                bits per weight), "q4" (5 bits; the head has 8.5), but for those that the file has in as few bits.
            activations: how rows meet weights, "int8", "exact" or "bf16"; see `Transformer`.
            progress: called with the bytes of weights that are loaded, and those of all.
            calibrate: False, a `Calibration` or tokens, as for the constructor; "auto": measured on a text that the
                library has; a path of a text or of a saved `Calibration`; None: that of `settings`. What is measured is
                kept in the user's cache folder (`kvcache` in XDG_CACHE_HOME) under the names of network and text.
            seed, options: as for the constructor; also `chat_template`, a Jinja template in place of the checkpoint's.

        Raises:
            FileNotFoundError: a file is missing.
            CheckpointError: a file is damaged, or asks for something that is not supported.
            OutOfMemoryError: the weights do not fit the machine.
        """
        own, calibrate = split_options(options, calibrate)
        network = {"weights": weights, "activations": activations, "progress": progress, **own}
        return cls._over(open_checkpoint(directory, sampling_params, calibrate, network), seed, options)

    @classmethod
    def from_gguf(
        cls,
        path: str | Path,
        sampling_params: SamplingParams | None = None,
        seed: int = 0,
        *,
        calibrate: Any = None,
        **options: Any,
    ) -> Self:
        """Make an engine from a GGUF file of any name; arguments and errors are those of `from_pretrained`."""
        network, calibrate = split_options(options, calibrate)
        return cls._over(open_gguf(as_path(path), sampling_params, calibrate, network), seed, options)

    @classmethod
    def _over(cls, opened: Opened, seed: int, options: dict[str, Any]) -> Self:
        if "draft" in options:
            options["draft"] = open_drafts(options["draft"], opened.text)
        engine = cls(opened.model, opened.sampling_params, seed, calibrate=opened.calibrate, **options)
        engine._set_text(opened.text)
        return engine

    def load_adapter(self, name: str, adapter: Adapter | str | PathLike[str]) -> Adapter:
        """Take an adapter, or the path of one that `read_adapter` reads, which requests name then; returns it.

        Under a name that there is already it takes the place of the old one; requests that run go on with that. Cached
        prefixes are named by the numbers of an adapter, so that no other one has use of them, whatever its name is.

        Raises:
            TypeError: another kind, or a network that takes no adapters.
            ValueError: an adapter of another network: of layers or projections that are not there, or of other sizes.
            FileNotFoundError, CheckpointError: as `read_adapter`.
        """
        return self.adapters.load(name, adapter)

    def unload_adapter(self, name: str) -> None:
        """Give up an adapter; its requests that have not ended end with an InvalidOperationError, and no others.

        Raises:
            ValueError: there is none of this name.
        """
        self.adapters.unload(name)

    def _set_text(self, text: CheckpointText | GgufText) -> None:
        raise NotImplementedError

    @property
    def config(self) -> NetworkConfig:
        """The sizes of the network: `model.config`."""
        return self.model.config
