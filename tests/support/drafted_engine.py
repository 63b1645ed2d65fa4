"""An engine that only counts seconds: texts, and sources of draft tokens that hold with a known chance."""

import numpy as np
from serving import Clock

from kvcache.drafts.drafter import Drafter

MOST = 8  # draft tokens of a text


def MEMORY_BOUND(rows):
    return 10e-3 + 0.3e-3 * rows


def COMPUTE_BOUND(rows):
    return 1e-3 + 9e-3 * rows


def TILES(rows):
    """Products run four rows at once, and others one by one."""
    return 4e-3 + 0.8e-3 * rows + 1.5e-3 * (rows // 4 + rows % 4)


class KnownSource:
    """Proposes tokens that hold with a chance.

    Args:
        clock: advances by what it takes.
        chance: of each token, by the number of the pass.
        seconds: of each token.
        unread: tokens of a new text that it has to read first, each of which takes `seconds` too.
    """

    name = "a source that is known"

    def __init__(self, clock, chance, seconds=0.0, unread=0):
        self.clock, self.chance, self.seconds, self.unread = clock, chance, seconds, unread
        self.rng, self.read, self.passes, self.asked = np.random.default_rng(5), {}, 0, []

    def knows(self, text):
        return True

    def behind(self, ask):
        return self.unread - self.read.get(ask.key, 0)

    def prepare(self, asked):
        ready = []
        for ask in asked:
            count = min(self.behind(ask), 64)
            self.read[ask.key] = self.read.get(ask.key, 0) + count
            self.clock.now += count * self.seconds
            ready += [ask] if not count else []
        return ready

    def propose(self, asked):
        self.asked.append((self.passes, len(asked)))
        for ask in asked:
            held = self.rng.random(ask.most) < self.chance(self.passes)
            ask.text.held = int(np.cumprod(held).sum())
            self.clock.now += ask.most * self.seconds
        return [np.zeros(ask.most, np.uint32) for ask in asked]

    def end(self, key):
        self.read.pop(key, None)


class KnownText:
    """A text of as many tokens as are drawn."""

    matcher = None

    def __init__(self, drafts):
        self.drafts, self.tokens, self.itself = drafts, 0, self
        self.draft, self.held = (), 0

    def most_drafts(self, most):
        return most


class DraftedEngine:
    """Runs passes of texts that end after `length` tokens, each followed by a new one.

    Args:
        seconds: of a pass, by its rows.
        make: makes the sources, of the clock.
        texts: at once.
        noise: standard deviation of the logarithm of a pass's seconds.
        length: tokens of a text.
    """

    def __init__(self, seconds, *make, texts=1, noise=0.0, length=200):
        self.clock, self.seconds, self.noise, self.length = Clock(), seconds, noise, length
        self.sources = [each(self.clock) for each in make]
        self.drafter = Drafter(self.sources, MOST, self.clock)
        self.texts = [KnownText(self.drafter.begin()) for _ in range(texts)]
        self.rng, self.tokens, self.passes = np.random.default_rng(3), 0, 0

    def step(self):
        """Run a pass."""
        for source in self.sources:
            source.passes = self.passes
        self.drafter.give(self.texts, 16 - len(self.texts))
        drafted = [len(text.draft) for text in self.texts]
        assert max(drafted) <= MOST
        rows = len(self.texts) + sum(drafted)
        took = self.seconds(rows) * np.exp(self.noise * self.rng.standard_normal())
        self.clock.now += took
        self.passes += 1
        for i, text in enumerate(self.texts):
            held = min(text.held, drafted[i])
            text.drafts.learn(drafted[i], held)
            text.tokens += 1 + held
            self.tokens += 1 + held
            if text.tokens >= self.length:
                self.drafter.end(text)
                self.texts[i] = KnownText(self.drafter.begin())
        self.drafter.ran(rows, took)

    def run(self, passes):
        """Run passes; how many passes without draft tokens they are worth, and how many they took the time of."""
        tokens, began, count = self.tokens, self.clock.now, len(self.texts)
        for _ in range(passes):
            self.step()
        return (self.tokens - tokens) / count, (self.clock.now - began) / self.seconds(count)

    def best(self, chance, each=0.0):
        """The best rate of a fixed number of draft tokens for each text, beside that of none."""
        count = len(self.texts)
        return max(
            (1 + sum(chance**j for j in range(1, k + 1))) * self.seconds(count)
            / (self.seconds(count + count * k) + count * k * each)
            for k in range(min(MOST, (16 - count) // count) + 1)
        )
