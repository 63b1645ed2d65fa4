"""The command line `kvcache`: the demo, and chat, generation, vectors, a server and a proof with your checkpoint."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import kvcache
from kvcache.commands.chat import add_chat, chat
from kvcache.commands.config_file import configured
from kvcache.commands.embed import add_embed, embed
from kvcache.commands.generate import add_generate, generate
from kvcache.commands.message_reader import visible
from kvcache.commands.options import in_words_of_options
from kvcache.commands.serve import add_serve, serve
from kvcache.commands.verify import add_verify, verify
from kvcache.errors import KvCacheError

__all__ = ["main"]

DESCRIPTION = """\
The KV-cache engine for LLM inference on CPUs.

Without a command it runs the demo: several users share a long system prompt and send several turns each. A small
model that ships with the library answers, first without and then with the prefix cache, and both runs are compared."""

EXAMPLES = """\
examples:
  kvcache
  kvcache chat --model smollm2
  kvcache chat --model ~/models/Qwen3-0.6B --weights q8 --dtype q4 --system "Answer in one sentence."
  kvcache generate --model ~/models/Qwen3-0.6B --prompt "The KV cache is" --temperature 0
  kvcache generate --model ~/models/Qwen3-0.6B-Q4_K_M.gguf -f prompt.txt --context 8192
  kvcache embed --model ~/models/Qwen3-Embedding-0.6B -f lines.txt -o vectors.npy
  kvcache serve --model ~/models/Qwen3-0.6B --api-keys keys.txt --max-memory 4GiB
  kvcache verify --model ~/models/Qwen3-0.6B --dtype q4 --json here.json --against there.json
  kvcache verify --server http://127.0.0.1:8000/v1

`python -m kvcache` is the same command.
"""
CHAT = """\
A conversation in the terminal. Pasted lines are one message, and so are those between \"\"\" and \"\"\"; /help lists
commands, such as /undo and /save. In a pipe each line is a message. Only what is new in it runs: a line on stderr after
each answer says how many tokens of the prompt were cached, and how full context and memory are. Ctrl-C stops an answer;
Ctrl-D, /exit, and Ctrl-C twice at the prompt end the conversation."""
GENERATE = "Continue a prompt with a Hugging Face checkpoint or a GGUF file."
EMBED = "Vectors of the lines of a file, by a network that makes them, such as Qwen3-Embedding."
SERVE = """\
A server with the interfaces of OpenAI and Anthropic: /v1/chat/completions, /v1/completions, /v1/responses,
/v1/messages, /v1/embeddings, /v1/rerank, /v1/models, /live, /ready and /metrics, and a page at / that shows what runs
and has a chat. It needs the extra serve. It has no TLS: put a proxy before it where other machines reach it."""
VERIFY = """\
Prompts of the model's vocabulary, each computed cold and then in every way: behind hits, in a batch, in pieces, with
other threads, preempted, with draft tokens, from files, and at every SIMD level of this CPU. Logits, log-probabilities
and tokens are compared bit by bit. The exit status is 1 where something differs, and 3 where nothing does but some way
was not compared. --json writes a certificate, which another machine compares with its own by --against. --server asks a
server instead, cold and warm."""


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="kvcache", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"kvcache {kvcache.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    commands.add_parser("demo", help="run the demo (the default)")
    add_chat(commands.add_parser("chat", help="talk with a model", description=CHAT, formatter_class=raw))
    add_generate(commands.add_parser("generate", help="continue a prompt", description=GENERATE))
    add_embed(commands.add_parser("embed", help="make vectors of texts", description=EMBED))
    add_serve(commands.add_parser("serve", help="serve many users over HTTP", description=SERVE, formatter_class=raw))
    add_verify(commands.add_parser("verify", help="compare bit by bit", description=VERIFY, formatter_class=raw))
    return parser


def _demo() -> int:
    from kvcache.demo.display import display
    from kvcache.demo.run import run

    return 0 if run(display()) else 1


def _server() -> Any:
    import tokenizers  # noqa: F401  # models need it, some only when they load at a request

    from kvcache.server import process
    from kvcache.server.app import make_app
    from kvcache.server.model_slot import ModelSlot
    from kvcache.server.served_adapters import ServedAdapters
    from kvcache.server.served_model import ServedModel
    from kvcache.server.telemetry import exporting

    return make_app, (ServedModel, ModelSlot, ServedAdapters), exporting, process


def _demo_model() -> str:
    from kvcache.demo import DIRECTORY

    return str(DIRECTORY)


def _write_utf8() -> None:
    """Let files and pipes of Windows have texts as they are: in UTF-8, not the code page, with no other line ends."""
    for stream in (sys.stdout, sys.stderr):
        if sys.platform == "win32" and isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            stream.reconfigure(encoding="utf-8", newline="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. A user's error prints one line to stderr and returns 2.

    The line has no character that controls a terminal: an error may quote a file.
    Where nobody reads the output any more, it ends without a word, with 141 as a shell tells a SIGPIPE.
    """
    _write_utf8()
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.command == "serve" and options.config is not None:
            options = configured(options.config, options.parser, partial(parser.parse_args, arguments))
        if options.command == "chat":
            return chat(options, _demo_model)
        if options.command == "serve":
            return serve(options, _demo_model, _server)
        if options.command == "embed":
            return embed(options)
        if options.command == "verify":
            return verify(options, _demo_model, kvcache.__version__)
        return generate(options) if options.command == "generate" else _demo()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end of the process
        return 141
    except (ImportError, KvCacheError, MemoryError, OSError, TypeError, ValueError) as error:
        print(f"kvcache: {visible(in_words_of_options(error, options))}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
