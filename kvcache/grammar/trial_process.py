"""The process that tries grammars, run as a script: the tokenizer comes first, then one grammar a line.

Each grammar is compiled in a fork, which begins with the vocabulary and has limits of its own; a fork that is ended
takes nothing else with it. The process ends where its socket does.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

__all__: list[str] = []

_PATHS, _STEPS = 2, 32  # texts that a trial begins, and tokens of each
_FAULT = 500  # characters of one, which a pipe takes at once
_DEAD_END = "NoExtension"  # which a text of these random tokens may come to
_FIRST, _FACTOR, _MODULUS = 7919, 48_271, 2**31 - 1  # of numbers that look random, and are the same in each trial
_ENDED: dict[int, str] = {  # the limit that a signal tells
    signal.SIGPROF: "seconds", signal.SIGXCPU: "seconds", signal.SIGSEGV: "stack", signal.SIGBUS: "stack",
}
_PAGE = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    os.setpgid(0, 0)  # whoever ends it ends its fork too; and Ctrl-C is for the server, which drains and still compiles
    channel = socket.socket(fileno=os.dup(0))
    lines = channel.makefile("rb")
    start = json.loads(lines.readline())
    sys.path[:] = start["path"]
    answer: dict[str, Any] = {"fault": None}
    try:
        import llguidance
        from tokenizers import Tokenizer

        from kvcache.grammar.grammar_vocabulary import GrammarVocabulary

        tokenizer = Tokenizer.from_str(lines.read(start["bytes"]).decode())
        vocabulary = GrammarVocabulary(llguidance, tokenizer, start["vocab_size"], start["end_tokens"]).reader
        limits = llguidance.LLParserLimits(**start["limits"])
        warm = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_regex("a"), log_level=0)
        warm.compute_bitmask()  # what is made once is no memory of a grammar
    except BaseException as error:  # panics of Rust are no `Exception`
        answer["fault"] = f"{type(error).__name__}: {error}"[:_FAULT]
    with suppress(OSError):
        os.nice(start["nice"])
    _send(channel, answer)
    while answer["fault"] is None and (line := lines.readline()):
        _send(channel, _tried(llguidance, vocabulary, limits, **json.loads(line)))


def _send(channel: socket.socket, answer: Any) -> None:
    channel.sendall(json.dumps(answer).encode() + b"\n")


def _tried(
    package: Any, vocabulary: Any, limits: Any, source: str, seconds: float, memory: int, stack: int, deadline: float
) -> dict[str, Any]:
    """The answer of a fork that tries a grammar; `limit` names the limit at which it was ended, `seconds` its time."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _bound(seconds, memory, stack)
        os.write(writer, json.dumps(_walk(package, vocabulary, limits, source)).encode())
        os.kill(os.getpid(), signal.SIGKILL)  # nothing of the process that it is a copy of is at its end
    os.close(writer)
    is_late = not select.select([reader], [], [], deadline)[0]
    data = b"" if is_late else os.read(reader, 1 << 16)
    os.kill(child, signal.SIGKILL)
    os.close(reader)
    _, status, used = os.wait4(child, 0)
    found: dict[str, Any] = {"fault": None, "limit": None, "bytes": 0}
    if data:
        found |= json.loads(data)
    else:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        found["limit"] = "deadline" if is_late else _ENDED.get(number, "memory")  # Rust aborts where it gets none
    return found | {"seconds": used.ru_utime + used.ru_stime}


def _bound(seconds: float, memory: int, stack: int) -> None:
    """Set the limits of this fork: CPU time to its end, memory beyond what it has, the stack of its thread."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where Rust says why it aborts
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    for kind, most in (
        (resource.RLIMIT_CPU, int(seconds) + 2), (resource.RLIMIT_STACK, stack), (resource.RLIMIT_CORE, 0)
    ):
        with suppress(OSError, ValueError):  # above the limit that it has
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
    try:
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * _PAGE
        resource.setrlimit(resource.RLIMIT_AS, (size + memory, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (OSError, ValueError):  # of another system, or beside a lower limit
        threading.Thread(target=_watch, args=(_resident() + memory,), daemon=True).start()


def _watch(most: int) -> None:
    """End the process where it has more memory, in bytes."""
    pause = threading.Event()
    while _resident() <= most:
        pause.wait(0.002)
    os.abort()


def _resident() -> int:
    """Bytes that the process has; if the system does not say it, had at its most."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most << 10


def _walk(package: Any, vocabulary: Any, limits: Any, source: str) -> dict[str, Any]:
    """Compile a grammar and compute the masks of some texts: why that failed, and the bytes that it takes."""
    before = _resident()
    try:
        start = package.LLMatcher(vocabulary, source, log_level=0, limits=limits)
        state, number = start, _FIRST
        for _ in range(_PATHS):
            state = start.deep_copy()
            for _ in range(_STEPS):
                mask = b"" if state.is_error() else state.compute_bitmask()
                filled = [i for i, bits in enumerate(mask) if bits]
                if state.is_error() or not filled:
                    break
                number = number * _FACTOR % _MODULUS
                at = filled[number % len(filled)]
                bits = [bit for bit in range(8) if mask[at] >> bit & 1]
                state.consume_token(8 * at + bits[number // len(filled) % len(bits)])
                if state.is_stopped():
                    break
            if state.is_error() and not state.get_error().startswith(_DEAD_END):
                break
    except MemoryError:
        os.abort()
    except BaseException as error:  # panics of Rust are no `Exception`
        return {"fault": str(error)[:_FAULT]}
    if start.is_error():
        return {"fault": start.get_error()[:_FAULT]}
    if state.is_error() and not state.get_error().startswith(_DEAD_END):
        return {"fault": state.get_error()[:_FAULT], "limit": "step"}
    return {"bytes": max(0, _resident() - before)}


if __name__ == "__main__":
    main()
