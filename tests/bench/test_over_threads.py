"""Tables and pictures over the number of threads, of benches that take `--threads 1,2,4`."""

import argparse

import pytest

pytest.importorskip("bench.support.common")

from bench.engine.weights import add_arguments
from bench.serving.serve import add_arguments as add_serving
from bench.support.ceilings import _loaded
from bench.support.common import Result, Table
from bench.support.over_threads import plot_over_threads, print_over_threads

pytestmark = pytest.mark.one_build

READ, PEAK = {"work": 1e9}, {"flop": 4e9}


def tables():
    """Products on 1, 2 and 4 threads: 80, 50 and 40 ms; the plain read on 1 and 4; a table of one number alone."""
    for number, ours, read in ((1, 0.08, 0.04), (2, 0.05, None), (4, 0.04, 0.02)):
        result = Result("1 row", {"q8_0": [ours, ours, 9.0]}, facts={"q8_0": READ | PEAK})
        if read:
            result.times["plain read"], result.facts["plain read"] = [read], READ
        yield Table(f"9a. Products, {number} thr", ()), [result]
    yield Table("Prefill of 512 tokens", ()), [Result("dim 128, 2 thr", {"f16": [1.0]})]


def test_times_and_rates_over_threads(capsys):
    print_over_threads(tables(), as_markdown=True)
    lines = capsys.readouterr().out.split("\n")
    assert [line for line in lines if "Over threads" in line] == ["### Over threads: 9a. Products, 1 row"]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    rows = {name: others for name, *others in cells}
    assert rows[""] == ["1 thr", "2 thr", "4 thr"]
    assert rows["q8_0"] == [
        "80 ms 12.5 GB/s 50 GFLOP/s", "50 ms 20 GB/s 80 GFLOP/s", "40 ms 25 GB/s 100 GFLOP/s"
    ]
    assert rows["plain read"] == ["40 ms 25 GB/s", "", "20 ms 50 GB/s"]


def test_tokens(capsys):
    found = {n: Result("cold", {"a": [2.0 / n]}, facts={"a": {"tokens/s": 40.0 * n}}) for n in (1, 2)}
    done = [(Table(f"Decode, {n} thr", ()), [result]) for n, result in found.items()]
    print_over_threads(done, as_markdown=False)
    assert "40 tokens/s" in (printed := capsys.readouterr().out)
    assert "1 s 80 tokens/s" in printed


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    (path,) = plot_over_threads(tables(), str(tmp_path))
    assert path.name == "1-row-over-threads-9a-products.png"
    assert path.stat().st_size > 5000


@pytest.mark.parametrize("add", [add_arguments, add_serving])
def test_numbers_of_threads(add):
    parser = argparse.ArgumentParser()
    add(parser)
    assert parser.parse_args(["--threads", "1,2,16"]).threads == [1, 2, 16]
    for wrong in ("0", "1,", "1,-2", "many"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--threads", wrong])


@pytest.mark.parametrize("before", [None, "7"])
def test_ceilings_do_not_spin(monkeypatch, before):
    """OpenMP reads the variable when the library is loaded; rivals that are loaded later read what it was."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if before:
        monkeypatch.setenv("GOMP_SPINCOUNT", before)
    import os

    seen = []
    monkeypatch.setattr("bench.support.ceilings.ctypes.CDLL", lambda _: seen.append(os.environ["GOMP_SPINCOUNT"]))
    _loaded("nothing.so")
    assert seen == ["0"]
    assert os.environ.get("GOMP_SPINCOUNT") == before
