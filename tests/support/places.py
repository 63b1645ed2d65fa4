"""Where the files of the tests lie."""

import os
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent
GOLDEN = SUPPORT.parent / "golden"
PROJECT = SUPPORT.parent.parent


def search_path() -> str:
    """PYTHONPATH of a process that imports what this one does."""
    return os.pathsep.join([str(SUPPORT), *sys.path])
