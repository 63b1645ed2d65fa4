"""Locks; explained in core/locks.pxd."""

from cpython.exc cimport PyErr_CheckSignals, PyErr_SetObject, PyErr_WriteUnraisable
from cpython.pythread cimport (
    NOWAIT_LOCK, PyThread_acquire_lock, PyThread_allocate_lock, PyThread_free_lock, PyThread_get_thread_ident,
    PyThread_release_lock, PyThread_type_lock,
)

from collections import deque
from weakref import WeakMethod

from kvcache.errors import InvalidOperationError, KvCacheError

__all__ = ["AllLocks", "CallLock", "MendingLock"]

cdef extern from "pythread.h" nogil:
    ctypedef enum PyLockStatus:
        PY_LOCK_FAILURE
        PY_LOCK_ACQUIRED
        PY_LOCK_INTR
    PyLockStatus PyThread_acquire_lock_timed(PyThread_type_lock, long long microseconds, int interruptible)

# The lock that this thread took last of those that it holds.
# A thread compares the owner of a lock with itself alone: the number of another thread, written meanwhile, differs too.
cdef extern from *:
    """
    static _Thread_local void *kvc_innermost_lock = NULL;
    #define kvc_owner(owner) __atomic_load_n(owner, __ATOMIC_RELAXED)
    #define kvc_own(owner, thread) __atomic_store_n(owner, thread, __ATOMIC_RELAXED)
    #define kvc_count(counter) __atomic_add_fetch(counter, 1, __ATOMIC_RELAXED)
    #ifdef Py_GIL_DISABLED
    #define KVC_FREE_THREADS 1    /* another thread can come between any two steps of this file */
    #define kvc_meet(meetings) ((void)__atomic_add_fetch(meetings, 1, __ATOMIC_ACQ_REL))
    #else
    #define KVC_FREE_THREADS 0
    #define kvc_meet(meetings) ((void)(meetings))
    #endif
    """
    const bint KVC_FREE_THREADS
    void *kvc_innermost_lock
    unsigned long kvc_owner(const unsigned long *owner) noexcept nogil
    void kvc_own(unsigned long *owner, unsigned long thread) noexcept nogil
    long long kvc_count(long long *counter) noexcept nogil
    void kvc_meet(unsigned long *meetings) noexcept nogil

cdef void *innermost() noexcept nogil:
    return kvc_innermost_lock

cdef inline void **innermost_link() noexcept nogil:
    return &kvc_innermost_lock

cdef inline void set_innermost(void *lock) noexcept nogil:
    global kvc_innermost_lock
    kvc_innermost_lock = lock

cdef long long _locks_made = 0


cdef int acquire(PyThread_type_lock lock, unsigned long *owner) except -1:
    cdef unsigned long me = PyThread_get_thread_ident()
    cdef PyLockStatus status
    if PyThread_acquire_lock(lock, NOWAIT_LOCK):
        kvc_own(owner, me)
        return 0
    while True:
        with nogil:
            status = PyThread_acquire_lock_timed(lock, -1, 1)
            if status == PY_LOCK_ACQUIRED:
                kvc_own(owner, me)
        if status == PY_LOCK_ACQUIRED:
            return 0
        PyErr_CheckSignals()


cdef class CallLock:
    """A lock that its owner cannot take twice: a second call of the thread that holds it raises.

    Threads wait for locks in one order, so no two wait for each other: from higher levels to lower ones, and on one
    level in the order of creation. Only code that runs in the middle of a call, such as a signal handler or a
    finaliser, can ask in another order. It gets the lock only if that is free.

    Args:
        level: 2 for an engine, 1 for a cache, 0 for a part of a cache.

    Raises, when it is taken:
        InvalidOperationError: this thread holds it already, or holds a lock that comes later and would have to wait.
    """

    def __cinit__(self, int level=1):
        self.level = level
        self.lock = PyThread_allocate_lock()
        if self.lock == NULL:
            raise MemoryError("no memory for a lock")
        self.dues, self.behind, self.torn = deque(), deque(), []
        self.order = kvc_count(&_locks_made)

    def __dealloc__(self):
        # If an interrupt came between `__enter__` and its block, it is taken still (see `enter`); then nobody holds it.
        cdef void **link = innermost_link()
        while link[0] != NULL and link[0] != <void *>self:
            link = &(<CallLock>link[0]).outer
        if link[0] != NULL:
            link[0] = self.outer
        if self.lock != NULL:
            PyThread_free_lock(self.lock)

    @property
    def core(self):
        """This lock: the same attribute as that of `MendingLock`."""
        return self

    @property
    def inside(self):
        """Whether this thread holds the lock."""
        return self.is_inside()

    cdef bint is_inside(self) noexcept:
        return kvc_owner(&self.owner) == PyThread_get_thread_ident()

    cdef bint take(self, bint wait) except -1:
        cdef void *held = innermost()
        cdef unsigned long me = PyThread_get_thread_ident()
        if kvc_owner(&self.owner) == me:
            raise InvalidOperationError("expected no call of this object to be running on this thread, got one")
        if PyThread_acquire_lock(self.lock, NOWAIT_LOCK):
            kvc_own(&self.owner, me)
        elif not wait:
            return False
        elif held != NULL and not (<CallLock>held).comes_before(self):
            raise InvalidOperationError("expected no other call of this thread to be running, got one")
        else:
            acquire(self.lock, &self.owner)
        self.outer, self.calls = held, self.calls + 1
        set_innermost(<void *>self)
        return True

    cdef bint comes_before(self, CallLock other):
        return self.level > other.level or (self.level == other.level and self.order < other.order)

    cdef int enter(self) except -1:
        # Python 3.14 looks at signals between the call of `__enter__` and the block that ends with `__exit__`. One that
        # is handled there leaves the lock taken, so those that have come are handled here.
        PyErr_CheckSignals()
        self.take(True)
        if self.torn or self.dues:    # left over from earlier calls
            try:
                self.make_good()
                self.run_dues()
            except BaseException:
                self.leave()
                raise
        return 0

    cdef int make_good(self) except -1:
        cdef MendingLock lock
        while self.torn:
            lock = self.torn[0]
            lock.make_good()
        return 0

    cdef Py_ssize_t run_dues(self) except -1:
        # A signal handler may raise any exception inside a release, so a failed one is tried again. If that works, the
        # exception was the handler's; it is raised when all releases are done.
        foreign = None
        cdef Py_ssize_t left = 0
        while self.dues:
            due = self.dues[0]    # an interrupt leaves it queued; a release may run twice
            first = self.attempt(due)
            error = None if first is None else self.attempt(due)
            if error is None:
                if foreign is None and not isinstance(first, MemoryError):
                    foreign = first
            elif self.attempt(self._nothing) is not None:
                left = len(self.dues)
                break    # mending fails now: the next call mends, then runs these releases
            elif not isinstance(error, KvCacheError):    # else what it releases is gone already
                PyErr_SetObject(type(error), error)
                PyErr_WriteUnraisable(due)
            self.dues.popleft()
        if foreign is not None:
            raise foreign
        return left

    cdef int leave(self) except -1:
        cdef CallLock behind
        cdef Py_ssize_t left = 0
        try:
            left = self.run_dues()
        except BaseException:
            left = len(self.dues)    # the next call runs them, not this one again
            raise
        finally:
            set_innermost(self.outer)
            kvc_own(&self.owner, 0)
            PyThread_release_lock(self.lock)
            while self.behind:
                try:
                    behind = self.behind.popleft()
                except IndexError:    # without the GIL, the thread that has the lock now may settle it too
                    break
                behind.settle()
            # This thread finds what another one has queued just now, or that one, in `settle`, finds the lock free: the
            # second of them to change the word sees what the first one did before.
            kvc_meet(&self.meetings)
            if KVC_FREE_THREADS and <Py_ssize_t>len(self.dues) > left:
                self.settle()
        return 0

    cdef int settle(self) except -1:
        kvc_meet(&self.meetings)    # see `leave`
        if not self.is_inside() and self.take(False):
            self.leave()
        return 0

    cdef CallLock outermost_below(self):
        cdef void *held = innermost()
        cdef CallLock found = None
        while held != NULL:
            if (<CallLock>held).level < self.level:
                found = <CallLock>held
            held = (<CallLock>held).outer
        return found

    cdef object attempt(self, object due):
        try:
            self.make_good()
            due()
        except Exception as error:
            return error
        return None

    def _nothing(self):
        """A release of nothing: `attempt` then only mends."""

    cdef bint enter_to_release(self, object release, bint wait) except -1:
        cdef CallLock below = None if self.is_inside() else self.outermost_below()
        if below is not None:    # a release takes the locks of its parts, of which this thread is in a call
            self.dues.append(release)
            below.behind.append(self)
            return False
        try:
            taken = self.take(wait)
        except InvalidOperationError:
            taken = False
        if taken and self.attempt(self._nothing) is None:
            return True
        self.dues.append(release)
        # The thread that holds the lock runs the queue when it leaves. If it has left meanwhile, this thread does.
        if taken:
            self.leave()
        else:
            self.settle()
        return False

    def __enter__(self):
        self.enter()

    def __exit__(self, kind, error, trace):
        self.leave()

    def when_free(self, release):
        """Run `release()` with the lock held: now, or at the end of the call that this thread is in, of a part too.

        `release` may run a second time if it raises. If it runs now, its exception is raised here. If it runs later and
        raises twice, a `KvCacheError` is ignored, and any other goes to `sys.unraisablehook`.
        """
        self.run_to_release(release, True)

    def hand_over(self, release):
        """`when_free` without waiting: now if the lock is free, else at the end of the call that has it.

        For finalisers: their thread may hold a lock for which the owner of this one waits.
        """
        self.run_to_release(release, False)

    cdef int run_to_release(self, object release, bint wait) except -1:
        if self.enter_to_release(release, wait):
            try:
                release()
            finally:
                self.leave()
        return 0


cdef class MendingLock:
    """A `CallLock`, maybe shared, that runs `mend()` when an exception leaves its block.

    Whatever raised the exception (the call, Ctrl-C, a signal handler between two lines), no other call begins before
    the state is consistent again. `mend` is a bound method; the lock does not keep its object alive. It may run at any
    time, any number of times, with the lock held. If it fails (memory, an interrupt), the next call runs it first.

    Args:
        core: the lock to take, a `CallLock`.
        mend: see above.
    """

    def __init__(self, CallLock core not None, mend):
        self.core, self.mend = core, WeakMethod(mend)

    @property
    def inside(self):
        """Whether this thread holds the lock."""
        return self.core.is_inside()

    cdef int tear(self) except -1:
        if self not in self.core.torn:
            self.core.torn.append(self)
        return 0

    cdef int make_good(self) except -1:
        self.tear()
        mend = self.mend()
        if mend is not None:
            mend()
        self.core.torn.remove(self)
        return 0

    @property
    def torn(self):
        """Whether an exception has ended a call and `mend` has not run since."""
        return self in self.core.torn

    def __enter__(self):
        self.core.enter()

    def __exit__(self, kind, error, trace):
        try:
            if error is not None:
                try:
                    self.make_good()
                except Exception:
                    pass    # `error` is raised; the next call mends
        finally:
            self.core.leave()

    def when_free(self, release):
        """See `CallLock`; `mend()` runs after an exception here, too."""
        self.core.run_to_release(_Mended(self, release), True)

    def hand_over(self, release):
        """See `CallLock`; `mend()` runs after an exception here, too."""
        self.core.run_to_release(_Mended(self, release), False)


cdef class _Mended:
    """A release, and `mend` after it if it fails."""

    cdef MendingLock lock
    cdef object release

    def __init__(self, MendingLock lock, release):
        self.lock, self.release = lock, release

    def __call__(self):
        try:
            self.release()
        except BaseException:
            self.lock.tear()
            try:
                self.lock.core.make_good()
            except Exception:
                pass    # the next call mends
            raise


cdef class AllLocks:
    """Several locks as one context manager: each core is taken once, in the order that `CallLock` demands.

    So two threads that take some of the same locks cannot wait for each other, in whatever order they list them.
    """

    cdef list locks, cores, taken

    def __init__(self, locks):
        self.locks = list(locks)
        self.cores = sorted({lock.core for lock in self.locks}, key=lambda core: (-core.level, core.order))
        self.taken = []

    cdef int leave_all(self) except -1:
        cdef CallLock core
        try:
            while self.taken:
                core = self.taken.pop()
                core.leave()
        finally:
            if self.taken:    # a due release has raised; leave the others all the same
                self.leave_all()
        return 0

    def __enter__(self):
        cdef CallLock core
        try:
            for core in self.cores:
                self.taken.append(core)    # before: if it fails, no lock is left taken
                try:
                    core.enter()
                except BaseException:
                    self.taken.pop()
                    raise
        except BaseException:
            self.leave_all()
            raise

    def __exit__(self, kind, error, trace):
        cdef CallLock core
        try:
            if error is not None:
                for lock in self.locks:
                    if isinstance(lock, MendingLock):
                        (<MendingLock>lock).tear()
                try:
                    for core in self.cores:
                        core.make_good()
                except Exception:
                    pass    # `error` is raised; the next call mends
        finally:
            self.leave_all()
