"""Every file of hostile/gguf.py is refused with a clear error in bounded memory; a signal ends a case that hangs."""

import pytest
from hostile import gguf as hostile_gguf
from hostile.limited_process import outcomes_of

pytestmark = [pytest.mark.no_level, pytest.mark.one_build]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The end of each case, in a process of its own, which a signal ends where one takes too long."""
    return outcomes_of(hostile_gguf, tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("name", hostile_gguf.CASES)
def test_refused(outcomes, name):
    error, message = outcomes[name]
    if "terabyte" in name:
        assert error == "OutOfMemoryError"
    elif name == "a directory":  # a checkpoint directory of that name
        assert error == "FileNotFoundError"
    else:
        assert error in ("CheckpointError", "FileNotFoundError"), message
        assert message.count("x.gguf") == 1
    assert 0 < len(message) < 1500


def test_mutants(outcomes):
    """One changed byte: the file is refused as damaged, or it loads (a changed name of the network, a weight)."""
    found = [outcome for name, outcome in outcomes.items() if name.startswith("mutant")]
    assert len(found) == hostile_gguf.MUTANTS
    assert {error for error, _ in found} <= {"nothing", "CheckpointError", "OutOfMemoryError"}
    refused = [message for error, message in found if error == "CheckpointError"]
    assert len(refused) > hostile_gguf.MUTANTS / 4
    assert all(message.count("x.gguf: ") == 1 and "expected" in message for message in refused)
