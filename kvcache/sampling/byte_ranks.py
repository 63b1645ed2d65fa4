"""Vocabularies of bytes by rank, as tiktoken has them: of all neighbours that together are a token, those of the lowest
rank are joined first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcache.gguf.vocabulary import CONTROL, NORMAL, USER_DEFINED, Vocabulary
from kvcache.support.byte_letters import byte_letters

__all__ = ["MAX_TOKEN_BYTES", "rank_vocabulary"]

MAX_TOKEN_BYTES = 256  # each place in a token is tried for merges; the longest of Mistral's has 128


def rank_vocabulary(
    pre: str, ranks: list[bytes], special: Sequence[tuple[str, bool]], *, special_first: bool, add_bos: bool,
    ends: tuple[int | None, int | None, int | None],
) -> Vocabulary:
    """The vocabulary of a file of ranks.

    Args:
        pre: how a text is divided before tokens are joined.
        ranks: the tokens, by rank.
        special: the text of each special token, and whether it is a control token.
        special_first: whether these come before the others, or behind them.
        add_bos: whether a text begins with a token of its own.
        ends: the ids of the first token, the last one and the unknown one; None: there is none.

    Raises:
        ValueError: a text of two tokens.
    """
    words = _written_bytes(ranks)
    texts, kinds = [text for text, _ in special], [CONTROL if control else USER_DEFINED for _, control in special]
    if len({*texts, *words}) != len(texts) + len(words):
        raise ValueError("special: expected texts that are no other tokens, got one twice")
    plain = [NORMAL] * len(words)
    texts, kinds = (texts + words, kinds + plain) if special_first else (words + texts, plain + kinds)
    bos, eos, unknown = ends
    return Vocabulary(
        model="gpt2", pre=pre, texts=texts, kinds=np.array(kinds, np.int32), scores=np.zeros(len(texts), np.float32),
        merges=_merges_by_rank(ranks, words), bos=bos, eos=eos, unknown=unknown, add_bos=add_bos, add_eos=False,
        add_space_prefix=False, strips=False,
    )


def _written_bytes(tokens: list[bytes]) -> list[str]:
    """Tokens as byte-level BPE writes them."""
    letters = byte_letters()
    return ["".join(letters[byte] for byte in token) for token in tokens]


def _merges_by_rank(ranks: list[bytes], words: list[str]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the lowest rank first; ties in the order of the ranks of the parts.

    Args:
        ranks: the tokens, by rank.
        words: the same, as `_written_bytes` writes them.
    """
    ids = {token: rank for rank, token in enumerate(ranks)}
    found = []
    for token, word in zip(ranks, words, strict=True):
        pairs = []
        for i in range(1, len(token)):
            left, right = ids.get(token[:i]), ids.get(token[i:])
            if left is not None and right is not None:
                pairs.append((left, right, i))
        found += [(word[:i], word[i:]) for _, _, i in sorted(pairs)]
    return found
