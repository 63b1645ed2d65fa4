"""How many draft tokens a text asks for, and what these cost."""

import pytest

from kvcache.drafts.draft_pace import MOST_DRAFTS, DraftPace
from kvcache.drafts.step_costs import StepCosts

pytestmark = [pytest.mark.no_level, pytest.mark.one_build]


def test_drafts_that_fail_become_rare():
    pace, made = DraftPace(), 0
    for _ in range(1000):
        if count := pace.wanted(8):
            pace.learn(count, 0)
            made += count
    assert made < 25
    assert (pace.proposed, pace.accepted) == (made, 0)


def test_drafts_that_hold_become_more():
    pace, sizes = DraftPace(), []
    for _ in range(4):
        sizes.append(pace.wanted(99))
        pace.learn(sizes[-1], sizes[-1])
    assert sizes == [2, 4, 8, MOST_DRAFTS]
    assert pace.wanted(3) == 3
    assert DraftPace(0).wanted(8) == 0


def test_drafts_that_cost_more_than_they_save_become_rare():
    """All are drawn; but each takes as long as a pass, or more. What all tries take is a small part of the passes."""
    for cost in (1.1, 3.0):
        pace, spent = DraftPace(), 0.0
        for _ in range(2000):
            if count := pace.wanted(8):
                pace.learn(count, count, cost * count)
                spent += (cost - 1) * count
        assert spent < 0.03 * 2000
        assert not pace.pays
    pace = DraftPace()
    for _ in range(20):
        pace.learn(pace.wanted(8), 1, 0.5)
    assert pace.pays


def test_costs_of_drafts_by_what_was_measured():
    costs = StepCosts()
    assert costs.passes(1, 4, 2.0) == 0.0, "nothing is known"
    costs.observe(1, 5.0)
    assert costs.passes(1, 4, 2.5) == pytest.approx(0.5), "rows cost nothing as far as is known"
    for rows in (1, 5, 2, 9, 1):
        costs.observe(rows, 4.0 + rows)
    assert costs.passes(1, 5, 2.5) == pytest.approx(7.5 / 5)
    assert costs.passes(4, 5, 1.0) == pytest.approx(6 / 2)
