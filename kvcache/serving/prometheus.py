"""The counters of an engine in the text format of Prometheus, version 0.0.4, written without its library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import fields
from itertools import accumulate
from typing import Any

from kvcache.serving.stats import BatchStats, Histogram, NamespaceStats

__all__ = ["HELP", "exposition", "expositions", "head"]

Labels = tuple[tuple[str, Any], ...]  # names and values

# What each number is, by the names of the fields; those of a namespace begin with that word.
HELP = {
    "waiting": "Requests that wait for memory or a place.",
    "running": "Requests that run.",
    "finished": "Requests that have ended, for any reason.",
    "steps": "Passes of the network.",
    "prefilled_tokens": "Tokens that ran for prompts, and again after a preemption.",
    "new_tokens": "Tokens that were drawn.",
    "cached_tokens": "Tokens of prompts that did not run, since they were cached.",
    "preemptions": "Times that a request gave up its memory and began again.",
    "draft_tokens": "Draft tokens that ran.",
    "accepted_tokens": "Draft tokens that were drawn.",
    "free_blocks": "Blocks of keys and values without content.",
    "claimed_blocks": "Blocks of requests that run, and of pins.",
    "cached_blocks": "Blocks of cached prefixes that nothing else holds.",
    "pinned_blocks": "Claimed blocks of pinned prefixes; those of several pins count for each.",
    "queued": "Seconds from the arrival of a request until its first token ran.",
    "first_token": "Seconds from the arrival of a request until its first new token.",
    "gap": "Seconds between two new tokens of a request.",
    "events_told": "Blocks that routers were told of as stored or removed.",
    "events_dropped": "Blocks that routers were not told of, since too many came at once.",
    "event_snapshots": "Lists of all blocks that routers were sent.",
    "event_replays": "Answers to routers that had missed events.",
    "hints": "Hints about cached texts that were taken.",
    "prefetched_tokens": "Tokens that were read from tiers for hints, before a request.",
    "http_responses": "Answers over HTTP, by their status.",
    "adapter_requests": "Requests to the network by the adapter that they named as their model; empty: none.",
    "model_loads": "Loads of each model.",
    "namespace_cached_tokens": "Tokens of a namespace that are cached now.",
    "namespace_queries": "Requests of a namespace that began.",
    "namespace_hits": "Requests of a namespace that found a part of their prompt.",
    "namespace_query_tokens": "Tokens of the prompts of a namespace.",
    "namespace_hit_tokens": "Tokens of the prompts of a namespace that were cached.",
    "namespace_evicted_tokens": "Tokens of a namespace that left the cache to make room.",
    "namespace_pinned_tokens": "Tokens of a namespace that are pinned now.",
}
# The others only grow.
_GAUGES = {
    "waiting", "running", "free_blocks", "claimed_blocks", "cached_blocks", "pinned_blocks", "namespace_cached_tokens",
    "namespace_pinned_tokens",
}


def exposition(
    stats: BatchStats, namespaces: Mapping[Hashable, NamespaceStats], **counters: tuple[str, Mapping[Any, int]]
) -> str:
    """Write the results of `BatchEngine.stats` and `namespace_stats`, a line for each number.

    Names are those of the fields: `kvcache_running` of a gauge, `kvcache_new_tokens_total` of a counter,
    `kvcache_queued_seconds` of a histogram, `kvcache_namespace_hits_total{namespace="alice"}` of a
    namespace; the label of the namespace None is empty, and names of one text count together.

    Args:
        stats, namespaces: as above.
        counters: more of them, by their name, which `HELP` may have: a label, and the number for each value of it.
    """
    return expositions({None: (stats, namespaces)}, **counters)


def expositions(
    engines: Mapping[str | None, tuple[BatchStats, Mapping[Hashable, NamespaceStats]]],
    **counters: tuple[str, Mapping[Any, int]],
) -> str:
    """As `exposition` of several engines, whose lines have the label `model`.

    Args:
        engines: the results by the name of each model; None: its lines have no such label.
        counters: see `exposition`; those of no engine.
    """
    lines: list[str] = []
    labels: dict[str | None, Labels] = {name: () if name is None else (("model", name),) for name in engines}
    for name in (field.name for field in fields(BatchStats)):
        values = [(labels[model], getattr(stats, name)) for model, (stats, _) in engines.items()]
        if not values:
            break
        lines += _histograms(name, values) if isinstance(values[0][1], Histogram) else _lines(name, values)
    samples: dict[str, list[tuple[Labels, int]]] = {
        name: [(((label, value),), number) for value, number in numbers.items()]
        for name, (label, numbers) in counters.items()
    }
    for name in (field.name for field in fields(NamespaceStats)):
        samples[f"namespace_{name}"] = [
            ((*labels[model], ("namespace", space)), getattr(counts, name))
            for model, (_, spaces) in engines.items() for space, counts in spaces.items()
        ]
    for name, found in sorted(samples.items()):
        lines += _lines(name, found)
    return "\n".join([*lines, ""])


def head(full: str, kind: str, text: str | None) -> list[str]:
    """The lines before a metric: what it is, where that is known, and its kind."""
    return [*([] if text is None else [f"# HELP {full} {text}"]), f"# TYPE {full} {kind}"]


def _lines(name: str, samples: Iterable[tuple[Labels, int]]) -> list[str]:
    """The lines of a number; those whose labels have one text count together."""
    kind, full = ("gauge", f"kvcache_{name}") if name in _GAUGES else ("counter", f"kvcache_{name}_total")
    totals: Counter[str] = Counter()
    for labels, number in samples:
        totals[_written(labels)] += number
    return [*head(full, kind, HELP.get(name)), *(f"{full}{label} {value}" for label, value in totals.items())]


def _histograms(name: str, samples: Iterable[tuple[Labels, Histogram]]) -> list[str]:
    """The lines of histograms: the measurements up to each bound."""
    full = f"kvcache_{name}_seconds"
    lines = head(full, "histogram", HELP.get(name))
    for labels, found in samples:
        for bound, count in zip((*found.bounds, "+Inf"), accumulate(found.counts), strict=True):
            lines.append(f"{full}_bucket{_written((*labels, ('le', bound)))} {count}")
        own = _written(labels)
        lines += [f"{full}_sum{own} {found.total}", f"{full}_count{own} {sum(found.counts)}"]
    return lines


def _written(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}" if labels else ""


def _escaped(value: Any) -> str:
    return ("" if value is None else str(value)).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
