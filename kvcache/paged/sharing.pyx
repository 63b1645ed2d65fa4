"""Runs handed between sequences, and copy-on-write of many sequences at once; see paged/sharing.pxd."""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

from kvcache.kernels.kernels cimport kvc_run
from kvcache.paged.records cimport RUN_STRIDE, RunList, Sequence
from kvcache.paged.run_lists cimport RunLists
from kvcache.paged.tables cimport BlockTables

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
                make_room(&seqs[table.picked[rows[i]]].tokens, &fresh[i].tokens)
                if table.residual is not None:
                    make_room(&seqs[table.picked[rows[i]]].residual, &fresh[i].residual)
    except MemoryError:
        for i in range(n):
            free(fresh[i].tokens.runs)
            free(fresh[i].tokens.positions)
            free(fresh[i].residual.runs)
            free(fresh[i].residual.positions)
        free(fresh)
        raise
    # Every reference is taken before the first is released.
    for i in range(n):
        if fresh[i].tokens.runs != NULL:
            table.share_(&seqs[table.picked[rows[i]]], &fresh[i])
    for i in range(n):
        if fresh[i].tokens.runs != NULL:
            replace_runs(table.run_lists, &seqs[table.picked[i]].tokens, &fresh[i].tokens)
            if table.residual is not None:
                replace_runs(table.residual.run_lists, &seqs[table.picked[i]].residual, &fresh[i].residual)
            seqs[table.picked[i]].span = fresh[i].span
            table.victims.changed(table.picked[i])
    free(fresh)
    return 0


cdef int make_room(const RunList *held, RunList *fresh) except -1:
    """Arrays for the runs of a list and one more."""
    fresh.capacity = held.num_runs + 1
    fresh.runs = <kvc_run *>malloc(fresh.capacity * sizeof(kvc_run))
    if held.positions != NULL:
        fresh.positions = <int64_t *>malloc(fresh.capacity * sizeof(int64_t))
    if fresh.runs == NULL or (held.positions != NULL and fresh.positions == NULL):
        raise MemoryError(f"no memory for {fresh.capacity} runs")
    return 0


cdef void replace_runs(RunLists run_lists, RunList *held, const RunList *fresh) noexcept nogil:
    if held.num_runs:
        run_lists.pool.release_each(&held.runs[0].block, held.num_runs, RUN_STRIDE)
    run_lists.records.replace_room_(held, fresh.runs, fresh.positions, fresh.capacity)
    held.num_runs, held.num_tokens, held.dense = fresh.num_runs, fresh.num_tokens, fresh.dense
    held.next_position, held.sink_tokens = fresh.next_position, fresh.sink_tokens


cdef int64_t blocks_to_own(RunLists run_lists, const Stretch *stretches, int64_t n) noexcept nogil:
    cdef int64_t i, blocks = 0
    # k writers of one block need k - 1 copies if nobody else holds it: count by dropping references one by one, then
    # restore them.
    for i in range(n):
        blocks += run_lists.drop_(stretches[i].held, stretches[i].first, stretches[i].stop, -1)
    for i in range(n):
        run_lists.drop_(stretches[i].held, stretches[i].first, stretches[i].stop, 1)
    return blocks


cdef void own_all(RunLists run_lists, const Stretch *stretches, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        run_lists.own_(stretches[i].held, stretches[i].first, stretches[i].stop)
