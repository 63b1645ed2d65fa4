"""Modules that Windows does not have, None there, and the mark of tests that need POSIX."""

import os

import pytest

try:
    import fcntl
    import pty
    import resource
    import termios
except ImportError:
    fcntl = pty = resource = termios = None

__all__ = ["fcntl", "needs_posix", "pty", "resource", "termios"]

NEEDS = "needs forks, limits, links, FIFOs, modes, signals, devices or terminals of POSIX"
needs_posix = pytest.mark.skipif(os.name != "posix", reason=NEEDS)
