"""`Trials`: new grammars are compiled in another process first, under limits."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from kvcache.errors import GrammarError, InvalidOperationError
from kvcache.grammar.matcher import step_error

__all__ = ["TrialDeadlineError", "TrialLimits", "TrialResult", "TrialVocabulary", "Trials"]

_SCRIPT = Path(__file__).with_name("trial_process.py")
_STARTING = 120.0  # seconds: a large vocabulary takes some, and a machine may be busy
_MIB = 1 << 20
# Variables of the packages that the process imports: they start no threads, since the process forks.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class TrialLimits(NamedTuple):
    """The limits of one trial: the compilation, and the masks of two texts of 32 tokens.

    Attributes:
        seconds: of CPU time. Schemas of 300 properties, or of 5,000 values, take 0.02 to 0.2.
        memory: bytes beyond the tokenizer.
        stack: bytes; less than what a thread of the server has, which compiles what passed.
        deadline: seconds by the clock, on a machine that is busy.
    """

    seconds: float = 1.0
    memory: int = 128 * _MIB
    stack: int = 6 * _MIB
    deadline: float = 20.0

    def refusal(self, limit: str) -> str:
        """The message of a grammar that met a limit."""
        said = {
            "seconds": f"at most {self.seconds:g} s of CPU time", "memory": f"at most {self.memory // _MIB} MiB",
            "stack": "fewer levels", "deadline": f"at most {self.deadline:g} s on a machine this busy",
        }
        return f"grammar: expected one that takes {said[limit]} to compile with its first masks, got another one"


class TrialVocabulary(NamedTuple):
    """The parts from which a process makes the vocabulary of llguidance.

    Attributes:
        written: the tokenizer as JSON.
        vocab_size: length of the logits.
        end_tokens: those that end a text.
    """

    written: str
    vocab_size: int
    end_tokens: Sequence[int]


class TrialDeadlineError(GrammarError):
    """A trial took too long by the clock: it may pass on a machine that is less busy."""


class TrialResult(NamedTuple):
    """The result of a trial within its limits.

    Attributes:
        size: bytes that the grammar takes when it is compiled, with its first masks.
        seconds: of CPU time.
        fault: why it is none, as llguidance says it; None: it is one.
    """

    size: int
    seconds: float
    fault: str | None


class Trials:
    """Tries grammars of one vocabulary, one at a time, in a process that starts with the first one.

    The process is made anew where it has died or says nothing. It ends with this one, or with `close`.

    Args:
        limits: of each trial.
        nice: how far its priority is below that of this process, when it has read the vocabulary.

    Attributes:
        limits: see above.
        count: trials so far.
        pid: of the process; None: there is none.
    """

    def __init__(self, limits: TrialLimits | None = None, nice: int = 5) -> None:
        self.limits = TrialLimits() if limits is None else limits
        self._nice, self._lock = nice, Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._unread, self._is_closed = b"", False
        self.count = 0

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def tried(self, vocabulary: TrialVocabulary, source: str, parser_limits: Mapping[str, Any]) -> TrialResult:
        """Try a grammar.

        Args:
            vocabulary: the same in each call.
            source: the grammar as llguidance takes it.
            parser_limits: of `LLParserLimits`, the same in each call.

        Raises:
            TrialDeadlineError: not done in time by the clock.
            GrammarError: beyond another limit, which it names.
            RuntimeError: the process cannot be started, or has died twice.
            InvalidOperationError: closed.
        """
        if os.name == "nt":
            raise RuntimeError("grammars: expected a system with forks and limits of processes, got Windows")
        line = json.dumps({"source": source, **self.limits._asdict()}).encode() + b"\n"
        with self._lock:
            self.count += 1
            found = self._asked(vocabulary, line, parser_limits)
        if found["limit"] == "step":
            raise step_error(found["fault"])
        if found["limit"] is not None:
            kind = TrialDeadlineError if found["limit"] == "deadline" else GrammarError
            raise kind(self.limits.refusal(found["limit"]))
        return TrialResult(found["bytes"], found["seconds"], found["fault"])

    def _asked(self, vocabulary: TrialVocabulary, line: bytes, parser_limits: Mapping[str, Any]) -> dict[str, Any]:
        for is_last in (False, True):
            try:
                self._start(vocabulary, parser_limits)
                return self._exchange(line, self.limits.deadline + 10.0)
            except OSError as error:  # a time limit too
                self._end()
                if self._is_closed:
                    raise InvalidOperationError("grammars: expected open trials, got closed ones") from None
                if is_last:
                    raise RuntimeError(f"grammars: expected a process that tries them, got {error!r}") from None
            except BaseException:  # an interrupt: the next trial would read the answer of this one
                self._end()
                raise
        raise AssertionError

    def _start(self, vocabulary: TrialVocabulary, parser_limits: Mapping[str, Any]) -> None:
        if self._is_closed:
            raise OSError("closed")
        if self._process is not None:
            return
        written = vocabulary.written.encode()
        start = {
            "path": [each or os.getcwd() for each in sys.path], "nice": self._nice, "bytes": len(written),
            "vocab_size": vocabulary.vocab_size, "end_tokens": list(vocabulary.end_tokens),
            "limits": dict(parser_limits),
        }
        ours, theirs = socket.socketpair()
        with theirs:
            self._channel, self._unread = ours, b""
            self._process = subprocess.Popen(  # without the paths that variables and the folder of the script add
                [sys.executable, "-I", str(_SCRIPT)], stdin=theirs.fileno(), stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, env={**os.environ, **_ONE_THREAD},
            )
        if self._is_closed:  # by a thread that has not seen the process
            raise OSError("closed")
        answer = self._exchange(json.dumps(start).encode() + b"\n" + written, _STARTING)
        if answer["fault"] is not None:
            raise OSError(answer["fault"])

    def _exchange(self, data: bytes, seconds: float) -> dict[str, Any]:
        """Send a message; the answer. OSError: there is none in time."""
        assert self._channel is not None
        self._channel.settimeout(seconds)
        self._channel.sendall(data)
        while b"\n" not in self._unread:
            if not (piece := self._channel.recv(1 << 16)):
                raise ConnectionResetError("the process has died")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            _kill(self._process)
            self._process.wait()
        self._process = self._channel = None

    def close(self) -> None:
        """End the process, and the trial that runs."""
        self._is_closed, process = True, self._process
        if process is not None:
            _kill(process)  # whoever waits for its answer reads the end
        with self._lock:
            self._end()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and its forks, which are of its group, and outlive it if another one has killed it."""
    if process.returncode is None:  # its id is its own until it is waited for
        with suppress(OSError):  # it has no group yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
