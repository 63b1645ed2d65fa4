"""`Documents`: the segments of a request, documents that see the head and themselves alone: each is computed once.

    head      [system prompt]
    segments  [head][document A]   [head][document B]    each an ordinary cached text: what follows the head is seen
    question                                              sees the head, A, B and itself, at positions behind all

With `link`, the first tokens of each document but the first run again in place and see all that stands before them.
The answer is a function of the head, the documents in their order, `link` and the question, as tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.networks.tokens import as_tokens
from kvcache.sampling.text_tokens import encoded
from kvcache.support.arguments import as_count, short
from kvcache.texts.behind import Behind
from kvcache.texts.seen_parts import SeenParts, TextKey

__all__ = ["LINK", "NO_DOCUMENTS", "Documents", "Placed", "Segment", "SegmentUse", "place"]

Tokens = NDArray[np.uint32]
LINK = 16  # first tokens of a document that run again: fewer lose more, more gain little


@dataclass(frozen=True, slots=True)
class Segment:
    """A document of a request: its text, or its token ids.

    Attributes:
        text: a str, or token ids; tokenised alone, without special tokens.
        name: what usage calls it; None: nothing.
    """

    text: Any
    name: str | None = None


class SegmentUse(NamedTuple):
    """The tokens of a segment, and how many of them were cached.

    Attributes:
        name: that of the `Segment`.
        tokens: of the document.
        cached: those of them whose K and V were cached.
    """

    name: str | None
    tokens: int
    cached: int


class Documents(NamedTuple):
    """The arguments of a request about its segments, as they are given.

    Attributes:
        head: the text before them, or token ids; None: there is none.
        segments: each a `Segment`, a text or token ids; None: there are none.
        link: see `SeenParts.of_segments`.
    """

    head: Any = None
    segments: Iterable[Any] | None = None
    link: int = LINK


NO_DOCUMENTS = Documents()


class Placed(NamedTuple):
    """A prompt, and what it stands behind.

    Attributes:
        prompt: token ids or a text, as a request takes it.
        prefix: what its text stands behind; None: nothing.
        names, lengths: of its segments.
        texts: of each segment the cached text that has it; None: the segment runs with the prompt.
        head: tokens of the head.
    """

    prompt: Any
    prefix: Behind | None
    names: tuple[str | None, ...] = ()
    lengths: tuple[int, ...] = ()
    texts: tuple[TextKey | None, ...] = ()
    head: int = 0

    def uses(self, cached: Mapping[TextKey, int]) -> list[SegmentUse] | None:
        """The use of each segment; None: there are none.

        Args:
            cached: of each cached text the tokens that did not run.
        """
        found = zip(self.names, self.lengths, self.texts, strict=True)
        uses = [
            SegmentUse(name, length, 0 if text is None else max(0, cached.get(text, 0) - self.head))
            for name, length, text in found
        ]
        return uses or None


def place(
    prompt: Any, prefix: Behind | None, given: Documents, tokenizer: Callable[[], Any], vocab_size: int
) -> Placed:
    """Put a prompt behind its head and segments.

    The head has the tokens that a prompt would have, where it is None those of an empty text, if a segment is a text.
    Segments, and a prompt behind a head or segments, are tokenised alone, without special tokens.

    Args:
        prompt, prefix: those of the request.
        tokenizer: returns the tokenizer, or None; it is called for texts.

    Raises:
        TypeError: neither texts nor token ids.
        ValueError: segments or a head beside a prefix; an empty segment; a text without a tokenizer; as `as_tokens`.
    """
    documents = [] if given.segments is None else _as_segments(given.segments)
    link = as_count(given.link, "link")
    if given.head is None and not documents:
        return Placed(prompt, prefix)
    if prefix is not None:
        raise ValueError(f"prefix: expected None beside a head or segments, got {short(prefix)}")

    def tokens_of(text: Any, name: str, special: bool = False) -> Tokens:
        if not isinstance(text, str):
            return as_tokens(text, vocab_size)
        encoder = tokenizer()
        if encoder is None:
            raise ValueError(f"{name}: expected token ids, since the engine has no tokenizer, got a text")
        return as_tokens(encoded(encoder, text, name, add_special_tokens=special), vocab_size)

    texts = [tokens_of(each.text, "segments") for each in documents]
    if not all(map(len, texts)):
        raise ValueError("segments: expected at least one token in each, got none")
    if given.head is None and not any(isinstance(each.text, str) for each in documents):
        head = np.empty(0, np.uint32)
    else:
        head = tokens_of("" if given.head is None else given.head, "head", special=True)
    own = tokens_of(prompt, "prompt")
    if not len(own):
        raise ValueError("tokens: expected at least one, got none")
    if not documents:
        return Placed(np.concatenate([head, own]), None)
    seen, again = SeenParts.of_segments(head, texts, link)
    known = {part.key for part in seen.parts}
    keys = [(b"", np.concatenate([head, each]).tobytes()) for each in texts]
    return Placed(
        np.concatenate([again, own]), seen, tuple(each.name for each in documents), tuple(map(len, texts)),
        tuple(key if key in known else None for key in keys), len(head),
    )


def _as_segments(documents: Iterable[Any]) -> Sequence[Segment]:
    if isinstance(documents, (str, bytes)) or not isinstance(documents, Iterable):
        raise TypeError(f"segments: expected a list of segments, texts or token ids, got {short(documents)}")
    return [each if isinstance(each, Segment) else Segment(each) for each in documents]
