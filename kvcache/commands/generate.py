"""`generate`: one prompt, continued on the standard output."""

from __future__ import annotations

import argparse

from kvcache.commands.options import add_options, open_engine
from kvcache.engine import InferenceEngine, SamplingParams
from kvcache.sampling.text_stream import TextStream
from kvcache.sampling.text_tokens import encoded

__all__ = ["add_generate", "generate"]


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_options(parser, model_required=True, max_tokens=SamplingParams().max_tokens)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue")


def generate(options: argparse.Namespace) -> int:
    """Print the prompt, and what follows as it comes; returns the exit status."""
    engine = open_engine(options, InferenceEngine.from_pretrained)
    prompt = encoded(engine.tokenizer, options.prompt, "prompt")
    text = TextStream(engine.tokenizer, prompt, engine.sampling_params.stop)
    print(options.prompt, end="", flush=True)
    try:
        for token in engine.stream(prompt):
            print(text.add(token), end="", flush=True)
    finally:
        print(text.end(), flush=True)
    return 0
