"""How likely draft tokens hold, and how many are asked for."""

import pytest

from kvcache.drafts.draft_account import DraftAccount
from kvcache.drafts.draft_pace import DraftPace
from kvcache.drafts.pass_times import PassTimes

pytestmark = [pytest.mark.no_level, pytest.mark.one_build]


def test_a_text_begins_as_the_source_is():
    source = DraftPace()
    first, second = DraftPace(source), DraftPace(source)
    assert first.likely == second.likely == source.likely > 0.8
    for _ in range(20):
        first.learn(4, 0)
    assert first.likely < 0.1
    assert source.likely < 0.2
    assert second.likely == source.likely, "of which nothing else is known"
    for _ in range(4):
        second.learn(4, 4)
    assert second.likely > 0.85
    assert (first.proposed, first.accepted, second.proposed, second.accepted) == (80, 0, 16, 16)
    assert (source.proposed, source.accepted) == (96, 16)


def test_only_the_first_that_fails_counts():
    """Tokens behind one that was not drawn say nothing."""
    for most in (1, 8):
        pace = DraftPace()
        for _ in range(40):
            pace.learn(most, most)
            pace.learn(most, 0)
        assert pace.likely == pytest.approx(most / (most + 1), abs=0.06)
    before = pace.likely
    pace.fail()
    assert pace.likely < before
    assert pace.proposed == 80 * 8, "it did not run"


def planned(chances, times, base=None, left=16):
    account = DraftAccount(times, 1.0)
    paces = [DraftPace(account.pace) for _ in chances]
    for pace, (held, failed) in zip(paces, chances, strict=True):
        for _ in range(10):
            pace.learn(held, held)
            pace.learn(failed, 0)
    account.proposed(1, 0.0)
    assert account.may_ask(base or len(paces))
    return account.plan([(pace, 8) for pace in paces], base or len(paces), left)


def test_what_gives_most_tokens_in_a_second():
    flat, steep = PassTimes(), PassTimes()
    for rows in [*range(1, 20)] * 2:
        flat.observe(rows, 1.0)
        steep.observe(rows, rows / 2)
    assert planned([(9, 0)], flat) == [8], "rows cost nothing"
    assert planned([(1, 1)], flat) == [8]
    assert planned([(9, 0), (9, 0), (9, 0)], flat, left=7) == [3, 2, 2]
    assert planned([(9, 0), (1, 8)], flat, left=9) == [8, 1]
    assert planned([(0, 9)], steep) == [1], "nothing pays, and one is tried"
    assert planned([(9, 0), (0, 9)], steep, left=4)[1] == 0
