"""Every SIMD level gives the digests of `tests/golden/digests.json`, whatever the CPU and the compiler.

`golden/make_digests.py` makes the file. Without the package gguf its entries of GGUF files are left out. The best level
takes every network. tests/ckernels compares the kernels of each level with the scalar ones, by each compiler: so the
levels between share the networks, but for those with all formats of K and V, and the scalar one, which is the slowest,
takes every eighth, as an emulator does with KVCACHE_TESTS=fast.
"""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec

import pytest
from digests import FEW, PARTS, PATH, all_digests
from pace import FAST

from kvcache.kernels import kernels

pytestmark = pytest.mark.one_build


def is_in_share(level, number, network):
    """Whether a level that does not take all networks takes this one."""
    between = [each for each in kernels.simd_levels()[1:] if each != "scalar"]
    if FAST or level not in between:
        return number % 8 == 0
    return number % len(between) == between.index(level) or len(network.caches) > len(FEW)


@pytest.mark.parametrize("level", kernels.simd_levels())
def test_networks_have_the_same_bits_everywhere(level, long):
    has_gguf = find_spec("gguf") is not None
    expected = json.loads(PATH.read_text())
    whole = not FAST and (long or level == kernels.simd_levels()[0])
    with kernels.use_simd(level):
        found = all_digests(has_gguf) if whole else all_digests(has_gguf, partial(is_in_share, level))
    known = {name for name in expected if has_gguf or not name.startswith("gguf/")}
    assert set(found) == known if whole else len(found) > 10
    lines = []
    for name in found:
        pairs = zip(PARTS, found[name].split(), expected[name].split(), strict=True)
        if wrong := [part for part, mine, theirs in pairs if mine != theirs]:
            lines.append(f"{name}: {', '.join(wrong)}")
    assert not lines, f"{level}: {len(lines)} of {len(found)} entries have other bits\n" + "\n".join(lines)
