"""`DraftNetwork`: draft tokens of a small network of the same vocabulary, with K and V of its own.

Each text of the engine has a shadow here, a text of the same tokens in the pool of the small network. It catches up in
the pass that gives the first draft token; further ones run on a fork of it, which is dropped: nothing is rolled back,
whatever the layers keep. Shadows share prefixes as texts do: where the engine finds a cached prompt, its shadow does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcache.core.memory import total
from kvcache.drafts.proposer import NO_DRAFT, Ask, Proposer
from kvcache.errors import KvCacheError, OutOfMemoryError
from kvcache.networks.protocols import Float32, Model
from kvcache.texts.forward import Forward
from kvcache.texts.settings import CacheSettings
from kvcache.texts.text import Text, Tokens

__all__ = ["DraftNetwork"]

_READ = 64  # tokens of texts that are new here, in a step: other texts wait for them
_SOON = 16  # tokens that a shadow may be behind, and still propose


class DraftNetwork(Proposer):
    """A small network as a source; see `Proposer`.

    Args:
        settings: of its cache, for two texts for each one of the engine.
        num_blocks: of its cache.
        vocab_size: of the engine's network; token ids from there on are not proposed. A text with one that is not in
            the small network's vocabulary has no draft tokens from there on.
    """

    name = "the network"

    def __init__(self, settings: CacheSettings, num_blocks: int, vocab_size: int) -> None:
        self.model: Model = settings.model
        self._pool = settings.pool(num_blocks)
        self._forward = Forward(self.model, self._pool)
        self._vocab_size, self._most = vocab_size, self.model.config.max_position_embeddings
        self._shadows: dict[object, Text] = {}  # by the key, the one that was asked for last at the end
        self._busy: set[object] = set()  # those that are asked for now
        self._strange: set[object] = set()  # keys of texts with a token that this network does not have

    # -- shadows --------------------------------------------------------------------------------------------

    def behind(self, ask: Ask) -> int:
        shadow = self._shadows.get(ask.key)
        if ask.key in self._strange:
            return 0
        if shadow is None:
            shadow = self._shadows[ask.key] = self._begin(ask)
        cached = shadow.computed if shadow.seq_id >= 0 else self._pool.shared.longest(shadow)
        return max(0, ask.text.num_tokens - cached - _SOON)

    def _begin(self, ask: Ask) -> Text:
        """The shadow of a text that has none; without a sequence."""
        text = ask.text
        shadow = Text(text.tokens[: text.num_prompt].copy(), text.namespace)
        shadow.parts_at = text.parts_at
        shadow.regime = self._forward.regime(min(text.num_tokens + ask.most, self._most))
        shadow.space = self._forward.space_of(shadow)
        return shadow

    def prepare(self, asked: Sequence[Ask]) -> list[Ask]:
        ready, left, self._busy = [], _READ, {ask.key for ask in asked}
        for ask in asked:
            shadow = None if ask.key in self._strange else self._follow(ask)
            if shadow is None:
                continue
            if (behind := shadow.remaining - _SOON) > 0 and left > 0:
                count = min(behind, left)
                if not self._run([(shadow, count)], 0):
                    continue
                left -= count
            if 0 < shadow.remaining <= _SOON:
                ready.append(ask)
        return ready

    def _follow(self, ask: Ask) -> Text | None:
        """The shadow of a text, with all its tokens and a sequence; None: it has no room, or cannot have them."""
        text = ask.text
        shadow = self._shadows.pop(ask.key, None)
        self._shadows[ask.key] = shadow = shadow or self._begin(ask)
        new = text.tokens[shadow.computed :]
        if len(new) and int(new.max()) >= self.model.config.vocab_size:
            self._strange.add(ask.key)
            self._pool.stop(shadow)
            return None
        for token in text.tokens[shadow.num_tokens :].tolist():
            shadow.add(token)
        regime = self._forward.regime(min(shadow.num_tokens + ask.most, self._most))
        if shadow.num_tokens >= self._most or (shadow.seq_id >= 0 and regime != shadow.regime):
            self._pool.stop(shadow)
        if shadow.num_tokens >= self._most:
            return None
        if shadow.seq_id < 0:
            shadow.regime = regime
            shadow.space = self._forward.space_of(shadow)
            while not self._pool.start(shadow, [each for each in self._shadows.values() if each.seq_id >= 0]):
                if not self._release():
                    return None
        return shadow

    def _release(self) -> bool:
        """Take the sequence of the shadow that was asked for longest ago, and not now; whether there is one."""
        for key, shadow in self._shadows.items():
            if shadow.seq_id >= 0 and key not in self._busy:
                self._pool.stop(shadow)
                return True
        return False

    def _run(self, pieces: Sequence[tuple[Text, int]], rows: int) -> list[Float32]:
        """Run the next tokens of texts; the last `rows` logits of each, or nothing if there is no room."""
        while True:
            try:
                self._pool.append(pieces)
                break
            except OutOfMemoryError:
                if not self._release():
                    return []
        found: dict[int, Float32] = {}
        for regime in sorted({text.regime for text, _ in pieces}):
            numbers = [i for i, (text, _) in enumerate(pieces) if text.regime == regime]
            logits = self._forward.run([(*pieces[i], rows) for i in numbers])
            found.update(zip(numbers, logits, strict=True))
        size = self._pool.block_size
        for text, count in pieces:
            filled = (text.computed + count) // size > text.computed // size
            self._pool.ran(text, count)
            self._pool.compact(text)
            if filled and text.shares:
                self._pool.index(text)
        return [found[i] for i in range(len(pieces))]

    # -- draft tokens ---------------------------------------------------------------------------------------

    def propose(self, asked: Sequence[Ask]) -> list[Tokens]:
        shadows = [self._shadows[ask.key] for ask in asked]
        drafts: list[list[int]] = [[] for _ in asked]
        forks: dict[int, Text] = {}
        running = dict(enumerate(shadows))
        try:
            while running:
                rows = self._run([(text, text.remaining) for text in running.values()], 1)
                if not rows:
                    break
                for i, row in zip(list(running), rows, strict=True):
                    token = int(row[0, : self._vocab_size].argmax())
                    drafts[i].append(token)
                    text = running.pop(i)
                    if len(drafts[i]) == asked[i].most or text.num_tokens >= self._most:
                        continue
                    if i not in forks and not self._fork(text, i, forks, token):
                        continue
                    if text is not shadows[i]:
                        text.add(token)
                    running[i] = forks[i]
        finally:
            for fork in forks.values():
                self._pool.drop(fork)
        return [np.array(each, np.uint32) if each else NO_DRAFT for each in drafts]

    def _fork(self, shadow: Text, number: int, forks: dict[int, Text], token: int) -> bool:
        """Begin a fork of a shadow with one token more; whether there is room."""
        fork = shadow.continued(np.array([token], np.uint32), shadow.num_tokens)
        fork.shares = False
        fork.moved(-1, 0, ())
        try:
            self._pool.fork(shadow, fork, shadow.computed)
        except KvCacheError:
            return False
        forks[number] = fork
        return True

    # -- the end, and reports -------------------------------------------------------------------------------

    def end(self, key: object) -> None:
        self._strange.discard(key)
        if (shadow := self._shadows.pop(key, None)) is not None:
            if shadow.seq_id >= 0:
                self._pool.index(shadow)
            self._pool.stop(shadow)

    def settle(self) -> None:
        for shadow in self._shadows.values():
            shadow.moved(-1, 0, ())
        self._pool.shared.close_sessions()
        self._pool.settle()

    def memory(self) -> dict[str, int]:
        weights = getattr(self.model, "weights", None)
        own = {"weights": getattr(weights, "nbytes", 0), "scratch": getattr(weights, "scratch_bytes", 0)}
        shadows = [each for each in list(self._shadows.values()) if each.seq_id >= 0]  # others may run a step meanwhile
        return total(self._pool.memory(shadows), own)

    def check(self) -> None:
        self._pool.check([each for each in self._shadows.values() if each.seq_id >= 0])
        for shadow in self._shadows.values():
            assert shadow.computed <= shadow.num_tokens, f"{shadow}: more has run than there is"
