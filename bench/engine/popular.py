"""Networks that people run, beside every rival: a prompt, a token behind short and long texts, a second turn.

Each engine runs in a process of its own: one that fails, that takes too long, or that the system ends, has the cells
before that, and the reason. A text of 16,384 tokens is not computed where K and V of its first 1,024 can be written
again and again: a step reads as many bytes. Elsewhere it is computed if that takes no longer than `patience` seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from bench.engine.engine_rivals import OpenVino
from bench.engine.llama_api import BATCH, IkLlamaApi, LlamaApi, RepackedIkLlamaApi
from bench.engine.mistral_rs import MistralRs
from bench.engine.streamed import Streamed
from bench.engine.vllm_cpu import VllmFour, VllmHalf
from bench.serving.measured import Measured
from bench.support.blas import set_threads
from bench.support.common import Result
from bench.support.limits import values_told
from bench.support.report import time_text
from kvcache.engine import InferenceEngine
from kvcache.gguf import GgufFile

__all__ = [
    "COLUMNS", "ENGINES", "IkLlamaText", "OpenVinoText", "Plan", "measure_popular", "results_of", "rows_of",
    "verdicts_of",
]

Tokens = npt.NDArray[np.uint32]
Found = dict[str, list[float]]
PROMPT, NEAR, STEPS, TURN, NEW = "prompt", "near", 16, "turn", 64
FAR = "far"
COLUMNS = PROMPT, NEAR, TURN, FAR  # in the order in which they are measured: the longest comes last


class Plan(NamedTuple):
    """Sizes and rounds of a measurement.

    Attributes:
        prompt: tokens of a prompt.
        near, far: tokens behind which a step runs.
        turn: tokens of a conversation, to which `NEW` are added.
        rounds: of each, but for a first one that is not counted.
        patience: seconds that a text of `far` tokens may take.
    """

    prompt: int = 512
    near: int = 1024
    far: int = 16384
    turn: int = 2000
    rounds: int = 3
    patience: float = 120.0

    @property
    def room(self) -> int:
        """Tokens of the longest text."""
        return max(self.far, self.turn, self.prompt) + (self.rounds + 2) * max(STEPS, NEW)

    def titles(self) -> dict[str, str]:
        """The columns of a table."""
        return {
            PROMPT: f"prompt of {self.prompt:,}", NEAR: f"a token at {self.near:,}",
            FAR: f"a token at {self.far:,}", TURN: f"{NEW} new tokens behind {self.turn:,}",
        }


class Text(Protocol):
    """An engine with one text that grows."""

    def start(self, tokens: Tokens) -> None:
        """Run a text with an empty cache, up to the logits of its last token."""

    def extend(self, tokens: Tokens) -> object:
        """Run more tokens, up to the logits of the last."""

    def repeat(self, count: int) -> None:
        """Write K and V of the text `count` more times behind it."""


class Ours(Text):
    """The engine over a GGUF file, K and V in q8, activations in int8."""

    name = "kvcache"

    def __init__(self, path: Path, threads: int, room: int) -> None:
        del threads
        self.engine = InferenceEngine.from_gguf(path, dtype="q8", num_blocks=room // 16 + 4)
        self._tokens = 0

    @staticmethod
    def version() -> str:
        import kvcache

        return str(kvcache.__version__)

    def start(self, tokens: Tokens) -> None:
        self.engine.reset()
        self._tokens = 0
        self.extend(tokens)

    def extend(self, tokens: Tokens) -> None:
        run = self.engine.prefill_from_pos(tokens, self._tokens)
        run.argmax()
        self._tokens += len(tokens)

    def repeat(self, count: int) -> None:
        engine, size = self.engine, self._tokens
        parts = engine.cache.read_layers(engine.seq_id, 0, size)

        def share(cache: Any, sequence: int) -> int:
            cache.allocate(sequence, (count + 1) * size)
            for layer, (keys, values) in enumerate(parts):
                for part in range(count + 1):
                    cache.write(layer, sequence, keys, values, part * size)
            return (count + 1) * size

        engine.reset()
        self._tokens = engine.begin(share)


class LlamaText(Text):
    """llama.cpp, as its server runs it: K and V in f16, flash attention."""

    api: type[LlamaApi] = LlamaApi
    name = LlamaApi.name

    def __init__(self, path: Path, threads: int, room: int) -> None:
        self._api, self._tokens = self.api(path, threads, room, 3), 0

    @classmethod
    def version(cls) -> str:
        return cls.api.version()

    def start(self, tokens: Tokens) -> None:
        self._api.clear()
        self._tokens = 0
        self.extend(tokens)

    def cut(self, count: int) -> None:
        """Keep only the first tokens."""
        self._api.forget(0, count)
        self._tokens = count

    def extend(self, tokens: Tokens) -> int:
        """Run more tokens; the likeliest one behind them."""
        for at in range(0, len(tokens), BATCH):
            part = tokens[at : at + BATCH].tolist()
            for row, token in enumerate(part):
                self._api.put(row, token, self._tokens + row, 0, due=at + row == len(tokens) - 1)
            if status := self._api.run(len(part)):
                raise MemoryError(f"llama_decode returned {status}")
            self._tokens += len(part)
        return int(self._api.logits(len(part) - 1).argmax())

    def repeat(self, count: int) -> None:
        size = self._tokens
        self._api.copy(0, 2)  # sequence 2 keeps the text alone
        for _ in range(count):
            self._api.duplicate(2, 1)
            self._api.move(1, self._tokens)
            self._api.copy(1, 0)
            self._api.forget(1)
            self._tokens += size
        self._api.forget(2)


class IkLlamaText(LlamaText):
    """ik_llama.cpp in the same way."""

    api, name = IkLlamaApi, IkLlamaApi.name


class RepackedIkLlamaText(LlamaText):
    """The same with rows interleaved when it loads them."""

    api, name = RepackedIkLlamaApi, RepackedIkLlamaApi.name


class MistralText(MistralRs):
    """mistral.rs, by the clock of its stream."""

    def __init__(self, path: Path, threads: int, room: int) -> None:
        del room
        super().__init__(path, threads)


class OpenVinoText(OpenVino):
    """OpenVINO by its own clock."""

    name = "OpenVINO"


ENGINES: dict[str, Any] = {
    each.name: each
    for each in (
        Ours, LlamaText, IkLlamaText, RepackedIkLlamaText, MistralText, OpenVinoText, VllmHalf, VllmFour,
    )
}


def repeats(path: Path) -> bool:
    """Whether every layer of a file keeps K and V of all tokens, and nothing else."""
    sizes = (".attention.sliding_window", ".ssm.inner_size", ".shortconv.l_cache", ".kv_lora_rank")
    return not any(key.endswith(size) for key in GgufFile(path).metadata for size in sizes)


class Measurement:
    """The times of one engine over one file.

    Args:
        engine: a class of `ENGINES`.
        vocabulary: tokens that prompts are drawn from.
    """

    def __init__(self, engine: str, path: Path, vocabulary: int, threads: int, plan: Plan) -> None:
        set_threads(threads)
        self._plan, self._vocabulary, self._rng = plan, vocabulary, np.random.default_rng(3)
        self._repeats = repeats(path)
        self._engine: Any = ENGINES[engine](path, threads, plan.room)
        set_threads(threads)

    def _fresh(self, count: int) -> Tokens:
        return self._rng.integers(3, self._vocabulary, count, dtype=np.uint32)

    def _timed(self, call: Callable[[], object], each: int = 1) -> list[float]:
        """Seconds of calls, the first of which does not count."""
        found = []
        for _ in range(self._plan.rounds + 1):
            start = perf_counter()
            call()
            found.append((perf_counter() - start) / each)
        return found[1:]

    def _steps(self) -> None:
        for token in self._fresh(STEPS):
            self._engine.extend(np.array([token], np.uint32))

    def run(self, columns: Sequence[str], known: Found) -> Iterator[tuple[str, list[float]]]:
        """Yield the seconds of each column.

        Args:
            known: the times of other columns.

        Raises:
            TimeoutError: a long text would take too long.
        """
        by_clock = isinstance(self._engine, (Streamed, OpenVino))
        for column in sorted(columns, key=COLUMNS.index):
            if column == FAR and (by_clock or not self._repeats):
                self._check_time(known)
            known = known | {column: self._by_clock(column) if by_clock else self._by_text(column)}
            yield column, known[column]

    def _by_text(self, column: str) -> list[float]:
        plan, engine = self._plan, self._engine
        if column == PROMPT:
            return self._timed(lambda: engine.start(self._fresh(plan.prompt)))
        if column == TURN:
            engine.start(self._fresh(plan.turn))
            return self._timed(lambda: engine.extend(self._fresh(NEW)))
        if column == FAR and self._repeats:
            engine.start(self._fresh(plan.near))
            engine.repeat(plan.far // plan.near - 1)
        else:
            engine.start(self._fresh(plan.far if column == FAR else plan.near))
        return self._timed(self._steps, STEPS)

    def _by_clock(self, column: str) -> list[float]:
        plan, engine, counts = self._plan, self._engine, range(self._plan.rounds + 1)
        if column == PROMPT:
            return [engine.first_token(self._fresh(plan.prompt)) for _ in counts][1:]
        if column == NEAR:
            return [engine.step(self._fresh(plan.near), STEPS) for _ in counts[1:]]
        if column == FAR:
            return [engine.step(self._fresh(plan.far), STEPS)]
        text, found = self._fresh(plan.turn), []
        engine.first_token(text)
        for _ in counts:
            text = np.concatenate([text, self._fresh(NEW)])
            found.append(engine.first_token(text))
        return found[1:]

    def _check_time(self, known: Found) -> None:
        """Raise TimeoutError if a long text would take too long, at the rate of the fastest prompt."""
        plan = self._plan
        if PROMPT in known and min(known[PROMPT]) / plan.prompt * plan.far > plan.patience:
            raise TimeoutError(f"{plan.far:,} tokens take more than {plan.patience:g} s")


def _measure(
    engine: str, path: Path, vocabulary: int, threads: int, plan: Plan, columns: Sequence[str], known: Found
) -> Iterator[tuple[str, list[float]]]:
    return Measurement(engine, path, vocabulary, threads, plan).run(columns, known)


def measure_popular(
    engines: Sequence[str], path: Path, vocabulary: int, threads: int, plan: Plan, limit: float, measured: Measured,
    columns: Sequence[str] = COLUMNS,
) -> tuple[dict[str, Found], dict[str, str]]:
    """The times of each engine, and why others are missing, which is printed too.

    Args:
        limit: seconds that an engine may take.
        columns: those that are measured; each is kept as soon as it is.
    """
    found: dict[str, Found] = {}
    reasons: dict[str, str] = {}
    for engine in engines:
        name = f"{path.parent.name}, {path.stem}, {engine}, {vocabulary} tokens, {threads} threads, {[*plan[:-1]]}"
        kept = {column: measured.found(f"{name}, {column}") for column in COLUMNS}
        found[engine] = {column: times for column, times in kept.items() if times}
        if not (missing := [column for column in columns if column not in found[engine]]):
            continue
        arguments = engine, path, vocabulary, threads, plan, missing, found[engine]
        for column, times in values_told(engine, reasons, limit, _measure, *arguments):
            found[engine][column] = times
            measured.keep(f"{name}, {column}", times)
    return found, reasons


def rows_of(found: dict[str, Found], plan: Plan, reasons: dict[str, str]) -> tuple[list[str], list[list[str]]]:
    """Header and cells: the median of each; the first without one says why, and others are empty."""
    titles, rows = plan.titles(), []
    for engine, times in found.items():
        cells = [time_text(median(times[key])) if key in times else "" for key in titles]
        if "" in cells:
            cells[cells.index("")] = reasons.get(engine, "")
        rows.append([engine, *cells])
    return ["", *titles.values()], rows


def verdicts_of(found: dict[str, Found], plan: Plan) -> str:
    """A line for each column with a rival: those first where one leads."""
    own, lines = found.get(Ours.name, {}), list[tuple[float, str]]()
    for key, title in plan.titles().items():
        others = {engine: median(times[key]) for engine, times in found.items() if engine != Ours.name and key in times}
        if key not in own or not others:
            continue
        best, ours = min(others, key=lambda engine: others[engine]), median(own[key])
        ratio = ours / others[best]
        what = f"{title}: {time_text(ours)} beside {time_text(others[best])} of {best}, {ratio:.2f} times its time"
        lines.append((-ratio, f"{best} leads. {what}" if ratio > 1 else what))
    return "\n".join(f"- {line}" for _, line in sorted(lines))


def results_of(found: dict[str, Found], plan: Plan) -> list[Result]:
    """The times for JSON, a result for each column."""
    return [
        Result(title, {engine: times[key] for engine, times in found.items() if key in times})
        for key, title in plan.titles().items()
    ]
