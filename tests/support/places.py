"""The folders of the tests."""

import os
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent
GOLDEN = SUPPORT.parent / "golden"
PROJECT = SUPPORT.parent.parent

MODELS = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
# Together they call every kernel of a network; the builds with checks and the lower SIMD levels run these alone.
CHECKED = {"llama", "gemma3", "gpt_oss", "phi3_longrope", "qwen3_moe"}


def in_every_build(values, name_of=lambda value: value):
    """Parameters of tests over golden networks: those of `CHECKED` for every build and level, the others for one."""
    once = pytest.mark.one_build
    return [value if name_of(value) in CHECKED else pytest.param(value, marks=once) for value in values]


def search_path() -> str:
    """PYTHONPATH of a process with the same imports as this one."""
    return os.pathsep.join([str(SUPPORT), *sys.path])
