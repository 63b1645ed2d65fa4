"""`TierSource`: the tiers as the `Source` of one `PrefixCache`.

A value has the pages of `group_tokens` tokens. What a lookup has fetched is copied into the pages of the cache with the
cache's lock held, by the thread of the request. What is to be written is copied out in the same way, so the threads of
the tiers never touch the cache.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvcache.kernels.kernels import BITS_VERSION
from kvcache.prefix.block_file import arena_of_blocks, formats_of
from kvcache.saved.namespaces import encode_namespace
from kvcache.tiers.bodies import copy_in, copy_out
from kvcache.tiers.keys import KeyChain
from kvcache.tiers.links import Link, Measured
from kvcache.tiers.lookups import Lookup, Reader, pays
from kvcache.tiers.spaces import SPACE
from kvcache.tiers.values import VERSION, ValueFormat, Wrapping, wrapping
from kvcache.tiers.writing import WriteBehind, Written

if TYPE_CHECKING:
    from kvcache.prefix.cached_blocks import CachedBlocks

__all__ = ["GROUP_TOKENS", "TierSource"]

logger = logging.getLogger("kvcache")

GROUP_TOKENS = 64  # of a value, or one block where that is larger
_MOST_KNOWN = 1 << 17  # groups whose uses are remembered
_MOST_NAMES = 1 << 10  # namespaces whose keys are
_SENT, _WRONG = 1, 2  # a tier has or gets a group; it has something else under its key

Int32 = npt.NDArray[np.int32]
Tokens = npt.NDArray[np.uint32]


@dataclass(slots=True)
class _Group:
    """A group of tokens as far as it is known: how many requests had it, and what each tier has under its key.

    Threads of tiers note what they learn, without a lock: each tier has a byte of its own.
    """

    tiers: bytearray
    uses: int = 0


class TierSource:
    """The tiers as the source of one cache. No call raises an exception of a tier.

    Args:
        links, writers, reader: of the `Tiers`, the `owner`.
        model: the model's name: all that K and V depend on beside the tokens and what the cache's store says.
        deadline: seconds that `offers` waits for a lookup; 0: it takes what `start` has fetched.
        group_tokens: of a value, in whole blocks, one at least.

    Attributes:
        format: of the values.
        context: what they depend on beside the text.
        make_lookup: makes the lookups, by default `Lookup`.
        computing: tokens per second that the network computes, as far as is known.
    """

    def __init__(
        self, links: list[Link], writers: list[WriteBehind], reader: Reader, model: str, deadline: float, owner: object,
        group_tokens: int = GROUP_TOKENS,
    ) -> None:
        self._links, self._writers, self._reader, self._model, self._deadline = links, writers, reader, model, deadline
        self._owner, self._group_tokens = owner, group_tokens  # the owner lives as long as this
        self.make_lookup: Callable[..., Lookup] = Lookup
        self.computing = Measured()
        self._lookups: list[Lookup] = []
        self._known: OrderedDict[bytes, _Group] = OrderedDict()
        self._wrapped: OrderedDict[bytes, list[Wrapping]] = OrderedDict()
        self._last: tuple[bytes, Tokens, list[list[bytes]]] = b"", np.empty(0, np.uint32), []
        self._expected: dict[int, tuple[Lookup, int]] = {}
        self._cached: CachedBlocks | None = None
        self.context = b""

    def attach(self, cached: CachedBlocks) -> None:
        """See `Source`."""
        store, arena = cached.store, arena_of_blocks(cached)
        self._cached, self._size = cached, store.block_size
        self._pages = max(1, self._group_tokens // self._size)  # of a group
        self.format = ValueFormat(self._pages * self._size, self._pages * store.block_bytes)
        # Each version of bits has its own values; every CPU computes the same ones.
        model = self._model + formats_of(store)
        context = b"\0".join((b"%d" % VERSION, b"%d" % BITS_VERSION, arena.pack(), model.encode()))
        contexts = [context + b"\0encrypted" * link.encrypt for link in self._links]
        size = self.format.group_tokens
        self.context = context
        self._chains = [KeyChain(link.secret, each, size) for link, each in zip(self._links, contexts, strict=True)]

    # -- lookups --------------------------------------------------------------------------------------------

    @contextmanager
    def looking(self, name: Hashable, tokens: Tokens, start: int) -> Iterator[Lookup | None]:
        """A lookup of the groups of `tokens` from token `start` on that runs meanwhile; None: there is none."""
        lookup = self.start(name, tokens, start)
        try:
            yield lookup
        finally:
            self.end(lookup)

    def start(self, name: Hashable, tokens: Tokens, start: int) -> Lookup | None:
        """Begin a lookup, as `looking` does; `end` has to follow."""
        first, stop = start // self.format.group_tokens, len(tokens) // self.format.group_tokens
        if first >= stop:
            return None
        try:
            lookup = self.make_lookup(name, tokens, first, stop, *self.names(name, tokens), self.format, self.computing)
        except TypeError:  # a namespace that has no bytes
            return None
        if not any(pays(lookup, link, stop - first) for link in self._links):
            self._links[0].count("declined")  # by what was measured in the last minute
            return None
        if not self._reader.submit(lookup):
            self._links[0].count("late")
            return None
        self._lookups.append(lookup)
        return lookup

    def end(self, lookup: Lookup | None) -> None:
        """End a lookup, and note what it learned of the tiers."""
        if lookup is None:
            return
        lookup.cancel()
        self._lookups = [each for each in self._lookups if each is not lookup]
        self._expected = {page: each for page, each in self._expected.items() if each[0] is not lookup}
        for number, absent in enumerate(lookup.absent):
            for group in absent:
                self.lacks(lookup.keys[0][group], number)
            for group in lookup.present[number]:
                self._group(lookup.keys[0][group]).tiers[number] = _SENT
        for number, group in lookup.wrong:
            self.wrong(lookup.keys[0][group], number)

    def end_all(self) -> None:
        """End all lookups."""
        for lookup in self._lookups:
            self.end(lookup)

    def lacks(self, key: bytes, number: int) -> None:
        """Note that a tier has no value for a group."""
        if (known := self._known.get(key)) is not None:
            _lost(known, number)

    def wrong(self, key: bytes, number: int) -> None:
        """Note that a tier has something else under the key of a group."""
        self._group(key).tiers[number] = _WRONG

    def _keys(self, name: Hashable, tokens: Tokens) -> list[list[bytes]]:
        """The keys of all groups, for each tier."""
        encoded, size = encode_namespace(name), self.format.group_tokens
        before, known, keys = self._last
        if encoded == before and len(tokens) <= len(known) and np.array_equal(known[: len(tokens)], tokens):
            return [each[: len(tokens) // size] for each in keys]  # as when a text is evicted from its end
        by_secret: dict[bytes, list[bytes]] = {}
        for chain in self._chains:
            if chain.secret not in by_secret:
                by_secret[chain.secret] = chain.keys(encoded, tokens)
        self._last = encoded, tokens.copy(), [by_secret[chain.secret] for chain in self._chains]
        return self._last[2]

    def names(self, name: Hashable, tokens: Tokens) -> tuple[list[list[bytes]], list[Wrapping]]:
        """The keys and the wrappings of the values of a text, for each tier; TypeError: its namespace has no bytes."""
        return self._keys(name, tokens), self._wrappings(name)

    def _wrappings(self, name: Hashable) -> list[Wrapping]:
        """The wrappings of the values of a namespace, for each tier."""
        encoded = encode_namespace(name)
        if (found := self._wrapped.get(encoded)) is None:
            found = [wrapping(link.secret, link.encrypt, encoded) for link in self._links]
            self._wrapped[encoded] = found
            if len(self._wrapped) > _MOST_NAMES:
                self._wrapped.popitem(last=False)
        return found

    # -- Source ---------------------------------------------------------------------------------------------

    def offers(self, name: Hashable, tokens: Tokens, start: int) -> int:
        """See `Source`: the pages that have arrived."""
        try:
            return self._offers(name, tokens, start)
        except Exception:
            logger.warning("tiers are not asked", exc_info=True)
            return 0

    def _offers(self, name: Hashable, tokens: Tokens, start: int) -> int:
        lookup = self._lookup_of(name, tokens)
        if lookup is None and self._deadline > 0:
            self.end_all()  # one for whose pages there was no room
            lookup = self.start(name, tokens, start * self._size)
            if lookup is not None:
                lookup.wait(self._deadline)
        if lookup is None:
            return 0
        count = lookup.available(start * self._size) // self._size - start
        if self._deadline > 0 and not count:
            self.end(lookup)
        return count

    def _lookup_of(self, name: Hashable, tokens: Tokens) -> Lookup | None:
        return next((each for each in self._lookups if each.covers(name, tokens)), None)

    def expect(self, name: Hashable, tokens: Tokens, start: int, pages: Int32) -> None:
        """See `Source`."""
        if (lookup := self._lookup_of(name, tokens)) is not None:
            self._expected.update((page, (lookup, i)) for i, page in enumerate(pages.tolist(), start))

    def fetch(self, pages: Int32) -> Int32:
        """See `Source`: copy what has arrived into the pages."""
        assert self._cached is not None
        found: list[tuple[int, Lookup, memoryview, int]] = []
        for page in pages.tolist():
            lookup, i = self._expected.pop(page, (None, 0))
            body = None if lookup is None else lookup.bodies.get(i // self._pages)
            if lookup is None or body is None:
                break
            found.append((page, lookup, body, i % self._pages))
        for _, same in groupby(enumerate(found), lambda each: (id(each[1][2]), each[1][3] - each[0])):
            group = [each for _, each in same]
            self.fill([page for page, *_ in group], group[0][2], group[0][3])
        if self._deadline > 0:
            for lookup in {each[1] for each in found}:
                self.end(lookup)
        return np.array([page for page, *_ in found], np.int32)

    def fill(self, pages: list[int], body: memoryview, i: int) -> None:
        """Copy pages of a body, from the `i`-th on, into pages of the cache."""
        assert self._cached is not None
        size = len(body) // self._pages
        copy_in(self._cached.store, np.array(pages, np.int32), body[i * size : (i + len(pages)) * size])

    def spill(self, name: Hashable, tokens: Tokens, pages: Int32) -> None:
        """See `Source`: write the groups that lose a page, unless they have been written."""
        try:
            self._spill(name, tokens, pages)
        except Exception:
            logger.warning("what was evicted is not offered to the tiers", exc_info=True)

    def _spill(self, name: Hashable, tokens: Tokens, pages: Int32) -> None:
        assert self._cached is not None
        if not any(writer.room() >= self.format.value_bytes for writer in self._writers):
            return
        size = self.format.group_tokens
        stop = len(tokens) // size
        first = (len(tokens) - len(pages) * self._size) // size  # the first group of which a page leaves
        if first >= stop:
            return
        kept = self._cached.index.find(tokens[: len(tokens) - len(pages) * self._size], name).pages
        self.write(name, tokens[: stop * size], np.concatenate([kept, pages]), range(first, stop), evicted=True)

    # -- writes ---------------------------------------------------------------------------------------------

    def used(self, name: Hashable, tokens: Tokens) -> None:
        """Note that a request had these tokens; write those groups of them that have been used often enough.

        Raises no exception. To be called without the cache's lock.
        """
        assert self._cached is not None
        try:
            stop = len(tokens) // self.format.group_tokens
            if stop:
                with self._cached.lock:
                    pages = self._cached.index.find(tokens, name).pages
                    stop = min(stop, len(pages) // self._pages)
                    self.write(name, tokens[: stop * self.format.group_tokens], pages, range(stop), evicted=False)
        except Exception:
            logger.warning("what a request computed is not offered to the tiers", exc_info=True)

    def seconds_of(self, num_tokens: int) -> float:
        """The seconds of reading the values of so many tokens from the first tier; 0.0: not measured."""
        rate, groups = self._links[0].rate.mean, num_tokens // self.format.group_tokens
        return 0.0 if not rate else (self._links[0].latency.mean or 0.0) + groups * self.format.value_bytes / rate

    def copied(self, name: Hashable, tokens: Tokens) -> bool:
        """Write the groups of `tokens` that no tier has, however often they were used; whether a tier has each one now.

        One that is queued counts, and so do those whose K and V are not cached. Raises no exception. To be called
        without the cache's lock.
        """
        assert self._cached is not None
        try:
            with self._cached.lock:
                pages = self._cached.index.find(tokens, name).pages
                stop = min(len(tokens) // self.format.group_tokens, len(pages) // self._pages)
                tokens = tokens[: stop * self.format.group_tokens]
                self.write(name, tokens, pages, range(stop), evicted=True)
            groups = map(self._group, self._keys(name, tokens)[0][:stop])
            return self._cached.exact and all(_SENT in each.tiers for each in groups)
        except Exception:
            logger.warning("a text is not copied to the tiers", exc_info=True)
            return False

    def write(self, name: Hashable, tokens: Tokens, pages: Int32, groups: Sequence[int], *, evicted: bool) -> None:
        """Queue groups of `tokens`, whose K and V are in `pages`, for the tiers that are to get them."""
        assert self._cached is not None
        if not self._cached.exact:
            return
        try:
            keys = self._keys(name, tokens)
        except TypeError:  # a namespace that has no bytes
            return
        waits = self._cached.slots.records(pages)["waits"]  # pages that a saved file has, and that no request has read
        wanted: list[tuple[int, list[int]]] = []
        for group in groups:
            if waits[group * self._pages : (group + 1) * self._pages].any():
                continue
            known = self._group(keys[0][group])
            known.uses += not evicted
            numbers = [
                number for number, link in enumerate(self._links)
                if known.tiers[number] != _SENT and (evicted or known.uses >= link.after_uses)
            ]
            if numbers:
                wanted.append((group, numbers))
        room = max((writer.room() for writer in self._writers), default=0) // self.format.value_bytes
        for _, numbers in wanted[max(0, room) :]:
            for number in numbers:
                self._writers[number].refuse()
        wrappings = self._wrappings(name)
        for group, numbers in wanted[: max(0, room)]:
            self._queue(tokens, keys, wrappings, group, numbers, pages[group * self._pages : (group + 1) * self._pages])

    def _queue(
        self, tokens: Tokens, keys: list[list[bytes]], wrappings: list[Wrapping], group: int, numbers: list[int],
        pages: Int32,
    ) -> None:
        """Queue a group for some tiers; writers begin with it while others are copied."""
        assert self._cached is not None
        size, bytes_, own = self.format.group_tokens, self.format.value_bytes, None
        known = self._group(keys[0][group])
        for number in numbers:
            if self._writers[number].room() < bytes_:
                self._writers[number].refuse()
                continue
            own = tokens[group * size : (group + 1) * size].copy() if own is None else own
            value, wrapping = SPACE(bytes_), wrappings[number]
            copy_out(self._cached.store, pages, wrapping.body(self.format, value))
            try:  # at once, while the processor's caches have the body
                wrapping.seal(self.format, keys[number][group], own, value)
            except Exception as error:
                self._links[number].failed(error)
                self._writers[number].refuse()
                continue
            again, known.tiers[number] = known.tiers[number] == _WRONG, _SENT
            lost = partial(_lost, known, number)
            self._writers[number].offer(Written(keys[number][group], value, again, lost))

    def _group(self, key: bytes) -> _Group:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Group(bytearray(len(self._links)))
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        else:
            with suppress(KeyError):  # another thread has forgotten it
                self._known.move_to_end(key)
        return known


def _lost(known: _Group, number: int) -> None:
    if known.tiers[number] == _SENT:
        known.tiers[number] = 0
