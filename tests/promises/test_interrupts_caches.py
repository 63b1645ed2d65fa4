"""Ctrl-C at every step of a call on a cache: the call has done everything or nothing, and every lock is free.

The subjects are those of the failing allocations (subject.py). By default some of the instructions that a call executes
are interrupted, every second one again during the repair; with --long every execution of every line, at two
instructions each.
"""

import functools
import importlib
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from pace import FAST
from subjects.caches import Paged
from subjects.interrupts import INSTRUCTIONS, PACKAGE, SKIPS_HANDLERS, Lines, interrupt_everywhere, places, spread
from subjects.saved import PROMPTS, SavedBlocks, SavedPackedPrefix, SavedPrefix
from subjects.subject import Subject

from kvcache.core.locks import CallLock
from kvcache.states.token_rows import rows_of

pytestmark = pytest.mark.exhaustive

MODULES = [importlib.import_module(name) for name in ("subjects.caches", "subjects.prefix", "subjects.saved")]
# Interrupts come between lines of Python, so builds with checks run one operation of each subject.
OPERATIONS = [
    pytest.param(subject, name, id=f"{subject.__name__}.{name}", marks=[pytest.mark.one_build] * (i > 0))
    for module in MODULES
    for subject in vars(module).values()
    if isinstance(subject, type) and issubclass(subject, Subject) and subject.__module__ == module.__name__
    for i, name in enumerate(subject.operations())
]
PYTHON = (PACKAGE, str(Path(os.__file__).parent))  # interrupt functions of the standard library too


def unequal(numbers):
    """A function of its own: from Python 3.12 on, the jump back of a loop with a condition is outside every handler."""
    return [(one, other) for one in numbers for other in (1, 2) if one != other]


def locked(lock, numbers):
    """Every way to leave a `with`."""
    for number in numbers:
        with lock:
            if number == 0:
                continue
            if number == 3:
                break
            try:
                len(numbers[number:])
            finally:
                str(number)
    with lock, suppress(ValueError):
        numbers.index(-1)
    with lock:
        pairs = unequal(numbers)
        assert len(pairs) > len({one for one, _ in pairs})
    with lock:
        return sum(numbers)


@pytest.mark.skipif(SKIPS_HANDLERS, reason="this Python may skip the end of a `with`")
def test_no_interrupt_where_python_does_not_check_signals():
    """Between the block of a `with` and the call of `__exit__`: an interrupt there would leave the lock taken."""
    lock = CallLock()
    with Lines(None, True, __file__) as lines:
        assert locked(lock, range(6)) == 15
    assert len(lines.seen) > 20
    for stop in range(1, len(lines.seen) + 1):
        with pytest.raises(KeyboardInterrupt), Lines(stop, True, __file__):
            locked(lock, range(6))
        assert not lock.inside, f"taken after {lines.seen[stop - 1]}"


@pytest.fixture(scope="module", autouse=True)
def quietly():
    """Silence the log, since damage is logged."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(("subject", "name"), OPERATIONS)
def test_a_call_that_is_interrupted_has_done_all_or_nothing(long, subject, name):
    most = 3 if issubclass(subject, Paged) else 4 if FAST else 9  # a paged cache runs each call in compiled code
    runs = [(most, True, False), (most // 3, True, True)]
    if long:
        runs = [(None, False, False), (500, True, False), (500, True, True)]
    if SKIPS_HANDLERS:  # a second interrupt would arrive while the first one leaves a `with`
        runs = [run for run in runs if not run[2]]
    found = [interrupt_everywhere(subject, name, most, opcodes, twice) for most, opcodes, twice in runs]
    problems = [problem for _, some in found for problem in some]
    print(f"{subject.__name__}.{name}: {sum(count for count, _ in found)} interrupts, {len(problems)} problems")
    assert not problems, "\n".join(problems[:5])


def test_a_cache_that_drops_unread_blocks_never_serves_them():
    """Lazily loaded blocks are dropped before their unread marks are."""
    _, problems = interrupt_everywhere(SavedBlocks, "clear")
    assert not problems, "\n".join(problems[:5])


def test_rows_that_a_call_has_grown_before_it_was_interrupted():
    for formats in (("f32", "f32"), ("q8", "q8")):
        rows = rows_of(1, 8, *formats, "auto", None)
        rows.grow(200)
        rows.grow(100)
        assert len(rows.read(0, 0, np.array([150], np.int32))) == 8
        rows.grow(300)
        assert len(rows.read(0, 0, np.array([250], np.int32))) == 8


# -- files ---------------------------------------------------------------------------------------------------


def open_files(path):
    """The number of times this process has the file open."""
    if not sys.platform.startswith("linux"):
        return 0
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(link) and os.path.samefile(link, path) for link in links)


def handled_at(call, stop, again=None):
    """Run `call`; returns whether it was interrupted."""
    try:
        with Lines(stop, True, PYTHON, None if SKIPS_HANDLERS else again) as lines:
            call()
    except KeyboardInterrupt:
        return True
    assert stop is None or lines.handled_at, "the run was another one"
    return False


def stops(call, long):
    with Lines(None, True, PYTHON) as lines:
        call()
    return spread(places(lines.seen, every=long), 2500 if long else 10 if FAST else 20)


KINDS = pytest.mark.parametrize("subject", [SavedPrefix, SavedPackedPrefix, SavedBlocks])


@KINDS
def test_a_save_that_is_interrupted_leaves_the_old_file_or_the_new_one(tmp_path, long, subject):
    here, path = subject(), tmp_path / "cache"
    old = subject()
    old._put(old.it, PROMPTS[0][1][:64], "older")
    contents = []
    for cache in (old.it, here.it):
        cache.save(path)
        contents.append(path.read_bytes())
    assert contents[0] != contents[1]
    seen = set()
    chosen = stops(lambda: here.it.save(path), long)
    for number, stop in enumerate(chosen):
        path.write_bytes(contents[0])
        assert handled_at(lambda: here.it.save(path), stop, stop + number % 5 if number % 2 else None)
        assert path.read_bytes() in contents
        seen.add(contents.index(path.read_bytes()))
        assert os.listdir(tmp_path) == ["cache"], "a temporary file is left"
        assert not open_files(path)
        here._check()
    here.it.save(path)
    assert path.read_bytes() == contents[1]
    assert seen == {0, 1} or (seen == {0} and not INSTRUCTIONS)  # no Python line runs after the replacement
    print(f"{subject.__name__}: {len(chosen)} interrupts of save")


@KINDS
def test_a_load_that_is_interrupted_leaves_no_file_open(tmp_path, long, subject):
    path, counts = tmp_path / "cache", set()
    here = subject()
    here.it.save(path)
    whole = here._fresh().load(path)
    chosen = stops(functools.partial(here._fresh().load, path), long)
    for number, stop in enumerate(chosen):
        here.it = here._fresh()
        assert handled_at(lambda: here.it.load(path), stop, stop + number % 5 if number % 2 else None)
        here._check()
        assert len(here.it) in (0, whole)
        assert open_files(path) == (len(here.it) > 0), "a file that is not in use stays open"
        counts.add(len(here.it))
        if not len(here.it):
            assert here.it.load(path) == whole
        assert [subject._get(here.it, name, tokens) for name, tokens in PROMPTS] == [
            len(tokens) // 16 * 16 if subject is SavedBlocks else len(tokens) for _, tokens in PROMPTS
        ]
        here._check()
        assert not open_files(path), "all has been read"
    assert counts == {0, whole}
    print(f"{subject.__name__}: {len(chosen)} interrupts of load")
