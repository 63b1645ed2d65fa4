"""`chat`: a conversation in the terminal, or with the lines of a pipe, that keeps its prefix between turns."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

from kvcache.commands.answer_view import answer_view, note
from kvcache.commands.conversation import Conversation, Messages
from kvcache.commands.message_reader import MessageReader
from kvcache.commands.options import (
    adapter_of,
    add_adapter,
    add_chat_template,
    add_options,
    expect_chat_template,
    explained,
    memory_of,
    name_of,
    open_engine,
)
from kvcache.commands.slash_commands import SlashCommands
from kvcache.engine import Answer, InferenceEngine, PrefixCachedEngine
from kvcache.errors import OutOfMemoryError

__all__ = ["add_chat", "chat"]

MAX_TOKENS = 1024
PIECE = 128  # tokens of a prompt between two reports of progress: a piece takes a second or two on most machines


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_options(parser, model_required=False, max_tokens=MAX_TOKENS)
    add_chat_template(parser)
    add_adapter(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message, which comes first")
    parser.add_argument("--plain", action="store_true", help="show answers as they come, without Markdown and colours")


def chat(options: argparse.Namespace, default: Callable[[], str]) -> int:
    """Answer one message after another of the standard input until its end; returns the exit status.

    Args:
        options: of the command.
        default: called for the model where the options name none.
    """
    options.model = options.model or default()
    expect_chat_template(options, options.system)
    engine = open_engine(
        options, InferenceEngine.from_pretrained, prefill_chunk=PIECE, adapters=adapter_of(options)
    )
    engine.reseed(secrets.randbits(63))  # `--seed` is one of `sampling_params`, and comes first
    memory = memory_of(options) if options.spill is None else None  # an engine that spills has its own limit
    cached = PrefixCachedEngine(engine, shared=True, max_memory_bytes=memory)
    Talk(cached, options).run()
    return 0


class Talk:
    """A conversation as a person sees it.

    Ctrl-C during an answer ends the answer, of which the conversation keeps what has come; while the message is read,
    it keeps nothing. At the prompt of a terminal a second Ctrl-C ends the conversation, and Ctrl-D does.

    Args:
        engine: answers.
        options: of the command.
    """

    def __init__(self, engine: PrefixCachedEngine, options: argparse.Namespace) -> None:
        inner = engine.inner
        self._engine, self._params = inner, inner.sampling_params
        # A text needs one block more than its tokens, where its last one is copied.
        room = (inner.cache.total_blocks - 1) * inner.cache.block_size
        context = max(1, min(inner.config.max_position_embeddings, options.context or room, room))
        self._talk = Conversation(engine, context, options.system, options.adapter)
        self._reader, self._view = MessageReader(), answer_view(options.plain)
        self._commands, self._name = SlashCommands(self._talk, note, self._reader.confirm), name_of(options.model)

    def run(self) -> None:
        """Answer messages until there are no more."""
        if self._reader.is_typed:
            kv = self._engine.memory()["kv"] / 2**20
            note(f"{self._name}: {self._talk.context:,} tokens of context, KV {kv:,.1f} MiB; /help lists commands")
        interrupted = False
        while True:
            try:  # the inner loop is in it: an interrupt comes at a jump back too
                while self._step():
                    interrupted = False
                break
            except KeyboardInterrupt:  # at the prompt, or just before or behind an answer
                if interrupted or not self._reader.is_typed:
                    break
                interrupted = True
                note("\nCtrl-C again, Ctrl-D or /exit ends the conversation")
        if self._reader.is_shown:
            print()

    def _step(self) -> bool:
        """Answer a message, or run a command; False: the conversation has ended."""
        try:
            message = self._reader.read()
        except EOFError:
            return False
        command = self._commands.match(message) if self._reader.is_typed else None
        if command is not None:
            return self._commands.run(command)
        self._turn(message)
        return True

    def _turn(self, question: str) -> None:
        """Answer one more message, and tell about it. A message that cannot be answered is not kept."""
        try:
            messages = self._fitting(question)
        except KeyboardInterrupt:
            messages = None
        except ValueError as error:
            note(f"kvcache: {error}")
            return
        if messages is None:
            note("the message is not kept")
            return
        reading = _Reading()
        try:
            room = self._talk.context - self._talk.count(messages)
            params = replace(self._params, max_tokens=min(self._params.max_tokens, room))
            answer = self._talk.answer(messages, params, reading.progress)
        except ValueError as error:
            note(f"kvcache: {error}")
            return
        with closing(answer):
            text, end = self._show(answer, reading)
        if text is None:
            note(f"[{end}; the message is not kept]")
            return
        self._talk.keep(messages, text)
        note(f"[{end}{self._report(answer, reading)}]")

    def _fitting(self, question: str) -> Messages | None:
        """The messages with a question; without the oldest turns if all do not fit and the person agrees.

        None: the person does not, or the question does not fit alone. ValueError: so for the lines of a pipe.
        """
        talk, messages = self._talk, self._talk.asked(question)
        count, context = talk.count(messages), talk.context
        if count + min(self._params.max_tokens, context // 8) <= context:
            return messages
        shorter = talk.without_oldest(question, context // 2) or talk.without_oldest(question, context - 1)
        left_out = 0 if shorter is None else len(messages) - len(shorter)
        full = f"the context is full: {count:,} of {context:,} tokens"
        if left_out and self._reader.confirm(f"{full}. Forget the oldest {left_out} messages?"):
            return shorter
        if count < context:  # there is room for a short answer
            return messages
        if self._reader.is_typed:
            note(full if left_out else f"{full}, with this message alone")
            return None
        raise ValueError(f"message: expected at most {context:,} tokens with those before it, got {count:,}")

    def _show(self, answer: Answer, reading: _Reading) -> tuple[str | None, str]:
        """Show an answer as it comes: its text, None if the prompt did not run; and what ended it before its time."""
        pieces: list[str] = []
        end = ""
        try:
            for piece in answer:
                reading.end()
                pieces.append(piece)
                self._view.add(piece)
        except KeyboardInterrupt:
            end = "stopped; "
        except OutOfMemoryError as error:
            end = f"stopped: {explained(error, self._engine)}; "
        reading.end()
        if pieces or answer.tokens:
            self._view.end()
        elif end:
            return None, end.removesuffix("; ")
        if answer.finish_reason == "length":
            most = len(answer.tokens) >= self._params.max_tokens
            end = f"ended after --max-tokens {self._params.max_tokens}; " if most else "the context is full; "
        return "".join(pieces), end

    def _report(self, answer: Answer, reading: _Reading) -> str:
        count, cache = len(answer.tokens), self._engine.cache
        seconds = time.perf_counter() - reading.first
        rate = (count - 1) / seconds if count > 1 and seconds > 0 else 0.0
        used = answer.prompt_tokens + count
        return (
            f"{used:,} of {self._talk.context:,} tokens, {rate:.1f} tok/s, "
            f"{answer.cached_tokens:,} of {answer.prompt_tokens:,} cached, "
            f"first in {1000 * (reading.first - reading.start):.0f} ms, "
            f"KV {cache.used_memory_bytes / 2**20:.1f} of {self._engine.memory()['kv'] / 2**20:.1f} MiB"
        )


class _Reading:
    """The time until the first token, and a line about it on a terminal: tokens that were read, and how fast.

    Attributes:
        start: when the prompt began to run, in seconds.
        first: when the first piece of the answer came; until then, now.
    """

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self._first: float | None = None
        self._began: tuple[float, int] | None = None
        self._is_seen = sys.stderr.isatty()

    @property
    def first(self) -> float:
        return time.perf_counter() if self._first is None else self._first

    def progress(self, done: int, total: int) -> None:
        """Show how far a prompt is read, once it is clear that it takes more than a piece."""
        now = time.perf_counter()
        if self._began is None:
            self._began = now, done
        elif self._is_seen:
            since, read = self._began
            rate = (done - read) / max(now - since, 1e-9)
            line = f"\r\x1b[Kreading: {done:,} of {total:,} tokens, {rate:,.0f} tok/s; Ctrl-C stops"
            print(line, end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Take the line away; a second call does nothing."""
        if self._first is None:
            self._first = time.perf_counter()
            if self._is_seen and self._began is not None:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
