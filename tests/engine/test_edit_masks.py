"""Edits by masks: tokens behind an edit do not see what it clears, whatever ran before, and wherever."""

import numpy as np
import pytest
from chat_folders import chat_folder
from tier_stores import GIVEN
from tool_talks import TEMPLATE, TOOLS, at, result, said, uses
from windowed_networks import Windowed

from kvcache import BatchEngine, EvictionPolicy, InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.engine.edit_masks import EditMasks, seen_by
from kvcache.engine.edits import Clearing, ToolUse
from kvcache.tiers import DirectoryTier, Tiers

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytestmark = pytest.mark.one_build

GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=6, logprobs=4)
MASK = {"type": TOOLS, "trigger": at("tool_uses", 3), "keep": at("tool_uses", 2), "kvcache_mode": "mask"}
# Uses of one, two and three clearings; results and thoughts of other lengths.
TALKS = [uses("aaaa", 9), uses("aaaaa", 14), uses("abaaba", 30, thoughts=True)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return chat_folder(tmp_path_factory.mktemp("masks") / "x", TEMPLATE)


@pytest.fixture(scope="module")
def engine(path):
    return InferenceEngine.from_pretrained(path, dtype="f32")


def whole(engine, prompt, messages):
    """All tokens of a prompt."""
    ids = engine.apply_chat_template(messages, tokenize=True)
    assert prompt.tokens == ids[0 if prompt.prefix is None else prompt.prefix.num_tokens :]
    return ids


# -- where -------------------------------------------------------------------------------------------------------


def test_the_tokens_of_cleared_results_are_not_seen(engine):
    """Each of the earlier turns has made its edits at the same tokens."""
    messages, seen = TALKS[2], []
    for length in range(3, len(messages) + 1, 2):
        prompt = engine.chat_prompt(messages[:length], [MASK])
        ids = whole(engine, prompt, messages[:length])
        cleared = max(0, (length - 1) // 2 - 2) if length > 7 else 0
        assert [each["cleared_tool_uses"] for each in prompt.applied_edits] == [cleared] * bool(cleared)
        assert prompt.original_tokens == len(ids)
        if not cleared:
            assert prompt.prefix is None
            continue
        ends = engine.tokenizer.decode(ids[: prompt.prefix.num_tokens]).rpartition("step ")[2]
        assert ends == f"{length // 2 - 1}", "the edit is made behind the text of the last answer"
        gone = np.setdiff1d(np.arange(prompt.prefix.num_tokens), prompt.prefix.positions(0))
        assert prompt.applied_edits[0]["cleared_input_tokens"] == len(gone)
        text = engine.tokenizer.decode([ids[place] for place in gone])
        wanted = [each["content"].strip() for each in messages if each["role"] == "tool"][:cleared]
        assert "".join(text.split()) == "".join("".join(wanted).split())
        values = [part.behind.name for part in prompt.prefix.parts if part.behind is not None]
        assert values == [each.name for each in seen]
        seen.append(prompt.prefix)


def test_a_result_without_a_text_is_none_to_mask(engine):
    blank = {"role": "tool", "content": " \n"}
    messages = [{"role": "user", "content": "go"}, said("ok"), blank, result("c", 5), said("so")]
    used, write = [ToolUse("a", number, None) for number in (2, 3)], engine.apply_chat_template
    assert EditMasks(messages, [Clearing(3, used[:1])]).chain([], 30) == []
    masks = EditMasks(messages, [Clearing(4, used)])
    ends = masks.located(write, write(messages))
    assert write(messages)[ends[0] : ends[1]] == "c w w w w"
    assert write(messages)[: ends[2]].endswith("ok")
    assert masks.chain([5, 9, 3], 30) == [(9, [(5, 9)])], "what is new and cleared at once has been seen"
    assert masks.chain([5, 9, 9], 30) == [(9, [(5, 9)])]
    assert masks.chain([9, 9, 9], 30) == [], "a span of no token"
    assert masks.chain([5, 9, 9], 9) == [(8, [(5, 9)])], "the last token runs"
    assert masks.chain([0, 1, 1], 1) == [], "a prompt of one token has nothing behind an edit"


def test_a_template_that_changes_results_has_no_masks(tmp_path):
    other = TEMPLATE.replace("| trim", "| length")
    changing = InferenceEngine.from_pretrained(chat_folder(tmp_path / "x", other))
    with pytest.raises(ValueError, match="messages: expected a chat template that writes results of tools as they are"):
        changing.chat(TALKS[0], GREEDY, edits=[MASK])
    with pytest.raises(ValueError, match="edits: expected none by masks, which `chat`"):
        changing.apply_chat_template(TALKS[0], edits=[MASK])


def test_what_has_no_masks_says_so(path):
    for options in ({"eviction_policy": EvictionPolicy.SlidingWindow(300, 10)}, {"sparse_tokens": 64, "dtype": "q4"}):
        other = InferenceEngine.from_pretrained(path, **options)
        with pytest.raises(ValueError, match=r"^kvcache_mode: expected recompute with .*, got 'mask'"):
            other.chat(TALKS[0], GREEDY, edits=[MASK])


# -- bits --------------------------------------------------------------------------------------------------------


def masked_logits(model, tokens, chain, window=None):
    """The last logits by attention in float64 under a mask: `chain` has the tokens of edits, and what they clear.

    All layers but the first have the window.
    """
    count = len(tokens)
    mask = np.tril(np.ones((count, count), bool))
    for place, spans in chain:
        for start, stop in spans:
            mask[place:, start:stop] = False
    distances = np.subtract.outer(np.arange(count), np.arange(count))

    def attend(layer, queries, keys, values):
        shared = queries.shape[1] // keys.shape[1]
        keys, values = (np.repeat(each.astype(np.float64), shared, 1) for each in (keys, values))
        scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(queries.shape[2])
        scores = np.where(mask if window is None or not layer else mask & (distances < window), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, values).astype(np.float32)

    return model.forward(np.array(tokens, np.uint32), np.arange(count), attend, "last")[-1]


def test_attention_is_that_of_a_mask(engine):
    """Tokens before an edit have seen what it clears, and keep their K and V; those behind it do not see it."""
    for messages in TALKS:
        prompt = engine.chat_prompt(messages, [MASK])
        ids, chain, value = whole(engine, prompt, messages), [], prompt.prefix
        values = [part.behind for part in value.parts if part.behind is not None] + [value]
        known = set()
        for each in values:
            gone = set(range(each.num_tokens)) - set(each.positions(0).tolist()) - known
            known |= gone
            chain.append((each.num_tokens, [(place, place + 1) for place in sorted(gone)]))
        assert seen_by(ids, chain).name == value.name
        engine.reset(value)
        got = engine.prefill_from_pos(prompt.tokens, value.num_tokens)
        np.testing.assert_allclose(got, masked_logits(engine.model, ids, chain), atol=2e-4)
        for window in (20, 300):
            other = InferenceEngine(Windowed(engine.model, window))
            other.reset(value)
            near = other.prefill_from_pos(prompt.tokens, value.num_tokens)
            np.testing.assert_allclose(near, masked_logits(engine.model, ids, chain, window), atol=2e-4)
            other.check()
        engine.reset()
        assert np.abs(engine.prefill_from_pos(ids, 0) - got).max() > 1e-2


def asked(engine, messages, edits=(MASK,), **more):
    prompt = engine.chat_prompt(messages, edits)
    return engine.complete(prompt.tokens, GREEDY, prefix=prompt.prefix, **more)


def turns(engine, messages):
    """The answers to each turn of a conversation."""
    return [asked(engine, messages[:length]) for length in range(3, len(messages) + 1, 2)]


def same(got, wanted):
    assert (got.tokens, got.logprobs) == (wanted.tokens, wanted.logprobs)


BATCHES = [(400, None), (40, None), (400, "tier"), (400, "tier")]  # blocks, and a folder of cached blocks


def test_a_cold_text_has_the_bits_of_a_warm_one(path, tmp_path):
    """In any format, pieces, batch and history, from tiers, and where texts wait for memory."""
    for dtype, more in (("f32", {}), ("f16", {}), ("q8", {}), ("q4", {})):
        cold = InferenceEngine.from_pretrained(path, dtype=dtype, prefill_chunk=100, **more)
        wanted = [asked(cold, messages) for messages in TALKS]
        last = [asked(cold, messages[:-2]) for messages in TALKS]
        small = InferenceEngine.from_pretrained(path, dtype=dtype, prefill_chunk=7, **more)
        same(asked(small, TALKS[1]), wanted[1])
        warm = PrefixCachedEngine(InferenceEngine.from_pretrained(path, dtype=dtype, **more), max_cache_blocks=400)
        warm.complete(whole(warm, warm.chat_prompt(TALKS[1]), TALKS[1]), GREEDY)  # the text without an edit
        same(turns(warm, TALKS[1])[-1], wanted[1])
        answer = warm.chat(TALKS[1], GREEDY, edits=[MASK])
        assert ([*answer] and answer.tokens) == wanted[1].tokens
        assert answer.prompt_tokens == len(whole(warm, warm.chat_prompt(TALKS[1]), TALKS[1]))
        assert answer.prompt_tokens - 17 < answer.cached_tokens <= answer.prompt_tokens
        assert answer.applied_edits
        more |= {"dtype": dtype}
        for blocks, folder in BATCHES[: 4 if dtype == "f16" else 1]:
            tiers = None if folder is None else Tiers([DirectoryTier(tmp_path / folder, 1 << 30, **GIVEN)])
            with BatchEngine.from_pretrained(path, num_blocks=blocks, tiers=tiers, **more) as batch:
                prompts = [batch.chat_prompt(messages, [MASK]) for messages in TALKS]
                prompts += [batch.chat_prompt(messages[:-2], [MASK]) for messages in TALKS]
                requests = [batch.submit(each.tokens, GREEDY, prefix=each.prefix) for each in prompts]
                for request, want in zip(requests, wanted + last, strict=True):
                    same(request.completions()[0], want)
                batch.check()
            if tiers is not None:
                tiers.close()


def test_texts_with_other_edits_share_nothing(engine):
    """Not even where the tokens behind the edits are the same."""
    cached = PrefixCachedEngine(engine, max_cache_blocks=400)
    edits = [MASK, MASK | {"exclude_tools": ["b"]}, MASK | {"keep": at("tool_uses", 3)}]
    messages = [*TALKS[2], said("long " * 40), {"role": "user", "content": "and"}]
    wanted = [asked(engine, messages, [edit]) for edit in edits]
    assert len({str(each.logprobs) for each in wanted}) == 3
    for _ in range(2):
        for edit, want in zip(edits, wanted, strict=True):
            prompt, before = cached.chat_prompt(messages, [edit]), cached.inner.prefill_token_count
            same(asked(cached, messages, [edit]), want)
            ran = cached.inner.prefill_token_count - before
            assert ran >= len(prompt.tokens) if _ == 0 else ran < 17


def test_nothing_runs_again_behind_a_clearing(engine):
    """A turn runs its own tokens, and at most a block beside each part."""
    messages, cached = TALKS[2], PrefixCachedEngine(engine, max_cache_blocks=400)
    sizes = [len(engine.apply_chat_template(messages[:n], tokenize=True)) for n in range(3, len(messages) + 1, 2)]
    ran = []
    for length in range(3, len(messages) + 1, 2):
        before = cached.inner.prefill_token_count
        asked(cached, messages[:length])
        ran.append(cached.inner.prefill_token_count - before)
    new = np.diff([0, *sizes])
    assert all(count <= size + 2 * 16 for count, size in zip(ran, new, strict=True))
