"""`kvcache generate`: the text, where it stops; errors print one line and return 2."""

import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from chat_folders import chat_folder
from gguf_files import ARRAY, STRING, convert
from peft_folders import modules_of, write_adapter
from places import GOLDEN, search_path
from posix_modules import needs_posix

from kvcache import InferenceEngine
from kvcache.__main__ import main
from kvcache.demo import DIRECTORY
from kvcache.support.machine_memory import MachineMemory

pre_tokenizers = pytest.importorskip("tokenizers").pre_tokenizers
pytestmark = pytest.mark.one_build


def one_line(capsys, code):
    """The only line of an error."""
    assert code == 2
    error = capsys.readouterr().err
    assert error.startswith("kvcache: ")
    assert error.count("\n") == 1
    return error


def test_generate(capsys):
    options = ["--max-tokens", "5", "--temperature", "0"]
    code = main(["generate", "--model", str(DIRECTORY), "--prompt", "import ", *options])
    out = capsys.readouterr().out
    assert code == 0
    assert out.startswith("import ")
    assert len(out) > len("import \n")


def test_generate_with_an_adapter(capsys, tmp_path):
    adapter = str(write_adapter(tmp_path / "a", modules_of(DIRECTORY), lora_alpha=12))
    options = ["generate", "--model", str(DIRECTORY), "--prompt", "import ", "--max-tokens", "8", "--temperature", "0"]
    texts = []
    for more in ([], ["--adapter", adapter]):
        assert main([*options, *more]) == 0
        texts.append(capsys.readouterr().out)
    engine = InferenceEngine.from_pretrained(DIRECTORY, adapters={"x": adapter})
    assert texts == [
        f"import {engine.complete('import ', max_tokens=8, temperature=0.0, adapter=name).text}\n"
        for name in (None, "x")
    ]
    assert texts[0] != texts[1]
    error = one_line(capsys, main([*options, "--adapter", str(tmp_path / "none")]))
    assert error.startswith("kvcache: --adapter: expected a local checkpoint directory with adapter_config.json")
    write_adapter(tmp_path / "a", modules_of("llama"))
    error = one_line(capsys, main([*options, "--adapter", adapter]))
    assert "adapter_model.safetensors: model.layers." in error


def test_generate_with_a_gguf_file(capsys, tmp_path):
    """Its vocabulary: 255 of the characters that stand for bytes, and one merge."""
    characters = [*sorted(pre_tokenizers.ByteLevel.alphabet())[:-1], "im"]
    path = convert(
        GOLDEN / "llama",
        tmp_path / "x.gguf",
        tokenizer__ggml__model=(STRING, "gpt2"),
        tokenizer__ggml__tokens=(ARRAY, characters, STRING),
        tokenizer__ggml__merges=(ARRAY, ["i m"], STRING),
    )
    assert main(["generate", "--model", str(path), "--prompt", "import ", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("import ")


def test_generate_until_a_stop_string(capsys):
    command = ["generate", "--model", str(DIRECTORY), "--prompt", "import ", "--max-tokens", "12", "--temperature", "0"]
    main(command)
    whole = capsys.readouterr().out
    stop = whole[10:13]
    assert main([*command, "--stop", "never there", "--stop", stop]) == 0
    assert capsys.readouterr().out == "import " + whole[7 : whole.index(stop, 7)] + "\n"


def test_loading_is_shown_to_a_person(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    main(["generate", "--model", str(DIRECTORY), "--prompt", "import ", "--max-tokens", "1"])
    shown = capsys.readouterr().err
    assert shown.startswith(f"loading {DIRECTORY} ...")
    assert shown.endswith("\r\x1b[K")


def test_what_the_checkpoint_says_of_sampling(capsys, tmp_path):
    """Options come first, then the checkpoint."""
    command = ["generate", "--prompt", "import ", "--max-tokens", "12", "--model"]
    texts = []
    for name, generation, more in (
        ("greedy", {"do_sample": False}, []),
        ("hot", {"temperature": 5.0, "top_k": 0, "top_p": 1.0}, []),
        ("hot again", {"temperature": 5.0, "top_k": 0, "top_p": 1.0}, ["--top-k", "1"]),
        ("none", None, ["--temperature", "0"]),
    ):
        assert main([*command, str(chat_folder(tmp_path / name, generation=generation)), *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[2] == texts[3] != texts[1]


def test_a_prompt_of_a_file_and_of_the_standard_input(capsys, tmp_path, monkeypatch):
    """The line end behind a text is none of it."""
    command = ["generate", "--model", str(DIRECTORY), "--max-tokens", "5", "--temperature", "0"]
    main([*command, "--prompt", "import os\nimport"])
    want = capsys.readouterr().out
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbfimport os\nimport\n")
    assert main([*command, "-f", str(tmp_path / "x")]) == 0
    assert capsys.readouterr().out == want
    for option in ("--prompt", "-f"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"import os\nimport\n")))
        assert main([*command, option, "-"]) == 0
        assert capsys.readouterr().out == want
    monkeypatch.setattr("sys.stdin", None)
    assert "--prompt: expected a standard input" in one_line(capsys, main([*command, "--prompt", "-"]))
    (tmp_path / "x").write_bytes(b"\xff")
    assert "--prompt: expected UTF-8 in " in one_line(capsys, main([*command, "-f", str(tmp_path / "x")]))
    assert "nowhere" in one_line(capsys, main([*command, "-f", "nowhere"]))


def test_files_and_pipes_of_windows_have_utf8_and_the_line_ends_of_the_text(monkeypatch):
    """Where the code page has no such character and the C library writes other line ends."""
    output = io.BytesIO()
    with monkeypatch.context() as changed:
        changed.setattr("sys.platform", "win32")
        changed.setattr("sys.stdout", io.TextIOWrapper(output, encoding="cp1252", newline="\r\n"))
        assert main(["generate", "--model", str(DIRECTORY), "--prompt", "# \u2192\n", "--max-tokens", "1"]) == 0
        sys.stdout.flush()
        found = output.getvalue()
    assert found.startswith("# \u2192\n".encode())
    assert b"\r" not in found


@needs_posix
def test_nobody_reads_the_output():
    """No word about it, also at the end of the process."""
    command = f"{sys.executable} -m kvcache generate --model {DIRECTORY} --prompt import --max-tokens 400 "
    shell = f"({command}; echo $? >&2) | head -c 1"
    environment = os.environ | {"PYTHONPATH": search_path()}
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.stderr) == ("i", "141\n")


def test_a_calibration_is_told(capsys, tmp_path, monkeypatch):
    """How much it is, how long it takes, and where it is kept, without a terminal too; the second time nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "text").write_text("import os\nimport sys\n" * 200)
    command = ["generate", "--model", str(DIRECTORY), "--max-tokens", "1", "--prompt", "import ", "--dtype", "q4"]
    assert main([*command, "--calibrate", str(tmp_path / "text")]) == 0
    first, second = capsys.readouterr().err.splitlines()
    kept = re.fullmatch(r"calibrating: [\d,]+ tokens run through the network once; the result is kept in (.*)", first)
    assert os.path.exists(kept[1])
    assert re.fullmatch(r"calibrating: takes about \d+ s", second)
    assert main([*command, "--calibrate", str(tmp_path / "text")]) == 0
    assert capsys.readouterr().err == ""


def test_memory_is_told_in_mebibytes(capsys):
    command = ["generate", "--model", str(DIRECTORY), "--prompt", "x", "--max-tokens", "100"]
    size = (
        r"requested [\d.]+ MiB more of keys and values, of [\d.]+ MiB 0 MiB are left; a larger --context, .* gives "
        r"more: this machine has [\d.]+ [GM]iB, [\d.]+ [GM]iB of it available\n"
    )
    assert re.search(size, one_line(capsys, main([*command, "--num-blocks", "1"])))
    assert re.search(size, one_line(capsys, main([*command, "--context", "16"])))
    assert main([*command, "--max-memory", "64MiB", "--context", "200", "--threads", "1"]) == 0


def test_memory_that_the_machine_has_not_is_told_with_its_option(capsys, monkeypatch):
    """The line has the bytes that are needed, those of the machine, and options that need less."""
    command = ["generate", "--model", str(DIRECTORY), "--prompt", "x"]
    has = r", this machine has [\d.]+ GiB, [\d,.]+ [GM]iB of it available; "
    said = one_line(capsys, main([*command, "--num-blocks", str(1 << 30)]))
    assert re.search(rf"out of memory: requested [\d,]+\.\d\d GiB of keys and values{has}a smaller --context,", said)
    monkeypatch.setattr("kvcache.networks.weights.machine_memory", lambda: MachineMemory(1000, 1000))
    said = one_line(capsys, main(command))
    assert re.search(rf"out of memory: requested [\d.]+ MiB of weights{has}--weights q8 or q4", said)
    monkeypatch.undo()
    for share in ("101%", "%", "5 % 0"):
        assert "--max-memory: expected an int or a text such as" in one_line(
            capsys, main([*command, "--max-memory", share])
        )
    assert re.search(
        "--max-memory: expected at least [0-9.]+ MiB", one_line(capsys, main([*command, "--max-memory", "0%"]))
    )


def swapped(folder):
    """The folder of the demo's tokenizer, but for two tokens that have the ids of each other."""
    shutil.copytree(DIRECTORY, folder, ignore=shutil.ignore_patterns("*.py", "*.safetensors"))
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    vocab["#"], vocab["$"] = vocab["$"], vocab["#"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_options_reach_the_engine(monkeypatch, tmp_path):
    """Options that change an answer, or how fast it comes, are passed on."""
    made, real = [], InferenceEngine.from_pretrained

    def make(*arguments, **options):
        made.append(real(*arguments, **options))
        return made[0]

    monkeypatch.setattr("kvcache.commands.generate.InferenceEngine.from_pretrained", make)
    command = ["generate", "--model", str(DIRECTORY), "--prompt", "import ", "--max-tokens", "1"]
    assert main([*command, "--sparse-tokens", "48", "--activations", "exact", "--context", "64"]) == 0
    assert (made[0].sparse_tokens, made[0].model.activations, made[0].cache.total_blocks) == (48, "exact", 5)
    made.clear()
    assert main([*command, "--sparse-tokens", "48", "--spill", str(tmp_path), "--max-memory", "2MiB"]) == 0
    assert made[0].cache.spill.folder == str(tmp_path)
    assert made[0].cache.spill.max_memory_bytes < 2 << 20


def test_errors_are_one_line(capsys, tmp_path):
    assert "config.json" in one_line(capsys, main(["generate", "--model", str(tmp_path), "--prompt", "x"]))
    bare = ["generate", "--model", str(GOLDEN / "llama"), "--prompt", "x"]
    assert "expected a tokenizer" in one_line(capsys, main(bare))
    demo = ["generate", "--model", str(DIRECTORY), "--prompt", "x"]
    assert one_line(capsys, main(["generate", "--model", "nowhere", "--prompt", "x"])).startswith(
        "kvcache: --model: nowhere: expected a folder with config.json, or a GGUF file, got none"
    )
    lines = tmp_path / "lines"
    lines.write_text("x\n")
    for command in (["embed", "-f", str(lines)], ["verify"], ["chat"], ["serve"]):
        told = one_line(capsys, main([*command, "--model", "nowhere"]))
        assert told.startswith("kvcache: --model: nowhere: expected a folder with config.json"), command
    for command, name in (("chat", "chat-template"), ("serve", "chat-template"), ("generate", "file")):
        told = one_line(capsys, main([command, "--model", str(DIRECTORY), f"--{name}", "nowhere"]))
        assert re.match(rf"kvcache: --{name}: expected a .*, got .*nowhere", told), told
    for draft, message in (
        ("nowhere", "--draft: expected ngram, mtp, auto or a network; nowhere: expected a folder with config.json"),
        (str(swapped(tmp_path / "other")), "--draft: expected the tokens of the network, with '#' for id 3, got '$'"),
    ):
        assert message in one_line(capsys, main([*demo, "--draft", draft]))
    assert "temperature" in one_line(capsys, main([*demo, "--temperature", "-1"]))
    assert "prompt: expected Unicode text" in one_line(capsys, main([*demo[:-1], "\ud800"]))
    assert "q9" in one_line(capsys, main([*demo, "--dtype", "q9"]))
    assert "out of memory" in one_line(capsys, main([*demo, "--num-blocks", "1", "--max-tokens", "100"]))
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    named = one_line(capsys, main(["generate", "--model", str(tmp_path), "--prompt", "x"]))
    assert f"or a GGUF file such as {tmp_path / 'tiny.gguf'}, got none" in named
    lost = one_line(capsys, main([*demo, "--dtype", "q4", "--calibrate", "nowhere.txt"]))
    assert 'calibrate: expected "auto", or a file of text or of a calibration, got none at nowhere.txt' in lost
    shutil.copytree(GOLDEN / "llama", tmp_path / "odd")
    config = json.loads((tmp_path / "odd" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    assert "GPT2LMHeadModel" in one_line(capsys, main(["generate", "--model", str(tmp_path / "odd"), "--prompt", "x"]))
