"""Modules that Windows does not have, None there, and the mark of tests that need POSIX."""

import os

import pytest

try:
    import fcntl
    import resource
except ImportError:
    fcntl = resource = None

__all__ = ["fcntl", "needs_posix", "resource"]

needs_posix = pytest.mark.skipif(os.name != "posix", reason="needs forks, limits, links, FIFOs or modes of POSIX")
