"""Every file of hostile/gguf.py is refused with a clear error in bounded memory; a signal ends a case that hangs."""

import pytest
from hostile import gguf as hostile_gguf
from hostile.limited_process import outcomes_of

pytestmark = [pytest.mark.exhaustive, pytest.mark.one_build]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The end of each case, in a process of its own, which a signal ends where one takes too long."""
    return outcomes_of(hostile_gguf, tmp_path_factory.mktemp("hostile"))


def is_refused(name, error, message):
    if "terabyte" in name:
        return error == "OutOfMemoryError"
    if name == "a directory":  # a checkpoint directory of that name
        return error == "FileNotFoundError"
    return error in ("CheckpointError", "FileNotFoundError") and message.count("x.gguf") == 1


def test_refused(outcomes):
    found = {name: outcomes[name] for name in hostile_gguf.CASES}
    assert not {n: end for n, end in found.items() if not (is_refused(n, *end) and 0 < len(end[1]) < 1500)}


def test_mutants(outcomes):
    """One changed byte: the file is refused as damaged, or it loads (a changed name of the network, a weight)."""
    found = [outcome for name, outcome in outcomes.items() if name.startswith("mutant")]
    assert len(found) == hostile_gguf.MUTANTS
    assert {error for error, _ in found} <= {"nothing", "CheckpointError", "OutOfMemoryError"}
    refused = [message for error, message in found if error == "CheckpointError"]
    assert len(refused) > hostile_gguf.MUTANTS / 4
    assert all(message.count("x.gguf: ") == 1 and "expected" in message for message in refused)
