"""`GrammarCompiler`: the grammars of an engine, compiled for its tokenizer. The newest ones stay."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from hashlib import sha256
from threading import Lock
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from kvcache.errors import GrammarError, OutOfMemoryError
from kvcache.grammar.grammar import Grammar
from kvcache.grammar.grammar_vocabulary import GrammarVocabulary
from kvcache.grammar.matcher import Matcher
from kvcache.grammar.trials import TrialDeadlineError, TrialResult, Trials, TrialVocabulary
from kvcache.support.arguments import short
from kvcache.support.heaps import give_back
from kvcache.support.rust_errors import rust_errors

__all__ = ["GrammarCompiler"]

_KEPT = 64  # compiled grammars, each with the states of its lexer: 100 kB to some MB
_QUICK = 0.1  # seconds of a trial, up to which a step may compile the grammar again
_TRIED = 4096  # results of trials, of which each takes some hundred bytes
_GIVEN_BACK = 1 << 25  # bytes of compiled grammars, after which the C library gives back those that have left
_MOST_KEPT, _MOST_HELD = 1 << 26, 1 << 30  # bytes of those that stay, and of these and those that texts have
# A state of the lexer takes 1 to 2 kB. Schemas of 300 properties need 5,000 items in a step; 20,000 take 45 ms with a
# vocabulary of 49,152, in a grammar with the most ways to read a text that was found, and 50,000 take 0.45 s.
_LIMITS = {
    "max_lexer_states": 50_000, "max_grammar_size": 200_000, "step_max_items": 20_000, "verbose_errors": False,
}
_UNFORCED = '%llguidance {"no_forcing": true}\n'


class GrammarCompiler:
    """Compiles grammars. Threads may share it: a compilation holds no lock, and lets other threads run.

    Args:
        tokenizer: returns the `tokenizers.Tokenizer` of the engine, or None.
        vocab_size: length of the logits.
        end_tokens: those that end a text of the network.
    """

    def __init__(self, tokenizer: Callable[[], Any], vocab_size: int, end_tokens: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._end_tokens = tokenizer, vocab_size, list(end_tokens)
        self._lock = Lock()  # of the vocabulary, which takes seconds where it is large, and of what is known
        self._vocabulary: GrammarVocabulary | None = None
        self._compiled: OrderedDict[bytes, Matcher] = OrderedDict()
        self._tried: OrderedDict[bytes, TrialResult | GrammarError] = OrderedDict()
        self._since = 0  # bytes of grammars that were compiled since the C library gave any back
        self._held: WeakKeyDictionary[Matcher, int] = WeakKeyDictionary()  # bytes of those that something refers to

    def compile(self, grammar: Grammar, stop_tokens: Iterable[int] = (), trials: Trials | None = None) -> Matcher:
        """A matcher of a grammar at its start, of which `Matcher.fresh` makes those of texts.

        Args:
            stop_tokens: of the texts. Where one of these, or of the network's, has a text, nothing is forced: it could
                be all that is.
            trials: try a new grammar first, under their limits. None: it takes what time and memory it takes.

        Raises:
            ImportError: without the package.
            GrammarError: not a grammar, or beyond a limit; the engine has no tokenizer that llguidance reads, or its
                network has no end tokens.
            OutOfMemoryError: grammars take all the memory that they may.
            RuntimeError, InvalidOperationError: as `Trials.tried`.
        """
        with self._lock:
            package = _package()
            vocabulary = self._read(package)
            key, forces = self._key(vocabulary, grammar, stop_tokens)
            if (known := self._found(key)) is not None:
                return known
        with _faults(f"a {grammar.kind} that can be compiled"):
            source = _source(package, vocabulary, grammar, forces)
        tried = self._trial(trials, vocabulary, key, grammar, source)
        with self._lock:
            self._make_room(tried.size)
            self._since += tried.size
            if is_due := self._since > _GIVEN_BACK:
                self._since = 0
        if is_due:
            give_back()
        with _faults(f"a {grammar.kind} that can be compiled"):
            limits = package.LLParserLimits(**_LIMITS)
            made = partial(package.LLMatcher, vocabulary.reader, source, log_level=0, limits=limits)
            start = made()
            if not start.is_error():
                start.compute_bitmask()  # copies have the states that it needed
        if start.is_error():
            raise _none(grammar, str(start.get_error()))
        remade = made if tried.seconds <= _QUICK else None
        found = Matcher(start, self._vocab_size, self._end_tokens[0], remade=remade)
        with self._lock:
            self._compiled[key], self._held[found] = found, tried.size
            while len(self._compiled) > _KEPT or self._kept > _MOST_KEPT:
                self._compiled.popitem(last=False)
        return found

    @property
    def _kept(self) -> int:
        """Bytes of the grammars that stay, if there are several."""
        return sum(self._held[each] for each in self._compiled.values()) if len(self._compiled) > 1 else 0

    def knows(self, grammar: Grammar, stop_tokens: Iterable[int] = ()) -> bool:
        """Whether `compile` has this grammar, or the reason why there is none; errors as of `compile`."""
        with self._lock:
            key, _ = self._key(self._read(_package()), grammar, stop_tokens)
            return self._found(key) is not None or isinstance(self._tried.get(key), GrammarError)

    def _key(
        self, vocabulary: GrammarVocabulary, grammar: Grammar, stop_tokens: Iterable[int]
    ) -> tuple[bytes, bool]:
        """The digest of a grammar with its stop tokens, and whether its masks may be forced."""
        forces = grammar.forces and not any(map(vocabulary.is_text, (*self._end_tokens, *stop_tokens)))
        parts = grammar.kind, grammar.text, grammar.strict, grammar.whitespace, grammar.lead, forces
        return sha256(repr(parts).encode()).digest(), forces

    def _found(self, key: bytes) -> Matcher | None:
        """The compiled grammar of a digest; None: there is none, or its lexer has reached its limit."""
        known = self._compiled.get(key)
        if known is None or known.is_spent:
            return None
        self._compiled.move_to_end(key)
        return known

    def _trial(
        self, trials: Trials | None, vocabulary: GrammarVocabulary, key: bytes, grammar: Grammar, source: str
    ) -> TrialResult:
        """The result of the trial that a grammar has once; zeros without one. GrammarError: it has not passed."""
        with self._lock:
            known = self._tried.get(key)
        if trials is None:
            return known if isinstance(known, TrialResult) else TrialResult(0, 0.0, None)
        if known is None:
            try:
                written = TrialVocabulary(vocabulary.written, self._vocab_size, self._end_tokens)
                known = trials.tried(written, source, _LIMITS)
                if known.fault is not None:
                    known = _none(grammar, known.fault)
            except TrialDeadlineError:
                raise
            except GrammarError as error:
                known = error
            with self._lock:
                self._tried[key] = known
                while len(self._tried) > _TRIED:
                    self._tried.popitem(last=False)
        if isinstance(known, GrammarError):
            raise GrammarError(str(known))
        return known

    def _make_room(self, size: int) -> None:
        """Forget the oldest grammars until another one fits. OutOfMemoryError: texts have the others."""
        while (held := sum(self._held.values())) + size > _MOST_HELD:
            if not self._compiled:
                raise OutOfMemoryError(size, max(0, _MOST_HELD - held), "bytes")
            self._compiled.popitem(last=False)

    def _read(self, package: ModuleType) -> GrammarVocabulary:
        """The vocabulary, which is made once."""
        if self._vocabulary is not None:
            return self._vocabulary
        if not self._end_tokens:
            raise GrammarError("grammar: expected a network with end tokens, got one without")
        tokenizer = self._tokenizer()
        if tokenizer is None:
            raise GrammarError("grammar: expected none, since the engine has no tokenizer, got one")
        with _faults("a tokenizer that llguidance reads"):
            self._vocabulary = GrammarVocabulary(package, tokenizer, self._vocab_size, self._end_tokens)
        return self._vocabulary


def _package() -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise ImportError("grammar needs llguidance: pip install 'kvcache-cpu[grammar]'") from None
    return llguidance


def _source(package: ModuleType, vocabulary: GrammarVocabulary, grammar: Grammar, forces: bool) -> str:
    matcher = package.LLMatcher
    if grammar.kind == "json_schema":
        options = {"lenient": not grammar.strict, "whitespace_pattern": grammar.whitespace}
        if forces and not grammar.lead:
            return str(matcher.grammar_from_json_schema(grammar.text, overrides=options))
        known = json.loads(grammar.text)
        schema = json.dumps(known | {"x-guidance": options} if isinstance(known, dict) else known)
        start = f"start: {'lead ' if grammar.lead else ''}answer\nanswer: %json {schema}\n{grammar.lead}"
        return str(matcher.grammar_from_lark(start if forces else _UNFORCED + start))
    if grammar.kind == "lark":
        # Where the package forces a token by its id and rolls back, it counts the bytes of its text, if it has one.
        text, names_texts = vocabulary.with_ids(grammar.text)
        return str(matcher.grammar_from_lark(f"{text}\n{_UNFORCED}" if names_texts or not forces else text))
    found = json.loads(matcher.grammar_from_regex(grammar.text))
    found["grammars"][0]["lark_grammar"] = ("" if forces else _UNFORCED) + found["grammars"][0]["lark_grammar"]
    return json.dumps(found)


def _faults(expected: str) -> AbstractContextManager[None]:
    """Raise what a call of the package raises, panics too, as a GrammarError."""
    return rust_errors(lambda error: GrammarError(f"grammar: expected {expected}, got an error: {short(error)}"))


def _none(grammar: Grammar, fault: str) -> GrammarError:
    """The error of a grammar that llguidance refuses, with the first line of what it says."""
    line = short(fault.strip().partition("\n")[0])
    return GrammarError(f"grammar: expected a {grammar.kind} that can be compiled, got {line}")
