"""`open_tiers`: where the prefixes of a server go: a folder, a Redis or Valkey server that others share, or both."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from kvcache.texts.arrivals import AUTOSAVE_BYTES, AUTOSAVE_START
from kvcache.tiers.directory import DirectoryTier
from kvcache.tiers.keys import as_secret
from kvcache.tiers.protocol import Tier
from kvcache.tiers.redis import RedisTier
from kvcache.tiers.tiers import Tiers

__all__ = ["VARIABLE", "add_tiers", "check_tiers", "open_tiers"]

VARIABLE = "KVCACHE_REDIS"
_SECONDS = 5.0  # that a call of the client takes at most


def add_tiers(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--autosave", metavar="DIR", help="a folder that keeps all cached prefixes, also after a crash")
    add("--redis", metavar="URL",
        help="a Redis or Valkey server that keeps prefixes for all servers with the same --tier-secret, such as "
        f"redis://host:6379/0; instead of the variable {VARIABLE}; needs the extra redis")
    add("--tier-secret", metavar="FILE",
        help="16 to 64 bytes, the same for all servers that read each other's prefixes: of --redis, and of a folder")


def _url(options: argparse.Namespace) -> str | None:
    said: str | None = options.redis
    return os.environ.get(VARIABLE) if said is None else said


def check_tiers(options: argparse.Namespace) -> bytes | None:
    """The secret of the options, if they have one.

    Raises:
        OSError: a file that cannot be read.
        ValueError: a secret of another length; a server without one; a secret for nothing.
    """
    if options.tier_secret is None:
        if _url(options) is not None:
            raise ValueError("tier_secret: expected a file beside --redis, got none")
        return None
    if _url(options) is None and options.autosave is None:
        raise ValueError("tier_secret: expected --redis or --autosave beside it, got neither")
    content = Path(options.tier_secret).read_bytes().strip()
    try:
        return as_secret(content)
    except ValueError as error:
        told = str(error).removeprefix("secret: ")
        raise ValueError(f"tier_secret: {told}") from None


def open_tiers(options: argparse.Namespace) -> Tiers | None:
    """The tiers of the options, which write each prefix at the end of its first request; None: there are none.

    Raises:
        ImportError: a server without the package `redis`.
        OSError: a folder that cannot be made or read.
        ValueError: as `check_tiers`; a folder that others can write to; no URL of a server.
    """
    secret, url, tiers = check_tiers(options), _url(options), list[Tier]()
    if options.autosave is not None:
        tiers.append(DirectoryTier(options.autosave, AUTOSAVE_BYTES, secret=secret))
    if url is not None:
        assert secret is not None
        tiers.append(RedisTier(_client(url), secret=secret))
    return Tiers(tiers, after_uses=1, head_start=AUTOSAVE_START) if tiers else None


def _client(url: str) -> object:
    try:
        import redis
    except ImportError as error:
        raise ImportError(f"redis needs the package of that name: pip install 'kvcache-cpu[redis]' ({error})") from None
    try:
        return redis.Redis.from_url(url, socket_timeout=_SECONDS, socket_connect_timeout=_SECONDS)
    except ValueError:  # its message may have the password
        raise ValueError("redis: expected a URL such as redis://host:6379/0, got another text") from None
