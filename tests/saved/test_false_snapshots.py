"""Every file of false_snapshots.py is refused or gives a valid cache in bounded memory; a signal ends a case that
hangs.
"""

import pytest
from hostile import false_snapshots
from hostile.limited_process import outcomes_of

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The outcome of each case, from a separate process, which a signal ends if a case takes too long."""
    return outcomes_of(false_snapshots, tmp_path_factory.mktemp("false"))


def test_how_many():
    assert len(false_snapshots.CASES) >= 300


def test_refused_or_good(outcomes):
    ends = {True: ["loaded"], False: ["SnapshotError"], None: ["loaded", "SnapshotError"]}
    others = {}
    for name, (_, may_load, *_) in false_snapshots.CASES.items():
        error, message = outcomes[name]
        if error not in ends[may_load] or len(message) >= 600:
            others[name] = error, message
    assert not others
