"""`EngineEvents`: the block events of a `BatchEngine`, in which namespaces are salts."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from hashlib import blake2b
from time import time
from typing import Any

from kvcache.prefix.events.event_publisher import EventPublisher
from kvcache.prefix.events.kv_events import KvEvents
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.saved.namespaces import encode_namespace
from kvcache.serving.stats import BatchStats
from kvcache.texts.forward import is_tied

__all__ = ["EngineEvents"]


class EngineEvents:
    """The publisher of an engine.

    A namespace that is a text is the salt of its blocks, and so is the text in `(None, text)`: where a server has no
    keys, the salt of a body. None has no salt, and any other namespace a hash of it; so have blocks behind a compressed
    prefix, of which no other worker has the beginning, and those with an adapter, which are of no use to other texts.

    Args:
        cache: of the layers that keep all tokens.
        settings: a `KvEvents` or an address.
        name_of: the caller's name of a namespace of the cache.
    """

    def __init__(self, cache: PrefixCache, settings: Any, name_of: Callable[[Hashable], Hashable]) -> None:
        def salt_of(space: Hashable) -> tuple[int, str | None]:
            digest = blake2b(encode_namespace(space), digest_size=8).digest()
            return int.from_bytes(digest, "little"), _text_of(space if is_tied(space) else name_of(space))

        self._publisher = EventPublisher(cache, KvEvents.of(settings), salt_of, time)

    @property
    def settings(self) -> KvEvents:
        """The addresses that are listened on, and the rest."""
        return self._publisher.settings

    def expect(self, namespace: Hashable) -> None:
        """Raise TypeError if a namespace has no hash that is the same in every process."""
        encode_namespace(namespace)

    def counted(self, stats: BatchStats) -> BatchStats:
        """`stats` with the counters of events."""
        counts = self._publisher.counts()
        return replace(
            stats, events_told=counts.told, events_dropped=counts.dropped, event_snapshots=counts.snapshots,
            event_replays=counts.replays,
        )

    def close(self) -> None:
        """End it; see `EventPublisher.close`."""
        self._publisher.close()


def _text_of(namespace: Hashable) -> str | None:
    if isinstance(namespace, tuple) and len(namespace) == 2 and namespace[0] is None:
        namespace = namespace[1]
    if namespace is None or isinstance(namespace, str):
        return namespace
    return blake2b(encode_namespace(namespace), digest_size=16).hexdigest()
