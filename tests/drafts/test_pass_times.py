"""The time of passes by their rows."""

import numpy as np
import pytest

from kvcache.drafts.pass_times import PassTimes
from kvcache.drafts.typical_seconds import TypicalSeconds

pytestmark = pytest.mark.one_build


def measured(*passes):
    times = PassTimes()
    for rows, seconds in passes:
        times.observe(rows, seconds)
    return times


def test_between_and_beyond_what_was_measured():
    """A row beyond takes a quarter of a row's share; what was not measured twice is hoped to take less."""
    assert PassTimes().curve(1, 3) == [0, 0, 0]
    assert measured((2, 8.0), (2, 8.0)).curve(1, 3) == pytest.approx([8, 8, 0.75 * 9])
    times = measured(*[(1, 4.0), (5, 8.0)] * 2)
    assert times.curve(1, 6) == pytest.approx([4, 0.75 * 5, 0.75 * 6, 0.75 * 7, 8, 0.75 * 8.4], rel=1e-2)
    assert times.seconds(9) == pytest.approx(0.75 * 9.6, rel=1e-2)
    assert times.seconds(90) == pytest.approx(0.75 * 42, rel=1e-2)
    times.observe(3, 2.0)
    assert times.seconds(3) == 0.75 * 2
    times.observe(3, 2.0)
    assert times.curve(3, 2) == pytest.approx([2, 0.75 * 5], rel=1e-2), "more rows may take less time"


def test_it_follows_what_is_measured():
    """An old measurement counts as a shorter time, until the pass is measured again."""
    times = measured(*[(1, 4.0), (5, 8.0)] * 4, *[(1, 8.0)] * 60)
    assert times.seconds(1) == pytest.approx(8, rel=1e-2)
    assert times.seconds(5) == 8
    assert times.curve(5, 1)[0] == pytest.approx(8 * 0.5 ** (60 / 2048))
    rng = np.random.default_rng(1)
    times = measured(*[(rows, (3.0 + rows) * np.exp(0.1 * rng.standard_normal())) for rows in [1, 5, 2, 9] * 50])
    assert [times.seconds(rows) for rows in (1, 2, 5, 9)] == pytest.approx([4, 5, 8, 12], rel=0.1)


def test_disturbances_count_little():
    found = TypicalSeconds()
    for seconds in (50.0, 1.0, 1.0, 30.0, *[1.0] * 9):
        found.observe(seconds)
    assert 1.0 <= found.value < 1.1
    assert found.clipped(99.0) == 2 * found.value


def test_what_is_known_was_measured_twice_and_lately():
    times = measured((1, 4.0))
    assert not times.is_known(1)
    times.observe(1, 4.0)
    assert times.is_known(1)
    assert not times.is_known(2)
    for _ in range(128):
        times.observe(2, 5.0)
    assert not times.is_known(1)
    times.observe(1, 4.0)
    assert times.is_known(1)
