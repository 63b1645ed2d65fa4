"""The parts of the kernel bench: its ceilings are correct, and its verdicts agree with the numbers."""

import numpy as np
import pytest

pytest.importorskip("bench.support.common")

from bench.kernels.latent_forms import Forms
from bench.support import ceilings
from bench.support.checkpoints import SIZES, write_checkpoint, write_gguf
from bench.support.common import Candidate, Case, Result, at_most, run_case, share_of
from bench.support.rates import Columns, rate_rows
from bench.support.scattered import Scattered, Shape, queries_of, relative_error
from kvcache.engine import InferenceEngine

pytestmark = pytest.mark.one_build


def test_a_plain_read_reads_every_byte_of_the_blocks_and_no_other():
    if ceilings.kind().startswith("ceilings by NumPy"):
        pytest.skip("no C compiler")
    buffer = np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8)
    order = np.array([3, 0, 5])
    reader = ceilings.BlockReader(buffer, order, 8192, 1, 1)
    words = buffer.reshape(-1, 8192)[order].view(np.uint64)
    assert reader.run() == np.bitwise_xor.reduce(words, axis=None)
    assert reader.nbytes == 3 * 8192


def test_the_peak_counts_what_it_multiplies():
    run, flop = ceilings.fma(1)
    _, twice = ceilings.fma(2)
    run()
    assert flop > 0
    assert twice in (flop, 2 * flop)


def test_scattered_blocks_are_a_permutation_that_attention_reads_right():
    shape = Shape(100, batch=2, head_dim=32, query_heads=4, kv_heads=2)
    scattered = Scattered(shape, "f32")
    assert sorted(scattered.order) == list(range(len(scattered.order)))
    assert list(scattered.order) != sorted(scattered.order)
    queries = queries_of(shape, 2)
    out = np.empty_like(queries)
    scattered.attend(queries, out)
    assert relative_error(scattered, queries, out) < 1e-5
    scattered.cache.check()


def test_both_forms_of_latent_attention_give_the_same():
    forms = Forms(70, 5, "f32", "f32")
    right = forms.absorbed()
    assert np.abs(right).max() > 0.1
    for other in (forms.kept(), forms.made()):
        np.testing.assert_allclose(other, right, atol=1e-4)


def test_verdicts_and_ratios_are_those_of_the_rounds():
    times = {"ours": [1.0, 2.0, 1.0], "ceiling": [0.9, 1.0, 0.9]}
    claims = (share_of(0.85, "ours", "ceiling"), at_most(1.0, "ours", "ceiling"))
    times["further"] = [0.3, 0.3, 0.3]
    facts = {name: {"work": 2e9} for name in times}
    result = Result("case", times, claims, facts)
    header, rows = rate_rows(Columns(("ours",), lambda subject: ("further", "ceiling")), [result])
    first = dict(zip(header, rows[0], strict=True))
    assert (first["GB/s"], first["ceiling"], first["of ceiling"], first["in this run"]) == ("2", "2.22", "90%", "met")
    assert rows[1][-1] == "MISSED"
    assert "error" not in header


def test_a_candidate_may_report_its_own_time():
    case = Case("case", lambda: [Candidate("fixed", seconds=2.0), Candidate("own", seconds=lambda: 3.0)])
    assert run_case(case, 2).times == {"fixed": [2.0, 2.0], "own": [3.0, 3.0]}


def test_random_checkpoints_load_and_the_gguf_file_holds_the_same_weights(tmp_path):
    size = SIZES["tiny"]
    engine = InferenceEngine.from_pretrained(write_checkpoint(size, tmp_path))
    assert engine.config.vocab_size == size.vocabulary
    assert np.isfinite(engine.prefill_from_pos([3, 4, 5], 0)).all()
    data = write_gguf(size, tmp_path / "model.gguf").read_bytes()
    assert data[:4] == b"GGUF"
    head = engine.model.weights.head.to_float32()
    assert data[-head.nbytes :] == head.tobytes()
