"""The interval of a median."""

import numpy as np
import pytest

pytest.importorskip("bench.support.common")

from bench.support.intervals import median_interval

pytestmark = pytest.mark.one_build


def test_the_ranks_of_the_sign_test():
    """Conover's table: of 12 the third and the tenth, of 20 the sixth and the fifteenth."""
    for n, first in ((6, 1), (8, 1), (9, 2), (12, 3), (20, 6)):
        found = median_interval(range(n, 0, -1))
        assert found == (first, (n + 1) / 2, n + 1 - first, True)
    few = median_interval([3.0, 1.0, 2.0])
    assert few == (1.0, 2.0, 3.0, False)
    assert str(few) == "2.000 (1.000 .. 3.000; too few)"


def test_it_holds_the_median_as_often_as_it_says():
    draws = np.random.default_rng(0).exponential(size=(2000, 12))
    found = [median_interval(row) for row in draws]
    holds = np.mean([each.low <= np.log(2) <= each.high for each in found])
    assert 0.945 < holds < 0.98  # 0.961: of 12 measurements, fewer than three or more than nine lie below in 3.9 %
