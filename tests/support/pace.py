"""The amount of work of random tests: KVCACHE_TESTS=fast reduces it."""

import os

FAST = os.environ.get("KVCACHE_TESTS") == "fast"


def examples(most):
    """The number of random examples of a test that names it; the profiles of conftest.py have the others."""
    return max(1, most // 10) if FAST else most


def half(values):
    """The values of a parameter; every second one with KVCACHE_TESTS=fast."""
    return values[::2] if FAST else values
