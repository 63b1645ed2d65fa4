"""`python -m bench quality --tasks`: what an eviction policy leaves of a text that is asked about afterwards.

    needle     one sentence with a number, at a depth of 5 to 95 % of the text, and a question for the number
    needles    eight such sentences with different keys, and a question for one of them
    facts      ten such sentences, at depths of 5 to 95 %, and a question for each, behind one reading of the text
    variables  five lines "VAR a = b" that pass a number on, and a question for the value of the last one
    words      three words that each occur ten times among words that occur once, and a question for them

Tasks are those of RULER (arXiv 2404.06654) and of needle in a haystack, made here by seeds. The text between is English
prose, made of sentences that say nothing of the answer. A policy sees the question only when it has evicted the text
before it, in pieces of 256 tokens: what kvpress calls compression without the question.

Rows that begin with "once" compress the text before the question, by `InferenceEngine.compress`, and ask behind that.

The answer is scored as the tokens that are to come, given those before: the share of answers of which every token is
the most likely one, and their mean log-probability.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.quality.network import log_softmax
from kvcache import EvictionPolicy, InferenceEngine
from kvcache.engine import Transformer
from kvcache.policies import TOVA, AdaKV, ExpectedAttention, KeyDiff, KVzip, SnapKV

__all__ = ["HEADER", "POLICIES", "TASKS", "Question", "make_questions", "measure", "rows", "run", "stretched"]

PIECE, SINKS = 256, 4
KEYS = (
    "apple", "river", "castle", "winter", "garden", "silver", "window", "mountain", "bridge", "candle", "forest",
    "ocean",
)
_WHO = ("The baker", "A teacher", "My neighbour", "The old sailor", "A young painter", "The doctor", "Her brother")
_DID = ("walked along", "looked at", "talked about", "drew a map of", "remembered", "wrote of", "waited near")
_WHAT = ("the quiet road", "the market", "a small house", "the harbour", "the long bridge", "an empty field", "a hill")
_WHEN = ("in the morning", "before the rain", "after dinner", "on Sunday", "late in the autumn", "for an hour", "again")
_RARE = tuple(f"{a}{b}" for a in ("bar", "cor", "den", "fal", "gor", "hul", "mar") for b in ("dine", "mot", "tick"))

# name -> function from the budget in tokens and the number of layers to a policy, or to the tokens that each query
# chooses (`sparse_tokens`, all tokens stay); None: all tokens stay, and are attended to.
POLICIES: dict[str, Callable[[int, int], Any] | None] = {
    "all tokens": None,
    "window": lambda budget, layers: EvictionPolicy.SlidingWindow(budget - SINKS, SINKS),
    "H2O": lambda budget, layers: EvictionPolicy.H2O(),
    "SnapKV": lambda budget, layers: SnapKV(),
    "SnapKV per head": lambda budget, layers: SnapKV(per_head=True),
    "AdaKV of SnapKV": lambda budget, layers: AdaKV(SnapKV()),
    "TOVA": lambda budget, layers: TOVA(),
    "KeyDiff": lambda budget, layers: KeyDiff(),
    "AdaKV of expected attention": lambda budget, layers: AdaKV(ExpectedAttention()),
    "once: KVzip": lambda budget, layers: KVzip(PIECE),
    "once: KVzip by layers": lambda budget, layers: KVzip(PIECE, layerwise=True),
    "once: expected attention per head": lambda budget, layers: ExpectedAttention(per_head=True),
    "once: AdaKV of expected attention": lambda budget, layers: AdaKV(ExpectedAttention()),
    "once: SnapKV per head": lambda budget, layers: SnapKV(per_head=True),
    "once: AdaKV of SnapKV": lambda budget, layers: AdaKV(SnapKV()),
    "chosen by each query": lambda budget, layers: budget,
}
HEADER = ["policy", "budget", "tokens kept", "K and V of them"]
ONCE = "once: "  # rows that compress the text before the question
Made = tuple[list[str], list[tuple[str, str]]]  # lines that a text has, and pairs of a question and its answer


class Question(NamedTuple):
    """A text and its end, the answer.

    Attributes:
        tokens: of both, uint32 `(n,)`.
        asked: where the question begins.
        answer: where the answer begins.
    """

    tokens: npt.NDArray[np.uint32]
    asked: int
    answer: int


def _prose(rng: random.Random) -> Iterator[str]:
    while True:
        yield " ".join((rng.choice(_WHO), rng.choice(_DID), rng.choice(_WHAT), rng.choice(_WHEN))) + "."


def _facts(rng: random.Random, count: int = 10) -> Made:
    keys, number = rng.sample(KEYS, count), [str(rng.randrange(1000, 10000)) for _ in range(count)]
    lines = [f"The magic number of the {key} is {value}." for key, value in zip(keys, number, strict=True)]
    asked = [f"Question: what is the magic number of the {key}?\nThe magic number of the {key} is" for key in keys]
    return lines, [(question, f" {value}") for question, value in zip(asked, number, strict=True)]


def _one_of_facts(rng: random.Random, count: int) -> Made:
    lines, pairs = _facts(rng, count)
    return lines, [rng.choice(pairs)]


def _variables(rng: random.Random) -> Made:
    names, value = rng.sample("ABCDEFGHKLMNPRSTUVWXYZ", 5), rng.randrange(1000, 10000)
    lines = [f"VAR {names[0]} = {value}."]
    lines += [f"VAR {name} = VAR {before}." for before, name in pairwise(names)]
    question = f"Question: what is the value of VAR {names[-1]}?\nThe value of VAR {names[-1]} is"
    return lines, [(question, f" {value}")]


def _words(rng: random.Random) -> Made:
    chosen = rng.sample(_RARE, 3)
    lines = [f"Remember the word {word}." for word in chosen for _ in range(10)]
    rng.shuffle(lines)
    first, second, third = chosen
    question = f"Question: which three words were to be remembered?\nThe words are {first}, {second} and"
    return lines, [(question, f" {third}")]


TASKS: dict[str, Callable[[random.Random], Made]] = {
    "needle": partial(_one_of_facts, count=1), "needles": partial(_one_of_facts, count=8), "facts": _facts,
    "variables": _variables, "words": _words,
}


def make_questions(task: str, tokenizer: Any, length: int, count: int) -> list[Question]:
    """Make the questions about `count` texts of about `length` tokens; depths of the lines are spread over them.

    Raises:
        SystemExit: a length that has no room for the lines.
    """
    found = []
    for number in range(count):
        rng = random.Random(f"{task} {number}")
        lines, pairs = TASKS[task](rng)
        encoded = [list(tokenizer.encode(f" {line}").ids) for line in lines]
        begin = list(tokenizer.encode("Read this text.\n").ids)
        ends = [tuple(list(tokenizer.encode(part).ids) for part in (f"\n{asked}", answer)) for asked, answer in pairs]
        room = length - sum(map(len, (begin, *encoded))) - max(len(asked) + len(answer) for asked, answer in ends)
        if room < length // 8:
            raise SystemExit(f"--context: expected more than {length} tokens for the task {task}, got {length}")
        prose, source = [], _prose(rng)
        while sum(map(len, prose)) < room:
            prose.append(list(tokenizer.encode(f" {next(source)}").ids))
        prose.pop()
        places = _places(task, rng, len(prose), len(lines), number / max(1, count - 1))
        for place, line in reversed(list(zip(places, encoded, strict=True))):
            prose.insert(place, line)
        text = begin + [token for sentence in prose for token in sentence]
        found += [
            Question(np.array(text + asked + answer, np.uint32), len(text), len(text + asked)) for asked, answer in ends
        ]
    return found


def _places(task: str, rng: random.Random, sentences: int, lines: int, turn: float) -> list[int]:
    """The sentences before which the lines of a text stand, ascending; `turn`: its number among the texts, 0 to 1."""
    if lines == 1:  # one line at each depth in turn
        return [round(sentences * (5 + 90 * turn) / 100)]
    if task == "facts":
        return [round(sentences * (5 + 90 * line / (lines - 1)) / 100) for line in range(lines)]
    places = sorted(rng.sample(range(sentences + 1), min(lines, sentences + 1)))
    return places + [sentences] * (lines - len(places))


def stretched(engine: InferenceEngine, factor: float) -> InferenceEngine:
    """An engine whose positions go `factor` times as far, by YaRN (arXiv 2309.00071) without further training.

    Raises:
        SystemExit: the checkpoint has another RoPE than the plain one.
    """
    model, config = engine.model, engine.config
    if not isinstance(model, Transformer) or config.rope.kind != "default" or config.window_rope is not None:
        raise SystemExit(f"--stretch: expected a checkpoint with plain RoPE, got {config.rope.kind}")
    before = config.max_position_embeddings
    rope = replace(
        config.rope, kind="yarn", factor=factor, original_positions=before, attention_factor=0.1 * math.log(factor) + 1
    )
    config = replace(config, rope=rope, max_position_embeddings=int(factor * before))
    found = InferenceEngine(Transformer(config, model.weights, model.activations), num_blocks=1)
    found.requests.text = engine.requests.text
    return found


def measure(
    asking: InferenceEngine, questions: dict[str, list[Question]], length: int, policy: Any, share: float,
    say: Callable[[str], None], once: bool = False,
) -> dict[str, Any]:
    """The figures of one policy at one share of the tokens, over all tasks.

    Args:
        asking: an engine without eviction, which has the tokenizer.
        questions: of each task.
        policy: a function of the budget and the number of layers; None: all tokens stay.
        once: whether it compresses the text before the question.
    """
    model = asking.model
    budget, options = max(2 * SINKS, round(share * length)), dict[str, Any](prefill_chunk=PIECE)
    chosen = None if policy is None else policy(budget, model.config.num_layers)
    if chosen is None or isinstance(chosen, int):
        options["num_blocks"] = -(-length // 16) + 1  # every token stays
    if isinstance(chosen, int):
        options["sparse_tokens"] = chosen
    elif chosen is not None and not once:
        options |= {"eviction_policy": chosen, "kv_budget": budget}
    engine, tasks, kept = InferenceEngine(model, **options), {}, []
    engine.requests.text = asking.requests.text  # a policy may say something
    before, after, repeats = 0, 0, chosen is None or isinstance(chosen, int)  # texts that lose no token
    for task, asked in questions.items():
        right, nats, text = 0, list[float](), np.empty(0, np.uint32)
        for number, question in enumerate(asked):
            say(f"{task}, question {number + 1} of {len(asked)}")
            answer, rows, start = question.tokens[question.answer :], [], 0
            if once:
                prefix, start = engine.compress(question.tokens[: question.asked], chosen, ratio=share), question.asked
                before, after = before + prefix.whole_nbytes, after + prefix.nbytes
                engine.reset(prefix)
            elif repeats and np.array_equal(text, question.tokens[: question.asked]):
                start = question.asked
            else:
                engine.reset()
            text = question.tokens[: question.asked]
            rows.append(engine.prefill_from_pos(question.tokens[start : question.answer], start))
            layers, heads = range(model.config.num_layers), range(model.config.num_kv_heads)
            kept.append(np.mean([engine.alive_tokens(layer, head) for layer in layers for head in heads]))
            rows += [engine.decode_step(int(token), engine.num_tokens) for token in answer[:-1]]
            logits = np.array(rows, np.float64)
            right += bool((logits.argmax(axis=1) == answer).all())
            nats += log_softmax(logits)[np.arange(len(answer)), answer].tolist()
        tasks[task] = {"right": right / len(asked), "nats": float(np.mean(nats)), "questions": len(asked)}
    size = after / before if once else float(np.mean(kept)) / length
    return {"share": share, "kept": float(np.mean(kept)), "size": size, "tasks": tasks}


def _said(say: Callable[[str], None], where: str, text: str) -> None:
    say(f"{where}: {text}")


def rows(figures: list[dict[str, Any]]) -> list[list[str]]:
    """The rows of the table: of each task the answers that are right, and the mean log-probability of their tokens."""
    return [
        [
            f["policy"], f"{f['share']:.0%}", f"{f['kept']:,.0f}", f"{f['size']:.0%}",
            *(f"{100 * each['right']:.0f} %, {each['nats']:.2f}" for each in f["tasks"].values()),
        ]
        for f in figures
    ]


def run(
    engine: InferenceEngine, tasks: Sequence[str], length: int, count: int, shares: Sequence[float],
    policies: dict[str, Any], say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """All policies at all shares, as they come; what was measured until Ctrl-C."""
    questions = {task: make_questions(task, engine.tokenizer, length, count) for task in tasks}
    for name, policy in policies.items():
        for share in shares if policy is not None else (1.0,):
            told = partial(_said, say, f"{name}, {share:.0%}")
            try:
                figures = measure(engine, questions, length, policy, share, told, name.startswith(ONCE))
            except KeyboardInterrupt:
                say("stopped")
                return
            say("")
            yield {"policy": name} | figures
