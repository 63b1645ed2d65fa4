"""The system of `BatchEngine` for `reentry.py`: requests with known answers."""

from typing import ClassVar

from systems.engine import GREEDY, MODEL, PROMPTS, Network
from systems.system import System, pure, release

from kvcache import BatchEngine, InferenceEngine


class BatchSystem(System):
    """A network that makes nested calls; requests that run beside one another."""

    options: ClassVar[dict[str, object]] = {}
    answers: ClassVar[list[list[int]]] = []
    rare = ("generate_batch", "score_batch", "result")
    slow = 8

    def _build(self):
        self.engine = BatchEngine(Network(self), num_blocks=12, max_queue=20, **self.options)
        self.requests = []
        if not self.answers:
            alone = InferenceEngine(MODEL, **self.options)
            self.answers.extend(alone.generate(prompt, GREEDY) for prompt in PROMPTS)
        self.submit(self.wrap)

    def _which(self):
        return self.random.randrange(len(PROMPTS))

    def _right(self, request, which):
        tokens = request.tokens
        assert tokens == self.answers[which][: len(tokens)], f"answered {tokens}"
        return tokens

    def submit(self, wrap):
        which = self._which()
        request = self.engine.submit(
            wrap.tokens(PROMPTS[which]), GREEDY, namespace=wrap.name("b"),
            priority=wrap.integer(self.random.randrange(3)),
        )
        self.requests.append((request, which))

    def step(self, wrap):
        self.engine.step()
        return [self._right(*each) for each in self.requests]

    def next_token(self, wrap):
        request, which = self.random.choice(self.requests)
        for _ in request:
            break
        return self._right(request, which)

    def result(self, wrap):
        request, which = self.random.choice(self.requests)
        request.result()
        return self._right(request, which)

    def samples(self, wrap):
        request = self.engine.submit(wrap.tokens(PROMPTS[0]), GREEDY, n=wrap.integer(2))
        self.requests.append((request, 0))

    @release
    def cancel(self, wrap):
        if self.requests:
            self.random.choice(self.requests)[0].cancel()

    @release
    def drop(self, wrap):
        if len(self.requests) > 3:
            self.requests.pop(0)

    def generate_batch(self, wrap):
        answers = self.engine.generate_batch([wrap.tokens(prompt) for prompt in PROMPTS], GREEDY, progress=False)
        assert answers == self.answers, f"answered {answers}"

    def score_batch(self, wrap):
        return self.engine.score_batch([wrap.tokens(PROMPTS[1])], progress=False)

    def clear_cache(self, wrap):
        self.engine.clear_cache()

    @pure
    def check(self, wrap):
        self.engine.check()

    @pure
    def reports(self, wrap):
        it = self.engine
        return it.config.num_layers, it.tokenizer, it.is_running, sorted(it.memory())

    @pure
    def blocks(self, wrap):
        stats = self.engine.stats()
        return stats.free_blocks + stats.claimed_blocks + stats.cached_blocks

    def _verify(self):
        while self.engine.step():
            pass
        self.engine.check()
        for request, which in self.requests:
            assert request.is_finished
            tokens = self._right(request, which)
            assert request.finish_reason in ("cancelled", "error") or tokens == self.answers[which]
        self.requests.clear()
        self.submit(self.wrap)
        request, which = self.requests[0]
        request.result()
        assert request.tokens == self.answers[which]

    def _finish(self):
        self.engine.clear_cache()
        stats = self.engine.stats()
        assert (stats.waiting, stats.running, stats.claimed_blocks, stats.cached_blocks) == (0, 0, 0, 0)


class BatchWithResidualSystem(BatchSystem):
    options: ClassVar[dict[str, object]] = {"dtype": "q4", "residual_length": 12}
    answers: ClassVar[list[list[int]]] = []
