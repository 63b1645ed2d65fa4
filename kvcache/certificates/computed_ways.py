"""The ways in which a prompt is computed: `ways_of` has a row for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.certificates.answer_digests import LogitsDigests, Record
from kvcache.certificates.hits import HITS, Hit
from kvcache.certificates.seeded_prompts import Case
from kvcache.certificates.subject import Subject, length_of
from kvcache.drafts.draft_pace import MOST_DRAFTS
from kvcache.engine.cached import PrefixCachedEngine
from kvcache.kernels.threads import get_num_threads, set_num_threads
from kvcache.sampling.sampling import SamplingParams
from kvcache.serving.batch import BatchEngine
from kvcache.tiers.directory import DirectoryTier
from kvcache.tiers.tiers import Tiers

__all__ = ["Outcome", "Way", "cold", "ways_of"]

_PIECE = 19  # tokens: pieces end inside of blocks
_ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
_TIER_BYTES = 4 << 30
_TIER_SECONDS = 30.0  # for writing and for reading: a busy disk makes no difference of a hit


class Outcome(NamedTuple):
    """A prompt in one way.

    Attributes:
        record: its answer; None: the way did not happen.
        note: why it did not, or what happened.
    """

    record: Record | None
    note: str = ""


class Way(NamedTuple):
    """A row of the table.

    Attributes:
        name: of the way.
        run: computes a case in this way. `want` is the record of the cold text.
    """

    name: str
    run: Callable[[Subject, Case, Record], Outcome]


def cold(subject: Subject, case: Case) -> Record:
    """A prompt alone, from its start, with the number of threads that is set."""
    return subject.scored(case, subject.engine(case))


def ways_of(subject: Subject, most_threads: int) -> list[Way]:
    """The ways of a network, the most telling first."""
    counts = sorted({1, *(2**i for i in range(most_threads.bit_length())), most_threads} - {get_num_threads()})
    threads = [Way(f"{n} thread{'s' if n > 1 else ''}", partial(_threads, number=n)) for n in counts]
    hits = [Way(hit.name, partial(_hit, hit=hit)) for hit in HITS if hit.exists(subject)]
    return [
        *hits, Way("in a batch", _batch), Way("in pieces", _pieces), *threads, Way("preempted", _preempted),
        Way("draft tokens", _drafts), Way("after save and load", _saved), Way("through a folder", _folder),
    ]


def _pieces(subject: Subject, case: Case, want: Record) -> Outcome:
    return Outcome(subject.scored(case, subject.engine(case, prefill_chunk=_PIECE)))


@contextmanager
def _with_threads(number: int) -> Iterator[None]:
    before = get_num_threads()
    set_num_threads(number)
    try:
        yield
    finally:
        set_num_threads(before)


def _threads(subject: Subject, case: Case, want: Record, *, number: int) -> Outcome:
    with _with_threads(number):
        if get_num_threads() != number:
            return Outcome(None, f"{get_num_threads()} threads")
        return Outcome(cold(subject, case))


# -- hits -----------------------------------------------------------------------------------------------------


def _warm(subject: Subject, case: Case, engine: PrefixCachedEngine, least: int = 1) -> Outcome:
    """Compute a prompt with what an engine has cached; without a hit of `least` tokens the way did not happen."""
    record, answer = subject.record(case, engine.complete)
    found = answer.cached_tokens
    if found >= least:
        return Outcome(record, f"{found} of {len(case.tokens)} tokens cached")
    return Outcome(None, f"a hit of {found} tokens" if found else "no hit")


def _hit(subject: Subject, case: Case, want: Record, *, hit: Hit) -> Outcome:
    earlier = hit.earlier(subject, case)
    if not earlier:
        return Outcome(None, "the prompt is too short")
    engine = subject.cached(case)
    engine.generate(earlier, _ONE)
    return _warm(subject, case, engine, hit.least_cached(subject, case))


def _saved(subject: Subject, case: Case, want: Record) -> Outcome:
    with TemporaryDirectory(prefix="kvcache-verify-") as folder:
        file, engine, loaded = Path(folder, "saved"), subject.cached(case), subject.cached(case)
        engine.generate(case.tokens, _ONE)
        engine.save(file)
        loaded.load(file)
        return _warm(subject, case, loaded)


def _folder(subject: Subject, case: Case, want: Record) -> Outcome:
    with TemporaryDirectory(prefix="kvcache-verify-") as folder:
        for write in (True, False):
            tiers = Tiers([DirectoryTier(folder, _TIER_BYTES)], after_uses=1, head_start=_TIER_SECONDS)
            try:
                engine = subject.cached(case, tiers=tiers)
                if not write:
                    return _warm(subject, case, engine)
                engine.generate(case.tokens, _ONE)
            finally:
                tiers.close(_TIER_SECONDS)
    raise AssertionError("the second engine returns")


# -- many requests --------------------------------------------------------------------------------------------


def _run(engine: BatchEngine) -> int:
    """Run all requests; the most that ran at once."""
    most = 0
    while engine.step():
        most = max(most, engine.stats().running)
    return most


def _batch(subject: Subject, case: Case, want: Record) -> Outcome:
    """Run a request between others, one of which shares its beginning; score its prompt beside another text."""
    digests, others = LogitsDigests(), [subject.other(f"beside {case.number}, {i}", 30 + 25 * i) for i in range(3)]
    others[1] = case.tokens[: len(case.tokens) // 2].tolist() + others[1]
    num_blocks = subject.blocks(*[length_of(case) + 80] * 4)
    engine = subject.batch(num_blocks)
    company = SamplingParams(temperature=0.9, seed=7, max_tokens=case.params.max_tokens, ignore_eos=True)
    for tokens in others[:2]:
        engine.submit(tokens, company)
    request = engine.submit(case.tokens, digests.params(case.params))
    engine.submit(others[2], company)
    running = _run(engine)
    if running < 2:
        return Outcome(None, "no other request ran")
    scores = subject.batch(num_blocks).score_batch([others[0], case.tokens], progress=False)[1]
    return Outcome(digests.record(len(case.tokens), request.completions()[0], scores), f"{running} requests at once")


def _preempted(subject: Subject, case: Case, want: Record) -> Outcome:
    """Run a request that loses its memory to an urgent one, and begins again."""
    digests = LogitsDigests()
    engine = subject.batch(subject.blocks(length_of(case)) + 1, max_running=1)
    request = engine.submit(case.tokens, digests.params(case.params))
    while request.metrics.new_tokens < 3 and engine.step():
        pass
    engine.submit(subject.other(f"urgent {case.number}", len(case.tokens)), _ONE, priority=-1000)
    _run(engine)
    if not request.metrics.preemptions:
        return Outcome(None, "not preempted")
    return Outcome(digests.record(len(case.tokens), request.completions()[0]))


class _KnownAnswer:
    """A network that proposes a known answer with every fourth token wrong: draft tokens are accepted and rejected."""

    def __init__(self, subject: Subject, case: Case, want: Record) -> None:
        config = subject.model.config
        self.config = SimpleNamespace(
            num_layers=1, num_heads=1, num_kv_heads=1, head_dim=32, vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
        )
        self._text = [*case.tokens.tolist(), *want.tokens, 0]
        for i in range(len(case.tokens) + 3, len(self._text), 4):
            self._text[i] = (self._text[i] + 1) % config.vocab_size

    def forward(self, tokens: Any, positions: NDArray[np.int64], attend: Any, logits: str) -> NDArray[np.float32]:
        rows = np.zeros((len(tokens), 1, 32), np.float32)
        attend(0, rows, rows, rows)
        places = np.asarray(positions)[{"last": slice(-1, None), "all": slice(None), "none": slice(0)}[logits]]
        found = np.zeros((len(places), self.config.vocab_size), np.float32)
        for row, place in zip(found, places.tolist(), strict=True):
            row[self._text[min(place + 1, len(self._text) - 1)]] = 1.0
        return found


def _drafts(subject: Subject, case: Case, want: Record) -> Outcome:
    digests = LogitsDigests()
    # An engine pauses a source that takes longer than it saves; this clock shows no such times.
    engine = subject.batch(
        2 * subject.blocks(length_of(case)), draft=("auto", _KnownAnswer(subject, case, want)),
        draft_tokens=MOST_DRAFTS, clock=partial(next, count(0, 0.001)),
    )
    request = engine.submit(case.tokens, digests.params(case.params))
    _run(engine)
    stats = engine.stats()
    if not 0 < stats.accepted_tokens < stats.draft_tokens:
        return Outcome(None, f"{stats.accepted_tokens} of {stats.draft_tokens} draft tokens accepted")
    note = f"{stats.accepted_tokens} of {stats.draft_tokens} draft tokens accepted"
    return Outcome(digests.record(len(case.tokens), request.completions()[0]), note)
