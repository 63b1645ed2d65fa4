"""Every folder of hostile/checkpoints.py is refused with a clear error in bounded memory; a signal ends a case
that hangs.
"""

import pytest
from hostile import checkpoints as hostile_checkpoints
from hostile.limited_process import outcomes_of

pytestmark = [pytest.mark.no_level, pytest.mark.one_build]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The end of each case, in a process of its own, which a signal ends where one takes too long."""
    return outcomes_of(hostile_checkpoints, tmp_path_factory.mktemp("hostile"))


def test_number_of_cases():
    assert len(hostile_checkpoints.CASES) >= 300


@pytest.mark.parametrize("name", hostile_checkpoints.CASES)
def test_refused(outcomes, name):
    error, message = outcomes[name]
    if "terabyte" in name:
        assert error == "OutOfMemoryError"
    else:
        assert error in ("CheckpointError", "FileNotFoundError"), message
    assert 0 < len(message) < 1500
