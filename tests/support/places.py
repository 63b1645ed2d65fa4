"""The folders of the tests."""

import os
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent
GOLDEN = SUPPORT.parent / "golden"
PROJECT = SUPPORT.parent.parent


def search_path() -> str:
    """PYTHONPATH of a process with the same imports as this one."""
    return os.pathsep.join([str(SUPPORT), *sys.path])
