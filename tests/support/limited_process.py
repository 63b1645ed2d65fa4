"""Cases in a process of their own, with little memory."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from places import search_path


def outcomes_of(module, folder):
    """Run `module` as a program with the folder as its argument; the JSON that it prints: how each case ended."""
    environment = os.environ | {"PYTHONPATH": search_path()}
    ran = subprocess.run([sys.executable, module.__file__, folder], env=environment, capture_output=True, timeout=900)
    assert ran.returncode == 0, ran.stderr.decode()
    return json.loads(ran.stdout)


def limit_memory(room):
    """Give this process `room` bytes of addresses beside those that are in use."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.getrlimit(resource.RLIMIT_AS)[1]))
