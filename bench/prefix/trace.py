"""`python -m bench trace`: a serving trace through the prefix cache, without a model.

Hit rates are in tokens: all pages have as many. Policies are compared on a tree of pages; the cost of a request is
measured on the trie.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import numpy as np

from bench.prefix.agent_replay import HINTS, Costs, Replay, future_of, rules
from bench.prefix.agent_traces import AgentMix, agent_trace
from bench.prefix.policies import POLICIES, optimal
from bench.prefix.policies import replay as replay_policy
from bench.prefix.windows import NETWORKS, hit_rates
from bench.prefix.workloads import Mix, Trace, from_mooncake, synthetic
from bench.support.plot import plot_lines
from bench.support.report import show, time_text, write_json
from kvcache.trie.trie import TokenTrie

__all__ = ["add_arguments", "main", "through_trie"]

MAX_PAGE = 256  # the largest page of the trie; longer pages of a trace are represented by 256 tokens
MIXED = " of chats, agents and documents"
AGENT_SHARES = 0.01, 0.05, 0.2
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--file", metavar="JSONL", help="a trace in Mooncake's format instead of a synthetic one")
    parser.add_argument("--requests", type=int, default=Mix.num_requests, help="requests of the synthetic trace")
    parser.add_argument("--windows", action="store_true", help="networks with and without windows; ten minutes")
    parser.add_argument("--agents", action="store_true", help="sessions of agents: seconds and hints; five minutes")
    parser.add_argument("--seeds", type=int, default=3, help="synthetic traces to average over (default 3)")


def through_trie(trace: Trace, capacity: int) -> dict[str, float]:
    """Replay the trace through `TokenTrie`: match, pin, evict, insert, unpin; returns hit rate, times and bytes.

    All tokens of a page are its name, so different pages differ in their first token.
    """
    page_size = min(trace.page_size, MAX_PAGE)
    trie = TokenTrie(page_size)
    root = trie.add_root()
    prompts = [np.repeat(np.array(r.pages[:capacity], np.uint64).astype(np.uint32), page_size) for r in trace.requests]
    values = np.arange(capacity, dtype=np.int32)
    hits = lookups = evictions = peak = 0
    times = []
    for request, tokens in zip(trace.requests, prompts, strict=True):
        start = time.thread_time()
        node, length, _, _ = trie.lookup(root, tokens)
        pinned = trie.boundary(node, length)
        trie.pin(pinned)
        found, pages = length // page_size, len(tokens) // page_size
        over = len(trie) + pages - found - capacity
        if over > 0:
            evictions += len(trie.evict(over))
        trie.insert(root, tokens, values[:pages])
        trie.unpin(pinned)
        times.append(time.thread_time() - start)
        hits += min(found, request.num_prompt)
        lookups += request.num_prompt
        peak = max(peak, trie.nbytes)
    return {
        "hit_rate": hits / max(lookups, 1), "evictions": evictions, "median": median(times), "mean": mean(times),
        "worst": max(times), "bytes": peak,
    }


def main(options: argparse.Namespace) -> int:
    """Print hit rates by policy and capacity, and the time and memory of the trie."""
    if options.agents:
        return over_agents(options)
    if options.file:
        traces = [from_mooncake(options.file)]
    else:
        mix = Mix(num_requests=min(300, options.requests) if options.quick else options.requests)
        traces = [synthetic(replace(mix, seed=seed)) for seed in range(1 if options.quick else options.seeds)]
    if options.windows:
        return over_windows(traces[0], options)
    print(f"\ntrace: {traces[0].name}; {len(traces)} seed(s)")
    sizes = [trace.num_pages for trace in traces]
    print(f"different pages of {traces[0].page_size} tokens: {', '.join(map(str, sizes))}")

    rates: dict[str, dict[str, float]] = {name: {} for name in [*POLICIES, "optimal (offline)", "TokenTrie"]}
    gone: dict[str, dict[str, float]] = {name: {} for name in rates}
    costs = []
    for share in SHARES:
        column = f"{share:.0%}"
        capacities = [max(64, int(size * share)) for size in sizes]
        pairs = list(zip(traces, capacities, strict=True))
        for name, rank in POLICIES.items():
            outcomes = [replay_policy(trace, capacity, rank) for trace, capacity in pairs]
            rates[name][column] = mean(o.hit_rate for o in outcomes)
            gone[name][column] = mean(o.evictions for o in outcomes)
        best = [optimal(trace, capacity) for trace, capacity in pairs]
        rates["optimal (offline)"][column] = mean(o.hit_rate for o in best)
        gone["optimal (offline)"][column] = mean(o.evictions for o in best)
        tries = [through_trie(*pair) for pair in pairs]
        rates["TokenTrie"][column] = mean(trie["hit_rate"] for trie in tries)
        gone["TokenTrie"][column] = mean(trie["evictions"] for trie in tries)
        real = tries[0]
        costs.append(
            [column, str(pairs[0][1]), *(time_text(real[k]) for k in ("median", "mean", "worst")),
             f"{real['bytes'] / 2**10:.0f} KiB"]
        )
    columns = [f"{share:.0%}" for share in SHARES]
    for title, figures, form in (
        ("hit rate in tokens, by capacity as a share of all pages", rates, ".1%"), ("pages evicted", gone, ".0f"),
    ):
        rows = [[name, *(f"{each[column]:{form}}" for column in columns)] for name, each in figures.items()]
        show(options.markdown, title, ["policy", *columns], rows)
    header = ["capacity", "pages", "median", "mean", "worst", "peak memory"]
    show(options.markdown, "the trie, per request: lookup, pin, evict, insert, unpin", header, costs)
    if options.plot:
        print(draw(rates, f"{len(traces[0].requests):,} requests{'' if options.file else MIXED}", options.plot))
    write_json(options.json, traces=[t.name for t in traces], hit_rate=rates, evictions=gone)
    return 0


def draw(rates: dict[str, dict[str, float]], about: str, folder: str) -> Path:
    """Draw hit rates over capacity, the smallest at the right, where lines part; equal lines are one."""
    names: dict[tuple[float, ...], list[str]] = {}
    for name, each in rates.items():
        names.setdefault(tuple(each.values()), []).append(name)
    lines = {
        ", ".join(some): {column.replace("%", " %"): 100 * rates[some[0]][column] for column in [*rates[some[0]]][::-1]}
        for some in names.values()
    }
    title, x, y = "Hit rate over capacity", "capacity, share of all pages", "tokens that are hits"
    return plot_lines(lines, folder, title, x, y, about=about, unit=" %")


def over_windows(trace: Trace, options: argparse.Namespace) -> int:
    """Print the hit rates of networks with and without windows, at the same bytes of K and V."""
    print(f"\ntrace: {trace.name}; {len(trace.requests)} requests, {trace.num_pages} different pages")
    rates: dict[str, list[str]] = {name: [] for name in NETWORKS}
    shares = SHARES[1::2] if options.quick else SHARES[1:]
    found = {f"{share:.0%}": hit_rates(trace, max(64, int(trace.num_pages * share))) for share in shares}
    for column in found.values():
        for name, outcome in column.items():
            rates[name].append(f"{outcome['hit_rate']:.1%}")
    first, second = NETWORKS
    ratio = [f"{c[second]['hit_rate'] / max(c[first]['hit_rate'], 1e-9):.2f}" for c in found.values()]
    gone = [str(column[second]["windows_gone"]) for column in found.values()]
    rows = [*([name, *cells] for name, cells in rates.items()), ["ratio", *ratio], ["windows that had left", *gone]]
    title = "hit rate in tokens, by bytes of cached K and V as a share of all"
    show(options.markdown, title, ["network", *found], rows)
    write_json(options.json, trace=trace.name, windows=found)
    return 0


def over_agents(options: argparse.Namespace) -> int:
    """Print what rules of eviction, and hints, find of the texts of agents, and the seconds that the rest takes."""
    mix, costs = AgentMix(sessions=12 if options.quick else AgentMix.sessions), Costs()
    traces = [agent_trace(replace(mix, seed=seed)) for seed in range(1 if options.quick else options.seeds)]
    sizes = [len({page for request in trace for page in request.pages}) for trace in traces]
    print(f"\n{len(traces)} seed(s): {', '.join(str(len(trace)) for trace in traces)} requests, {sizes} pages")
    ruled = {name: (False, name, dict[str, bool]()) for name in rules(costs, {})}
    found = {}
    for title, ways in (("rules of eviction", ruled), ("hints", HINTS)):
        rows: dict[str, list[str]] = {name: [] for name in ways}
        for share in AGENT_SHARES:
            for name, (tier, rule, hints) in ways.items():
                done = [
                    Replay(int(size * share), rules(costs, future_of(trace))[rule], costs, tier, **hints).run(trace)
                    for trace, size in zip(traces, sizes, strict=True)
                ]
                rate = sum(each.hits for each in done) / sum(each.known for each in done)
                seconds = mean(each.again for each in done)
                rows[name] += [f"{rate:.1%}", f"{seconds:,.0f} s"]
                found[f"{name}, {share:.0%}"] = {"rate": rate, "seconds": seconds}
        columns = [f"{share:.0%}{unit}" for share in AGENT_SHARES for unit in ("", ", seconds")]
        show(options.markdown, title, [title, *columns], [[name, *cells] for name, cells in rows.items()])
    write_json(options.json, agents=found)
    return 0
