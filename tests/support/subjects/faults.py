"""Lets allocations of every operation fail; `test_faults.py` runs this in a process with `failing_malloc.c`.

For each operation of a subject and each of its allocations, or one of each place that allocates (a chain of calls, in C
and in Python; the first or the last of a place, in turn): build the object, let the allocation fail, alone or with all
later ones, and call the operation. It either raises MemoryError and changes nothing, or succeeds without the memory. In
both cases all invariants hold, and the same call then works.

    python -m subjects.faults MODULE SUBJECT WIDTH STEP          WIDTH allocations fail in a row; of the places that
                                                                 allocate, each STEP-th; STEP 0: all allocations

Prints one line of counts.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import sys
import traceback

import numpy as np
from subjects.interrupts import first_and_last

MOST = 100_000  # allocations of an operation


def chosen(seen, step):
    """The allocations that fail, counted from 1; `seen` has the place of each allocation."""
    if step == 0:
        return range(1, len(seen) + 1)
    both = first_and_last(seen)
    return sorted(both[i % 2][place] for i, place in enumerate(list(both[0])[::step]))


def run(subject, name, shim, width, step):
    """Let allocations of an operation fail; returns `(faults, failed calls, problems)`."""
    clean, seen = subject(), np.zeros(MOST, np.uint64)
    gc.collect()
    gc.disable()
    shim.faults_record(seen.ctypes.data, len(seen))
    getattr(clean, name)()
    shim.faults_disarm()
    gc.enable()
    assert shim.faults_recorded() <= MOST, f"{subject.__name__}.{name}: expected fewer allocations"
    clean._check()
    after = clean._state()
    faults = failed = 0
    problems = []
    for n in chosen(seen[: shim.faults_recorded()].tolist(), step):
        here = subject()
        before = here._state()
        operation = getattr(here, name)
        error = None
        gc.collect()
        gc.disable()
        shim.faults_arm(n, width)
        try:
            operation()
        except BaseException as caught:
            error = caught
        hits = shim.faults_disarm()
        gc.enable()
        try:
            trace = "" if error is None else "".join(traceback.format_tb(error.__traceback__)[-5:])
            # NumPy's reductions set no exception for a failed allocation; Python then raises SystemError.
            numpys = isinstance(error, SystemError) and "without exception set" in str(error)
            if error is not None and not isinstance(error, MemoryError) and not numpys:
                raise AssertionError(f"a {type(error).__name__}, not a MemoryError") from error
            assert hits, "it came to fewer allocations than the time before"
            error = None
            here._check()
            # What a prefix cache evicted to make room stays evicted, whether or not that was enough.
            evicted = subject.evicts and "evict" in name
            if not (trace and evicted):
                here_is, was = here._state(), before if trace else after
                kept = here._kept if trace else lambda state: state
                assert kept(here_is) == kept(was), "the state has changed"
            if trace:
                operation()
                here._check()
                assert evicted or here._kept(here._state()) == here._kept(after), "the second call did something else"
        except BaseException:
            problems.append(f"{subject.__name__}.{name}, allocation {n}: {traceback.format_exc()}it failed at\n{trace}")
        faults += hits
        failed += bool(trace)
    return faults, failed, problems


SET_HANDLER = 304  # PyDataMem_SetHandler in NumPy's C API table, the same in all versions


def load_shim():
    """Make NumPy allocate arrays through `failing_malloc.c`, and return its functions."""
    shim, python = ctypes.CDLL(None), ctypes.pythonapi
    shim.faults_arm.argtypes = [ctypes.c_long, ctypes.c_long]
    shim.faults_record.argtypes = [ctypes.c_void_p, ctypes.c_long]
    shim.faults_recorded.restype = shim.faults_disarm.restype = ctypes.c_long
    shim.faults_handler.restype = ctypes.c_void_p
    python.PyCapsule_GetPointer.restype = ctypes.c_void_p
    python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    python.PyCapsule_New.restype = ctypes.py_object
    python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    table = python.PyCapsule_GetPointer(np._core._multiarray_umath._ARRAY_API, None)
    functions = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))
    set_handler = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(functions[SET_HANDLER])
    set_handler(python.PyCapsule_New(shim.faults_handler(), b"mem_handler", None))
    return shim


def main(module, subject_name, width, step):
    shim, width, step = load_shim(), int(width), int(step)
    subject = getattr(importlib.import_module(module), subject_name)
    logging.disable()  # damage is logged
    gc.freeze()  # makes each gc.collect() examine only the subject's objects
    operations, faults, failed, problems = subject.operations(), 0, 0, []
    for name in operations:
        more, bad, wrong = run(subject, name, shim, width, step)
        faults, failed, problems = faults + more, failed + bad, problems + wrong
    for problem in problems[:40]:
        print(problem)
    counts = f"{len(operations)} operations, {faults} faults, {failed} failed calls, {len(problems)} problems"
    print(f"{subject_name}: {counts}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
