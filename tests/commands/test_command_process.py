"""`kvcache` before its command begins: faults of the environment and interrupts are no tracebacks."""

import os
import subprocess
import sys

import pytest
from places import search_path
from posix_modules import needs_posix

from kvcache.support import command_process

pytestmark = pytest.mark.one_build


def run(*arguments, path="", **environment):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(path), search_path()]))} | environment
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False, timeout=300
    )


def test_nonsense_in_variables():
    done = run("-m", "kvcache", "--version", KVCACHE_NUM_THREADS="much")
    assert (done.returncode, done.stderr) == (2, "kvcache: KVCACHE_NUM_THREADS: expected 1 to 1024, got 'much'\n")
    done = run("-m", "kvcache", "--version", KVCACHE_SIMD="mmx")
    assert done.returncode == 2
    assert done.stderr.startswith("kvcache: KVCACHE_SIMD: expected")
    assert done.stderr.count("\n") == 1
    done = run("-c", "import kvcache", KVCACHE_NUM_THREADS="much")
    assert "Traceback" in done.stderr, "an import by others says where"


@needs_posix
def test_an_interrupt_of_the_imports(tmp_path):
    """It ends the process as a signal does, without a word."""
    (tmp_path / "numpy.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nsignal.pause()\n")
    restore = "import signal, runpy\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    (tmp_path / "sitecustomize.py").write_text(restore)  # a process in the background ignores it
    done = run("-m", "kvcache", "--version", path=tmp_path)
    assert (done.stdout, done.stderr) == ("", "")
    assert done.returncode in (130, -2)


@pytest.mark.parametrize(
    ("name", "arguments", "is_command"),
    [
        ("kvcache", ["/usr/bin/python", "/usr/bin/kvcache", "chat"], True),
        ("-m", ["python", "-X", "dev", "-m", "kvcache", "chat"], True),
        ("-m", ["python", "-mkvcache"], True),
        ("-m", ["python", "-m", "kvcache.demo.run"], False),
        ("-m", ["python", "-m", "pytest", "kvcache"], False),
        ("pytest", ["python", "-m", "kvcache"], False),
        ("", ["python"], False),
    ],
)
def test_which_processes_are_the_command(name, arguments, is_command):
    assert command_process._is_command(name, arguments) is is_command


def test_other_exceptions_are_shown_whole(capsys):
    command_process._print_line(AssertionError, AssertionError("a fault"), None)
    assert "AssertionError: a fault" in capsys.readouterr().err
