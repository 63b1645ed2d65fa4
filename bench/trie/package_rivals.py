"""The prefix caches and block tables of SGLang and vLLM, from their own packages, if these are installed.

The constructor of a class raises if its package does not load. `key` converts NumPy tokens, untimed, to the type that
the package reads without conversion: every rival gets its best input.
"""

from __future__ import annotations

import importlib.util
import itertools
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["CompiledRadix", "PackagedRadix", "VllmPrefix", "VllmStep"]

Tokens = npt.NDArray[np.uint32]


class CompiledRadix:
    """SGLang's compiled (Rust) tree, called through its extension module, without the Python layer above it."""

    name = "SGLang (Rust)"

    def __init__(self, page_size: int) -> None:
        import torch  # noqa: F401  # loads the libraries that the extension needs

        self._core = _load_compiled()
        params = self._core.TreeCoreInitParamsBinding(eviction_policy="lru", page_size=page_size, device="cpu")
        self._tree = self._core.RustUnifiedTreeCoreBinding(params, [0])

    def key(self, tokens: Tokens) -> Any:
        return array("q", tokens.astype(np.int64).tobytes())

    def match(self, key: Any) -> Any:
        return self._tree.match_prefix(self._core.MatchParamsBinding(key=key))

    def lookup(self, key: Any) -> Any:
        """A match and its values."""
        node = self.match(key).last_device_node_id
        return self._tree.collect_full_device_indices(node, self._tree.root_node_handle(None))

    def insert(self, key: Any) -> None:
        self._tree.insert(self._core.InsertParamsBinding(key=key, value=_slots(len(key))))

    def evict(self, num_tokens: int) -> None:
        """Evict leaves, least recently used first, until that many tokens are free, in the steps of SGLang's caller."""
        self._tree.evict_device_start(0, num_tokens)
        gone: dict[int, int] = {}
        while True:
            step = self._tree.evict_device_next_node(0, gone)
            _add(gone, step.tracker)
            if step.node_id is not None:
                _add(gone, self._tree.evict_device_leaf(step.node_id).tracker)
            elif not step.made_progress:
                break
        self._tree.evict_device_end(0)


@cache
def _slots(count: int) -> Any:
    """Slots for the tokens, made once: no rival pays for them."""
    import torch

    return torch.arange(count)


def _add(total: dict[int, int], more: dict[int, int]) -> None:
    for component, count in more.items():
        total[component] = total.get(component, 0) + count


def _load_compiled() -> Any:
    """Load only the extension: importing the package needs the dependencies of a GPU server."""
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        raise ImportError("sglang is not installed")
    folder = Path(package.submodule_search_locations[0], "srt", "mem_cache", "rust_tree_core")
    for path in folder.glob("mem_cache.*.so"):
        spec = importlib.util.spec_from_file_location("mem_cache", path)
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise ImportError("this sglang has no compiled tree")


class _NoPool:
    """The receiver of evicted slots; it does nothing, so that only the tree is measured."""

    device = "cpu"

    def free(self, value: object) -> None: ...

    def free_segment(self, value: object, start_pos: int) -> None: ...


class PackagedRadix:
    """SGLang's `RadixCache` in Python, from its package."""

    name = "SGLang (Python)"

    def __init__(self, page_size: int) -> None:
        from sglang.srt.mem_cache import base_prefix_cache as base
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

        self._base, self._key = base, RadixKey
        self._tree = RadixCache.create_simulated(page_size=page_size, mock_allocator=_NoPool())

    def key(self, tokens: Tokens) -> Any:
        return self._key(array("q", tokens.astype(np.int64).tobytes()), None)

    def match(self, key: Any) -> Any:
        return self._tree.match_prefix(self._base.MatchPrefixParams(key=key))

    def lookup(self, key: Any) -> Any:
        return self.match(key)

    def insert(self, key: Any) -> None:
        self._tree.insert(self._base.InsertParams(key=key, value=_slots(len(key))))

    def evict(self, num_tokens: int) -> None:
        self._tree.evict(self._base.EvictParams(num_tokens=num_tokens))


def _vllm_manager(num_blocks: int, block_size: int, *, caching: bool) -> Any:
    """vLLM's `KVCacheManager` over one group of attention layers; its import needs no GPU."""
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, 2**16, block_size, block_size, enable_caching=caching)


class VllmPrefix:
    """vLLM's prefix cache: hash the blocks of a new request, look the hashes up, allocate, free.

    It evicts during allocation, so eviction cannot be measured separately.
    """

    name = "vLLM"

    def __init__(self, page_size: int) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        self._manager = _vllm_manager(2**17 // page_size, page_size, caching=True)
        self._request, self._sampling = Request, SamplingParams(max_tokens=1)
        self._hasher, self._ids = get_request_block_hasher(page_size, sha256), itertools.count()

    def key(self, tokens: Tokens) -> Any:
        # One token more than is looked up: vLLM never takes a whole prompt from the cache.
        return [*tokens.tolist(), 0]

    def match(self, key: Any) -> Any:
        request = self._request(str(next(self._ids)), key, self._sampling, None, block_hasher=self._hasher)
        return request, *self._manager.get_computed_blocks(request)

    lookup = match

    def insert(self, key: Any) -> None:
        request, blocks, num_found, _ = self.match(key)
        self._manager.allocate_slots(request, len(key) - num_found, num_found, blocks)
        self._manager.free(request)


class VllmStep:
    """A decoding step of vLLM's `KVCacheManager`: a slot for one more token of every running request."""

    name = "vLLM"

    def __init__(self, num_requests: int, num_tokens: int, block_size: int) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self._manager = _vllm_manager(num_requests * 80, block_size, caching=False)
        self._request, self._sampling = Request, SamplingParams(max_tokens=1000)
        self._prompts = [list(range(num_tokens + i % block_size)) for i in range(num_requests)]
        self._requests: list[Any] = []
        self.rewind()

    def step(self, _: object) -> None:
        allocate = self._manager.allocate_slots
        for request in self._requests:
            request.append_output_token_ids(1)
            allocate(request, 1)
            request.num_computed_tokens += 1

    def rewind(self) -> None:
        for request in self._requests:
            self._manager.free(request)
        self._requests = [self._request(str(i), p, self._sampling, None) for i, p in enumerate(self._prompts)]
        for request in self._requests:
            self._manager.allocate_slots(request, request.num_tokens)
            request.num_computed_tokens = request.num_tokens
