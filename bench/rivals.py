"""What others offer for the same work: their own packages where installed, else their published algorithm.

A `PrefixRival` keeps prompts of tokens with a value per token or page. `key` turns NumPy tokens into what the rival
reads without conversion, outside the measured time: every rival gets the input that suits it best.
"""

from __future__ import annotations

import hashlib
import importlib.util
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "ChainedHashes",
    "CompiledRadix",
    "PackagedRadix",
    "PromptDict",
    "PromptScan",
    "availability",
    "prefix_rivals",
]

Tokens = npt.NDArray[np.uint32]


class CompiledRadix:
    """SGLang's compiled (Rust) tree, driven through its extension module, without its Python layer on top."""

    name = "SGLang (Rust)"

    def __init__(self, page_size: int) -> None:
        import torch  # its libraries must be loaded before the extension

        self._torch, self._core, self._page = torch, _load_compiled(), page_size
        params = self._core.TreeCoreInitParamsBinding(eviction_policy="lru", page_size=page_size, device="cpu")
        self._tree = self._core.RustUnifiedTreeCoreBinding(params, [0])
        self._values: dict[int, Any] = {}

    def key(self, tokens: Tokens) -> Any:
        return array("q", tokens.astype(np.int64).tobytes())

    def match(self, key: Any) -> Any:
        return self._tree.match_prefix(self._core.MatchParamsBinding(key=key))

    def lookup(self, key: Any) -> Any:
        """A match and the values behind it."""
        node = self.match(key).last_device_node_id
        return self._tree.collect_full_device_indices(node, self._tree.root_node_handle(None))

    def insert(self, key: Any) -> None:
        value = self._values.get(len(key))
        if value is None:
            value = self._values[len(key)] = self._torch.arange(len(key))
        self._tree.insert(self._core.InsertParamsBinding(key=key, value=value))

    def evict(self, num_tokens: int) -> None:
        """Leaves, least recently used first, until that many tokens are free; the steps its own caller takes."""
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


def _add(total: dict[int, int], more: dict[int, int]) -> None:
    for component, count in more.items():
        total[component] = total.get(component, 0) + count


def _load_compiled() -> Any:
    """The extension alone: importing the package would need a GPU server's dependencies."""
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


class PackagedRadix:
    """SGLang's `RadixCache` in Python, from its package."""

    name = "SGLang (Python)"

    def __init__(self, page_size: int) -> None:
        import torch
        from sglang.srt.mem_cache import base_prefix_cache as base
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

        self._torch, self._base, self._key = torch, base, RadixKey
        self._tree = RadixCache.create_simulated(page_size=page_size)
        self._values: dict[int, Any] = {}

    def key(self, tokens: Tokens) -> Any:
        return self._key(array("q", tokens.astype(np.int64).tobytes()), None)

    def match(self, key: Any) -> Any:
        return self._tree.match_prefix(self._base.MatchPrefixParams(key=key))

    def lookup(self, key: Any) -> Any:
        return self.match(key)

    def insert(self, key: Any) -> None:
        value = self._values.get(len(key))
        if value is None:
            value = self._values[len(key)] = self._torch.arange(len(key))
        self._tree.insert(self._base.InsertParams(key=key, value=value))

    def evict(self, num_tokens: int) -> None:
        self._tree.evict(self._base.EvictParams(num_tokens=num_tokens))


class ChainedHashes:
    """A dict from the hash of (hash of the pages before, page) to a block: vLLM's algorithm, in a few lines."""

    name = "chained hashes (as vLLM)"

    def __init__(self, page_size: int) -> None:
        self._page = page_size
        self._blocks: dict[bytes, int] = {}

    def key(self, tokens: Tokens) -> Any:
        return tokens.tobytes()

    def match(self, key: bytes) -> list[int]:
        found, parent = [], b""
        for at in range(0, len(key), 4 * self._page):
            parent = hashlib.sha256(parent + key[at : at + 4 * self._page]).digest()
            block = self._blocks.get(parent)
            if block is None:
                break
            found.append(block)
        return found

    lookup = match

    def insert(self, key: bytes) -> None:
        parent = b""
        for at in range(0, len(key), 4 * self._page):
            parent = hashlib.sha256(parent + key[at : at + 4 * self._page]).digest()
            self._blocks.setdefault(parent, len(self._blocks))

    def evict(self, num_tokens: int) -> None:
        for _ in range(num_tokens // self._page):
            del self._blocks[next(iter(self._blocks))]


class PromptDict:
    """A dict from whole prompts to their blocks, oldest out first: the plainest prefix cache there is."""

    name = "dict of prompts"

    def __init__(self, page_size: int) -> None:
        self._prompts: dict[bytes, range] = {}

    def key(self, tokens: Tokens) -> Any:
        return tokens

    def match(self, key: Tokens) -> range | None:
        return self._prompts.get(key.tobytes())

    lookup = match

    def insert(self, key: Tokens) -> None:
        self._prompts[key.tobytes()] = range(len(key))

    def evict(self, num_tokens: int) -> None:
        while num_tokens > 0:
            num_tokens -= len(self._prompts.pop(next(iter(self._prompts))))


class PromptScan:
    """Every stored prompt compared from its first token on: the lookup of llama-cpp-python's `LlamaRAMCache`."""

    name = "scan (as LlamaRAMCache)"

    def __init__(self, page_size: int) -> None:
        self._prompts: dict[tuple[int, ...], None] = {}

    def key(self, tokens: Tokens) -> Any:
        return tuple(tokens.tolist())

    def match(self, key: tuple[int, ...]) -> tuple[int, ...] | None:
        best, longest = None, 0
        for prompt in self._prompts:
            same = 0
            for a, b in zip(prompt, key, strict=False):
                if a != b:
                    break
                same += 1
            if same > longest:
                best, longest = prompt, same
        return best

    lookup = match

    def insert(self, key: tuple[int, ...]) -> None:
        self._prompts[key] = None

    def evict(self, num_tokens: int) -> None:
        while num_tokens > 0:
            prompt = next(iter(self._prompts))
            num_tokens -= len(prompt)
            del self._prompts[prompt]


ALL = (CompiledRadix, PackagedRadix, ChainedHashes, PromptDict, PromptScan)


def _missing(rival: Any) -> str:
    try:
        rival(16)
    except Exception as error:  # whatever keeps another project's package from loading
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


_absent: dict[str, str] = {}


def prefix_rivals() -> list[Any]:
    """The classes that work here."""
    if not _absent:
        _absent.update((rival.name, _missing(rival)) for rival in ALL)
    return [rival for rival in ALL if not _absent[rival.name]]


def availability() -> list[str]:
    """A line per rival that is not measured, with the reason."""
    prefix_rivals()
    return [f"not measured: {name} ({why})" for name, why in _absent.items() if why]


class VllmStep:
    """A decoding step of vLLM's `KVCacheManager`: a slot for one more token of every running request."""

    name = "vLLM"

    def __init__(self, num_requests: int, num_tokens: int, block_size: int) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        spec = FullAttentionSpec(block_size, 1, 8, torch.float32)
        config = KVCacheConfig(num_requests * 80, [], [KVCacheGroupSpec(["layer"], spec)])
        self._manager = KVCacheManager(config, 4096, block_size, block_size, enable_caching=False)
        self._requests = [
            Request(str(i), list(range(num_tokens + i % block_size)), SamplingParams(max_tokens=2000), None)
            for i in range(num_requests)
        ]
        for request in self._requests:
            self._manager.allocate_slots(request, request.num_tokens)
            request.num_computed_tokens = request.num_tokens

    def step(self, _: object) -> None:
        allocate = self._manager.allocate_slots
        for request in self._requests:
            request.append_output_token_ids(1)
            allocate(request, 1)
            request.num_computed_tokens += 1

    def rewind(self) -> None:
        for request in self._requests:
            self._manager.free(request)
            request.num_computed_tokens = 0
            self._manager.allocate_slots(request, request.num_tokens)
            request.num_computed_tokens = request.num_tokens


def step_rivals() -> list[Any]:
    """The ones whose packages load here."""
    if VllmStep.name not in _absent:
        try:
            VllmStep(4, 32, 16).step(None)
            _absent[VllmStep.name] = ""
        except Exception as error:  # as above
            _absent[VllmStep.name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return [] if _absent[VllmStep.name] else [VllmStep]
