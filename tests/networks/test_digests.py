"""Every SIMD level gives the digests of `tests/golden/digests.json`, whatever the CPU and the compiler.

`golden/make_digests.py` makes the file. Without the package gguf its entries of GGUF files are left out. The best level
takes every network. tests/ckernels compares the kernels of each level with the scalar ones, by each compiler: so the
levels between share the networks, and the scalar one, which is the slowest, takes every eighth, as an emulator does
with KVCACHE_TESTS=fast.
"""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from digests import PARTS, PATH, all_digests
from pace import FAST

from kvcache.kernels import kernels

pytestmark = pytest.mark.one_build


def share_of(level, long):
    """Return the first of the networks that a level takes, and the step to the next."""
    best, *others = kernels.simd_levels()
    if FAST:
        return 0, 8
    if long or level == best:
        return 0, 1
    between = [each for each in others if each != "scalar"]
    return (between.index(level), len(between)) if level in between else (0, 8)


@pytest.mark.parametrize("level", kernels.simd_levels())
def test_networks_have_the_same_bits_everywhere(level, long):
    has_gguf = find_spec("gguf") is not None
    expected = json.loads(PATH.read_text())
    first, step = share_of(level, long)
    with kernels.use_simd(level):
        found = all_digests(has_gguf, step, first)
    known = {name for name in expected if has_gguf or not name.startswith("gguf/")}
    assert len(found) > 10 if step > 1 else set(found) == known
    lines = []
    for name in found:
        pairs = zip(PARTS, found[name].split(), expected[name].split(), strict=True)
        if wrong := [part for part, mine, theirs in pairs if mine != theirs]:
            lines.append(f"{name}: {', '.join(wrong)}")
    assert not lines, f"{level}: {len(lines)} of {len(found)} entries have other bits\n" + "\n".join(lines)
