"""Any 2D mask, with and without windows: the logits of `DynamicCache`, holes and right padding included."""

import pytest
import torch
from hf_models import difference, dynamic, left_padded, logits_of, make_model

from kvcache.integrations.transformers import PagedCache
from kvcache.integrations.transformers.masks import PatternMask, make_mask

pytestmark = pytest.mark.one_build

KINDS = ("llama", "mistral", "gemma2", "gpt_oss")
IDS = left_padded([20] * 3, 20)[0]


def random_mask(seed, rows, total):
    """Rows with padding on either side and holes; each has a token among the first ones and at the end."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, total, generator=draw) > torch.rand(rows, 1, generator=draw) * 0.7
    left, right = torch.randint(0, 5, (2, rows), generator=draw)
    at = torch.arange(total)[None]
    return (mask & (at >= left[:, None]) & (at < total - right[:, None])).long()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_random_holes(kind, seed):
    """Queries at masked tokens see what they see with `DynamicCache`, unless they see nothing."""
    model, total = make_model(kind), 23
    ids, mask = left_padded([total] * 4, total, seed=seed)[0], random_mask(seed, 4, total)
    prefill, steps = 1 + 5 * seed % 19, 1 + seed % 3
    want = logits_of(model, dynamic(model), ids, mask, prefill, steps)
    model.set_attn_implementation("kvcache")
    cache = PagedCache(model.config, dtype="f32", block_size=4)
    got = logits_of(model, cache, ids, mask, prefill, steps)
    window = getattr(model.config, "sliding_window", None) or total
    sees = torch.stack([mask[:, max(0, at + 1 - window) : at + 1].any(1) for at in range(total)], 1)
    assert difference(got, want, sees) < 1e-5
    assert cache.stats().dense_calls == {}
    cache.check()


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_leave_windows(kind):
    """Sliding layers give back what is far behind; full ones keep all."""
    model = make_model(kind)
    ids, mask = left_padded([90, 55], 90)
    want = logits_of(model, dynamic(model), ids, mask, 50)
    model.set_attn_implementation("kvcache")
    cache = PagedCache(model.config, dtype="f32", block_size=8)
    assert difference(logits_of(model, cache, ids, mask, 50), want, mask) < 1e-5
    for kind_of_layer, rows in cache.state.rows.items():
        if kind_of_layer.window is None:
            assert rows.stored().tolist() == [90, 55]
        else:
            assert (rows.stored() <= kind_of_layer.window - 1 + 8).all()
    cache.check()


def test_without_a_cache():
    """The registered attention alone: training and scoring, with gradients."""
    for kind in KINDS:
        model, (ids, mask) = make_model(kind), left_padded([9, 5], 9)
        grads = []
        for implementation in ("sdpa" if model._supports_sdpa else "eager", "kvcache"):
            model.set_attn_implementation(implementation)
            model.zero_grad()
            logits = model(ids, attention_mask=mask, use_cache=False).logits
            logits[mask.bool()].square().mean().backward()
            grads.append(next(model.parameters()).grad.clone())
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_a_mask_becomes_dense_where_it_is_computed_with(window):
    from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[1, :3] = False
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    given = {"mask_function": function, "attention_mask": padding, "local_size": window}
    mask = make_mask(2, 5, 9, 4, 0, **given)
    want = sdpa_mask(2, 5, 9, 4, 0, allow_is_causal_skip=False, **given)
    assert type(mask) is PatternMask
    assert (mask.causal, mask.window) == (True, window)
    assert tuple(mask.shape) == (2, 1, 5, 9)
    assert torch.equal(~mask, ~want)
    assert torch.equal(mask[:, :, 2:] & True, want[:, :, 2:])
    assert type(mask[:, :, 2:]) is PatternMask
    assert torch.equal(mask[:, :, :2], want[:, :, :2])
    assert torch.equal(mask[1], want[1])


def test_no_mask_where_nothing_is_masked():
    every = torch.ones(2, 9, dtype=torch.bool)
    assert make_mask(2, 1, 9, 8, 0, attention_mask=every) is None
    assert make_mask(2, 9, 9, 0, 0) is None
    assert type(make_mask(2, 5, 9, 4, 0)) is PatternMask
    assert make_mask(2, 5, 9, 4, 0, mask_function=lambda *at: at[3] == at[2]).dtype == torch.bool


def test_masks_of_the_caller_take_the_dense_way():
    """A 4D mask is obeyed; the counter and one warning say that it is slow."""
    model, (ids, _) = make_model("llama"), left_padded([9, 9], 9)
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril() & (torch.rand(9) > 0.4)
    mask |= torch.eye(9, dtype=torch.bool)
    with torch.no_grad():
        want = model(ids, attention_mask=mask, past_key_values=dynamic(model)).logits
        model.set_attn_implementation("kvcache")
        cache = PagedCache(model.config, dtype="f32")
        with pytest.warns(UserWarning, match="a mask of another pattern"):
            got = model(ids, attention_mask=mask, past_key_values=cache).logits
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
        assert cache.stats().dense_calls == {"a mask of another pattern than causal, window and padding": 4}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_crop_of_padded_rows(kind, seed):
    """Back to before the first token of a row, or into holes, and on with other tokens under another mask."""
    model, total, cut = make_model(kind), 20, 9
    ids, mask = left_padded([20, 4, 14], total) if seed % 2 else (IDS, random_mask(seed, 3, total))
    other, later = left_padded([total] * 3, total, seed=9)[0], mask.clone()
    later[:, cut:] = random_mask(seed + 7, 3, total - cut) if seed > 1 else 1
    native = model.config._attn_implementation
    runs = []
    for cache in (dynamic(model), PagedCache(model.config, dtype="f32", block_size=4)):
        model.set_attn_implementation("kvcache" if isinstance(cache, PagedCache) else native)
        cache.activate_past_recording()
        logits_of(model, cache, ids[:, :12], mask[:, :12], 12)
        cache.crop(cut - 12)
        positions = (later.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            given = {"position_ids": positions[:, cut:], "attention_mask": later}
            runs.append(model(other[:, cut:], past_key_values=cache, **given).logits)
    cache.check()
    assert cache.stats().dense_calls == {}
    window = getattr(model.config, "sliding_window", None) or total
    sees = torch.stack([later[:, max(0, at + 1 - window) : at + 1].any(1) for at in range(cut, total)], 1)
    assert difference(runs[1], runs[0], sees) < 1e-5
