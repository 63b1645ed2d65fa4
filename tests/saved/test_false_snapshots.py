"""Every file of false_snapshots.py is refused or gives a valid cache in bounded memory; a signal ends a case that
hangs.
"""

import pytest
from hostile import false_snapshots
from hostile.limited_process import outcomes_of

pytestmark = pytest.mark.no_level


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The outcome of each case, from a separate process, which a signal ends if a case takes too long."""
    return outcomes_of(false_snapshots, tmp_path_factory.mktemp("false"))


def test_how_many():
    assert len(false_snapshots.CASES) >= 300


@pytest.mark.parametrize("name", false_snapshots.CASES)
def test_refused_or_good(outcomes, name):
    error, message = outcomes[name]
    may_load = false_snapshots.CASES[name][1]
    assert error in {True: ["loaded"], False: ["SnapshotError"], None: ["loaded", "SnapshotError"]}[may_load], message
    assert len(message) < 600
