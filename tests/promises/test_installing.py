"""Installing: one version everywhere, and a sentence where the compiled modules are missing."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from places import PROJECT

import kvcache

pytestmark = pytest.mark.one_build


def test_every_place_says_the_same_version():
    project, changes = ((PROJECT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "CHANGELOG.md"))
    assert re.search(r'^version = "(.+)"$', project, re.MULTILINE)[1] == kvcache.__version__
    assert re.search(r"^## ([\d.]+)", changes, re.MULTILINE)[1] == kvcache.__version__


def test_a_folder_of_sources_says_what_to_do(tmp_path):
    sources = os.path.dirname(kvcache.__file__)
    shutil.copytree(sources, tmp_path / "kvcache", ignore=shutil.ignore_patterns("*.so", "demo"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "kvcache"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kvcache: expected its compiled modules, got sources alone, in ")
    assert str(tmp_path) in last
    assert "pip install -e ." in last
