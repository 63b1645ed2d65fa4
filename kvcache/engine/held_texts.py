"""`HeldTexts`: the cached texts that a text sees parts of, run one after another as the text of an engine, and held."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvcache.texts.block_index import CachedStart, PartStart
from kvcache.texts.seen_parts import SeenPart, SeenParts, TextKey

if TYPE_CHECKING:
    from kvcache.texts.pool import Pool
    from kvcache.texts.text import Text

__all__ = ["HeldTexts"]


class HeldTexts:
    """Holds texts until it is closed, as a context manager: nothing of them can be evicted meanwhile.

    Args:
        pool: K and V.
        prefix: what they are held for; None: for whatever may stand behind them.

    Attributes:
        cached: for each text how many of its tokens did not run.
    """

    def __init__(self, pool: Pool, prefix: SeenParts | None) -> None:
        self._pool, self._groups = pool, pool.part_groups
        self._reaches = {} if prefix is None else prefix.reaches()
        self._ids: dict[TextKey, list[int]] = {}  # of each group
        self.cached: dict[TextKey, int] = {}

    def __enter__(self) -> HeldTexts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, (_, group) in enumerate(self._groups):
            group.release([ids[number] for ids in self._ids.values() if number < len(ids)])

    def find(self, part: SeenPart, space: Any) -> bool:
        """Hold a text that is cached as a whole; whether it is."""
        with ExitStack() as held:
            starts = self._pool.shared.hold_text(part, self._reaches.get(part.key, 0), space, held)
            if starts is None:
                return False
            self._hold(part, [starts[i] for i, _ in self._groups])
            self.cached[part.key] = len(part.tokens)
            return True

    def add(self, part: SeenPart, text: Text, cached: int) -> None:
        """Hold a text that has run, `cached` tokens of which have not."""
        self._pool.keep_whole(text)
        gap = self._reaches.get(part.key, 0)
        self._hold(part, [group.end_of(text, i, part, gap) for i, group in self._groups])
        self.cached[part.key] = cached

    def _hold(self, part: SeenPart, starts: list[CachedStart]) -> None:
        self._ids[part.key] = ids = []
        for (_, group), start in zip(self._groups, starts, strict=True):
            ids.append(group.hold_blocks(start))

    def starts(self, prefix: SeenParts | None) -> list[list[PartStart]]:
        """The parts of texts that are held, for each group."""
        found: list[list[PartStart]] = []
        for number, (_, group) in enumerate(self._groups):
            found.append([])
            for part, gap in () if prefix is None else zip(prefix.parts, prefix.gaps, strict=True):
                start = group.held_start(self._ids[part.key][number], part, self._reaches.get(part.key, 0))
                found[-1].append(group.part_start(start, part, gap))
        return found
