"""Makes `digests.json`: `python tests/golden/make_digests.py`, at the best SIMD level of this CPU.

It needs the package gguf, for networks in GGUF files, and no torch. A change of the file is a change of the bits of texts: of
the specification `ckernels/BITS.md` and of the number that goes with it.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "support")]

from digests import PATH, all_digests  # noqa: E402


def main():
    found = all_digests(gguf=True)
    PATH.write_text(json.dumps(found, indent=0) + "\n")
    print(f"{len(found)} entries, {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
