"""`HeldTexts`: the cached texts that a text sees parts of, run one after another as the text of an engine, and held."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvcache.texts.block_index import PartStart
from kvcache.texts.kinds.whole import WholeLayers
from kvcache.texts.seen_parts import SeenPart, SeenParts, TextKey

if TYPE_CHECKING:
    from kvcache.texts.pool import Pool
    from kvcache.texts.text import Text

__all__ = ["HeldTexts"]


class HeldTexts:
    """Holds texts until it is closed, as a context manager: nothing of them can be evicted meanwhile.

    Args:
        pool: K and V.

    Attributes:
        cached: for each text how many of its tokens did not run.
    """

    def __init__(self, pool: Pool) -> None:
        assert isinstance(pool.counted, WholeLayers), "parts are seen by layers that keep all tokens"
        self._pool, self._whole = pool, pool.counted
        self._ids: dict[TextKey, int] = {}
        self.cached: dict[TextKey, int] = {}

    def __enter__(self) -> HeldTexts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._whole.release(list(self._ids.values()))

    def find(self, part: SeenPart, space: Any) -> bool:
        """Hold a text that is cached as a whole; whether it is."""
        if self._pool.block_index is None:
            return False
        with ExitStack() as held:
            start = self._pool.block_index.hold_part(part, space, held, again=False)
            if start is None:
                return False
            self._ids[part.key] = self._whole.hold_text(start)
            self.cached[part.key] = len(part.tokens)
            return True

    def add(self, part: SeenPart, text: Text, cached: int) -> None:
        """Hold a text that has run, `cached` tokens of which have not."""
        self._pool.keep_whole(text)
        self._ids[part.key] = self._whole.hold_text(self._whole.start_of(text.seq_id, part))
        self.cached[part.key] = cached

    def starts(self, prefix: SeenParts | None) -> list[PartStart]:
        """The parts of texts that are held."""
        parts = () if prefix is None else prefix.parts
        return [self._whole.start_of(self._ids[part.key], part) for part in parts]
