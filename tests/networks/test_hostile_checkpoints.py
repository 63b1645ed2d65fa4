"""Every folder of hostile/checkpoints.py is refused with a clear error in bounded memory; a signal ends a case
that hangs.
"""

import pytest
from hostile import checkpoints as hostile_checkpoints
from hostile.limited_process import outcomes_of

pytestmark = [pytest.mark.exhaustive, pytest.mark.one_build]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The end of each case, in a process of its own, which a signal ends where one takes too long."""
    return outcomes_of(hostile_checkpoints, tmp_path_factory.mktemp("hostile"))


def test_number_of_cases():
    assert len(hostile_checkpoints.CASES) >= 300


def test_refused(outcomes):
    others = {}
    for name in hostile_checkpoints.CASES:
        error, message = outcomes[name]
        refusals = ["OutOfMemoryError"] if "terabyte" in name else ["CheckpointError", "FileNotFoundError"]
        if error not in refusals or not 0 < len(message) < 3000:
            others[name] = error, message
    assert not others
