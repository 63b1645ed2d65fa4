"""The model of a fleet beside two real servers on this machine: the same requests to the same workers, one by one.

The model says which worker gets a request and how many of its tokens are cached there; `cached_tokens` of the servers'
answers say what was. Only memory is compared, so each request waits for the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep

import numpy as np

from bench.fleet.costs import Costs
from bench.fleet.replay import WAYS, Fleet, replay
from bench.prefix.workloads import Mix, Request, Trace, synthetic
from bench.support.processes import Server, posted
from kvcache.demo import DIRECTORY

__all__ = ["compare", "questions"]

BLOCK, GROUP = 16, 64  # tokens of a block, and of a value of a tier
_VOCABULARY = 4000  # of the ids that prompts have
_NEVER = 1e-3  # load: no request meets another one
_PATIENCE = 20.0  # seconds for values to be written


def questions(seed: int, count: int, page_size: int) -> Trace:
    """Short chats, agents and documents: prompts of whole pages, and half a block that no other prompt has there."""
    mix = Mix(
        num_requests=count, seed=seed, systems=6, system_tokens=160, turn_tokens=64, answer_tokens=48, task_tokens=160,
        document_tokens=320,
    )
    drawn = synthetic(mix, page_size)
    kept = [each.pages[: each.num_prompt] for each in drawn.requests if each.num_prompt * page_size < 1400]
    half = BLOCK // 2
    lengths = [len(pages) * page_size + half for pages in kept]
    made = [Request(pages, len(pages), float(i), lengths[i], 1) for i, pages in enumerate(kept)]
    return replace(drawn, requests=made)


def _prompt(request: Request, page_size: int, number: int) -> list[int]:
    """Its token ids: no two pages begin with the same one where texts part, and so does no question."""
    pages = []
    for name in request.pages:
        rest = np.random.default_rng(name).integers(1, _VOCABULARY, page_size - 1)
        pages.append([1 + name % _VOCABULARY, *rest.tolist()])
    tail = [_VOCABULARY + 1 + number % 90] * (request.prompt_tokens - len(request.pages) * page_size)
    return [token for page in pages for token in page] + tail


def _cached(url: str, prompt: Sequence[int]) -> int:
    """Tokens of a prompt that a server says it had cached."""
    body = {"model": "m", "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
    return int(posted(url + "/v1/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"])


def _wait_for(folder: Path, values: int) -> None:
    """Wait until `values` values are in a directory."""
    end = monotonic() + _PATIENCE
    while sum(1 for each in folder.rglob("*") if each.is_file()) < values and monotonic() < end:
        sleep(0.002)


def compare(way: str, count: int, num_blocks: int, seed: int = 0) -> tuple[list[int], list[int], int]:
    """Cached tokens of each request by the model and by two servers, and the tokens of all prompts."""
    stored = WAYS[way][1]
    size = GROUP if stored else BLOCK
    trace = questions(seed, count, size)
    pages = (num_blocks - 1) * BLOCK // size  # a question has a block while it runs
    found = replay(trace, Fleet(2, pages, 1 << 20 if stored else 0, load=_NEVER), way, Costs(per_token=1.0))
    real, known = [], set()
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory()) if stored else None
        options = ["--num-blocks", str(num_blocks), *(["--autosave", folder] if folder else [])]
        urls = [stack.enter_context(Server(DIRECTORY, "m", *options, told=False)).url for _ in range(2)]
        for number, (request, worker) in enumerate(zip(trace.requests, found.worker, strict=True)):
            real.append(_cached(urls[worker], _prompt(request, size, number)))
            known.update(request.pages)
            if folder is not None:
                _wait_for(Path(folder), len(known))
    return found.cached, real, found.prompt_tokens
