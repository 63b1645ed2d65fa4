"""`GrammarCompiler`: the grammars of an engine, compiled for its tokenizer. The newest ones stay."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from hashlib import sha256
from threading import Lock
from types import ModuleType
from typing import Any

from kvcache.errors import GrammarError
from kvcache.grammar.grammar import Grammar
from kvcache.grammar.grammar_vocabulary import GrammarVocabulary
from kvcache.grammar.matcher import Matcher
from kvcache.support.arguments import short
from kvcache.support.rust_errors import rust_errors

__all__ = ["GrammarCompiler"]

_KEPT = 64  # compiled grammars, each with the states of its lexer: 100 kB to some MB
# A state of the lexer takes 1 to 2 kB, so one matcher at most 100 MB. The fuels are llguidance's own: 20 ms for the
# beginning, and 14 ms for the mask of a token.
_LIMITS = {"max_lexer_states": 50_000, "max_grammar_size": 200_000, "verbose_errors": False}
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
        self._lock = Lock()  # of the vocabulary, which takes seconds where it is large
        self._vocabulary: GrammarVocabulary | None = None
        self._compiled: OrderedDict[bytes, Matcher] = OrderedDict()

    def compile(self, grammar: Grammar, stop_tokens: Iterable[int] = ()) -> Matcher:
        """A matcher of a grammar at its start, of which `Matcher.fresh` makes those of texts.

        Args:
            stop_tokens: of the texts. Where one of these, or of the network's, has a text, nothing is forced: it could
                be all that is.

        Raises:
            ImportError: without the package.
            GrammarError: not a grammar, or beyond a limit; the engine has no tokenizer that llguidance reads, or its
                network has no end tokens.
        """
        with self._lock:
            package = _package()
            if self._vocabulary is None:
                self._vocabulary = self._read(package)
            vocabulary = self._vocabulary
            forces = grammar.forces and not any(map(vocabulary.is_text, (*self._end_tokens, *stop_tokens)))
            parts = grammar.kind, grammar.text, grammar.strict, grammar.whitespace, grammar.lead, forces
            key = sha256(repr(parts).encode()).digest()
            if (known := self._compiled.get(key)) is not None:
                self._compiled.move_to_end(key)
                return known
        with _faults(f"a {grammar.kind} that can be compiled"):
            limits, source = package.LLParserLimits(**_LIMITS), _source(package, vocabulary, grammar, forces)
            start = package.LLMatcher(vocabulary.reader, source, log_level=0, limits=limits)
            if not start.is_error():
                start.compute_bitmask()  # copies have the states that it needed
        if start.is_error():
            raise GrammarError(f"grammar: expected a {grammar.kind} that can be compiled, got {_line(start)}")
        found = Matcher(start, self._vocab_size, self._end_tokens[0])
        with self._lock:
            self._compiled[key] = found
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return found

    def _read(self, package: ModuleType) -> GrammarVocabulary:
        if not self._end_tokens:
            raise GrammarError("grammar: expected a network with end tokens, got one without")
        tokenizer = self._tokenizer()
        if tokenizer is None:
            raise GrammarError("grammar: expected none, since the engine has no tokenizer, got one")
        with _faults("a tokenizer that llguidance reads"):
            return GrammarVocabulary(package, tokenizer, self._vocab_size, self._end_tokens)


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


def _line(matcher: Any) -> str:
    """The first line of a matcher's error."""
    return short(str(matcher.get_error()).strip().partition("\n")[0])
