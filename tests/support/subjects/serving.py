"""Subjects of `BatchEngine`."""

import gc
from typing import ClassVar

import numpy as np
from places import GOLDEN
from serving import Clock
from subjects.subject import Subject

from kvcache import BatchEngine, SamplingParams
from kvcache.engine import Transformer

MODEL = Transformer.from_pretrained(GOLDEN / "llama")
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=3)
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=3)


class Batch(Subject):
    """Requests beside one another in a pool that is too small for all; each answer must be right."""

    options: ClassVar[dict[str, object]] = {}

    def _build(self):
        engine = BatchEngine(MODEL, num_blocks=8, clock=Clock(), **self.options)
        self.text = np.arange(3, 63, dtype=np.uint32)
        engine.generate_batch([self.text[:40]], GREEDY, progress=False)
        return engine

    def _state(self):
        return self.answer if hasattr(self, "answer") else None

    def _check(self):
        gc.collect()
        self.it.check()
        stats = self.it.stats()
        assert (stats.waiting, stats.running, stats.claimed_blocks) == (0, 0, 0), "a request was not cancelled"

    def generate_batch(self):
        prompts = [self.text[:50], self.text[20:55], self.text[:33]]
        self.answer = self.it.generate_batch(prompts, DRAWN, progress=False)

    def score_batch(self):
        self.answer = [scores.tobytes() for scores in self.it.score_batch([self.text, self.text[:9]], progress=False)]

    def samples(self):
        request = self.it.submit(self.text[:50], DRAWN, n=2)
        try:
            self.answer = request.result()
        except BaseException:
            request.cancel()
            raise


class BatchWithResidual(Batch):
    """The same where the newest groups are kept unpacked."""

    options: ClassVar[dict[str, object]] = {"dtype": "q4", "residual_length": 12}
    generate_batch = Batch.generate_batch
    score_batch = Batch.score_batch
    samples = Batch.samples


class BatchWithPins(Batch):
    """Requests that keep their prompts for a while, and one that takes the memory of these."""

    options: ClassVar[dict[str, object]] = {}

    def _check(self):
        gc.collect()
        self.it.check()
        self.it.clear_cache()
        stats = self.it.stats()
        assert (stats.waiting, stats.running, stats.claimed_blocks, stats.pinned_blocks) == (0, 0, 0, 0)

    def pinned(self):
        answers = []
        for text in (self.text[:40], self.text[:60], self.text[20:55]):
            request = self.it.submit(text, DRAWN, keep=100.0)
            try:
                answers.append(request.result())
            except BaseException:
                request.cancel()
                raise
        self.answer = answers
