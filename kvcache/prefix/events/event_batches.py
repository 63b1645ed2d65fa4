"""Block events in the form of vLLM (`distributed/kv_events.py` of 0.32), from the records of an index.

A batch is `[seconds, [event, ..], rank]`, an event a map with its `type`:

    BlockStored       block_hashes, parent_block_hash, token_ids, block_size, lora_id, lora_name, medium, extra_keys,
                      cache_salt
    BlockRemoved      block_hashes, medium
    AllBlocksCleared

Blocks that follow one another in a text are one event. The last two are there only in namespaces with a salt that is
told. `extra_keys` has an item for each block: `[salt]` for the first block of a text, else None. Dynamo reads
`cache_salt` instead, of each event (`lib/kv-router/src/zmq_wire/deserialize.rs` of its repository). Such namespaces
have batches of their own: readers that know no salts refuse the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from kvcache.prefix.events.kv_events import KvEvents
from kvcache.prefix.index.event_buffer import KINDS, Noted

__all__ = ["event_batches"]

_FIRST, _NEXT, _REMOVED, _CLEARED, _LEFT = range(len(KINDS))
Event = dict[str, Any]


def event_batches(noted: Noted, settings: KvEvents) -> Iterator[list[Event]]:
    """The events of records, in their order, in lists that become a batch each."""
    salted, batch = False, list[Event]()
    for event, has_salt in _events(noted, settings):
        if batch and has_salt != salted:
            yield batch
            batch = []
        batch.append(event)
        salted = has_salt
    if batch:
        yield batch


def _events(noted: Noted, settings: KvEvents) -> Iterator[tuple[Event, bool]]:
    """The event of each run of records that make one, and whether its namespace has a salt."""
    records = noted.events
    kinds, spaces, pages = records["kind"], records["space"], records["page"]
    begins = np.ones(len(records), bool)
    behind = (kinds[1:] == _NEXT) & (kinds[:-1] <= _NEXT) & (records["parent"][1:] == pages[:-1])
    both_left = (kinds[1:] == _REMOVED) & (kinds[:-1] == _REMOVED)
    begins[1:] = ~((behind | both_left) & (spaces[1:] == spaces[:-1]))
    edges = [*np.flatnonzero(begins).tolist(), len(records)]
    for first, end in pairwise(edges):
        kind, salt = int(kinds[first]), None if settings.unsalted else noted.salts.get(int(spaces[first]))
        if kind == _CLEARED:
            yield {"type": "AllBlocksCleared"}, False
        elif kind == _REMOVED:
            gone = {"type": "BlockRemoved", "block_hashes": pages[first:end].tolist(), "medium": settings.medium}
            yield gone, salt is not None
        elif kind != _LEFT:
            event = {
                "type": "BlockStored",
                "block_hashes": pages[first:end].tolist(),
                "parent_block_hash": None if kind == _FIRST else int(records["parent"][first]),
                "token_ids": noted.tokens[first:end].ravel().tolist(),
                "block_size": noted.tokens.shape[1],
                "lora_id": None,
                "medium": settings.medium,
                "lora_name": None,
            }
            if salt is not None:
                event["extra_keys"] = [[salt] if kind == _FIRST else None, *[None] * (end - first - 1)]
                event["cache_salt"] = salt
            yield event, salt is not None
