"""The claims of a `Slots`, in a list, and which of them are over.

A claim is over when its `Claim` was dropped, or when the call of the cache that made it has ended. The frame of a call
may live long after the call, in the traceback of an error, and keep what the call had taken: so the number of the call
decides, not the frame. Only what a caller holds longer, a session or a state, is kept until it is dropped.
"""

from libc.stdint cimport int32_t, int64_t


cdef struct claim_t:
    claim_t *next         # all that have not ended, the newest first
    claim_t *before
    claim_t *next_dropped  # in the list of those that were dropped
    int32_t *pages        # (n,) referenced, in the order of the text
    int64_t n
    int64_t held          # how many of them, from the first on, count as held by a caller
    int64_t call          # that made it, by `CallLock.calls`
    int32_t pinned        # page whose pin is the claim's; -1: none
    bint kept             # it outlasts that call
    bint ended            # its references were given back


cdef struct claims_t:
    claim_t *first
    claim_t *dropped
    Py_ssize_t num_brief    # of those in the list, the ones that are not kept


cdef inline void add_claim(claims_t *claims, claim_t *claim) noexcept:
    claim.next = claims.first
    if claim.next != NULL:
        claim.next.before = claim
    claims.first = claim
    claims.num_brief += 1


cdef inline void keep_claim(claims_t *claims, claim_t *claim) noexcept:
    claims.num_brief -= not (claim.kept or claim.ended)
    claim.kept = True


cdef inline void remove_claim(claims_t *claims, claim_t *claim) noexcept:
    claims.num_brief -= not claim.kept
    claim.ended = True
    if claim.before != NULL:
        claim.before.next = claim.next
    else:
        claims.first = claim.next
    if claim.next != NULL:
        claim.next.before = claim.before


cdef inline claim_t *take_dropped(claims_t *claims) noexcept:
    """One that was dropped, no longer in the list of these; NULL: none."""
    cdef claim_t *claim = claims.dropped
    if claim != NULL:
        claims.dropped = claim.next_dropped
    return claim


cdef inline claim_t *find_brief(const claims_t *claims, int64_t call) noexcept:
    """One that was made in another call than this and is not kept; NULL: none."""
    cdef claim_t *claim = claims.first
    cdef Py_ssize_t left = claims.num_brief
    while left > 0:
        if not claim.kept and claim.call != call:
            return claim
        left -= not claim.kept
        claim = claim.next
    return NULL
