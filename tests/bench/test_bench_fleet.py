"""The model of a fleet: its memory beside the trie, its time beside sums, its hit rates beside two real servers."""

import json
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("bench.support.common")

from bench.__main__ import main
from bench.fleet import routing
from bench.fleet.conversations import Conversations
from bench.fleet.costs import Costs
from bench.fleet.replay import WAYS, Fleet, Replay, replay
from bench.fleet.router import PrefixRouter
from bench.fleet.store import Store
from bench.fleet.two_workers import compare
from bench.prefix.trace import through_trie
from bench.prefix.workloads import Mix, Request, Trace, synthetic
from kvcache.demo import DIRECTORY

pytestmark = pytest.mark.one_build
COSTS = Costs()
SEQUENTIAL = 1e-3  # load: no request meets another one
SMALL = Mix(num_requests=200, system_tokens=200, document_tokens=800, task_tokens=200)
NO_DELAY = replace(COSTS, event_delay=0.0, latency=0.0)


def spaced(trace):
    """The same requests, each as long after the one before it."""
    return replace(trace, requests=[replace(each, arrival=float(i)) for i, each in enumerate(trace.requests)])


def prompts(*lists, answer=1, page=16):
    """A trace of prompts of these pages, all at once."""
    return Trace("prompts", page, [Request(pages, len(pages), 0.0, len(pages) * page, answer) for pages in lists])


@pytest.mark.parametrize("capacity", [200, 300, 2_000])
def test_one_worker_finds_and_evicts_as_the_trie_does(capacity):
    trace = spaced(synthetic(SMALL))
    found = replay(trace, Fleet(1, capacity, 0, load=SEQUENTIAL), "round robin", COSTS)
    pages = sum((cached + 1) // trace.page_size for cached in found.cached)  # the last token of a prompt always runs
    assert pages / sum(each.num_prompt for each in trace.requests) == through_trie(trace, capacity)["hit_rate"]


def test_a_store_makes_one_memory_of_all_workers():
    trace, everything = spaced(synthetic(SMALL)), 100_000
    alone = replay(trace, Fleet(1, everything, 0, load=SEQUENTIAL), "round robin", NO_DELAY)
    for way in ("shared store", "both"):
        many = replay(trace, Fleet(7, 300, everything, load=SEQUENTIAL), way, replace(NO_DELAY, link=1e15))
        assert many.cached == alone.cached
        assert 0 < sum(many.stored) < sum(many.cached)
        assert many.written == len({page for each in trace.requests for page in each.pages}) * 16 * COSTS.token_bytes


def test_routing_and_a_store_beside_their_parts():
    trace = synthetic(SMALL)
    rate = {way: replay(trace, Fleet(8, 300, 100_000), way, COSTS).hit_rate for way in WAYS}
    assert rate["round robin"] < rate["prefix routing"] <= rate["both"] + 0.02
    assert rate["round robin"] < rate["shared store"]


@pytest.mark.parametrize("seed", range(8))
def test_memory_and_mirror_add_up_at_the_end(seed):
    """Whatever waits, is evicted and is told late: nothing stays held, and the router knows what workers have."""
    rng = np.random.default_rng(seed)
    trace = synthetic(replace(SMALL, seed=seed, num_requests=120, systems=int(rng.integers(2, 20))))
    longest = max(len(each.pages) for each in trace.requests)
    pages = longest + int(rng.integers(0, 40))
    fleet = Fleet(int(rng.integers(1, 6)), pages, 100 * int(rng.integers(2)), load=10.0 ** -(seed % 4))
    run = Replay(trace, fleet, replace(COSTS, event_delay=seed / 2), True, seed % 2 == 0)
    run.run()
    known = run.router.holders(np.inf)
    for number, worker in enumerate(run.workers):
        memory = worker.memory
        memory.index.check()
        assert memory.slots.pool.num_free + len(memory.index) == fleet.worker_pages
        assert not worker.queue
        assert worker.running == 0
        named = {name for leaf in memory.index.trie.leaf_ids() for name in memory.index.trie.path(leaf)[1].tolist()}
        assert {name for name, bits in known.items() if bits >> number & 1} == named
    assert all(0 <= job.cached < job.request.prompt_tokens for job in run.jobs)


def test_first_tokens_are_sums_of_costs():
    trace = prompts([1, 2, 3], [1, 2, 4], [5])
    found = replay(trace, Fleet(1, 50, 0), "round robin", COSTS)
    first, second, third = COSTS.prompt(48), COSTS.prompt(48, 32), COSTS.prompt(16)
    assert found.cached == [0, 32, 0]
    assert np.allclose(found.first, [first, first + second, first + second + third], atol=1e-5)
    spread = replay(trace, Fleet(3, 50, 0), "round robin", COSTS)
    assert np.allclose(spread.first, [COSTS.prompt(48)] * 2 + [third], atol=1e-5)


def test_answers_slow_prompts_down_and_hold_memory():
    trace = prompts([1, 2, 3], [5], answer=100)
    alone, beside = (replay(trace, Fleet(count, 50, 0), "round robin", COSTS).first for count in (2, 1))
    piece, decodes = COSTS.decodes(1, 48), COSTS.decodes(1, 48)
    assert beside[1] == pytest.approx(beside[0] + alone[1] * (piece + decodes) / piece, rel=1e-4)
    with pytest.raises(ValueError, match="worker_pages"):
        replay(trace, Fleet(1, 2, 0), "round robin", COSTS)
    waits = replay(prompts([1, 2, 3], [4, 5, 6], answer=100), Fleet(1, 4, 0), "round robin", COSTS)
    assert waits.first[1] > waits.first[0] + 99 * COSTS.decodes(1, 48)


def test_a_router_learns_of_pages_after_the_delay():
    router = PrefixRouter(3, replace(COSTS, event_delay=0.5))
    router.tell(1.0, 2, [7, 8], [])
    router.tell(2.0, 1, [7], [])
    assert router.matches([7, 8, 9], 1.4) == {}
    assert router.matches([7, 8, 9], 1.5) == {2: 2}
    assert router.matches([7, 8], 2.5) == {1: 1, 2: 2}
    assert router.choose([7, 8, 9], 48, 16, 0, 2.5)[0] == 2
    router.tell(3.0, 2, [], [8, 7])
    assert router.matches([7, 8], 3.5) == {1: 1}
    assert router.matches([9], 9.0) == {}
    router.tell(10.0, 0, [9], [9])  # it was removed, and stored again
    assert router.matches([9], 10.5) == {0: 1}


def test_a_router_leaves_a_prefix_whose_worker_is_busy():
    router = PrefixRouter(2, NO_DELAY)
    router.tell(0.0, 0, list(range(10)), [])
    chosen = [router.choose([*range(10), 100 + i, 200 + i, 300 + i], 13 * 16, 16, 0, 1.0) for i in range(8)]
    assert [worker for worker, _ in chosen[:3]] == [0, 0, 0]
    assert {worker for worker, _ in chosen} == {0, 1}
    for worker, load in chosen:
        router.done(worker, load)
    assert router.choose([*range(10), 99], 11 * 16, 16, 0, 1.0)[0] == 0


def test_a_store_reads_what_pays_and_forgets_the_oldest():
    costs = Costs(token_bytes=1000, link=1e6, latency=0.25)  # a page of 16 tokens takes 16 ms
    store = Store(costs, 3, 16, 1)
    store.write([1, 2], 0.0)
    assert store.has([1, 2], 0.281) == 0
    assert store.has([1, 2, 3], 0.283) == 2
    assert store.fetch([1, 2], 0, 32, 0.5, 1.0) == (0, 0.0)  # it takes more than half of the seconds
    count, seconds = store.fetch([1, 2], 0, 32, 1.0, 1.0)
    assert (count, seconds) == (2, pytest.approx(0.282))
    store.write([8, 9], 2.0)  # 1 has to go
    assert store.has([2], 9.0) == store.has([8], 9.0) == store.has([9], 9.0) == 1
    assert store.has([1], 9.0) == 0
    assert (store.read, store.written) == (32, 64)


@pytest.mark.exhaustive
def test_two_servers_find_what_the_model_says():
    pytest.importorskip("uvicorn")
    model, real, total = compare("prefix routing", 24, 70)
    assert model == real
    assert 0.2 < sum(model) / total < 0.9


@pytest.mark.exhaustive
def test_two_servers_that_share_a_directory():
    """A server waits 50 ms for it, so a few requests on a busy machine may find less than the model says."""
    pytest.importorskip("uvicorn")
    model, real, _ = compare("both", 24, 800)
    assert all(a >= b for a, b in zip(model, real, strict=True))
    assert sum(real) >= 0.7 * sum(model)


def test_the_command(capsys, tmp_path):
    assert main(["fleet", "--quick", "--json", str(tmp_path / "found.json")]) == 0
    assert "prefix routing" in capsys.readouterr().out
    outcomes = json.loads((tmp_path / "found.json").read_text())["outcomes"]
    assert set(outcomes) == {"2", "4"}
    assert set(outcomes["2"]) == set(WAYS)


def test_turns_go_on_from_one_another():
    texts, seen = Conversations(count=6, turns=3, heads=2, clients=2), []
    for client in range(2):
        prompts = list(texts.prompts(client))
        assert prompts == list(texts.prompts(client))
        before = [max((len(a) for a in prompts[:i] if each.startswith(a)), default=0) for i, each in enumerate(prompts)]
        assert before.count(0) == 3
        seen += prompts
    assert len(set(seen)) == texts.num_requests == 18
    heads = {each[: 24 * 10] for each in seen}
    assert len(heads) == 2
    assert texts.send(lambda prompt: (len(prompt), prompt.count("="))) == (
        sum(map(len, seen)), sum(each.count("=") for each in seen)
    )


def test_the_table_of_routers(capsys, monkeypatch, tmp_path):
    """Engines that are there, and those that are not, with a fake one: `.ci/run cluster` has the processes."""
    used = []

    @contextmanager
    def run(folder, blocks, store):
        assert folder.is_dir()
        used.append((blocks, store is not None))
        yield routing.Running(lambda prompt: (10, 7), lambda: [96, 0])

    engines = (routing.Engine("here", run, "json"), routing.Engine("away", run, "no_such_package.router"))
    monkeypatch.setattr(routing, "ENGINES", engines)
    assert main(["routing", "--json", str(tmp_path / "found.json")]) == 4  # workers without a request
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["here"] + ["70.0%", "(0+96)"] * 4 in lines
    assert ["away", "not", "installed"] in lines
    assert used == [(routing.SMALL, False), (routing.SMALL, True), (routing.LARGE, False), (routing.LARGE, True)]
    found = json.loads((tmp_path / "found.json").read_text())["found"]
    assert found["here; small"] == {"cached": 0.7, "requests": [96, 0]}


def test_costs_of_a_checkpoint():
    costs = Costs.measured(DIRECTORY, lengths=(32, 96), rows=(1, 2))
    assert costs.prompt(96) > 0
    assert costs.decodes(1, 0) > 0
    assert costs.token_bytes == 6 * 2 * 2 * 36  # layers, K and V, heads, bytes of 64 channels in q4
    assert (costs.link, costs.latency) == (COSTS.link, COSTS.latency)
