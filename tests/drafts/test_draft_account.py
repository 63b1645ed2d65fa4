"""The time that a source may take: whatever it does, an engine is hardly slower with it; where it pays, it is asked."""

import pytest
from drafted_engine import COMPUTE_BOUND, MEMORY_BOUND, TILES, DraftedEngine, KnownSource

pytestmark = pytest.mark.one_build

PASSES = {"memory": MEMORY_BOUND, "compute": COMPUTE_BOUND, "tiles": TILES}
LOAN, NOISY = 32, 1.005  # passes; the mean of the noise of a tenth


def source(chance, passes=0.0, unread=0, seconds=10e-3):
    """A source whose tokens hold with a chance; each takes `passes` passes of 10 ms."""
    at = chance if callable(chance) else lambda _: chance
    return lambda clock: KnownSource(clock, at, passes * seconds, unread)


BAD = {
    "nothing holds": ("memory", 1, source(0.0)), "nothing holds of four": ("compute", 4, source(0.0)),
    "all holds and costs a pass": ("memory", 1, source(1.0, 1.0)), "costs three": ("memory", 4, source(1.0, 3.0)),
    "nothing holds and costs": ("memory", 4, source(0.0, 0.3)), "two": ("tiles", 4, source(0.3), source(0.3)),
    "reads": ("memory", 1, source(0.3, 0.1, unread=300)), "reads much": ("compute", 4, source(1.0, 0.05, unread=2000)),
    "nothing from the middle on": ("memory", 1, source(lambda n: n < 1000)),
    "turns": ("compute", 1, source(lambda n: n // 50 % 2)),
}


@pytest.mark.parametrize("name", BAD)
def test_never_much_slower_than_without(name):
    """In 2000 passes, and in any stretch of them, with noise; two sources have no more together."""
    kind, texts, *sources = BAD[name]
    engine, gain, lowest, highest = DraftedEngine(PASSES[kind], *sources, texts=texts, noise=0.1), 0.0, 0.0, 0.0
    for _ in range(2000 // 50):
        worth, took = engine.run(50)
        gain += worth - took / NOISY * 0.975
        highest = max(highest, gain)
        lowest = min(lowest, gain - highest)
    assert lowest > -LOAN - 8


PAYS = [
    ("memory", 0.3, 0.0, 1, 0), ("memory", 0.6, 0.0, 4, 0), ("memory", 0.9, 0.0, 4, 0), ("memory", 0.6, 0.1, 1, 0),
    ("memory", 0.9, 0.02, 1, 100), ("tiles", 0.6, 0.0, 1, 0), ("tiles", 0.9, 0.0, 4, 0), ("compute", 0.9, 0.0, 4, 0),
]


@pytest.mark.parametrize(("kind", "chance", "passes", "texts", "unread"), PAYS)
def test_nearly_the_best_where_it_pays(kind, chance, passes, texts, unread):
    engine = DraftedEngine(PASSES[kind], source(chance, passes, unread), texts=texts, noise=0.05)
    worth, took = engine.run(1000)
    assert worth / took > 0.9 * engine.best(chance, passes * 10e-3)


def test_prompts_are_read_where_there_is_time_for_them():
    """A source that would have to read for too long reads one piece, and then knows."""
    for unread, texts in ((2000, 1), (2000, 4), (100, 4)):
        engine, read = DraftedEngine(MEMORY_BOUND, source(0.9, 0.05, unread), texts=texts, length=100), 0
        for _ in range(300):
            engine.step()
            read = max(read, *engine.sources[0].read.values(), 0)
        assert read == (unread if unread < 1000 else 64)
        assert (len(engine.sources[0].asked) > 30) == (unread < 1000)


def test_it_is_asked_again_when_it_pays_again():
    """A token is tried now and then; the first that holds is followed by others."""
    engine = DraftedEngine(MEMORY_BOUND, source(lambda n: 0.9 if n >= 1000 else 0.0, 0.05), texts=4, noise=0.05)
    engine.run(200)
    worth, took = engine.run(800)
    assert worth / took > 0.985
    assert 3 < len([count for when, count in engine.sources[0].asked if when > 200]) < 160
    engine.run(100)
    worth, took = engine.run(200)
    assert worth / took > 0.9 * engine.best(0.9, 0.5e-3)


def test_what_surely_holds_and_does_not_pay_is_seldom_tried():
    """A network as its own draft."""
    engine = DraftedEngine(MEMORY_BOUND, source(1.0, 0.3), texts=4, noise=0.03)
    engine.run(200)
    worth, took = engine.run(1000)
    assert worth / took > 0.985


def test_a_pass_without_drafts_is_measured_now_and_then():
    """The network becomes five times as slow, and nothing but that shows what the rows of draft tokens take."""
    engine = DraftedEngine(MEMORY_BOUND, source(0.9))
    engine.run(300)
    engine.seconds = lambda rows: 5 * MEMORY_BOUND(rows)
    engine.run(200)
    worth, took = engine.run(500)
    assert worth / took > 0.9 * engine.best(0.9)
    assert 500 - 12 < len([when for when, _ in engine.sources[0].asked if when >= 500]) < 500
