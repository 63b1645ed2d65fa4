"""The configuration that the entries of a GGUF file make, and the defaults of absent ones."""

from __future__ import annotations

import pytest
from gguf_files import ARRAY, BOOL, F32, I32, STRING, U32, array, entry, pack

from kvcache.errors import CheckpointError
from kvcache.gguf.file import GgufFile
from kvcache.networks.gguf_config import network_of

pytestmark = pytest.mark.one_build

SIZES = {
    "block_count": (U32, 2), "context_length": (U32, 8192), "embedding_length": (U32, 64),
    "feed_forward_length": (U32, 96), "attention.head_count": (U32, 8), "attention.key_length": (U32, 8),
    "attention.layer_norm_rms_epsilon": (F32, 1e-6),
}


@pytest.fixture
def parse(tmp_path):
    """Reads the configuration of a file of these entries, without tensors."""

    def parse(letters, **more):
        entries = [entry("general.architecture", STRING, letters)]
        for key, content in {**SIZES, **more}.items():
            entries.append(entry(f"{letters}.{key.replace('__', '.')}", *content))
        path = tmp_path / "x.gguf"
        path.write_bytes(pack(entries))
        return network_of(GgufFile(path), vocab_size=96)

    return parse


@pytest.mark.parametrize("letters", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "smollm3", "olmo2"])
def test_as_many_pairs_as_queries_without_their_entry(parse, letters):
    """The format's rule, whatever a Hugging Face folder of the family means without the key."""
    assert parse(letters).num_kv_heads == 8
    assert parse(letters, attention__head_count_kv=(U32, 2)).num_kv_heads == 2


def test_gemma2_has_a_window_without_its_entry(parse):
    assert parse("gemma2").windows == (4096, None)
    assert parse("gemma2", attention__sliding_window=(U32, 16)).windows == (16, None)
    assert parse("gemma3").windows == (None, None)


def test_soft_caps(parse):
    caps = {"attn_logit_softcapping": (F32, 2.0), "final_logit_softcapping": (F32, 3.0)}
    both = parse("gemma2", **caps)
    assert (both.attention_softcap, both.logit_softcap) == (2.0, 3.0)
    assert parse("gemma3", final_logit_softcapping=caps["final_logit_softcapping"]).logit_softcap == 3.0
    with pytest.raises(CheckpointError, match=r"^gemma3.attn_logit_softcapping: expected 0\.0, got 2\.0"):
        parse("gemma3", **caps)


def test_partial_rope(parse):
    assert parse("phi3", rope__dimension_count=(U32, 6)).rotary_dim == 6
    with pytest.raises(CheckpointError, match=r"^qwen2.rope.dimension_count: expected 8 as in every head, got 6"):
        parse("qwen2", rope__dimension_count=(U32, 6))


def test_ministral_3(parse):
    """`yarn_log_multiplier` is `mscale_all_dim` beside an `mscale` of 1; queries grow over the original context."""
    scaling = {"rope__scaling__type": (STRING, "yarn"), "rope__scaling__factor": (F32, 16.0)}
    scaling |= {"rope__scaling__original_context_length": (U32, 512), "rope__scaling__yarn_log_multiplier": (F32, 1.0)}
    rope = parse("mistral3", **scaling, attention__temperature_scale=(F32, 0.1)).rope
    assert (rope.kind, rope.attention_factor, rope.original_positions) == ("yarn", 1.0, 512)
    assert rope.query_growth == 0.1
    plain = parse("mistral3").rope
    assert (plain.kind, plain.query_growth) == ("default", 0.0)
    with pytest.raises(CheckpointError, match=r"^llama.attention.temperature_scale: expected 0\.0, got 0\.1"):
        parse("llama", attention__temperature_scale=(F32, 0.1))


def test_a_file_without_scaling_has_none(parse):
    """A folder of gpt-oss without the keys has YaRN."""
    experts = {"expert_count": (U32, 4), "expert_used_count": (U32, 2), "attention__sliding_window": (U32, 128)}
    assert parse("gpt-oss", **experts).rope.kind == "default"
    scaling = {"rope__scaling__type": (STRING, "yarn"), "rope__scaling__factor": (F32, 32.0)}
    rope = parse("gpt-oss", **experts, **scaling).rope
    assert (rope.kind, rope.factor, rope.truncate) == ("yarn", 32.0, False)


def test_granite_with_windows(parse):
    """One base for all layers that turn; llama.cpp turns all where the file does not say which."""
    pattern = {"attention__sliding_window_pattern": (ARRAY, array(BOOL, [False, True]))}
    options = {"rope__freq_base": (F32, 5e5), "attention__sliding_window": (U32, 16), "logit_scale": (F32, 2.0)}
    found = parse("granite_swa", **options, **pattern)
    assert (found.windows, found.rotated, found.rope.theta, found.window_rope) == ((None, 16), (True, True), 5e5, None)
    some = parse("granite_swa", **options, **pattern, attention__rope_pattern=(ARRAY, array(BOOL, [False, True])))
    assert some.rotated == (False, True)
    with pytest.raises(CheckpointError, match=r"sliding_window_pattern: expected a bool for each layer, and a window"):
        parse("granite_swa", **options)
    with pytest.raises(CheckpointError, match=r"^granite_swa.attention.rope_pattern: expected a bool for each of 2"):
        parse("granite_swa", **options, **pattern, attention__rope_pattern=(ARRAY, array(BOOL, [True])))


def test_mimo(parse):
    """The pattern in 0 and 1, a window as the tokens before one, KV heads of both kinds, values of another width."""

    def of(slides, pairs, **more):
        return parse("mimo2", **{
            "attention__sliding_window": (U32, 7), "attention__sliding_window_pattern": (ARRAY, array(I32, slides)),
            "attention__head_count_kv": (ARRAY, array(I32, pairs)), "attention__value_length": (U32, 6),
            "expert_count": (U32, 4), "expert_used_count": (U32, 2), "expert_feed_forward_length": (U32, 8),
            "attention.key_length": (U32, 12), "rope__dimension_count": (U32, 4),
        } | more)

    found = of([0, 1], [2, 4])
    assert (found.windows, found.value_scale, found.rotary_dim) == ((None, 8), 1.0, 4)
    assert [(size.num_kv_heads, size.value_dim) for size in found.sizes] == [(2, 6), (4, 6)]
    assert of([1, 1], [4, 4]).num_kv_heads == 2
    assert of([0, 1], [2, 4], attention__value_scale=(F32, 0.75)).value_scale == 0.75
    longer = of([0, 1, 1], [2, 4, 4], block_count=(U32, 3), nextn_predict_layers=(U32, 1))
    assert (longer.windows, longer.next_layers) == ((None, 8), 1)
    for slides, pairs, more, message in (
        ([0, 2], [2, 4], {}, "sliding_window_pattern: expected a bool for each of 2 layers"),
        ([0, 1], [2, 2], {}, "head_count_kv: expected 2 times as many in layers with a window as in others"),
        ([1, 1], [3, 3], {}, "head_count_kv: expected 2 times as many"),
        ([0, 1], [0, 0], {}, "head_count_kv: expected 2 times as many"),
        ([0, 1], [2, 4, 4], {}, "head_count_kv: expected a whole number for each of 2 layers"),
        ([0, 1], [2, 4], {"attention__head_count_kv": (STRING, "2")}, "head_count_kv: expected 2 times as many"),
        ([0, 1], [2, 4], {"attention__value_length": (U32, 13)}, "value_length: expected a positive whole number"),
        ([0, 1], [2, 4], {"attention__sliding_window": (U32, 0)}, "sliding_window: expected a window"),
        ([0, 1], [2, 4], {"attention__sliding_window_pattern": (U32, 2)}, "sliding_window_pattern: expected a bool"),
    ):
        with pytest.raises(CheckpointError, match=rf"^mimo2\.attention\.{message}"):
            of(slides, pairs, **more)
