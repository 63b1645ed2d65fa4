"""Rivals for the same work: their own packages if installed, and short versions of their published algorithms.

A prefix rival stores prompts of tokens with a value per token or page. `key` converts NumPy tokens, untimed, to the
type that the rival reads without conversion: every rival gets its best input.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support.report import reason_of
from bench.trie.package_rivals import CompiledRadix, PackagedRadix, VllmPrefix, VllmStep

__all__ = ["ChainedHashes", "PromptDict", "PromptScan", "availability", "prefix_rivals", "step_rivals"]

Tokens = npt.NDArray[np.uint32]


class ChainedHashes:
    """A dict from the hash of (hash of the pages before, page) to a block: vLLM's algorithm in a few lines."""

    name = "chained hashes (as vLLM)"

    def __init__(self, page_size: int) -> None:
        self._page = page_size
        self._blocks: OrderedDict[bytes, int] = OrderedDict()  # least recently used first

    def key(self, tokens: Tokens) -> Any:
        return tokens.tobytes()

    def match(self, key: bytes) -> list[int]:
        found, parent = [], b""
        for at in range(0, len(key), 4 * self._page):
            parent = hashlib.sha256(parent + key[at : at + 4 * self._page]).digest()
            block = self._blocks.get(parent)
            if block is None:
                break
            found.append(block)
        return found

    lookup = match

    def insert(self, key: bytes) -> None:
        parent = b""
        for at in range(0, len(key), 4 * self._page):
            parent = hashlib.sha256(parent + key[at : at + 4 * self._page]).digest()
            self._blocks.setdefault(parent, len(self._blocks))
            self._blocks.move_to_end(parent)

    def evict(self, num_tokens: int) -> None:
        for _ in range(num_tokens // self._page):
            self._blocks.popitem(last=False)


class PromptDict:
    """A dict from whole prompts to their blocks that evicts the oldest: the simplest possible prefix cache."""

    name = "dict of prompts"

    def __init__(self, page_size: int) -> None:
        self._prompts: OrderedDict[bytes, range] = OrderedDict()

    def key(self, tokens: Tokens) -> Any:
        return tokens

    def match(self, key: Tokens) -> range | None:
        return self._prompts.get(key.tobytes())

    lookup = match

    def insert(self, key: Tokens) -> None:
        self._prompts[key.tobytes()] = range(len(key))

    def evict(self, num_tokens: int) -> None:
        while num_tokens > 0:
            num_tokens -= len(self._prompts.popitem(last=False)[1])


class PromptScan:
    """Compares every stored prompt from its first token on: the lookup of llama-cpp-python's `LlamaRAMCache`."""

    name = "scan (as LlamaRAMCache)"

    def __init__(self, page_size: int) -> None:
        self._prompts: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def key(self, tokens: Tokens) -> Any:
        return tuple(tokens.tolist())

    def match(self, key: tuple[int, ...]) -> tuple[int, ...] | None:
        best, longest = None, 0
        for prompt in self._prompts:
            same = 0
            for a, b in zip(prompt, key, strict=False):
                if a != b:
                    break
                same += 1
            if same > longest:
                best, longest = prompt, same
        return best

    lookup = match

    def insert(self, key: tuple[int, ...]) -> None:
        self._prompts[key] = None

    def evict(self, num_tokens: int) -> None:
        while num_tokens > 0:
            num_tokens -= len(self._prompts.popitem(last=False)[0])


PREFIX = (CompiledRadix, PackagedRadix, VllmPrefix, ChainedHashes, PromptDict, PromptScan)
STEP = (VllmStep,)

_absent: dict[Any, str] = {}  # for each class the reason why it does not work, "" if it does


def _works(rival: Any, *sizes: int) -> bool:
    if rival not in _absent:
        try:
            rival(*sizes)
            _absent[rival] = ""
        except Exception as error:  # any reason for which a rival's package does not load
            _absent[rival] = reason_of(error)
    return not _absent[rival]


def prefix_rivals() -> list[Any]:
    """The prefix caches whose packages load."""
    return [rival for rival in PREFIX if _works(rival, 16)]


def step_rivals() -> list[Any]:
    """The block tables whose packages load."""
    return [rival for rival in STEP if _works(rival, 4, 32, 16)]


def availability() -> list[str]:
    """A line per rival that is not measured, with the reason."""
    prefix_rivals(), step_rivals()
    return [f"not measured: {name} ({why})" for name, why in {r.name: why for r, why in _absent.items() if why}.items()]
