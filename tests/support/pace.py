"""How much work random tests do: KVCACHE_TESTS=fast asks for less."""

import os

FAST = os.environ.get("KVCACHE_TESTS") == "fast"
