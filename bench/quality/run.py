"""`python -m bench quality`: formats, outliers, eviction, endless text and prefix reuse, measured end to end.

Everything runs through the engine and its packed, paged cache; every table has a run over the f32 cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.quality import (
    checkpoint,
    endless,
    eviction,
    formats,
    haystacks,
    heldout,
    outliers,
    pictures,
    presses,
    reuse,
)
from bench.quality.network import demo_model
from bench.quality.parts import Parts
from bench.quality.prompts import make_prompts
from bench.quality.texts import KINDS
from bench.support.report import show, write_json
from kvcache import InferenceEngine
from kvcache.core.rowformat import name_of
from kvcache.demo import DIRECTORY
from kvcache.kernels.kernels import FORMATS

__all__ = ["add_arguments", "main"]

PARTS = ("formats", "outliers", "eviction", "endless", "reuse", "kvpress")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--only", action="append", choices=PARTS, help="run only this part (may be repeated)")
    parser.add_argument("--library", type=Path, help="standard library that has the held-out modules")
    parser.add_argument("--tokens", type=int, help="tokens of the formats table (default 51,200; --model: 40,960)")
    parser.add_argument("--model", help="one table of all formats for this checkpoint, or smollm2, and nothing else")
    parser.add_argument("--calibrate", default="auto", help="--model: a text or a saved calibration (default: auto)")
    parser.add_argument(
        "--format", action="append", default=[], metavar="MODULE:CLASS",
        help="--model (by default the demo's): also a storage format written in Python, or two of them, of keys and of "
        "values, with a slash between (may be repeated)",
    )
    parser.add_argument(
        "--policy", action="append", default=[], metavar="MODULE:CLASS",
        help="--model (by default the demo's): also an eviction policy written in Python (may be repeated)",
    )
    parser.add_argument("--context", type=int, default=2048, help="--model: tokens of a window (default 2,048)")
    parser.add_argument(
        "--texts", nargs="+", metavar="KIND|FILE", help=f"--model: kinds of text ({', '.join(KINDS)}), or files of it "
        "(default: documentation, code and chats; licences in their place where the checkpoint has no template)",
    )
    parser.add_argument(
        "--budgets", nargs="+", type=_share, metavar="SHARE",
        help="--policy and --tasks: the shares of the tokens that stay (default 0.1 0.2 0.4)",
    )
    parser.add_argument(
        "--tasks", nargs="*", type=_task, metavar="TASK", help="--model (by default the demo's): answers to questions "
        f"about long texts under eviction policies, those of --policy too: {', '.join(haystacks.TASKS)}; alone: all",
    )
    parser.add_argument(
        "--sparse", nargs="+", type=_count, default=[], metavar="N",
        help="--model: also rows whose queries choose N tokens (`sparse_tokens`), over f32 and over q4",
    )
    parser.add_argument("--questions", type=_count, default=10, help="--tasks: questions of each task (default 10)")
    parser.add_argument(
        "--stretch", type=_factor, default=1.0, metavar="X", help="--tasks: positions X times as far, by YaRN"
    )
    parser.add_argument("--keep", type=Path, help="--model: a folder of what was measured, from which a call goes on")
    parser.add_argument(
        "--rows", nargs="+", metavar="ROW", help="--model (by default the demo's): these rows, by name, and f32"
    )
    parser.add_argument("--stream", type=int, help="tokens of endless text (default 100,000)")
    parser.add_argument("--prompts", type=int, help="prompts of the eviction table (default 8)")


def _checked(kind: Callable[[str], Any], expected: str, is_one: Callable[[Any], bool]) -> Callable[[str], Any]:
    """The type of an option that takes some values alone."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not is_one(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")
        return value

    return parse


_share = _checked(float, "a share above 0 and below 1", lambda value: 0 < value < 1)
_factor = _checked(float, "a factor of 1 to 64", lambda value: 1 <= value <= 64)
_task = _checked(str, f"some of {', '.join(haystacks.TASKS)}", haystacks.TASKS.__contains__)
_count = _checked(int, "at least 1", lambda value: value >= 1)


class _Run(Parts):
    """One run of the bench, with its model and text."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.model, self.tokenizer = demo_model()
        self.text = heldout.load(self.tokenizer, options.library)

    def verdicts(self, found: list[dict[str, Any]]) -> None:
        self.missed += print_verdicts(found)

    def formats(self) -> None:
        names = list(formats.FORMATS)
        total = self.options.tokens or (4_096 if self.quick else 51_200)
        speed = formats.speeds(self.model, self.text, 1024, names, 2 if self.quick else 6)
        found = {}
        for context in (1024,) if self.quick else (1024, 2048):

            def tell(so_far: dict[str, Any], count: int, context: int = context) -> None:
                title = f"Formats at context {context}, windows so far: {count}"
                self.table(title, [*formats.HEADER, "decode tok/s"], formats.rows(so_far, speed))

            figures = found[str(context)] = formats.measure(self.model, self.text, context, total, names, tell)
            tokens = figures["f32"]["tokens"]
            self.table(
                f"Formats at context {context}, {tokens:,} tokens", [*formats.HEADER, "decode tok/s"],
                formats.rows(figures, speed),
            )
            self.verdicts(formats.verdicts(figures))
        self.data["formats"] = {"figures": found, "decode": speed}
        if self.options.plot:
            print(pictures.draw_formats(found, self.options.plot))

    def outliers(self) -> None:
        names = [name for name, options in formats.FORMATS.items() if "residual_length" not in options]
        figures = outliers.measure(512 if self.quick else 4096, names)
        self.data["outliers"] = figures
        self.table(
            f"Synthetic attention, head_dim {outliers.DIM}: 1 key channel in {outliers.EVERY} times {outliers.FACTOR}",
            outliers.HEADER, outliers.rows(figures),
            "Random keys and values have no structure that attention could use: errors on text are far smaller.",
        )

    def eviction(self) -> None:
        count = self.options.prompts or (1 if self.quick else 8)
        prompts = make_prompts(self.text, self.tokenizer, count)
        asked = [("all", 100, dtype) for dtype in ("f32", "q4")]
        budgets = (10, 40) if self.quick else eviction.BUDGETS
        for dtype, some in (("f32", budgets), ("q4", (20,) if self.quick else (10, 20, 40))):
            for policy in eviction.POLICIES:
                if dtype == "f32" or not policy.startswith("random"):
                    asked += [(policy, percent, dtype) for percent in some]
        found: list[dict[str, Any]] = []
        self.table(
            f"Eviction: {count} prompts of {eviction.LENGTH:,} tokens, pieces of {eviction.CHUNK}", eviction.HEADER,
            _each(found, (eviction.measure(self.model, prompts, *each) for each in asked), eviction.rows),
            lambda: f"perplexity: {found[0]['tokens']:,} tokens of continuation; names: {found[0]['names']}, each seen "
            "once. A piece attends before anything is evicted, so memory is that of the budget and one piece.",
        )
        pieces = [] if self.quick else self._pieces(prompts[:3])
        survivors = eviction.survivors(self.model, prompts[0], 20)
        shares = [[name, f"{100 * share:.1f} %"] for name, share in survivors["share"].items()]
        self.table(
            "Share of the attention of a prompt's last 128 tokens on what is kept: 20 % of the prompt",
            ["policy", "of the attention"], shares,
        )
        kept = {"kept": survivors["kept"], "share": survivors["share"]}
        self.data["eviction"] = {"figures": found, "pieces": pieces, "survivors": kept}
        if self.options.plot:
            print(pictures.draw_budgets(found, self.options.plot))
            print(pictures.draw_mass(survivors, self.options.plot))

    def _pieces(self, prompts: list[Any]) -> list[dict[str, Any]]:
        """The same budget with other lengths of a piece: in longer ones a token sees more before the eviction."""
        found: list[dict[str, Any]] = []
        new = (
            eviction.measure(self.model, prompts, policy, 20, chunk=chunk)
            for policy in ("H2O", "window")
            for chunk in (8, 32, 128, 512)
        )
        rows = _each(found, new, lambda all: [[f["policy"], f"{f['chunk']}", f"{f['perplexity']:.3f}"] for f in all])
        self.table("The length of a piece, budget 20 %", ["policy", "piece", "perplexity"], rows)
        return found

    def endless(self) -> None:
        total = self.options.stream or (8_192 if self.quick else 100_000)
        fresh = endless.reference(self.model, self.text.tokens[: total + 1])
        lengths = {name: total if name.startswith("StreamingLLM") else min(total, 32_768) for name in endless.RUNS}
        runs: list[dict[str, Any]] = []
        new = (endless.measure(self.model, self.text, name, length) for name, length in lengths.items())
        self.table(
            f"Endless text: {endless.SINKS} sinks and {endless.WINDOW} tokens of window, pieces of {endless.CHUNK}",
            endless.HEADER, _each(runs, new, lambda all: endless.rows(all, fresh)),
            f"fresh: windows of 2,048 tokens of the same text that overlap by half, perplexity "
            f"{np.exp(-fresh.mean(dtype=np.float64)):.2f} over all {len(fresh):,} tokens; a bin has "
            f"{endless.BIN:,} tokens.",
        )
        self.verdicts(endless.verdicts(runs, fresh))
        self.data["endless"] = {
            "fresh": endless.bins(fresh).tolist(),
            "runs": [
                {"name": run["name"], "bins": endless.bins(run["scores"]).tolist(), **endless.figures(run, fresh)}
                for run in runs
            ],
        }
        if self.options.plot:
            print(pictures.draw_stream(runs, fresh, self.options.plot))

    def reuse(self) -> None:
        splits = 25 if self.quick else 120
        found: list[tuple[str, Any]] = []
        new = ((dtype, reuse.measure(self.model, self.text, dtype, splits)) for dtype in FORMATS)
        self.table(
            "Prefix reuse: logits and 32 greedy tokens of a hit and of a cold run", reuse.HEADER,
            _each(found, new, lambda all: reuse.rows(dict(all))),
            "A row has the same bits whatever rows it is computed with, so a hit is the cold run.",
        )
        self.data["reuse"] = dict(found)

    def kvpress(self) -> None:
        found = presses.measure(self.model, make_prompts(self.text, self.tokenizer, 1 if self.quick else 4))
        self.data["kvpress"] = found
        if isinstance(found, str):
            print(f"\nkvpress: {found}")
        else:
            self.table("The same policies in kvpress, on transformers", presses.HEADER, presses.rows(found))


def _each(found: list[Any], new: Iterable[Any], rows: Callable[[list[Any]], list[list[str]]]) -> Iterator[list[str]]:
    """The row of each of some figures as it comes.

    Args:
        found: gets the figures.
        new: makes them.
        rows: the rows of all figures so far.
    """
    for one in new:
        found.append(one)
        yield rows(found)[-1]


def _checkpoint(options: argparse.Namespace) -> int:
    def tell(so_far: dict[str, Any], count: int) -> None:
        checkpoint.progress("")
        show(options.markdown, f"Windows so far: {count}", checkpoint.HEADER, checkpoint.rows(so_far))

    figures, text = checkpoint.measure(options, checkpoint.progress, tell)
    checkpoint.progress("")
    show(options.markdown, f"K and V of {text}", checkpoint.HEADER, checkpoint.rows(figures))
    if not options.quick and not options.rows:
        for line in checkpoint.absent(checkpoint.place_of(options.model)):
            print(line)
    if options.plot:
        own = checkpoint.own_runs(options, options.context)
        print(pictures.draw_front(figures, options.plot, text, own))
    if options.model == "smollm2" and not options.quick:
        print_verdicts(checkpoint.verdicts(figures))
    write_json(options.json, text=text, figures=figures)
    return 0


def _tasks(options: argparse.Namespace) -> int:
    """Questions about long texts, for policies of the library and of the command line, or for `--rows` of them."""
    path = checkpoint.place_of(options.model)
    engine = InferenceEngine.from_pretrained(path, num_blocks=1)
    own = [checkpoint.load_own(place, "policy") for place in options.policy]
    policies = haystacks.POLICIES | {name_of(each): _always(each) for each in own}
    if unknown := set(options.rows or ()) - set(policies):
        raise SystemExit(f"--rows: expected some of {'; '.join(policies)}, got {'; '.join(sorted(unknown))}")
    chosen = {name: each for name, each in policies.items() if not options.rows or name in options.rows}
    if options.stretch > 1:
        engine = haystacks.stretched(engine, options.stretch)
    length = min(options.context, engine.config.max_position_embeddings - 16)
    count = min(2, options.questions) if options.quick else options.questions
    tasks, shares = options.tasks or list(haystacks.TASKS), options.budgets or checkpoint.SHARES
    stretch = f", positions {options.stretch:g} times as far by YaRN" if options.stretch > 1 else ""
    text = f"{path.name}{stretch}, {count} texts of {length:,} tokens for each task"
    note = "right answers, and the mean log-probability of their tokens"
    found: list[dict[str, Any]] = []
    new = haystacks.run(engine, tasks, length, count, shares, chosen, checkpoint.progress)
    rows = _each(found, new, haystacks.rows)
    show(options.markdown, f"Questions about {text}", [*haystacks.HEADER, *tasks], rows, note)
    if not found:
        raise SystemExit("stopped before the first policy was done")
    if options.plot:
        print(pictures.draw_tasks(found, options.plot, text))
    write_json(options.json, text=text, figures=found)
    return 0


def _always(policy: Any) -> Callable[[int, int], Any]:
    return lambda budget, layers: policy


def print_verdicts(found: list[dict[str, Any]]) -> int:
    """Print bounds beside what was measured; the number of those that were missed."""
    for v in found:
        shown = "{:.2g}" if v["figure"] == "kl" else "{:.2%}"
        reached, asked = shown.format(v["value"]), shown.format(v["bound"])
        what = {"kl": "KL divergence", "rise": "more perplexity", "slower": "more time per token"}[v["figure"]]
        print(f"{v['format']}: {what}, {reached}, asked at most {asked}: {'met' if v['met'] else 'MISSED'}")
    return sum(not v["met"] for v in found)


def main(options: argparse.Namespace) -> int:
    """Run the parts, print their tables, write JSON and pictures."""
    if options.tasks is not None:
        options.model = options.model or str(DIRECTORY)
        return _tasks(options)
    if options.model or options.format or options.policy or options.rows or options.texts or options.keep:
        options.model = options.model or str(DIRECTORY)
        return _checkpoint(options)
    run = _Run(options)
    print(run.text)
    run.run(options.only or PARTS, text=str(run.text))
    return 0
