"""Trials: a grammar that takes too much is refused by the name of its limit, and takes nothing else with it."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvcache.errors import GrammarError, InvalidOperationError, OutOfMemoryError
from kvcache.grammar import compiler as compilers
from kvcache.grammar import json_schema, lark, regex, trial_process
from kvcache.grammar import trials as trial_processes
from kvcache.grammar.trials import TrialDeadlineError, TrialLimits, TrialResult, Trials

pytest.importorskip("llguidance")
pytest.importorskip("tokenizers")
from spelled_networks import END, spelling

from kvcache.grammar.compiler import GrammarCompiler

pytestmark = pytest.mark.one_build

TOKENIZER = spelling()
MULTIPLE = json_schema({"type": "integer", "multipleOf": 99_999_989})  # takes minutes, and gigabytes
CONJUNCTION = "start: A\nA: " + " & ".join(
    rf"/(.|\n)*{letter}(.|\n){{{10 + i}}}{letter}(.|\n)*/" for i, letter in enumerate("abcdefgh")
)
MIB = 1 << 20


def compiler():
    return GrammarCompiler(lambda: TOKENIZER, 256, [END])


@pytest.fixture(scope="module")
def trials():
    made = Trials(TrialLimits(seconds=0.3, memory=24 * MIB))
    yield made
    made.close()


def limited(trials, **limits):
    trials.limits = TrialLimits()._replace(**limits)
    return trials


@pytest.mark.parametrize(
    ("grammar", "limits", "message"),
    [
        (MULTIPLE, {"seconds": 60.0, "memory": 24 * MIB}, "at most 24 MiB"),
        (lark(CONJUNCTION), {"seconds": 0.1, "memory": 4096 * MIB}, "at most 0.1 s of CPU time"),
        (json_schema({"allOf": [{"type": "integer", "multipleOf": each} for each in (7, 11, 13, 17, 19, 23)]}),
         {"seconds": 0.1, "memory": 4096 * MIB}, "at most 0.1 s of CPU time"),
        (lark("start: R0\n" + "\n".join(f"R{i}: R{i + 1}" for i in range(990)) + '\nR990: "a"'),
         {"stack": MIB // 2, "memory": 4096 * MIB}, "fewer levels"),
    ],
)
def test_a_grammar_beyond_a_limit(trials, grammar, limits, message):
    """Once: the refusal is remembered, and the process lives."""
    made, limited_to = compiler(), limited(trials, **limits)
    trials.tried(written(made), "{}", {})
    before, pid = trials.count, trials.pid
    for _ in range(2):
        assert made.knows(grammar) == (trials.count > before)
        with pytest.raises(GrammarError, match=f"^grammar: expected one that takes {message} to compile"):
            made.compile(grammar, trials=limited_to)
    assert (trials.count, trials.pid) == (before + 1, pid)


def written(made):
    """The vocabulary of a compiler, as trials take it."""
    seen = []
    with pytest.raises(ZeroDivisionError):
        made.compile(regex("written"), trials=SimpleNamespace(tried=lambda *asked: seen.append(asked) or 1 // 0))
    return seen[0][0]


def test_a_grammar_that_takes_long_by_the_clock_alone_may_come_again(trials):
    made, before = compiler(), trials.count
    limited(trials, seconds=60.0, memory=4096 * MIB, deadline=0.05)
    for _ in range(2):
        with pytest.raises(TrialDeadlineError, match=r"at most 0\.05 s on a machine this busy"):
            made.compile(MULTIPLE, trials=trials)
    assert trials.count == before + 2


def test_grammars_that_pass_are_those_without_trials(trials):
    made, plain, before = compiler(), compiler(), limited(trials).count
    listed = json_schema({"type": "array", "items": {"enum": ["name", 12]}})
    for grammar in (listed, regex("(yes|no)+"), lark('start: s\ns: "a" s | "na"')):
        found, want = (each.fresh([END]) for each in (made.compile(grammar, trials=trials), plain.compile(grammar)))
        logits = np.zeros(256, np.float32)
        assert np.array_equal(found.masked(logits), want.masked(logits))
        assert made.compile(grammar, trials=trials) is made.compile(grammar)
    assert trials.count == before + 3
    with pytest.raises(GrammarError, match=r"grammar: expected a json_schema that can be compiled, got .*Invalid type"):
        made.compile(json_schema({"type": "wat"}), trials=trials)
    many = json_schema({"type": "object", "properties": {f"a{i}": {"type": "string"} for i in range(600)}})
    with pytest.raises(GrammarError, match=r"expected the next tokens within the limits of a step, got .*row has"):
        made.compile(many, trials=trials)
    with pytest.raises(GrammarError, match="grammar: expected a lark that can be compiled, got 'NoExtensionBias'"):
        made.compile(lark('start: s\ns: s "a"'), trials=trials)


def test_the_process_is_made_anew_where_it_has_died(trials):
    made = compiler()
    made.compile(regex("a"), trials=limited(trials))
    pid = trials.pid
    os.kill(pid, signal.SIGKILL)
    made.compile(regex("b"), trials=trials)
    assert trials.pid not in (None, pid)


def test_forks_of_a_process_that_was_killed_end(trials):
    """A fork is of its group, and ends when the next trial finds the process dead."""
    made = compiler()
    made.compile(regex("a"), trials=limited(trials))
    pid = trials.pid
    with subprocess.Popen(["sleep", "600"], preexec_fn=lambda: os.setpgid(0, pid)) as fork:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            made.compile(regex("b"), trials=trials)
            assert fork.wait(60) == -signal.SIGKILL
        finally:
            fork.kill()


def test_an_interrupt_leaves_no_answer_behind(trials):
    """The answer of the trial that it ended is not that of the next one."""
    made = compiler()
    made.compile(regex("a"), trials=limited(trials))
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            made.compile(MULTIPLE, trials=limited(trials, seconds=60.0, memory=4096 * MIB))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert trials.pid is None
    made.compile(regex("b"), trials=limited(trials))


def test_closed_trials_and_a_process_that_cannot_be_started(monkeypatch):
    trials, made = Trials(), compiler()
    monkeypatch.setattr(sys, "executable", "/nowhere")
    with pytest.raises(RuntimeError, match="grammars: expected a process that tries them, got FileNotFoundError"):
        made.compile(regex("a"), trials=trials)
    monkeypatch.undo()
    made.compile(regex("a"), trials=trials)
    assert trials.pid is not None
    trials.close()
    assert trials.pid is None
    with pytest.raises(InvalidOperationError, match="grammars: expected open trials, got closed ones"):
        made.compile(regex("b"), trials=trials)
    assert made.compile(regex("a"), trials=trials)


def test_the_process_ends_where_its_parent_has():
    vocabulary = written(compiler())
    ours, theirs = socket.socketpair()
    with theirs, ours:
        script = [sys.executable, "-I", trial_process.__file__]
        with subprocess.Popen(script, stdin=theirs.fileno(), stderr=subprocess.DEVNULL) as process:
            theirs.close()
            data = vocabulary.written.encode()
            start = {"path": sys.path, "nice": 0, "bytes": len(data), "limits": {}}
            start |= {"vocab_size": 256, "end_tokens": [END]}
            ours.sendall(json.dumps(start).encode() + b"\n" + data)
            assert json.loads(ours.makefile().readline()) == {"fault": None}
            ours.shutdown(socket.SHUT_RDWR)
            assert process.wait(60) == 0


def test_memory_where_the_system_has_no_limit_of_addresses(tmp_path, monkeypatch):
    """A thread watches it there; the file of Linux that says it is named otherwise in this copy of the script."""
    script = tmp_path / "script.py"
    script.write_text(Path(trial_process.__file__).read_text().replace("/proc/self/statm", "/proc/self/none"))
    monkeypatch.setattr(trial_processes, "_SCRIPT", script)
    trials, made = Trials(TrialLimits()._replace(seconds=60.0, memory=64 * MIB)), compiler()
    with pytest.raises(GrammarError, match="grammar: expected one that takes at most 64 MiB to compile"):
        made.compile(MULTIPLE, trials=trials)
    made.compile(regex("a"), trials=trials)
    assert trials.count == 2
    trials.close()


def test_grammars_that_texts_have_take_memory_together(monkeypatch):
    """The oldest ones that no text has leave first."""
    monkeypatch.setattr(compilers, "_MOST_HELD", 1000)
    made, trials = compiler(), SimpleNamespace(tried=lambda *asked: TrialResult(400, 0.0, None))
    first, second = (made.compile(regex(text), trials=trials) for text in "ab")
    texts = [first.fresh([END]), second.fresh([END])]
    del first, second
    with pytest.raises(OutOfMemoryError) as caught:
        made.compile(regex("c"), trials=trials)
    assert (caught.value.requested, caught.value.available) == (400, 200)
    texts.pop()
    third = made.compile(regex("c"), trials=trials)
    assert made.compile(regex("c"), trials=trials) is third


def follow(matcher, tokens):
    for token in tokens:
        assert np.isfinite(matcher.masked(np.zeros(256, np.float32)))[token]
        matcher.advance(token)


def test_a_lexer_at_its_limit_is_compiled_anew(monkeypatch):
    """Texts of a grammar share a lexer, whose states are bounded: where others have filled it, one has its own."""
    monkeypatch.setattr(compilers, "_LIMITS", {"max_lexer_states": 80, "verbose_errors": False})
    letter = TOKENIZER.token_to_id("x")
    for seconds, goes_on in ((0.0, True), (1.0, False)):
        trials = SimpleNamespace(tried=lambda *asked, seconds=seconds: TrialResult(0, seconds, None))
        made, grammar = compiler(), regex("[a-z]{1,200}")
        start = made.compile(grammar, trials=trials)
        other, drafted, matcher = (start.fresh([END]) for _ in range(3))
        for each in (other, drafted):
            follow(each, [letter] * 5)
        with pytest.raises(GrammarError, match="limits of a step, got lexer error: too many states"):
            follow(matcher, [letter] * 100)
        if goes_on:
            drafted.holds([letter] * 90)  # an error there shows at the next mask
            for each in (other, drafted):
                follow(each, [letter] * 20)
        again = made.compile(grammar, trials=trials)
        assert again is not start
        follow(again.fresh([END]), [letter])
        assert made.compile(grammar) is again
