"""Puts the pages that a file names into empty indices: into several at once, all or none."""

from kvcache.prefix.index cimport PrefixIndex
from kvcache.prefix.slots cimport Claim

__all__ = ["commit"]


def commit(parts):
    """Put indices filled by `name` in the place of empty ones, all or none; their pages wait for their content.

    Args:
        parts: of each, `(index, filled, claims, sources)`: claims on all pages that `filled` names, each of one
            `Slots`, and what to fetch the content of each from. The claims are empty then.

    Raises:
        MemoryError: nothing has changed.
    """
    cdef PrefixIndex index, filled
    cdef Claim claim
    cdef Py_ssize_t i
    todo = [(<PrefixIndex?>index, <PrefixIndex?>filled, list(zip(claims, sources)))
            for index, filled, claims, sources in parts]
    for index, filled, pairs in todo:
        index.clean_up()
        if filled.miss_reasons is not None:
            filled.miss_reasons.counts.reserve(sum([len(claim) for claim, _ in pairs]))
            filled.miss_reasons.ghosts, filled.miss_reasons.roots = index.miss_reasons.ghosts, index.miss_reasons.roots
    # Nothing fails from here on.
    for index, filled, pairs in todo:
        index.swap(filled)
        index.clock += 1
        for claim, source in pairs:
            for i in range(claim.data.n):
                claim.slots.name_(claim.data.pages[i], index.clock, True)
                if index.miss_reasons is not None:
                    index.miss_reasons.count(claim.data.pages[i])
            if claim.data.n:
                claim.slots.source = source
            claim.data.n = 0
