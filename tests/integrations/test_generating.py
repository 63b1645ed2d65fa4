"""`generate` in every mode: the tokens and logits of `DynamicCache`."""

from functools import cache as once

import pytest
import torch
from hf_models import dynamic, left_padded, make_model

from kvcache.integrations.transformers import PagedCache

pytestmark = pytest.mark.one_build

KINDS = ("llama", "mistral", "gemma3_text", "gpt_oss")
IDS, MASK = left_padded([21, 13, 5], 21)
ALONE = torch.cat([IDS[:1, :12], IDS[:1, 3:12], IDS[:1, 3:9]], 1)  # repeats itself, for prompt lookup

# What is asked of generate -> the arguments; of one row where transformers takes one alone.
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 4},
    "several beams": {"num_beams": 4, "num_return_sequences": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "chunks of the prompt": {"prefill_chunk_size": 4},
    "guidance": {"guidance_scale": 1.5},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "ends of some rows": {"eos_token_id": list(range(3, 30, 2))},
}
ALONE_MODES = {
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "sampled prompt lookup": {"prompt_lookup_num_tokens": 3, "do_sample": True},
    "an assistant": {"assistant_model": "same"},
    "another assistant": {"assistant_model": "other"},
}


@once
def model_of(kind, seed=0):
    model = make_model(kind, seed=seed, vocab_size=61)
    model.generation_config.eos_token_id = None
    return model


def run(model, cache, ids, mask, **mode):
    torch.manual_seed(5)
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, **({"max_new_tokens": 12, "do_sample": False} | mode),
        output_logits=True, return_dict_in_generate=True, pad_token_id=0,
    )


def same(got, want):
    assert torch.equal(got.sequences, want.sequences)
    for ours, theirs in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.max() - theirs.min()))


@pytest.mark.parametrize("mode", [*MODES, *ALONE_MODES])
@pytest.mark.parametrize("kind", KINDS)
def test_mode(kind, mode):
    model, (ids, mask) = model_of(kind), (IDS, MASK) if mode in MODES else (ALONE, torch.ones_like(ALONE))
    options = dict((MODES | ALONE_MODES)[mode])
    native = "sdpa" if model._supports_sdpa else "eager"
    if options.get("assistant_model"):
        options["assistant_model"] = model_of(kind, {"same": 0, "other": 1}[options["assistant_model"]])
    model.set_attn_implementation(native)
    want = run(model, dynamic(model), ids, mask, **options)
    model.set_attn_implementation("kvcache")
    cache = PagedCache(model.config, dtype="f32")
    try:
        got = run(model, cache, ids, mask, **options)
    finally:
        model.set_attn_implementation(native)
    same(got, want)
    assert cache.stats().dense_calls == {}
    assert cache.stats().packed_calls > 0
    cache.check()


@pytest.mark.parametrize("kind", KINDS)
def test_several_turns(kind):
    """A conversation goes on in one cache, with padding and without."""
    model, more = model_of(kind), torch.randint(3, 61, (3, 7), generator=torch.Generator().manual_seed(2))
    for mask in (MASK, torch.ones_like(MASK)):
        runs = []
        for implementation in ("sdpa" if model._supports_sdpa else "eager", "kvcache"):
            model.set_attn_implementation(implementation)
            paged = implementation == "kvcache"
            cache, ids, seen = PagedCache(model.config, dtype="f32") if paged else dynamic(model), IDS, mask
            for _ in range(3):
                out = run(model, cache, ids, seen, max_new_tokens=5)
                runs.append(out)
                ids = torch.cat([out.sequences, more], 1)
                seen = torch.cat([seen, torch.ones(3, ids.shape[1] - seen.shape[1], dtype=seen.dtype)], 1)
            if paged:
                cache.check()
                assert cache.stats().dense_calls == {}
        for got, want in zip(runs[3:], runs[:3], strict=True):
            same(got, want)


@pytest.mark.parametrize("dtype", ["f16", "q8", "q6", "q5", "q4", "q3", "q2"])
def test_formats_answer_alike(dtype):
    """Every storage format generates; the finer it is, the nearer its logits are."""
    model = model_of("llama")
    model.set_attn_implementation("sdpa")
    want = run(model, dynamic(model), IDS, MASK, max_new_tokens=1).logits[0]
    model.set_attn_implementation("kvcache")
    cache = PagedCache(model.config, dtype=dtype)
    got = run(model, cache, IDS, MASK, max_new_tokens=1).logits[0]
    model.set_attn_implementation("sdpa")
    error = float((got - want).abs().max() / (want.max() - want.min()))
    assert error < {"f16": 1e-3, "q8": 0.02, "q6": 0.05, "q5": 0.1, "q4": 0.2, "q3": 0.4, "q2": 0.8}[dtype]
    assert error > 0
    cache.check()
