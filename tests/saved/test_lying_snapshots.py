"""Every file of lying_snapshots.py is refused or makes a good cache: soon, in bounded memory."""

import lying_snapshots
import pytest
from limited_process import outcomes_of

pytestmark = pytest.mark.no_level

SOON = 20  # seconds of CPU time


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """How each case ended, in a process of its own, which a signal ends where one takes too long."""
    return outcomes_of(lying_snapshots, tmp_path_factory.mktemp("lying"))


def test_how_many():
    assert len(lying_snapshots.CASES) >= 300


@pytest.mark.parametrize("name", lying_snapshots.CASES)
def test_refused_or_good(outcomes, name):
    error, message, seconds = outcomes[name]
    taken = lying_snapshots.CASES[name][1]
    assert error in {True: ["taken in"], False: ["SnapshotError"], None: ["taken in", "SnapshotError"]}[taken], message
    assert len(message) < 600
    assert seconds < SOON
