"""`serve`: the server of the command line."""

from __future__ import annotations

import argparse
import os
import socket
from contextlib import closing
from ipaddress import ip_address
from pathlib import Path

from kvcache.commands.chat import MAX_TOKENS
from kvcache.commands.options import add_options, open_engine, sampling_params
from kvcache.server.keys import Keys
from kvcache.serving.engine import BatchEngine

__all__ = ["add_serve", "serve"]

VARIABLE = "KVCACHE_API_KEYS"


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add_options(parser, model_required=False, max_tokens=MAX_TOKENS)
    add("--name", help="the name by which clients ask for the model (the last part of its path)")
    add("--host", default="127.0.0.1", help="address to listen on; without keys one of this machine (%(default)s)")
    add("--port", type=int, default=8000, help="0 takes a free one (%(default)s)")
    keys = f"a KEY in each line, or KEY NAMESPACE; instead of the lines of the variable {VARIABLE}"
    add("--api-keys", metavar="FILE", help=keys)
    add("--max-running", type=int, default=64, metavar="N", help="answers that run at a time (%(default)s)")
    add("--max-queue", type=int, default=256, metavar="N", help="answers that wait; more get status 429 (%(default)s)")
    add("--max-body", type=int, default=4 << 20, metavar="BYTES", help="of a request (%(default)s)")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="an answer ends after these (%(default)s)")
    add("--drain", type=int, default=30, metavar="SECONDS",
        help="that answers have to end in when the server is told to end; 0 cancels them (%(default)s)")  # fmt: skip


def serve(options: argparse.Namespace, default: str) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status.

    Args:
        options: of the command.
        default: the model where the options name none.

    Raises:
        ImportError: without the packages of the extra `serve`.
        ValueError: an address of other machines without keys.
    """
    try:
        import uvicorn

        from kvcache.server.app import make_app
    except ImportError as error:
        raise ImportError(f"serve needs starlette and uvicorn: pip install 'kvcache-cpu[serve]' ({error})") from None
    keys = _keys(options)
    if keys is None and not _is_loopback(options.host):
        raise ValueError(f"host: expected a loopback address, or --api-keys beside it, got {options.host}")
    options.model = options.model or default
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with closing(socket.create_server((options.host, options.port), family=family, backlog=1024)) as listening:
        engine = open_engine(
            options, BatchEngine.from_pretrained, max_queue=options.max_queue, max_running=options.max_running
        )
        engine.sampling_params = sampling_params(options, engine.sampling_params)
        name = options.name or Path(options.model).name.removesuffix(".gguf")
        app = make_app(engine, name, keys, max_body=options.max_body, timeout=options.timeout)
        config = uvicorn.Config(
            app, log_level="warning", timeout_graceful_shutdown=options.drain, limit_concurrency=4096,
            server_header=False, lifespan="on",
        )  # fmt: skip
        address = f"[{options.host}]" if ":" in options.host else options.host
        print(f"{name} at http://{address}:{listening.getsockname()[1]}/v1", flush=True)
        try:
            uvicorn.Server(config).run(sockets=[listening])
        finally:
            engine.close(cancel=True)  # where a second signal ended it at once
    return 0


def _keys(options: argparse.Namespace) -> Keys | None:
    if options.api_keys is not None:
        return Keys.read(options.api_keys)
    return Keys(os.environ[VARIABLE].splitlines()) if VARIABLE in os.environ else None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
