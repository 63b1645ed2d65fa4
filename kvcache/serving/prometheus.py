"""The counters of an engine in the text format of Prometheus, version 0.0.4, written without its library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import fields
from itertools import accumulate
from typing import Any

from kvcache.serving.stats import BatchStats, Histogram, NamespaceStats

__all__ = ["exposition"]

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
    lines: list[str] = []
    for name in (field.name for field in fields(BatchStats)):
        value = getattr(stats, name)
        is_many = isinstance(value, Histogram)
        lines += _histogram(f"kvcache_{name}_seconds", value) if is_many else _lines(name, [("", value)])
    for name in (field.name for field in fields(NamespaceStats)):
        counters[f"namespace_{name}"] = "namespace", {
            space: getattr(counts, name) for space, counts in namespaces.items()
        }
    for name, (label, numbers) in sorted(counters.items()):
        totals: Counter[str] = Counter()  # of names that are different objects and the same text
        for value, number in numbers.items():
            totals[f'{{{label}="{_escaped(value)}"}}'] += number
        lines += _lines(name, totals.items())
    return "\n".join([*lines, ""])


def _lines(name: str, samples: Iterable[tuple[str, int]]) -> list[str]:
    kind, full = ("gauge", f"kvcache_{name}") if name in _GAUGES else ("counter", f"kvcache_{name}_total")
    return [f"# TYPE {full} {kind}", *(f"{full}{label} {value}" for label, value in samples)]


def _escaped(value: Any) -> str:
    return ("" if value is None else str(value)).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _histogram(name: str, found: Histogram) -> list[str]:
    """Its lines: the measurements up to each bound."""
    counts = accumulate(found.counts)
    buckets = [f'{name}_bucket{{le="{b}"}} {n}' for b, n in zip((*found.bounds, "+Inf"), counts, strict=True)]
    return [f"# TYPE {name} histogram", *buckets, f"{name}_sum {found.total}", f"{name}_count {sum(found.counts)}"]
