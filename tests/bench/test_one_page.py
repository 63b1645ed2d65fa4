"""`python -m bench all`: the page of several benches, and two pages beside each other."""

import json

import pytest

from bench.__main__ import main
from bench.support.one_page import Run, beside, figures, page_of

pytestmark = pytest.mark.one_build


def test_a_page_of_benches(tmp_path, capsys):
    assert main(["all", "--quick", "--only", "saved", "tiles", "--page", str(tmp_path / "here")]) == 0
    page = (tmp_path / "here" / "page.md").read_text()
    assert "| saved | all bounds met |" in page
    assert "| tiles | did not run" in page or "| tiles | all bounds met" in page
    assert "## saved" in page
    assert set(json.loads((tmp_path / "here" / "saved.json").read_text())) == {"environment", "formats"}
    runs = [Run("saved", "machine\n\n### a table\n\n| a |", 0, 1.0)]
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "saved.json").write_text((tmp_path / "here" / "saved.json").read_text())
    beside_it = page_of(runs, tmp_path / "here", tmp_path / "there")
    assert "### a table" in beside_it
    assert beside_it.count(" | 1.00 |") >= 20


def test_a_bench_that_fails_is_on_the_page():
    runs = [Run("a", "machine\n\n### t\n\n| x |", 1, 2.0), Run("b", "ImportError: no torch", 1, 0.1)]
    runs.append(Run("c", "", -9, 0.2))
    assert [run.verdict for run in runs] == [
        "some bounds missed", "did not run: ImportError: no torch", "did not run: it printed nothing",
    ]


def test_figures_have_names():
    table = {"title": "t", "met": True, "cases": [{"what": "x", "seconds": {"ours": 2.5}}]}
    measured = {"a": [1, 5, 3], "tables": [table]}
    assert dict(figures(measured)) == {"a": 3.0, "tables / t / cases / x / seconds / ours": 2.5}
    rows = beside({"a": 1.0, "b": 1, "environment": {"load": 1}}, {"a": 4.0, "c": 2, "environment": {"load": 2}})
    assert rows.splitlines()[2:] == ["| a | 1 | 4 | 0.25 |"]


def test_wrong_arguments(tmp_path):
    with pytest.raises(SystemExit, match=r"--only: expected some of .*, got nothing"):
        main(["all", "--only", "nothing", "--page", str(tmp_path)])
    with pytest.raises(SystemExit, match="--beside: expected a folder of an earlier page"):
        main(["all", "--only", "saved", "--page", str(tmp_path / "page"), "--beside", str(tmp_path)])
