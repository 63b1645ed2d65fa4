"""`RedisTier`: values in a Redis or Valkey server, or in a cluster of them, over the caller's client."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from kvcache.support.arguments import as_count
from kvcache.support.copies import refuse_copies
from kvcache.tiers.connections import Connections, Unfit
from kvcache.tiers.keys import as_secret
from kvcache.tiers.protocol import MOST_BYTES, Buffer

__all__ = ["RedisTier"]

_MOST_TTL = 2**53  # the server counts milliseconds since 1970 in 64 bits


class RedisTier:
    """Values in Redis or Valkey. The client decides on addresses, TLS, passwords and timeouts; the server on eviction.

    Give the client a `socket_timeout`, and the server a `maxmemory` and `maxmemory-policy allkeys-lru`. A call has one
    connection of the client to each node (`tiers/connections.py`). It takes 30 seconds at most, and a reply that is
    larger than a value is not read. A client with a cache reads replies itself, of any size, in one pipeline of single
    commands.

    Args:
        client: a synchronous client of `redis` or `valkey` (`Redis`, `RedisCluster`, `Valkey`, `ValkeyCluster`), with
            `decode_responses` as by default.
        secret: 16 to 64 bytes, the same on all machines that share values; see `Tiers`.
        prefix: before each key.
        ttl: seconds after which the server drops a value; None: no limit.

    Raises:
        TypeError, ValueError: another kind of client, secret, prefix or ttl.

    Attributes:
        client, secret, prefix, ttl: see above.
    """

    def __init__(self, client: Any, *, secret: bytes, prefix: str = "kvcache:", ttl: int | None = None) -> None:
        if not callable(getattr(client, "pipeline", None)) or inspect.iscoroutinefunction(
            getattr(client, "execute_command", None)
        ):
            raise TypeError(f"client: expected a synchronous client of redis or valkey, got {type(client).__name__}")
        encoder = getattr(client, "get_encoder", None)
        if encoder is not None and getattr(encoder(), "decode_responses", False):
            raise ValueError("client: expected decode_responses=False, got True")
        if not isinstance(prefix, str):
            raise TypeError(f"prefix: expected a str, got {type(prefix).__name__}")
        self.client, self.secret, self.prefix = client, as_secret(secret), prefix
        self.ttl = None if ttl is None else as_count(ttl, "ttl", 1, _MOST_TTL)
        self._prefix, self._connections = prefix.encode(), Connections(client)

    def get_many(self, keys: Sequence[bytes], most_bytes: int = MOST_BYTES) -> list[Buffer | None]:
        """See `Tier`. Raises what the client raises."""
        with suppress(Unfit):
            return self._connections.get([self._name(key) for key in keys], most_bytes)
        return self._run(keys, lambda pipeline, key: pipeline.get(self._name(key)))

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier`. Raises what the client raises."""
        with suppress(Unfit):
            return self._connections.contains([self._name(key) for key in keys])
        return [count == 1 for count in self._run(keys, lambda pipeline, key: pipeline.exists(self._name(key)))]

    def put_many(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        """See `Tier`. Raises what the client raises, such as an error of a server without memory."""
        try:
            self._connections.put([(self._name(key), value) for key, value in items], self.ttl)
        except Unfit:
            self._run(items, lambda pipeline, item: pipeline.set(self._name(item[0]), memoryview(item[1]), ex=self.ttl))

    def _run(self, items: Sequence[Any], command: Callable[[Any, Any], object]) -> list[Any]:
        """One command for each item in one pipeline; the first error of one of them, if any, is raised at the end."""
        if not items:
            return []
        with self.client.pipeline(transaction=False) as pipeline:
            for item in items:
                command(pipeline, item)
            replies = list(pipeline.execute(raise_on_error=False))
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    __reduce_ex__ = refuse_copies("make another one over the same client")

    def __repr__(self) -> str:
        return f"RedisTier({type(self.client).__name__}, prefix={self.prefix!r}, ttl={self.ttl})"
