"""KeyboardInterrupt between any two lines of `kvcache/`, as Ctrl-C may strike there: counted, chosen, raised."""

from __future__ import annotations

import dis
import functools
import gc
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kvcache

HOUSE = str(Path(kvcache.__file__).parent)
INSTRUCTIONS = sys.version_info < (3, 12)  # whether a trace function is shown all of them


@functools.cache
def quiet(code):
    """Offsets of the instructions before which CPython raises nothing and looks at no signal.

    That is a NOP (a bare `try:`), and the call of `__exit__` at the end of a `with`: no handler covers them, not even
    that of the `with`, and nothing before them is a call or a loop that ends outside of it. And the loops of
    comprehensions, which from Python 3.12 on are part of the function around them: a signal there leaves the `with`
    around them as it should, and what a trace function raises does not.
    """
    found, every = set(), list(dis.get_instructions(code))
    for i, instruction in enumerate(every):
        if instruction.opname in ("NOP", "PUSH_EXC_INFO", "WITH_EXCEPT_START"):
            found.add(instruction.offset)
        if instruction.opname == "LOAD_FAST_AND_CLEAR":  # a comprehension begins
            head = next(x for x in every[i:] if x.opname == "FOR_ITER")
            found.update(x.offset for x in every if head.offset <= x.offset < head.argval)
        # LOAD_CONST None, three times, or once and DUP_TOP, twice; then the call
        nones = every[i : i + 3]
        if (
            instruction.opname == "LOAD_CONST"
            and len(nones) == 3
            and all(x.opname == "DUP_TOP" or (x.opname == "LOAD_CONST" and x.argval is None) for x in nones)
        ):
            first = i
            while every[first - 1].opname in ("NOP", "POP_BLOCK", "SWAP", "ROT_TWO", "ROT_THREE"):
                first -= 1
            last = next(j for j in range(i, len(every)) if every[j].opname.startswith("CALL"))
            found.update(x.offset for x in every[first : last + 1])
    return frozenset(found)


class Lines:
    """While entered, counts what runs in the Python files of `kvcache/`, and interrupts before the n-th.

    Args:
        stop: the count at which KeyboardInterrupt is raised; None: never.
        opcodes: count single instructions of the interpreter instead of lines; from Python 3.12 on, which passes over
            most of them, lines all the same.
        house: count what stands in files whose names begin like this, or like one of these.
        again: the count at which it is raised once more: who puts things right may be interrupted, too.

    Attributes:
        count: lines that were reached.
        seen: where each stands, as (file, line), if `stop` is None.
        struck: where it was raised, as "file:line", or None.
    """

    def __init__(self, stop=None, opcodes=False, house=HOUSE, again=None):
        self.again = again
        self.stop, self.house = stop, house
        self.event = "opcode" if opcodes and INSTRUCTIONS else "line"
        self.count, self.seen, self.struck = 0, [], None

    def __enter__(self):
        gc.collect()
        gc.disable()  # what dies, dies at the same count each time
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception):
        sys.settrace(self._before)
        gc.enable()

    def _call(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(self.house):
            return None
        frame.f_trace_opcodes = self.event == "opcode"
        return self._line

    def _line(self, frame, event, arg):
        if event != self.event or frame.f_lasti in quiet(frame.f_code):
            return self._line
        self.count += 1
        if self.stop is None:
            self.seen.append((frame.f_code.co_filename, frame.f_lineno))
        elif self.count in (self.stop, self.again):
            self.struck = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            raise KeyboardInterrupt
        return self._line


def places(seen, every):
    """Counts at which to interrupt: all, or of each line the first and the last time that it runs."""
    if every:
        return range(1, len(seen) + 1)
    first = {place: n for n, place in reversed(list(enumerate(seen, 1)))}
    last = {place: n for n, place in enumerate(seen, 1)}
    return sorted({*first.values(), *last.values()})


def spread(chosen, most):
    """At most about `most` of them, evenly, the last one among them."""
    return chosen[:: -max(1, -(-len(chosen) // most))]


def strike(scene, name, most=None, opcodes=False, twice=False):
    """Interrupt an operation of a scene (scene.py) at many places, each time in a fresh one.

    Either all has happened then or nothing, and where nothing has, the next call does it.

    Args:
        most: places to try; None: every one, every time that it is reached.
        opcodes: as of `Lines`.
        twice: interrupt once more soon after.

    Returns:
        `(places, problems)`: how many interrupts struck, and what was wrong.
    """
    getattr(scene(), name)()  # the first time some modules load
    clean = scene()
    clean._state()  # as below, where it is asked for first
    with Lines(None, opcodes) as lines:
        getattr(clean, name)()
    clean._check()
    after = clean._kept(clean._state())
    evicts = scene.evicts and "evict" in name  # what has left to make room has left
    chosen = list(places(lines.seen, every=True)) if most is None else spread(places(lines.seen, every=False), most)
    problems = []
    with ThreadPoolExecutor(1) as other:  # which gets in only if every lock has been let go
        for stop in chosen:
            here = scene()
            before = here._kept(here._state())
            lines = Lines(stop, opcodes, again=stop + 1 + stop % 17 if twice else None)
            try:
                _interrupted(here, name, lines)
                assert lines.struck, "the run was another one"
                gc.collect()
                other.submit(here._check).result(600)
                found = here._kept(here._state())
                assert evicts or found in (before, after), "half of it was done"
                if evicts or found == before:
                    getattr(here, name)()
                    other.submit(here._check).result(600)
                    assert evicts or here._kept(here._state()) == after, "the second call did something else"
            except Exception:
                where = f"{lines.struck} ({stop} of {lines.count})"
                problems.append(f"{scene.__name__}.{name} at {where}: {traceback.format_exc(limit=-3)}")
    return len(chosen), problems


def _interrupted(scene, name, lines):
    try:
        with lines:
            getattr(scene, name)()
    except KeyboardInterrupt:
        assert lines.struck
