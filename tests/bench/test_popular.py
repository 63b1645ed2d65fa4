"""Networks that people run, and the rivals of benches, without their packages."""

import json
import os
import sys
import time
from itertools import pairwise
from math import prod, sqrt
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("bench.support.common")

from bench.engine import engine_rivals, mistral_rs, popular, shapes, smollm2, turns, weight_rivals
from bench.engine.mistral_rs import MistralRs, letters_of
from bench.engine.popular import (
    COLUMNS,
    FAR,
    NEAR,
    PROMPT,
    TURN,
    Measurement,
    Ours,
    Plan,
    measure_popular,
    repeats,
    rows_of,
    verdicts_of,
)
from bench.engine.shapes import POPULAR, values_of
from bench.engine.vllm_cpu import VllmFour, VllmHalf
from bench.engine.weight_rivals import IkLlama
from bench.serving import engines, llamacpp
from bench.serving.measured import Measured
from bench.serving.serve import run, shared
from bench.support import limits, packed_files
from bench.support.checkpoints import vocabulary_of
from bench.support.common import Case
from bench.support.limits import values_within
from bench.support.packed_files import write_packed
from bench.support.tables import measured
from kvcache.engine import InferenceEngine
from kvcache.gguf import GgufFile
from kvcache.networks.config import ModelConfig
from kvcache.networks.gguf_config import network_of

pytestmark = pytest.mark.one_build

SMALL = {
    "llama-1b": shapes._llama(2, 512, 64, 4, 2, 96), "qwen3-4b": shapes._qwen3(2, 512, 64, 4, 2, 32, 96),
    "qwen35-4b": shapes._qwen35(64, 4, 2, 1, 128, 1, 96, 2, 512),
    "gemma4-e4b": shapes._gemma4(12, 512, 6, 64, 2, 1, 96, 32, 8),
    "qwen3-30b-a3b": shapes._experts(64, 2, 4, 2, 32, 6, 2, 32, 512),
}
PLAN = Plan(prompt=8, near=8, far=32, turn=16, rounds=1)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    return {name: shape.write(folder / f"{name}.gguf") for name, shape in SMALL.items()}


def test_the_sizes_are_those_of_the_published_networks():
    """By the parameters that the makers of four of them count, and by the bytes of embeddings of Gemma 4 E4B."""
    counts = {name: sum(prod(size) for _, size in each.shape().tensors()) for name, each in POPULAR.items()}
    assert counts["llama-1b"] == 1_235_814_400
    assert counts["qwen3-4b"] == 4_022_468_096
    assert counts["qwen3-30b-a3b"] == 30_532_122_624
    assert 4.1e9 < counts["qwen35-4b"] < 4.3e9
    assert 7.4e9 < counts["gemma4-e4b"] < 8.1e9
    assert list(SMALL) == list(POPULAR)


def test_fewer_layers_are_named():
    whole, part = POPULAR["qwen3-30b-a3b"].shape(), POPULAR["qwen3-30b-a3b"].shape(12, 4096)
    assert whole.what == "Qwen3-30B-A3B"
    assert part.what == "Qwen3-30B-A3B, 12 of 48 layers, a vocabulary of 4,096"
    assert (part.metadata["qwen3moe.block_count"], part.vocabulary) == (12, 4096)


def test_every_shape_is_a_network(files):
    tokens = np.arange(3, 27, dtype=np.uint32)
    for name, path in files.items():
        logits = InferenceEngine.from_gguf(path, dtype="q8", num_blocks=8).prefill_from_pos(tokens, 0)
        assert np.isfinite(logits).all(), name
        assert logits.std() > 0.01, name
    assert [name for name, path in files.items() if repeats(path)] == ["llama-1b", "qwen3-4b", "qwen3-30b-a3b"]


def test_packed_files_have_rows_of_a_few(tmp_path, monkeypatch):
    """With the types that llama.cpp would choose, here float16; the engine reads what was drawn."""
    shape = SMALL["qwen3-4b"]
    types = {name: "F32" if len(size) == 1 else "F16" for name, size in shape.tensors()}
    monkeypatch.setattr(packed_files, "types_of", lambda *_: types)
    path = write_packed(tmp_path / "a" / "x.gguf", shape.entries(1), shape.tensors, values_of, 1)
    assert [each.name for each in path.parent.iterdir()] == ["x.gguf"]
    file = GgufFile(path)
    assert {name: info.shape for name, info in file.items()} == dict(shape.tensors())
    rows = np.empty(SMALL["qwen3-4b"].vocabulary * 64, np.float16)
    file.read([rows], "token_embd.weight")
    rows = rows.reshape(-1, 64)
    assert 128 < len(np.unique(rows, axis=0)) <= packed_files.ROWS
    assert rows.std() == pytest.approx(64**-0.5, rel=0.05)
    logits = InferenceEngine.from_gguf(path, num_blocks=8).prefill_from_pos(np.arange(3, 27, dtype=np.uint32), 0)
    assert np.isfinite(logits).all()


def test_a_measurement_of_our_engine(files):
    for name in ("qwen3-4b", "qwen35-4b"):
        found = dict(Measurement("kvcache", files[name], 512, 1, PLAN).run(COLUMNS, {}))
        assert set(found) == {PROMPT, NEAR, FAR, TURN}
        assert all(len(times) == PLAN.rounds and min(times) > 0 for times in found.values())
    hurried, seen = Measurement("kvcache", files["qwen35-4b"], 512, 1, PLAN._replace(patience=0.0)), []
    with pytest.raises(TimeoutError, match="32 tokens take more than 0 s"):
        seen += (column for column, _ in hurried.run([FAR, PROMPT], {}))
    assert set(dict(hurried.run([TURN, NEAR], {}))) == {NEAR, TURN}


def test_k_and_v_written_again_are_those_of_the_text(files):
    ours = Ours(files["qwen3-4b"], 1, 64)
    ours.start(np.arange(3, 19, dtype=np.uint32))
    engine = ours.engine
    keys, values = engine.cache.read(1, engine.seq_id)
    ours.repeat(2)
    assert engine.num_tokens == 48
    for part in range(3):
        again = engine.cache.read(1, engine.seq_id, 16 * part, 16 * part + 16)
        np.testing.assert_array_equal(again[0], keys)
        np.testing.assert_array_equal(again[1], values)
    ours.extend(np.array([5], np.uint32))
    assert engine.num_tokens == 49


def test_an_engine_that_gives_no_times(tmp_path, capsys):
    """One that is not there, or does not read the file, and one that takes too long."""
    measured, path = Measured(tmp_path / "found.json"), tmp_path / "none.gguf"
    path.write_bytes(b"")
    found, reasons = measure_popular(["kvcache"], path, 512, 1, PLAN, 60.0, measured)
    assert found == {"kvcache": {}}
    assert f"not measured: kvcache ({reasons['kvcache']})" in capsys.readouterr().out
    assert reasons["kvcache"].startswith("CheckpointError: ")
    found, reasons = measure_popular(["kvcache"], path, 512, 1, PLAN, 0.0, measured)
    assert (found, reasons) == ({"kvcache": {}}, {"kvcache": "it took more than 0 s"})
    assert rows_of(found, PLAN, reasons)[1] == [["kvcache", "it took more than 0 s", "", "", ""]]
    assert not (tmp_path / "found.json").exists()


def test_columns_before_a_failure_are_kept(files, tmp_path, monkeypatch, capsys):
    """A later run measures what is missing alone."""
    kept, path, one = tmp_path / "found.json", files["qwen35-4b"], ["kvcache"]
    hurried = PLAN._replace(patience=0.0)
    found, reasons = measure_popular(one, path, 512, 1, hurried, 60.0, Measured(kept))
    assert list(found["kvcache"]) == [PROMPT, NEAR, TURN]
    assert reasons == {"kvcache": "TimeoutError: 32 tokens take more than 0 s"}
    assert rows_of(found, PLAN, reasons)[1][0][3] == reasons["kvcache"]
    asked = []
    monkeypatch.setattr(
        limits, "values_within", lambda *arguments: asked.append(arguments[-2:]) or iter([(FAR, [1.0])])
    )
    again, reasons = measure_popular(one, path, 512, 1, PLAN, 60.0, Measured(kept))
    assert (again, reasons) == ({"kvcache": {**found["kvcache"], FAR: [1.0]}}, {})
    assert asked[0][0] == [FAR]
    assert measure_popular(one, path, 512, 1, PLAN, 60.0, Measured(kept)) == (again, {})
    assert len(asked) == 1


def test_what_work_gave_before_it_failed():
    """Work that ends, fails, takes too long, and ends its process."""
    assert list(values_within(60.0, range, 3)) == [0, 1, 2]
    roots = values_within(60.0, map, sqrt, (4.0, -1.0))
    assert next(roots) == 2.0
    with pytest.raises(RuntimeError, match="ValueError: math domain error"):
        next(roots)
    with pytest.raises(RuntimeError, match="it took more than 1 s"):
        list(values_within(1.0, map, time.sleep, (30.0,)))
    with pytest.raises(RuntimeError, match="its process ended with status 3"):
        list(values_within(60.0, map, os._exit, (3,)))


def test_rows_and_where_a_rival_leads():
    found = {
        "kvcache": {PROMPT: [2.0, 3.0, 4.0], NEAR: [0.02], FAR: [0.04]}, "a": {PROMPT: [1.0, 2.0, 9.0], NEAR: [0.03]},
        "b": {PROMPT: [8.0], NEAR: [0.025]}, "c": {},
    }
    header, rows = rows_of(found, Plan(), {"b": "why"})
    assert header == ["", "prompt of 512", "a token at 1,024", "a token at 16,384", "64 new tokens behind 2,000"]
    assert rows == [["kvcache", "3 s", "20 ms", "40 ms", ""], ["a", "2 s", "30 ms", "", ""],
                    ["b", "8 s", "25 ms", "why", ""], ["c", "", "", "", ""]]
    first, second = verdicts_of(found, Plan()).splitlines()
    assert first == "- a leads. prompt of 512: 3 s beside 2 s of a, 1.50 times its time"
    assert second == "- a token at 1,024: 20 ms beside 25 ms of b, 0.80 times its time"


def test_a_letter_is_a_token():
    """Texts share letters as far as they share tokens; a space is a token too."""
    tokens = np.random.default_rng(0).integers(3, 500, 300).astype(np.uint32)
    text = letters_of(tokens)
    assert len(text) == 300
    assert text.startswith(letters_of(tokens[:77]))
    vocabulary = vocabulary_of(512)
    assert {"\u0120" if letter == " " else letter for letter in text} <= set(vocabulary["tokenizer.ggml.tokens"])
    assert not set(text) & set(" ".join(vocabulary["tokenizer.ggml.merges"]).replace(" ", ""))
    assert all(a + b != "  " for a, b in pairwise(text))


class Cells:
    """llama.cpp's cells, `[position, token, sequences]`; the likeliest token is the double of the last one."""

    def __init__(self, path, threads, cells, sequences):
        self.cells, self.rows, self.ran, self.sequences = [], [], 0, range(sequences)

    def of(self, sequence):
        return sorted(cell[:2] for cell in self.cells if sequence in cell[2])

    def put(self, row, token, pos, sequence, *, due):
        assert (row, sequence in self.sequences) == (len(self.rows), True)
        self.rows.append((token, pos, sequence, due))

    def run(self, rows):
        assert rows == len(self.rows) <= 512
        for token, pos, sequence, _ in self.rows:
            assert pos == len(self.of(sequence))
            self.cells.append([pos, token, {sequence}])
        self.last, self.rows, self.ran = self.rows, [], self.ran + rows
        return 0

    def logits(self, row):
        token, _, _, due = self.last[row]
        assert due
        return np.eye(1, 8192, 2 * token % 8191)[0]

    def forget(self, sequence, start=-1):
        for cell in self.cells:
            if cell[0] >= start:
                cell[2].discard(sequence)

    def clear(self):
        self.cells = []

    def copy(self, source, target, count=-1):
        for cell in self.cells:
            if source in cell[2] and (count < 0 or cell[0] < count):
                cell[2].add(target)

    def move(self, sequence, by):
        for cell in self.cells:
            if sequence in cell[2]:
                assert cell[2] == {sequence}, "the positions of another sequence"
                cell[0] += by

    def duplicate(self, source, target):
        self.cells += [[pos, token, {target}] for pos, token, of in self.cells if source in of]

    def close(self):
        self.cells = None


def test_a_text_in_llama_cpp_that_is_repeated(monkeypatch):
    monkeypatch.setattr(popular.LlamaText, "api", Cells)
    text = popular.LlamaText(None, 1, 4096)
    for _ in range(2):
        text.start(np.arange(700, dtype=np.uint32))
        text.repeat(3)
        cells = text._api
        assert cells.of(0) == [[pos, pos % 700] for pos in range(2800)]
        assert cells.of(1) == cells.of(2) == []
        assert text.extend(np.array([1, 2, 3], np.uint32)) == 6
        text.cut(2801)
        assert text.extend(np.array([9], np.uint32)) == 18
        assert cells.of(0)[-2:] == [[2800, 1], [2801, 9]]


def test_slots_share_what_others_computed(monkeypatch):
    monkeypatch.setattr(llamacpp.IkLlamaCpp, "api", Cells)
    engine = llamacpp.IkLlamaCpp(SimpleNamespace(file=None), 4096, 512, 8, 1)
    workload = shared(np.random.default_rng(0), 4, (600, 20, 6))
    served = run(engine, workload)
    for turn, answer in zip(workload.roots, served.answers, strict=True):
        expected = [int(turn.tokens[-1])]
        for _ in range(6):
            expected.append(2 * expected[-1] % 8191)
        assert answer == expected[1:]
    assert served.prefilled == 600 + 4 * 20
    assert engine._api.ran == 600 + 4 * 20 + 4 * 5
    engine.close()


class Runner:
    """mistral.rs' runner: texts come in chunks, of which some are empty."""

    def __init__(self, which, max_seqs, jinja_explicit):
        self.prompts = []

    def send_chat_completion_request(self, request):
        self.prompts.append(request.messages[0]["content"])
        if "fail" in self.prompts[-1]:
            raise ValueError("failed")
        for i in range(request.max_tokens):
            yield SimpleNamespace(choices=[SimpleNamespace(delta=SimpleNamespace(content="" if i % 3 == 1 else "x"))])
        yield SimpleNamespace(choices=[])


@pytest.fixture
def mistral(monkeypatch):
    library = SimpleNamespace(
        Runner=Runner, Which=SimpleNamespace(GGUF=SimpleNamespace), ChatCompletionRequest=SimpleNamespace
    )
    monkeypatch.setitem(sys.modules, "mistralrs", library)
    for name in ("RAYON_NUM_THREADS", "RUST_LOG", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "")


def test_an_engine_of_texts(mistral, files):
    engine = engines.Mistral(SimpleNamespace(file=files["qwen3-4b"]), 4096, 512, 2, 1)
    workload = shared(np.random.default_rng(0), 3, (20, 4, 7))
    served = run(engine, workload)
    assert [len(answer) for answer in served.answers] == [7] * 3
    assert sorted(engine._engine._runner.prompts) == sorted(letters_of(turn.tokens) for turn in workload.roots)
    alone = MistralRs(files["qwen3-4b"], 2, as_letters=False)
    vocabulary = vocabulary_of(512)["tokenizer.ggml.tokens"]
    spelled = [vocabulary.index(letter) for letter in ("a", "\u0120", "ab", "\u00c3", "\u00a9", "\u00c3")]
    assert alone.text(np.array(spelled, np.uint32)) == "a ab\u00e9\ufffd"
    assert alone.first_token(np.array([5], np.uint32)) > 0
    assert alone.step(np.array([5], np.uint32), 6) > 0


class VllmEngine:
    """vLLM's engine: each step gives every request up to two tokens, of which a report has all so far."""

    def __init__(self, arguments):
        self.arguments, self.requests = arguments, {}
        self.config = json.loads(Path(arguments.model, "config.json").read_text())
        self.network = ModelConfig.from_dict(self.config)

    def add_request(self, key, prompt, settings):
        assert (settings.temperature, settings.ignore_eos) == (0.0, True)
        assert len(prompt["prompt_token_ids"]) + settings.max_tokens <= self.arguments.max_model_len
        self.requests[key] = [0, settings.max_tokens]

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        for key, (done, most) in list(self.requests.items()):
            self.requests[key][0] = done = min(done + 2, most)
            if done == most:
                del self.requests[key]
            yield SimpleNamespace(request_id=key, outputs=[SimpleNamespace(token_ids=[7] * done)])


def test_vllm_over_the_sizes_of_a_file(files, monkeypatch):
    """It reads a config.json of the same network, and its tokens are timed as they come."""
    made = SimpleNamespace(from_engine_args=VllmEngine)
    library = SimpleNamespace(EngineArgs=SimpleNamespace, LLMEngine=made, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", library)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    if not hasattr(os, "sched_getaffinity"):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
        monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)
    for path in files.values():
        engine = VllmHalf(path, 3, 100)
        read = engine._requests._engine
        assert read.network == network_of(GgufFile(path))
        assert read.config["architectures"] == [read.network.architecture]
        assert (read.arguments.load_format, read.arguments.max_model_len) == ("dummy", 100)
        assert len(list(engine.times(np.arange(90, dtype=np.uint32), 5))) == 5
        assert engine.step(np.arange(90, dtype=np.uint32), 4) >= 0
        assert engine.first_token(np.arange(99, dtype=np.uint32)) > 0
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-2"
    assert VllmFour(path, 3, 100)._requests._engine.config["quantization_config"]["bits"] == 4
    monkeypatch.setattr(engines.Network, "folder", path.parent)
    (path.parent / "config.json").write_text(json.dumps(read.config))
    many = engines.Vllm(engines.Network(path, "x", path.parent), 4096, 31, 2, 1)
    served = run(many, shared(np.random.default_rng(0), 3, (20, 4, 7)))
    assert served.answers == [[7] * 7] * 3
    many.close()


def test_an_engine_that_fails_ends_the_run(mistral, files, monkeypatch):
    monkeypatch.setattr(mistral_rs, "letters_of", lambda tokens: "fail")
    engine = engines.Mistral(SimpleNamespace(file=files["qwen3-4b"]), 4096, 512, 2, 1)
    with pytest.raises(ValueError, match="failed"):
        run(engine, shared(np.random.default_rng(0), 1, (20, 4, 7)))


def test_turns_of_rivals(mistral, files, monkeypatch, capsys):
    monkeypatch.setitem(popular.ENGINES, "llama.cpp", lambda path, threads, room: Ours(path, threads, room))
    path = files["qwen3-4b"]
    monkeypatch.setattr(turns, "VOCABULARY", 512)
    assert [len(times) for _, times in turns.rival("llama.cpp", path, 20, 2, 1)] == [2]
    mistral_turns = dict(turns.rival("mistral.rs", path, 20, 2, 1))
    assert list(mistral_turns) == ["mistral.rs, first turn", "mistral.rs, later turn"]


@pytest.mark.parametrize(("error", "said"), [
    (ImportError("no module"), "ImportError: no module"),
    (MemoryError(), "MemoryError"),  # it says nothing
    (RuntimeError("\n  thread panicked\nat 7"), "RuntimeError: thread panicked"),
])
def test_a_rival_that_fails_is_a_sentence(files, monkeypatch, capsys, error, said):
    def fails(*_):
        raise error

    def fails_in_a_process(*_):
        yield "first", [1.0]
        raise RuntimeError(said)

    monkeypatch.setattr(limits, "values_within", fails_in_a_process)
    assert turns.rival_within(60.0, "ik_llama.cpp", files["qwen3-4b"], 20, 2, 1) == {"first": [1.0]}
    weight_rivals.measure_each([("ik_llama.cpp", fails)], fails, {}, 1, 1)
    assert capsys.readouterr().out.splitlines() == [
        f"not measured: ik_llama.cpp ({said})", f"not measured: ik_llama.cpp ({said})",
    ]
    assert engine_rivals.availability([SimpleNamespace(name="ik_llama.cpp", version=fails)]) == [
        f"not measured: ik_llama.cpp ({said})"
    ]


def test_rivals_of_the_bench_of_smollm2(mistral, files, monkeypatch):
    """Each is measured in every table: by its clock, or with a text that is cut back."""
    monkeypatch.setattr(popular.IkLlamaText, "api", Cells)
    for name, size in {"PREFILL": 16, "CONTEXT": 24, "STEPS": 2, "CACHED": 20, "TAIL": 4}.items():
        monkeypatch.setattr(smollm2, name, size)
    for rival in (MistralRs, IkLlama):
        engine = rival(files["qwen3-4b"], 1)
        found = {
            what: measured(Case(what, lambda c=candidate: [c]), 1).times[rival.name]
            for what, candidate in smollm2.candidates(engine, rival.name, 500)
        }
        assert set(found) == set(smollm2.TITLES)
        assert all(len(times) == 1 and times[0] > 0 for times in found.values())
