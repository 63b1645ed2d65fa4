"""`Arrivals`: what tiers deliver of prompts, while these run.

A prompt runs in pieces as long as something may arrive. Where blocks have arrived past what it has computed, its text
begins again, and finds them with those that it computed itself. The pieces change no bit of its K and V.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import partial
from math import lcm
from time import monotonic

from kvcache.core.calibration import Calibration
from kvcache.core.rowformat import RowFormats
from kvcache.networks.fingerprint import fingerprint
from kvcache.networks.protocols import Model
from kvcache.support.arguments import as_path
from kvcache.support.exclusions import expect
from kvcache.texts.cache_arguments import CacheArguments
from kvcache.texts.kinds.base import Layers
from kvcache.texts.pool import Pool
from kvcache.texts.storage import computed_with
from kvcache.texts.text import Text
from kvcache.tiers.directory import DirectoryTier
from kvcache.tiers.lookups import Lookup
from kvcache.tiers.source import GROUP_TOKENS
from kvcache.tiers.tiers import Tiers
from kvcache.tiers.windows import WindowedLookup, WindowSource

__all__ = ["GROUP_TOKENS", "Arrivals", "as_tiers", "model_name"]

AUTOSAVE_BYTES = 8 << 30  # of a directory that `autosave` names by its path
# Seconds that a prompt waits at most for the directory of `autosave`. A miss takes 0.1 ms, and 64 tokens of a hit some
# ms. Without the wait, a prompt of one piece has run before the first value is there.
AUTOSAVE_START = 0.05
# Seconds that the first prompts of an engine wait beyond that, while values arrive: nothing else runs then, and reading
# what there was before the model was unloaded takes a tenth of the seconds of computing it.
_JUST_LOADED, _NEXT = 2.0, 0.25  # for all values, and for the next one


def as_tiers(
    tiers: Tiers | None, autosave: str | os.PathLike[str] | DirectoryTier | None
) -> Tiers | None:
    """The tiers of an engine.

    Raises:
        TypeError, ValueError: another kind; both are given.
        OSError: the directory of `autosave` cannot be made or read.
    """
    if tiers is None and autosave is None:
        return None
    if tiers is not None and not isinstance(tiers, Tiers):
        raise TypeError(f"tiers: expected a Tiers, got {type(tiers).__name__}")
    if tiers is not None:
        expect("autosave", autosave, {"tiers"})
        return tiers
    assert autosave is not None
    directory = autosave
    if not isinstance(directory, DirectoryTier):
        directory = DirectoryTier(as_path(autosave, "autosave"), AUTOSAVE_BYTES)
    return Tiers([directory], after_uses=1, head_start=AUTOSAVE_START)


def model_name(
    model: Model, residual_length: int, calibration: Calibration | None, formats: RowFormats,
    sparse_tokens: int | None = None,
) -> str:
    """The name of all that K and V depend on beside the library's formats and bits; all engines share values."""
    calibrated = "" if calibration is None else f", calibrated {calibration.fingerprint}"
    named = f", {formats.fingerprint}" if formats.fingerprint else ""
    return f"{fingerprint(model)}{computed_with(model, residual_length, sparse_tokens)}{calibrated}{named}"


class Arrivals:
    """The lookups of texts in tiers, which become the sources of the prefix caches of a pool.

    Args:
        tiers: where blocks come from and go to.
        made: the arguments of the engine.
        pool: K and V of its layers; not of layers that evict.

    Attributes:
        source: of the index of prefixes.

    Raises:
        TypeError: the model is no `Transformer`.
    """

    def __init__(self, tiers: Tiers, made: CacheArguments, pool: Pool) -> None:
        self._tiers, self._pool, index = tiers, pool, pool.block_index
        assert index is not None
        cache = index.cache
        self._group, self._firsts = cache.residual_length or 1, cache.first_tokens
        name = partial(
            model_name, made.model, cache.residual_length, formats=cache.formats, sparse_tokens=made.sparse_tokens
        )
        size = lcm(GROUP_TOKENS, *(group.unit for group in pool.with_pages if group.prefixes))
        self.source = tiers.source(name(cache.calibration), waits=False, group_tokens=size)
        index.pages.source = self.source
        self._with_pages: list[tuple[Layers, WindowSource]] = []  # the groups whose texts need more than the index has
        for group in pool.with_pages:
            if group.prefixes and self.source.format.group_tokens % group.unit:
                raise ValueError(f"block_size: expected one that divides {size} with tiers, got {cache.block_size}")
            if (source := group.connect(tiers, name, self.source)) is not None:
                self._with_pages.append((group, source))
        if self._with_pages:
            self.source.make_lookup = partial(WindowedLookup, sources=[source for _, source in self._with_pages])
        self._lookups: dict[Text, Lookup] = {}
        self._asked: set[Text] = set()
        self._is_new = True  # no prompt has run

    def begin(self, text: Text) -> None:
        """Ask the tiers for the prompt of a text that is about to begin, once."""
        if not text.shares or text in self._asked or text.num_tokens != text.num_prompt:
            return
        self._asked.add(text)
        if (lookup := self.ask(text)) is not None:
            self._wait(lookup)

    def ask(self, text: Text) -> Lookup | None:
        """Ask the tiers for what is not cached of a text; None: they are not asked."""
        tokens = text.tokens[: text.shares_to].copy()
        lookup = self.source.start(text.space, tokens, self._pool.shared.longest(text))
        if lookup is not None:
            self._lookups[text] = lookup
        return lookup

    def has_ended(self, text: Text) -> bool:
        """Whether nothing more arrives of a text."""
        lookup = self._lookups.get(text)
        return lookup is None or lookup.ended

    def seconds_of(self, num_tokens: int) -> float:
        """The seconds of reading the blocks of so many tokens from the first tier, as far as is known."""
        return self.source.seconds_of(num_tokens)

    def copied(self, text: Text) -> bool:
        """Write what is cached of a text to the tiers; whether they have or get its blocks."""
        tokens = text.tokens[: text.computed]
        for group, source in self._with_pages:
            for pages in group.offered(text):
                source.ends(text.space, tokens, pages, once=True)
        return self.source.copied(text.space, tokens)

    def _wait(self, lookup: Lookup) -> None:
        """Wait for the tiers; as long as they deliver, where the network has run no prompt yet: it was just loaded."""
        lookup.wait(self._tiers.head_start)
        before, ends = -1, monotonic() + _JUST_LOADED
        while self._is_new and self._tiers.head_start and not lookup.ended and monotonic() < ends:
            if (found := lookup.available(0)) <= before:
                return
            before = found
            lookup.wait(_NEXT)

    def arrived(self, text: Text, found: int) -> None:
        """Cache the pages that have arrived for a text of which `found` tokens are cached in the other layers."""
        lookup = self._lookups.get(text)
        if lookup is None or found < lookup.available(0):
            return
        if not self._take_pages(lookup, text):
            self.end(text)

    def _take_pages(self, lookup: Lookup, text: Text) -> bool:
        """Cache the pages that a lookup has fetched, where its text may continue; whether there is room for them."""
        if not isinstance(lookup, WindowedLookup) or not lookup.target:
            return True
        tokens, target = text.tokens, lookup.target
        for (group, _), part in zip(self._with_pages, lookup.parts, strict=True):
            group.take(tokens, target, text.space, part.bodies)
        return self._pool.shared.longest_of(tokens, target, text.space) == target

    def is_looked_up(self, text: Text) -> bool:
        """Whether more may arrive of a text."""
        return text in self._lookups

    def reaches_past(self, text: Text, left_at: int) -> bool:
        """Whether blocks have arrived past what a text has computed; it finds them when it begins again.

        Args:
            left_at: what it had computed when it last began again; -1: it has not.
        """
        lookup = self._lookups.get(text)
        if lookup is None or text.computed < self._firsts:  # these run in any case, since all read them in f16
            return False
        if self._with_pages and left_at >= 0:  # it has begun again, and had no room for all of them
            self.end(text)
            return False
        ended, most = lookup.ended, min(lookup.available(text.computed), text.num_prompt - 1, text.shares_to)
        ahead = most // self._group * self._group > max(text.computed, left_at)
        if not ahead and (ended or text.remaining == 1):
            self.end(text)
        lookup.reached = text.computed // self.source.format.group_tokens
        return ahead

    def ended(self, text: Text) -> None:
        """Offer what a text computed to the tiers, and end its lookup."""
        self.end(text)
        if not text.shares or text.seq_id < 0:
            return
        tokens = text.tokens[: min(text.computed, text.shares_to)]
        self._pool.keep_pages(text, text.computed)
        self.source.used(text.space, tokens)
        for group, source in self._with_pages:
            for pages in group.offered(text):
                source.ends(text.space, tokens, pages)

    def keep(self, texts: Collection[Text]) -> None:
        """End the lookups of all but these texts, after an exception too."""
        for text in [text for text in self._lookups if text not in texts]:
            self.end(text)
        self._asked.intersection_update(texts)

    def clear(self) -> None:
        """End all lookups, also those of calls that an error ended."""
        self._lookups.clear()
        self._asked.clear()
        self.source.end_all()

    def end(self, text: Text) -> None:
        """End the lookup of a text, if there is one."""
        self.source.end(self._lookups.pop(text, None))

    def measured(self, count: int, seconds: float) -> None:
        """Note how long `count` tokens of prompts took to compute."""
        self._is_new = self._is_new and not count
        if count >= GROUP_TOKENS:
            self.source.computing.add(count / max(seconds, 1e-9))
