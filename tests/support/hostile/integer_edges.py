"""Every integer that a caller may pass, at the edges of all integer types; `test_integer_edges.py` runs it.

Each call ends in a result or in an error of the documented kinds, soon, without memory in proportion to a hostile
number, and leaves its object sound. The process has little memory, so that what takes it is found.

    python -m hostile.integer_edges all|few [LABEL]
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
import time
import traceback
from collections import Counter

import numpy as np
from hostile.integer_calls import ARRAYS, PAGED, SCALARS
from hostile.integer_states import empty, forked
from hostile.limited_process import SANITIZED, limit_memory
from posix_modules import resource

from kvcache import KvCacheError, get_num_threads, set_num_threads

DOCUMENTED = (KvCacheError, TypeError, ValueError, IndexError)
ROOM = 3 << 30  # bytes of addresses beside those that are in use at the start
SECONDS = 2.0  # of a call, in its own time
RESIDENT = 600 << 20  # bytes that one call may touch

ALL = sys.argv[1:2] == ["all"]  # else fewer types and states
BITS = (7, 8, 15, 16, 31, 32, 62, 63, 64) if ALL else (31, 63, 64)

KINDS = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
EDGES = sorted(
    {0, 1, -1} | {2**k + more for k in BITS for more in (-1, 0, 1)} | {-(2**k) - more for k in BITS for more in (0, 1)}
)


def scalars(n):
    """The number, and as a scalar of NumPy: of the narrowest type that has it, and of both of 64 bits."""
    yield n
    if not ALL and abs(n) > 1 and n % 2:
        return
    fits = [kind for kind in KINDS if np.iinfo(kind).min <= n <= np.iinfo(kind).max]
    for kind in {*fits[:1], *(kind for kind in fits if kind.itemsize == 8)}:
        yield kind.type(n)


def arrays(n):
    """The number alone, twice, behind and before others; as a list and as arrays."""
    for numbers in ([n], [n, n], [1, n], [n, 2, n, 3]) if ALL else ([n], [n, 2, n, 3]):
        yield numbers
        fits = [k for k in KINDS if all(np.iinfo(k).min <= x <= np.iinfo(k).max for x in numbers)]
        for kind in {*fits[:1], *(kind for kind in fits if kind.itemsize == 8)}:
            yield np.array(numbers, kind)


def negatives(it):
    """The negative counts that an object reports."""
    found = []
    if hasattr(it, "stats"):
        stats = it.stats()
        for name in type(stats).__dataclass_fields__:
            value = getattr(stats, name)
            if isinstance(value, (int, float)) and value < 0:
                found.append(f"{name} {value}")
    for name in (
        "num_sequences", "free_block_count", "used_block_count", "utilization", "used_memory_bytes", "num_tokens",
        "memory_bytes", "allocated_bytes", "memory_usage", "seq_len", "pinned_blocks",
    ):
        value = getattr(it, name, 0)
        if isinstance(value, (int, float)) and value < 0:
            found.append(f"{name} {value}")
    return found


STATM = os.open("/proc/self/statm", os.O_RDONLY)


def resident():
    return int(os.pread(STATM, 100, 0).split()[1]) * resource.getpagesize()


class TooLong(BaseException):
    """Raised by a timer."""


def too_long(*_):
    raise TooLong


class Tries:
    def __init__(self):
        self.outcomes, self.problems = Counter(), []

    def one(self, make, label, call, number):
        def wrong(text):
            kind = getattr(number, "dtype", type(number).__name__)
            self.problems.append(f"{label} with {number!r} ({kind}) on {make.__name__}{text}")

        it = make()
        started = time.process_time()
        peak = resident()
        signal.setitimer(signal.ITIMER_PROF, 2 * SECONDS * (10 if SANITIZED else 1))
        try:
            result = call(it, number)
            self.outcomes["results"] += 1
            if type(result) is int and result < 0:
                wrong(f" gave {result}")
        except DOCUMENTED as error:
            self.outcomes["refused"] += 1
            message = str(error)
            if "-" in message and isinstance(error, MemoryError):
                wrong(f": a negative count: {message}")
            del error
        except BaseException as error:
            place = traceback.format_exc(limit=-2)
            wrong(f": {type(error).__name__}: {str(error)[:200]}\n{place}")
            del error
        signal.setitimer(signal.ITIMER_PROF, 0)
        took, grown = time.process_time() - started, resident() - peak
        if took > SECONDS * (10 if SANITIZED else 1):
            wrong(f" took {took:.1f} s")
        if grown > RESIDENT and not SANITIZED:
            wrong(f" took {grown >> 20} MiB")
        if it is not None:
            try:
                it.check()
                assert not (below := negatives(it)), below
            except Exception:
                wrong(f" leaves: {traceback.format_exc(limit=-2)}")


def main(_, only=""):
    logging.disable()
    faulthandler.enable()
    signal.signal(signal.SIGPROF, too_long)
    faulthandler.dump_traceback_later(500, exit=True)
    np.seterr(over="ignore", invalid="ignore")
    threads = get_num_threads()
    if not SANITIZED:
        limit_memory(ROOM)
    gc.freeze()  # gc.collect() then looks at what the calls make, not at all of NumPy
    tries, slowest = Tries(), Counter()
    for calls, variants in ((SCALARS, scalars), (ARRAYS, arrays)):
        for states, label, call in calls:
            if only not in label:
                continue
            started = time.perf_counter()
            for make in [empty, forked, *states] if ALL and states is PAGED else states:
                for edge in EDGES:
                    for number in variants(edge):
                        tries.one(make, label, call, number)
                set_num_threads(threads)
            gc.collect()
            slowest[label] = time.perf_counter() - started
            if os.environ.get("VERBOSE"):
                print(f"{label}: {slowest[label]:.1f} s, {len(tries.problems)} problems", flush=True)
    seen = set()
    for problem in tries.problems:
        head = problem.split(" with ")[0]
        if (head, problem.splitlines()[-1][:40]) not in seen:
            seen.add((head, problem.splitlines()[-1][:40]))
            print(problem[:1200])
    print("slowest:", {label: round(took, 1) for label, took in slowest.most_common(6)})
    print(
        f"{sum(tries.outcomes.values()) + len(tries.problems)} calls, {tries.outcomes['results']} results, "
        f"{tries.outcomes['refused']} refused, {len(tries.problems)} problems"
    )
    return bool(tries.problems)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
