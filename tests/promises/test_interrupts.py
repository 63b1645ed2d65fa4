"""Ctrl-C and a failing network at every step of a request: nothing is pinned or lost, and the next request works.

An interrupt may occur between any two lines of Python; the state is mended before the next call (core/locks.pyx). By
default some of the lines of `kvcache/` that a call executes are interrupted, with --long every execution of every
line. Compiled calls are whole here: test_interrupts_caches.py interrupts them, in every build.
"""

import gc

import numpy as np
import pytest
from pace import FAST
from places import GOLDEN
from subjects.interrupts import Lines, places

from kvcache import Calibration, EvictionPolicy
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams, Transformer

pytestmark = [pytest.mark.exhaustive, pytest.mark.one_build]

GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=4)
TEXT = np.random.default_rng(5).integers(0, 200, 90).astype(np.uint32)
CALIBRATION = Calibration(np.random.default_rng(0).standard_normal((2, 2, 16)))
OPTIONS = {
    "plain": {"num_blocks": 12},
    "residual": {"num_blocks": 12, "dtype": "q4", "residual_length": 12},
    "calibrated": {"num_blocks": 12, "dtype": "q4", "residual_length": 12, "calibrate": CALIBRATION},
    "first tokens": {"num_blocks": 12, "dtype": "q4", "residual_length": 0, "calibrate": CALIBRATION},
    "evicting": {"eviction_policy": EvictionPolicy.H2O(), "kv_budget": 24, "block_size": 4},
    "streaming": {"eviction_policy": EvictionPolicy.StreamingLLM(3, 21), "block_size": 4},
}
KINDS = [*OPTIONS, "cached", "cached residual", "cached calibrated"]


@pytest.fixture(scope="module")
def network():
    return Transformer.from_pretrained(GOLDEN / "llama")


class Served:
    """A warm engine; a test disturbs one of its calls."""

    def __init__(self, kind, network):
        self.kind = kind
        self.cached = kind.startswith("cached")
        options = OPTIONS[kind.removeprefix("cached").strip() or "plain"]
        engine = InferenceEngine(network, prefill_chunk=16, **options)
        # 5 blocks of prefixes: the second prompt must evict blocks of the first.
        self.it = PrefixCachedEngine(engine, 5, strict=True) if self.cached else engine
        self.inner = engine
        if self.cached:
            self.it.generate(TEXT[40:], GREEDY, namespace="other")
        self.it.generate(TEXT[:40], GREEDY)

    def generate(self):
        return self.it.generate(TEXT[:58], GREEDY)

    def stream(self):
        return list(self.it.stream(TEXT[:58], GREEDY))

    def prefill(self):
        return self.inner.prefill_from_pos(TEXT[50:70], self.inner.num_tokens).tobytes()

    def go_back(self):
        return self.inner.prefill_from_pos(TEXT[50:70], 0).tobytes()

    def step(self):
        return self.inner.decode_step(7, self.inner.num_tokens).tobytes()

    def score(self):
        return self.inner.score(TEXT[:40]).tobytes()

    def settled(self):
        """Check that only the prefix cache and the current sequence hold blocks."""
        gc.collect()
        self.it.check()
        cache, owned = self.inner.cache, self.inner.cache.sequence_ids()
        layers = self.inner.config.num_layers if self.kind in ("evicting", "streaming") else 1
        assert len(owned) == layers, f"sequences {owned}"
        held = {block for seq in owned for block in cache.get_sequence(seq).block_ids}
        if self.cached:
            prefixes = self.it.prefix_cache.cache
            for each in (prefixes, *self.it._pool.prefixes[1:]):
                assert each.pinned_blocks == 0
                assert each.references().sum() == len(each)
            held.update(prefixes.block_ids())
        assert cache.used_block_count == len(held)

    def state(self):
        """The sequence, bit for bit: its length, its positions, and its K and V."""
        cache, inner = self.inner.cache, self.inner
        data = [
            [rows.tobytes() for rows in cache.read(layer, seq)]
            for seq in cache.sequence_ids()
            for layer in range(cache.num_layers)
        ]
        return inner.num_tokens, [inner.kept_positions(i).tolist() for i in range(inner.config.num_layers)], data


def disturbed(served, name, disturb):
    """Run the call under `disturb`; returns whether it was interrupted."""
    try:
        with disturb:
            getattr(served, name)()
    except KeyboardInterrupt:
        return True
    return False


def expected(kind, network, name):
    """`(seen, answer, state)` of the undisturbed call."""
    served = Served(kind, network)
    getattr(served, name)()  # the first call loads modules and fills caches
    served = Served(kind, network)
    with Lines() as lines:
        answer = getattr(served, name)()
    served.settled()
    return lines.seen, answer, served.state()


CALLS = [
    *((kind, name) for kind in KINDS for name in ("generate", "stream")),
    *((kind, name) for kind in OPTIONS for name in ("prefill", "go_back", "step")),
    ("plain", "score"),
    ("evicting", "score"),
]


@pytest.mark.parametrize(("kind", "name"), CALLS)
def test_interrupted_at_every_line(network, long, kind, name):
    reference = Served(kind, network).generate()
    seen, answer, after = expected(kind, network, name)
    assert name not in ("generate", "stream") or answer == reference
    chosen = places(seen, every=long)
    if not long:
        chosen = chosen[:: max(1, len(chosen) // (3 if FAST else 6))]
    problems = []
    for stop in chosen:
        served = Served(kind, network)
        before = served.state()
        lines = Lines(stop)
        try:
            interrupted = disturbed(served, name, lines)
            assert lines.handled_at, "the run was another one"
            served.settled()
            if name in ("prefill", "go_back", "step"):
                assert served.state() in ((before, after) if interrupted else (after,)), "half of it was done"
            elif name != "stream":
                assert served.inner.num_tokens in (0, before[0], after[0])
            # The sequence can be continued, and the next request works.
            served.step()
            served.settled()
            assert served.generate() == reference
            served.settled()
        except Exception as error:
            problems.append(f"{lines.handled_at} ({stop} of {len(seen)}): {type(error).__name__}: {str(error)[:150]}")
    print(f"{kind}.{name}: {len(chosen)} interrupts at {len(set(seen))} lines, {len(problems)} problems")
    assert not problems, f"{len(problems)} of {len(chosen)}:\n" + "\n".join(problems[:40])


class Failing:
    """A network that fails before or after a chosen call of `attend`, counted over all passes."""

    def __init__(self, network):
        self.network, self.config = network, network.config
        self.countdown, self.after, self.calls = -1, False, 0

    def forward(self, tokens, positions, attend, logits, *, sink_positions=None):
        def counted(*args):
            self.calls += 1
            self.countdown -= 1
            if self.countdown == 0 and not self.after:
                raise RuntimeError("broken")
            mixed = attend(*args)
            if self.countdown == 0:
                raise RuntimeError("broken")
            return mixed

        return self.network.forward(tokens, positions, counted, logits, sink_positions=sink_positions)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("kind", "name"), CALLS[: 2 * len(KINDS)])
def test_a_network_that_fails_at_many_steps(network, kind, name, after):
    """It fails in one of two layers of every piece of the prompt and of every step."""
    reference = Served(kind, network).generate()
    model = Failing(network)
    served = Served(kind, model)
    calls = model.calls
    getattr(served, name)()
    for fails in range(1 + after, model.calls - calls + 1, 2):
        served = Served(kind, model)
        model.countdown, model.after = fails, after
        with pytest.raises(RuntimeError, match="broken"):
            getattr(served, name)()
        served.settled()
        served.step()
        served.settled()
        assert served.generate() == reference
        served.settled()
