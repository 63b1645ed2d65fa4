"""Makes `digests.json`, at the best SIMD level: `PYTHONPATH=.:tests/support python tests/golden/make_digests.py`.

It needs the package gguf, for networks in GGUF files, and no torch. A change of the file is a change of the bits of
texts, and so of their specification.
"""

import json

from digests import PATH, all_digests


def main():
    found = all_digests(gguf=True)
    PATH.write_text(json.dumps(found, indent=0) + "\n")
    print(f"{len(found)} entries, {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
