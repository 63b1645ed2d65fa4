"""The scheduler by itself: order, budget, twins, fairness under a simulated clock; there is no network."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import GREEDY, Clock, run

from kvcache import BatchEngine, SamplingParams
from kvcache.serving.budget import LEAST, LEAST_ALONE, MOST, TokenBudget, pairs
from kvcache.serving.shares import Shares

pytestmark = pytest.mark.one_build


class Timed:
    """A network that computes nothing and takes its time on a simulated clock; it notes its passes.

    Attributes:
        passes: the number of tokens of each pass.
    """

    selects_rows = True

    def __init__(self, clock, decode=0.02, rate=1000.0):
        self.clock, self.decode, self.rate, self.passes = clock, decode, rate, []
        self.config = SimpleNamespace(
            num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, vocab_size=100, max_position_embeddings=4096
        )

    def forward(self, tokens, positions, attend, logits):
        n = len(tokens)
        rows = np.ones((n, 1, 8), np.float32)
        attend(0, rows, rows, rows)
        self.passes.append(n)
        self.clock.now += self.decode + n / self.rate
        count = n if isinstance(logits, str) else len(logits)
        count = {"last": 1, "none": 0}.get(logits, count) if isinstance(logits, str) else count
        return np.ones((count, 100), np.float32)


def served(num_blocks=400, **options):
    clock = Clock()
    model = Timed(clock)
    return clock, model, BatchEngine(model, num_blocks=num_blocks, clock=clock, **options)


def asked(tokens):
    return SamplingParams(temperature=0.0, max_tokens=tokens)


def test_the_budget():
    budget = TokenBudget(0.1)

    def tokens(decodes, computed=0):
        return max(budget.least(decodes), budget.tokens(budget.seconds(decodes), computed))

    assert budget.least(0) == LEAST_ALONE
    assert budget.least(3) == LEAST
    budget.observe(0, 400, 0.4)
    budget.observe(3, 0, 0.02)
    assert tokens(3) in (69, 70)
    assert tokens(0) in range(340, 360), "four gaps; some of 400 tokens read 400 others"
    budget.observe(3, 70, 0.09)  # as expected: 70 tokens in the 0.07 s beside the decodes
    assert tokens(3) in (69, 70)
    for _ in range(40):
        budget.observe(3, 80, 0.5)
    assert (tokens(3), tokens(0)) == (LEAST, LEAST_ALONE)
    for _ in range(40):
        budget.observe(3, 400, 0.03)
    assert tokens(3) == tokens(0) == MOST
    for gap, most in ((None, 100), (0.05, LEAST), (0.12, LEAST), (0.2, 80)):  # by default as long as the decodes
        budget = TokenBudget(gap)
        budget.observe(0, 400, 0.4)
        budget.observe(3, 0, 0.1)
        assert most - 2 <= tokens(3) <= most


def test_the_budget_learns_what_tokens_before_cost():
    """Long prompts of networks in which a token takes as long as 1,500 or 40,000 pairs; then one behind 15,000."""
    for each in (1500, 40_000):
        budget, per_token = TokenBudget(0.05), 1e-3
        for _ in range(3):
            computed = 0
            while computed < 16_000:
                n = max(budget.least(0), budget.tokens(budget.seconds(0), computed))
                budget.observe(0, n, per_token * (n + pairs(n, computed) / each), pairs(n, computed))
                computed += n
        for computed in (0, 8000, 15_000):
            n = budget.tokens(1.0, computed)
            seconds = per_token * (n + pairs(n, computed) / each)
            assert 0.7 < seconds < 1.4 or n == MOST, (each, computed, n, seconds)
        before = budget.per_token, budget.per_pair
        budget.observe(0, 128, 1e9, pairs(128, 15_000))  # others had the CPUs
        assert budget.per_token <= 2 * before[0]
        for _ in range(3000):  # no time at all: nothing becomes 0
            budget.observe(0, 128, 1e-30, pairs(128, 15_000))
        assert budget.tokens(1e-12) == 0


def test_a_long_prompt_does_not_delay_streams():
    """It runs in pieces beside a stream; after the first ones, whose rate is measured, each step keeps the gap."""
    _, model, engine = served(target_gap=0.08)
    stream = engine.submit([1, 2, 3], asked(60))
    engine.step()
    long = engine.submit(np.arange(1000) % 90, asked(2))
    while not long.is_finished:
        engine.step()
    assert max(stream.metrics.itl) <= 0.0801
    assert max(model.passes) < 80
    _, model, engine = served(target_gap=0.3)
    engine.submit(np.arange(2000) % 90, asked(1)).result()
    assert model.passes[1] == 512, "without streams, pieces are longer"


class Deep(Timed):
    """A network in which a token behind 2,000 others takes twice as long as the first one."""

    def forward(self, tokens, positions, attend, logits):
        self.clock.now += float(positions.sum()) / 2000 / self.rate
        return super().forward(tokens, positions, attend, logits)

    @property
    def longest(self):
        """Seconds of a step without texts that are being written, behind 16,000 tokens."""
        return max(4 * 0.05, 1.1 * (self.decode + 128 * (1 + 16_000 / 2000) / self.rate))


def deep(**options):
    clock = Clock()
    model = Deep(clock, 0.01, 2000.0)
    model.config.max_position_embeddings = 20_000
    return clock, model, BatchEngine(model, num_blocks=3000, clock=clock, draft=None, **options)


def test_a_short_prompt_beside_a_long_one():
    """Nobody streams: its first token comes within a step and three times its own time, however far the long one is."""
    clock, model, engine = deep()
    for number, start in enumerate((0, 300, 4000, 15_000)):
        prompt = np.random.default_rng(number).integers(0, 90, 16_000)
        long, steps = engine.submit(prompt, asked(1)), []
        while long.works[0].computed < start:
            began = clock.now
            engine.step()
            steps.append(clock.now - began)
        assert max(steps, default=0.0) <= model.longest
        own = 0.01 + 10 / model.rate
        for k in range(3):
            forward = model.forward
            sent = []

            def arrives(*arguments, forward=forward, sent=sent, k=k, number=number):  # while a step runs
                if not sent:
                    sent.append(engine.submit(np.random.default_rng(9 + 3 * number + k).integers(0, 90, 10), asked(3)))
                return forward(*arguments)

            model.forward = arrives
            while not sent or not sent[0].is_finished:
                engine.step()
            model.forward = forward
            assert sent[0].metrics.ttft <= 3 * own + model.longest
        long.cancel()
        engine.step()


def test_several_prompts_share_a_step():
    """Three short ones that come together have their first tokens in one step; the long one takes as long in it."""
    _, model, engine = deep()
    long = engine.submit(np.random.default_rng(0).integers(0, 90, 8000), asked(1))
    while long.works[0].computed < 4000:
        engine.step()
    short = [engine.submit([2 + i] * 20, asked(1)) for i in range(3)]
    medium = engine.submit([9] * 3000, asked(1))
    before, budget = long.works[0].computed, engine._steps._scheduler.budget
    allowed = budget.cost(64)
    engine.step()
    assert all(each.is_finished for each in short)
    assert medium.works[0].computed == 4, "the rest of 64 rows"
    assert budget.cost(long.works[0].computed - before, before) < 1.2 * allowed
    assert model.passes[-1] == 64 + long.works[0].computed - before
    for _ in range(10):
        start = {work: work.computed for work in (long.works[0], medium.works[0])}
        engine.step()
        took = [budget.cost(work.computed - at, at) for work, at in start.items()]
        assert 0.7 < took[0] / took[1] < 1.5, "both have half of the time, not of the tokens"
    engine.close(cancel=True)


@settings(max_examples=60)
@given(st.data())
def test_shares(data):
    """Prompts of any lengths: each step runs something, within its time, and the first one has half of it."""
    draw = data.draw
    budget = TokenBudget(draw(st.sampled_from([None, 0.0, 0.05, 1.0])))
    budget.per_token, budget.per_pair = draw(st.sampled_from([(4e-4, 1.6e-7), (2e-3, 1.4e-7), (0.3, 1e-6)]))
    budget.decode_seconds = draw(st.sampled_from([0.0, 0.01, 0.3]))
    decodes, drafts = draw(st.sampled_from([(0, 0), (1, 0), (4, 2)]))
    lengths = st.integers(2, 30_000) | st.integers(2, 60)
    works = [
        SimpleNamespace(
            computed=draw(st.sampled_from([0, 0, 100, 15_000])), remaining=draw(lengths), owed=0.0, chunk=0,
            most_rows=10**9, shares=True, logits_due=lambda count: 0,
        )
        for _ in range(draw(st.integers(1, 12)))
    ]
    first, alone, spent, own = works[0], budget.cost(works[0].remaining, works[0].computed), 0.0, 0.0
    for _ in range(200):
        shares = Shares(budget, decodes, drafts, draw(st.sampled_from([2, 8, 512])), 100)
        shares.divide(works)
        counts = [count for _, count in shares.pieces]
        costs = [budget.cost(count, work.computed) for work, count in shares.pieces]
        assert counts
        assert min(counts) > 0
        assert sum(counts) + drafts <= MOST
        assert len({id(work) for work, _ in shares.pieces}) == len(counts)
        deepest = max(work.computed + count for work, count in shares.pieces)
        most = budget.seconds(decodes) + budget.cost(budget.least(decodes), deepest)
        assert sum(costs) <= most + 2 * budget.cost(LEAST, deepest)
        for (work, count), cost in zip(shares.pieces, costs, strict=True):
            assert count <= work.remaining
            spent, own = spent + cost, own + cost * (work is first)
        for work, count in shares.pieces:
            work.computed, work.remaining = work.computed + count, work.remaining - count
        works = [work for work in works if work.remaining > 0]
        if first.remaining <= 0:
            break
        if draw(st.booleans()):  # another one comes
            works.append(SimpleNamespace(**{**vars(first), "computed": 0, "remaining": draw(lengths), "owed": 0.0}))
    waits = 3 * budget.cost(MOST, 15_000)
    assert spent - own <= own + waits
    assert own <= alone * 1.001


def test_rows_of_the_first_one():
    """Short texts that are scored come without end: a long one has half of the rows, or those of a whole piece."""

    def scored(count, chunk=0):
        return SimpleNamespace(computed=0, remaining=count, owed=0.0, chunk=chunk, shares=False, fixed_piece=chunk,
                               most_rows=10**9, logits_due=lambda count: count)

    for chunk, share in ((0, 32), (16, 16), (64, 64)):
        shares, first = Shares(TokenBudget(1.0), 0, 0, 8, 64), scored(4000, chunk)
        shares.divide([first, *(scored(100) for _ in range(3))])
        assert sum(count for work, count in shares.pieces if work is first) == share
        assert sum(count for _, count in shares.pieces) == 64


def test_a_long_prompt_beside_short_ones_without_end():
    """Each step has a short prompt that ends: the long one runs half of the time that prompts take, and misses none."""
    for gap in (None, 0.0):
        clock, model, engine = deep(target_gap=gap)
        engine.submit([1] * 20, asked(1)).result()
        rng = np.random.default_rng(1)
        long, began, number = engine.submit(rng.integers(0, 90, 4000), asked(1)), clock.now, 0
        while not long.is_finished:
            engine.submit(rng.integers(0, 90, 30), asked(1))
            engine.step()
            number += 1
        alone = (4000 + 4000**2 / 2 / 2000) / model.rate
        assert clock.now - began < 2.6 * (alone + number * model.decode)
        assert number > 20


def test_few_guesses_beside_a_prompt():
    """Streams and their guesses have an eighth of the tokens that may run; alone each checks a guess in every step."""
    _, _, engine = served(target_gap=0.06)
    streams = [engine.submit([0] * 10, asked(600)) for _ in range(4)]

    def gained():
        before = [len(each.tokens) for each in streams]
        engine.step()
        return [len(each.tokens) - old for each, old in zip(streams, before, strict=True)]

    for _ in range(20):
        gained()
    assert gained() == [2] * 4
    long = engine.submit(np.arange(1000) % 90, asked(2))
    counts = [gained()]
    while not long.tokens:
        counts.append(gained())
    assert len(counts) > 20
    assert counts[1:-1] == [[1] * 4] * (len(counts) - 2), "0.028 s of decodes leave 32 tokens, so 4 rows"
    gained()
    assert max(gained()) == 2


def test_guesses_count_among_the_tokens_of_a_step():
    """A piece of a prompt beside a stream that guesses is shorter by the guesses."""
    _, model, engine = served(target_gap=0.1)
    stream = engine.submit([0] * 10, asked(600))
    for _ in range(20):
        engine.step()
    long = engine.submit(np.arange(1000) % 90, asked(2))
    for _ in range(10):
        before, budget = len(stream.tokens), engine._steps._scheduler.budget
        allowed = budget.tokens(budget.seconds(1), long.works[0].computed)
        engine.step()
        assert len(stream.tokens) == before + 2, "a guess, which held"
        assert allowed - 2 <= model.passes[-1] <= 1 + allowed


def test_short_prompts_do_not_wait_for_long_ones():
    """Three of 3,000 tokens, each with three of 60 behind it; the first of all has half of each step, or more."""
    _, model, engine = served(num_blocks=800, target_gap=0.1)
    requests = [engine.submit(np.arange(60 if i % 4 else 3000) % 89 + i, asked(20)) for i in range(12)]
    run(engine)
    first = [request.metrics.ttft for request in requests]
    assert max(t for i, t in enumerate(first) if i % 4) < 2.0, "a second for their own 540 tokens and half of the steps"
    assert first[0] < first[4] < first[8]
    assert first[0] < 2 * 3000 / model.rate + 2.0
    gaps = [gap for request in requests for gap in request.metrics.itl]
    assert np.quantile(gaps, 0.95) < 0.12


def test_a_prompt_that_ends_waits_for_few_others():
    """The first of four prompts has its first token after 64 tokens, not 240; a short rest runs at once."""
    _, model, engine = served(target_gap=0.1)
    requests = [engine.submit(np.arange(60) + i, asked(2)) for i in range(4)]
    run(engine)
    first = [request.metrics.ttft for request in requests]
    assert model.passes[0] == 64
    assert first[0] == pytest.approx(0.084)
    assert first == sorted(first)
    assert first[-1] < 0.24 + 4 * 0.03, "no later than together, but for three steps and the tokens beside"
    _, model, engine = served(target_gap=0.1)
    requests = [engine.submit(np.arange(count) + 7 * count % 50, asked(2)) for count in (50, 26, 40)]
    run(engine)
    assert [round(request.metrics.ttft, 3) for request in requests] == [0.096, 0.096, 0.158]


def test_priorities_and_order():
    """The lower number first, then the earlier one; ten seconds make up for a number."""
    clock, _, engine = served(max_running=1)
    names = {}
    for name, priority in (("late", 1), ("first", 0), ("second", 0), ("urgent", -1)):
        names[name] = engine.submit([5, 6], asked(2), priority=priority)
    clock.now = 10.5
    names["last"] = engine.submit([5, 6], asked(2))
    run(engine)
    starts = {name: request.works[0].started for name, request in names.items()}
    assert sorted(starts, key=starts.get) == ["urgent", "first", "second", "late", "last"]


def test_an_urgent_request_takes_the_place_of_the_last():
    """One that comes before the last that runs begins at once; the other one goes on later, with the same tokens."""
    _, _, engine = served(max_running=2)
    first, second = (engine.submit([i] * 40, asked(30)) for i in (5, 6))
    for _ in range(10):
        engine.step()
    urgent = engine.submit([7, 8], asked(3), priority=-1)
    assert len(urgent.result()) == 3
    run(engine)
    assert (first.metrics.preemptions, second.metrics.preemptions, urgent.metrics.preemptions) == (0, 1, 0)
    assert [len(each.result()) for each in (first, second)] == [30, 30]


def test_a_twin_waits_for_the_prefix():
    """One of the requests that share 400 tokens runs these; the others wait for it, and one without them does not."""
    _, model, engine = served()
    shared = np.arange(400) % 97
    twins = [engine.submit([*shared, 98, i], asked(3)) for i in range(5)]
    other = engine.submit([7] * 10, asked(3))
    engine.step()
    assert engine.stats().running == 2
    assert other.metrics.queued == 0
    run(engine)
    assert [twin.metrics.cached_tokens for twin in twins] == [0] + [400] * 4
    assert sum(model.passes) == 400 + 5 * (2 + 2) + 10 + 2


def test_a_twin_does_not_wait_for_one_that_is_gone():
    _, _, engine = served()
    shared = np.arange(600) % 97
    first, second = (engine.submit([*shared, i], asked(3)) for i in range(2))
    engine.step()
    first.cancel()
    assert len(second.result()) == 3
    assert second.metrics.cached_tokens == LEAST_ALONE, "of the only step"


def test_the_last_one_gives_way():
    """Preemption takes the memory of the one that came last, and nobody begins in that step."""
    _, _, engine = served(num_blocks=8, block_size=4)
    first, second, third = (engine.submit([i] * 8, asked(16)) for i in range(3))
    run(engine)
    assert first.metrics.preemptions == 0
    assert first.works[0].times[-1] <= second.works[0].times[-1] <= third.works[0].times[-1]
    assert second.metrics.preemptions + third.metrics.preemptions > 0


def longest_pause(engine, request):
    """Step until a request has ended: the steps until its first token, and the most from one token to the next."""
    seen = waited = 0
    waits = []
    while not request.is_finished:
        engine.step()
        waited += 1
        if len(request.tokens) > seen or request.is_finished:
            waits.append(waited)
            seen, waited = len(request.tokens), 0
    return waits[0], max(waits[1:])


@pytest.mark.parametrize("options", [{"num_blocks": 60}, {"max_running": 6}], ids=["memory", "places"])
def test_many_samples_stop_no_request_of_one(options):
    """One request's samples need more memory, or more places, than there are: they give way to a later request."""
    _, _, engine = served(block_size=4, **options)
    many = engine.submit([1] * 8, asked(60), n=12)
    for _ in range(5):
        engine.step()
    for start in range(4):  # the first of these begins when all memory or all places are taken, or soon will be
        one = engine.submit([2 + start] * 8, asked(40))
        first, longest = longest_pause(engine, one)
        assert longest == 1
        assert first <= 6
        assert one.metrics.preemptions == 0
    assert many.works[0].preemptions == 0
    run(engine)
    assert many.metrics.preemptions > 0
    assert [len(each) for each in many.result()] == [60] * 12


def test_a_small_request_passes_one_that_has_no_room():
    """The first sample of a later request comes before the last ones of an earlier one, which have no room."""
    _, _, engine = served(num_blocks=30, block_size=4)
    first = engine.submit([1] * 40, asked(20))
    large = engine.submit([2] * 100, asked(4), priority=1)
    engine.step()
    assert large.metrics.queued is None
    small = engine.submit([3] * 4, asked(4))
    engine.step()
    assert small.metrics.queued is not None
    run(engine)
    assert first.metrics.preemptions == small.metrics.preemptions == 0
    assert large.finish_reason == "length"


@settings(max_examples=25)
@given(st.data())
def test_nobody_starves(data):
    """Requests come as fast as they are served, urgent and large ones; each begins in a time that has a bound.

    When a request of priority p comes, those that may come before it are the ones that are there, and those that come
    within 10 seconds for each number between their priorities.
    """
    clock, _, engine = served(num_blocks=24, block_size=4, max_running=data.draw(st.integers(1, 6)), max_queue=500)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    watched = engine.submit(rng.integers(0, 90, 60), asked(8), priority=1)
    requests, arrival = [], clock.now
    while not watched.is_finished:
        if clock.now - arrival > 0.2 and engine.stats().waiting < 300:
            arrival = clock.now
            length = int(rng.integers(1, 80))
            requests.append(engine.submit(rng.integers(0, 90, length), asked(int(rng.integers(1, 12))), priority=0))
        engine.step()
        assert clock.now < 200.0, "it waits for ever"
    assert watched.finish_reason == "length"
    engine.close(cancel=True)


def test_the_cost_of_a_step_does_not_depend_on_what_waits():
    """Lines of Python that a step executes, beside 5 and beside 500 requests that wait."""
    from subjects.interrupts import Lines

    counts = []
    for waiting in (5, 500):
        _, _, engine = served(max_running=2, max_queue=1000)
        for i in range(waiting):
            engine.submit([1 + i % 90, 2, 3], asked(50))
        for _ in range(20):
            engine.step()
        with Lines() as lines:
            for _ in range(10):
                engine.step()
        counts.append(lines.count)
        engine.close(cancel=True)
    assert counts[1] < counts[0] * 1.02 + 10


@pytest.mark.parametrize("cancelled", [False, True])
def test_what_has_ended_is_forgotten(cancelled):
    """Cancelled requests do not stay in the queues behind one that runs."""
    _, _, engine = served(max_running=1)
    engine.submit([1], asked(4000))
    for _ in range(400):
        request = engine.submit([1, 2], asked(2), deadline=1e9)
        if cancelled:
            request.cancel()
        elif engine.stats().waiting > 100:
            engine.close(cancel=True)
            return
    scheduler = engine._steps._scheduler
    engine.step()
    assert len(scheduler._waiting) < 80
    assert len(scheduler._deadlines) < 80
    assert not engine._steps._inbox
    engine.close(cancel=True)
    assert len(engine._steps._pending) == 0


def test_namespaces_share_nothing(network):
    engine = BatchEngine(network, num_blocks=40)
    prompt = np.arange(3, 60)
    for name in ("a", "b", ("c", 1)):
        engine.submit(prompt, GREEDY, namespace=name)
    run(engine)
    assert engine.stats().cached_tokens == 0


def test_texts_that_begin_alike_follow_one_another():
    """Prompts of two tenants come in turn; passes have those of one before those of the other."""
    _, network, engine = served(target_gap=0.1, draft=None)
    passes, forward = [], network.forward

    def recorded(tokens, positions, *arguments):
        passes.append(positions.tolist())
        return forward(tokens, positions, *arguments)

    network.forward = recorded
    for i in range(6):
        engine.submit([1 + i % 2] * 256 + [3 + i] * (100 * i + 1), asked(60))
    run(engine)
    tenants = [[(at - 256) // 100 % 2 for at in positions] for positions in passes if len(positions) == 6]
    assert tenants, "no pass had all texts"
    assert all(sorted(each) in (each, each[::-1]) for each in tenants), tenants
