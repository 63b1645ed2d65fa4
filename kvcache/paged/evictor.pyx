"""Eviction of whole sequences; see paged/evictor.pxd."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvcache.core.block_pool cimport BlockPool
from kvcache.core.locks cimport CallLock
from kvcache.paged.records cimport SequenceRecords
from kvcache.paged.tables cimport BlockTables
from kvcache.paged.victims cimport VictimOrder

import numpy as np

from kvcache.errors import InvalidOperationError

__all__ = ["Evictor"]


cdef class Evictor:
    """Evicts sequences of one table, pinned ones never; each call takes the lock.

    Args:
        lock: of the table.
        table: the `BlockTables` whose order of victims it follows.
    """

    def __cinit__(self, CallLock lock not None, BlockTables table not None):
        self.lock, self.table = lock, table

    @property
    def strategy(self):
        """The `EvictionStrategy` that orders the victims."""
        return self.table.victims.strategy

    def order_by(self, strategy):
        """Order the victims by an `EvictionStrategy` from now on."""
        with self.lock:
            self.table.victims.order_by(strategy)

    def set_priority(self, uint64_t seq_id, int64_t priority):
        """Under the strategy `Priority`, the lowest is evicted first."""
        cdef int32_t row
        with self.lock:
            levels = self.strategy.levels
            if priority < 0 or (levels is not None and priority >= levels):
                raise ValueError(f"priority: expected one in [0, {levels or 'any'}), got {priority}")
            row = self.table.records.find(seq_id)
            self.table.records.seqs[row].priority = priority
            self.table.victims.changed(row)

    def pin(self, uint64_t seq_id):
        """Keep a sequence from eviction until as many `unpin`."""
        cdef int32_t row
        with self.lock:
            row = self.table.records.find(seq_id)
            self.table.records.seqs[row].pins += 1
            self.table.victims.changed(row)

    def unpin(self, uint64_t seq_id):
        """Undo one `pin`; InvalidOperationError if the sequence is not pinned."""
        cdef int32_t row
        with self.lock:
            row = self.table.records.find(seq_id)
            if self.table.records.seqs[row].pins == 0:
                raise InvalidOperationError(f"sequence {seq_id} is not pinned")
            self.table.records.seqs[row].pins -= 1
            self.table.victims.changed(row)

    def victim(self):
        """The id of the next sequence to evict; None when there is none."""
        cdef int32_t row
        with self.lock:
            row = self.table.victims.first()
            return None if row < 0 else self.table.records.seqs[row].seq_id

    def evict(self):
        """Drop every block of the victim, whose id is returned; InvalidOperationError where there is none."""
        cdef int32_t row
        with self.lock:
            row = self.table.victims.first()
            if row < 0:
                raise InvalidOperationError("no sequence to evict")
            seq_id = self.table.records.seqs[row].seq_id
            self.table.end_(row)
            self.evictions += 1
            return seq_id

    def evict_to(self, double utilization):
        """Evict until at most this share of the pool is in use; the evicted ids, in order, uint64.

        Evicting a sequence whose blocks are all shared frees nothing: such sequences are evicted last.
        """
        with self.lock:
            return self._evict_to(utilization)

    # -- below the shell ------------------------------------------------------------------------------------

    cdef object _evict_to(self, double utilization):
        cdef BlockPool pool = self.table.pool
        cdef SequenceRecords records = self.table.records
        cdef VictimOrder victims = self.table.victims
        # A row is in one of the two lists at most: there is room for all of them before the first is evicted.
        cdef int64_t i, num_evicted = 0, first = 0, last = 0
        rows, ids = np.empty(len(self.table), np.int32), np.empty(len(self.table), np.uint64)
        cdef int32_t[::1] passed = rows
        cdef uint64_t[::1] evicted = ids
        cdef int32_t row
        cdef bint one_left
        while pool.num_blocks - pool.num_free > utilization * pool.num_blocks:
            row = victims.first()
            if row >= 0 and self.table.run_lists.shares_all(&records.seqs[row].tokens):
                victims.left(row)
                passed[last] = row
                last += 1
                continue
            if row < 0:
                if first == last:
                    break
                row = passed[first]
                first += 1
            evicted[num_evicted] = records.seqs[row].seq_id
            num_evicted += 1
            one_left = self.table.end_(row)
            if one_left:    # a sequence that was passed over may now hold that block alone
                for i in range(first, last):
                    victims.changed(passed[i])
                first = last = 0
        for i in range(first, last):
            victims.changed(passed[i])
        self.evictions += num_evicted
        return ids[:num_evicted]
