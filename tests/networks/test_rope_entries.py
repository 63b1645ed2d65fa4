"""The rotary embeddings of a config.json: two spellings, two kinds of layers, keys that nothing reads."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from configs import GEMMA3, GPT_OSS, LLAMA, MINISTRAL3, OLMO3, PHI3, parse
from seeded_weights import seeded

from kvcache.engine import ModelConfig
from kvcache.errors import CheckpointError

pytestmark = pytest.mark.one_build


def test_two_rotary_embeddings():
    """In the layouts of transformers 4 and 5; the scaling of the older one is that of the layers without a window."""
    default = parse(GEMMA3)
    assert (default.rope.theta, default.window_rope.theta) == (1e6, 1e4)
    older = parse(GEMMA3, rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling={"type": "linear", "factor": 8.0})
    newer = parse(
        GEMMA3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    )
    assert older == newer
    assert (newer.rope.kind, newer.rope.factor, newer.window_rope.kind) == ("linear", 8.0, "default")
    assert parse(OLMO3).window_rope is None
    assert parse(OLMO3, rope_scaling={"rope_type": "linear", "factor": 2.0}).window_rope.kind == "default"
    with pytest.raises(CheckpointError, match="one kind for all layers"):
        parse(OLMO3, rope_parameters={"full_attention": {}, "chunked_attention": {}})
    for kind in ("full_attention", "sliding_attention"):
        assert parse(GEMMA3, rope_parameters={kind: None}) == default
        for wrong in (5, [], "", False):
            with pytest.raises(CheckpointError, match=rf"^rope_parameters.{kind}: expected an object, got "):
                parse(GEMMA3, rope_parameters={"full_attention": {}, "sliding_attention": {}, kind: wrong})


def test_one_entry_for_two_rotary_embeddings():
    """OLMo 3 has one base for both. Gemma 3 has two: an entry for one of them does not say which."""
    flat = parse(OLMO3, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    assert (flat.rope.theta, flat.window_rope) == (1e4, None)
    assert flat == parse(OLMO3, rope_theta=1e4)
    stretched = parse(OLMO3, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    assert (stretched.rope.kind, stretched.window_rope.kind) == ("linear", "default")
    assert (stretched.rope.theta, stretched.window_rope.theta) == (1e4, 1e4)
    assert parse(GEMMA3, rope_parameters={"rope_type": "default", "rope_theta": 1000000}) == parse(GEMMA3)
    for wrong in ({"rope_theta": 1e5}, {"rope_type": "linear", "factor": 4.0}, {"rope_type": "default", "factor": []}):
        with pytest.raises(CheckpointError, match="rope_parameters: expected full_attention and sliding_attention, go"):
            parse(GEMMA3, rope_parameters=wrong)


def test_entries_of_two_names():
    """Both names for the same embedding are read; of two that differ neither is a guess that the other overrules."""
    plain, stretched = {"rope_type": "default", "rope_theta": 10000}, {"type": "linear", "factor": 4.0}
    for empty in (None, {}):
        assert parse(LLAMA, rope_parameters=empty, rope_scaling=stretched).rope.factor == 4.0
        assert parse(LLAMA, rope_parameters={**plain, **stretched}, rope_scaling=empty).rope.kind == "default"
    same = {"rope_type": "linear", "factor": 4, "rope_theta": 1e4}
    assert parse(LLAMA, rope_parameters=same, rope_scaling=stretched) == parse(LLAMA, rope_scaling=stretched)
    for base, parameters in ((LLAMA, plain), (GEMMA3, {"full_attention": {}, "sliding_attention": {}})):
        with pytest.raises(
            CheckpointError, match=r"^rope_scaling: expected none beside rope_parameters, got .*'linear'"
        ):
            parse(base, rope_parameters=parameters, rope_scaling=stretched)


UNREAD = [
    ({"llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta: expected 0, or no such key, got 0.1"),
    ({"attn_factor": 2}, "attn_factor: expected 1, or no such key, got 2"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1, or no such key, got 0.5"),
    ({"by_night": True}, "by_night: expected no such key, got True"),
    ({"alpha": 1000.0}, "alpha: expected 0, or no such key, got 1000.0"),
]


@pytest.mark.parametrize(("more", "message"), UNREAD)
def test_keys_of_rope_that_nothing_reads(more, message):
    """They would change the result if this library knew them: each is refused by its name, at every place."""
    yarn = {"rope_type": "yarn", "factor": 4.0}
    for name in ("rope_parameters", "rope_scaling"):
        with pytest.raises(CheckpointError, match=f"^{name}.{message}"):
            parse(LLAMA, **{name: yarn | more})
    for kind in ("full_attention", "sliding_attention"):
        with pytest.raises(CheckpointError, match=f"^rope_parameters.{kind}.{message}"):
            parse(GEMMA3, rope_parameters={"full_attention": {}, "sliding_attention": {}, kind: more})


def test_keys_of_rope_without_an_effect():
    """Values that change nothing, remarks, and keys of another kind, which transformers ignores too."""
    yarn = {"rope_type": "yarn", "factor": 4.0}
    silent = {"llama_4_scaling_beta": 0.0, "attn_factor": 1, "partial_rotary_factor": 1.0, "alpha": None}
    remarks = {"mrope_section": [2, 3, 3], "max_position_embeddings": 512, "finetuned": True, "low_freq_factor": 4}
    assert parse(LLAMA, rope_parameters=yarn | silent | remarks) == parse(LLAMA, rope_parameters=yarn)


def test_queries_that_grow_with_their_position():
    """Ministral 3 alone has them; without the keys they are those of the published networks."""
    rope = parse(MINISTRAL3, max_position_embeddings=262144).rope
    assert (rope.kind, rope.theta, rope.factor, rope.attention_factor) == ("yarn", 1e6, 16.0, 1.0)
    assert (rope.original_positions, rope.query_growth) == (16384, 0.1)
    assert rope.query_factors(np.array([0, 16383])) is None
    found = rope.query_factors(np.array([16383, 16384, 32767, 32768, 262143]))
    expected = [1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3), 1 + 0.1 * math.log(16)]
    np.testing.assert_allclose(found, expected, rtol=1e-7)
    flat = parse(MINISTRAL3, rope_parameters={"rope_type": "default", "rope_theta": 1e4}).rope
    assert flat == parse(LLAMA).rope
    assert flat.query_factors(np.array([10**6])) is None
    growing = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.5}
    with pytest.raises(CheckpointError, match=r"original_max_position_embeddings: expected a positive .*, got nothing"):
        parse(MINISTRAL3, rope_parameters=growing)
    rope = parse(MINISTRAL3, rope_parameters=growing | {"original_max_position_embeddings": 8}).rope
    np.testing.assert_allclose(rope.query_factors(np.array([7, 8])), [1, 1 + 0.5 * math.log(2)], rtol=1e-7)


def test_rope_of_gpt_oss():
    """Without the keys it is that of the published networks."""
    stated = {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096, "rope_theta": 150000.0,
    }
    default = parse(GPT_OSS)
    assert default == parse(GPT_OSS, rope_parameters=stated) == parse(GPT_OSS, rope_scaling=None, rope_theta=150000)
    assert (default.rope.kind, default.rope.factor, default.rope.truncate) == ("yarn", 32.0, False)
    assert parse(GPT_OSS, rope_scaling={"rope_type": "default"}).rope.kind == "default"


def test_partial_rotary_factor():
    assert parse(PHI3).rotary_dim == 16
    assert parse(PHI3, partial_rotary_factor=0.5).rotary_dim == 8
    assert parse(PHI3, rope_parameters={"partial_rotary_factor": 0.25}).rotary_dim == 4
    assert parse(LLAMA, partial_rotary_factor=0.5) == parse(LLAMA)  # a key that only Phi-3 has
    for wrong, message in (
        (1.5, "expected an even share of 16 channels, got 1.5"),
        (0.2, "expected an even share of 16 channels, got 0.2"),
        (0.01, "expected channels to turn, got 0.01 of 16"),
        ("half", "expected an even share of 16 channels, got 'half'"),
    ):
        with pytest.raises(CheckpointError, match=f"partial_rotary_factor: {message}"):
            parse(PHI3, partial_rotary_factor=wrong)


def test_longrope():
    phi3 = {**PHI3, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 6, "long_factor": [2] * 6}
    config = parse(phi3, partial_rotary_factor=0.75, rope_scaling={"type": "su", **factors})
    rope = config.rope
    assert (rope.kind, rope.factor, rope.original_positions, config.rotary_dim) == ("longrope", 8.0, 64, 12)
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(8) / math.log(64)))
    assert [rope.regime_of(n) for n in (0, 64, 65)] == [0, 0, 1]
    np.testing.assert_allclose(rope.frequencies(12, 1), rope.frequencies(12) / 2)
    same = parse(phi3, rope_parameters={"partial_rotary_factor": 0.75, "rope_type": "longrope", **factors})
    assert same == config
    stated = parse(phi3, rope_scaling={"type": "longrope", "attention_factor": 1.5, **factors}, head_dim=12)
    assert stated.rope.attention_factor == 1.5


def test_yarn_attention_factor():
    def factor(**rope):
        return parse(LLAMA, rope_parameters={"rope_type": "yarn", "factor": 4.0, **rope}).rope.attention_factor

    assert factor() == pytest.approx(0.1 * math.log(4) + 1)
    assert factor(attention_factor=1.5) == 1.5
    expected = (0.1 * 0.7 * math.log(4) + 1) / (0.1 * math.log(4) + 1)
    assert factor(mscale=0.7, mscale_all_dim=1.0) == pytest.approx(expected)


def test_yarn_factor_from_the_context():
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 64}
    assert parse(LLAMA, rope_parameters=rope).rope.factor == 8.0


def test_bases_of_layers():
    """Granite with windows: a base for each kind of layer, 0 for none; absent ones are those of the whole network."""
    config = json.loads((seeded("granite_swa") / "config.json").read_text())
    found = ModelConfig.from_dict(config)
    assert (found.rope.theta, found.window_rope.theta) == (500000.0, 10000.0)
    assert (found.rotated, found.windows) == ((False, True, True, True, True), (None, 20, 20, 20, None))
    plain = ModelConfig.from_dict(config | {"layer_rope_theta": None, "layer_types": None})
    assert (plain.rope.theta, plain.window_rope, plain.rotated) == (10000.0, None, (True,) * 5)
    for bases, message in (
        ([1e4, 1e4, 2e4, 1e4, 1e4], "one base for each kind of layer, got [10000.0, 10000.0, 20000.0, 10000.0,"),
        ([1e4] * 4, "a number for each of 5 layers, got [10000.0, 10000.0, 10000.0, 10000.0]"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(f"layer_rope_theta: expected {message}")):
            ModelConfig.from_dict(config | {"layer_rope_theta": bases})
    for name, value, expected in (("layer_types", 3, "a list, got 3"), ("rope_parameters", [1], "an object, got [1]")):
        with pytest.raises(CheckpointError, match=re.escape(f"{name}: expected {expected}")):
            ModelConfig.from_dict(config | {name: value})
