"""Random models of many architectures: the logits are those of `DynamicCache`, and attention reads packed blocks."""

from contextlib import suppress

import pytest
import torch
from hf_models import DENSE, PACKED, difference, dynamic, left_padded, logits_of, make_model
from transformers import AutoConfig, AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache

from kvcache.integrations.transformers import PagedCache

pytestmark = [
    pytest.mark.one_build,
    pytest.mark.filterwarnings("ignore:kvcache. attention made K and V dense"),
]

IDS, MASK = left_padded([21, 13, 4], 21)


def test_there_are_many():
    assert len(PACKED) >= 45


@pytest.mark.parametrize("kind", PACKED)
def test_prefill_and_steps_read_packed_blocks(kind):
    model = make_model(kind)
    want = logits_of(model, dynamic(model), IDS, MASK, 15)
    model.set_attn_implementation("kvcache")
    cache = PagedCache(model.config, dtype="f32")
    assert difference(logits_of(model, cache, IDS, MASK, 15), want, MASK) < 1e-5
    stats = cache.stats()
    assert stats.dense_calls == {}
    assert stats.packed_calls >= 2 * 7
    cache.check()


@pytest.mark.parametrize("kind", DENSE)
def test_other_attention_gets_dense_states(kind):
    """Models that compute attention on their own, or have layers of other kinds: right, and counted."""
    model = make_model(kind)
    want = logits_of(model, dynamic(model), IDS, MASK, 15)
    with suppress(ValueError):  # models without registered attention
        model.set_attn_implementation("kvcache")
    cache = PagedCache(model.config, dtype="f32")
    assert difference(logits_of(model, cache, IDS, MASK, 15), want, MASK) < 1e-5
    assert sum(cache.stats().dense_calls.values()) > 0
    cache.check()


SMALL = {"d_model": 32, "vocab_size": 61, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
HALVES = {
    f"{half}_{name}": value
    for half in ("encoder", "decoder")
    for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 40))
}
ENCODER_DECODERS = {
    "bart": HALVES,
    "marian": HALVES | {"decoder_vocab_size": 61},
    "mbart": HALVES,
    "m2m_100": HALVES,
    "pegasus": HALVES,
    "t5": {"d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4},
}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kind", ENCODER_DECODERS)
def test_encoder_and_decoder(kind, beams):
    """Self and cross attention, over padded inputs; T5 alone has position biases, which take the dense way."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **(SMALL | ENCODER_DECODERS[kind]))
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    ids, mask = left_padded([11, 7, 3], 11)
    ids, mask = ids.flip(1), mask.flip(1)  # encoders are padded on the right

    def run(cache):
        return model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=9, num_beams=beams, do_sample=False,
            output_logits=True, return_dict_in_generate=True, eos_token_id=None,
        )

    want = run(EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config)))
    model.set_attn_implementation("kvcache")
    caches = PagedCache(config, dtype="f32"), PagedCache(config, dtype="f32")
    got = run(EncoderDecoderCache(*caches))
    assert torch.equal(got.sequences, want.sequences)
    for ours, theirs in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    for cache in caches:
        cache.check()
        assert set(cache.stats().dense_calls) <= ({"position biases"} if kind == "t5" else set())
        assert kind == "t5" or cache.stats().packed_calls >= 2 * 9
