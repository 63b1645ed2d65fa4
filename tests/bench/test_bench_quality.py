"""The parts of `bench quality`: text, prompts, windows and bins, and the meaning of its figures."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("bench.support.common")
pytest.importorskip("tokenizers")

from bench.__main__ import main
from bench.quality import (
    checkpoint,
    endless,
    eviction,
    formats,
    haystacks,
    heldout,
    latents,
    pictures,
    reuse,
    rivals,
    texts,
)
from bench.quality.divergence import Divergence
from bench.quality.network import RandomEngine, Recorder, attention_mass, demo_model, log_softmax
from bench.quality.prompts import DISTANCES, LENGTH, make_prompts
from bench.support.report import show
from kvcache import EvictionPolicy, InferenceEngine
from kvcache.calibration.residual import default_length
from kvcache.demo import DIRECTORY

pytestmark = pytest.mark.one_build


@pytest.fixture(scope="module")
def demo():
    return demo_model()


@pytest.fixture(scope="module")
def model(demo):
    return demo[0]


@pytest.fixture(scope="module")
def text(demo):
    return heldout.load(demo[1])


def test_rows_of_a_table_are_printed_as_they_come(capsys):
    """Each before the next one is measured, in columns of one width; notes come last."""

    def rows():
        for name, cell in (("a", "1"), ("a longer name", "2.5")):
            yield [name, cell, "x"]
            last = capsys.readouterr().out.splitlines()[-1]
            assert last.replace("|", "").split() == [*name.split(), cell, "x"]

    for as_markdown in (False, True):
        show(as_markdown, "title", ["format", "value", "c"], rows(), "one", lambda: "two")
        assert capsys.readouterr().out == "\none\n\ntwo\n\n"
    show(False, "title", ["format", "value", "c"], iter([["a", "1", "x"], ["b", "22", "y"]]))
    lines = capsys.readouterr().out.strip().splitlines()[2:]
    assert len({len(line) for line in lines}) == 1


def test_windows_cover_without_overlap():
    whole = heldout.Heldout(np.arange(1000, dtype=np.uint32), heldout.find_library(), True)
    for length, total, count in ((100, 250, 3), (64, 10**6, 15), (1000, 1, 1)):
        windows = whole.windows(length, total)
        assert [len(window) for window in windows] == [length] * count
        assert all(b[0] > a[-1] for a, b in pairwise(windows))


def test_chats_are_questions_and_drawn_answers(demo, model, tmp_path, monkeypatch):
    engine = InferenceEngine.from_pretrained(DIRECTORY)
    assert texts.kinds_of(engine) == ("documentation", "code", "licences")  # the demo has no template

    def template(messages, tokenize, add_generation_prompt=True):
        return demo[1].encode("".join(f"# {each['role']}\n{each['content']}\n" for each in messages)).ids

    monkeypatch.setattr(engine, "apply_chat_template", template)
    monkeypatch.setitem(texts.ANSWER, "max_tokens", 24)
    found = list(texts.windows(engine, 100, 600, ["code", "chats"], tmp_path))
    assert [each.shape for each in found] == [(100,)] * 6
    asked = [demo[1].decode(each.tolist()) for each in found[1::2]]
    for number, text in enumerate(asked):
        first, second = (texts.QUESTIONS[7 * number + 5 * turn] for turn in range(2))
        assert text.startswith(f"# user\n{first}\n# assistant\n")
        assert f"# user\n{second[:12]}" in text
    assert demo[1].decode(found[0].tolist()) in texts.texts()["code"]
    monkeypatch.setattr(texts, "chats", lambda *_: pytest.fail("they were kept"))
    again = list(texts.windows(engine, 100, 600, ["code", "chats"], tmp_path))
    np.testing.assert_array_equal(found, again)


def test_the_recipe_of_kivi(model, text):
    tokens = text.tokens[:301]
    recorder = Recorder(model, np.copy)
    InferenceEngine(recorder).score(tokens)
    exact = recorder.take()
    fine = rivals.Kivi(model, 20, 300)(tokens)
    np.testing.assert_allclose(fine, exact, rtol=0, atol=2e-3 * np.ptp(exact))
    coarse = rivals.Kivi(model, 2, 300)
    found = coarse(tokens)
    np.testing.assert_allclose(found[:128], exact[:128], rtol=0, atol=1e-4 * np.ptp(exact))  # a group reads itself
    assert np.abs(found[128:] - exact[128:]).max() > 0.05 * np.ptp(exact)
    assert coarse.bits == 2 + 1 + 16 * 128 / 300
    rows = np.random.default_rng(0).normal(size=(7, 32)).astype(np.float32)
    rows[3] = 5
    for bits in (2, 4):
        step = np.ptp(rows, axis=1, keepdims=True) / (2**bits - 1)
        assert (np.abs(rivals.quantised(rows, bits) - rows) <= step / 2 + 1e-6).all()


def test_a_folder_without_the_modules_is_refused(demo, tmp_path):
    with pytest.raises(SystemExit, match="--library: expected the standard library"):
        heldout.load(demo[1], tmp_path)


def test_names_are_defined_and_requested(demo, text):
    tokenizer = demo[1]
    for prompt in make_prompts(text, tokenizer, 3):
        assert LENGTH - 80 < len(prompt.tokens) <= LENGTH
        assert prompt.continuation.stop - prompt.continuation.start == 256
        before = tokenizer.decode(prompt.tokens[: prompt.continuation.start].tolist())
        assert len(prompt.names) == len(DISTANCES)
        for where in prompt.names:
            name = tokenizer.decode(prompt.tokens[where].tolist()).strip()
            assert before.count(name) == 1
            assert where.start >= prompt.continuation.stop


def test_formats_are_compared_with_the_f32_cache(model, text):
    length = 2 * default_length("q2", "q2") + 44  # beyond the first two groups, so that q2 is read packed
    figures = formats.measure(model, text, length, 2 * length, ["f32", "q8", "q2"])
    assert figures["f32"]["rise"] == figures["f32"]["kl"] == 0
    assert figures["f32"]["same"] == 1
    assert 0 < figures["q8"]["kl"] < 1e-3 < figures["q2"]["kl"]
    assert [round(figures[name]["bits"], 2) for name in figures] == [32, 8.5, 2.5]
    assert figures["f32"]["tokens"] == 2 * (length - 1)
    scores = np.concatenate([InferenceEngine(model).score(window) for window in text.windows(length, 2 * length)])
    assert figures["f32"]["perplexity"] == pytest.approx(np.exp(-scores.mean()), rel=1e-5)
    verdicts = {v["format"]: v["met"] for v in formats.verdicts(figures)}
    assert verdicts == {"q8": True, "q2": figures["q2"]["rise"] <= 0.08}


def test_tails_are_those_of_the_tokens_of_all_windows():
    one = Divergence(kl=[np.arange(1000.0), np.arange(1000.0, 2001.0)])
    one.nats = one.rise = [np.zeros(1), np.zeros(1)]
    one.same = [np.array([True, False])]
    found = one.figures()
    assert (found["kl_p99"], found["kl_p999"], found["same"]) == (1980, 1998, 0.5)


@pytest.mark.exhaustive
def test_formats_and_policies_in_python_have_their_rows(tmp_path, monkeypatch, capsys):
    (tmp_path / "ideas.py").write_text(
        "class Nothing:\n    bits, name = 5, 'as it is'\n    encode = decode = staticmethod(lambda rows: rows)\n"
        "class Neither:\n    pass\n"
        "class Half(Nothing):\n    bits, name = 3, 'half'\n"
        "class Last:\n    score_queries = 0\n"
        "    def keep(self, layer, scores, positions, budget):\n"
        "        return range(len(positions) - budget, len(positions))\n"
        "class Halves(Last):\n"
        "    def budgets(self, kv_budget, num_layers):\n"
        "        return [kv_budget // 2] * num_layers\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = ["--tokens", "300", "--context", "100", "--format", "ideas:Nothing"]
    options += ["--format", "ideas:Nothing/ideas:Half", "--policy", "ideas:Last", "--policy", "ideas:Halves"]
    assert main(["quality", "--quick", *options]) == 0  # the demo's model
    before, _, shown = capsys.readouterr().out.partition("K and V of ")
    titles = re.findall(r"Windows so far: (\d)\n\n.*\n-+\nf32 ", before)
    assert titles == ["1", "2"], "tables of what is known so far"
    number = r"[\de.-]+"
    row = rf"as it is +15\.24 +[+-]0\.000 ± 0\.000 % +{number} ± {number} +{number} +{number} +100\.00 %"
    assert re.search(row, shown)
    assert re.search(r"as it is, no residual +5\.00 +[+-]0\.000 ± 0\.000 % +0 ± 0 +0 +0 +100\.00 %", shown)
    for place in ("ideas:Neither", "ideas:Missing", "nowhere:Nothing", "ideas"):
        with pytest.raises(SystemExit, match=r"^--format: expected"):
            checkpoint.load_own(place)
    with pytest.raises(SystemExit, match=r"^--policy: expected a class with `keep`, got ideas:Neither"):
        checkpoint.load_own("ideas:Neither", "policy")
    assert re.search(r"as it is/half, no residual +4\.00 ", shown)
    assert [*map(float, re.findall(r"Last, [124]0 % kept +([\d.]+) ", shown))] == [3.2, 6.4, 12.8]
    assert [*map(float, re.findall(r"Halves, [124]0 % kept +([\d.]+) ", shown))] == [1.6, 3.2, 6.4]
    with pytest.raises(SystemExit, match=r"^--model: expected a local checkpoint directory"):
        main(["quality", "--model", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit, match=r"^--rows: expected some of .*, got q9"):
        main(["quality", "--quick", "--rows", "q9"])  # the demo's model too


def test_rows_as_latents_are_those_of_the_network(model, text):
    ids = text.tokens[:80]
    whole = latents.AsLatents(model, np.copy, latents.like_factors(model, ids))
    found, wanted = (InferenceEngine(each, block_size=8) for each in (whole, model))
    assert found.cache.latent is not None
    np.testing.assert_array_equal(found.prefill_from_pos(ids, 0), wanted.prefill_from_pos(ids, 0))


@pytest.mark.exhaustive
def test_formats_beside_a_window_are_compared_with_that_window(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = ["q8", "q4, centred, as latents", "q4, window of a fifth", "q4, window of a fifth, calibrated"]
    (tmp_path / "text").write_text("one two three four five six seven eight nine ten " * 40)
    options = ["--calibrate", str(tmp_path / "text"), "--tokens", "240", "--context", "120", "--texts", "code"]
    assert main(["quality", "--model", str(DIRECTORY), *options, "--rows", *rows]) == 0
    shown = capsys.readouterr().out
    found = re.findall(r"^(\S.*?)  +([\d.]+)  +\S+ ± \S+ %  +(\S+) ± ", shown, re.MULTILINE)
    bits, kl = ({name: float(each[i]) for name, *each in found} for i in (0, 1))
    assert [*kl] == ["f32", *rows[:2], "f32, window of a fifth", *rows[2:]]
    assert [bits[name] for name in ("f32, window of a fifth", *rows[2:])] == [6.4, 0.9, 0.9]
    row = 2 * model.config.num_kv_heads * model.config.head_dim
    assert bits[rows[1]] == round(4 + 32 / row + 16 * 80 / 120, 2)
    assert kl["f32, window of a fifth"] == 0 < min(kl[name] for name in rows)


def test_programs_that_are_not_installed_are_named(monkeypatch, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(20))
    some = {"torch", "optimum", "optimum.quanto"}
    every = some | {"transformers", "hqq"}
    cases = (("model.gguf", False, some, 2), ("model.gguf", True, some, 1), (".", False, some, 1))
    for path, llama, found, count in (*cases, ("model.gguf", True, every, 0)):
        monkeypatch.setattr(checkpoint.llamacpp, "installed", lambda llama=llama: llama)
        monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name, found=found: name in found or None)
        told = checkpoint.absent(tmp_path / path)
        assert len(told) == count
        if count:
            assert told[-1] == "not measured: QuantizedCache of transformers (not installed: transformers, hqq)"
        if count == 2:
            assert told[0] == "not measured: llama.cpp (llama-cpp-python is not installed)"


def test_other_programs_have_lines_of_their_own_in_the_picture():
    runs = ("q4", "q4, calibrated", "auto:5.0, calibrated", "KIVI's recipe, 2 bits", *rivals.HF, "llama.cpp q4_0")
    assert [*dict.fromkeys(map(pictures.kind_of, runs))] == [
        "without a calibration", "with a calibration", "a budget of bits", "KIVI's recipe", "QuantizedCache, quanto",
        "QuantizedCache, hqq", "llama.cpp",
    ]
    left_out = ("f32", "llama.cpp f32", "transformers f32", "q8/q4", "q4, no residual", "q8, biased keys")
    assert not any(map(pictures.kind_of, (*left_out, "q4, residual of 16, calibrated")))


def test_a_recorder_changes_nothing(model, text):
    recorder = Recorder(model, np.copy)
    scores = InferenceEngine(recorder).score(text.tokens[:50])
    np.testing.assert_array_equal(scores, InferenceEngine(model).score(text.tokens[:50]))
    found = log_softmax(recorder.take())[np.arange(49), text.tokens[1:50]]
    np.testing.assert_allclose(found, scores, rtol=0, atol=1e-5)


def test_random_eviction_keeps_a_uniform_sample(model, text):
    engine = RandomEngine(model, eviction_policy=EvictionPolicy.H2O(0.0), kv_budget=100, prefill_chunk=16)
    engine.prefill_from_pos(text.tokens[:400], 0)
    kept = np.array([engine.kept_positions(layer) for layer in range(model.config.num_layers)])
    assert kept.shape == (model.config.num_layers, 100)
    assert abs(kept.mean() - 200) < 20  # four standard deviations of the mean of 600 draws
    assert len({tuple(row) for row in kept.tolist()}) == len(kept)


def test_attention_sums_to_one(model, text):
    mass = attention_mass(model, text.tokens[:120], 20)
    np.testing.assert_allclose(mass.sum(axis=1), 1, rtol=1e-4)
    assert (mass[:, :100] > 0).all()


def test_a_policy_keeps_its_budget(demo, model, text):
    prompts = make_prompts(text, demo[1], 1)
    found = eviction.measure(model, prompts, "window", 5, chunk=512)
    assert found["alive"] == found["budget"] == 102
    assert eviction.rows([found | {"policy": "all"}])[0][6] == "+0.0 %"


def test_bins_and_fresh_windows(model, text):
    scores = np.repeat(np.float32([-1, -2, -3]), [endless.BIN, endless.BIN, endless.BIN // 2 - 1])
    np.testing.assert_allclose(endless.bins(scores), [1, 2])
    np.testing.assert_allclose(endless.bins(scores[:100]), [1])
    fresh = endless.reference(model, text.tokens[:2300])
    np.testing.assert_allclose(fresh[:2047], InferenceEngine(model).score(text.tokens[:2048]), rtol=0, atol=1e-4)
    again = InferenceEngine(model).score(text.tokens[1024:2300])
    np.testing.assert_allclose(fresh[2047:], again[1023:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_hits_are_hits(model, text, dtype):
    found = reuse.measure(model, text, dtype, 4)
    assert found["reused"] > 0
    assert found["largest"] < 1e-3 or dtype == "q4"


def test_the_command_line(capsys, tmp_path):
    assert main(["quality", "--quick", "--only", "outliers", "--json", str(tmp_path / "found.json")]) == 0
    assert "q4, not rotated" in capsys.readouterr().out
    assert '"outliers"' in (tmp_path / "found.json").read_text()


@pytest.mark.exhaustive
def test_what_was_measured_is_kept(tmp_path, monkeypatch):
    """A second call runs what is missing, and shows the same figures."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = ["quality", "--model", str(DIRECTORY), "--quick", "--context", "100", "--keep", str(tmp_path / "kept")]
    (tmp_path / "tale.txt").write_text("".join(f"def add{i}(first):\n    return first + {i}\n" for i in range(99)))
    command += ["--rows", "q8", "q4", "--texts", str(tmp_path / "tale.txt")]
    figures = []
    for tokens in ("200", "400"):
        assert main([*command, "--tokens", tokens, "--json", str(tmp_path / "json")]) == 0
        figures.append(json.loads((tmp_path / "json").read_text())["figures"])
    files = sorted((tmp_path / "kept").iterdir())
    assert len(files) == 4
    monkeypatch.setattr(checkpoint._Run, "__call__", lambda *_: pytest.fail("all of it was kept"))
    assert main([*command, "--tokens", "400", "--json", str(tmp_path / "json")]) == 0
    assert json.loads((tmp_path / "json").read_text())["figures"] == figures[1]
    assert figures[0]["q4"]["kl"] != figures[1]["q4"]["kl"]


def test_files_budgets_and_own_rows_in_the_picture(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "mine.py").write_text(
        "class Last:\n    score_queries = 0\n"
        "    def keep(self, layer, scores, positions, budget):\n"
        "        return range(len(positions) - budget, len(positions))\n"
    )
    (tmp_path / "tale.txt").write_text("def add(first, second):\n    return first + second\n" * 40)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = ["--quick", "--rows", "q8", "Last, 5 % kept", "Last, 50 % kept", "--budgets", "0.05", "0.5"]
    options += ["--policy", "mine:Last", "--texts", "tale.txt", "--context", "100", "--tokens", "200", "--plot", "."]
    assert main(["quality", *options]) == 0
    shown = capsys.readouterr().out
    assert "2 windows of 100 tokens of tale.txt" in shown
    assert [*map(float, re.findall(r"Last, [50]+ % kept +([\d.]+) ", shown))] == [1.6, 16]
    assert re.search(r"Last, 5 % kept +1\.60 +\S+ ± \S+ % +0\.0*[1-9]", shown), "a short window has pieces too"
    assert (tmp_path / "quality-of-a-real-model.png").stat().st_size > 10_000
    own = ["Last, 5 % kept", "mine"]
    kinds = [pictures.kind_of(name, own) for name in (*own, "q4", "f32")]
    assert kinds == ["Last", "mine", "without a calibration", ""]
    for texts_of, message in (("gone.txt", "or a file, got gone.txt: No such"), ("mine.py", "at least 100 tokens")):
        with pytest.raises(SystemExit, match=f"^--texts: expected .*{message}"):
            main(["quality", "--texts", texts_of, "--context", "100", "--quick", "--rows", "q8"])
    for share in ("0", "1.5"):
        with pytest.raises(SystemExit):
            main(["quality", "--policy", "mine:Last", "--budgets", share])


@pytest.mark.parametrize("task", haystacks.TASKS)
def test_questions_hold_their_answers(demo, task):
    """The text says what is asked for; lines are at other places in each question; seeds make them the same again."""
    tokenizer, starts = demo[1], []
    questions = haystacks.make_questions(task, tokenizer, 900, 3)
    for question in questions:
        text, answer = question.tokens[: question.answer], question.tokens[question.answer :]
        assert 800 < len(question.tokens) <= 900
        said, wanted = tokenizer.decode(text.tolist()), tokenizer.decode(answer.tolist()).strip()
        body, asked = said.rsplit("Question: ", 1)
        assert body.count(wanted) == (10 if task == "words" else 1)
        assert wanted not in asked
        starts.append(body.index(wanted))
    assert len(set(starts)) == len(questions) == (30 if task == "facts" else 3)
    again = haystacks.make_questions(task, tokenizer, 900, 3)
    assert all((a.tokens == b.tokens).all() for a, b in zip(questions, again, strict=True))
    if task == "needle":
        assert starts == sorted(starts)  # from the front to the back
    with pytest.raises(SystemExit, match=r"^--context: expected more than 60 tokens"):
        haystacks.make_questions("words", tokenizer, 60, 1)


def test_answers_are_scored_like_the_whole_text(demo, model):
    """All tokens stay: log-probabilities are those of the text; a policy per head has its budget."""
    questions = {"needle": haystacks.make_questions("needle", demo[1], 300, 2)}
    asking = InferenceEngine.from_pretrained(DIRECTORY)
    found = haystacks.measure(asking, questions, 300, None, 1.0, lambda text: None)
    nats = []
    for question in questions["needle"]:
        nats += InferenceEngine(model).score(question.tokens)[question.answer - 1 :].tolist()
    assert found["tasks"]["needle"]["nats"] == pytest.approx(np.mean(nats), rel=1e-4)
    facts = {"facts": haystacks.make_questions("facts", demo[1], 400, 1)[:2]}  # of one text, which is read once
    at_once = haystacks.measure(asking, facts, 400, None, 1.0, lambda text: None)
    engine, nats_of_facts = InferenceEngine(model), []
    for question in facts["facts"]:
        nats_of_facts += engine.score(question.tokens)[question.answer - 1 :].tolist()
    assert at_once["tasks"]["facts"]["nats"] == pytest.approx(np.mean(nats_of_facts), rel=1e-4)
    kept = haystacks.measure(asking, questions, 300, haystacks.POLICIES["AdaKV of SnapKV"], 0.3, lambda text: None)
    assert kept["kept"] == pytest.approx(90, abs=25)  # of a layer's heads together
    whole = haystacks.measure(asking, questions, 300, haystacks.POLICIES["once: KVzip"], 1.0, lambda text: None, True)
    assert whole["tasks"]["needle"]["nats"] == pytest.approx(np.mean(nats), rel=1e-4)
    once = haystacks.measure(asking, questions, 300, haystacks.POLICIES["once: KVzip"], 0.3, lambda text: None, True)
    assert 0.25 < once["size"] < 0.45
    assert whole["size"] == 1 > once["size"]
    further = haystacks.stretched(asking, 2.0)
    assert further.config.max_position_embeddings == 2 * asking.config.max_position_embeddings
    ids = questions["needle"][0].tokens
    changed = np.abs(InferenceEngine(further.model).score(ids) - asking.score(ids))
    assert 0 < changed.mean() < 1  # distances are shorter, nothing else
    with pytest.raises(SystemExit, match="--stretch: expected a checkpoint with plain RoPE, got yarn"):
        haystacks.stretched(further, 2.0)


def test_tasks_have_a_table_and_a_picture(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    options = ["--tasks", "needle", "--rows", "all tokens", "window", "--budgets", "0.2", "--context", "300"]
    assert main(["quality", "--quick", *options, "--plot", ".", "--json", "tasks.json"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"(?m)^window +20% +60 +20% +\d+ %, -\d+\.\d\d", shown)
    assert (tmp_path / "quality-tasks.png").stat().st_size > 5_000
    figures = json.loads((tmp_path / "tasks.json").read_text())["figures"]
    assert [f["policy"] for f in figures] == ["all tokens", "window"]
    with pytest.raises(SystemExit, match=r"^--rows: expected some of all tokens; .*, got q8"):
        main(["quality", "--tasks", "--rows", "q8"])
    with pytest.raises(SystemExit):
        main(["quality", "--tasks", "harder"])
