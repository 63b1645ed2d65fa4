"""Vocabularies of bytes by rank, as tiktoken has them: of all neighbours that together are a token, those of the lowest
rank are joined first.
"""

from __future__ import annotations

__all__ = ["MAX_TOKEN_BYTES", "merges_by_rank", "written_bytes"]

MAX_TOKEN_BYTES = 256  # each place in a token is tried for merges; the longest of Mistral's has 128


def written_bytes(tokens: list[bytes]) -> list[str]:
    """Tokens as byte-level BPE writes them: a character for each byte, and printable ones stand for themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    letters = [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
    return ["".join(letters[byte] for byte in token) for token in tokens]


def merges_by_rank(ranks: list[bytes], words: list[str]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the lowest rank first; ties in the order of the ranks of the parts.

    Args:
        ranks: the tokens, by rank.
        words: the same, as `written_bytes` writes them.
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
