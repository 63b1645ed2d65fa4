"""The parts of `bench weights-quality`: divergences and their errors, the demo's GGUF file, the table of types."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

pytest.importorskip("bench.support.common")
pytest.importorskip("tokenizers")

from bench.__main__ import main
from bench.quality import gguf_types
from bench.quality.divergence import compare, paired
from bench.quality.weights import demo_gguf
from kvcache import InferenceEngine
from kvcache.demo import DIRECTORY
from kvcache.engine import Transformer

pytestmark = pytest.mark.one_build


def test_divergences_are_those_of_the_distributions():
    """Two tokens: the reference gives both 1/2; another gives 1/4 and 3/4 in the first window, then the same."""
    windows = [np.array([0, 1, 1], np.uint32), np.array([1, 0, 0], np.uint32)]

    def reference(window):
        return np.zeros((2, 2), np.float32)

    def other(window):
        return np.log(np.array([[1.0, 3.0]] * 2 if window[0] == 0 else [[1.0, 1.0]] * 2, np.float32))

    found = compare(reference, {"itself": reference, "other": other}, windows)
    same, more = found["itself"].figures(), found["other"].figures()
    assert same["kl"] == same["kl_se"] == same["rise"] == same["rise_se"] == 0
    assert same["perplexity"] == pytest.approx(2)
    first = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)  # KL(1/2, 1/2 || 1/4, 3/4)
    assert more["kl"] == pytest.approx(first / 2)
    assert more["kl_se"] == pytest.approx(first / 2)  # of the means `first` and 0
    assert more["perplexity"] == pytest.approx(2 * math.sqrt(2 / 3))  # its tokens are the likelier ones
    assert more["rise"] == pytest.approx(math.sqrt(2 / 3) - 1)
    assert (same["same"], more["same"], more["tokens"]) == (1, 0.5, 4)
    assert paired(found["other"], found["itself"]) == pytest.approx((first / 2, first / 2))


def test_the_file_of_the_demo_is_the_demo(tmp_path):
    model = Transformer.from_gguf(demo_gguf(tmp_path / "demo.gguf"))
    tokens = np.arange(40) * 71 % 4096
    theirs = InferenceEngine.from_pretrained(DIRECTORY, weights="f32").score(tokens)
    np.testing.assert_array_equal(InferenceEngine(model).score(tokens), theirs)


@pytest.fixture(scope="module")
def types():
    pytest.importorskip("gguf")
    return gguf_types.measure()


def test_types_that_are_kept_have_no_error(types):
    figures = types
    assert list(figures) == list(gguf_types.TYPES)
    for f in figures.values():
        for error in (f["any"], f["any"] if f["normal"] is None else f["normal"]):
            assert error == 0
        assert f["kept_bits"] >= f["bits"] - 0.01
    table = {row[0]: row for row in gguf_types.rows(figures)}
    assert table["Q4_0"][2:6] == ["q4_0", "4.5", "none", "none"]


def test_the_command_line(capsys, tmp_path, monkeypatch, types):
    monkeypatch.setattr(gguf_types, "measure", lambda: types)
    found = tmp_path / "found.json"
    assert main(["weights-quality", "--quick", "--only", "demo", "--only", "types", "--json", str(found)]) == 0
    out = capsys.readouterr().out
    assert "q4, exact" in out
    assert "Tensor types of GGUF files" in out
    assert "q8, exact: KL" in out
    figures = json.loads(found.read_text())["demo"]["figures"]
    assert figures["f32"]["kl"] == figures["bf16"]["kl"] == 0  # the demo's weights are bf16
    assert 0 < figures["q8, exact"]["kl"] < figures["q8, int8"]["kl"] < figures["q4, int8"]["kl"]
