"""The counters of an engine in the text format of Prometheus, version 0.0.4, written without its library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import fields
from itertools import accumulate
from typing import Any

from kvcache.serving.stats import BatchStats, Histogram, NamespaceStats

__all__ = ["exposition", "expositions"]

Labels = tuple[tuple[str, Any], ...]  # names and values

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
        counters: more of them, by their name: a label, and the number for each value of the label.
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


def _lines(name: str, samples: Iterable[tuple[Labels, int]]) -> list[str]:
    """The lines of a number; those whose labels have one text count together."""
    kind, full = ("gauge", f"kvcache_{name}") if name in _GAUGES else ("counter", f"kvcache_{name}_total")
    totals: Counter[str] = Counter()
    for labels, number in samples:
        totals[_written(labels)] += number
    return [f"# TYPE {full} {kind}", *(f"{full}{label} {value}" for label, value in totals.items())]


def _histograms(name: str, samples: Iterable[tuple[Labels, Histogram]]) -> list[str]:
    """The lines of histograms: the measurements up to each bound."""
    full = f"kvcache_{name}_seconds"
    lines = [f"# TYPE {full} histogram"]
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
