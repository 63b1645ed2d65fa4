"""Adapters to other libraries: tests that need them are not collected where these libraries are missing."""

import importlib.util

import pytest

HAVE = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
collect_ignore_glob = [] if HAVE else ["test_*.py"]

if HAVE:
    import torch

    import kvcache

    @pytest.fixture(autouse=True)
    def one_thread():
        """One thread in each library: the models are tiny."""
        before = torch.get_num_threads(), kvcache.get_num_threads()
        torch.set_num_threads(1)
        kvcache.set_num_threads(1)
        yield
        torch.set_num_threads(before[0])
        kvcache.set_num_threads(before[1])
