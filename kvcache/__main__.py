"""The command line `python -m kvcache`: the demo, and generation with your own checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import kvcache
from kvcache.core.kernels import FORMATS
from kvcache.engine import InferenceEngine, SamplingParams
from kvcache.engine.text import TextStream
from kvcache.networks.weights import FORMATS as WEIGHTS
from kvcache.networks.weights import Progress

__all__ = ["main"]

DESCRIPTION = """\
The KV-cache engine for LLM inference on CPUs.

Without a command it runs the demo: several users share a long system prompt and send several turns each. A small
model that ships with the library answers, first without and then with the prefix cache, and both runs are compared."""

EXAMPLES = """\
examples:
  python -m kvcache
  python -m kvcache generate --model ~/models/Qwen3-0.6B --prompt "The KV cache is" --temperature 0
  python -m kvcache generate --model ~/models/Llama-3.2-1B --prompt "def main():" --dtype q4 --num-blocks 512
  python -m kvcache generate --model ~/models/Qwen3-0.6B-Q4_K_M.gguf --prompt "The KV cache is"
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvcache",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvcache {kvcache.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    commands.add_parser("demo", help="run the demo (the default)")
    generate = commands.add_parser(
        "generate",
        help="continue a prompt with a checkpoint of your own",
        description="Continue a prompt with a Hugging Face checkpoint or a GGUF file: Llama, Mistral, Qwen2 or Qwen3.",
    )
    defaults = SamplingParams()
    add = generate.add_argument
    folder = "folder with config.json, *.safetensors and tokenizer.json"
    add("--model", required=True, metavar="PATH", help=f"{folder}, or a file whose name ends in .gguf")
    add("--prompt", required=True, metavar="TEXT", help="the text to continue")
    add("--max-tokens", type=int, default=defaults.max_tokens, metavar="N", help="maximum of new tokens (%(default)s)")
    add("--temperature", type=float, default=defaults.temperature, metavar="T", help="0 is greedy (%(default)s)")
    add("--top-k", type=int, default=defaults.top_k, metavar="K", help="0 is off (%(default)s)")
    add("--top-p", type=float, default=defaults.top_p, metavar="P", help="1 is off (%(default)s)")
    add(
        "--repetition-penalty", type=float, default=defaults.repetition_penalty, metavar="R",
        help="1 is off (%(default)s)",
    )  # fmt: skip
    add("--min-p", type=float, default=defaults.min_p, metavar="P", help="0 is off (%(default)s)")
    add("--stop", action="append", default=[], metavar="TEXT", help="a text that ends the answer; may be repeated")
    add("--seed", type=int, default=0, metavar="N", help="seed of the random numbers (%(default)s)")
    add("--dtype", default="f32", help=f"storage of keys and values: {', '.join(FORMATS)} (%(default)s)")
    add("--weights", default="auto", help=f"format of the matrices: {', '.join(WEIGHTS)} (%(default)s: as stored)")
    add("--num-blocks", type=int, metavar="N", help="size of the cache in blocks of 16 tokens")
    return parser


def _demo() -> int:
    from kvcache.demo.display import display
    from kvcache.demo.run import run

    return 0 if run(display()) else 1


def _generate(options: argparse.Namespace) -> int:
    params = SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        repetition_penalty=options.repetition_penalty,
        min_p=options.min_p,
        stop=options.stop,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    with _progress(f"loading {options.model}") as progress:
        engine = InferenceEngine.from_pretrained(
            options.model,
            weights=options.weights,
            progress=progress,
            dtype=options.dtype,
            num_blocks=options.num_blocks,
        )
        tokenizer = engine.tokenizer
    if tokenizer is None:
        raise FileNotFoundError(f"{options.model}: no tokenizer.json")
    prompt = tokenizer.encode(options.prompt).ids
    text = TextStream(tokenizer, prompt, options.stop)
    print(options.prompt, end="", flush=True)
    for token in engine.stream(prompt, params):
        print(text.add(token), end="", flush=True)
    print(text.end())
    return 0


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. A user's error prints one line to stderr and returns 2."""
    options = _parser().parse_args(arguments)
    try:
        return _generate(options) if options.command == "generate" else _demo()
    except KeyboardInterrupt:
        return 130
    except (ImportError, MemoryError, OSError, TypeError, ValueError) as error:
        print(f"kvcache: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
