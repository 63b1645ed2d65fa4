"""The second turn of a conversation whose model made room for another one in between."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from bench.support.report import show, time_text
from kvcache import BatchEngine
from kvcache.server.model_loader import ModelLoader
from kvcache.server.model_slot import ModelSlot, ModelUse
from kvcache.server.models import Models
from kvcache.server.served_model import ServedModel
from kvcache.texts.arrivals import AUTOSAVE_START, GROUP_TOKENS
from kvcache.tiers import DirectoryTier, Tiers

__all__ = ["measure_swaps"]

OWN, NEW, SECONDS = 64, 16, 600.0  # tokens of a message, of an answer; a limit that nothing reaches
_PARTS = ("first turn", "own tokens", "unloading the other", "loading", "reading", "second turn")


def _made(file: Path, folder: Path, length: int, stack: ExitStack) -> ServedModel:
    """A model with a folder of prefixes, as `serve --autosave` opens it."""
    tiers = Tiers([DirectoryTier(folder, "8GiB")], after_uses=1, head_start=AUTOSAVE_START)
    stack.callback(tiers.close, SECONDS)
    engine = BatchEngine.from_pretrained(file, num_blocks=length // 16 + 64, tiers=tiers)
    stack.callback(engine.close, cancel=True)
    return ServedModel(engine, folder.name)


class _Swaps:
    """Two models of one file, of which one is loaded at a time, and the seconds of what they do."""

    def __init__(self, file: Path, folder: Path, length: int) -> None:
        self.slots = [ModelSlot((name,), partial(_made, file, folder / name, length)) for name in "ab"]
        self.loader = ModelLoader(Models(self.slots), most_loaded=1)
        self.seconds: dict[str, list[float]] = {part: [] for part in _PARTS}
        self.cached = 0

    async def swap(self, *, noted: bool = False) -> None:
        """Load the second model, and the first one again in its place."""
        for slot in reversed(self.slots):
            began, use = perf_counter(), ModelUse()
            await self.loader.taken(slot, use, SECONDS)
            took = perf_counter() - began
            use.end()
        if noted:
            self.seconds["unloading the other"].append(took - slot.seconds)
            self.seconds["loading"].append(slot.seconds)

    def turn(self, part: str, tokens: Any, new: int = NEW) -> list[int]:
        """The answer of the first model; the seconds to its end are those of a part."""
        model, began = self.slots[0].model, perf_counter()
        assert model is not None
        request = model.engine.submit(tokens, max_tokens=new, temperature=0.0)
        answer: list[int] = request.result()
        self.seconds[part].append(perf_counter() - began)
        self.cached = request.metrics.cached_tokens
        return answer

    async def run(self, length: int, rounds: int) -> None:
        """Two turns without a swap, the second one again behind a swap, and what it reads by itself."""
        await self.loader.start()
        rng = np.random.default_rng(0)
        try:
            for _ in range(rounds):
                await self.swap()
                first = rng.integers(3, 4000, length)
                begun = [*first, *self.turn("first turn", first)]
                self.turn("own tokens", [*begun, *rng.integers(3, 4000, OWN)])
                await self.swap()
                whole = (length + NEW) // GROUP_TOKENS * GROUP_TOKENS
                self.turn("reading", begun[: whole + 1], 1)
                await self.swap(noted=True)
                self.turn("second turn", [*begun, *rng.integers(3, 4000, OWN)])
        finally:
            await self.loader.close()


def measure_swaps(file: Path, length: int, rounds: int, *, as_markdown: bool) -> None:
    """Print the seconds of a second turn with and without a swap, and the parts of the swap: medians of rounds."""
    with tempfile.TemporaryDirectory() as folder:
        swaps = _Swaps(file, Path(folder), length)
        asyncio.run(swaps.run(length, rounds))
    found = {part: median(seconds) for part, seconds in swaps.seconds.items()}
    ratios = [
        second / (own + read)
        for second, own, read in zip(*(swaps.seconds[part] for part in ("second turn", "own tokens", "reading")),
                                     strict=True)
    ]
    show(
        as_markdown, f"a second turn behind {length} tokens, {OWN} own and {NEW} new, its model unloaded before it",
        ["", *_PARTS, "cached", "over own and reading"],
        [["seconds", *(time_text(found[part]) for part in _PARTS), str(swaps.cached), f"{median(ratios):.2f}"]],
    )
