"""`TieredWorks`: works that run while tiers are asked for their prompts, and begin again where more has arrived."""

from __future__ import annotations

from collections.abc import Container

from kvcache.core.rowformat import RowFormats
from kvcache.engine.storage import Storage
from kvcache.engine.tiered import model_name
from kvcache.networks.protocols import Model
from kvcache.prefix.blocks import PrefixCache
from kvcache.serving.work import Work
from kvcache.tiers.lookups import Lookup
from kvcache.tiers.source import GROUP_TOKENS
from kvcache.tiers.tiers import Tiers

__all__ = ["TieredWorks"]


class TieredWorks:
    """The lookups of works in the tiers of a `BatchEngine`.

    Args:
        tiers: its tiers.
        model: its network.
        prefixes: its prefix cache; the tiers become its source.
        storage: of its K and V.
    """

    def __init__(self, tiers: Tiers, model: Model, prefixes: PrefixCache, storage: Storage) -> None:
        self._tiers, self._prefixes, self._group = tiers, prefixes, storage.residual_length or 1
        self._firsts = storage.firsts
        name = model_name(model, storage.residual_length, storage.calibration, RowFormats(*storage.formats))
        self._source = tiers.source(name, waits=False)
        prefixes.source = self._source
        self._lookups: dict[int, Lookup] = {}  # by the number of the work
        self._asked: set[int] = set()

    def begin(self, work: Work) -> None:
        """Ask the tiers for the prompt of a work that is about to begin, once."""
        number = work.key[1]
        if not work.shares or number in self._asked or work.num_tokens != work.num_prompt:
            return
        self._asked.add(number)
        tokens = work.tokens.copy()
        lookup = self._source.start(work.space, tokens, self._prefixes.peek(tokens, work.space))
        if lookup is not None:
            self._lookups[number] = lookup
            lookup.wait(self._tiers.head_start)

    def reaches_past(self, work: Work) -> bool:
        """Whether blocks have arrived past what a work has computed; it finds them when it begins again."""
        lookup = self._lookups.get(work.key[1])
        if lookup is None or work.computed < self._firsts:  # these run in any case, since all read them unpacked
            return False
        ended, most = lookup.ended, min(lookup.available(work.computed), work.num_prompt - 1)
        ahead = most // self._group * self._group > max(work.computed, work.left_at)
        if not ahead and (ended or work.remaining == 1):
            self._end(work.key[1])
        lookup.reached = work.computed // self._source.format.group_tokens
        return ahead

    def ended(self, work: Work) -> None:
        """Offer what a work computed to the tiers, and end its lookup."""
        self._end(work.key[1])
        if work.shares:
            self._source.used(work.space, work.tokens[: work.computed])

    def keep(self, numbers: Container[int]) -> None:
        """End the lookups of works that have ended, after an exception too."""
        for number in [number for number in self._lookups if number not in numbers]:
            self._end(number)
        self._asked = {number for number in self._asked if number in numbers}

    def _end(self, number: int) -> None:
        self._source.end(self._lookups.pop(number, None))

    def measured(self, count: int, seconds: float) -> None:
        """Note how long a step took that ran `count` tokens of prompts."""
        if count >= GROUP_TOKENS:
            self._source.computing.add(count / max(seconds, 1e-9))
