"""`kvcache embed`: the vectors of an engine in both forms; errors print one line, return 2 and leave the file."""

import io
import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from posix_modules import needs_posix
from vector_folders import vector_folder

from kvcache import InferenceEngine
from kvcache.__main__ import main

pytestmark = pytest.mark.one_build
LINES = ["A cache of keys.", "", "Köln", "the last line has no end"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return vector_folder(tmp_path_factory.mktemp("vectors"), "mean")


def test_lines_become_rows(folder, tmp_path, capsys, monkeypatch):
    engine, texts, output = InferenceEngine.from_pretrained(folder), tmp_path / "lines.txt", tmp_path / "vectors.npy"
    texts.write_bytes("\r\n".join(LINES).encode())
    command = ["embed", "--model", str(folder), "-f", str(texts)]
    assert main([*command, "-o", str(output)]) == 0
    assert np.load(output).tobytes() == engine.embed(LINES).tobytes()
    assert main([*command, "-o", str(tmp_path / "x.jsonl"), "--dimensions", "8", "--prompt-name", "query"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert np.array(rows, np.float32).tobytes() == engine.embed(LINES, dimensions=8, prompt_name="query").tobytes()
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join([*LINES, ""]).encode())))
    assert main(["embed", "--model", str(folder), "--pooling", "last", "--no-normalise"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert np.array(rows, np.float32).tobytes() == engine.embed(LINES, "last", normalise=False).tobytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lines.txt", "vectors.npy", "x.jsonl"]


@pytest.mark.parametrize(("text", "options", "error"), [
    ("x".encode("utf-16"), [], "--file: expected UTF-8"),
    (("\u1234" * 600).encode(), [], "texts.0: expected at most 512 tokens"),
    (b"x", ["--dimensions", "99"], "--dimensions: expected"),
    (b"x", ["--pooling", "cls"], "--pooling: expected last or mean"),
    (b"x", ["--prompt-name", "other"], "--prompt-name: expected one of document, query"),
])
def test_errors_print_one_line_and_leave_the_file(folder, tmp_path, capsys, text, options, error):
    texts, output = tmp_path / "lines.txt", tmp_path / "vectors.npy"
    texts.write_bytes(text)
    output.write_bytes(b"old")
    code = main(["embed", "--model", str(folder), "-f", str(texts), "-o", str(output), *options])
    found = capsys.readouterr().err
    assert code == 2
    assert error in found.splitlines()[-1]
    assert output.read_bytes() == b"old"
    assert len([*tmp_path.iterdir()]) == 2


@needs_posix
def test_outputs_are_checked_first_and_devices_and_links_stay(folder, tmp_path, capsys):
    texts, device, link = tmp_path / "lines.txt", tmp_path / "device", tmp_path / "link.npy"
    texts.write_text("x")
    command = ["embed", "--model", str(folder), "-f", str(texts), "-o"]
    for output in (tmp_path / "missing" / "x.npy", tmp_path, tmp_path / ("x" * 300), texts / "x"):
        assert main([*command, str(output), "--prompt-name", "other"]) == 2
        assert "--output: expected a file in a folder that exists" in capsys.readouterr().err
    assert main([*command, "a\0b", "--prompt-name", "other"]) == 2
    assert "--output: expected the name of a file" in capsys.readouterr().err
    os.mkfifo(device)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(device.read_text)
        assert main([*command, str(device)]) == 0
        assert len(json.loads(read.result())) == 32
    assert device.is_fifo()
    link.symlink_to(tmp_path / "vectors.npy")
    assert main([*command, str(link)]) == 0
    assert link.is_symlink()
    assert np.load(tmp_path / "vectors.npy").shape == (1, 32)


@needs_posix
def test_a_replaced_file_keeps_who_may_read_it_however_long_its_name_is(folder, tmp_path):
    texts, output = tmp_path / "lines.txt", tmp_path / ("x" * 251 + ".npy")
    texts.write_text("x")
    for mode in (0o600, 0o644):
        output.write_bytes(b"old")
        output.chmod(mode)
        assert main(["embed", "--model", str(folder), "-f", str(texts), "-o", str(output)]) == 0
        assert (np.load(output).shape, output.stat().st_mode & 0o777) == ((1, 32), mode)
    assert len([*tmp_path.iterdir()]) == 2


def test_closed_inputs_and_outputs_are_refused_by_name(folder, tmp_path, capsys, monkeypatch):
    command = ["embed", "--model", str(folder)]
    for stream, option in (("stdin", "--file"), ("stdout", "--output")):
        with monkeypatch.context() as changed:
            changed.setattr(f"sys.{stream}", None)
            assert main(command) == 2
        assert f"{option}: expected a standard {stream[3:]}put, got a closed one" in capsys.readouterr().err


def test_texts_that_are_too_long_are_cut_where_asked(folder, tmp_path):
    texts, output = tmp_path / "lines.txt", tmp_path / "vectors.npy"
    texts.write_text("\u1234" * 600, encoding="utf-8")
    assert main(["embed", "--model", str(folder), "-f", str(texts), "-o", str(output), "--truncate"]) == 0
    assert np.load(output).shape == (1, 32)
