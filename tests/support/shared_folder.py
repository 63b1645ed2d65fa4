"""A folder that processes on several CPUs share: values of tiers, saved caches, and the answers of the first process.

    python -m shared_folder FOLDER

The first process computes every answer and leaves what it cached; each later one has to find that, in the tier and in
the files, and to give the same answers to the last bit.
"""

import json
import math
import platform
import sys
from pathlib import Path

import numpy as np
from places import GOLDEN
from seeded_weights import seeded

from kvcache import simd_level
from kvcache.demo import DIRECTORY
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams, Transformer
from kvcache.tiers import DirectoryTier, Tiers, lookups

PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=6, logprobs=2, ignore_eos=True)
LENGTH = 140  # two values of 64 tokens, and some more
CASES = {
    "demo f32": (DIRECTORY, {"dtype": "f32"}),
    "demo q8": (DIRECTORY, {"dtype": "q8"}),
    "demo q4": (DIRECTORY, {"dtype": "q4", "residual_length": 16}),
    "windows q8": (GOLDEN / "gemma3", {"dtype": "q8"}),
    "states f16": ("lfm2", {"dtype": "f16"}),
}


def share(folder):
    """Give the answers of all cases, and check them against those of the process that came first; True: this one did.

    AssertionError: other bits, or nothing found of what the first process left.
    """
    path, found = folder / "answers.json", {name: _answers(folder, name, *case) for name, case in CASES.items()}
    if not path.exists():
        assert all(answer["hits"] == 0 for answers in found.values() for answer in answers), "hits in an empty folder"
        path.write_text(json.dumps(found))
        return True
    first = json.loads(path.read_text())
    for name, answers in found.items():
        for way, mine, theirs in zip(("tier", "file"), answers, first[name], strict=True):
            assert mine["answer"] == theirs["answer"], f"{name}, {way}: other bits"
            assert mine["hits"] >= 128, f"{name}, {way}: {mine['hits']} tokens found"
    return False


def _answers(folder, name, checkpoint, options):
    """The answers by an engine with a tier and by one with a saved cache, each with the tokens that it found."""
    model = Transformer.from_pretrained(seeded(checkpoint) if isinstance(checkpoint, str) else checkpoint)
    tokens = np.random.PCG64(7).random_raw(LENGTH) % 250 % model.config.vocab_size
    path, answers = folder / f"{name}.saved", []
    tier = DirectoryTier(folder / "tier", "1GiB", secret=bytes(32))  # on Windows it needs one of its own
    with Tiers([tier], secret=bytes(32), after_uses=1, head_start=60) as tiers:
        tiered = PrefixCachedEngine(InferenceEngine(model, **options), 64, tiers=tiers, strict=True)
        answers.append(_answer(tiered, tokens))
        assert tiers.flush(60)
        assert tiers.stats()[0].wrong == 0
        if not path.exists():
            tiered.save(path)
            return answers * 2
    saved = PrefixCachedEngine(InferenceEngine(model, **options), 64, strict=True)
    saved.load(path)
    answers.append(_answer(saved, tokens))
    return answers


def _answer(engine, tokens):
    found = engine.complete(tokens, PARAMS)
    assert engine.cache_stats().exact
    return {"answer": repr((found.tokens, found.logprobs)), "hits": found.cached_tokens}


if __name__ == "__main__":
    lookups._SHARE = math.inf  # a fetch is worth it, however slow the machine
    first = share(Path(sys.argv[1]))
    print(f"{platform.machine()}, {simd_level()}: {'computed' if first else 'found and computed the same'}")
