"""Every way of every kind of network happens, and gives the cold text; a way with other bits is found."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from seeded_weights import golden_folder

from kvcache import InferenceEngine, SamplingParams
from kvcache.certificates.answer_digests import LogitsDigests, Record, first_difference
from kvcache.certificates.computed_ways import cold, ways_of
from kvcache.certificates.hits import HITS, Hit
from kvcache.certificates.rounds import Bounds, named, verified
from kvcache.certificates.seeded_prompts import case_of, numbers, words
from kvcache.certificates.subject import Subject
from kvcache.engine import Transformer

pytestmark = pytest.mark.one_build

# With a window, a state, latent keys, indexers, another regime of positions, an MTP layer; with a residual and without.
NETWORKS = {
    "llama": "q8", "gemma3": "f32", "gpt_oss": "q4", "qwen3_next": "q4", "deepseek_v3": "f16", "phi3_longrope": "q8",
    "lfm2": "f32", "deepseek_v32": "q8",
}


def subject(name, **options):
    return Subject(InferenceEngine.from_pretrained(golden_folder(name), num_blocks=2, draft="auto", **options))


@pytest.fixture(scope="module")
def llama():
    return subject("llama")


def test_prompts_are_the_same_on_every_machine(llama):
    """Their numbers are those of SHAKE-256, which for an empty text begins with 46b9dd2b0ba88d13 233b3feb743eeb24."""
    assert numbers("", 2).tolist() == [0x138DA80B2BDDB946, 0x24EB3E74EB3F3B23]
    assert case_of(llama.model, 0).tokens[:4].tolist() == [172, 85, 69, 175]
    assert words("a", 9) == "Winter turn earth eye back point name fire. River."
    lengths = [len(case_of(llama.model, i).tokens) for i in range(4)]
    assert lengths == [44, 107, 330, 203]
    greedy = [case_of(llama.model, i).params.temperature == 0 for i in range(4)]
    assert greedy == [True, False, True, False]


@pytest.mark.parametrize("name", NETWORKS)
def test_every_way_happens_and_is_equal(name):
    made = subject(name, dtype=NETWORKS[name])
    found = verified(lambda: made, Bounds(1e9, 2), "test", 3)
    for row in found.rows:
        assert row.prompts, f"{row.way}: {row.note}"
        assert row.different == 0, f"{row.way}: {row.first}"
    assert found.is_equal
    names = {row.way for row in found.rows}
    assert ("hit behind a window" in names) == bool(made.windows)
    assert ("hit of a state" in names) == made.has_states
    assert len({"1 thread", "2 threads", "3 threads"} - names) <= 1  # but for the number that all others had


def test_what_hits_share(llama):
    case = case_of(llama.model, 1)
    for hit in HITS[:4]:
        earlier = hit.earlier(llama, case)
        shared = int(np.argmin([*(a == b for a, b in zip(earlier, case.tokens.tolist(), strict=False)), False]))
        assert shared == hit.shared(llama, case)
    notes = {way.name: way.run(llama, case, None).note for way in ways_of(llama, 1)[:4]}
    assert notes == {
        "hit of whole blocks": "48 of 107 tokens cached", "hit inside of a block": "55 of 107 tokens cached",
        "hit of the whole prompt": "107 of 107 tokens cached", "the same prompt again": "96 of 107 tokens cached",
    }


def test_a_hit_of_another_kind_is_no_hit_of_this_kind(llama, monkeypatch):
    """Fewer cached tokens than a kind of hit has: the way did not happen, and is not compared."""
    monkeypatch.setattr(Hit, "earlier", lambda hit, subject, case: case.tokens[:40].tolist())
    inside = ways_of(llama, 1)[1]
    assert inside.run(llama, case_of(llama.model, 1), None) == (None, "a hit of 32 tokens")


def test_levels(llama):
    """A level with other bits is found, and one that has no records is not compared."""
    class Twin(NamedTuple):
        name: str
        change: Callable[[list[Record]], list[Record]]

        def records(self, prompts, seconds):
            return self.change([cold(llama, case_of(llama.model, i)) for i in range(prompts)])

    levels = [
        Twin("same", list), Twin("late", lambda records: []),
        Twin("other", lambda records: [records[0], replace(records[1], steps=("0" * 16, *records[1].steps[1:]))]),
    ]
    found = verified(lambda: llama, Bounds(1e9, 2), "test", 2, ["level"], levels)
    assert [(row.prompts, row.different, row.note) for row in found.rows] == [
        (2, 0, ""), (0, 0, "2 not: no time"), (2, 1, ""),
    ]
    assert (found.different, found.missing, found.is_equal) == (["level other"], ["level late"], False)


def test_a_network_whose_rows_depend_on_their_pieces(llama, monkeypatch):
    """The last bit of one logit, in passes that begin inside of a text: hits, pieces and draft tokens differ."""
    forward = Transformer.forward

    def other(self, tokens, positions, *arguments, **options):
        logits = forward(self, tokens, positions, *arguments, **options)
        if len(logits) and len(tokens) > 1 and positions[0] > 0:
            logits[:, 7] = np.nextafter(logits[:, 7], np.float32(np.inf))
        return logits

    monkeypatch.setattr(Transformer, "forward", other)
    found = verified(lambda: llama, Bounds(1e9, 1), "test", 2)
    different = {row.way for row in found.rows if row.different}
    assert {"hit of whole blocks", "hit inside of a block", "in pieces", "draft tokens"} <= different
    assert not {row.way for row in found.rows if "thread" in row.way} & different
    assert not found.is_equal
    assert next(row.first for row in found.rows if row.way == "hit of whole blocks").startswith(
        "prompt 0, logits of new token 0: log-probability -"
    )


def test_digests_of_records(llama):
    """Each part of an answer counts; NaN is one value."""
    case = case_of(llama.model, 0)
    want = cold(llama, case)
    assert want == cold(llama, case)
    for changes in (
        {"prompt": 45}, {"tokens": (*want.tokens[:-1], 255)}, {"steps": ("0" * 16, *want.steps[1:])}, {"scores": "0"},
    ):
        changed = replace(want, **changes)
        assert changed.digest != want.digest
        assert first_difference(want, changed) is not None
    assert first_difference(want, replace(want, scores=None)) is None
    other = replace(want, tokens=(want.tokens[0] + 1, *want.tokens[1:]))
    assert first_difference(want, other).startswith(f"new token 0: {want.tokens[0]}, and {want.tokens[0] + 1}; log-")
    one, other = LogitsDigests(), LogitsDigests()
    for digests, bits in ((one, 0x7FC00000), (other, 0xFFC12345)):
        digests(np.zeros(3, np.uint32), np.array([bits, 0], np.uint32).view(np.float32))
    assert one._found == other._found
    other(np.zeros(3, np.uint32), np.array([0x7FC00000, 0x80000000], np.uint32).view(np.float32))
    assert one._found != other._found, "-0 is not 0"


def test_the_bound_of_time(llama):
    """The first cold text runs in any case, and each way says what it has no time for."""
    times = iter(range(0, 10_000, 10))
    found = verified(lambda: llama, Bounds(25, 9, lambda: next(times)), "test", 1)
    assert len(found.records) == 1
    assert [row.prompts for row in found.rows][:3] == [1, 1, 0]
    assert all(row.note == "1 not: no time" for row in found.rows[2:])
    assert not found.different
    assert found.missing == [row.way for row in found.rows[2:]]
    assert not found.is_equal, "what was not compared is not equal"


def test_names_of_ways(llama):
    assert [way.name for way in named(["in a"], [], llama, 1)] == ["in a batch"]
    assert named(["cold", "level s"], ["scalar"], llama, 1) == []
    with pytest.raises(ValueError, match=r"^way: expected the beginning of one of cold, hit of whole .*, got x$"):
        named(["x"], [], llama, 1)


def test_the_storage_of_an_engine_makes_another_one_like_it(rng):
    """Formats, rotation, residual, calibration and sparse tokens: K and V have the same bits."""
    tokens = rng.integers(0, 250, 300)
    for options in (
        {"dtype": "q4"}, {"key_dtype": "q8", "value_dtype": "q3", "residual_length": 32}, {"sparse_tokens": 32},
        {"dtype": "q4", "calibrate": tokens[:128], "rotate": False}, {"dtype": "auto:5.0", "calibrate": tokens[:128]},
    ):
        engine = InferenceEngine.from_pretrained(golden_folder("llama"), num_blocks=40, **options)
        other = InferenceEngine(engine.model, num_blocks=40, **engine.storage)
        params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3)
        assert other.complete(tokens, params) == engine.complete(tokens, params)
        assert other.storage == engine.storage
