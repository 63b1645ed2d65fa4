"""`python -m kvcache generate`: the text, where it stops; errors print one line and return 2."""

import json
import shutil

import pytest
from chat_folders import chat_folder
from gguf_files import ARRAY, STRING, convert
from places import GOLDEN

from kvcache.__main__ import main
from kvcache.demo import DIRECTORY

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


def test_errors_are_one_line(capsys, tmp_path):
    assert "config.json" in one_line(capsys, main(["generate", "--model", str(tmp_path), "--prompt", "x"]))
    bare = ["generate", "--model", str(GOLDEN / "llama"), "--prompt", "x"]
    assert "expected a tokenizer" in one_line(capsys, main(bare))
    demo = ["generate", "--model", str(DIRECTORY), "--prompt", "x"]
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
    config = json.loads((tmp_path / "odd" / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    assert "GPT2LMHeadModel" in one_line(capsys, main(["generate", "--model", str(tmp_path / "odd"), "--prompt", "x"]))
