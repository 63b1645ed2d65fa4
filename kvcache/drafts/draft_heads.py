"""`DraftHeads`: draft tokens of the layer that a network has behind its last one for that ("MTP", "nextn").

K and V of this layer are a layer of the engine's own cache: shared, evicted, kept and rolled back as those of all other
layers are. A pass of the network fills them; here it runs alone, on its own hidden rows from the second token on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcache.drafts.proposer import Ask, Proposer
from kvcache.errors import KvCacheError
from kvcache.texts.forward import Forward
from kvcache.texts.text import Tokens

__all__ = ["DraftHeads"]


class DraftHeads(Proposer):
    """The MTP layer, as a source; see `Proposer`.

    Args:
        forward: of the engine.
    """

    name = "the MTP layer"

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def prepare(self, asked: Sequence[Ask]) -> list[Ask]:
        return [
            ask for ask in asked
            if ask.text.remaining == 1 and ask.text.prefix is None and ask.text.hidden_before() is not None
        ]

    def propose(self, asked: Sequence[Ask]) -> list[Tokens]:
        pool, drafts = self._forward.pool, [[int(ask.text.tokens[-1])] for ask in asked]
        hidden = [ask.text.hidden_before() for ask in asked]
        most = [pool.in_residual_group(ask.text, ask.most) for ask in asked]
        ahead = 0
        try:
            while running := [i for i, count in enumerate(most) if ahead < count]:
                texts = [asked[i].text for i in running]
                try:
                    pool.append([(text, 1) for text in texts])
                except KvCacheError:  # of memory
                    break
                rows = np.stack([row for i in running if (row := hidden[i]) is not None])
                logits, found = self._forward.draft(texts, [drafts[i][-1] for i in running], rows, ahead)
                for i, token, row in zip(running, logits.argmax(axis=1).tolist(), found, strict=True):
                    drafts[i].append(token)
                    hidden[i] = row
                ahead += 1
        finally:
            for ask in asked:
                pool.cut(ask.text, ask.text.computed)
        return [np.array(each[1:], np.uint32) for each in drafts]
