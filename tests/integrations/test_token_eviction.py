"""Eviction of tokens: `PagedCache(eviction_policy=)` keeps what a dense twin keeps, row by row and layer by layer."""

import numpy as np
import pytest
import torch
from hf_models import dynamic, left_padded, logits_of, make_model

from kvcache import EvictionPolicy, InferenceEngine
from kvcache.integrations.transformers import PagedCache
from kvcache.integrations.transformers.hf import AttentionInterface, AttentionMaskInterface, sdpa_mask
from kvcache.policies import TOVA, AdaKV, ExpectedAttention, KeyDiff, SnapKV
from kvcache.texts.budgets import survivors

pytestmark = pytest.mark.one_build


class Twin:
    """Dense attention over DynamicCache that forgets tokens as a policy says: masks them from then on."""

    def __init__(self, policy, budget, layers):
        shares = policy.shares(budget * layers, range(layers))
        self.rules = [policy.rule(shares[layer]) for layer in range(layers)]
        self.by_score, self.alive, self.scores = policy.by_score, {}, {}

    def __call__(self, module, query, key, value, attention_mask, scaling, **kwargs):
        layer, (batch, heads, n, _), total = module.layer_idx, query.shape, key.shape[2]
        key, value = (states.repeat_interleave(heads // states.shape[1], 1) for states in (key, value))
        alive = self.alive.setdefault(layer, [[] for _ in range(batch)])
        scores = self.scores.setdefault(layer, [{} for _ in range(batch)])
        out = torch.zeros(batch, n, heads, value.shape[3])
        for row in range(batch):
            real = attention_mask[row, 0, :, :] if attention_mask is not None else torch.ones(n, total).tril(total - n)
            new = [t for t in range(total - n, total) if real[t - total + n, t]]
            alive[row] = alive[row] + new
            if not alive[row]:
                continue
            at = torch.tensor(alive[row])
            logits = query[row] @ key[row][:, at].transpose(1, 2) * scaling
            visible = at[None] <= torch.arange(total - n, total)[:, None]
            weights = torch.softmax(logits.masked_fill(~visible, -torch.inf), -1).nan_to_num(0.0)
            out[row] = (weights @ value[row][:, at]).transpose(0, 1)
            mass = weights[:, [t - total + n for t in new]].sum((0, 1)).double().numpy() if new else np.zeros(len(at))
            known = np.array([scores[row].get(t, 0.0) for t in alive[row]]) + mass
            if len(at) > self.rules[layer].limit:
                kept = survivors(known / (total - at.numpy()), self.rules[layer], self.by_score)
                alive[row], known = [alive[row][i] for i in kept], known[kept]
            scores[row] = dict(zip(alive[row], known, strict=True))
        return out, None


POLICIES = {
    "window": EvictionPolicy.SlidingWindow(6, 2),
    "h2o": EvictionPolicy.H2O(0.5),
    "pyramid": EvictionPolicy.PyramidKV(4, 0.5),
}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_like_a_dense_twin(policy, steps):
    policy, model, (ids, mask) = POLICIES[policy], make_model("llama"), left_padded([40, 23, 9], 40)
    twin = Twin(policy, 8, 4)
    AttentionInterface.register("evicting_twin", twin)
    AttentionMaskInterface.register(
        "evicting_twin", lambda *args, **kw: sdpa_mask(*args, **(kw | {"allow_is_causal_skip": False}))
    )
    model.set_attn_implementation("evicting_twin")
    want = logits_of(model, dynamic(model), ids, mask, 20, steps)
    model.set_attn_implementation("kvcache")
    cache = PagedCache(model.config, dtype="f32", block_size=4, eviction_policy=policy, kv_budget=8)
    got = logits_of(model, cache, ids, mask, 20, steps)
    for layer in range(4):
        positions = [each.tolist() for each in cache.layers[layer].rows.positions]
        assert positions == twin.alive[layer], layer
    assert float((got - want)[mask.bool()].abs().max()) < 1e-4
    stats = cache.stats()
    assert stats.evicted_tokens == 4 * (40 + 23 + 9) - sum(len(row) for rows in twin.alive.values() for row in rows)
    assert stats.dense_calls == {}
    cache.check()
    rows = torch.tensor([2, 0, 0])
    cache.reorder_cache(rows)
    assert [each.tolist() for each in cache.layers[1].rows.positions] == [twin.alive[1][row] for row in rows]
    cache.check()


def test_generate_within_a_budget():
    """Memory stays, whatever the length; windows of a model stay as they are."""
    for kind in ("llama", "gemma3_text"):
        model, (ids, mask) = make_model(kind, "kvcache"), left_padded([30, 12], 30)
        cache = PagedCache(model.config, dtype="q8", eviction_policy=EvictionPolicy.H2O(), kv_budget=24)
        model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=90, do_sample=False, eos_token_id=None
        )
        assert cache.stats().num_tokens == 119
        for layer, rows in ((layer.index, layer.rows) for layer in cache.layers):
            assert rows.stored().max() <= (24 if not cache.is_sliding[layer] else 5 + 16)
        assert cache.stats().evicted_tokens > 0
        cache.check()
        cache.reset()
        assert cache.stats().used_blocks == 0


def test_speculation_evicts_what_was_accepted():
    """While the past is recorded, eviction waits for `crop`."""
    model, (ids, mask) = make_model("llama", "kvcache"), left_padded([30], 30)
    policy = EvictionPolicy.SlidingWindow(12, 4)
    plain, recording = (PagedCache(model.config, dtype="f32", eviction_policy=policy) for _ in range(2))
    recording.activate_past_recording()
    logits_of(model, plain, ids[:, :26], mask[:, :26], 20, 3)
    for start, stop in ((0, 20), (20, 23), (23, 26)):
        draft = torch.cat([ids[:, start:stop], torch.full((1, 4), 7)], 1)
        with torch.no_grad():
            model(draft, past_key_values=recording, position_ids=torch.arange(start, stop + 4)[None])
        recording.crop(-4)
        recording.check()
    for ours, theirs in zip(recording.layers, plain.layers, strict=True):
        assert ours.rows.positions[0].tolist() == theirs.rows.positions[0].tolist()


@pytest.mark.parametrize(
    ("reason", "implementation", "settings", "given"),
    [
        ("the operation aten", "sdpa", {}, {}),
        ("the operation aten", "eager", {}, {}),
        ("a mask of another pattern", "kvcache", {}, {"attention_mask": torch.ones(1, 1, 1, 31, dtype=torch.bool)}),
        ("heads of more than 512 channels", "kvcache", {"head_dim": 520, "num_hidden_layers": 1}, {}),
    ],
)
@torch.no_grad()
def test_dense_attention_is_refused(reason, implementation, settings, given):
    """It would evict nothing, and read evicted tokens as zeros."""
    model, (ids, _) = make_model("llama", "kvcache", **settings), left_padded([31], 31)
    policy = EvictionPolicy.SlidingWindow(6, 2)
    cache = PagedCache(model.config, dtype="f32", eviction_policy=policy, kv_budget=8)
    if not settings:
        model(ids[:, :30], past_key_values=cache)
    model.set_attn_implementation(implementation)
    message = rf"eviction_policy: expected attn_implementation='kvcache' .*, got dense attention \({reason}"
    with pytest.raises(ValueError, match=message):
        model(ids[:, 30:], past_key_values=cache, **given)
    assert cache.stats().dense_calls == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_budget": 8}, "kv_budget: expected None without an eviction_policy, got 8"),
        ({"eviction_policy": EvictionPolicy.H2O()}, "eviction_policy: expected a kv_budget"),
        ({"eviction_policy": EvictionPolicy.PyramidKV(9), "kv_budget": 8}, r"expected PyramidKV\(4\)"),
        ({"eviction_policy": EvictionPolicy.StreamingLLM(4, 8)}, "expected SlidingWindow, H2O or PyramidKV"),
        ({"eviction_policy": "H2O", "kv_budget": 8}, "eviction_policy: expected"),
    ],
)
def test_refusals(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        PagedCache(make_model("llama").config, **options)


POLICIES_IN_PYTHON = {"snapkv": SnapKV(6, 3), "tova": TOVA(), "keydiff": KeyDiff()}


@pytest.mark.parametrize("name", POLICIES_IN_PYTHON)
def test_a_policy_in_python_is_that_of_an_engine(name, tmp_path):
    """Alone, and as rows of a batch of which one has left padding: the tokens that an engine keeps, and its answers."""
    model = make_model("llama", head_dim=16)
    model.save_pretrained(tmp_path)
    policy, (ids, mask) = POLICIES_IN_PYTHON[name], left_padded([40, 23], 40)
    model.set_attn_implementation("kvcache")
    cache = PagedCache(model.config, "f32", block_size=4, eviction_policy=policy, kv_budget=10)
    out = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    for row, pad in enumerate((0, 17)):
        engine = InferenceEngine.from_pretrained(
            tmp_path, eviction_policy=policy, kv_budget=10, block_size=4, activations="exact"
        )
        engine.prefill_from_pos(ids[row, pad:].numpy(), 0)
        for token in out[row, 40:47].tolist():
            engine.decode_step(token, engine.num_tokens)
        for layer in range(4):
            mine = cache.layers[layer].rows.positions[row] - pad
            assert mine.tolist() == engine.kept_positions(layer).tolist()
    cache.check()
    cache.crop(-1)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.check()


def test_policies_that_a_cache_refuses():
    config = make_model("llama").config
    for policy, message in (
        (AdaKV(TOVA()), "expected a policy for all heads of a layer, got AdaKV with per_head; an InferenceEng"),
        (ExpectedAttention(), "expected a policy without of_network, for a cache does not see the network, go"),
        (SnapKV, "expected an EvictionPolicy or an object with `keep`, got the class SnapKV"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^eviction_policy: {message}"):
            PagedCache(config, eviction_policy=policy, kv_budget=10)
