"""Families that only transformers loads, by their own configurations in small: tokens are those of `DynamicCache`."""

import pytest
import torch
from transformers import CONFIG_MAPPING

from bench.transformers.families import try_family
from kvcache.integrations.transformers.attention import attention
from kvcache.integrations.transformers.dense import dense_attention

pytestmark = [pytest.mark.one_build, pytest.mark.filterwarnings("ignore")]

# Families whose attention asks for more than Q, K, V and a mask, beside some of plain attention.
SERVED = {
    "deepseek_v4": "dense",  # entries and biases beside K and the mask
    "git": "dense",  # adds the mask to scores itself
    "hy_v4": "dense",  # keys that the model chose
    "inkling2_text": "dense",  # sinks for each query, position biases
    "laguna": "packed",
    "mimo_v2_flash": "packed",
    "dory": "raises",  # copies layers of its cache
    "moshi": "partly",  # a cache with windows under a mask without
    "qwen3_5_text": "partly",
}


def test_families_of_transformers_alone():
    known = {kind: want for kind, want in SERVED.items() if kind in CONFIG_MAPPING}
    assert {kind: try_family(kind).kind for kind in known} == known
    assert known


def test_keys_that_a_model_chose():
    """`indices` leaves keys out of what the mask shows; under no mask and none of the future, too."""
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, 6, 8, generator=draw) for heads in (4, 2, 2))
    indices = torch.stack([torch.randperm(6, generator=draw)[:3] for _ in range(12)]).view(2, 6, 3)
    indices[..., 0] = torch.arange(6)  # each sees itself
    seen = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
    for row in range(2):
        for query in range(6):
            seen[row, 0, query, indices[row, query]] = True
    seen &= torch.ones(6, 6, dtype=torch.bool).tril()
    plain = {"scaling": 0.3, "dropout": 0.0, "softcap": None, "s_aux": None, "is_causal": True, "position_bias": None}
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    want = dense_attention(module, q, k, v, seen, **plain)
    for mask in (None, torch.ones(6, 6).tril().log().expand(2, 1, 6, 6)):
        got = attention(module, q, k, v, mask, scaling=0.3, is_causal=True, indices=indices)[0]
        torch.testing.assert_close(got, want)


def test_numbers_of_an_unknown_name_raise():
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match=r"attention: expected numbers that .* knows, got 'tilt' of Module; set_attn"):
        attention(torch.nn.Module(), q, q, q, None, tilt=torch.zeros(1))
