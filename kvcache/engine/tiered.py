"""`Tiered`: a prompt that runs while tiers are asked for its blocks, and jumps ahead where these reach past it.

The prompt runs in pieces as long as something may arrive, and at once to its end afterwards. The pieces change no bit
of its K and V. After each piece, blocks that have arrived are copied into the prefix cache, with those that were
computed, and the sequence becomes one that shares them.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from kvcache.core.calibration import Calibration
from kvcache.core.rowformat import RowFormats
from kvcache.engine.cached_windows import CachedWindows
from kvcache.engine.engine import InferenceEngine
from kvcache.engine.sequence import LiveSequence
from kvcache.networks.fingerprint import fingerprint
from kvcache.networks.protocols import Model
from kvcache.paged.cache import PagedKvCache
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.tiers.directory import DirectoryTier
from kvcache.tiers.lookups import Lookup
from kvcache.tiers.source import GROUP_TOKENS, TierSource
from kvcache.tiers.tiers import Tiers
from kvcache.tiers.windows import WindowedLookup, WindowSource

__all__ = ["Tiered", "as_tiers", "make_sources", "model_name", "take_windows", "write_ends"]

AUTOSAVE_BYTES = 8 << 30  # of a directory that `autosave` names by its path
# Seconds that a prompt waits at most for the directory of `autosave`. A miss takes 0.1 ms, and 64 tokens of a hit some
# ms. Without the wait, a prompt of one piece has run before the first value is there.
AUTOSAVE_START = 0.05

Tokens = NDArray[np.uint32]


def as_tiers(
    tiers: Tiers | None, autosave: str | os.PathLike[str] | DirectoryTier | None
) -> Tiers | None:  # fmt: skip
    """The tiers of an engine.

    Raises:
        TypeError, ValueError: another kind; both are given.
        OSError: the directory of `autosave` cannot be made or read.
    """
    if tiers is None and autosave is None:
        return None
    if tiers is not None and not isinstance(tiers, Tiers):
        raise TypeError(f"tiers: expected a Tiers, got {type(tiers).__name__}")
    if tiers is not None and autosave is not None:
        raise ValueError("autosave: expected None with tiers, which may have a DirectoryTier, got a path")
    if tiers is not None:
        return tiers
    assert autosave is not None
    directory = autosave if isinstance(autosave, DirectoryTier) else DirectoryTier(autosave, AUTOSAVE_BYTES)
    return Tiers([directory], after_uses=1, head_start=AUTOSAVE_START)


def make_sources(
    tiers: Tiers, model: Model, paged: PagedKvCache, prefixes: PrefixCache, windows: CachedWindows
) -> TierSource:
    """Make tiers the sources of an engine's prefix cache and of its cached windows; the source of the first.

    Args:
        paged: the layers that keep all tokens.

    Raises:
        TypeError: the model is no `Transformer`.
    """
    name = partial(model_name, model, paged.residual_length, formats=paged.formats)
    prefixes.source = source = tiers.source(name(paged.calibration), waits=False)
    parts = []
    for group in windows.groups:
        layers = group.layers
        part = tiers.window_source(f"{name(layers.cache.calibration)}, layers {layers.layers}", layers.window)
        parts.append(part)
        group.cache.source, group.ends = part, source.format.group_tokens
    if parts:
        source.make_lookup = partial(WindowedLookup, sources=parts)
    return source


def take_windows(windows: CachedWindows, lookup: Lookup, tokens: Tokens, namespace: Hashable) -> bool:
    """Cache the windows that a lookup has fetched, where its request may continue; whether there is room for them."""
    if not isinstance(lookup, WindowedLookup) or not lookup.target:
        return True
    for group, part in zip(windows.groups, lookup.parts, strict=True):
        group.take(tokens, lookup.target, namespace, part.bodies)
    return windows.longest(tokens, lookup.target, namespace) == lookup.target


def write_ends(windows: CachedWindows, tokens: Tokens, prompt: int, namespace: Hashable) -> None:
    """Offer to the tiers the windows at the ends of a prompt of so many tokens and of its text, as far as cached."""
    for group in windows.groups:
        source = group.cache.source
        assert isinstance(source, WindowSource)
        ends = {min(length, len(tokens)) // group.ends * group.ends for length in (prompt, len(tokens))}
        for end in sorted(ends - {0}):
            source.ends(namespace, tokens, partial(group.blocks, tokens, end, namespace))


def model_name(model: Model, residual_length: int, calibration: Calibration | None, formats: RowFormats) -> str:
    """What K and V of an engine depend on beside the library's formats; engines of all kinds share values."""
    calibrated = "" if calibration is None else f", calibrated {calibration.fingerprint}"
    named = f", {formats.fingerprint}" if formats.fingerprint else ""
    return f"{fingerprint(model)}, residual_length {residual_length}{calibrated}{named}"


class Tiered:
    """The tiers of a `PrefixCachedEngine`.

    Args:
        tiers: its tiers.
        engine, sequence: the engine and its sequence.
        cache, windows: the prefix cache and the cached windows; the tiers become their sources.
    """

    def __init__(
        self, tiers: Tiers, engine: InferenceEngine, sequence: LiveSequence, cache: PrefixCache, windows: CachedWindows
    ) -> None:
        self._tiers, self._engine, self._sequence = tiers, engine, sequence
        self._cache, self._windows = cache, windows
        self._source = make_sources(tiers, engine.model, engine.cache, cache, windows)
        self._lookup: Lookup | None = None

    @contextmanager
    def looking(self, tokens: Tokens, start: int, namespace: Hashable) -> Iterator[None]:
        """Ask the tiers for the blocks of a prompt from token `start` on, meanwhile."""
        self._source.end_all()  # what an interrupt has left
        with self._source.looking(namespace, tokens, start) as self._lookup:
            try:
                yield
            finally:
                self._lookup = None

    def run(self, tokens: Tokens, start: int, namespace: Hashable) -> int:
        """Run a part of the prompt from `start` on, until nothing more arrives or one token is left; where it ends."""
        requests, lookup, last = self._engine._requests, self._lookup, len(tokens) - 1
        if lookup is None:
            return start
        lookup.wait(self._tiers.head_start)
        piece = GROUP_TOKENS
        firsts = self._engine.cache.first_tokens
        if start < firsts <= last:  # which every token reads unpacked
            requests.prefill_part(tokens[start:firsts], start, len(tokens))
            start = firsts
        while True:
            ended, before = lookup.ended, start  # read before what has arrived
            start = self._jump(lookup, tokens, start, namespace)
            if ended or start >= last:
                break
            end = min(start - start % GROUP_TOKENS + piece, last)
            # Short pieces take more time for each token: where nothing has arrived, the next one is longer.
            piece = GROUP_TOKENS if start > before else min(2 * piece, self._sequence.chunk)
            with self.measured(end - start):
                requests.prefill_part(tokens[start:end], start, len(tokens))
            start = end
            lookup.reached = start // self._source.format.group_tokens
        lookup.cancel()
        return start

    @contextmanager
    def measured(self, count: int) -> Iterator[None]:
        """Measure how long `count` tokens take to compute."""
        began = perf_counter()
        yield
        if count >= GROUP_TOKENS:
            self._source.computing.add(count / max(perf_counter() - began, 1e-9))

    def _jump(self, lookup: Lookup, tokens: Tokens, start: int, namespace: Hashable) -> int:
        """Share the blocks that have arrived, if they reach past `start`; the tokens of the sequence."""
        group = self._engine.residual_length or 1
        most = lookup.available(start)
        num_firsts = self._engine.cache.first_tokens
        if min(most, len(tokens) - 1) // group * group <= start or start < num_firsts:
            return start
        cache, sequence, regimes = self._cache, self._sequence, self._engine._requests.regimes
        full = start // cache.block_size
        blocks = self._engine.cache.block_table([sequence.seq_id]).block_ids
        cache.adopt(tokens[: full * cache.block_size], blocks[:full], namespace)
        with cache.open_again(tokens, namespace) as session:
            found = min(session.num_tokens, most, len(tokens) - 1) // group * group
            has_room = found > start and not (self._windows.groups and found < most)
            if not has_room or not take_windows(self._windows, lookup, tokens, namespace):
                lookup.cancel()
                return start

            def share(_: PagedKvCache, seq_id: int) -> int:
                paged.adopt(seq_id, session.block_indices[: -(-found // paged.block_size)], found)
                return found

            paged, firsts = self._engine.cache, []
            if num_firsts:
                pairs = [paged.read_unpacked(layer, sequence.seq_id) for layer in range(paged.num_layers)]
                firsts = [(keys[:num_firsts], values[:num_firsts]) for keys, values in pairs]
            with self._windows.hold(tokens, found, namespace) as (held, pages):
                if held < found:
                    lookup.cancel()
                    return start
                sequence.replace(share, pages)
            if firsts:
                paged.unpack(sequence.seq_id, firsts=firsts)
            regimes.know(tokens[:found], regimes.of(len(tokens)))
        return found

    def used(self, tokens: Tokens, prompt: int, namespace: Hashable) -> None:
        """Offer what a request had to the tiers, whose prompt had so many tokens."""
        self._source.used(namespace, tokens)
        write_ends(self._windows, tokens, prompt, namespace)
