"""A context of packed tokens and of others in a second layout, merged in the kernel."""

import numpy as np
import pytest
from blocks import Scattered
from oracles import kernels as oracle

from kvcache.kernels import kernelcalls, kernels

HEADS, GROUP, DIM, VALUE_DIM = 2, 3, 32, 16
FORMATS = {name: 0.01 if each.quantised else 2e-5 for name, each in kernels.FORMATS.items()}
LENGTHS, NEAR, COUNTS = [33, 0, 2100, 64, 16], [70, 9, 130, 0, 1], [2, 9, 1, 40, 1]


def contexts(rng, name, centred, holes=False):
    """Packed tokens, the others, the centres of the packed keys, and queries."""
    shape = {"heads": HEADS, "dim": DIM, "value_dim": VALUE_DIM}
    rotate = (name.startswith("q"), name.startswith("q"))
    far = Scattered(rng, LENGTHS, **shape, key_format=name, rotate=rotate, holes=holes)
    near = Scattered(rng, NEAR, **shape, key_format="f16", block_size=5)
    centres = rng.standard_normal((HEADS, DIM)).astype(np.float32) if centred else None
    return far, near, centres, rng.standard_normal((sum(COUNTS), HEADS * GROUP, DIM)).astype(np.float32)


def attend(far, near, centres, queries, counts=COUNTS, seqs=None, threads=1, **options):
    chosen = range(len(counts)) if seqs is None else seqs
    whole = [(far.runs[i], count, 0) for i, count in zip(chosen, counts, strict=True)]
    out, lse = np.empty((*queries.shape[:2], VALUE_DIM), np.float32), np.empty(queries.shape[:2], np.float32)
    scores = np.full((HEADS, sum(len(far.read_keys[i]) + len(near.read_keys[i]) for i in chosen)), np.nan, np.float32)
    kernelcalls.attend(
        far.layout, far.arena, whole, queries, 0.2, out=out, lse=lse, scores=scores, whole=True, threads=threads,
        centres=centres, residuals=[near.runs[i] for i in chosen], residual_layout=near.layout,
        residual_arena=near.arena, **options,
    )
    return out, lse, scores


@pytest.mark.parametrize(("name", "tolerance"), FORMATS.items())
@pytest.mark.parametrize(("centred", "threads"), [(False, 3), (True, 1)])
def test_both_parts_are_one_context(rng, name, tolerance, centred, threads):
    """All packed tokens, and of the others those up to each query."""
    far, near, centres, queries = contexts(rng, name, centred)
    sinks = rng.standard_normal(HEADS * GROUP).astype(np.float32)
    for logits in (None, sinks):
        out, lse, scores = attend(far, near, centres, queries, threads=threads, sinks=logits)
        at = first = 0
        for i, count in enumerate(COUNTS):
            mass, num_far, num_near = np.zeros((HEADS, LENGTHS[i] + NEAR[i])), LENGTHS[i], NEAR[i]
            for j in range(count):
                stop = max(0, num_near - count + j + 1)
                own = far.read_keys[i] + (0 if centres is None else centres)
                keys = np.concatenate([own, near.read_keys[i][:stop]])
                values = np.concatenate([far.read_values[i], near.read_values[i][:stop]])
                row = queries[at + j : at + j + 1]
                want, weights, total = oracle.attend(row, keys, values, 0.2, sinks=logits)
                error = np.abs(out[at + j] - want[0]).max()
                assert error <= tolerance * max(1, np.abs(want).max())
                np.testing.assert_allclose(lse[at + j], total[0], rtol=tolerance, atol=tolerance)
                seen = np.r_[:num_far, num_far : num_far + stop]
                mass[:, seen] += weights.reshape(HEADS, GROUP, -1).sum(1)
            part = scores[:, first : first + num_far + num_near]
            np.testing.assert_allclose(part, mass, rtol=4 * tolerance, atol=tolerance)
            at, first = at + count, first + num_far + num_near


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("holes", [False, True])
def test_bits_depend_on_no_other_sequence_and_on_no_thread(rng, name, holes):
    far, near, centres, queries = contexts(rng, name, True, holes)
    out, lse, scores = attend(far, near, centres, queries)
    for threads in (2, 5):
        for one, other in zip(attend(far, near, centres, queries, threads=threads), (out, lse, scores), strict=True):
            np.testing.assert_array_equal(one, other)
    at = 0
    for i, count in enumerate(COUNTS):
        part = slice(at, at + count)
        alone = attend(far, near, centres, queries[part], [count], [i], threads=3)
        np.testing.assert_array_equal(alone[0], out[part])
        np.testing.assert_array_equal(alone[1], lse[part])
        at += count
