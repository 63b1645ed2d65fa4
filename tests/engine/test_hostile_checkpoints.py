"""Every folder of hostile_checkpoints.py is refused with a clear error, soon and in bounded memory."""

import json
import os
import subprocess
import sys

import hostile_checkpoints
import pytest
from places import search_path

pytestmark = pytest.mark.no_level

SOON = 15  # seconds, on a busy machine


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The outcome of each case, in a separate process that a signal ends if a case takes too long."""
    script, folder = hostile_checkpoints.__file__, tmp_path_factory.mktemp("hostile")
    environment = os.environ | {"PYTHONPATH": search_path()}
    ran = subprocess.run([sys.executable, script, folder], env=environment, capture_output=True, timeout=300)
    assert ran.returncode == 0, ran.stderr.decode()
    return json.loads(ran.stdout)


def test_number_of_cases():
    assert len(hostile_checkpoints.CASES) >= 300


@pytest.mark.parametrize("name", hostile_checkpoints.CASES)
def test_refused(outcomes, name):
    error, message, seconds = outcomes[name]
    if "terabyte" in name:
        assert error == "OutOfMemoryError"
    else:
        assert error in ("CheckpointError", "FileNotFoundError"), message
    assert 0 < len(message) < 1500
    assert seconds < SOON
