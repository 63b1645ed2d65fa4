"""Texts that see parts of cached texts: what they mean, and that their bits depend on the request alone."""

from __future__ import annotations

from threading import Thread

import numpy as np
import pytest
from oracles.seen import seen_logits, seen_positions
from places import GOLDEN
from seeded_weights import golden_folder
from serving import GREEDY, run, settled
from state_networks import StateNetwork
from windowed_networks import Windowed

from kvcache import BatchEngine, InferenceEngine, PrefixCachedEngine, Segment
from kvcache.calibration.calibrating import measure
from kvcache.engine import Transformer
from kvcache.errors import OutOfMemoryError
from kvcache.texts.seen_parts import SeenPart, SeenParts
from kvcache.tiers.directory import DirectoryTier
from kvcache.tiers.tiers import Tiers

RNG = np.random.default_rng(70)
# q4 has groups of 64 tokens, of which the newest one is in f16.
FORMATS = {"f32": {}, "f16": {"dtype": "f16"}, "q8": {"dtype": "q8"}, "q4": {"dtype": "q4"}}
# Golden networks with windows, and a format: beside whole layers, with sinks and packed, and alone.
WINDOWED = {"gemma3": ("gemma3", "f16"), "gpt_oss": ("gpt_oss", "q4"), "mistral_window": ("mistral_window", "q8")}
PARAMS = GREEDY.changed({"logprobs": 3, "max_tokens": 5})


def tokens(count):
    return RNG.integers(3, 90, count).astype(np.uint32)


HEAD, DOCUMENTS, QUESTION = tokens(21), [tokens(40), tokens(33), tokens(10), tokens(50)], tokens(9)
ORDERS = [(0, 1, 2), (2, 1, 0), (3, 1), (1, 1, 3), (0,), (3, 2, 1, 0), (2,), (1, 3)]


def segmented(order, link, question=QUESTION, head=HEAD):
    """The value of a request with these documents, and its text behind it."""
    prefix, again = SeenParts.of_segments(head, [DOCUMENTS[i] for i in order], link)
    return prefix, np.concatenate([again, question])


def edited():
    """Two edits of one text: the values, and the text behind each."""
    first = SeenParts.of_edit(np.concatenate([HEAD, DOCUMENTS[0]]), [(30, 44)])
    second = SeenParts.of_edit(DOCUMENTS[1], [(5, 9), (40, 50), (64, 70)], first)
    return [(first, DOCUMENTS[1]), (second, QUESTION)]


def requests():
    """Requests of all kinds: segments in several orders without and with links, edits, plain texts."""
    some = [segmented(order, link) for order in ORDERS for link in (0, 16)]
    return [*some, *edited(), (None, np.concatenate([HEAD, DOCUMENTS[0], QUESTION]))]


def key(completion):
    return completion.tokens, completion.logprobs


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


# -- what it means ----------------------------------------------------------------------------------------------------


@pytest.mark.one_build
@pytest.mark.parametrize("link", [0, 1, 16, 45])
def test_a_token_sees_each_position_before_it_once(link):
    """Tokens behind segments do, and those that run again in place; an edit leaves out what it clears."""
    for order, head in (((0, 1, 2, 3), HEAD), ((3, 2), HEAD), ((1, 1), HEAD), ((0, 2, 1), HEAD[:0])):
        prefix, own = segmented(order, link, head=head)
        ends = len(head) + np.cumsum([len(DOCUMENTS[i]) for i in order])
        starts = ends - [len(DOCUMENTS[i]) for i in order]
        spans = [range(start, min(start + link, end)) for start, end in zip(starts[1:], ends[1:], strict=True)]
        linked = [place for span in spans for place in span]
        places = [*linked, *range(ends[-1], ends[-1] + len(QUESTION))]
        assert prefix.num_tokens == ends[-1]
        for place, seen in zip(places, seen_positions(prefix, len(own)), strict=True):
            assert sorted(seen) == list(range(place + 1))
    cleared = [range(30, 44), [*range(5, 9), *range(30, 50), *range(64, 70)]]
    for (prefix, own), gone in zip(edited(), cleared, strict=True):
        for i, seen in enumerate(seen_positions(prefix, len(own))):
            assert sorted(seen) == sorted(set(range(prefix.num_tokens + i + 1)) - set(gone))


@pytest.mark.one_build
@pytest.mark.parametrize("name", [
    "llama", "qwen3_tied", "mistral_yarn", "phi3_longrope", "ministral3", "smollm3", "deepseek_v3", "glm4", "exaone4",
    "minicpm", "hunyuan", "gemma2", "gemma3", "gpt_oss", "mistral_window", "qwen2_windows", "exaone4_windows",
    "mimo_v2_flash", "starcoder2_window",
])
def test_it_is_a_masked_text(name):
    """RoPE of several kinds, in part, divided by length; MLA; norms before and behind it; layers without positions.

    Windows of 20 to 40 tokens, beside layers that keep all tokens or alone, with sinks, soft caps and other sizes.
    """
    model = Transformer.from_pretrained(golden_folder(name))
    engine = InferenceEngine(model)
    by_distance = model.config.qk_norm != "turned"  # with norms behind RoPE scores are of positions
    moved = [segmented((0, 1, 2), 0), segmented((2, 0, 1), 16)] if by_distance else [segmented((0,), 0)]
    for prefix, own in [*moved, *edited()]:
        want = seen_logits(model, own, prefix)
        engine.reset(prefix)
        base = engine.num_tokens
        np.testing.assert_allclose(engine.prefill_from_pos(own, base), want[-1], atol=3e-4)
        found = log_softmax(want)[np.arange(len(own) - 1), own[1:]]
        np.testing.assert_allclose(engine.score(own, prefix=prefix), found, atol=3e-4)
        engine.check()
        behind = np.arange(prefix.num_tokens, base + len(own) - 1)
        positions = np.sort(np.concatenate([*(part.positions for part in prefix.parts), prefix.places, behind]))
        for layer, each in enumerate(model.attention):
            kept = engine.kept_positions(layer)
            near = positions if each.window is None else np.intersect1d(positions, kept)
            assert kept.tolist() == near.tolist()
            assert each.window is None or np.isin(positions[positions > positions[-1] + 1 - each.window], kept).all()


def test_one_segment_is_the_plain_text_but_for_rounding(network):
    """Links of the first segment are of no use: it has seen all that is before it."""
    engine = InferenceEngine(network)
    for link in (0, 16):
        prefix, own = segmented((0,), link)
        assert own is not QUESTION
        assert len(own) == len(QUESTION)
        plain = engine.score(np.concatenate([HEAD, DOCUMENTS[0], QUESTION]))
        np.testing.assert_allclose(engine.score(own, prefix=prefix), plain[-len(QUESTION) + 1 :], atol=1e-5)


# -- its bits ---------------------------------------------------------------------------------------------------------


# Where builds check: one in blocks and one with windows. The others differ in kernels, which tests/kernels runs.
CHECKED = ("q4", "gemma3")
OTHERS = [name for name in (*FORMATS, *WINDOWED) if name not in CHECKED]
NAMES = [*CHECKED, *(pytest.param(name, marks=pytest.mark.one_build) for name in OTHERS)]


@pytest.mark.parametrize("name", NAMES)
def test_bits_depend_on_the_request_alone(network, name, tmp_path):
    """Cold, warm, other orders first, in pieces, in batches, on threads, preempted, from a file and from a tier."""
    folder, dtype = WINDOWED.get(name, (None, name))
    network = network if folder is None else Transformer.from_pretrained(golden_folder(folder))
    options, asked = FORMATS[dtype], requests()
    want = [key(InferenceEngine(network, **options).complete(own, PARAMS, prefix=each)) for each, own in asked]
    for chunk in (1, 16, 64):
        pieces = InferenceEngine(network, prefill_chunk=chunk, **options)
        some = asked[chunk % 3 :: 3] if chunk == 1 else asked
        got = [key(pieces.complete(own, PARAMS, prefix=each)) for each, own in some]
        assert got == (want[chunk % 3 :: 3] if chunk == 1 else want)
        pieces.check()
    cached = PrefixCachedEngine(InferenceEngine(network, **options), 200)
    for turn in (1, -1):  # cold and warm; each order after others, and before them
        got = [key(cached.complete(own, PARAMS, prefix=each)) for each, own in asked[::turn]][::turn]
        assert got == want
    cached.check()
    cached.save(tmp_path / "saved")
    loaded = PrefixCachedEngine(InferenceEngine(network, **options), 200)
    loaded.load(tmp_path / "saved")
    for (each, own), right in zip(asked, want, strict=True):
        before = loaded.inner.prefill_token_count
        assert key(loaded.complete(own, PARAMS, prefix=each)) == right
        assert loaded.inner.prefill_token_count - before <= 16 + len(own)  # the texts that it sees were there
    preempted = 0
    for blocks, most in ((300, 8), (24 if name == "q4" else 26, 64), (300, 1)):
        # A step has time for every prompt: on a busy machine too, texts run together and take each other's blocks.
        batch = BatchEngine(network, num_blocks=blocks, max_running=most, target_gap=60.0, **options)
        waiting = [batch.submit(own, PARAMS, prefix=each) for each, own in [*asked, *asked[::-1]]]
        run(batch, check=most != 1)
        assert [key(each.completions()[0]) for each in waiting] == want + want[::-1]
        settled(batch)
        preempted += batch.stats().preemptions
    assert preempted or folder == "mistral_window"  # which has no blocks that many tokens take


@pytest.mark.parametrize("length", [0, 12, 64])
def test_first_tokens_of_a_request_stay_in_f16(network, length):
    """With a calibration; in the head, which may be shorter, or in the first document. The bits are as without."""
    known = measure(network, np.random.default_rng(1).integers(0, network.config.vocab_size, 120).astype(np.uint32))
    options = {"dtype": "q4", "residual_length": length, "calibrate": known}
    for size in (0, 5, 16, 21):
        asked = [segmented(order, link, head=HEAD[:size]) for order in ((0, 1), (1, 1, 3), (2,)) for link in (0, 16)]
        first = SeenParts.of_edit(np.concatenate([HEAD[:size], DOCUMENTS[0]]), [(3, 9), (30, 38)])
        asked += [(first, DOCUMENTS[1]), (SeenParts.of_edit(DOCUMENTS[1], [(12, 20), (40, 50)], first), QUESTION)]
        want = [key(InferenceEngine(network, **options).complete(own, PARAMS, prefix=each)) for each, own in asked]
        cached = PrefixCachedEngine(InferenceEngine(network, prefill_chunk=7, **options), 200)
        for turn in (1, -1):
            assert [key(cached.complete(own, PARAMS, prefix=each)) for each, own in asked[::turn]][::turn] == want
        cached.check()
        for blocks, most in ((300, 3), (26, 64), (300, 1)):
            batch = BatchEngine(network, num_blocks=blocks, max_running=most, **options)
            waiting = [batch.submit(own, PARAMS, prefix=each) for each, own in [*asked, *asked[::-1]]]
            run(batch)  # f16 rows take no more memory than was reserved
            assert [key(each.completions()[0]) for each in waiting] == want + want[::-1]
            settled(batch)


def test_groups_leave_no_token_out(network):
    """Where packed tokens are as exact as others, groups change nothing but roundings."""
    for prefix, own in [segmented((0, 1, 2), 16), segmented((3, 1), 0), *edited()]:
        want = InferenceEngine(network).score(own, prefix=prefix)
        for length in (5, 16, 64):
            engine = InferenceEngine(network, residual_length=length)
            np.testing.assert_allclose(engine.score(own, prefix=prefix), want, atol=1e-4)


@pytest.mark.parametrize("windows", [False, True])
def test_one_document_stands_at_two_places_of_a_batch(network, windows):
    """In one request and in several at once, each place is turned by itself, and the document runs once."""
    network = Windowed(network, 30, 12) if windows else network
    asked = [segmented((1, 1), 0), segmented((0, 1, 1), 16), segmented((1,), 0), segmented((2, 1), 16)]
    want = [key(InferenceEngine(network).complete(own, PARAMS, prefix=each)) for each, own in asked]
    batch = BatchEngine(network, num_blocks=200)
    waiting = [batch.submit(own, PARAMS, prefix=each) for each, own in asked]
    run(batch)
    assert [key(each.completions()[0]) for each in waiting] == want
    texts = len(HEAD) + sum(len(DOCUMENTS[i]) for i in (0, 1, 2))
    own = sum(len(each) for _, each in asked)
    assert batch.stats().prefilled_tokens <= texts + own + 16 * 3  # ends of blocks that are shared in part run again


def test_what_fits_alone_runs_in_the_smallest_pool(network):
    """A document that stands at several places takes its blocks once; each engine has room where it says so."""
    for order in ((3, 3, 3, 3, 3), (1, 1, 0, 1, 0)):
        prefix, own = segmented(order, 0)
        want = key(InferenceEngine(network).complete(own, PARAMS, prefix=prefix))
        for blocks in range(5, 40):
            batch = BatchEngine(network, num_blocks=blocks)
            try:
                waiting = batch.submit(own, PARAMS, prefix=prefix)
            except OutOfMemoryError:
                continue
            run(batch)
            assert key(waiting.completions()[0]) == want
            settled(batch)
            break
        assert blocks < 20


def test_a_text_behind_an_edit_of_all_before_it_sees_itself_alone(network):
    """Its positions go on; the edit has no parts."""
    prefix = SeenParts.of_edit(DOCUMENTS[0], [(0, 40)])
    assert (prefix.parts, prefix.num_tokens) == ((), 40)
    want = key(InferenceEngine(network).complete(QUESTION, PARAMS, prefix=prefix))
    np.testing.assert_allclose(  # RoPE turns by distances
        [top.logprob for top in want[1]],
        [top.logprob for top in InferenceEngine(network).complete(QUESTION, PARAMS).logprobs], atol=1e-4,
    )
    batch = BatchEngine(network, num_blocks=40)
    waiting = [batch.submit(own, PARAMS, prefix=each) for each, own in ((prefix, QUESTION), segmented((1, 0), 16))]
    run(batch)
    assert key(waiting[0].completions()[0]) == want
    cached = PrefixCachedEngine(InferenceEngine(network), 100)
    assert [key(cached.complete(QUESTION, PARAMS, prefix=prefix)) for _ in range(2)] == [want] * 2


@pytest.mark.parametrize("windows", [False, True])
def test_threads_and_samples_have_their_bits(network, windows):
    network, asked = Windowed(network, 30, 12) if windows else network, requests()[::3]
    params = PARAMS.changed({"temperature": 0.8, "seed": 5})
    alone, found = InferenceEngine(network), {}
    seeds = [params.changed({"seed": 5 + i}) for i in range(3)]
    want = [[key(alone.complete(own, one, prefix=each)) for one in seeds] for each, own in asked]
    with BatchEngine(network, num_blocks=120) as batch:

        def ask(number):
            prefix, own = asked[number]
            found[number] = [key(each) for each in batch.submit(own, params, prefix=prefix, n=3).completions(60)]

        threads = [Thread(target=ask, args=[number]) for number in range(len(asked))]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        batch.check()
    assert [found[number] for number in range(len(asked))] == want


@pytest.mark.parametrize("windows", [False, True])
def test_a_directory_has_the_documents(network, tmp_path, windows):
    """Another process finds them there, but for the tokens behind the last whole group of a tier."""
    network = Transformer.from_pretrained(GOLDEN / "gemma3") if windows else network
    long = [tokens(90), tokens(60), tokens(7)]
    asked = [(SeenParts.of_segments(HEAD, documents, 0)[0], QUESTION) for documents in (long, long[::-1])]
    asked.append((SeenParts.of_edit(tokens(70), [(3, 5)], SeenParts.of_edit(long[0], [(50, 70)])), QUESTION))
    want = [key(InferenceEngine(network).complete(own, PARAMS, prefix=each)) for each, own in asked]
    counts = []
    for _ in range(2):
        with Tiers([DirectoryTier(tmp_path, 2**30)], after_uses=1, head_start=60) as tiers:
            batch = BatchEngine(network, num_blocks=200, tiers=tiers)
            got = [key(batch.submit(own, PARAMS, prefix=each).completions()[0]) for each, own in asked]
            assert got == want
            counts.append(batch.stats().prefilled_tokens)
            batch.close()
            cached = PrefixCachedEngine(InferenceEngine(network), 200, tiers=tiers)
            assert [key(cached.complete(own, PARAMS, prefix=each)) for each, own in asked] == want
    # A group of each text but the shortest document; the head, which two of them begin with, ran once.
    assert windows or counts[1] == counts[0] - (4 * 64 - 2 * len(HEAD))
    assert counts[1] < counts[0]


def test_longrope_has_the_regime_of_the_request():
    """Short documents in a long request, and a text that grows beyond the border."""
    model = Transformer.from_pretrained(GOLDEN / "phi3_longrope")
    border = model.config.rope.original_positions
    head, documents = tokens(5), [tokens(border // 4) for _ in range(3)]
    short, own = SeenParts.of_segments(head, documents, 0)[0], tokens(3)
    room = border - short.num_tokens - 3
    params = PARAMS.changed({"max_tokens": room + 6, "ignore_eos": True})
    alone = InferenceEngine(model)
    want = key(alone.complete(own, params, prefix=short))
    long = np.concatenate([own, np.array(want[0], np.uint32)])
    alone.reset(short)
    want_end = alone.prefill_from_pos(long, short.num_tokens)
    np.testing.assert_allclose(want_end, seen_logits(model, long, short)[-1], atol=3e-4)
    cached = PrefixCachedEngine(InferenceEngine(model), 300)
    assert [key(cached.complete(own, params, prefix=short)) for _ in range(2)] == [want] * 2
    batch = BatchEngine(model, num_blocks=300)
    waiting = [batch.submit(own, params, prefix=short) for _ in range(2)]
    run(batch)
    assert [key(each.completions()[0]) for each in waiting] == [want] * 2


def test_many_parts_run_in_short_pieces(network):
    """The queries of a pass are bounded, parts counted; bits do not depend on it."""
    documents, question = [tokens(3) for _ in range(40)], tokens(250)
    prefix = SeenParts.of_segments(HEAD, documents, 0)[0]
    passes = []

    class Counting:
        config, attention = network.config, network.attention

        def forward(self, tokens, positions, attend, logits, *, sink_positions=None, sink_rows=None):
            passes.append(len(tokens) if sink_rows is None else len(sink_rows))
            more = {"sink_positions": sink_positions, "sink_rows": sink_rows}
            return network.forward(tokens, positions, attend, logits, **more)

    want = key(InferenceEngine(network, num_blocks=200, prefill_chunk=20).complete(question, PARAMS, prefix=prefix))
    batch = BatchEngine(Counting(), num_blocks=300)
    cached = PrefixCachedEngine(InferenceEngine(Counting()), 200)
    assert key(InferenceEngine(Counting(), num_blocks=200).complete(question, PARAMS, prefix=prefix)) == want
    assert key(cached.complete(question, PARAMS, prefix=prefix)) == want
    assert key(batch.submit(question, PARAMS, prefix=prefix).completions()[0]) == want
    assert 2048 < max(passes) <= 4096


# -- windows ----------------------------------------------------------------------------------------------------------


def test_windows_keep_what_can_be_seen_alone(network):
    """A segment too far from all tokens takes no memory there, and is cached without its window."""
    model = Windowed(network, 30)
    (far, own), (near, linked) = segmented((0, 1, 3), 0), segmented((0, 1, 3), 16)
    cached = PrefixCachedEngine(InferenceEngine(model), 200)
    window = cached._pool.groups[1]
    for prefix, count in ((far, 1), (near, 3)):  # a document is near the links of the next one; the head is not
        cached.inner.reset(prefix)
        ids = window.part_ids(cached.inner._sequence.text.places[1])
        held = [window.cache.get_sequence(each).num_tokens for each in ids if each >= 0]
        assert len(held) == count
        assert max(held) < 30 + 16
    want = [key(InferenceEngine(model).complete(each, PARAMS, prefix=it)) for it, each in ((far, own), (near, linked))]
    options = {"head": HEAD, "segments": [DOCUMENTS[i] for i in (0, 1, 3)]}
    assert key(cached.complete(QUESTION, PARAMS, link=0, **options)) == want[0]
    window.pages.clear()
    found = cached.complete(QUESTION, PARAMS, link=0, **options)
    assert key(found) == want[0]
    assert [each.cached for each in found.segments[:2]] == [40, 33]
    assert found.segments[2].cached < 50
    window.pages.clear()
    found = cached.complete(QUESTION, PARAMS, **options)
    assert key(found) == want[1]
    assert all(each.cached < each.tokens for each in found.segments)
    cached.check()
    batch, cached = BatchEngine(model, num_blocks=200), PrefixCachedEngine(InferenceEngine(model), 400)
    documents = {"segments": options["segments"], "head": HEAD}
    for _ in range(2):  # they may stand anywhere, so their windows are kept
        uses = cached.prepare(**documents), batch.prepare(**documents).result()
    assert uses == ([(None, 40, 40), (None, 33, 33), (None, 50, 50)],) * 2
    found = cached.complete(QUESTION, PARAMS, **options), batch.submit(QUESTION, PARAMS, **options).completions()[0]
    assert [key(each) for each in found] == [want[1]] * 2
    assert all(each.cached == each.tokens for one in found for each in one.segments)


def test_windows_grow_for_many_segments(network):
    """As far as memory allows; a request for which that is too little is refused by itself."""
    model, documents = Windowed(network, 40), [tokens(45) for _ in range(9)]
    prefix, again = SeenParts.of_segments(HEAD, documents, 16)
    own = np.concatenate([again, QUESTION])
    want = key(InferenceEngine(model, num_blocks=90).complete(own, PARAMS, prefix=prefix))
    options = {"num_blocks": 90, "max_running": 1}
    batch = BatchEngine(model, **options)
    before = batch._pool.groups[1].cache.total_blocks
    waiting = batch.submit(own, PARAMS, prefix=prefix)
    run(batch)
    assert key(waiting.completions()[0]) == want
    assert before < batch._pool.groups[1].cache.total_blocks <= before + 90
    settled(batch)
    bytes_of_all = BatchEngine(model, **options).memory()["kv"]
    limited = BatchEngine(model, max_memory_bytes=bytes_of_all, **options)
    with pytest.raises(OutOfMemoryError):
        limited.submit(own, PARAMS, prefix=prefix)
    run(limited)
    settled(limited)


def test_windows_of_several_sizes_grow_within_one_limit(network):
    """A batch, and a prefix cache with a limit of its own, have no more bytes, all windows counted."""
    prefix, again = SeenParts.of_segments(HEAD, [tokens(45) for _ in range(9)], 16)
    own = np.concatenate([again, QUESTION])

    def bytes_of(engine):
        return getattr(engine, "inner", engine).memory()["kv"]

    for model in (Windowed(network, 40, 50), Windowed(network, 40)):

        def batch(limit, model=model):
            return BatchEngine(model, num_blocks=90, max_running=1, max_memory_bytes=limit)

        def cached(limit, model=model):
            inner = InferenceEngine(model, num_blocks=60, prefill_chunk=16)
            return PrefixCachedEngine(inner, 40, max_memory_bytes=limit)

        def ended(engine):
            try:
                if isinstance(engine, PrefixCachedEngine):
                    return bool(engine.complete(own, PARAMS, prefix=prefix))
                waiting = engine.submit(own, PARAMS, prefix=prefix)
            except OutOfMemoryError:
                return False
            run(engine)
            return waiting.finish_reason == "length"

        for make in (batch, cached):
            free = make(None)
            before = bytes_of(free)
            assert ended(free)
            more, found = bytes_of(free) - before, []
            assert more > 0
            for part in (0, 0.3, 0.6, 1.5):
                engine = make(before + int(more * part))
                found.append(ended(engine))
                assert bytes_of(engine) <= before + int(more * part)
                engine.check()
            assert found == sorted(found)
            assert (found[0], found[-1]) == (False, True)


def test_windows_refuse_what_is_seen_from_within_a_text(network):
    """Its newest tokens are not those that are seen."""
    within = SeenParts((SeenPart(HEAD, ((0, 5),)),), 10)
    behind = SeenParts((SeenPart(QUESTION, ((0, 9),), 0, within),), 40)
    assert key(InferenceEngine(network).complete(QUESTION, PARAMS, prefix=within))
    for prefix in (within, behind):
        for call in (InferenceEngine(Windowed(network, 12)).complete, BatchEngine(Windowed(network, 12)).submit):
            with pytest.raises(ValueError, match="prefix: expected parts that are seen from behind the ends"):
                call(QUESTION, PARAMS, prefix=prefix)


# -- requests ---------------------------------------------------------------------------------------------------------


def test_requests_have_segments(network):
    """`complete`, `generate`, `stream` and `submit` do what their value does; usage says what was cached."""
    segments = [DOCUMENTS[0].tolist(), Segment(DOCUMENTS[1], "b"), Segment(DOCUMENTS[2].tolist())]
    prefix, own = segmented((0, 1, 2), 16)
    options = {"head": HEAD, "segments": segments}
    engine = InferenceEngine(network)
    want = engine.complete(own, PARAMS, prefix=prefix)
    got = engine.complete(QUESTION, PARAMS, **options)
    assert key(got) == key(want)
    assert (want.segments, got.segments) == (None, [(None, 40, 0), ("b", 33, 0), (None, 10, 0)])
    assert engine.generate(QUESTION, PARAMS, **options) == want.tokens
    assert list(engine.stream(QUESTION, PARAMS, **options)) == want.tokens
    other = engine.complete(QUESTION, PARAMS, link=0, **options)
    prefix, own = segmented((0, 1, 2), 0)
    assert key(other) == key(engine.complete(own, PARAMS, prefix=prefix)) != key(want)
    plain = engine.complete(QUESTION, PARAMS, head=HEAD, segments=[])
    assert key(plain) == key(engine.complete(np.concatenate([HEAD, QUESTION]), PARAMS))
    cached = PrefixCachedEngine(InferenceEngine(network), 100)
    batch = BatchEngine(network, num_blocks=100)
    for each in (cached.prepare(segments[1:2], head=HEAD), batch.prepare(segments[1:2], head=HEAD, keep=9.0).result()):
        assert each == [("b", 33, 0)]
    assert batch.stats().pinned_blocks == (len(HEAD) + 33) // 16
    for number in range(2):
        found = cached.complete(QUESTION, PARAMS, **options), batch.submit(QUESTION, PARAMS, **options).completions()[0]
        uses = [(None, 40, number * 40), ("b", 33, 33), (None, 10, 0)]  # the last one runs again as a whole
        assert [key(each) for each in found] == [key(want)] * 2
        assert [each.segments for each in found] == [uses] * 2
    samples = batch.submit(QUESTION, PARAMS, n=2, **options).completions()
    assert [key(each) for each in samples] == [key(want)] * 2
    assert [each.segments for each in samples] == [uses] * 2
    assert cached.prepare(segments, head=HEAD) == batch.prepare(segments, head=HEAD).result() == [
        (None, 40, 40), ("b", 33, 33), (None, 10, 0),
    ]
    assert batch.submit(QUESTION, PARAMS, namespace="x", **options).completions()[0].segments[1].cached == 0


@pytest.mark.one_build
def test_what_does_not_go_with_segments_is_refused_by_name(network):
    segments, engine = [DOCUMENTS[0]], InferenceEngine(network)
    prefix = segmented((0,), 0)[0]

    def of(model=network, **options):
        return lambda: InferenceEngine(model, **options).generate(QUESTION, segments=segments, head=HEAD)

    for call, kind, words in (
        (of(eviction_policy=None, sparse_tokens=64), ValueError, "segments: expected None with sparse_tokens"),
        (of(Windowed(network, 12, chunked=True)), ValueError, "segments: expected None with layers that attend"),
        (of(StateNetwork("one of each")), ValueError, "segments: expected None with layers that keep a state"),
        (lambda: InferenceEngine(network, sparse_tokens=64).score(QUESTION, prefix=prefix), ValueError,
         "prefix: expected None with sparse_tokens"),
        (lambda: BatchEngine(network).submit(QUESTION, segments=segments, prompt_logprobs=0), ValueError,
         "segments: expected None with prompt_logprobs"),
        (lambda: engine.generate(QUESTION, segments=[[]]), ValueError, "segments: expected at least one token in each"),
        (lambda: engine.generate(QUESTION, segments="text"), TypeError, "segments: expected a list"),
        (lambda: engine.generate("text", segments=segments), ValueError, "prompt: expected token ids"),
        (lambda: engine.generate([], segments=segments), ValueError, "tokens: expected at least one"),
        (lambda: engine.generate(QUESTION, segments=segments, prefix=prefix), ValueError, "prefix: expected None"),
        (lambda: engine.generate(QUESTION, segments=segments, link=-1), ValueError, "link"),
        (lambda: engine.generate(np.ones(500, int), segments=segments), ValueError, "tokens: expected positions below"),
        (lambda: BatchEngine(network, num_blocks=5).submit(QUESTION, segments=segments), OutOfMemoryError, "blocks"),
        (lambda: SeenPart(HEAD, ((3, 3),)), ValueError, "ranges"),
        (lambda: SeenPart(HEAD, ((3, 4),), -1), ValueError, "offset"),
        (lambda: SeenParts((SeenPart(HEAD, ((0, 21),)),), 20), ValueError, "parts: expected tokens before"),
        (lambda: SeenParts((), 20, np.array([3, 3])), ValueError, "places: expected ascending"),
    ):
        with pytest.raises(kind, match=words):
            call()


def test_a_long_chain_of_edits_is_made_soon(monkeypatch):
    """Each edit looks at the texts before it once, and at the tokens of parts that it changes alone."""
    count, looked = 60, []
    of_key, whole = SeenPart.key, SeenPart.indices
    monkeypatch.setattr(SeenPart, "key", property(lambda part: looked.append(part) or of_key.fget(part)))
    value = None
    for number in range(count):
        value = SeenParts.of_edit(np.arange(10, dtype=np.uint32), [(10 * number + 2, 10 * number + 5)], value)
    assert len(looked) < 1.5 * count**2
    assert [part.ranges for part in value.parts] == [((0, 2), (5, 10))] * count
    assert [part.ends for part in value.parts] == [(10 * number, 10 * number + 9) for number in range(count)]
    assert all(part.behind is None or part.behind.num_tokens == 10 * at for at, part in enumerate(value.texts))
    monkeypatch.setattr(SeenPart, "indices", property(lambda part: looked.append(part) or whole.fget(part)))
    looked.clear()
    SeenParts.of_edit(np.arange(10, dtype=np.uint32), [(10 * count, 10 * count + 2)], value)
    assert sum(part.ends[0] < 10 * count for part in looked) <= 2 * count + 2


def test_names_tell_values_apart():
    """Each thing that K and V behind a value depend on is in its name; equal values have equal names."""
    values = [each for each, _ in [*requests()[:-1]]]
    part = SeenPart(HEAD, ((0, 9), (12, 21)))
    values += [
        SeenParts((part,), 21), SeenParts((SeenPart(HEAD, ((0, 10), (12, 21))),), 21), SeenParts((part,), 22),
        SeenParts((SeenPart(HEAD, part.ranges, 1),), 22), SeenParts((part,), 22, np.array([21])),
        SeenParts((SeenPart(HEAD, part.ranges, 0, None, 1),), 22, np.array([21])),
        SeenParts((SeenPart(HEAD, part.ranges, 40, values[-1]),), 200),
    ]
    linked = [each.name for each, _ in (segmented((0,), 0), segmented((0,), 16))]
    assert linked[0] == linked[1]  # nothing of one document runs again
    assert len({each.name for each in values}) == len(values) - 2
    assert {each.name for each, _ in edited()} <= {each.name for each in values}


def test_a_failure_leaves_nothing(network):
    """Where a document does not fit, or the network fails in it, all that was held is free again."""
    small = InferenceEngine(network, num_blocks=7)
    prefix, own = segmented((0, 1, 2), 16)
    with pytest.raises(OutOfMemoryError):
        small.complete(own, PARAMS, prefix=prefix)
    small.check()
    assert small.cache.free_block_count == 7
    assert len(small.generate(QUESTION, PARAMS)) == 5
    with pytest.raises(OutOfMemoryError):
        small.reset(prefix)
    assert (small.num_tokens, small.cache.free_block_count) == (0, 7)

    class Failing:
        config, attention, failing = network.config, network.attention, True

        def forward(self, tokens, positions, attend, logits, *, sink_positions=None, sink_rows=None):
            if self.failing and 200 in tokens:
                raise ZeroDivisionError
            return network.forward(
                tokens, positions, attend, logits, sink_positions=sink_positions, sink_rows=sink_rows
            )

    model, ill = Failing(), SeenParts.of_segments(HEAD, [DOCUMENTS[0], np.full(9, 200, np.uint32)])[0]
    batch = BatchEngine(model, num_blocks=100)
    waiting = [batch.submit(QUESTION, PARAMS, prefix=each) for each in (ill, segmented((3, 2), 0)[0])]
    run(batch)
    assert [each.finish_reason for each in waiting] == ["error", "length"]
    settled(batch)
    model.failing = False
    again = batch.submit(QUESTION, PARAMS, prefix=ill)
    cancelled = batch.submit(own, PARAMS, prefix=prefix)
    batch.step()
    cancelled.cancel()
    run(batch)
    settled(batch)
    assert again.finish_reason == "length"
