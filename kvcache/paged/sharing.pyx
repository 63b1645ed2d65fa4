"""Runs handed between sequences, and copy-on-write of many sequences at once; see paged/sharing.pxd."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

from kvcache.core.kernels cimport kvc_run
from kvcache.paged.records cimport RUN_STRIDE, Sequence
from kvcache.paged.run_lists cimport RunLists
from kvcache.paged.tables cimport BlockTables, count_at, start_at

from kvcache.errors import OutOfMemoryError

__all__ = []


cdef int reorder_runs(BlockTables table, const uint64_t *ids, const int64_t *rows, int64_t n) except -1:
    cdef Sequence *seqs = table.records.seqs
    cdef Sequence *fresh
    cdef int64_t i
    table.pick_(ids, n)
    for i in range(n):
        if not 0 <= rows[i] < n:
            raise IndexError(f"rows: expected ints in [0, {n}), got {rows[i]}")
    fresh = <Sequence *>calloc(max(n, 1), sizeof(Sequence))    # what each gets; without runs: it stays as it is
    if fresh == NULL:
        raise MemoryError(f"no memory for {n} sequences")
    try:
        for i in range(n):
            if rows[i] != i:
                make_room(&seqs[table.picked[rows[i]]], &fresh[i])
    except MemoryError:
        for i in range(n):
            free(fresh[i].runs)
            free(fresh[i].positions)
        free(fresh)
        raise
    # Every reference is taken before the first is released.
    for i in range(n):
        if fresh[i].runs != NULL:
            table.run_lists.share_(&seqs[table.picked[rows[i]]], &fresh[i])
    for i in range(n):
        if fresh[i].runs != NULL:
            replace_runs(table, table.picked[i], &fresh[i])
    free(fresh)
    return 0


cdef int make_room(const Sequence *seq, Sequence *fresh) except -1:
    """Arrays for the runs of `seq` and one more."""
    fresh.capacity = seq.num_runs + 1
    fresh.runs = <kvc_run *>malloc(fresh.capacity * sizeof(kvc_run))
    if seq.positions != NULL:
        fresh.positions = <int64_t *>malloc(fresh.capacity * sizeof(int64_t))
    if fresh.runs == NULL or (seq.positions != NULL and fresh.positions == NULL):
        raise MemoryError(f"no memory for {fresh.capacity} runs")
    return 0


cdef void replace_runs(BlockTables table, int32_t row, const Sequence *fresh) noexcept nogil:
    cdef Sequence *seq = &table.records.seqs[row]
    if seq.num_runs:
        table.pool.release_each(&seq.runs[0].block, seq.num_runs, RUN_STRIDE)
    table.records.replace_room_(seq, fresh.runs, fresh.positions, fresh.capacity)
    seq.num_runs, seq.num_tokens, seq.dense = fresh.num_runs, fresh.num_tokens, fresh.dense
    seq.next_position, seq.sink_tokens = fresh.next_position, fresh.sink_tokens
    table.victims.changed(row)


cdef int own_runs(BlockTables table, const int64_t *starts, const int64_t *counts, int64_t n) except -1:
    cdef RunLists run_lists = table.run_lists
    cdef Sequence *seq
    cdef int64_t i, turn, start, count, blocks = 0
    # Of those that share a block the last holder does not copy it: count each with the references of those before it
    # already dropped, and put them back.
    for turn in range(2):
        for i in range(n):
            seq = &table.records.seqs[table.picked[i]]
            count = count_at(counts, i)
            start = start_at(seq, starts, i, count)
            if turn == 0:
                blocks += run_lists.drop_(seq, start, start + count, -1)
            else:
                run_lists.drop_(seq, start, start + count, 1)
    if blocks > table.pool.num_free:
        raise OutOfMemoryError(blocks, table.pool.num_free)
    run_lists.reserve_copies_(blocks)
    for i in range(n):
        seq = &table.records.seqs[table.picked[i]]
        count = count_at(counts, i)
        start = start_at(seq, starts, i, count)
        run_lists.own_(seq, start, start + count)
    return 0
