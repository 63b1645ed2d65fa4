"""`CacheSession`: the blocks that a request matched in a `PrefixCache`, held for it."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.prefix.index.slots import Claim
from kvcache.support.copies import refuse_copies

__all__ = ["CacheSession"]


class CacheSession:
    """The matched blocks of a request, which stay in the cache until the session is released or dropped.

    Attributes:
        matched_prefix_len: tokens of the matched blocks.
        tail_block: a block whose first `tail_tokens` tokens continue the match, to be copied; -1 if there is none.
        tail_tokens: see there.
        claim: the references on these blocks; None: a session made by hand has none.
    """

    def __init__(
        self,
        matched_prefix_len: int,
        block_indices: list[int] | None,
        tail_block: int = -1,
        tail_tokens: int = 0,
        claim: Claim | None = None,
        close: Callable[[CacheSession], None] | None = None,
    ) -> None:
        self.matched_prefix_len = matched_prefix_len
        self.tail_block = tail_block
        self.tail_tokens = tail_tokens
        self._blocks = block_indices
        self.claim = claim
        if claim is not None:
            claim.keep()
        self._close = close

    @property
    def block_indices(self) -> list[int]:
        """The matched blocks in the order of the text."""
        if self._blocks is None:
            assert self.claim is not None
            self._blocks = self.claim.pages[: self.claim.num_held].tolist()
        return self._blocks

    def cached_tokens(self, block_size: int) -> int:
        """Tokens in blocks of this size."""
        return len(self.block_indices) * block_size

    @property
    def is_empty(self) -> bool:
        """Whether no block matched."""
        return not self.block_indices

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed: those of the matched blocks, and the head of the tail block."""
        return self.matched_prefix_len + self.tail_tokens

    @property
    def shared_blocks(self) -> list[int]:
        """The blocks of the session's tokens, the tail block last."""
        return [*self.block_indices, self.tail_block] if self.tail_tokens else list(self.block_indices)

    def __repr__(self) -> str:
        tail = f", {self.tail_tokens} tokens of block {self.tail_block}" if self.tail_tokens else ""
        return f"CacheSession({self.matched_prefix_len} tokens in {len(self.block_indices)} blocks{tail})"

    __reduce_ex__ = refuse_copies("`open_session` opens another one")

    def __enter__(self) -> CacheSession:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._close is not None:
            self._close(self)
