"""`generate`: one prompt, continued on the standard output."""

from __future__ import annotations

import argparse

from kvcache.commands.options import adapter_of, add_adapter, add_options, explained, open_engine, read_text
from kvcache.engine import InferenceEngine, SamplingParams
from kvcache.errors import OutOfMemoryError
from kvcache.sampling.text_stream import TextStream
from kvcache.sampling.text_tokens import encoded

__all__ = ["add_generate", "generate"]


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_options(parser, model_required=True, max_tokens=SamplingParams().max_tokens)
    add_adapter(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue; - reads it from the standard input")
    prompt.add_argument("-f", "--file", metavar="FILE", help="a file with this text, in UTF-8; - is the standard input")


def generate(options: argparse.Namespace) -> int:
    """Print the prompt, and what follows as it comes; returns the exit status."""
    words = _prompt(options)
    engine = open_engine(options, InferenceEngine.from_pretrained, adapters=adapter_of(options))
    prompt = encoded(engine.tokenizer, words, "prompt")
    text = TextStream(engine.tokenizer, prompt, engine.sampling_params.stop)
    print(words, end="", flush=True)
    try:
        for token in engine.stream(prompt, adapter=options.adapter):
            print(text.add(token), end="", flush=True)
    except OutOfMemoryError as error:
        print(text.end(), flush=True)
        raise MemoryError(explained(error, engine)) from None
    except BaseException:
        print(text.end(), flush=True)
        raise
    print(text.end(), flush=True)
    return 0


def _prompt(options: argparse.Namespace) -> str:
    """The prompt of the options; the line end that editors and `echo` put behind a text is none of it."""
    if options.file is None and options.prompt != "-":
        return str(options.prompt)
    text = read_text("-" if options.file is None else options.file, "prompt")
    return text.removesuffix("\n").removesuffix("\r")
