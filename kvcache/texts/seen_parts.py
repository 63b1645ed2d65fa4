"""`SeenParts`: the parts of cached texts that a text sees before it, as a value.

    cached text 0    [head                       ]                     seen: all                   offset 0
    cached text 1    [head                       ][document A    ]     seen: what follows the head   offset 0
    cached text 2    [head                       ][document B ]        seen: what follows the head   offset len(A)
    the text          positions behind head, A and B

A query of the text attends to each part apart, turned to where the part stands (its own position less the offset), then
to its own text; the results are merged in the order of the parts, the own text last. So K and V of a cached text are
stored once and read at any place of any request, and the bits of a text are a function of this value and its tokens.

An edit of a conversation is such a value too: one part, the text so far without the spans that were cleared, offset 0.
A cached text may itself stand behind such a value, so edits make a chain.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvcache.networks.protocols import Float32, Model
from kvcache.texts.behind import NO_PLACES, base_of, space_behind
from kvcache.texts.text import Text, Tokens

__all__ = ["SeenPart", "SeenParts", "TextKey"]

Int64 = NDArray[np.int64]
Ranges = tuple[tuple[int, int], ...]
TextKey = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True, eq=False)
class SeenPart:
    """A part of one cached text, which another text sees.

    Attributes:
        tokens: of the cached text, all.
        ranges: the tokens that are seen, `[start, stop)` within `tokens`: ascending, apart, none empty.
        offset: how far these stand further on in the request than in their own text.
        behind: what the cached text stands behind; None: nothing.
        since: the first token of the text, by its index, that sees the part; those before it stand before the part.
        ends: the positions in the request of the first and the last token that are seen.
        stop: the position in the request behind the last token of the cached text.
    """

    tokens: Tokens
    ranges: Ranges
    offset: int = 0
    behind: SeenParts | None = None
    since: int = 0
    ends: tuple[int, int] = field(init=False)
    stop: int = field(init=False)

    def __post_init__(self) -> None:
        ends = [0, *(end for pair in self.ranges for end in pair), len(self.tokens)]
        inner = all(start < stop for start, stop in self.ranges) and all(a <= b for a, b in pairwise(ends))
        if not self.ranges or not inner or any(a[1] == b[0] for a, b in pairwise(self.ranges)):
            raise ValueError(
                f"ranges: expected ascending spans that lie apart within {len(self.tokens)} tokens, got {self.ranges}"
            )
        if self.offset < 0 or self.since < 0:
            raise ValueError(f"offset: expected offset and since of 0 or more, got {self.offset} and {self.since}")
        first, last, end = self._places[[self.ranges[0][0], self.ranges[-1][1] - 1, -1]].tolist()
        object.__setattr__(self, "ends", (first + self.offset, last + self.offset))
        object.__setattr__(self, "stop", end + self.offset + 1)

    @property
    def key(self) -> TextKey:
        """The cached text, in a namespace: by what it stands behind and its tokens."""
        return b"" if self.behind is None else self.behind.name, self.tokens.tobytes()

    @property
    def indices(self) -> Int64:
        """The tokens that are seen, int64, ascending."""
        return np.concatenate([np.arange(start, stop) for start, stop in self.ranges])

    @property
    def positions(self) -> Int64:
        """The positions in the request of the tokens that are seen, ascending."""
        return self._places[self.indices] + self.offset

    @property
    def _places(self) -> Int64:
        """The positions of all tokens in the cached text."""
        return Text(self.tokens, prefix=self.behind).places_of(0, len(self.tokens))

    def space(self, own: Hashable) -> Hashable:
        """The namespace of the cached text, within that of the request."""
        return own if self.behind is None else self.behind.space(own)

    def begins_within(self, count: int) -> bool:
        """Whether it has one of the first `count` tokens of the request; these are the first ones of its text too."""
        return self.behind is None and not self.offset and self.ranges[0][0] < count

    def without(self, spans: Ranges) -> SeenPart | None:
        """The part without the tokens at positions `[start, stop)` of the request; None: nothing is left."""
        if all(stop <= self.ends[0] or self.ends[1] < start for start, stop in spans):
            return self
        positions = self._places + self.offset
        seen = np.zeros(len(self.tokens), bool)
        seen[self.indices] = True
        for start, stop in spans:
            seen &= (positions < start) | (positions >= stop)
        ranges = _ranges_of(seen)
        return SeenPart(self.tokens, ranges, self.offset, self.behind, self.since) if ranges else None


@dataclass(frozen=True, slots=True, eq=False)
class SeenParts:
    """The parts that a text sees before it; see above. Values of equal `name` are the same.

    Attributes:
        parts: in the order of the request, which is that of merging.
        num_tokens: the position of the text's first token behind all parts.
        places: the positions of the text's first tokens where these lie among the parts: they run again in place.
        name: a hash of all of this, 20 bytes.
        texts: the cached texts that it needs, each before those that stand behind it, without repetitions.
        sinces, offsets: those of the parts, int64.
        gaps: for each part how many positions lie between the end of its cached text and the first token that sees it;
            below 0: that token stands before the end.
    """

    parts: tuple[SeenPart, ...]
    num_tokens: int
    places: Int64 = field(default_factory=lambda: NO_PLACES)
    name: bytes = field(init=False)
    texts: tuple[SeenPart, ...] = field(init=False)
    sinces: Int64 = field(init=False)
    offsets: Int64 = field(init=False)
    gaps: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.places) > self.num_tokens or (np.diff(self.places, prepend=-1, append=self.num_tokens) <= 0).any():
            raise ValueError(f"places: expected ascending ones below {self.num_tokens}, got {self.places.tolist()}")
        gaps = []
        for part in self.parts:
            last = part.ends[1]
            sees = int(self.places[part.since]) if part.since < len(self.places) else self.num_tokens
            if part.since > len(self.places) or last >= sees:
                raise ValueError(f"parts: expected tokens before position {sees}, which sees them, got one at {last}")
            gaps.append(sees - part.stop)
        digest = blake2b(digest_size=20, person=b"seen parts")
        for part in self.parts:
            ranges = np.array(part.ranges, np.int64)
            sizes = len(part.tokens), len(ranges), part.offset, part.since, part.behind is not None
            digest.update(np.array(sizes, np.int64).tobytes() + part.tokens.astype("<u4").tobytes() + ranges.tobytes())
            digest.update(b"" if part.behind is None else part.behind.name)
        digest.update(np.array([len(self.parts), self.num_tokens, *self.places], np.int64).tobytes())
        object.__setattr__(self, "name", digest.digest())
        object.__setattr__(self, "texts", _texts_of(self.parts))
        object.__setattr__(self, "sinces", np.array([part.since for part in self.parts], np.int64))
        object.__setattr__(self, "offsets", np.array([part.offset for part in self.parts], np.int64))
        object.__setattr__(self, "gaps", tuple(gaps))

    @classmethod
    def of_segments(cls, head: Tokens, documents: Sequence[Tokens], link: int = 0) -> tuple[SeenParts, Tokens]:
        """Make the value of a text behind a head and documents, each of which has seen the head and itself alone.

        Args:
            head, documents: token ids `(n,)`; an empty document is left out.
            link: of each document but the first, which has seen all that is before it, this many first tokens run again
                in place, as the first tokens of the text: these see all that stands before them.

        Returns:
            The value, and the tokens that run again.
        """
        size, parts = len(head), list[SeenPart]()
        if size:
            parts.append(SeenPart(head, ((0, size),)))
        at, again, places = size, [head[:0]], list[Int64]()
        for number, document in enumerate(documents):
            count = min(link, len(document)) if at > size or (number and not size) else 0
            again.append(document[:count])
            places.append(np.arange(at, at + count))
            if count < len(document):
                whole, since = np.concatenate([head, document]), sum(map(len, again))
                parts.append(SeenPart(whole, ((size + count, len(whole)),), at - size, None, since))
            at += len(document)
        return cls(tuple(parts), at, np.concatenate([NO_PLACES, *places])), np.concatenate(again)

    @classmethod
    def of_edit(
        cls, tokens: Tokens, spans: Iterable[tuple[int, int]], before: SeenParts | None = None
    ) -> SeenParts:
        """Make the value of a text behind an edit: it sees all before it but some spans, at the positions they had.

        Args:
            tokens: those of the text so far: since the edit before, where there is one.
            spans: positions `[start, stop)` that are cleared now, in the text and in what it stood behind.
            before: what the text so far stands behind: the value of the edit before. None: it is the first.
        """
        cleared = tuple((int(start), int(stop)) for start, stop in spans)
        parts = [] if before is None else [replace(each, since=0) if each.since else each for each in before.parts]
        if len(tokens):
            parts.append(SeenPart(tokens, ((0, len(tokens)),), 0, before))
        left = [found for each in parts if (found := each.without(cleared)) is not None]
        return cls(tuple(left), base_of(before) + len(tokens))

    def space(self, namespace: Hashable) -> Hashable:
        """The namespace of cached blocks of the texts behind it."""
        return space_behind(self.name, namespace, parts=True)

    def positions(self, layer: int, head: int | None = None) -> Int64:
        """The positions in the request of the tokens that are seen, ascending; the same in all layers."""
        return np.sort(np.concatenate([NO_PLACES, *(part.positions for part in self.parts)]))

    def expect(self, model: Model) -> None:
        """Do nothing: the value is of tokens alone; `CacheSettings.expect` checks what the network has."""

    def attend(self, layer: int, queries: Float32) -> tuple[Float32, Float32]:
        """Never called: the cache of the text attends to `parts`."""
        raise NotImplementedError("the cache of the text attends to parts")

    def reaches(self) -> dict[TextKey, int]:
        """For each of `texts` the least of its `gaps`, here and in what the others stand behind."""
        found, values, known = dict[TextKey, int](), [self], {self.name}
        for value in values:
            for part, gap in zip(value.parts, value.gaps, strict=True):
                found[part.key] = min(gap, found.get(part.key, gap))
                if part.behind is not None and part.behind.name not in known:
                    known.add(part.behind.name)
                    values.append(part.behind)
        return found

    @property
    def num_seen(self) -> int:
        """The tokens that are seen, those of `places` not counted."""
        return sum(stop - start for part in self.parts for start, stop in part.ranges)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_seen} of {self.num_tokens} tokens, in {len(self.parts)} parts)"


def _texts_of(parts: Sequence[SeenPart]) -> tuple[SeenPart, ...]:
    """The texts of parts and those behind which they stand, each before those behind it, without repetitions.

    What the last part stands behind comes first: in a chain of edits it has all that the others stand behind.
    """
    found, known = dict[TextKey, SeenPart](), {b""}  # the names of those all of whose texts are found
    behind = [part.behind for part in (*parts[-1:], *parts)]
    for seen, part in zip(behind, (None, *parts), strict=False):
        if seen is not None and seen.name not in known:
            known.add(seen.name)
            for each in seen.texts:
                found.setdefault(each.key, each)
                known.add(b"" if each.behind is None else each.behind.name)
        if part is not None:
            found.setdefault(part.key, part)
    return tuple(found.values())


def _ranges_of(seen: NDArray[np.bool_]) -> Ranges:
    """The spans of True."""
    edges = np.flatnonzero(np.diff(seen.astype(np.int8), prepend=0, append=0))
    return tuple((int(start), int(stop)) for start, stop in edges.reshape(-1, 2))
