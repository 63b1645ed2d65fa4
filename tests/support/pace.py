"""The amount of work of random tests: KVCACHE_TESTS=fast reduces it."""

import os

FAST = os.environ.get("KVCACHE_TESTS") == "fast"
