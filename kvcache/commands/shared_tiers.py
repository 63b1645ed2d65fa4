"""`open_tiers`: where the prefixes of a server go: a folder, a Redis server or an object store that others share."""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path

from kvcache.texts.arrivals import AUTOSAVE_BYTES, AUTOSAVE_START
from kvcache.tiers.directory import DirectoryTier
from kvcache.tiers.keys import as_secret
from kvcache.tiers.links import without_secrets
from kvcache.tiers.object_store import ObjectStoreTier
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
    add("--object-store", metavar="URL",
        help="an object store that keeps prefixes likewise, such as s3://bucket/folder, gs://bucket or "
        "az://container; credentials are in variables such as AWS_ACCESS_KEY_ID; needs the extra objects")
    add("--tier-secret", metavar="FILE",
        help="16 to 64 bytes, the same for all servers that read each other's prefixes: of --redis, --object-store and "
        "a folder")


def _url(options: argparse.Namespace) -> str | None:
    said: str | None = options.redis
    return os.environ.get(VARIABLE) if said is None else said


def check_tiers(options: argparse.Namespace) -> bytes | None:
    """The secret of the options, if they have one.

    Raises:
        OSError: a file that cannot be read.
        ValueError: a secret of another length; a shared store without one; a secret for nothing.
    """
    shared = {"--redis": _url(options), "--object-store": options.object_store}
    if options.tier_secret is None:
        for name, url in shared.items():
            if url is not None:
                raise ValueError(f"tier_secret: expected a file beside {name}, got none")
        return None
    if options.autosave is None and not any(url is not None for url in shared.values()):
        raise ValueError("tier_secret: expected --redis, --object-store or --autosave beside it, got none of them")
    content = Path(options.tier_secret).read_bytes().strip()
    try:
        return as_secret(content)
    except ValueError as error:
        told = str(error).removeprefix("secret: ")
        raise ValueError(f"tier_secret: {told}") from None


def open_tiers(options: argparse.Namespace) -> Tiers | None:
    """The tiers of the options, which write each prefix at the end of its first request; None: there are none.

    Raises:
        ImportError: a shared store without its package, `redis` or `obstore`.
        OSError: a folder that cannot be made or read.
        ValueError: as `check_tiers`; a folder that others can write to; no URL of such a store.
    """
    secret, url, tiers = check_tiers(options), _url(options), list[Tier]()
    if options.autosave is not None:
        tiers.append(DirectoryTier(options.autosave, AUTOSAVE_BYTES, secret=secret))
    if url is not None:
        assert secret is not None
        tiers.append(RedisTier(_client(url), secret=secret))
    if options.object_store is not None:
        assert secret is not None
        tiers.append(ObjectStoreTier(_store(options.object_store), secret=secret))
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


def _store(url: str) -> object:
    try:
        import obstore.store
    except ImportError as error:
        told = f"object_store needs the package obstore: pip install 'kvcache-cpu[objects]' ({error})"
        raise ImportError(told) from None
    seconds = timedelta(seconds=_SECONDS)
    try:
        return obstore.store.from_url(
            url, client_options={"timeout": seconds, "connect_timeout": seconds},
            retry_config={"max_retries": 1, "retry_timeout": seconds},
        )
    except Exception as error:  # obstore has a family of its own
        told = without_secrets(str(error).splitlines()[0])
        raise ValueError(f"object_store: expected a URL such as s3://bucket/folder, got an error: {told}") from None
