"""Cases in a process of their own, with little memory."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from places import search_path
from posix_modules import resource

UNLIMITED = "needs limits of addresses"
SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "")  # such a process maps terabytes


def outcomes_of(module, folder):
    """Run `module` as a program with the folder as its argument; the JSON that it prints: how each case ended."""
    if resource is None:
        pytest.skip(UNLIMITED)
    environment = os.environ | {"PYTHONPATH": search_path()}
    command = [sys.executable, "-m", module.__name__, folder]
    ran = subprocess.run(command, env=environment, capture_output=True, timeout=900)
    assert ran.returncode == 0, ran.stderr.decode()
    return json.loads(ran.stdout)


@contextmanager
def limited_memory(room):
    """`limit_memory` for a while: sizes that this machine has are too large then, as on any other one."""
    if resource is None:
        pytest.skip(UNLIMITED)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if not SANITIZED:
        limit_memory(room)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def limit_memory(room):
    """Give this process `room` bytes of addresses beside those that are in use."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.getrlimit(resource.RLIMIT_AS)[1]))
