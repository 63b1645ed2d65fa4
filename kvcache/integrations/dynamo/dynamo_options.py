"""Options of a worker of Dynamo, and the engine that they ask for."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from kvcache.kernels.threads import set_num_threads
from kvcache.serving import BatchEngine
from kvcache.support.arguments import as_bytes, as_count
from kvcache.tiers import DirectoryTier, RedisTier, Tiers

__all__ = ["engine_of", "options_of"]

_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """The options of a command line, checked.

    Raises:
        ValueError: a number out of range; two stores, or Redis without a secret.
        FileNotFoundError: a folder without a file that the frontend reads.
    """
    parser = argparse.ArgumentParser("python -m kvcache.integrations.dynamo", description="A worker of NVIDIA Dynamo.")
    add = parser.add_argument
    add("--model", required=True, metavar="FOLDER", help="of Hugging Face; the frontend reads it too")
    add("--name", help="by which clients ask for it (the last part of its path)")
    add("--dtype", default="q8", help="storage of K and V (%(default)s)")
    add("--weights", default="auto", help="format of the matrices (%(default)s: as stored)")
    add("--num-blocks", type=int, metavar="N", help="size of the cache, in blocks of 16 tokens")
    add("--max-memory", metavar="BYTES", help="of K and V, a number or a text such as 4GiB")
    add("--max-running", type=int, default=64, metavar="N", help="answers that run at a time (%(default)s)")
    add("--max-queue", type=int, default=1024, metavar="N", help="answers that wait (%(default)s)")
    add("--threads", type=int, metavar="N", help="that compute (as many as there are CPUs)")
    add("--store", metavar="DIR", help="a folder in which workers of this machine share cached prefixes")
    add("--store-bytes", default="20GiB", metavar="BYTES", help="the most of all its files (%(default)s)")
    add("--redis", metavar="URL", help="Redis or Valkey, in which workers of several machines do (extra redis)")
    add("--secret", metavar="FILE", help="16 to 64 bytes that workers with that Redis share")
    add("--namespace", default="dynamo", help="of Dynamo (%(default)s)")
    add("--component", default="kvcache", help="of Dynamo (%(default)s)")
    add("--endpoint", default="generate", help="of Dynamo (%(default)s)")
    add("--discovery-backend", default="file", help="where the frontend finds workers (%(default)s)")
    add("--request-plane", default="tcp", help="how requests come (%(default)s)")
    add("--event-plane", default="zmq", help="how events go (%(default)s)")
    add("--no-kv-routing", action="store_true", help="tell nothing of blocks and load")
    add("--tool-call-parser", metavar="NAME", help="by which the frontend finds calls, such as hermes")
    add("--reasoning-parser", metavar="NAME", help="by which it finds thoughts, such as qwen3")
    options = parser.parse_args(arguments)
    for name in ("max_running", "max_queue"):
        as_count(getattr(options, name), name, 1)
    for name in ("num_blocks", "threads"):
        if getattr(options, name) is not None:
            as_count(getattr(options, name), name, 1)
    for name in ("max_memory", "store_bytes"):
        if (value := getattr(options, name)) is not None:
            setattr(options, name, as_bytes(int(value) if value.isdecimal() else value, name))
    if options.store is not None and options.redis is not None:
        raise ValueError("redis: expected none beside --store, got both")
    if (options.redis is None) != (options.secret is None):
        raise ValueError("secret: expected a file beside --redis, and none without it, got another")
    if missing := [name for name in _FILES if not Path(options.model, name).is_file()]:
        raise FileNotFoundError(f"{options.model}: expected {missing[0]}, which the frontend reads, got none")
    options.name = options.name or Path(os.path.abspath(options.model)).name
    return options


def engine_of(options: argparse.Namespace) -> tuple[BatchEngine, Tiers | None]:
    """The engine of the options, whose events go to an address of this machine, and its tiers."""
    if options.threads is not None:
        set_num_threads(options.threads)
    tiers, sizes = _tiers(options), {"num_blocks": options.num_blocks, "max_memory_bytes": options.max_memory}
    more: dict[str, Any] = {} if options.no_kv_routing else {"kv_events": "tcp://127.0.0.1:*"}
    try:
        engine = BatchEngine.from_pretrained(
            options.model, dtype=options.dtype, weights=options.weights, max_running=options.max_running,
            max_queue=options.max_queue, tiers=tiers, **sizes, **more,
        )
    except BaseException:
        if tiers is not None:
            tiers.close(0.0)
        raise
    return engine, tiers


def _tiers(options: argparse.Namespace) -> Tiers | None:
    if options.store is not None:
        return Tiers([DirectoryTier(options.store, options.store_bytes)], after_uses=1, head_start=0.05)
    if options.redis is None:
        return None
    try:
        import redis
    except ImportError as error:
        raise ImportError(f"redis: expected the extra: pip install 'kvcache-cpu[redis]' ({error})") from None
    client = redis.Redis.from_url(options.redis, socket_timeout=5.0)
    return Tiers([RedisTier(client, secret=Path(options.secret).read_bytes())], after_uses=1, head_start=0.05)
