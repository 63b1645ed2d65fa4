"""Every SIMD level gives the digests of `tests/golden/digests.json`, whatever the CPU and the compiler.

`golden/make_digests.py` makes the file. Without the package gguf its entries of GGUF files are left out. Every eighth
network is taken with KVCACHE_TESTS=fast, for an emulator, and beside other levels at the scalar one, which is the
slowest: tests/ckernels compares its kernels with those of the others, by each compiler.
"""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from digests import PARTS, PATH, all_digests
from pace import FAST

from kvcache.kernels import kernels

pytestmark = pytest.mark.one_build


@pytest.mark.parametrize("level", kernels.simd_levels())
def test_networks_have_the_same_bits_everywhere(level, long):
    few = FAST or (level == "scalar" and len(kernels.simd_levels()) > 1 and not long)
    has_gguf = find_spec("gguf") is not None
    expected = json.loads(PATH.read_text())
    with kernels.use_simd(level):
        found = all_digests(has_gguf, 8 if few else 1)
    known = {name for name in expected if has_gguf or not name.startswith("gguf/")}
    assert len(found) > 10 if few else set(found) == known
    lines = []
    for name in found:
        pairs = zip(PARTS, found[name].split(), expected[name].split(), strict=True)
        if wrong := [part for part, mine, theirs in pairs if mine != theirs]:
            lines.append(f"{name}: {', '.join(wrong)}")
    assert not lines, f"{level}: {len(lines)} of {len(found)} entries have other bits\n" + "\n".join(lines)
