"""`autosave`: a process that is killed at any point leaves a cache that the next one finds."""

import os
import signal
import subprocess
import sys
import time

import pytest
from places import GOLDEN, search_path
from posix_modules import needs_posix
from prefix_engines import SHORT, prompt
from tier_stores import GIVEN

from kvcache import BatchEngine
from kvcache.engine import InferenceEngine, PrefixCachedEngine
from kvcache.tiers import DirectoryTier

pytestmark = pytest.mark.one_build

PROCESS = """
import sys
import numpy as np
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams, Transformer
engine = InferenceEngine(Transformer.from_pretrained(sys.argv[1]), dtype="q8")
cached = PrefixCachedEngine(engine, 64, autosave=sys.argv[2], strict=True)
params = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=4)
print("ready", flush=True)
for seed in range(1000):
    tokens = np.random.default_rng(seed % 20).integers(0, 250, 400).astype(np.uint32)
    print(seed, *cached.generate(tokens, params), flush=True)
"""


@needs_posix
def test_a_process_that_is_killed(tmp_path, network, rng):
    command = [sys.executable, "-c", PROCESS, GOLDEN / "llama", tmp_path]
    want = [InferenceEngine(network, dtype="q8").generate(prompt(seed, 400), SHORT) for seed in range(20)]
    for _ in range(2):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": search_path()}, text=True
        )
        assert process.stdout.readline() == "ready\n"
        first = process.stdout.readline()
        time.sleep(rng.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
        process.wait()
        process.stdout.close()
        for line in [first, *rest.splitlines()]:
            seed, *tokens = map(int, line.split())
            if len(tokens) == SHORT.max_tokens:  # not the line in which it was killed
                assert tokens == want[seed % 20]
    with PrefixCachedEngine(InferenceEngine(network, dtype="q8"), 64, autosave=tmp_path, strict=True) as cached:
        for seed in range(20):
            assert cached.generate(prompt(seed, 400), SHORT) == want[seed]
        assert cached.tiers.stats()[0].wrong == 0
        assert cached.tiers.stats()[0].hits > 0


def test_a_process_that_ends_in_order(tmp_path, network):
    """Values that `close` wrote are found at once, within the limit of the directory."""
    directory = DirectoryTier(tmp_path, "1MB", **GIVEN)
    with PrefixCachedEngine(InferenceEngine(network), 64, autosave=directory) as cached:
        want = cached.generate(prompt(1, 400), SHORT)
    assert cached.generate(prompt(1, 400), SHORT) == want  # goes on without it
    with PrefixCachedEngine(InferenceEngine(network), 64, autosave=directory) as cached:
        assert cached.tiers.head_start == 0.05  # or a short prompt would have run before it is read
        cached.tiers.head_start = 60
        answer = cached.complete(prompt(1, 400), SHORT)
        assert (answer.tokens, answer.cached_tokens) == (want, 384)
    assert cached.close()
    with BatchEngine(network, num_blocks=64, autosave=directory) as batch:
        batch.tiers.head_start = 60
        (answer,) = batch.submit(prompt(1, 400), SHORT).completions()
        assert (answer.tokens, answer.cached_tokens) == (want, 384)
        more = batch.submit(prompt(2, 400), SHORT).result()
    batch.close()
    with BatchEngine(network, num_blocks=64, autosave=directory) as batch:
        batch.tiers.head_start = 60
        (answer,) = batch.submit(prompt(2, 400), SHORT).completions()
        assert (answer.tokens, answer.cached_tokens) == (more, 384)
    with pytest.raises(ValueError, match="autosave: expected None with tiers"):
        BatchEngine(network, tiers=batch.tiers, autosave=tmp_path)
    assert PrefixCachedEngine(InferenceEngine(network), 64).close()
