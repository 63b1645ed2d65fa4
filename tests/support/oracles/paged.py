"""A naive `PagedKvCache`: Python lists, one object per token.

Content and structure are separate. The content of a sequence is a list of tokens, copied by a fork, so it has no
sharing bugs. Its structure is a list of (block, slot); references are counted by searching all lists.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np


class NaiveOutOfMemoryError(Exception):
    def __init__(self, requested, available):
        super().__init__(requested, available)
        self.requested, self.available = requested, available


@dataclass
class NaiveSequence:
    content: list = field(default_factory=list)  # per token: {layer: (key, value)}
    slots: list = field(default_factory=list)  # per token: (block, slot)
    positions: list = field(default_factory=list)
    next_position: int = 0
    sinks: int = 0
    last_access: int = 0
    accesses: int = 0
    priority: int = 0
    pins: int = 0

    def blocks(self):
        return list(dict.fromkeys(block for block, _ in self.slots))


class NaivePagedKvCache:
    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free_blocks = deque(range(num_blocks))
        self.sequences = {}
        self.clock = self.allocations = self.frees = 0

    def references(self, block):
        return sum(block in seq.blocks() for seq in self.sequences.values())

    def touch(self, seq):
        self.clock += 1
        seq.last_access = self.clock
        seq.accesses += 1

    def take(self):
        self.allocations += 1
        return self.free_blocks.popleft()

    def release_unnamed(self, blocks):
        """Free the blocks that no sequence uses any more, in this order."""
        for block in blocks:
            if self.references(block) == 0:
                self.free_blocks.append(block)
                self.frees += 1

    def cost(self, seq, count):
        if count == 0:
            return 0
        tail = self.block_size - 1 - seq.slots[-1][1] if seq.slots else 0
        copy = tail > 0 and self.references(seq.slots[-1][0]) > 1
        return copy + -(-max(0, count - tail) // self.block_size)

    def own(self, seq, block):
        new = self.take()
        seq.slots = [(new if b == block else b, slot) for b, slot in seq.slots]
        return new

    def lengthen(self, seq, count):
        for _ in range(count):
            if seq.slots and seq.slots[-1][1] + 1 < self.block_size:
                block, slot = seq.slots[-1]
                if self.references(block) > 1:
                    block = self.own(seq, block)
                seq.slots.append((block, slot + 1))
            else:
                seq.slots.append((self.take(), 0))
            seq.content.append({})
            seq.positions.append(seq.next_position)
            seq.next_position += 1

    def demand(self, blocks):
        if blocks > len(self.free_blocks):
            raise NaiveOutOfMemoryError(blocks, len(self.free_blocks))

    def allocate(self, seq_id, count):
        self.demand(-(-count // self.block_size))
        seq = self.sequences[seq_id] = NaiveSequence()
        self.lengthen(seq, count)
        self.touch(seq)

    def allocate_batch(self, seq_ids, lengths):
        self.demand(sum(-(-n // self.block_size) for n in lengths))
        for seq_id, n in zip(seq_ids, lengths, strict=True):
            self.allocate(seq_id, n)

    def append(self, seq_id, count):
        seq = self.sequences[seq_id]
        self.demand(self.cost(seq, count))
        self.lengthen(seq, count)
        self.touch(seq)

    def append_batch(self, seq_ids, counts=None):
        counts = [1] * len(seq_ids) if counts is None else counts
        need, named = 0, {}
        for seq_id, count in zip(seq_ids, counts, strict=True):
            seq = self.sequences[seq_id]
            tail = self.block_size - 1 - seq.slots[-1][1] if seq.slots else 0
            need += -(-max(0, count - tail) // self.block_size)
            if tail and count:
                block = seq.slots[-1][0]
                need += self.references(block) - named.get(block, 0) > 1
                named[block] = named.get(block, 0) + 1
        self.demand(need)
        for seq_id, count in zip(seq_ids, counts, strict=True):
            self.lengthen(self.sequences[seq_id], count)
            self.touch(self.sequences[seq_id])

    def free(self, seq_id):
        blocks = self.sequences.pop(seq_id).blocks()
        self.release_unnamed(blocks)

    def fork(self, source, target):
        new = self.sequences[target] = self.copy(self.sequences[source])
        new.priority = self.sequences[source].priority
        self.touch(new)

    @staticmethod
    def copy(seq):
        return NaiveSequence(
            [dict(token) for token in seq.content], list(seq.slots), list(seq.positions), seq.next_position, seq.sinks
        )

    def keep(self, seq_id, indices):
        seq = self.sequences[seq_id]
        before = seq.blocks()
        seq.sinks = sum(i < seq.sinks for i in indices)
        seq.content = [seq.content[i] for i in indices]
        seq.slots = [seq.slots[i] for i in indices]
        seq.positions = [seq.positions[i] for i in indices]
        self.release_unnamed([b for b in before if b not in seq.blocks()])

    def truncate(self, seq_id, count):
        seq = self.sequences[seq_id]
        if count < len(seq.content):
            seq.next_position = seq.positions[count]
        before = seq.blocks()
        del seq.content[count:], seq.slots[count:], seq.positions[count:]
        seq.sinks = min(seq.sinks, count)
        self.release_unnamed([b for b in reversed(before) if b not in seq.blocks()])

    def truncate_batch(self, seq_ids, counts):
        for seq_id, count in zip(seq_ids, counts, strict=True):
            self.truncate(seq_id, count)

    def reorder(self, seq_ids, rows):
        fresh = {}
        for target, row in zip(seq_ids, rows, strict=True):
            if seq_ids[row] != target:
                fresh[target] = self.sequences["new", target] = self.copy(self.sequences[seq_ids[row]])
        for target, new in fresh.items():
            seq = self.sequences[target]
            before = seq.blocks()
            seq.content, seq.slots, seq.positions = new.content, new.slots, new.positions
            seq.next_position, seq.sinks = new.next_position, new.sinks
            del self.sequences["new", target]
            self.release_unnamed([block for block in before if block not in seq.blocks()])

    def grow(self, num_blocks):
        self.free_blocks.extend(range(self.num_blocks, self.num_blocks + num_blocks))
        self.num_blocks += num_blocks

    def stream(self, seq_id, sink, window):
        n = len(self.sequences[seq_id].content)
        if sink + window >= n:
            return 0
        self.keep(seq_id, [*range(sink), *range(n - window, n)])
        self.sequences[seq_id].sinks = sink
        return n - sink - window

    def compact(self, seq_id):
        seq = self.sequences[seq_id]
        old, n = seq.blocks(), len(seq.slots)
        count = -(-n // self.block_size)
        if len(old) == count:
            return
        if any(self.references(b) > 1 for b in old):
            self.demand(count)
            new = [self.take() for _ in range(count)]
        else:
            new = old[:count]
        seq.slots = [(new[i // self.block_size], i % self.block_size) for i in range(n)]
        self.release_unnamed([b for b in old if b not in new])

    def write(self, layer, seq_id, start, keys, values):
        self.write_many(layer, [(seq_id, start, len(keys))], keys, values)

    def write_ragged(self, layer, seq_ids, lens, keys, values):
        parts = [(seq_id, len(self.sequences[seq_id].content) - n, n) for seq_id, n in zip(seq_ids, lens, strict=True)]
        self.write_many(layer, parts, keys, values)

    def write_many(self, layer, parts, keys, values):
        need, written = 0, {}
        for seq_id, start, n in parts:
            for block in dict.fromkeys(block for block, _ in self.sequences[seq_id].slots[start : start + n]):
                need += self.references(block) - written.get(block, 0) > 1
                written[block] = written.get(block, 0) + 1
        self.demand(need)
        rows = iter(zip(keys, values, strict=True))
        for seq_id, start, n in parts:
            seq = self.sequences[seq_id]
            for block in dict.fromkeys(block for block, _ in seq.slots[start : start + n]):
                if self.references(block) > 1:
                    self.own(seq, block)
            for token in seq.content[start : start + n]:
                token[layer] = next(rows)
        for seq_id, _, _ in parts:
            self.touch(self.sequences[seq_id])

    def rows(self, layer, seq_id, zeros):
        """Keys and values of every token; `zeros`, a pair, for tokens that were never written in this layer."""
        tokens = [token.get(layer, zeros) for token in self.sequences[seq_id].content]
        return np.array([k for k, _ in tokens]), np.array([v for _, v in tokens])

    def victim(self, rank, *, sole=False):
        """The next sequence to evict: the least `rank(seq)`, ties to the lowest id."""
        candidates = [
            (rank(seq), seq_id)
            for seq_id, seq in self.sequences.items()
            if seq.pins == 0 and (not sole or any(self.references(b) == 1 for b in seq.blocks()))
        ]
        return min(candidates)[1] if candidates else None

    def evict_to(self, utilization, rank):
        evicted = []
        while self.num_blocks - len(self.free_blocks) > utilization * self.num_blocks:
            seq_id = self.victim(rank, sole=True)
            if seq_id is None:
                seq_id = self.victim(rank)
            if seq_id is None:
                break
            evicted.append(seq_id)
            self.free(seq_id)
        return evicted


RANKS = {
    "LRU": lambda seq: seq.last_access,
    "LFU": lambda seq: seq.accesses,
    "LongestFirst": lambda seq: -len(seq.content),
    "Priority": lambda seq: seq.priority,
    "StreamingLLM": lambda seq: seq.last_access,
}
